package sql_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
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
