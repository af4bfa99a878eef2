package eventlog

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/zap"

	"afluente/db"
)

const (
	// reconcilePage is how many events [Reconcile] looks at in one transaction.
	reconcilePage = 2000

	// idleLane is how long a lane's lock is kept that nobody uses.
	idleLane = 24 * time.Hour
)

// Reconciled tells what [Reconcile] did.
type Reconciled struct {
	// Settled are the pairs of event and consumer whose job had ended without the
	// event's knowing.
	Settled int `json:"settled"`
	// Refanned are those that had no job any more and got a new one.
	Refanned int `json:"refanned"`
	// Dropped are those of consumers that are no longer registered.
	Dropped int `json:"dropped"`
	// Advanced are jobs that waited for their turn though it had come.
	Advanced int `json:"advanced"`
}

// Reconcile looks for events made since a time that have been processing without
// any change for a while and wait for a job that is gone or has ended: which cannot be, but
// for a settle trigger that was switched off or a job that was deleted past it.
// It settles what has ended, and fans out anew what has no job, so that a job
// that still lives is never doubled. It works in small transactions. It also lets
// jobs go on that wait for their turn though it has come.
//
// It reads every event since that time: an index of those that are processing
// would cost a tenth of the rate at which jobs are settled.
func Reconcile(ctx context.Context, pool *pgxpool.Pool, since time.Time, unchanged time.Duration) (Reconciled, error) {
	var done Reconciled
	// Its plan is empty: the jobs make their args themselves.
	plan, err := Compile()
	if err != nil {
		return done, err
	}
	bridge, err := NewBridge(BridgeConfig{Pool: pool, Plan: plan, Log: zap.NewNop()})
	if err != nil {
		return done, err
	}
	queries := db.New(pool)
	now, err := queries.GetClock(ctx)
	if err != nil {
		return done, fmt.Errorf("reconcile events: read clock: %w", err)
	}
	if err := queries.CleanJobIndex(ctx); err != nil {
		return done, fmt.Errorf("reconcile events: clean index: %w", err)
	}
	advanced, err := queries.AdvanceWaitingLanes(ctx)
	if err != nil {
		return done, fmt.Errorf("reconcile events: advance lanes: %w", err)
	}
	done.Advanced = int(advanced)
	if _, err := queries.DeleteIdleLanes(ctx, now.Add(-idleLane)); err != nil {
		return done, fmt.Errorf("reconcile events: delete lanes: %w", err)
	}
	page := db.ListStuckConsumersParams{Since: since, Before: now.Add(-unchanged), MaxEvents: reconcilePage}
	for {
		var rows []db.ListStuckConsumersRow
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			queries := db.New(tx)
			if err := queries.UseJobIndexes(ctx); err != nil {
				return err
			}
			rows, err = queries.ListStuckConsumers(ctx, page)
			return err
		})
		if err != nil {
			return done, fmt.Errorf("reconcile events: list: %w", err)
		}
		if len(rows) == 0 {
			return done, nil
		}
		if err := bridge.reconcile(ctx, rows, &done); err != nil {
			return done, fmt.Errorf("reconcile events: %w", err)
		}
		last := rows[len(rows)-1]
		page.AfterUpdatedAt, page.AfterID = last.UpdatedAt, last.ID
	}
}

// eventKeys are the keys of events, in step.
type eventKeys struct {
	ids        []uuid.UUID
	createdAts []time.Time
}

func (b *Bridge) reconcile(ctx context.Context, rows []db.ListStuckConsumersRow, done *Reconciled) error {
	var ended []int64
	lost := make(map[string]eventKeys)
	for _, row := range rows {
		switch {
		case row.Consumer == "":
		case row.JobID != 0:
			ended = append(ended, row.JobID)
		default:
			keys := lost[row.Consumer]
			lost[row.Consumer] = eventKeys{append(keys.ids, row.ID), append(keys.createdAts, row.CreatedAt)}
		}
	}
	if len(ended) > 0 {
		slices.Sort(ended)
		if err := db.New(b.pool).TouchJobs(ctx, ended); err != nil {
			return fmt.Errorf("settle: %w", err)
		}
		done.Settled += len(ended)
	}
	for consumer, keys := range lost {
		if err := b.refan(ctx, consumer, keys, done); err != nil {
			return fmt.Errorf("fan out to %s: %w", consumer, err)
		}
	}
	return nil
}

// refan gives a consumer new jobs for events that have none of it.
func (b *Bridge) refan(ctx context.Context, consumer string, keys eventKeys, done *Reconciled) error {
	var refanned, dropped int
	err := pgx.BeginTxFunc(ctx, b.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		queries := db.New(tx)
		if err := queries.UseJobIndexes(ctx); err != nil {
			return err
		}
		taken, err := queries.TakeLostConsumer(ctx, consumer, keys.ids, keys.createdAts)
		if err != nil {
			return fmt.Errorf("take: %w", err)
		}
		registered, err := queries.ListConsumers(ctx)
		if err != nil {
			return fmt.Errorf("list consumers: %w", err)
		}
		if !slices.ContainsFunc(registered, func(c db.EventConsumer) bool { return c.Name == consumer }) {
			dropped = len(taken)
			return nil
		}
		refanned, err = b.sendTo(ctx, tx, consumer, keysOf(taken), false)
		return err
	})
	if err != nil {
		return err
	}
	done.Refanned += refanned
	done.Dropped += dropped
	return nil
}

func keysOf(rows []db.TakeLostConsumerRow) (keys eventKeys) {
	for _, row := range rows {
		keys.ids = append(keys.ids, row.ID)
		keys.createdAts = append(keys.createdAts, row.CreatedAt)
	}
	return keys
}
