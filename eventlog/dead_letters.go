package eventlog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/time/rate"

	"afluente/db"
)

const (
	// maxMove is how many dead letters one transaction moves: few enough to hold
	// its locks for a fraction of a second.
	maxMove = 500

	// moveLockTimeout is how long such a transaction waits for somebody else's
	// lock before it lets go of its own; it is tried maxMoveTries times.
	moveLockTimeout = "2s"
	maxMoveTries    = 5
)

// DeadLetterFilter chooses dead letters. What is zero matches all.
type DeadLetterFilter struct {
	Consumer       string    `json:"consumer,omitempty"` // the job's kind
	EventType      string    `json:"type,omitempty"`
	OrganizationID uuid.UUID `json:"org,omitzero"`
	EntityKind     string    `json:"kind,omitempty"`
	// Since and Until bound when the job was given up, [Since, Until).
	Since time.Time `json:"since,omitzero"`
	Until time.Time `json:"until,omitzero"`
}

// DeadLetter is a job that was given up, discarded or cancelled, and waits for
// an operator. The event's fields are nil for a job without an event.
type DeadLetter struct {
	JobID          int64      `json:"job_id"`
	Consumer       string     `json:"consumer"`
	Queue          string     `json:"queue"`
	State          string     `json:"state"`
	DiedAt         time.Time  `json:"died_at"`
	Attempt        int16      `json:"attempt"`
	LastError      string     `json:"last_error"`
	EventID        *uuid.UUID `json:"event_id"`
	EventType      *string    `json:"event_type"`
	OrganizationID *uuid.UUID `json:"organization_id"`
	EntityKind     *string    `json:"entity_kind"`
	EntityID       *uuid.UUID `json:"entity_id"`
}

// DeadLetters is the dead-letter queue: the discarded and cancelled jobs of
// River. It may be used by several goroutines and processes.
type DeadLetters struct{ Pool *pgxpool.Pool }

// List returns up to limit dead letters, the newest first.
func (d *DeadLetters) List(ctx context.Context, filter DeadLetterFilter, limit int) ([]DeadLetter, error) {
	ids := filter.params()
	rows, err := db.New(d.Pool).ListDeadLetters(ctx, db.ListDeadLettersParams{
		Consumer:       ids.Consumer,
		EventType:      ids.EventType,
		OrganizationID: ids.OrganizationID,
		EntityKind:     ids.EntityKind,
		Since:          ids.Since,
		Until:          ids.Until,
		MaxLetters:     int32(limit),
	})
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	letters := make([]DeadLetter, len(rows))
	for i, row := range rows {
		letters[i] = DeadLetter(row)
		letters[i].DiedAt = row.DiedAt.UTC()
	}
	return letters, nil
}

// Count returns how many dead letters there are.
func (d *DeadLetters) Count(ctx context.Context, filter DeadLetterFilter) (int, error) {
	ids, err := d.ids(ctx, filter)
	return len(ids), err
}

func (d *DeadLetters) ids(ctx context.Context, filter DeadLetterFilter) ([]int64, error) {
	ids, err := db.New(d.Pool).ListDeadLetterIDs(ctx, filter.params())
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	return ids, nil
}

func (f DeadLetterFilter) params() db.ListDeadLetterIDsParams {
	return db.ListDeadLetterIDsParams{
		Consumer:       orNil(f.Consumer),
		EventType:      orNil(f.EventType),
		OrganizationID: orNil(f.OrganizationID),
		EntityKind:     orNil(f.EntityKind),
		Since:          orNil(f.Since),
		Until:          orNil(f.Until),
	}
}

func orNil[T comparable](value T) *T {
	var zero T
	if value == zero {
		return nil
	}
	return &value
}

// Pace is how [DeadLetters.Retry], [DeadLetters.Discard] and [Bridge.Replay] go
// through many rows.
type Pace struct {
	// Rate is how many a second at most; 0 means no bound.
	Rate int
	// Progress is called after each batch, which is committed then. Nil for none.
	Progress func(Moved)
}

// Moved tells what became of the rows that a filter had found at the start.
type Moved struct {
	Found int `json:"found"`
	Moved int `json:"moved"`
	// Conflicts are the jobs that cannot be retried, since another job that is
	// alive has their unique key. They stay dead.
	Conflicts []int64 `json:"conflicts,omitempty"`
	// Gone counts those that were no longer dead when their turn came.
	Gone int `json:"gone"`
}

// Retry lets dead letters begin anew: with all their attempts and their errors
// kept, at the lowest priority, so that other work of the queue goes before
// them. What dies while Retry runs is not retried again.
//
// It works in small transactions. After an error, or when ctx ends, what is
// reported as moved has been moved; calling it again goes on with the rest.
func (d *DeadLetters) Retry(ctx context.Context, filter DeadLetterFilter, pace Pace) (Moved, error) {
	moved, err := d.each(ctx, filter, pace, retryBatch)
	if err != nil {
		return moved, fmt.Errorf("retry dead letters: %w", err)
	}
	return moved, nil
}

// Discard deletes dead letters for good, each with a row in audit_log that
// names the actor and the reason, both required. An event that waits for no
// other job is done then. It works like [DeadLetters.Retry].
func (d *DeadLetters) Discard(ctx context.Context, filter DeadLetterFilter, pace Pace, actor, reason string) (Moved, error) {
	if actor == "" || reason == "" {
		return Moved{}, errors.New("discard dead letters: an actor and a reason are required")
	}
	moved, err := d.each(ctx, filter, pace, func(ctx context.Context, tx pgx.Tx, ids []int64) (int, error) {
		queries := db.New(tx)
		if err := queries.SetActor(ctx, actor, reason); err != nil {
			return 0, err
		}
		deleted, err := queries.DeleteDeadJobs(ctx, ids)
		return int(deleted), err
	})
	if err != nil {
		return moved, fmt.Errorf("discard dead letters: %w", err)
	}
	return moved, nil
}

// each moves what the filter finds now, oldest first.
func (d *DeadLetters) each(
	ctx context.Context, filter DeadLetterFilter, pace Pace, move func(context.Context, pgx.Tx, []int64) (int, error),
) (Moved, error) {
	ids, err := d.ids(ctx, filter)
	moved := Moved{Found: len(ids)}
	if err != nil {
		return moved, err
	}
	limiter, size := pace.limiter()
	for batch := range slices.Chunk(ids, size) {
		if err := limiter.WaitN(ctx, len(batch)); err != nil {
			return moved, err
		}
		if err := d.moveBatch(ctx, batch, move, &moved); err != nil {
			return moved, err
		}
		if pace.Progress != nil {
			pace.Progress(moved)
		}
	}
	return moved, nil
}

// limiter returns what holds batches to the rate, and their size.
func (p Pace) limiter() (*rate.Limiter, int) {
	if p.Rate == 0 {
		return rate.NewLimiter(rate.Inf, maxMove), maxMove
	}
	size := min(p.Rate, maxMove)
	return rate.NewLimiter(rate.Limit(p.Rate), size), size
}

// moveBatch commits one batch. Where a job cannot be moved because of another,
// the jobs are moved one by one, so that it holds up none but itself.
func (d *DeadLetters) moveBatch(
	ctx context.Context, ids []int64, move func(context.Context, pgx.Tx, []int64) (int, error), moved *Moved,
) error {
	for try := 1; ; try++ {
		var n int
		err := pgx.BeginFunc(ctx, d.Pool, func(tx pgx.Tx) (err error) {
			if err := db.New(tx).SetLockTimeout(ctx, moveLockTimeout); err != nil {
				return err
			}
			n, err = move(ctx, tx, ids)
			return err
		})
		pgErr, _ := errors.AsType[*pgconn.PgError](err)
		switch {
		case err == nil:
			moved.Moved += n
			moved.Gone += len(ids) - n
			return nil
		case pgErr == nil:
			return err
		case pgErr.Code == pgerrcode.UniqueViolation && len(ids) == 1:
			moved.Conflicts = append(moved.Conflicts, ids[0])
			return nil
		case pgErr.Code == pgerrcode.UniqueViolation:
			for id := range slices.Chunk(ids, 1) {
				if err := d.moveBatch(ctx, id, move, moved); err != nil {
					return err
				}
			}
			return nil
		case try < maxMoveTries && (pgErr.Code == pgerrcode.LockNotAvailable || pgErr.Code == pgerrcode.DeadlockDetected):
			// Somebody else works on these; nothing is lost by asking again.
		default:
			return err
		}
	}
}

func retryBatch(ctx context.Context, tx pgx.Tx, ids []int64) (int, error) {
	queries := db.New(tx)
	retried, err := queries.RetryDeadJobs(ctx, ids)
	if err != nil {
		return 0, err
	}
	queues := make([]string, len(retried))
	for i, job := range retried {
		queues[i] = job.Queue
	}
	slices.Sort(queues)
	return len(retried), queries.WakeQueues(ctx, slices.Compact(queues))
}
