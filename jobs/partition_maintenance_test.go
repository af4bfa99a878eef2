package jobs

import (
	"testing"

	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
)

func TestPartitionMaintenanceMakesMonthsAndForgetsOldTicks(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	s.exec(t, `DO $$ BEGIN EXECUTE format('DROP TABLE event_log_%s', to_char(now() AT TIME ZONE 'UTC' + interval '2 months', 'YYYYMM')); END $$`)
	s.exec(t, `INSERT INTO crons (name, spec, zone, missed, max_missed, jitter, disabled, next_tick)
		VALUES ('x', '@daily', 'UTC', 'skip', 1, '0', false, now())`)
	s.exec(t, `INSERT INTO cron_ticks (cron, tick, job_id, late, by_hand)
		SELECT 'x', now() - interval '1 day' * n, n, false, false FROM unnest(ARRAY[29, 31]) AS n`)
	inserted, err := s.client.Insert(t.Context(), PartitionMaintenanceArgs{}, nil)
	require.NoError(t, err)
	job := s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted)
	require.JSONEq(t, `{"created": 1}`, string(job.Output()))
	require.Equal(t, 5, one[int](t, s, "SELECT count(*) FROM pg_inherits WHERE inhparent = 'event_log'::regclass"))
	require.Equal(t, 29, one[int](t, s, "SELECT job_id FROM cron_ticks"))
}
