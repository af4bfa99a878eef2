package jobs

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"afluente/db"
	"afluente/eventlog"
	"afluente/eventlog/event"
)

const (
	// budgetZone is where a day of a budget begins and ends.
	budgetZone = "America/Sao_Paulo"

	maxBudgets = 1000
)

// DailyBudgetResetArgs asks for the day's budgets to begin anew.
type DailyBudgetResetArgs struct{}

func (DailyBudgetResetArgs) Kind() string { return "daily-budget-reset" }

func (DailyBudgetResetArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "maintenance"}
}

func dailyBudgetReset(d Deps) eventlog.Declaration {
	return eventlog.Cron("0 0 * * *", DailyBudgetResetArgs{}, &dailyBudgetResetWorker{pool: d.Pool}, eventlog.Policy{Zone: budgetZone})
}

type dailyBudgetResetWorker struct {
	river.WorkerDefaults[DailyBudgetResetArgs]

	pool *pgxpool.Pool
}

func (w *dailyBudgetResetWorker) Timeout(*river.Job[DailyBudgetResetArgs]) time.Duration {
	return 5 * time.Minute
}

// Work begins the day of the job's tick for every organization that is still at
// an earlier one, and tells how that ended, in the same transaction. A second run
// finds nothing left to do.
func (w *dailyBudgetResetWorker) Work(ctx context.Context, job *river.Job[DailyBudgetResetArgs]) error {
	zone, err := time.LoadLocation(budgetZone)
	if err != nil {
		return fmt.Errorf("load zone: %w", err)
	}
	at := job.CreatedAt
	if tick, ok := eventlog.TickOf(job.JobRow); ok {
		at = tick.At
	}
	day := at.In(zone).Format(time.DateOnly)
	total := 0
	for {
		organizations, err := w.beginDay(ctx, day, job.Kind)
		if err != nil {
			return fmt.Errorf("begin %s: %w", day, err)
		}
		total += organizations
		if organizations < maxBudgets {
			return river.RecordOutput(ctx, map[string]any{"day": day, "organizations": total})
		}
	}
}

func (w *dailyBudgetResetWorker) beginDay(ctx context.Context, day, source string) (organizations int, err error) {
	err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		ended, err := db.New(tx).BeginBudgetDay(ctx, day, maxBudgets)
		if err != nil {
			return fmt.Errorf("reset budgets: %w", err)
		}
		events := make([]eventlog.Event[event.AIBudgetSnapshot], len(ended))
		for i, budget := range ended {
			events[i] = eventlog.Event[event.AIBudgetSnapshot]{
				OrganizationID: budget.OrganizationID,
				Payload: event.AIBudgetSnapshot{
					Day: budget.Day, DailyBudgetCents: budget.DailyBudgetCents, UsedCents: budget.UsedCents,
				},
				Metadata: eventlog.Metadata{Source: source, IdempotencyKey: "ai.budget_snapshot:" + budget.Day},
			}
		}
		organizations = len(ended)
		_, err = eventlog.EmitMany(ctx, tx, events)
		return err
	})
	return organizations, err
}
