package sql_test

import (
	"testing"
	"time"

	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
	"afluente/db/migrate"
)

// die makes a job that has used up its three attempts.
const die = `INSERT INTO river.river_job (kind, queue, args, state, attempt, max_attempts, finalized_at, attempted_at, errors, metadata)
	SELECT 'x-worker', 'x', '{}', $1::text::river.river_job_state, 3, 3, now(), now(), ARRAY['{"error": "broken"}'::jsonb], $2 RETURNING id`

// riverRetry is what River UI does.
const riverRetry = `UPDATE river.river_job
	SET state = 'available', max_attempts = CASE WHEN attempt = max_attempts THEN max_attempts + 1 ELSE max_attempts END,
		finalized_at = NULL, scheduled_at = now() WHERE id = $1`

func TestRetriedJobHasAllItsAttemptsAndItsHistory(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	listener := as(t, pool, pool.Config().ConnConfig.User, "")
	exec(t, listener, `LISTEN "river.river_insert"`)
	for _, state := range []string{"discarded", "cancelled", "completed"} {
		job := one[int64](t, pool, die, state, "{}")
		exec(t, pool, riverRetry, job)
		require.Equal(t, "available 0 3 {\"error\": \"broken\"}", one[string](t, pool,
			"SELECT concat_ws(' ', state, attempt, max_attempts, errors[1]) FROM river.river_job WHERE id = $1", job), state)
		notification, err := listener.WaitForNotification(t.Context())
		require.NoError(t, err)
		require.JSONEq(t, `{"queue": "x"}`, notification.Payload)
	}
	// A job that only waits for its next attempt keeps its count.
	job := one[int64](t, pool, `INSERT INTO river.river_job (kind, queue, args, state, attempt, max_attempts)
		VALUES ('x-worker', 'x', '{}', 'retryable', 2, 3) RETURNING id`)
	exec(t, pool, riverRetry, job)
	require.Equal(t, int16(2), one[int16](t, pool, "SELECT attempt FROM river.river_job WHERE id = $1", job))
}

func TestWhoDeletesADeadJobIsRecorded(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	event := one[string](t, pool, `INSERT INTO event_log (organization_id, event_type, entity_kind, status, consumers, dead_consumers)
		VALUES ($1, 'lead.won', 'lead', 'dead', '{x-worker}', '{x-worker}')
		RETURNING jsonb_build_object('event_id', id, 'event_created_at', created_at, 'consumer', 'x-worker', 'request_id', 'r-1')`, organization)
	job := one[int64](t, pool, die, "discarded", event)
	conn := as(t, pool, pool.Config().ConnConfig.User, "")
	exec(t, conn, "SET afluente.actor = 'ada'; ")
	exec(t, conn, "SET afluente.reason = 'a test order'")
	exec(t, conn, "DELETE FROM river.river_job WHERE id = $1", job)
	require.Equal(t, []string{organization.String() + ` ada dead_letter.discarded lead a test order x-worker lead.won r-1 broken`},
		column[string](t, pool, `SELECT concat_ws(' ', organization_id, actor_id, action, entity_kind, reason, metadata ->> 'consumer',
			metadata ->> 'event_type', metadata ->> 'request_id', metadata ->> 'error') FROM audit_log`))
	require.Equal(t, "done", one[string](t, pool, "SELECT status FROM event_log"), "nobody waits for it any more")

	// A job without an event, with anything in its metadata, and by nobody known.
	plain := one[int64](t, pool, die, "cancelled", `{"event_id": 7}`)
	exec(t, pool, "DELETE FROM river.river_job WHERE id = $1", plain)
	require.Equal(t, pool.Config().ConnConfig.User, one[string](t, pool, "SELECT actor_id FROM audit_log WHERE organization_id IS NULL"))
	// What is completed may be cleaned away without a word.
	exec(t, pool, "DELETE FROM river.river_job WHERE id = $1", one[int64](t, pool, die, "completed", "{}"))
	require.Equal(t, 2, one[int](t, pool, "SELECT count(*) FROM audit_log"))
}

// A retry in psql is one as well.
func TestJobRetriedInSQLHasAllItsAttempts(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	job := one[int64](t, pool, die, "discarded", "{}")
	exec(t, pool, "UPDATE river.river_job SET state = 'available', finalized_at = NULL WHERE id = $1", job)
	require.Equal(t, "0 3", one[string](t, pool, "SELECT concat_ws(' ', attempt, max_attempts) FROM river.river_job WHERE id = $1", job))
}

// River's own cleaner, of a client with its default retention, leaves dead jobs
// alone, and an operator does not.
func TestCleanerOfAnyClientKeepsDeadJobs(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	dead := []int64{one[int64](t, pool, die, "discarded", "{}"), one[int64](t, pool, die, "cancelled", "{}")}
	one[int64](t, pool, die, "completed", "{}")
	deleted, err := riverpgxv5.New(pool).GetExecutor().JobDeleteBefore(t.Context(), &riverdriver.JobDeleteBeforeParams{
		CancelledDoDelete: true, CancelledFinalizedAtHorizon: time.Now().Add(time.Hour),
		CompletedDoDelete: true, CompletedFinalizedAtHorizon: time.Now().Add(time.Hour),
		DiscardedDoDelete: true, DiscardedFinalizedAtHorizon: time.Now().Add(time.Hour),
		Max: 100, Schema: migrate.RiverSchema,
	})
	require.NoError(t, err)
	require.Equal(t, 1, deleted)
	require.ElementsMatch(t, dead, column[int64](t, pool, "SELECT id FROM river.river_job"))
	require.Zero(t, one[int](t, pool, "SELECT count(*) FROM audit_log"))
	exec(t, pool, "DELETE FROM river.river_job")
	require.Equal(t, 2, one[int](t, pool, "SELECT count(*) FROM audit_log"))
}

func TestEachDeathIsNoticedOnce(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	job := one[int64](t, pool, `INSERT INTO river.river_job (kind, queue, args, state, attempt, max_attempts)
		VALUES ('x-worker', 'x', '{}', 'running', 1, 3) RETURNING id`)
	set := func(changes string) { exec(t, pool, "UPDATE river.river_job SET "+changes+" WHERE id = $1", job) }
	noticed := func() []string {
		return column[string](t, pool, "SELECT concat_ws(' ', job_id = $1, consumer) FROM dead_letter_notices", job)
	}
	set("state = 'retryable'")
	require.Empty(t, noticed())
	set("state = 'discarded', finalized_at = now()")
	set("state = 'cancelled'")
	set("metadata = '{\"a\": 1}'")
	require.Equal(t, []string{"t x-worker"}, noticed())
	set("state = 'available', finalized_at = NULL")
	set("state = 'cancelled', finalized_at = now()")
	require.Len(t, noticed(), 2, "it died again")

	// Nobody can be told, and the job's state changes all the same.
	exec(t, pool, "ALTER TABLE dead_letter_notices RENAME TO away")
	set("state = 'available', finalized_at = NULL")
	set("state = 'discarded', finalized_at = now()")
	require.Equal(t, "discarded", one[string](t, pool, "SELECT state FROM river.river_job WHERE id = $1", job))
}

func TestDeadLettersShowWhateverAJobHolds(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	event := one[string](t, pool, `INSERT INTO event_log (organization_id, event_type, entity_kind, status)
		VALUES ($1, 'lead.won', 'lead', 'dead') RETURNING jsonb_build_object('event_id', id, 'event_created_at', created_at, 'consumer', 'x-worker')`, organization)
	for _, metadata := range []string{
		event, "{}", `{"event_id": 7}`, `{"event_id": "x", "event_created_at": "y", "consumer": "z"}`,
		`{"event_id": "00000000-0000-0000-0000-000000000000", "event_created_at": "2026-02-30T00:00:00Z", "consumer": "z"}`,
		`{"event_id": "00000000-0000-0000-0000-000000000000", "event_created_at": "2026-02-03T00:00:00Z", "consumer": "z"}`,
	} {
		one[int64](t, pool, die, "discarded", metadata)
	}
	one[int64](t, pool, die, "completed", event)
	require.ElementsMatch(t, []string{"lead.won lead broken", "broken", "broken", "broken", "broken", "broken"},
		column[string](t, pool, "SELECT concat_ws(' ', event_type, entity_kind, last_error) FROM dead_letters"))
}
