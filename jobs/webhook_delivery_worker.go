package jobs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/riverqueue/river"

	"afluente/db"
	"afluente/eventlog"
	"afluente/eventlog/event"
	"afluente/jobs/webhook"
)

const (
	// recordTimeout is how long the outcome of an attempt may take to be recorded; one
	// try takes recordTryTimeout at most, and there is a recordPause between them.
	recordTimeout    = 50 * time.Second
	recordTryTimeout = 10 * time.Second
	recordPause      = time.Second

	// beginTimeout is how long a transaction may take in which attempts begin; their
	// leases run already.
	beginTimeout = 10 * time.Second

	// deliveryLease is how long an attempt may last before it counts as lost.
	deliveryLease = beginTimeout + webhook.Timeout + recordTimeout

	// breakerOpensAt failures in a row keep all deliveries of a subscription back,
	// but for one at a time; disablesAt of them disable it, as do unsafeDisablesAt
	// refused addresses.
	breakerOpensAt   = 3
	disablesAt       = 10
	unsafeDisablesAt = 3

	// rateBurst is how many deliveries may run ahead of the rate.
	rateBurst = 20

	// secretRecheck is how long a delivery waits for a secret that opens.
	secretRecheck = 5 * time.Minute

	// slotRecheck is how long it waits at least for others to end.
	slotRecheck = time.Second

	// turnWait is how long a delivery waits with its worker for others of its
	// subscription to begin, before it is put off.
	turnWait = 3 * time.Second
)

// errNoTurn says that a delivery waited for others in vain.
var errNoTurn = errors.New("no turn to begin yet")

// WebhookDeliveryArgs asks for the next attempt at a delivery, when it is due.
type WebhookDeliveryArgs struct {
	DeliveryID     uuid.UUID `json:"delivery_id"`
	SubscriptionID uuid.UUID `json:"subscription_id"`
}

func (WebhookDeliveryArgs) Kind() string { return "webhook-delivery-worker" }

func (WebhookDeliveryArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "webhook-deliveries"}
}

func webhookDelivery(d Deps) eventlog.Declaration {
	return eventlog.Job(&webhookDeliveryWorker{webhooks: d.Webhooks})
}

// webhookDeliveryWorker posts an event to a subscription. The row of the delivery
// is the truth; the job is its timer, and snoozes until the next attempt. An
// attempt takes its number, in a transaction, before the POST, so that every POST
// counts whatever becomes of the process; its outcome is recorded afterwards.
// At no time are two POSTs of a delivery under way.
//
// A delivery that is given up cancels its job, which makes it a dead letter;
// retrying that job gives the delivery all its attempts anew.
type webhookDeliveryWorker struct {
	river.WorkerDefaults[WebhookDeliveryArgs]

	webhooks *Webhooks
}

// Timeout is such that no POST outlasts its lease, and that River finds the jobs of a
// killed process within two minutes.
func (w *webhookDeliveryWorker) Timeout(*river.Job[WebhookDeliveryArgs]) time.Duration {
	return deliveryLease
}

func (w *webhookDeliveryWorker) Work(ctx context.Context, job *river.Job[WebhookDeliveryArgs]) error {
	next, err := w.webhooks.attempt(ctx, job.Args, job.ID)
	if err != nil {
		return err
	}
	if err := next.result(); err != nil {
		return err
	}
	return river.RecordOutput(ctx, next.state)
}

// attempt makes the next attempt at a delivery, if it is due and this is its job.
func (w *Webhooks) attempt(ctx context.Context, args WebhookDeliveryArgs, jobID int64) (next, error) {
	begun, err := w.begin(ctx, args, jobID)
	if err != nil {
		return next{}, fmt.Errorf("begin delivery %s: %w", args.DeliveryID, err)
	}
	attempt := begun.attempt
	if attempt == nil {
		return begun.next, nil
	}
	attempt.answer, attempt.err = w.Sender.Send(ctx, attempt.request)
	attempt.outcome = webhook.Classify(ctx, attempt.err)
	// Also when the job was told to stop: what was sent was sent.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTimeout)
	defer cancel()
	for {
		do, err := w.finish(ctx, args, attempt)
		if err == nil {
			return do, nil
		}
		if !passes(err) || !sleep(ctx, recordPause) {
			return next{}, fmt.Errorf("record delivery %s: %w", args.DeliveryID, err)
		}
	}
}

// passes tells whether what failed with an error of the database or of the way to it
// may succeed a little later, as it is.
func passes(err error) bool {
	refusal, refused := errors.AsType[*pgconn.PgError](err)
	return !refused || pgerrcode.IsConnectionException(refusal.Code) || pgerrcode.IsTransactionRollback(refusal.Code) ||
		pgerrcode.IsInsufficientResources(refusal.Code) || pgerrcode.IsOperatorIntervention(refusal.Code)
}

// sleep tells whether a time has passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// next is what the job of a delivery does next.
type next struct {
	state string        // of the delivery
	wait  time.Duration // for the next attempt, of one that is pending or sending
	dead  error         // why there is none
}

// result is what River is told.
func (n next) result() error {
	switch {
	case n.dead != nil:
		return river.JobCancel(n.dead)
	case n.state == "pending" || n.state == "sending":
		return river.JobSnooze(n.wait)
	default:
		return nil
	}
}

// deliveryAttempt is one attempt and what came of it.
type deliveryAttempt struct {
	delivery  uuid.UUID
	number    int32
	startedAt time.Time // by the database's clock
	manual    bool
	request   webhook.Request

	answer  webhook.Answer
	err     error
	outcome webhook.Outcome
}

// beginning is a job that asks whether its delivery may be attempted.
type beginning struct {
	args  WebhookDeliveryArgs
	jobID int64
}

// begun is the answer: an attempt to be made, or what to do instead.
type begun struct {
	attempt *deliveryAttempt
	next    next
}

// begin takes the number of the next attempt and returns what to send, or tells what
// to do instead. Deliveries of a subscription that ask at the same time share a
// transaction, since each would wait for the subscription's row.
func (w *Webhooks) begin(ctx context.Context, args WebhookDeliveryArgs, jobID int64) (begun, error) {
	patient, cancel := context.WithTimeoutCause(ctx, turnWait, errNoTurn)
	defer cancel()
	answer, err := w.beginnings.Do(patient, args.SubscriptionID, beginning{args, jobID}, w.beginAll)
	if errors.Is(err, errNoTurn) {
		return begun{next: next{state: "pending", wait: eventlog.Jitter(slotRecheck)}}, nil
	}
	return answer, err
}

// beginAll is begin for deliveries of one subscription.
func (w *Webhooks) beginAll(ctx context.Context, asks []beginning) ([]begun, error) {
	ids := make([]uuid.UUID, len(asks))
	for i, ask := range asks {
		ids[i] = ask.args.DeliveryID
	}
	limited, cancel := context.WithTimeout(ctx, beginTimeout)
	defer cancel()
	var answers []begun
	err := pgx.BeginFunc(limited, w.Pool, func(tx pgx.Tx) error {
		turn, err := w.lock(limited, tx, asks[0].args.SubscriptionID, ids)
		if err != nil {
			return err
		}
		answers, err = turn.begin(limited, asks)
		return err
	})
	if err != nil && limited.Err() != nil {
		return nil, fmt.Errorf("%w: %w", errNoTurn, limited.Err())
	}
	return answers, err
}

// turn is one look at deliveries to a subscription, all locked.
type turn struct {
	webhooks *Webhooks
	tx       pgx.Tx
	queries  *db.Queries
	s        db.WebhookSubscription
	now      time.Time
	sending  int64 // how many are under way

	deliveries map[uuid.UUID]*db.WebhookDelivery // those that are there
	postponed  []*db.WebhookDelivery             // to be written, with s.NextSlotAt
}

// lock returns a turn of deliveries to a subscription, without any if that was deleted.
func (w *Webhooks) lock(ctx context.Context, tx pgx.Tx, subscription uuid.UUID, ids []uuid.UUID) (*turn, error) {
	t := &turn{webhooks: w, tx: tx, queries: db.New(tx), deliveries: make(map[uuid.UUID]*db.WebhookDelivery)}
	var err error
	if t.s, err = t.queries.LockSubscription(ctx, subscription, nil); errors.Is(err, pgx.ErrNoRows) {
		return t, nil
	} else if err != nil {
		return nil, fmt.Errorf("lock subscription: %w", err)
	}
	rows, err := t.queries.LockDeliveries(ctx, subscription, ids)
	if err != nil {
		return nil, fmt.Errorf("lock deliveries: %w", err)
	}
	for _, row := range rows {
		t.deliveries[row.WebhookDelivery.ID] = &row.WebhookDelivery
		t.now, t.sending = row.Now, row.Sending
	}
	return t, nil
}

// starting is a delivery that may be attempted, and where to put the attempt.
type starting struct {
	delivery *db.WebhookDelivery
	answer   *begun
}

// begin answers those who ask, in their order, and writes what follows.
func (t *turn) begin(ctx context.Context, asks []beginning) ([]begun, error) {
	answers := make([]begun, len(asks))
	var ready []starting
	for i, ask := range asks {
		d, ok := t.deliveries[ask.args.DeliveryID]
		if !ok { // its subscription was deleted
			answers[i].next.state = "cancelled"
			if err := t.queries.CancelDelivery(ctx, ask.args.DeliveryID); err != nil {
				return nil, fmt.Errorf("cancel: %w", err)
			}
			continue
		}
		do, ok, err := t.take(ctx, d, ask.jobID)
		if err != nil {
			return nil, err
		}
		answers[i].next = do
		if ok {
			ready = append(ready, starting{d, &answers[i]})
		}
	}
	if err := t.start(ctx, ready); err != nil {
		return nil, err
	}
	return answers, t.writePostponed(ctx)
}

// take tells whether a delivery may be attempted now, and what to do if not. One that
// may counts as under way from then on.
func (t *turn) take(ctx context.Context, d *db.WebhookDelivery, jobID int64) (do next, ready bool, err error) {
	if d.JobID != nil && *d.JobID != jobID {
		return next{state: "superseded"}, false, nil // another job is its timer
	}
	switch d.State {
	case "dead": // and here is its job: it was retried
		err := t.queries.ResetDeliveries(ctx, db.ResetDeliveriesParams{
			Ids: []uuid.UUID{d.ID}, Trigger: triggerManual, MoreAttempts: webhookAttempts,
		})
		if err != nil {
			return next{}, false, fmt.Errorf("begin anew: %w", err)
		}
		d.Trigger, d.MaxAttempts, d.NextAttemptAt = triggerManual, d.Attempts+webhookAttempts, t.now
	case "sending":
		if d.LeaseUntil != nil && d.LeaseUntil.After(t.now) { // the job runs twice
			return next{state: "sending", wait: d.LeaseUntil.Sub(t.now)}, false, nil
		}
		// The process died meanwhile. What it had begun counts.
	case "pending":
	default:
		return next{state: d.State}, false, nil
	}
	if !t.s.Enabled {
		d.State = "held"
		return next{state: d.State}, false, t.queries.HoldDelivery(ctx, d.ID)
	}
	if d.Attempts >= d.MaxAttempts { // lost with its process
		do, err := t.giveUp(ctx, d, "lost", errors.New("the last attempt was cut off, its outcome is unknown"))
		return do, false, err
	}
	if wait := d.NextAttemptAt.Sub(t.now); wait > 0 {
		return next{state: "pending", wait: wait}, false, nil
	}
	if from, wait := t.takeSlot(d); wait {
		return t.postpone(d, from), false, nil
	}
	d.State, d.LeaseUntil = "sending", new(t.now.Add(deliveryLease))
	t.sending++
	return next{}, true, nil
}

// first tells whether no attempt was made since somebody asked for a delivery.
func first(d *db.WebhookDelivery) bool {
	return d.Trigger == triggerManual && d.Attempts == d.MaxAttempts-webhookAttempts
}

// takeSlot asks the breaker, the concurrency and the rate of the subscription whether
// a delivery must wait, and since when. What a person asked for passes the breaker and
// the rate.
func (t *turn) takeSlot(d *db.WebhookDelivery) (from time.Time, wait bool) {
	if open := t.s.OpenUntil; open != nil && open.After(t.now) && !first(d) {
		return *open, true
	}
	if t.sending >= t.maxSending() {
		return t.now.Add(slotRecheck), true
	}
	if d.HasSlot || first(d) {
		return time.Time{}, false
	}
	at, nextSlot := t.slot(t.now)
	if at.After(t.now) {
		return t.now, true
	}
	t.s.NextSlotAt = &nextSlot
	return time.Time{}, false
}

func (t *turn) maxSending() int64 {
	if t.s.Probing {
		return 1
	}
	return int64(t.s.MaxConcurrent)
}

// slot returns when the rate lets the next delivery go, not before a time, and
// what next_slot_at is then. That is a generic cell rate algorithm: each delivery
// moves the time by its share of a second, and may be a burst ahead of it.
func (t *turn) slot(from time.Time) (at, nextSlot time.Time) {
	share := time.Second / time.Duration(t.s.RatePerSecond)
	slot := from
	if t.s.NextSlotAt != nil && t.s.NextSlotAt.After(from) {
		slot = *t.s.NextSlotAt
	}
	at = slot.Add(-(rateBurst - 1) * share)
	if at.Before(from) {
		at = from
	}
	return at, slot.Add(share)
}

// postpone lets a delivery wait for a time of its own, so that those who wait
// for the same thing do not wake all at once, and never more often than the rate.
func (t *turn) postpone(d *db.WebhookDelivery, from time.Time) next {
	at, nextSlot := t.slot(from)
	d.State, d.LeaseUntil, d.NextAttemptAt, d.HasSlot = "pending", nil, at, true
	t.s.NextSlotAt = &nextSlot
	t.postponed = append(t.postponed, d)
	return next{state: "pending", wait: max(at.Sub(t.now), time.Millisecond)}
}

// writePostponed writes the deliveries that were postponed.
func (t *turn) writePostponed(ctx context.Context) error {
	if len(t.postponed) == 0 {
		return nil
	}
	params := db.PostponeDeliveriesParams{SubscriptionID: t.s.ID, NextSlotAt: t.s.NextSlotAt}
	for _, d := range t.postponed {
		params.Ids = append(params.Ids, d.ID)
		params.NextAttemptAts = append(params.NextAttemptAts, d.NextAttemptAt)
	}
	if err := t.queries.PostponeDeliveries(ctx, params); err != nil {
		return fmt.Errorf("postpone: %w", err)
	}
	return nil
}

// start takes the numbers of attempts for those that are ready and makes their
// requests, or tells why there are none.
func (t *turn) start(ctx context.Context, ready []starting) error {
	if len(ready) == 0 {
		return nil
	}
	signing, err := t.webhooks.signing(ctx, t.tx, t.s)
	if errors.Is(err, errSecret) { // nothing goes out unsigned
		if err := t.queries.SetSecretFault(ctx, new(err.Error()), t.s.ID); err != nil {
			return fmt.Errorf("set fault: %w", err)
		}
		for _, r := range ready {
			r.answer.next = t.postpone(r.delivery, t.now.Add(secretRecheck))
		}
		return nil
	} else if err != nil {
		return err
	}
	if t.s.SecretFault != nil {
		if err := t.queries.SetSecretFault(ctx, nil, t.s.ID); err != nil {
			return fmt.Errorf("clear fault: %w", err)
		}
	}
	params := db.StartAttemptsParams{SubscriptionID: t.s.ID, NextSlotAt: t.s.NextSlotAt, Lease: deliveryLease}
	for _, r := range ready {
		params.Ids = append(params.Ids, r.delivery.ID)
	}
	started, err := t.queries.StartAttempts(ctx, params)
	if err != nil {
		return fmt.Errorf("start attempts: %w", err)
	}
	bodies := make(map[uuid.UUID][]byte, len(started))
	for _, row := range started {
		bodies[row.ID] = row.Body
	}
	for _, r := range ready {
		if body, ok := bodies[r.delivery.ID]; ok {
			r.answer.attempt = t.newAttempt(r.delivery, signing, body)
		} else if r.answer.next, err = t.giveUp(ctx, r.delivery, "config_error", errors.New("what it sends was deleted")); err != nil {
			return err
		}
	}
	return nil
}

// newAttempt returns the attempt at a delivery that was just started.
func (t *turn) newAttempt(d *db.WebhookDelivery, signing signing, body []byte) *deliveryAttempt {
	number := d.Attempts + 1
	return &deliveryAttempt{
		delivery:  d.ID,
		number:    number,
		startedAt: t.now,
		manual:    first(d),
		request: webhook.Request{
			URL:        t.s.Url,
			EventID:    d.EventID.String(),
			EventType:  d.EventType,
			DeliveryID: d.ID.String(),
			Attempt:    int(number),
			Secrets:    signing.secrets,
			Legacy:     signing.legacy,
			Headers:    signing.headers,
			Body:       body,
			At:         t.now,
		},
	}
}

// finish records the outcome of an attempt, and then what follows from it for its
// subscription, if anything does, in one transaction. Attempts that end at the same
// time share a round trip.
func (w *Webhooks) finish(ctx context.Context, args WebhookDeliveryArgs, attempt *deliveryAttempt) (do next, err error) {
	ctx, cancel := context.WithTimeout(ctx, recordTryTimeout)
	defer cancel()
	delivered, err := w.endings.Do(ctx, struct{}{}, attempt, w.finishAll)
	if err != nil {
		return next{}, fmt.Errorf("finish attempt: %w", err)
	}
	if delivered {
		return next{state: "succeeded"}, nil
	}
	err = pgx.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		turn, err := w.lock(ctx, tx, args.SubscriptionID, []uuid.UUID{args.DeliveryID})
		if err != nil {
			return err
		}
		d, ok := turn.deliveries[args.DeliveryID] // or it was deleted with its subscription
		if !ok || d.State != "sending" || d.Attempts != attempt.number {
			do.state = "superseded" // the lease ran out and another attempt began
			return nil
		}
		do, err = turn.settle(ctx, d, attempt)
		return err
	})
	return do, err
}

// finishAll records the outcomes of attempts and tells which of them needed no more.
func (w *Webhooks) finishAll(ctx context.Context, attempts []*deliveryAttempt) ([]bool, error) {
	var params db.FinishAttemptsParams
	for _, a := range attempts {
		failure := ""
		if a.err != nil {
			failure = eventlog.Scrub(a.err.Error())
		}
		params.DeliveryIds = append(params.DeliveryIds, a.delivery)
		params.Numbers = append(params.Numbers, a.number)
		params.DurationsMs = append(params.DurationsMs, int32(a.answer.Duration.Milliseconds()))
		params.Classes = append(params.Classes, a.outcome.Class)
		params.StatusCodes = append(params.StatusCodes, int32(a.answer.Status))
		params.Errors = append(params.Errors, failure)
		params.Remotes = append(params.Remotes, a.answer.Remote)
		params.Answers = append(params.Answers, a.answer.Text)
		params.Successes = append(params.Successes, a.outcome.Action == webhook.Succeed)
	}
	ctx, cancel := context.WithTimeout(ctx, recordTryTimeout)
	defer cancel()
	ids, err := db.New(w.Pool).FinishAttempts(ctx, params)
	if err != nil {
		return nil, err
	}
	delivered := make([]bool, len(attempts))
	for i, a := range attempts {
		delivered[i] = slices.Contains(ids, a.delivery)
	}
	return delivered, nil
}

// settle moves the breaker and a delivery on.
func (t *turn) settle(ctx context.Context, d *db.WebhookDelivery, a *deliveryAttempt) (do next, err error) {
	wasOpen := t.s.OpenUntil != nil && t.s.OpenUntil.After(t.now)
	before := t.breaker()
	reason := t.judge(a)
	if after := t.breaker(); after != before {
		if err := t.queries.SetBreaker(ctx, after); err != nil {
			return next{}, fmt.Errorf("set breaker: %w", err)
		}
	}
	if wasOpen && t.s.OpenUntil == nil { // by a delivery that somebody sent by hand
		if err := t.queries.HurryDeliveries(ctx, t.s.ID); err != nil {
			return next{}, fmt.Errorf("let deliveries go: %w", err)
		}
	}
	state, at := t.after(d, a)
	if state == "pending" && (reason != "" || !t.s.Enabled) {
		state = "held"
	}
	if state == "dead" {
		do, err = t.giveUp(ctx, d, a.outcome.Class, a.err)
	} else {
		do = next{state: state, wait: max(at.Sub(t.now), time.Millisecond)}
		err = t.record(ctx, d, position{state: state, next: at, class: a.outcome.Class, cause: a.err})
	}
	if err != nil || reason == "" {
		return do, err
	}
	return do, t.disable(ctx, reason, a.err)
}

func (t *turn) breaker() db.SetBreakerParams {
	return db.SetBreakerParams{
		ID:                  t.s.ID,
		ConsecutiveFailures: t.s.ConsecutiveFailures,
		UnsafeFailures:      t.s.UnsafeFailures,
		Probing:             t.s.Probing,
		OpenUntil:           t.s.OpenUntil,
		OpenedAt:            t.s.OpenedAt,
	}
}

// judge lets an attempt count for its subscription, and returns why that is to be
// disabled, if it is. What began before the breaker opened tells nothing new, and
// what a person tries does no harm.
func (t *turn) judge(a *deliveryAttempt) (reason string) {
	s := &t.s
	if a.outcome.Action == webhook.Succeed {
		s.ConsecutiveFailures, s.UnsafeFailures, s.Probing, s.OpenUntil = 0, 0, false, nil
		return ""
	}
	stale := s.OpenedAt != nil && a.startedAt.Before(*s.OpenedAt)
	counts := a.outcome.Counts && s.Enabled && !stale && !a.manual
	if counts {
		s.ConsecutiveFailures++
		if a.outcome.Unsafe {
			s.UnsafeFailures++
		} else {
			s.UnsafeFailures = 0
		}
	}
	open := t.now.Add(a.outcome.Wait)
	if counts && s.ConsecutiveFailures >= breakerOpensAt {
		s.Probing = true
		if until := t.now.Add(t.webhooks.delay(int(s.ConsecutiveFailures) - breakerOpensAt)); until.After(open) {
			open = until
		}
	}
	s.Probing = s.Probing || a.outcome.Throttle
	if open.After(t.now) && (s.OpenUntil == nil || open.After(*s.OpenUntil)) {
		s.OpenUntil, s.OpenedAt = &open, &t.now
	}
	switch {
	case a.outcome.Class == "gone":
		return "gone"
	case a.outcome.Action == webhook.Disable:
		return a.outcome.Class
	case counts && s.UnsafeFailures >= unsafeDisablesAt:
		return "unsafe_address"
	case counts && s.ConsecutiveFailures >= disablesAt:
		return "10_consecutive_failures"
	default:
		return ""
	}
}

// after tells where an attempt leaves its delivery, and when the next one is.
func (t *turn) after(d *db.WebhookDelivery, a *deliveryAttempt) (state string, at time.Time) {
	spent := int(webhookAttempts - (d.MaxAttempts - a.number)) // of those since it began anew
	switch a.outcome.Action {
	case webhook.Succeed:
		return "succeeded", t.now
	case webhook.GiveUp:
		return "dead", t.now
	case webhook.Disable:
		return "held", t.now
	case webhook.Hold: // it was not sent, so the attempt is not spent
		d.MaxAttempts++
		return "pending", t.now.Add(secretRecheck)
	case webhook.Retry:
	}
	switch {
	case a.number >= d.MaxAttempts:
		return "dead", t.now
	case a.outcome.Class == "interrupted":
		return "pending", t.now
	}
	delay := eventlog.Jitter(t.webhooks.delay(spent - 1))
	return "pending", t.now.Add(max(delay, a.outcome.Wait))
}

// position is where a delivery is: what went wrong, nil for nothing, and when the next
// attempt is, if there is to be one.
type position struct {
	state string
	next  time.Time
	class string
	cause error
}

// record puts down where a delivery is now.
func (t *turn) record(ctx context.Context, d *db.WebhookDelivery, at position) error {
	params := db.FinishDeliveryParams{ID: d.ID, State: at.state, MaxAttempts: d.MaxAttempts, NextAttemptAt: at.next}
	if at.cause != nil {
		params.ErrorClass, params.LastError = &at.class, new(eventlog.Scrub(at.cause.Error()))
	}
	if status, ok := errors.AsType[*webhook.StatusError](at.cause); ok {
		params.StatusCode = new(int32(status.Code))
	}
	if err := t.queries.FinishDelivery(ctx, params); err != nil {
		return fmt.Errorf("finish: %w", err)
	}
	return nil
}

// giveUp makes a delivery a dead letter and tells of it, but not of the webhooks'
// own events, or one dead endpoint would feed itself.
func (t *turn) giveUp(ctx context.Context, d *db.WebhookDelivery, class string, cause error) (do next, err error) {
	do = next{state: "dead", dead: fmt.Errorf("delivery %s given up: %w", d.ID, cause)}
	if err := t.record(ctx, d, position{state: do.state, next: t.now, class: class, cause: cause}); err != nil {
		return next{}, err
	}
	d.State = do.state
	if ownEvent(d.EventType) {
		return do, nil
	}
	payload := event.WebhookDeliveryFailed{
		SubscriptionID: t.s.ID.String(),
		EventID:        d.EventID.String(),
		Attempt:        int64(d.Attempts),
		Error:          eventlog.Scrub(cause.Error()),
	}
	if status, ok := errors.AsType[*webhook.StatusError](cause); ok {
		payload.StatusCode = int64(status.Code)
	}
	_, err = eventlog.Emit(ctx, t.tx, eventlog.Event[event.WebhookDeliveryFailed]{
		OrganizationID: t.s.OrganizationID, EntityKind: "webhook_subscription", EntityID: t.s.ID, Payload: payload,
	})
	if err != nil {
		return next{}, fmt.Errorf("emit failed delivery: %w", err)
	}
	return do, nil
}

// disable stops all deliveries to the subscription, and tells of it, once.
func (t *turn) disable(ctx context.Context, reason string, cause error) error {
	disabled, err := t.queries.DisableSubscription(ctx, &reason, t.s.ID)
	if err != nil {
		return fmt.Errorf("disable subscription: %w", err)
	}
	if disabled == 0 {
		return nil
	}
	if _, err := t.queries.HoldDeliveries(ctx, t.s.ID); err != nil {
		return fmt.Errorf("hold deliveries: %w", err)
	}
	_, err = eventlog.Emit(ctx, t.tx, eventlog.Event[event.WebhookSubscriptionDisabled]{
		OrganizationID: t.s.OrganizationID,
		EntityKind:     "webhook_subscription",
		EntityID:       t.s.ID,
		Payload: event.WebhookSubscriptionDisabled{
			SubscriptionID: t.s.ID.String(), Reason: reason, LastError: eventlog.Scrub(cause.Error()),
		},
	})
	if err != nil {
		return fmt.Errorf("emit disabled subscription: %w", err)
	}
	return t.webhooks.audit(ctx, t.queries, t.s, WebhookDeliveryArgs{}.Kind(), "webhook.disabled", reason)
}
