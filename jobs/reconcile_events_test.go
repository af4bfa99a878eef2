package jobs

import (
	"testing"

	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
)

func TestReconcileEventsRuns(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	s.exec(t, `INSERT INTO event_log (organization_id, event_type, entity_kind, status, consumers, updated_at)
		VALUES ($1, 'lead.won', 'lead', 'processing', '{gone-worker}', now() - interval '6 minutes'),
			($1, 'lead.won', 'lead', 'processing', '{gone-worker}', now() - interval '4 minutes')`, s.org)
	inserted, err := s.client.Insert(t.Context(), ReconcileEventsArgs{}, nil)
	require.NoError(t, err)
	job := s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted)
	require.JSONEq(t, `{"settled": 0, "refanned": 0, "dropped": 1}`, string(job.Output()))
	require.Equal(t, 1, one[int](t, s, "SELECT count(*) FROM event_log WHERE status = 'done'"))
}
