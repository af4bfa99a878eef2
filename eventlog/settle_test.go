package eventlog_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// twoJobs is an event that was fanned out to alpha and beta, whose jobs nobody
// works on but the test.
func twoJobs(t *testing.T) (b *bus, id uuid.UUID, alphaJob int64) {
	t.Helper()
	b = newBus(t, alpha(nil), beta(nil))
	id = b.emit(t, "m")
	drain(t, b.bridge)
	return b, id, b.job(t, id, "alpha-worker").ID
}

// set changes alpha's job as River's statements do.
func set(t *testing.T, b *bus, job int64, changes string) {
	t.Helper()
	exec(t, b.pool, "UPDATE river.river_job SET "+changes+" WHERE id = $1", job)
}

const (
	run      = "state = 'running', attempt = attempt + 1, attempted_at = now()"
	complete = "state = 'completed', finalized_at = now()"
	discard  = `state = 'discarded', finalized_at = now(), errors = array_append(errors, '{"error": "boom"}')`
	fail     = `state = 'retryable', scheduled_at = now() + interval '1 hour', errors = array_append(errors, '{"error": "boom"}')`
	again    = "state = 'available', finalized_at = NULL, scheduled_at = now()"
)

func TestEventFollowsItsJob(t *testing.T) {
	t.Parallel()
	type state struct {
		status      string
		consumedBy  []string
		dead        []string
		attempts    int16
		lastError   string
		waitsForJob bool // next_attempt_at is set
	}
	tests := []struct {
		name    string
		changes []string // one statement each
		want    state
	}{
		{"running", []string{run}, state{status: "processing"}},
		{"completed", []string{run, complete}, state{
			status: "processing", consumedBy: []string{"alpha-worker"}, attempts: 1,
		}},
		{"failed", []string{run, fail}, state{
			status: "processing", attempts: 1, lastError: "alpha-worker: boom", waitsForJob: true,
		}},
		{"scheduled after a failure", []string{run, fail, again}, state{
			status: "processing", attempts: 1, lastError: "alpha-worker: boom",
		}},
		{"discarded", []string{run, fail, again, run, discard}, state{
			status: "dead", dead: []string{"alpha-worker"}, attempts: 2, lastError: "alpha-worker: boom",
		}},
		{"discarded without an error", []string{"state = 'discarded', finalized_at = now()"}, state{
			status: "dead", dead: []string{"alpha-worker"}, lastError: "alpha-worker: discarded",
		}},
		{"cancelled while it waits", []string{"state = 'cancelled', finalized_at = now()"}, state{
			status: "dead", dead: []string{"alpha-worker"}, lastError: "alpha-worker: cancelled",
		}},
		{"retried by an operator", []string{run, discard, again}, state{
			status: "processing", attempts: 1, lastError: "alpha-worker: boom",
		}},
		{"retried and completed", []string{run, discard, again, run, complete}, state{
			status: "processing", consumedBy: []string{"alpha-worker"}, attempts: 1, lastError: "alpha-worker: boom",
		}},
		{"completed and run again by an operator", []string{run, complete, again}, state{
			status: "processing", attempts: 1,
		}},
	}
	b := newBus(t, alpha(nil), beta(nil))
	for _, tt := range tests {
		id := b.emit(t, "m")
		drain(t, b.bridge)
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			job := b.job(t, id, "alpha-worker").ID
			for _, change := range tt.changes {
				set(t, b, job, change)
			}
			e := b.event(t, id)
			require.Equal(t, tt.want.status, e.Status)
			require.ElementsMatch(t, tt.want.consumedBy, e.ConsumedBy)
			require.ElementsMatch(t, tt.want.dead, e.DeadConsumers)
			require.Equal(t, tt.want.attempts, e.Attempts)
			require.Equal(t, tt.want.waitsForJob, e.NextAttemptAt != nil)
			if tt.want.lastError == "" {
				require.Nil(t, e.LastError)
			} else {
				require.Equal(t, tt.want.lastError, *e.LastError)
			}
		})
	}
}

func TestDeadWinsOverDoneAndProcessing(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	betaJob := b.job(t, id, "beta-worker").ID
	set(t, b, alphaJob, discard)
	require.Equal(t, "dead", b.event(t, id).Status)
	set(t, b, betaJob, fail)
	require.Equal(t, "dead", b.event(t, id).Status)
	set(t, b, betaJob, complete)
	require.Equal(t, "dead", b.event(t, id).Status)
	set(t, b, alphaJob, again)
	require.Equal(t, "processing", b.event(t, id).Status)
	set(t, b, alphaJob, complete)
	e := b.event(t, id)
	require.Equal(t, "done", e.Status)
	require.Equal(t, []string{"beta-worker", "alpha-worker"}, e.ConsumedBy)
}

func TestNextAttemptIsTheEarliestRetry(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	betaJob := b.job(t, id, "beta-worker").ID
	set(t, b, alphaJob, fail)
	set(t, b, betaJob, `state = 'retryable', scheduled_at = now() + interval '1 minute'`)
	require.WithinDuration(t, time.Now().Add(time.Minute), *b.event(t, id).NextAttemptAt, 20*time.Second)
	set(t, b, betaJob, complete)
	require.WithinDuration(t, time.Now().Add(time.Hour), *b.event(t, id).NextAttemptAt, 20*time.Second)
	set(t, b, alphaJob, complete)
	require.Nil(t, b.event(t, id).NextAttemptAt)
}

func TestDeletingADeadJobDiscardsItForGood(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	set(t, b, b.job(t, id, "beta-worker").ID, complete)
	set(t, b, alphaJob, discard)
	_, err := b.client.JobDelete(t.Context(), alphaJob)
	require.NoError(t, err)
	e := b.event(t, id)
	require.Equal(t, "done", e.Status)
	require.Equal(t, []string{"beta-worker"}, e.Consumers)
	require.Empty(t, e.DeadConsumers)
}

func TestDeletingACompletedJobChangesNothing(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	set(t, b, alphaJob, complete)
	before := b.event(t, id)
	exec(t, b.pool, "DELETE FROM river.river_job WHERE state = 'completed'")
	require.Equal(t, before, b.event(t, id))
}

func TestRiverClientSettlesByRetryAndCancel(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	_, err := b.client.JobCancel(t.Context(), alphaJob)
	require.NoError(t, err)
	require.Equal(t, "dead", b.event(t, id).Status)
	_, err = b.client.JobRetry(t.Context(), alphaJob)
	require.NoError(t, err)
	require.Equal(t, "processing", b.event(t, id).Status)
	b.start(t)
	b.awaitStatus(t, id, "done")
}

// The state changes in the job's own transaction.
func TestEventSettlesInTheTransactionOfItsJob(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "UPDATE river.river_job SET "+discard+" WHERE id = $1", alphaJob)
	require.NoError(t, err)
	require.Equal(t, "processing", b.event(t, id).Status)
	var inside string
	require.NoError(t, tx.QueryRow(t.Context(), "SELECT status FROM event_log WHERE id = $1", id).Scan(&inside))
	require.Equal(t, "dead", inside)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, "processing", b.event(t, id).Status)
}

func TestSettlingNeverFailsTheStatement(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	for _, metadata := range []string{
		`{"event_id": "nonsense", "event_created_at": "2026-01-01T00:00:00Z", "consumer": "c"}`,
		`{"event_id": "00000000-0000-4000-8000-000000000001", "event_created_at": "2026-13-41T00:00:00Z", "consumer": "c"}`,
		`{"event_id": "00000000-0000-4000-8000-000000000001", "event_created_at": "2026-01-01T00:00:00Z", "consumer": null}`,
		`{"event_id": "00000000-0000-4000-8000-000000000001", "event_created_at": "2026-01-01T00:00:00Z"}`,
		`{"event_id": {"a": [1]}, "event_created_at": 7, "consumer": []}`,
		`{"event_id": null}`,
		`{}`,
	} {
		exec(t, b.pool, `INSERT INTO river.river_job (kind, args, max_attempts, metadata) VALUES ('x', '{}', 1, $1)`, metadata)
	}
	exec(t, b.pool, "UPDATE river.river_job SET "+complete)
	require.Equal(t, "done", b.event(t, id).Status)
	require.Zero(t, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE state <> 'completed'"))
	exec(t, b.pool, "UPDATE river.river_job SET "+discard)
	require.Equal(t, "dead", b.event(t, id).Status)
	exec(t, b.pool, "DELETE FROM river.river_job WHERE id <> $1", alphaJob)
	require.Equal(t, []string{"alpha-worker"}, b.event(t, id).DeadConsumers)
}

// One transaction settles events one by one in one order, as River UI does
// with a list of jobs; statements over all of them go on meanwhile.
func TestSettlingSurvivesDeadlocks(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil))
	for range 20 {
		b.emit(t, "m")
	}
	drain(t, b.bridge)
	var settling errgroup.Group
	for _, order := range []string{"DESC", "ASC"} {
		settling.Go(func() error {
			for range 3 {
				err := pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
					rows, err := tx.Query(t.Context(), "SELECT id FROM river.river_job WHERE kind = 'alpha-worker' ORDER BY metadata ->> 'event_id' "+order)
					if err != nil {
						return err
					}
					ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
					if err != nil {
						return err
					}
					if order == "ASC" {
						_, err := tx.Exec(t.Context(), "UPDATE river.river_job SET "+complete+" WHERE kind = 'beta-worker'")
						return err
					}
					for _, id := range ids {
						if _, err := tx.Exec(t.Context(), "UPDATE river.river_job SET "+complete+" WHERE id = $1", id); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					return fmt.Errorf("%s: %w", order, err)
				}
			}
			return nil
		})
	}
	require.NoError(t, settling.Wait())
	require.Equal(t, 20, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'done'"))
}

func TestConcurrentCompletionsOfOneEventAreBothKept(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	betaJob := b.job(t, id, "beta-worker").ID
	first, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = first.Exec(t.Context(), "UPDATE river.river_job SET "+complete+" WHERE id = $1", alphaJob)
	require.NoError(t, err)
	var second errgroup.Group
	second.Go(func() error {
		_, err := b.pool.Exec(t.Context(), "UPDATE river.river_job SET "+complete+" WHERE id = $1", betaJob)
		return err
	})
	b.awaitLockWaiter(t)
	require.NoError(t, first.Commit(t.Context()))
	require.NoError(t, second.Wait())
	require.Equal(t, "done", b.event(t, id).Status)
}

func TestFailingConsumerWalksEightAttemptsAndTouchesNoOther(t *testing.T) {
	t.Parallel()
	broken := &fault{err: errBroken}
	b := newBus(t, alpha(func(context.Context, *river.Job[alphaArgs]) error { return broken.get() }), beta(nil))
	b.start(t)
	id := b.emit(t, "m")
	drain(t, b.bridge)
	e := b.awaitStatus(t, id, "dead")
	require.EqualValues(t, 8, e.Attempts)
	require.Equal(t, "alpha-worker: the other side is broken", *e.LastError)
	eventually(t, "beta done", func() bool { return len(b.event(t, id).ConsumedBy) == 1 })
	require.Equal(t, []string{"beta-worker"}, b.event(t, id).ConsumedBy)
	job := b.job(t, id, "alpha-worker")
	require.Equal(t, "discarded", string(job.State))
	require.EqualValues(t, 8, job.Attempt)

	broken.mend()
	_, err := b.client.JobRetry(t.Context(), job.ID)
	require.NoError(t, err)
	require.Equal(t, "processing", b.event(t, id).Status)
	b.awaitStatus(t, id, "done")
}

// The other transaction holds the event that the statement wants second, and
// then wants the one that the statement has. Whoever of the two PostgreSQL
// would take for the victim, neither fails and nothing is lost.
func TestSettlingLetsGoOfEventsUnderContention(t *testing.T) {
	t.Parallel()
	for name, timeouts := range map[string]struct{ batch, oneByOne string }{
		"batch is the victim":      {"50ms", "30s"},
		"one by one is the victim": {"30s", "50ms"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBus(t, alpha(nil), beta(nil))
			for range 2 {
				b.emit(t, "m")
			}
			drain(t, b.bridge)
			byEvent := func(nth int) (job int64) {
				require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT id FROM river.river_job WHERE kind = 'alpha-worker'
					ORDER BY metadata ->> 'event_id' OFFSET $1 LIMIT 1`, nth).Scan(&job))
				return job
			}
			first, second := byEvent(0), byEvent(1)
			oneByOne, err := b.pool.Begin(t.Context())
			require.NoError(t, err)
			for statement, arg := range map[string]any{
				"SELECT set_config('deadlock_timeout', $1, true)":          timeouts.oneByOne,
				"UPDATE river.river_job SET " + discard + " WHERE id = $1": second,
			} {
				_, err = oneByOne.Exec(t.Context(), statement, arg)
				require.NoError(t, err)
			}

			var batch errgroup.Group
			batch.Go(func() error {
				return pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
					if _, err := tx.Exec(t.Context(), "SELECT set_config('deadlock_timeout', $1, true)", timeouts.batch); err != nil {
						return err
					}
					_, err := tx.Exec(t.Context(), "UPDATE river.river_job SET "+complete+" WHERE kind = 'beta-worker'")
					return err
				})
			})
			b.awaitLockWaiter(t)
			_, err = oneByOne.Exec(t.Context(), "UPDATE river.river_job SET "+discard+" WHERE id = $1", first)
			require.NoError(t, err)
			require.NoError(t, oneByOne.Commit(t.Context()))
			require.NoError(t, batch.Wait())
			require.Equal(t, 2, count(t, b.pool, `SELECT count(*) FROM event_log
				WHERE status = 'dead' AND dead_consumers = '{alpha-worker}' AND consumed_by = '{beta-worker}'`))
		})
	}
}

func TestSettlingOutwaitsAHeldEvent(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	holder, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), "SELECT FROM event_log WHERE id = $1 FOR UPDATE", id)
	require.NoError(t, err)
	var settling errgroup.Group
	settling.Go(func() error {
		_, err := b.pool.Exec(t.Context(), "UPDATE river.river_job SET "+complete+" WHERE id = $1", alphaJob)
		return err
	})
	eventually(t, "settling waits for longer than its lock_timeout", func() bool {
		return count(t, b.pool, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND query LIKE 'UPDATE river.river_job%' AND state = 'active' AND now() - query_start > interval '1 second'`) == 1
	})
	require.NoError(t, holder.Commit(t.Context()))
	require.NoError(t, settling.Wait())
	require.Equal(t, []string{"alpha-worker"}, b.event(t, id).ConsumedBy)
}

// River's own rescuer and scheduler: a process was killed while it worked.
func TestJobOfAKilledProcessRunsElsewhere(t *testing.T) {
	t.Parallel()
	b, id, alphaJob := twoJobs(t)
	set(t, b, alphaJob, "state = 'running', attempt = 1, attempted_at = now() - interval '2 minutes', attempted_by = '{killed}'")
	b.start(t)
	e := b.awaitStatus(t, id, "done")
	require.Equal(t, "alpha-worker: Stuck job rescued by JobRescuer", *e.LastError)
	require.EqualValues(t, 2, e.Attempts)
	require.Nil(t, e.NextAttemptAt)
	require.ElementsMatch(t, []string{"alpha-worker", "beta-worker"}, e.ConsumedBy)
}

// A month begins empty, and sessions keep the plans that they made of it then: those
// that read all of it for each event must not outlive its first events.
func TestMonthThatBeginsIsNotReadForEachEvent(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	exec(t, b.pool, "VACUUM ANALYZE")
	session, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer session.Release()
	const complete = "UPDATE river.river_job SET state = 'completed', finalized_at = now()"
	_, err = session.Exec(t.Context(), complete) // nothing, but there is a plan now
	require.NoError(t, err)

	const events = 1000
	b.emitMany(t, events)
	b.run(t, b.bridge)
	eventually(t, "a job for each event", func() bool { return count(t, b.pool, "SELECT count(*) FROM river.river_job") == events })
	eventually(t, "statistics", func() bool {
		return count(t, b.pool, `SELECT count(*) FROM pg_partition_tree('event_log') JOIN pg_class ON oid = relid WHERE reltuples >= 1000`) > 0
	})

	tx, err := session.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context())
	completed, err := tx.Exec(t.Context(), complete)
	require.NoError(t, err)
	require.EqualValues(t, events, completed.RowsAffected())
	var read int
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT sum(idx_tup_fetch) FROM pg_stat_xact_user_tables WHERE relname ^@ 'event_log_'`).Scan(&read))
	require.Less(t, read, 10*events)
}
