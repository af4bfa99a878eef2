package jobs

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"afluente/db"
	"afluente/eventlog"
)

const (
	// retryOverdue is how long after its time a retry may wait for River's leader,
	// which looks every 5 s.
	retryOverdue = 30 * time.Second

	maxReleased = 1000
)

// ProcessPendingWebhooksArgs asks for the webhooks that are due and wait all the
// same.
type ProcessPendingWebhooksArgs struct{}

func (ProcessPendingWebhooksArgs) Kind() string { return "process-pending-webhooks" }

func (ProcessPendingWebhooksArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "maintenance"}
}

func processPendingWebhooks(d Deps) eventlog.Declaration {
	return eventlog.Cron("* * * * *", ProcessPendingWebhooksArgs{}, &processPendingWebhooksWorker{pool: d.Pool},
		eventlog.Policy{Missed: eventlog.MissedSkip})
}

type processPendingWebhooksWorker struct {
	river.WorkerDefaults[ProcessPendingWebhooksArgs]

	pool *pgxpool.Pool
}

func (w *processPendingWebhooksWorker) Timeout(*river.Job[ProcessPendingWebhooksArgs]) time.Duration {
	return 30 * time.Second
}

// Work does what River's leader may have had no time for, and wakes the workers,
// should a notification have been lost.
func (w *processPendingWebhooksWorker) Work(ctx context.Context, _ *river.Job[ProcessPendingWebhooksArgs]) error {
	queries := db.New(w.pool)
	queue := WebhookDispatchArgs{}.InsertOpts().Queue
	released, err := queries.ReleaseOverdueRetries(ctx, db.ReleaseOverdueRetriesParams{
		Queue: queue, Kind: WebhookDispatchArgs{}.Kind(), Before: time.Now().Add(-retryOverdue), MaxJobs: maxReleased,
	})
	if err != nil {
		return fmt.Errorf("release retries: %w", err)
	}
	if err := queries.WakeQueues(ctx, []string{queue}); err != nil {
		return fmt.Errorf("wake queue %s: %w", queue, err)
	}
	return river.RecordOutput(ctx, map[string]int64{"released": released})
}
