package eventlog_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

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
