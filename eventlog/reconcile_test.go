package eventlog_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"afluente/db"
	"afluente/eventlog"
)

// Whatever an event waits for that no living job does is settled or fanned out
// anew, and what lives is left alone.
func TestReconcileNeverDoublesWhatLives(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil))
	events := make(map[string]uuid.UUID)
	for _, name := range []string{"lives", "retries", "completed", "dead", "lost", "half lost", "fresh"} {
		events[name] = b.emit(t, name)
	}
	drain(t, b.bridge)
	exec(t, b.pool, "ALTER TABLE river.river_job DISABLE TRIGGER USER")
	for name, statement := range map[string]string{
		"retries":   "UPDATE river.river_job SET " + fail,
		"completed": "UPDATE river.river_job SET " + complete,
		"dead":      "UPDATE river.river_job SET " + discard,
		"lost":      "DELETE FROM river.river_job",
		"half lost": "DELETE FROM river.river_job",
		"fresh":     "DELETE FROM river.river_job",
	} {
		statement += " WHERE metadata ->> 'event_id' = $1"
		if name == "half lost" {
			statement += " AND kind = 'beta-worker'"
		}
		exec(t, b.pool, statement, events[name].String())
	}
	exec(t, b.pool, "ALTER TABLE river.river_job ENABLE TRIGGER USER")
	exec(t, b.pool, "UPDATE event_log SET updated_at = now() - interval '6 minutes' WHERE id <> $1", events["fresh"])

	done, err := eventlog.Reconcile(t.Context(), b.pool, time.Now().Add(-time.Hour), 5*time.Minute)
	require.NoError(t, err)
	require.Equal(t, eventlog.Reconciled{Settled: 4, Refanned: 3}, done)
	require.Equal(t, "done", b.event(t, events["completed"]).Status)
	require.Equal(t, "dead", b.event(t, events["dead"]).Status)
	for name, want := range map[string]int{"lives": 2, "retries": 2, "lost": 2, "half lost": 2, "fresh": 0} {
		require.Len(t, b.jobs(t, events[name]), want, name)
		require.Equal(t, "processing", b.event(t, events[name]).Status, name)
	}

	done, err = eventlog.Reconcile(t.Context(), b.pool, time.Now().Add(-time.Hour), 5*time.Minute)
	require.NoError(t, err)
	require.Zero(t, done, "a second time finds nothing")
	b.start(t)
	for _, name := range []string{"lives", "lost", "half lost"} {
		e := b.awaitStatus(t, events[name], "done")
		require.ElementsMatch(t, []string{"alpha-worker", "beta-worker"}, e.ConsumedBy)
	}
}

// An event that waits for a consumer that was retired is done without it.
func TestReconcileDropsARetiredConsumer(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil))
	b.emitMany(t, 2100) // two pages
	drain(t, b.bridge)
	exec(t, b.pool, "UPDATE river.river_job SET "+complete+" WHERE kind = 'alpha-worker'")
	exec(t, b.pool, "ALTER TABLE river.river_job DISABLE TRIGGER USER")
	exec(t, b.pool, "DELETE FROM river.river_job WHERE kind = 'beta-worker'")
	exec(t, b.pool, "DELETE FROM event_consumers WHERE name = 'beta-worker'")
	done, err := eventlog.Reconcile(t.Context(), b.pool, time.Time{}, -time.Minute)
	require.NoError(t, err)
	require.Equal(t, eventlog.Reconciled{Dropped: 2100}, done)
	require.Equal(t, 2100, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'done' AND consumers = '{alpha-worker}'"))
}

// River's GIN indexes may be dropped for what README puts in their place.
func TestJobsAreFoundWithoutTheIndexesOfRiver(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	id := b.emit(t, "m-1")
	drain(t, b.bridge)
	for _, statement := range []string{
		"CREATE INDEX jobs_of_events ON river.river_job ((metadata ->> 'event_id')) WHERE metadata ? 'event_id'",
		"DROP INDEX river.river_job_metadata_index, river.river_job_args_index",
	} {
		exec(t, b.pool, statement)
	}
	require.Len(t, b.jobs(t, id), 1)
	done, err := eventlog.Reconcile(t.Context(), b.pool, time.Time{}, 0)
	require.NoError(t, err)
	require.Equal(t, eventlog.Reconciled{}, done)

	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	require.NoError(t, db.New(tx).UseJobIndexes(t.Context()))
	rows, err := tx.Query(t.Context(), `EXPLAIN SELECT FROM river.river_job
		WHERE metadata @> jsonb_build_object('event_id', $1::text) AND metadata ? 'event_id' AND metadata ->> 'event_id' = $1::text`, id.String())
	require.NoError(t, err)
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Contains(t, strings.Join(plan, "\n"), "jobs_of_events")
}
