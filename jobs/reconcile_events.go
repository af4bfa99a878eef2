package jobs

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"afluente/eventlog"
)

// stuckAfter is how long an event may be processing without any change before
// somebody looks whether its jobs are still there.
const stuckAfter = 5 * time.Minute

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

func (w *reconcileEventsWorker) Work(ctx context.Context, _ *river.Job[ReconcileEventsArgs]) error {
	done, err := eventlog.Reconcile(ctx, w.pool, stuckAfter)
	if err != nil {
		return err
	}
	return river.RecordOutput(ctx, done)
}
