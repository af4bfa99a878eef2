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

// cronTickRetention is how long it is remembered which ticks became jobs.
const cronTickRetention = 30 * 24 * time.Hour

// PartitionMaintenanceArgs asks for the partitions of the months to come.
type PartitionMaintenanceArgs struct{}

func (PartitionMaintenanceArgs) Kind() string { return "partition-maintenance" }

func (PartitionMaintenanceArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "maintenance"}
}

func partitionMaintenance(d Deps) eventlog.Declaration {
	return eventlog.Cron("7 * * * *", PartitionMaintenanceArgs{}, &partitionMaintenanceWorker{pool: d.Pool}, eventlog.Policy{})
}

type partitionMaintenanceWorker struct {
	river.WorkerDefaults[PartitionMaintenanceArgs]

	pool *pgxpool.Pool
}

func (w *partitionMaintenanceWorker) Timeout(*river.Job[PartitionMaintenanceArgs]) time.Duration {
	return time.Minute
}

func (w *partitionMaintenanceWorker) Work(ctx context.Context, _ *river.Job[PartitionMaintenanceArgs]) error {
	queries := db.New(w.pool)
	created, err := queries.CreateEventLogPartitions(ctx)
	if err != nil {
		return fmt.Errorf("create partitions: %w", err)
	}
	if err := queries.DeleteOldCronTicks(ctx, time.Now().Add(-cronTickRetention)); err != nil {
		return fmt.Errorf("delete old ticks: %w", err)
	}
	return river.RecordOutput(ctx, map[string]int32{"created": created})
}
