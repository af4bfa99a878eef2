package jobs

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"afluente/db"
	"afluente/eventlog"
	"afluente/jobs/archive"
)

// AuditArchiveArgs asks for the daily care of what grows: partitions for the
// months to come, and old rows into the archive.
type AuditArchiveArgs struct{}

func (AuditArchiveArgs) Kind() string { return "audit-archive-worker" }

func (AuditArchiveArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "maintenance"}
}

func auditArchive(d Deps) eventlog.Declaration {
	return eventlog.Cron("17 3 * * *", AuditArchiveArgs{}, &auditArchiveWorker{pool: d.Pool, archive: d.Archive},
		eventlog.Policy{})
}

type auditArchiveWorker struct {
	river.WorkerDefaults[AuditArchiveArgs]

	pool    *pgxpool.Pool
	archive *archive.Archive
}

// Timeout is long enough for some ten million rows. What is not done by then
// is done by the next attempt, which goes on where this one stopped.
func (w *auditArchiveWorker) Timeout(*river.Job[AuditArchiveArgs]) time.Duration { return time.Hour }

func (w *auditArchiveWorker) Work(ctx context.Context, _ *river.Job[AuditArchiveArgs]) error {
	if _, err := db.New(w.pool).CreateEventLogPartitions(ctx); err != nil {
		return fmt.Errorf("create partitions: %w", err)
	}
	report, err := w.archive.Run(ctx)
	if err != nil {
		return err
	}
	return river.RecordOutput(ctx, report)
}
