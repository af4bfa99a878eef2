package jobs

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"afluente/db"
	"afluente/eventlog"
	"afluente/eventlog/event"
	"afluente/jobs/webhook"
)

const (
	// recordTimeout is how long the outcome of an attempt may take to be recorded.
	recordTimeout = 50 * time.Second

	// commitMargin is what the commit of a start may take, during which its lease runs.
	commitMargin = 10 * time.Second

	// deliveryLease is how long an attempt may last before it counts as lost.
	deliveryLease = commitMargin + webhook.Timeout + recordTimeout

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
)

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
	attempt, do, err := w.begin(ctx, args, jobID)
	if err != nil {
		return next{}, fmt.Errorf("begin delivery %s: %w", args.DeliveryID, err)
	}
	if attempt == nil {
		return do, nil
	}
	attempt.answer, attempt.err = w.Sender.Send(ctx, attempt.request)
	attempt.outcome = webhook.Classify(ctx, attempt.err)
	// Also when the job was told to stop: what was sent was sent.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTimeout)
	defer cancel()
	if do, err = w.finish(ctx, args, attempt); err != nil {
		return next{}, fmt.Errorf("record delivery %s: %w", args.DeliveryID, err)
	}
	return do, nil
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
	number    int32
	startedAt time.Time // by the database's clock
	manual    bool
	request   webhook.Request

	answer  webhook.Answer
	err     error
	outcome webhook.Outcome
}

// begin takes the number of the next attempt and returns what to send, or tells
// what to do instead.
func (w *Webhooks) begin(ctx context.Context, args WebhookDeliveryArgs, jobID int64) (attempt *deliveryAttempt, do next, err error) {
	end, err := w.turns.of(args.SubscriptionID).begin(ctx)
	if errors.Is(err, errNoTurn) {
		return nil, next{state: "pending", wait: eventlog.Jitter(slotRecheck)}, nil
	} else if err != nil {
		return nil, next{}, fmt.Errorf("wait for a turn: %w", err)
	}
	defer end()
	err = pgx.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		queries := db.New(tx)
		row, err := queries.LockDelivery(ctx, args.DeliveryID)
		if errors.Is(err, pgx.ErrNoRows) {
			do.state = "cancelled" // its subscription was deleted
			return queries.CancelDelivery(ctx, args.DeliveryID)
		} else if err != nil {
			return fmt.Errorf("lock: %w", err)
		}
		turn := &turn{webhooks: w, tx: tx, queries: queries, s: row.WebhookSubscription, d: row.WebhookDelivery, now: row.Now, sending: row.Sending}
		ready, err := turn.take(ctx, jobID)
		if err != nil || !ready {
			do = turn.do
			return err
		}
		signing, err := w.signing(ctx, tx, turn.s)
		if errors.Is(err, errSecret) { // nothing goes out unsigned
			if err := queries.SetSecretFault(ctx, new(err.Error()), turn.s.ID); err != nil {
				return fmt.Errorf("set fault: %w", err)
			}
			err = turn.postpone(ctx, turn.now.Add(secretRecheck))
			do = turn.do
			return err
		} else if err != nil {
			return err
		}
		attempt, err = turn.start(ctx, signing)
		do = turn.do
		return err
	})
	if err != nil {
		return nil, next{}, err
	}
	return attempt, do, nil
}

// turn is one look at a delivery and its subscription, both locked.
type turn struct {
	webhooks *Webhooks
	tx       pgx.Tx
	queries  *db.Queries
	s        db.WebhookSubscription
	d        db.WebhookDelivery
	now      time.Time
	sending  int64 // how many were under way shortly before

	nextSlot *time.Time // to be written with the attempt; nil to leave it

	do next
}

// take tells whether the delivery may be attempted now, and what to do if not.
func (t *turn) take(ctx context.Context, jobID int64) (ready bool, err error) {
	if t.d.JobID != nil && *t.d.JobID != jobID {
		t.do.state = "superseded" // another job is its timer
		return false, nil
	}
	switch t.d.State {
	case "dead": // and here is its job: it was retried
		err := t.queries.ResetDeliveries(ctx, db.ResetDeliveriesParams{
			Ids: []uuid.UUID{t.d.ID}, Trigger: triggerManual, MoreAttempts: webhookAttempts,
		})
		if err != nil {
			return false, fmt.Errorf("begin anew: %w", err)
		}
		t.d.Trigger, t.d.MaxAttempts, t.d.NextAttemptAt = triggerManual, t.d.Attempts+webhookAttempts, t.now
	case "sending":
		if t.d.LeaseUntil != nil && t.d.LeaseUntil.After(t.now) { // the job runs twice
			t.do = next{state: "sending", wait: t.d.LeaseUntil.Sub(t.now)}
			return false, nil
		}
		// The process died meanwhile. What it had begun counts.
	case "pending":
	default:
		t.do.state = t.d.State
		return false, nil
	}
	if !t.s.Enabled {
		t.do.state = "held"
		return false, t.queries.HoldDelivery(ctx, t.d.ID)
	}
	if t.d.Attempts >= t.d.MaxAttempts { // lost with its process
		return false, t.giveUp(ctx, "lost", errors.New("the last attempt was cut off, its outcome is unknown"))
	}
	if wait := t.d.NextAttemptAt.Sub(t.now); wait > 0 {
		t.do = next{state: "pending", wait: wait}
		return false, nil
	}
	return t.takeSlot(ctx)
}

// first tells whether no attempt was made since somebody asked for this delivery.
func (t *turn) first() bool {
	return t.d.Trigger == triggerManual && t.d.Attempts == t.d.MaxAttempts-webhookAttempts
}

// takeSlot asks the breaker, the concurrency and the rate of the subscription.
// What a person asked for passes the breaker and the rate.
func (t *turn) takeSlot(ctx context.Context) (ready bool, err error) {
	if open := t.s.OpenUntil; open != nil && open.After(t.now) && !t.first() {
		return false, t.postpone(ctx, *open)
	}
	if t.sending >= t.maxSending() {
		return false, t.postpone(ctx, t.now.Add(slotRecheck))
	}
	if t.d.HasSlot || t.first() {
		return true, nil
	}
	at, nextSlot := t.slot(t.now)
	if at.After(t.now) {
		return false, t.postpone(ctx, t.now)
	}
	t.nextSlot = &nextSlot
	return true, nil
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

// postpone lets the delivery wait for a time of its own, so that those who wait
// for the same thing do not wake all at once, and never more often than the rate.
func (t *turn) postpone(ctx context.Context, from time.Time) error {
	at, nextSlot := t.slot(from)
	t.do = next{state: "pending", wait: max(at.Sub(t.now), time.Millisecond)}
	err := t.queries.PostponeDelivery(ctx, db.PostponeDeliveryParams{
		ID: t.d.ID, NextAttemptAt: at, SubscriptionID: t.s.ID, NextSlotAt: &nextSlot,
	})
	if err != nil {
		return fmt.Errorf("postpone: %w", err)
	}
	return nil
}

// start takes the number of an attempt and makes its request; nil if it may not be
// made now.
func (t *turn) start(ctx context.Context, signing signing) (*deliveryAttempt, error) {
	if t.s.SecretFault != nil {
		if err := t.queries.SetSecretFault(ctx, nil, t.s.ID); err != nil {
			return nil, fmt.Errorf("clear fault: %w", err)
		}
	}
	started, err := t.queries.StartAttempt(ctx, db.StartAttemptParams{
		ID: t.d.ID, NextSlotAt: t.nextSlot, MaxSending: t.maxSending(), Lease: deliveryLease,
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("start attempt: %w", err)
	case started.Body == nil:
		return nil, t.giveUp(ctx, "config_error", errors.New("what it sends was deleted"))
	case !started.Started:
		return nil, t.postpone(ctx, t.now.Add(slotRecheck))
	}
	number := t.d.Attempts + 1
	return &deliveryAttempt{
		number:    number,
		startedAt: t.now,
		manual:    t.first(),
		request: webhook.Request{
			URL:        t.s.Url,
			EventID:    t.d.EventID.String(),
			EventType:  t.d.EventType,
			DeliveryID: t.d.ID.String(),
			Attempt:    int(number),
			Secrets:    signing.secrets,
			Legacy:     signing.legacy,
			Headers:    signing.headers,
			Body:       started.Body,
			At:         t.now,
		},
	}, nil
}

// finish records the outcome of an attempt, and then what follows from it for its
// subscription, if anything does, in one transaction.
func (w *Webhooks) finish(ctx context.Context, args WebhookDeliveryArgs, attempt *deliveryAttempt) (do next, err error) {
	delivered, err := db.New(w.Pool).FinishAttempt(ctx, attempt.params(args.DeliveryID))
	if err != nil {
		return next{}, fmt.Errorf("finish attempt: %w", err)
	}
	if delivered {
		return next{state: "succeeded"}, nil
	}
	defer w.turns.of(args.SubscriptionID).end()()
	err = pgx.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		queries := db.New(tx)
		row, err := queries.LockDelivery(ctx, args.DeliveryID)
		deleted := errors.Is(err, pgx.ErrNoRows) // with its subscription
		if err != nil && !deleted {
			return fmt.Errorf("lock: %w", err)
		}
		turn := &turn{webhooks: w, tx: tx, queries: queries, s: row.WebhookSubscription, d: row.WebhookDelivery, now: row.Now}
		if deleted || turn.d.State != "sending" || turn.d.Attempts != attempt.number {
			do.state = "superseded" // the lease ran out and another attempt began
			return nil
		}
		if err := turn.settle(ctx, attempt); err != nil {
			return err
		}
		do = turn.do
		return nil
	})
	return do, err
}

func (a *deliveryAttempt) params(delivery uuid.UUID) db.FinishAttemptParams {
	params := db.FinishAttemptParams{
		DeliveryID: delivery,
		Number:     a.number,
		DurationMs: new(int32(a.answer.Duration.Milliseconds())),
		Class:      a.outcome.Class,
		Succeeded:  a.outcome.Action == webhook.Succeed,
	}
	if a.err != nil {
		params.Error = new(eventlog.Scrub(a.err.Error()))
	}
	if a.answer.Status != 0 {
		params.StatusCode = new(int32(a.answer.Status))
		params.Answer = &a.answer.Text
	}
	if a.answer.Remote != "" {
		params.Remote = &a.answer.Remote
	}
	return params
}

// settle moves the breaker and the delivery on.
func (t *turn) settle(ctx context.Context, a *deliveryAttempt) error {
	wasOpen := t.s.OpenUntil != nil && t.s.OpenUntil.After(t.now)
	before := t.breaker()
	reason := t.judge(a)
	if after := t.breaker(); after != before {
		if err := t.queries.SetBreaker(ctx, after); err != nil {
			return fmt.Errorf("set breaker: %w", err)
		}
	}
	if wasOpen && t.s.OpenUntil == nil { // by a delivery that somebody sent by hand
		if err := t.queries.HurryDeliveries(ctx, t.s.ID); err != nil {
			return fmt.Errorf("let deliveries go: %w", err)
		}
	}
	state, at := t.after(a)
	if state == "pending" && (reason != "" || !t.s.Enabled) {
		state = "held"
	}
	var err error
	if state == "dead" {
		err = t.giveUp(ctx, a.outcome.Class, a.err)
	} else {
		t.do = next{state: state, wait: max(at.Sub(t.now), time.Millisecond)}
		err = t.record(ctx, state, at, a.outcome.Class, a.err)
	}
	if err != nil || reason == "" {
		return err
	}
	return t.disable(ctx, reason, a.err)
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
func (t *turn) after(a *deliveryAttempt) (state string, at time.Time) {
	spent := int(webhookAttempts - (t.d.MaxAttempts - a.number)) // of those since it began anew
	switch a.outcome.Action {
	case webhook.Succeed:
		return "succeeded", t.now
	case webhook.GiveUp:
		return "dead", t.now
	case webhook.Disable:
		return "held", t.now
	case webhook.Hold: // it was not sent, so the attempt is not spent
		t.d.MaxAttempts++
		return "pending", t.now.Add(secretRecheck)
	case webhook.Retry:
	}
	switch {
	case a.number >= t.d.MaxAttempts:
		return "dead", t.now
	case a.outcome.Class == "interrupted":
		return "pending", t.now
	}
	delay := eventlog.Jitter(t.webhooks.delay(spent - 1))
	return "pending", t.now.Add(max(delay, a.outcome.Wait))
}

// record puts down where the delivery is now; cause is nil for no error.
func (t *turn) record(ctx context.Context, state string, at time.Time, class string, cause error) error {
	params := db.FinishDeliveryParams{ID: t.d.ID, State: state, MaxAttempts: t.d.MaxAttempts, NextAttemptAt: at}
	if cause != nil {
		params.ErrorClass, params.LastError = &class, new(eventlog.Scrub(cause.Error()))
	}
	if status, ok := errors.AsType[*webhook.StatusError](cause); ok {
		params.StatusCode = new(int32(status.Code))
	}
	if err := t.queries.FinishDelivery(ctx, params); err != nil {
		return fmt.Errorf("finish: %w", err)
	}
	return nil
}

// giveUp makes the delivery a dead letter and tells of it, but not of the
// webhooks' own events, or one dead endpoint would feed itself.
func (t *turn) giveUp(ctx context.Context, class string, cause error) error {
	t.do = next{state: "dead", dead: fmt.Errorf("delivery %s given up: %w", t.d.ID, cause)}
	if err := t.record(ctx, "dead", t.now, class, cause); err != nil {
		return err
	}
	if ownEvent(t.d.EventType) {
		return nil
	}
	payload := event.WebhookDeliveryFailed{
		SubscriptionID: t.s.ID.String(),
		EventID:        t.d.EventID.String(),
		Attempt:        int64(t.d.Attempts),
		Error:          eventlog.Scrub(cause.Error()),
	}
	if status, ok := errors.AsType[*webhook.StatusError](cause); ok {
		payload.StatusCode = int64(status.Code)
	}
	_, err := eventlog.Emit(ctx, t.tx, eventlog.Event[event.WebhookDeliveryFailed]{
		OrganizationID: t.s.OrganizationID, EntityKind: "webhook_subscription", EntityID: t.s.ID, Payload: payload,
	})
	if err != nil {
		return fmt.Errorf("emit failed delivery: %w", err)
	}
	return nil
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
