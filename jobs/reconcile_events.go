package jobs

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"afluente/eventlog"
)

const (
	// stuckAfter is how long an event may be processing without any change before
	// somebody looks whether its jobs are still there.
	stuckAfter = 5 * time.Minute

	// reconcileBack is how old the events are at most that each run looks at:
	// longer than all retries of a job take. The run at fullReconcile o'clock, in
	// UTC, looks at all.
	reconcileBack = 3 * time.Hour
	fullReconcile = 4
)

// ReconcileEventsArgs asks for the events that wait for a job that is gone.
type ReconcileEventsArgs struct{}

func (ReconcileEventsArgs) Kind() string { return "reconcile-events" }

func (ReconcileEventsArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "maintenance"}
}

func reconcileEvents(d Deps) eventlog.Declaration {
	return eventlog.Cron("*/5 * * * *", ReconcileEventsArgs{}, &reconcileEventsWorker{pool: d.Pool}, eventlog.Policy{})
}

type reconcileEventsWorker struct {
	river.WorkerDefaults[ReconcileEventsArgs]

	pool *pgxpool.Pool
}

func (w *reconcileEventsWorker) Timeout(*river.Job[ReconcileEventsArgs]) time.Duration {
	return 5 * time.Minute
}

func (w *reconcileEventsWorker) Work(ctx context.Context, job *river.Job[ReconcileEventsArgs]) error {
	since := time.Now().Add(-reconcileBack)
	if tick, ok := eventlog.TickOf(job.JobRow); ok && tick.At.UTC().Hour() == fullReconcile && tick.At.Minute() == 0 {
		since = time.Time{}
	}
	done, err := eventlog.Reconcile(ctx, w.pool, since, stuckAfter)
	if err != nil {
		return err
	}
	return river.RecordOutput(ctx, done)
}
