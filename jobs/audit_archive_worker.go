package jobs

import (
	"context"
	"time"

	"github.com/riverqueue/river"

	"afluente/eventlog"
	"afluente/jobs/archive"
)

// AuditArchiveArgs asks for old rows to go into the archive.
type AuditArchiveArgs struct{}

func (AuditArchiveArgs) Kind() string { return "audit-archive-worker" }

func (AuditArchiveArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "maintenance"}
}

func auditArchive(d Deps) eventlog.Declaration {
	return eventlog.Cron("17 3 * * *", AuditArchiveArgs{}, &auditArchiveWorker{archive: d.Archive},
		eventlog.Policy{})
}

type auditArchiveWorker struct {
	river.WorkerDefaults[AuditArchiveArgs]

	archive *archive.Archive
}

// Timeout is long enough for some ten million rows. What is not done by then
// is done by the next attempt, which goes on where this one stopped.
func (w *auditArchiveWorker) Timeout(*river.Job[AuditArchiveArgs]) time.Duration { return time.Hour }

func (w *auditArchiveWorker) Work(ctx context.Context, _ *river.Job[AuditArchiveArgs]) error {
	report, err := w.archive.Run(ctx)
	if err != nil {
		return err
	}
	return river.RecordOutput(ctx, report)
}
