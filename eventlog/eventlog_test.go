package eventlog_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"afluente/db"
	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/eventlog/event"
)

func TestMain(m *testing.M) {
	code := dbtest.Main(m)
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// alphaArgs and betaArgs are two consumers of message.queued, and anyArgs one
// of every event. What their workers do is the test's to say.
type alphaArgs struct {
	MessageID string `json:"message_id"`
}

type betaArgs struct {
	MessageID string `json:"message_id"`
}

type anyArgs struct {
	EventID uuid.UUID `json:"event_id"`
}

func (alphaArgs) Kind() string { return "alpha-worker" }
func (betaArgs) Kind() string  { return "beta-worker" }
func (anyArgs) Kind() string   { return "any-worker" }

func (betaArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{MaxAttempts: 3, Priority: 2, Queue: "beta"}
}

// worker does what work says; nil does nothing.
type worker[A river.JobArgs] struct {
	river.WorkerDefaults[A]

	work func(context.Context, *river.Job[A]) error
}

func (*worker[A]) Timeout(*river.Job[A]) time.Duration { return 20 * time.Second }

func (w *worker[A]) Work(ctx context.Context, job *river.Job[A]) error {
	if w.work == nil {
		return nil
	}
	return w.work(ctx, job)
}

func alpha(work func(context.Context, *river.Job[alphaArgs]) error) eventlog.Declaration {
	return eventlog.On(func(e eventlog.Event[event.MessageQueued]) alphaArgs {
		return alphaArgs{MessageID: e.Payload.MessageID}
	}, &worker[alphaArgs]{work: work})
}

func beta(work func(context.Context, *river.Job[betaArgs]) error) eventlog.Declaration {
	return eventlog.On(func(e eventlog.Event[event.MessageQueued]) betaArgs {
		return betaArgs{MessageID: e.Payload.MessageID}
	}, &worker[betaArgs]{work: work})
}

func anyEvent() eventlog.Declaration {
	return eventlog.On(func(e eventlog.Event[event.Any]) anyArgs { return anyArgs{EventID: e.ID} }, &worker[anyArgs]{})
}

// bus is a database with one organization and one program on it.
type bus struct {
	pool         *pgxpool.Pool
	organization uuid.UUID
	plan         *eventlog.Plan
	bridge       *eventlog.Bridge
	client       *river.Client[pgx.Tx] // not started
}

// newBus registers the consumers on a new database. Failed jobs are tried
// again after a millisecond.
func newBus(t *testing.T, declarations ...eventlog.Declaration) *bus {
	t.Helper()
	pool := dbtest.New(t)
	return joinBus(t, pool, newOrganization(t, pool), declarations...)
}

// joinBus is one more program, with consumers of its own, on a database.
func joinBus(t *testing.T, pool *pgxpool.Pool, organization uuid.UUID, declarations ...eventlog.Declaration) *bus {
	t.Helper()
	plan, err := eventlog.Compile(declarations...)
	require.NoError(t, err)
	require.NoError(t, eventlog.Register(t.Context(), pool, plan))
	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: pool, Plan: plan, Log: zap.NewNop()})
	require.NoError(t, err)
	client, err := eventlog.NewClient(eventlog.ClientConfig{
		Pool: pool, Plan: plan, Log: zap.NewNop(), Backoff: []time.Duration{time.Millisecond},
	})
	require.NoError(t, err)
	return &bus{pool: pool, organization: organization, plan: plan, bridge: bridge, client: client}
}

// start works the jobs until the test ends.
func (b *bus) start(t *testing.T) {
	t.Helper()
	require.NoError(t, b.client.Start(context.WithoutCancel(t.Context())))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
		defer cancel()
		if err := b.client.StopAndCancel(ctx); err != nil {
			t.Error("stop client:", err)
		}
	})
}

func (b *bus) inTx(t *testing.T, f func(pgx.Tx) error) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), b.pool, f))
}

// emit commits one message.queued for the message.
func (b *bus) emit(t *testing.T, messageID string) (id uuid.UUID) {
	t.Helper()
	b.inTx(t, func(tx pgx.Tx) (err error) {
		id, err = eventlog.Emit(t.Context(), tx, b.queued(messageID))
		return err
	})
	return id
}

func (b *bus) queued(messageID string) eventlog.Event[event.MessageQueued] {
	return eventlog.Event[event.MessageQueued]{
		OrganizationID: b.organization, Payload: event.MessageQueued{MessageID: messageID},
	}
}

// emitRaw commits an event with a payload of any form.
func (b *bus) emitRaw(t *testing.T, eventType, payload string) (id uuid.UUID) {
	t.Helper()
	b.inTx(t, func(tx pgx.Tx) (err error) {
		id, err = eventlog.EmitRaw(t.Context(), tx, eventlog.RawEvent{
			Type: eventType, OrganizationID: b.organization, Payload: []byte(payload),
		})
		return err
	})
	return id
}

func (b *bus) event(t *testing.T, id uuid.UUID) db.EventLog {
	t.Helper()
	e, err := db.New(b.pool).GetEvent(t.Context(), id)
	require.NoError(t, err)
	return e
}

func (b *bus) jobs(t *testing.T, id uuid.UUID) []db.ListEventJobsRow {
	t.Helper()
	jobs, err := db.New(b.pool).ListEventJobs(t.Context(), id.String())
	require.NoError(t, err)
	return jobs
}

// job returns the one job of an event for a consumer.
func (b *bus) job(t *testing.T, id uuid.UUID, consumer string) db.ListEventJobsRow {
	t.Helper()
	jobs := slices.DeleteFunc(b.jobs(t, id), func(job db.ListEventJobsRow) bool { return job.Kind != consumer })
	require.Len(t, jobs, 1)
	return jobs[0]
}

// awaitStatus waits until the event has the status and returns it.
func (b *bus) awaitStatus(t *testing.T, id uuid.UUID, status string) (e db.EventLog) {
	t.Helper()
	eventually(t, "event "+status, func() bool {
		e = b.event(t, id)
		return e.Status == status
	})
	return e
}

// awaitLockWaiter waits until one statement waits for a lock.
func (b *bus) awaitLockWaiter(t *testing.T) {
	t.Helper()
	eventually(t, "a statement waits for a lock", func() bool {
		return count(t, b.pool, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`) == 1
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); waitABit(t) {
		require.True(t, time.Now().Before(deadline), "not within a minute: %s", what)
	}
}

func count(t *testing.T, pool *pgxpool.Pool, query string) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), query).Scan(&n))
	return n
}

// fault is a failure that can be mended while others run into it.
type fault struct {
	mu  sync.Mutex
	err error
}

func (f *fault) mend() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = nil
}

func (f *fault) get() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

var errBroken = errors.New("the other side is broken")

func newOrganization(tb testing.TB, pool *pgxpool.Pool) uuid.UUID {
	tb.Helper()
	var id uuid.UUID
	require.NoError(tb, pool.QueryRow(tb.Context(), "INSERT INTO organizations DEFAULT VALUES RETURNING id").Scan(&id))
	return id
}

func exec(tb testing.TB, pool *pgxpool.Pool, statement string, args ...any) {
	tb.Helper()
	_, err := pool.Exec(context.WithoutCancel(tb.Context()), statement, args...)
	require.NoError(tb, err)
}

// drain steps the bridge until nothing is due.
func drain(tb testing.TB, bridge *eventlog.Bridge) {
	tb.Helper()
	for {
		events, err := bridge.Step(tb.Context())
		require.NoError(tb, err)
		if events == 0 {
			return
		}
	}
}

func waitABit(tb testing.TB) {
	tb.Helper()
	select {
	case <-time.After(20 * time.Millisecond):
	case <-tb.Context().Done():
		require.NoError(tb, tb.Context().Err())
	}
}
