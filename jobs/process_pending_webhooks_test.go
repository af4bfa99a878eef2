package jobs

import (
	"testing"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
)

func TestProcessPendingWebhooksReleasesWhatIsDue(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	// No leader could do it: River's own work is not started until later.
	s.exec(t, `INSERT INTO river.river_job (kind, queue, args, state, attempt, max_attempts, scheduled_at)
		SELECT kind, queue, '{}', 'retryable', 1, 8, now() - ago
		FROM (VALUES ('webhook-dispatch-worker', 'webhooks', interval '1 minute'), ('webhook-dispatch-worker', 'webhooks', '10 seconds'),
			('webhook-dispatch-worker', 'webhooks', '-1 hour'), ('whatsapp-send-worker', 'whatsapp', '1 minute')) AS v (kind, queue, ago)`)
	worker := &processPendingWebhooksWorker{webhooks: s.deps.Webhooks}
	job := &river.Job[ProcessPendingWebhooksArgs]{JobRow: &rivertype.JobRow{}}
	_ = worker.Work(t.Context(), job) // its output has no place to go outside River
	require.Equal(t, 1, one[int](t, s, "SELECT count(*) FROM river.river_job WHERE state = 'available' AND queue = 'webhooks'"))
	require.Equal(t, 3, one[int](t, s, "SELECT count(*) FROM river.river_job WHERE state = 'retryable'"))

	s.exec(t, "DELETE FROM river.river_job")
	s.start(t)
	inserted, err := s.client.Insert(t.Context(), ProcessPendingWebhooksArgs{}, nil)
	require.NoError(t, err)
	require.JSONEq(t, `{"released": 0, "found": 0, "sealed": 0, "unsealed": 0, "expired": 0, "deleted": 0}`, string(s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted).Output()))
}
