package jobs

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"afluente/jobs/archive"
)

// newArchiveSystem has one event that is past its time.
func newArchiveSystem(t *testing.T, folder string) *system {
	t.Helper()
	s := newSystem(t)
	*s.deps.Archive = archive.Archive{Pool: s.pool, URL: "file://" + folder, Retention: 24 * time.Hour, Now: time.Now}
	s.exec(t, `INSERT INTO event_log (organization_id, event_type, entity_kind, status, created_at) VALUES ($1, 'lead.won', 'lead', 'done', '2001-02-03')`, s.org)
	return s
}

func TestAuditArchiveTakesOldRowsAway(t *testing.T) {
	t.Parallel()
	s := newArchiveSystem(t, t.TempDir())
	s.start(t)
	inserted, err := s.client.Insert(t.Context(), AuditArchiveArgs{}, nil)
	require.NoError(t, err)
	job := s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted)
	require.JSONEq(t, `{"rows": 1, "parts": 1, "dropped_months": 0, "pruned_keys": 0}`, string(job.Output()))
	require.Zero(t, one[int](t, s, "SELECT count(*) FROM event_log"))
}

func TestAuditArchiveWithoutAStoreIsTriedAgain(t *testing.T) {
	t.Parallel()
	s := newArchiveSystem(t, filepath.Join("/dev/null", "archive"))
	s.start(t)
	inserted, err := s.client.Insert(t.Context(), AuditArchiveArgs{}, nil)
	require.NoError(t, err)
	job := s.awaitState(t, inserted.Job.ID, rivertype.JobStateDiscarded)
	require.Contains(t, job.Errors[0].Error, "open archive")
	require.Equal(t, 1, one[int](t, s, "SELECT count(*) FROM event_log"))
}

// awaitState waits until a job has the state and returns it.
func (s *system) awaitState(t *testing.T, id int64, state rivertype.JobState) (job *rivertype.JobRow) {
	t.Helper()
	s.await(t, "job "+string(state), func() bool {
		var err error
		job, err = s.client.JobGet(t.Context(), id)
		require.NoError(t, err)
		return job.State == state
	})
	return job
}
