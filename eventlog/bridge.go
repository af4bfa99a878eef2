package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"afluente/db"
	"afluente/db/migrate"
)

const (
	// channel is where the database says that an urgent event was committed.
	channel = "event_log_high"

	// pollInterval is the longest that a due event waits for a bridge that is
	// idle. It is the truth; the channel is only a hint.
	pollInterval = 500 * time.Millisecond

	// maxRetryDelay bounds the pause after an error.
	maxRetryDelay = 5 * time.Second

	// maxProjectedPayload is the largest payload, in bytes as stored, that the
	// bridge loads to make args; a larger one is left to the job.
	maxProjectedPayload = 16 << 10

	// priorityLowest is River's, for jobs that have time.
	priorityLowest = 4

	// turnOrganizations is how many organizations get a turn in one step.
	turnOrganizations = 32
	// turnInterval is between two steps in turn while there is a backlog, and
	// minTurnInterval the least, however many urgent events there are.
	turnInterval    = 20 * time.Millisecond
	minTurnInterval = 10 * time.Millisecond
	// turnsTake is what steps in turn need to take an event. Those that are older
	// were left to Step.
	turnsTake = 100 * time.Millisecond

	// tendInterval is how often tables are tended to, and tendAgain after an error.
	tendInterval = time.Second
	tendAgain    = time.Minute

	// beginStep makes the server let go of what a step has locked when its
	// process freezes: others could not claim those events, nor add to or advance
	// those lanes, nor claim any events that are wanted in order.
	// The other settings keep the planner, which knows little of tables that change
	// so fast, from reading all of a month for a thousand of its events, and from
	// planning anew each time, which takes longer than a step.
	beginStep = `BEGIN ISOLATION LEVEL READ COMMITTED;
		SET LOCAL idle_in_transaction_session_timeout = '10s';
		SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_seqscan = off;
		SET LOCAL jit = off;
		SET LOCAL plan_cache_mode = force_generic_plan`

	// maxArgs is the largest encoded args that a projection may make, in bytes.
	maxArgs = 64 << 10
)

// BridgeConfig is what a [Bridge] is made of.
type BridgeConfig struct {
	Pool *pgxpool.Pool
	Plan *Plan
	Log  *zap.Logger
	// MaxBatch is the most events that one step takes; 0 means 1000.
	MaxBatch int
	// PollOnly does without LISTEN, for a pool behind a transaction pooler.
	PollOnly bool
	// Telemetry counts the events; nil for none.
	Telemetry *Telemetry
}

// Bridge turns events into jobs: one for each consumer that is registered in
// event_consumers for the event's type, be it in this process's plan or not.
// Any number of bridges may run in any number of processes.
//
// Events are fanned out in the order in which they were emitted. While more of
// them wait than one step takes, organizations that have none of the oldest get
// small steps of their own beside the large ones, of which up to half goes to the
// organizations in turn; and the jobs take turns in the queues. So one that emits
// very many holds up no other.
type Bridge struct {
	pool         *pgxpool.Pool
	log          *zap.Logger
	maxBatch     int
	pollOnly     bool
	poll         time.Duration          // pollInterval, but in tests
	consumers    map[string]Declaration // of the plan
	payloadTypes []string               // whose payload a projection reads
	jobs         *river.Client[pgx.Tx]
	telemetry    *Telemetry
	turns        turns
	inTurn       chan struct{} // says that there may be something for StepInTurn
	jobsWait     atomic.Bool   // the last step found jobs that no worker had time for

	took      atomic.Bool  // some step took events since the tables were tended to
	stepped   atomic.Int64 // nanoseconds since 1970 at the last step without an error, 0 for none
	listening atomic.Bool
}

// NewBridge returns a bridge, not running.
func NewBridge(config BridgeConfig) (*Bridge, error) {
	b := &Bridge{
		pool:         config.Pool,
		log:          config.Log.Named("bridge"),
		maxBatch:     config.MaxBatch,
		pollOnly:     config.PollOnly,
		poll:         pollInterval,
		consumers:    config.Plan.consumers(),
		payloadTypes: []string{},
		telemetry:    config.Telemetry,
		inTurn:       make(chan struct{}, 1),
	}
	if b.maxBatch == 0 {
		b.maxBatch = 1000
	}
	for _, d := range b.consumers {
		if d.eventType != anyType {
			b.payloadTypes = append(b.payloadTypes, d.eventType)
		}
	}
	// A client of its own, without workers, so that it inserts kinds which
	// only another process knows. InsertManyFast takes this machine's clock
	// for the time of the jobs; the middleware puts the database's there, or a
	// fast clock would hold every job up. It adds the tags as well, since River
	// would hold each of them against an expression, half of the time it takes.
	var err error
	b.jobs, err = river.NewClient(silentDriver{riverpgxv5.New(config.Pool)}, &river.Config{
		Logger:     newSlog(config.Log),
		Middleware: []rivertype.Middleware{&setColumns{}},
		Schema:     migrate.RiverSchema,
	})
	if err != nil {
		return nil, fmt.Errorf("make bridge: %w", err)
	}
	return b, nil
}

// Run calls Step, and StepInTurn beside it, until ctx ends, then returns nil. It
// waits while nothing is due, and outlives every error of the database: it logs it
// and tries again.
func (b *Bridge) Run(ctx context.Context) error {
	hints := make(chan struct{}, 1)
	var beside sync.WaitGroup
	defer beside.Wait()
	if !b.pollOnly {
		beside.Go(func() { b.listen(ctx, hints) })
	}
	beside.Go(func() { b.takeTurns(ctx) })
	beside.Go(func() { b.tend(ctx) })

	errs := retryDelay{}
	for backlog := false; ctx.Err() == nil; {
		most, err := b.steps(ctx, backlog)
		more := most == b.maxBatch
		wait := b.poll
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			wait = errs.next()
			b.log.Error("step failed, will be retried", zap.Error(err), zap.Duration("delay", wait))
		case more:
			wait = 0
		}
		if err == nil {
			errs = retryDelay{}
		}
		backlog = more
		if wait > 0 {
			sleep(ctx, wait, hints)
		}
	}
	return nil
}

// steps is one step, or with a backlog two at a time, so that the database need
// not wait for this program nor this program for the database, unless there are more
// jobs already than the workers have time for, who need the processor more. It
// returns the most events that one of them took.
func (b *Bridge) steps(ctx context.Context, backlog bool) (most int, err error) {
	n := 1
	if backlog && !b.jobsWait.Load() {
		n = 2
	}
	took := make([]int, n)
	var g errgroup.Group
	for i := range took {
		g.Go(func() (err error) {
			took[i], err = b.Step(ctx)
			return err
		})
	}
	err = g.Wait()
	return slices.Max(took), err
}

// tend keeps tables such that statements are fast, until ctx ends: the partition of a
// month that has begun gets its first statistics, without which some plans would read
// all of it for every event, and the indexes of jobs what is new, which a step or a
// worker would have to do otherwise.
func (b *Bridge) tend(ctx context.Context) {
	queries := db.New(b.pool)
	for wait := tendInterval; ; {
		sleep(ctx, wait, nil)
		if ctx.Err() != nil {
			return
		}
		_, err := queries.FlushJobIndexes(ctx)
		if b.took.Swap(false) {
			_, analyzeErr := queries.AnalyzeBegunMonths(ctx)
			err = errors.Join(err, analyzeErr)
		}
		wait = tendInterval
		if err != nil && ctx.Err() == nil {
			wait = tendAgain
			b.log.Warn("tables were not tended to, autovacuum will do so", zap.Error(err), zap.Duration("delay", wait))
		}
	}
}

// takeTurns calls StepInTurn while there is a backlog, until ctx ends.
func (b *Bridge) takeTurns(ctx context.Context) {
	errs := retryDelay{}
	for ctx.Err() == nil {
		wait := b.poll
		if b.turns.haveBacklog() {
			wait = turnInterval
			if _, err := b.StepInTurn(ctx); err == nil {
				errs = retryDelay{}
			} else if ctx.Err() == nil {
				wait = errs.next()
				b.log.Error("step in turn failed, will be retried", zap.Error(err), zap.Duration("delay", wait))
			}
		}
		sleep(ctx, minTurnInterval, nil)
		sleep(ctx, wait-minTurnInterval, b.inTurn)
	}
}

// BridgeStatus is how a bridge is.
type BridgeStatus struct {
	// LastStep is when it last looked for events and the database answered; zero
	// for never. One that runs does so every half second, a failing one at least
	// every 5 s.
	LastStep time.Time
	// Listening says that it hears of urgent events at once. Without, it finds
	// them by looking.
	Listening bool
}

// Status returns how the bridge is.
func (b *Bridge) Status() BridgeStatus {
	status := BridgeStatus{Listening: b.listening.Load()}
	if at := b.stepped.Load(); at != 0 {
		status.LastStep = time.Unix(0, at)
	}
	return status
}

// Step fans out the events that are due, at most MaxBatch of them, and returns
// how many they were. It is one transaction and does not wait: each event it
// took is committed together with its jobs, or nothing is. Several goroutines may
// step at a time.
func (b *Bridge) Step(ctx context.Context) (int, error) { return b.step(ctx, b.pick) }

// StepInTurn is a step so small that it soon ends: of a few events of each
// organization whose turn it is, but for those of which the last steps took the
// oldest events, and for events that some consumer wants in order, which only one
// step at a time may take. It leaves these to Step.
func (b *Bridge) StepInTurn(ctx context.Context) (int, error) { return b.step(ctx, b.pickSmall) }

// step fans out the events that pick locks.
func (b *Bridge) step(
	ctx context.Context, pick func(context.Context, *db.Queries) ([]db.PickDueEventsRow, error),
) (int, error) {
	start := time.Now()
	defer b.turns.begin()()
	var events []db.ClaimEventsRow
	var made []jobOfEvent
	err := pgx.BeginTxFunc(ctx, b.pool, pgx.TxOptions{BeginQuery: beginStep}, func(tx pgx.Tx) error {
		queries := db.New(tx)
		picked, err := pick(ctx, queries)
		if err != nil || len(picked) == 0 {
			return err
		}
		registered, err := queries.ListConsumers(ctx)
		if err != nil {
			return fmt.Errorf("list consumers: %w", err)
		}
		claim := db.ClaimEventsParams{
			PayloadTypes: b.payloadTypes,
			MaxPayload:   maxProjectedPayload,
			OrderFields:  orderFields(registered),
		}
		for _, event := range picked {
			claim.Ids = append(claim.Ids, event.ID)
			claim.CreatedAts = append(claim.CreatedAts, event.CreatedAt)
			claim.EventTypes = append(claim.EventTypes, event.EventType)
		}
		if events, err = queries.ClaimEvents(ctx, claim); err != nil {
			return fmt.Errorf("claim events: %w", err)
		}
		retried, err := retryDead(ctx, queries, picked, events)
		if err != nil {
			return fmt.Errorf("retry dead jobs: %w", err)
		}
		if made, err = b.fanOut(events, registered, false); err != nil {
			return err
		}
		inserted, err := b.insert(ctx, tx, events[0].ClaimedAt, made)
		if err != nil {
			return err
		}
		if err := queries.NotifyStep(ctx, encodeStream(events), append(retried, inserted...)); err != nil {
			return fmt.Errorf("notify: %w", err)
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("eventlog: bridge step: %w", err)
	}
	b.stepped.Store(time.Now().UnixNano())
	if len(events) > 0 {
		b.took.Store(true)
		b.telemetry.fannedOut(ctx, events)
		b.log.Debug("fanned out", zap.Int("events", len(events)), zap.Int("jobs", len(made)),
			zap.Duration("duration", time.Since(start)))
	}
	return len(events), nil
}

// pick locks events that are due, and returns their keys: the oldest, and, when
// the last step left some behind, before them those of organizations whose turn
// it is and which StepInTurn did not take.
func (b *Bridge) pick(ctx context.Context, queries *db.Queries) ([]db.PickDueEventsRow, error) {
	var picked []db.PickDueEventsRow
	if b.turns.haveBacklog() {
		var err error
		if picked, err = b.pickInTurn(ctx, queries, &b.turns.large, db.PickDueEventsInTurnParams{
			MinAge: turnsTake, Ordered: true, ButNot: []uuid.UUID{},
		}); err != nil {
			return nil, err
		}
	}
	seen := make(map[uuid.UUID]bool)
	for _, event := range picked {
		seen[event.ID] = true
	}
	oldest, err := queries.PickDueEvents(ctx, int32(b.maxBatch))
	if err != nil {
		return nil, fmt.Errorf("pick events: %w", err)
	}
	for _, event := range oldest {
		if len(picked) < b.maxBatch && !seen[event.ID] {
			picked = append(picked, event)
		}
	}
	if b.turns.pickedOldest(oldest, len(oldest) == b.maxBatch) {
		hint(b.inTurn)
	}
	return picked, nil
}

// pickSmall locks the events of StepInTurn and returns their keys.
func (b *Bridge) pickSmall(ctx context.Context, queries *db.Queries) ([]db.PickDueEventsRow, error) {
	return b.pickInTurn(ctx, queries, &b.turns.small, db.PickDueEventsInTurnParams{ButNot: b.turns.busy()})
}

// pickInTurn locks events of the organizations that come next in a round.
func (b *Bridge) pickInTurn(
	ctx context.Context, queries *db.Queries, r *round, params db.PickDueEventsInTurnParams,
) ([]db.PickDueEventsRow, error) {
	params.MaxOrganizations = turnOrganizations
	params.MaxEach = int32(max(1, b.maxBatch/2/turnOrganizations))
	params.After = r.get()
	rows, err := queries.PickDueEventsInTurn(ctx, params)
	if err == nil && len(rows) == 0 && params.After != uuid.Nil { // the round is over
		params.After = uuid.Nil
		rows, err = queries.PickDueEventsInTurn(ctx, params)
	}
	if err != nil {
		return nil, fmt.Errorf("pick events in turn: %w", err)
	}
	var last uuid.UUID
	picked := make([]db.PickDueEventsRow, len(rows))
	for i, row := range rows {
		picked[i] = db.PickDueEventsRow(row)
		last = row.OrganizationID
	}
	r.set(last)
	return picked, nil
}

// insert inserts jobs as of a time of the database's clock, and returns the queues
// that have work by it, of which nobody is told yet.
func (b *Bridge) insert(ctx context.Context, tx pgx.Tx, at time.Time, made []jobOfEvent) ([]string, error) {
	if len(made) == 0 {
		return nil, nil
	}
	queries := db.New(tx)
	if err := enterLanes(ctx, queries, made); err != nil {
		return nil, fmt.Errorf("enter lanes: %w", err)
	}
	heads, err := queries.ListQueueHeads(ctx)
	if err != nil {
		return nil, fmt.Errorf("list heads of queues: %w", err)
	}
	b.jobsWait.Store(len(heads) > 0)
	columns := jobColumns{created: at, scheduled: b.turns.places(at, heads, made), tags: make([][]string, len(made))}
	jobs := make([]river.InsertManyParams, len(made))
	queues := make(map[string]bool)
	for i, job := range made {
		jobs[i], columns.tags[i] = job.params, job.tags
		if !job.params.InsertOpts.Pending {
			queues[job.params.InsertOpts.Queue] = true
		}
	}
	if _, err := b.jobs.InsertManyFastTx(context.WithValue(ctx, jobColumnsKey{}, columns), tx, jobs); err != nil {
		return nil, fmt.Errorf("insert jobs: %w", err)
	}
	return slices.Sorted(maps.Keys(queues)), nil
}

// jobOfEvent is a job to be inserted.
type jobOfEvent struct {
	params       river.InsertManyParams
	tags         []string
	organization uuid.UUID
	lane         string // empty for none
}

// retryDead serves the dead events that an operator set to pending: their dead
// jobs begin anew, so that no consumer gets a second job beside its dead one. It
// returns their queues, of which nobody is told yet.
func retryDead(
	ctx context.Context, queries *db.Queries, picked []db.PickDueEventsRow, events []db.ClaimEventsRow,
) ([]string, error) {
	var ids []string
	for _, event := range picked {
		if len(event.DeadConsumers) > 0 {
			ids = append(ids, event.ID.String())
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	retried, err := queries.RetryDeadJobsOfEvents(ctx, ids)
	if err != nil {
		return nil, err
	}
	served := make(map[[2]string]bool, len(retried))
	queues := make(map[string]bool)
	for _, job := range retried {
		served[[2]string{job.EventID, job.Consumer}] = true
		queues[job.Queue] = true
	}
	for i, event := range events {
		events[i].Consumers = slices.DeleteFunc(event.Consumers, func(consumer string) bool {
			return served[[2]string{event.ID.String(), consumer}]
		})
	}
	return slices.Sorted(maps.Keys(queues)), nil
}

// fanOut makes the jobs of claimed events, or of those that are replayed.
func (b *Bridge) fanOut(events []db.ClaimEventsRow, registered []db.EventConsumer, replay bool) ([]jobOfEvent, error) {
	settings := make(map[string]db.EventConsumer, len(registered))
	for _, consumer := range registered {
		settings[consumer.Name] = consumer
	}
	fields := orderFields(registered)
	var jobs []jobOfEvent
	for _, event := range events {
		ids := readCorrelation(event.Metadata)
		common, err := json.Marshal(jobMetadata{
			EventID:   event.ID,
			CreatedAt: event.CreatedAt.UTC().Format(createdAtLayout),
			RequestID: ids.RequestID,
			TraceID:   ids.TraceID,
			SpanID:    ids.SpanID,
			Replay:    replay,
		})
		if err != nil {
			return nil, fmt.Errorf("encode metadata of event %s: %w", event.ID, err)
		}
		tags := Tags(event.EventType, event.EntityKind, event.OrganizationID)
		if replay {
			tags = append(tags, "replay")
		}
		r := record{
			id:             event.ID,
			createdAt:      event.CreatedAt.UTC(),
			organizationID: event.OrganizationID,
			eventType:      event.EventType,
			entityKind:     event.EntityKind,
			entityID:       event.EntityID,
			payload:        event.Payload,
			metadata:       event.Metadata,
			decoded:        new(any),
		}
		for _, name := range event.Consumers {
			consumer, ok := settings[name]
			if !ok { // registered between the two reads; the next step sees it in both
				return nil, fmt.Errorf("fan out event %s: consumer %q was registered meanwhile", event.ID, name)
			}
			priority := int(consumer.Priority)
			if replay {
				priority = priorityLowest
			}
			args, deferred := b.args(r, name)
			lane := laneOf(consumer, event, fields)
			own, err := json.Marshal(consumerMetadata{Consumer: name, Deferred: deferred, Lane: lane})
			if err != nil {
				return nil, fmt.Errorf("encode metadata of event %s: %w", event.ID, err)
			}
			jobs = append(jobs, jobOfEvent{
				tags:         tags,
				organization: event.OrganizationID,
				lane:         lane,
				params: river.InsertManyParams{
					Args: encodedArgs{kind: name, args: args},
					InsertOpts: &river.InsertOpts{
						MaxAttempts: int(consumer.MaxAttempts),
						Metadata:    joinObjects(common, own),
						Priority:    priority,
						Queue:       consumer.Queue,
					},
				},
			})
		}
	}
	return jobs, nil
}

// joinObjects returns one JSON object with the fields of two that have some.
func joinObjects(a, b []byte) []byte {
	joined := make([]byte, 0, len(a)+len(b))
	joined = append(joined, a[:len(a)-1]...)
	joined = append(joined, ',')
	return append(joined, b[1:]...)
}

// args makes the args of one job, or leaves that to the job: when the consumer
// is not of this plan, when the payload is too large to load here, and when
// the projection fails, so that the failure lands in the dead letters of that
// consumer and stops nothing else.
func (b *Bridge) args(r record, name string) (args json.RawMessage, deferred bool) {
	declaration, ok := b.consumers[name]
	if !ok {
		return json.RawMessage(`{}`), true
	}
	wantsAny := declaration.eventType == anyType
	if !wantsAny && (declaration.eventType != r.eventType || r.payload == nil) {
		return json.RawMessage(`{}`), true
	}
	defer func() {
		if recover() != nil { // the job runs the projection again and records the panic
			args, deferred = json.RawMessage(`{}`), true
		}
	}()
	args, err := declaration.project(r)
	if err != nil || len(args) > maxArgs {
		return json.RawMessage(`{}`), true
	}
	return args, false
}

// listen passes notifications on as hints until ctx ends.
func (b *Bridge) listen(ctx context.Context, hints chan<- struct{}) {
	errs := retryDelay{}
	for ctx.Err() == nil {
		err := b.listenOnce(ctx, func() {
			errs = retryDelay{}
			hint(hints)
			hint(b.inTurn)
		})
		if ctx.Err() != nil {
			return
		}
		wait := errs.next()
		b.log.Warn("listening lost, polling meanwhile", zap.Error(err), zap.Duration("delay", wait))
		sleep(ctx, wait, nil)
	}
}

func hint(hints chan<- struct{}) {
	select {
	case hints <- struct{}{}:
	default: // one is waiting already
	}
}

// listenOnce takes a connection out of the pool for good and calls hint for
// each notification, and once at the start for those it may have missed.
func (b *Bridge) listenOnce(ctx context.Context, hint func()) (err error) {
	pooled, err := b.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	conn := pooled.Hijack()
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if _, err := conn.Exec(ctx, "LISTEN "+channel); err != nil { //nolint:forbidigo // sqlc does not know LISTEN
		return fmt.Errorf("listen: %w", err)
	}
	b.listening.Store(true)
	defer b.listening.Store(false)
	for {
		hint()
		if _, err := conn.WaitForNotification(ctx); err != nil {
			return fmt.Errorf("wait for notification: %w", err)
		}
	}
}

// retryDelay doubles from 100 ms up to maxRetryDelay.
type retryDelay struct{ last time.Duration }

func (d *retryDelay) next() time.Duration {
	d.last = min(max(2*d.last, 100*time.Millisecond), maxRetryDelay)
	return d.last
}

// sleep waits for the time to pass, a hint, or the end of ctx.
func sleep(ctx context.Context, wait time.Duration, hints <-chan struct{}) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-hints:
	case <-timer.C:
	}
}

// encodedArgs are args that were encoded before.
type encodedArgs struct {
	kind string
	args json.RawMessage
}

func (a encodedArgs) Kind() string                 { return a.kind }
func (a encodedArgs) MarshalJSON() ([]byte, error) { return a.args, nil }

// silentDriver keeps a River client from telling others of the jobs that it inserts.
// It would tell of a queue once in a while and leave the rest out, so that jobs of
// two steps close together waited for the poll; the step tells of each.
type silentDriver struct{ *riverpgxv5.Driver }

func (silentDriver) SupportsListenNotify() bool { return false }

// setColumns is a River middleware that gives new jobs what is in the context.
type setColumns struct{ river.MiddlewareDefaults }

type jobColumnsKey struct{}

// jobColumns are when jobs were made, and each one's place in its queue and tags.
type jobColumns struct {
	created   time.Time
	scheduled []time.Time
	tags      [][]string // as Tags makes them, which River takes
}

// InsertMany implements River's JobInsertMiddleware.
func (*setColumns) InsertMany(
	ctx context.Context,
	jobs []*rivertype.JobInsertParams,
	doInner func(context.Context) ([]*rivertype.JobInsertResult, error),
) ([]*rivertype.JobInsertResult, error) {
	if columns, ok := ctx.Value(jobColumnsKey{}).(jobColumns); ok {
		for i, job := range jobs {
			job.CreatedAt, job.ScheduledAt, job.Tags = &columns.created, &columns.scheduled[i], columns.tags[i]
		}
	}
	return doInner(ctx)
}
