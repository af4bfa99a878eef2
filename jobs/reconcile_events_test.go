package jobs

import (
	"fmt"
	"testing"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
)

// Each run looks at the events of the last hours, the one at four o'clock at all.
func TestReconcileEventsLooksAtNewEventsOftenAndAtAllOnceADay(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	s.exec(t, `INSERT INTO event_log (organization_id, event_type, entity_kind, status, consumers, created_at, updated_at)
		SELECT $1, 'lead.won', 'lead', 'processing', '{gone-worker}', now() - created, now() - updated
		FROM (VALUES (interval '2 hours', interval '6 minutes'), ('2 hours', '4 minutes'), ('4 hours', '6 minutes')) AS v (created, updated)`, s.org)
	for _, run := range []struct {
		tick string
		done int
	}{{"2026-12-01T03:55:00Z", 1}, {"2026-12-01T04:00:00Z", 2}} {
		inserted, err := s.client.Insert(t.Context(), ReconcileEventsArgs{}, &river.InsertOpts{
			Metadata: fmt.Appendf(nil, `{"cron": "reconcile-events", "tick": %q}`, run.tick),
		})
		require.NoError(t, err)
		job := s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted)
		require.JSONEq(t, `{"settled": 0, "refanned": 0, "dropped": 1, "advanced": 0}`, string(job.Output()))
		require.Equal(t, run.done, one[int](t, s, "SELECT count(*) FROM event_log WHERE status = 'done'"))
	}
}
