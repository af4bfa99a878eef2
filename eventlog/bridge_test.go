package eventlog_test

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/eventlog/event"
)

func TestEachConsumerGetsExactlyOneJobHoweverManyBridgesRun(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil), anyEvent())
	b.emitMany(t, 1000)
	var bridges errgroup.Group
	for range 4 {
		bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: b.pool, Plan: b.plan, Log: zap.NewNop(), MaxBatch: 30})
		require.NoError(t, err)
		bridges.Go(func() error {
			for {
				events, err := bridge.Step(t.Context())
				if err != nil || events == 0 {
					return err
				}
			}
		})
	}
	require.NoError(t, bridges.Wait())
	require.Equal(t, 1000, count(t, b.pool, `SELECT count(*) FROM event_log
		WHERE status = 'processing' AND consumers = '{alpha-worker,any-worker,beta-worker}'`))
	require.Equal(t, 3000, count(t, b.pool, "SELECT count(*) FROM river.river_job"))
	require.Equal(t, 3000, count(t, b.pool, `SELECT count(DISTINCT (metadata ->> 'event_id', kind)) FROM river.river_job
		WHERE metadata ->> 'consumer' = kind`))
}

func TestEventIsCommittedTogetherWithItsJobsOrNothingIs(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil))
	for range 3 {
		b.emit(t, "m")
	}
	exec(t, b.pool, `ALTER TABLE river.river_job ADD CONSTRAINT broken CHECK (kind <> 'beta-worker')`)
	_, err := b.bridge.Step(t.Context())
	require.ErrorContains(t, err, "broken")
	require.Equal(t, 3, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'pending' AND consumers = '{}'"))
	require.Zero(t, count(t, b.pool, "SELECT count(*) FROM river.river_job"))

	exec(t, b.pool, `ALTER TABLE river.river_job DROP CONSTRAINT broken`)
	drain(t, b.bridge)
	require.Equal(t, 6, count(t, b.pool, "SELECT count(*) FROM river.river_job"))
}

func TestEventNobodyWantsIsDoneAtOnce(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	id := b.emitRaw(t, "lead.created", `{}`)
	drain(t, b.bridge)
	e := b.event(t, id)
	require.Equal(t, "done", e.Status)
	require.Empty(t, e.Consumers)
	require.Empty(t, b.jobs(t, id))
}

func TestJobIsMadeAsDeclared(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil))
	id := b.emit(t, "m-1")
	drain(t, b.bridge)

	alphaJob := b.job(t, id, "alpha-worker")
	require.Equal(t, "default", alphaJob.Queue)
	require.EqualValues(t, 8, alphaJob.MaxAttempts)
	betaJob := b.job(t, id, "beta-worker")
	require.Equal(t, "beta", betaJob.Queue)
	require.EqualValues(t, 3, betaJob.MaxAttempts)
	require.Equal(t, "available", string(betaJob.State))

	// The database's clock, not this machine's: they are the same here, so the
	// test is that the job's time is that of the transaction, to the microsecond.
	require.Equal(t, 1, count(t, b.pool, `SELECT count(*) FROM river.river_job AS j JOIN event_log AS e
		ON j.kind = 'beta-worker' AND j.priority = 2 AND j.created_at = e.updated_at
		AND j.scheduled_at BETWEEN e.updated_at - interval '1.1 seconds' AND e.updated_at`))
	require.Equal(t, 2, count(t, b.pool, `SELECT count(*) FROM river.river_job AS j JOIN event_log AS e
		ON e.id = (j.metadata ->> 'event_id')::uuid AND e.created_at = (j.metadata ->> 'event_created_at')::timestamptz
		WHERE j.args = '{"message_id": "m-1"}' AND NOT j.metadata ? 'deferred'`))
}

func TestConsumerOfANewerProgramGetsItsJobFromAnOlderBridge(t *testing.T) {
	t.Parallel()
	older := newBus(t, alpha(nil))
	older.start(t)
	got := make(chan betaArgs, 1)
	newer := joinBus(t, older.pool, older.organization,
		alpha(nil), beta(func(_ context.Context, job *river.Job[betaArgs]) error {
			got <- job.Args
			return nil
		}), anyEvent())

	id := older.emit(t, "m-1")
	drain(t, older.bridge)
	require.Equal(t, []string{"alpha-worker", "any-worker", "beta-worker"}, older.event(t, id).Consumers)
	eventually(t, "alpha done", func() bool { return string(older.job(t, id, "alpha-worker").State) == "completed" })
	for _, unknown := range []string{"any-worker", "beta-worker"} { // the first is in a queue that the older one works on
		job := older.job(t, id, unknown)
		require.Equal(t, "available", string(job.State))
		require.Zero(t, job.Attempt)
	}

	newer.start(t)
	require.Equal(t, betaArgs{MessageID: "m-1"}, <-got)
	older.awaitStatus(t, id, "done")

	// The older program starts again, and takes nothing from the newer one.
	require.NoError(t, eventlog.Register(t.Context(), older.pool, older.plan))
	require.Equal(t, 3, count(t, older.pool, "SELECT count(*) FROM event_consumers"))
}

func TestRegisterOnlyAddsTypes(t *testing.T) {
	t.Parallel()
	newer := newBus(t, eventlog.On(func(eventlog.Event[event.MessageSent]) alphaArgs { return alphaArgs{} }, &worker[alphaArgs]{}))
	older := joinBus(t, newer.pool, newer.organization, alpha(func(context.Context, *river.Job[alphaArgs]) error { return errBroken }))
	require.Equal(t, 1, count(t, newer.pool, `SELECT count(*) FROM event_consumers
		WHERE event_types = '{message.queued,message.sent}'`))

	// A program that has given the type up lets such an event pass.
	id := older.emit(t, "m")
	drain(t, newer.bridge)
	newer.start(t)
	newer.awaitStatus(t, id, "done")
}

func TestUnreadableEventIsDeadForThatConsumerAloneAndThoseBehindItGoOn(t *testing.T) {
	t.Parallel()
	panicking := eventlog.On(func(e eventlog.Event[event.MessageQueued]) betaArgs {
		if e.Payload.MessageID == "panic" {
			panic("no such\x00message")
		}
		return betaArgs{MessageID: e.Payload.MessageID}
	}, &worker[betaArgs]{})
	b := newBus(t, alpha(nil), panicking, anyEvent())
	wrongType := b.emitRaw(t, "message.queued", `{"message_id": 12345}`)
	panics := b.emit(t, "panic")
	good := b.emit(t, "good")
	drain(t, b.bridge)
	b.start(t)
	b.awaitStatus(t, good, "done")

	e := b.awaitStatus(t, wrongType, "dead")
	eventually(t, "three jobs ended", func() bool {
		e = b.event(t, wrongType)
		return len(e.DeadConsumers) == 2 && len(e.ConsumedBy) == 1
	})
	require.ElementsMatch(t, []string{"alpha-worker", "beta-worker"}, e.DeadConsumers)
	require.Equal(t, []string{"any-worker"}, e.ConsumedBy)
	require.Contains(t, *e.LastError, `-worker: `)
	require.Contains(t, *e.LastError, `field "message_id": want string, got number`)
	require.NotContains(t, *e.LastError, "12345")
	require.Equal(t, "cancelled", string(b.job(t, wrongType, "alpha-worker").State))

	eventually(t, "panic dead", func() bool { return len(b.event(t, panics).DeadConsumers) == 1 })
	e = b.event(t, panics)
	require.Equal(t, []string{"beta-worker"}, e.DeadConsumers)
	require.Equal(t, `beta-worker: no such\0message`, *e.LastError)
	require.EqualValues(t, 3, e.Attempts)
}

func TestLargePayloadIsProjectedByTheJob(t *testing.T) {
	t.Parallel()
	got := make(chan alphaArgs, 1)
	b := newBus(t, alpha(func(_ context.Context, job *river.Job[alphaArgs]) error {
		got <- job.Args
		return nil
	}))
	large := make([]byte, 1<<20-1000)
	chance := rand.New(rand.NewPCG(1, 2))
	for i := range large { // what does not compress
		large[i] = byte('a' + chance.IntN(26))
	}
	id := b.emitRaw(t, "message.queued", `{"message_id": "m-1", "filler": "`+string(large)+`"}`)
	drain(t, b.bridge)
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE args = '{}' AND metadata @> '{\"deferred\": true}'"))
	b.start(t)
	require.Equal(t, alphaArgs{MessageID: "m-1"}, <-got)
	b.awaitStatus(t, id, "done")
}

func TestProjectionThatMakesUnstorableArgsEndsWithTheJob(t *testing.T) {
	t.Parallel()
	fat := eventlog.On(func(e eventlog.Event[event.MessageQueued]) alphaArgs {
		return alphaArgs{MessageID: strings.Repeat(e.Payload.MessageID, 100_000)}
	}, &worker[alphaArgs]{})
	nul := eventlog.On(func(event eventlog.Event[event.MessageQueued]) betaArgs {
		return betaArgs{MessageID: event.Payload.MessageID + "\x00"}
	}, &worker[betaArgs]{})
	b := newBus(t, fat, nul)
	id := b.emit(t, "m")
	drain(t, b.bridge)
	require.Equal(t, 2, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE args = '{}'"))
	b.start(t)
	b.awaitStatus(t, id, "done")
}

// The SQL of the specification's appendix A.
func TestReprocessingByHandFansOutAgain(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil))
	b.start(t)
	id := b.emit(t, "m")
	drain(t, b.bridge)
	b.awaitStatus(t, id, "done")
	exec(t, b.pool, `UPDATE event_log SET status = 'pending', attempts = 0, next_attempt_at = now(), last_error = NULL,
		consumed_by = '{alpha-worker}' WHERE id = $1`, id)
	drain(t, b.bridge)
	b.awaitStatus(t, id, "done")
	require.Len(t, b.jobs(t, id), 3, "one more for beta, none for alpha")
}

func TestRunHearsOfUrgentEventsAndFindsAllOthers(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), anyEvent())
	config := b.pool.Config() // a pool of its own, to break
	config.ConnConfig.RuntimeParams["application_name"] = "bridge"
	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: dbtest.Pool(t, config), Plan: b.plan, Log: zap.NewNop()})
	require.NoError(t, err)
	b.run(t, bridge)
	eventually(t, "listening", func() bool { return b.listeners(t) == 1 })
	for _, eventType := range []string{"message.queued", "lead.created"} {
		id := b.emitRaw(t, eventType, `{"message_id": "m"}`)
		b.awaitStatus(t, id, "processing")
	}

	// It outlives its connections: first the one that listens, then all.
	for _, which := range []string{"query = 'LISTEN event_log_high'", "application_name = 'bridge'"} {
		killed := count(t, b.pool, `WITH victims AS MATERIALIZED (SELECT pid FROM pg_stat_activity
				WHERE datname = current_database() AND pid <> pg_backend_pid() AND `+which+`)
			SELECT count(*) FILTER (WHERE pg_terminate_backend(pid, 10000)) FROM victims`)
		require.Positive(t, killed)
		b.awaitStatus(t, b.emit(t, "after"), "processing")
		eventually(t, "listening again", func() bool { return b.listeners(t) == 1 })
	}
}

func TestEmittingNotifiesOnceAStatement(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	conn, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), "LISTEN event_log_high")
	require.NoError(t, err)

	b.emitRaw(t, "lead.created", `{}`) // not urgent
	exec(t, b.pool, `INSERT INTO event_log (organization_id, event_type, entity_kind)
		SELECT $1, 'message.received', 'message' FROM generate_series(1, 100)`, b.organization)
	b.emit(t, "m")
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		_, err := conn.Conn().WaitForNotification(ctx)
		cancel()
		require.NoError(t, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = conn.Conn().WaitForNotification(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestWorkersAreToldOfTheJobsOfEachStep(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil))
	conn, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), `LISTEN "river.river_insert"`)
	require.NoError(t, err)

	for range 5 { // the faster, the more of them River would be silent about
		b.emit(t, "m")
		_, err := b.bridge.Step(t.Context())
		require.NoError(t, err)
	}
	told := make(map[string]int)
	for range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		notification, err := conn.Conn().WaitForNotification(ctx)
		cancel()
		require.NoError(t, err)
		told[notification.Payload]++
	}
	require.Equal(t, map[string]int{`{"queue": "default"}`: 5, `{"queue": "beta"}`: 5}, told)
}

func TestLoadReturnsTheStoredEvent(t *testing.T) {
	t.Parallel()
	type loaded struct {
		event eventlog.Loaded
		err   error
	}
	results := make(chan loaded, 100)
	var events *eventlog.Events
	b := newBus(t, alpha(func(ctx context.Context, job *river.Job[alphaArgs]) error {
		e, err := events.Load(ctx, job.JobRow)
		results <- loaded{e, err}
		return nil
	}))
	events = eventlog.NewEvents(b.pool)
	want := make(map[uuid.UUID]string)
	for range 50 {
		message := uuid.NewString()
		want[b.emit(t, message)] = message
	}
	drain(t, b.bridge)
	b.start(t)
	for range want {
		got := <-results
		require.NoError(t, got.err)
		var payload event.MessageQueued
		require.NoError(t, json.Unmarshal(got.event.Payload, &payload))
		require.Equal(t, want[got.event.ID], payload.MessageID)
		require.Equal(t, "message.queued", got.event.Type)
		require.Equal(t, b.organization, got.event.OrganizationID)
	}

	_, err := b.client.Insert(t.Context(), alphaArgs{}, nil)
	require.NoError(t, err)
	require.ErrorIs(t, (<-results).err, eventlog.ErrNoEvent, "a job that no event stands behind")
	id := b.emit(t, "gone")
	exec(t, b.pool, "DELETE FROM event_log WHERE id = $1", id)
	exec(t, b.pool, `INSERT INTO river.river_job (kind, args, max_attempts, metadata) VALUES ('alpha-worker', '{}', 1,
		jsonb_build_object('event_id', $1::uuid, 'event_created_at', '2026-01-01T00:00:00Z', 'consumer', 'alpha-worker'))`, id)
	require.ErrorIs(t, (<-results).err, eventlog.ErrNoEvent, "a job whose event is gone")
}

// run runs the bridge until the test ends.
func (b *bus) run(t *testing.T, bridge *eventlog.Bridge) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running errgroup.Group
	running.Go(func() error { return bridge.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		if err := running.Wait(); err != nil {
			t.Error("run bridge:", err)
		}
	})
}

func TestBridgeTendsToTheIndexesOfJobs(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	exec(t, b.pool, "ALTER TABLE river.river_job SET (autovacuum_enabled = off)") // which does it, too
	b.emitMany(t, 100)
	drain(t, b.bridge)
	flush := func() int { return count(t, b.pool, "SELECT flush_job_indexes()") }
	require.Positive(t, flush())
	require.Zero(t, flush())

	exec(t, b.pool, "CREATE TABLE flushes ()")
	exec(t, b.pool, "CREATE OR REPLACE FUNCTION flush_job_indexes() RETURNS bigint LANGUAGE sql AS 'INSERT INTO public.flushes DEFAULT VALUES RETURNING 0'")
	b.run(t, b.bridge)
	eventually(t, "they are tended to again and again", func() bool { return count(t, b.pool, "SELECT count(*) FROM flushes") > 1 })
}

func TestUrgentEventDoesNotWaitForThePoll(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	b.bridge.SetPollInterval(time.Hour)
	b.run(t, b.bridge)
	eventually(t, "listening", func() bool { return b.listeners(t) == 1 })
	for range 3 {
		b.awaitStatus(t, b.emit(t, "m"), "processing")
	}
}

func TestPollOnlyBridgeDoesNotListen(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: b.pool, Plan: b.plan, Log: zap.NewNop(), PollOnly: true})
	require.NoError(t, err)
	b.run(t, bridge)
	for range 2 {
		b.awaitStatus(t, b.emit(t, "m"), "processing")
	}
	require.Zero(t, b.listeners(t))
}

func (b *bus) listeners(t *testing.T) int {
	t.Helper()
	return count(t, b.pool, `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND query = 'LISTEN event_log_high'`)
}
