package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"go.uber.org/zap"
	"go.uber.org/zap/exp/zapslog"
	"golang.org/x/sync/errgroup"

	"afluente/eventlog"
	"afluente/eventlog/event"
)

const (
	// stall is how long nothing may happen before a run is given up.
	stall = time.Minute
	// stopTimeout bounds the stop of a client that has nothing left to do.
	stopTimeout = 30 * time.Second

	// askAgain is how often it is asked whether something is so, such as that the
	// last batch of results is in the database.
	askAgain = 20 * time.Millisecond

	plainDone  = "SELECT NOT EXISTS (SELECT FROM public.river_job WHERE state <> 'completed')"
	jobsDone   = "SELECT NOT EXISTS (SELECT FROM river.river_job WHERE state <> 'completed')"
	eventsDone = "SELECT NOT EXISTS (SELECT FROM public.event_log WHERE status <> 'done')"
)

// bus is the database of one run and what works on it, plain River or ours.
type bus struct {
	*server

	pool       *pgxpool.Pool
	tables     string // that fill
	events     int    // to emit; plain River inserts the jobs of as many
	maxWorkers int
	consumers  []consumer
	tally      *tally
}

func (b *bus) jobs() int { return b.events * len(b.consumers) }

// rest brings the database and this process into the same state before each
// measurement.
func (b *bus) rest(ctx context.Context) error {
	if err := b.exec(ctx, "VACUUM ANALYZE "+b.tables); err != nil {
		return err
	}
	if !b.unchecked {
		_, err := b.pool.Exec(ctx, "CHECKPOINT")
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == pgerrcode.InsufficientPrivilege {
			b.unchecked = true
			b.config.Log.Warn("no checkpoints between the measurements, so they spread more: the role may not make any", zap.Error(err))
		} else if err != nil {
			return fmt.Errorf("checkpoint: %w", err)
		}
	}
	runtime.GC()
	return nil
}

// rate calls f, which takes care of some jobs or events, and returns how many
// a second.
func rate(n int, f func() error) (float64, error) {
	start := time.Now()
	err := f()
	return float64(n) / time.Since(start).Seconds(), err
}

// quiet is the log of the parts that are measured: a line for each job is not
// what is compared.
func (b *bus) quiet() *zap.Logger { return b.config.Log.WithOptions(zap.IncreaseLevel(zap.WarnLevel)) }

// plain returns a client of plain River, set as ours is in all that has to do
// with its rate.
func (b *bus) plain() (*river.Client[pgx.Tx], error) {
	workers := river.NewWorkers()
	for _, c := range b.consumers {
		if err := c.addTo(workers); err != nil {
			return nil, fmt.Errorf("add worker: %w", err)
		}
	}
	client, err := river.NewClient(riverpgxv5.New(b.pool), &river.Config{
		FetchCooldown: eventlog.NotifyCooldown,
		Logger:        slog.New(zapslog.NewHandler(b.quiet().Core(), zapslog.WithName("river"))),
		PollOnly:      b.config.PollOnly,
		Queues:        map[string]river.QueueConfig{river.QueueDefault: {FetchCooldown: eventlog.FetchCooldown, MaxWorkers: b.maxWorkers}},
		Workers:       workers,
	})
	if err != nil {
		return nil, fmt.Errorf("make river client: %w", err)
	}
	return client, nil
}

// ours returns a client and a bridge for the consumers, which it registers.
func (b *bus) ours(ctx context.Context) (*river.Client[pgx.Tx], *eventlog.Bridge, error) {
	declarations := make([]eventlog.Declaration, len(b.consumers))
	for i, c := range b.consumers {
		declarations[i] = c.declaration
	}
	plan, err := eventlog.Compile(declarations...)
	if err != nil {
		return nil, nil, fmt.Errorf("compile plan: %w", err)
	}
	if err := eventlog.Register(ctx, b.pool, plan); err != nil {
		return nil, nil, err
	}
	client, err := eventlog.NewClient(eventlog.ClientConfig{
		Pool: b.pool, Plan: plan, Log: b.quiet(), MaxWorkers: b.maxWorkers, PollOnly: b.config.PollOnly,
	})
	if err != nil {
		return nil, nil, err
	}
	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{
		Pool: b.pool, Plan: plan, Log: b.quiet(), MaxBatch: b.config.Batch, PollOnly: b.config.PollOnly,
	})
	return client, bridge, err
}

// insert inserts the jobs of some events with plain River.
func (b *bus) insert(ctx context.Context, client *river.Client[pgx.Tx], events int) error {
	for inserted := 0; inserted < events; inserted += b.config.Batch {
		var params []river.InsertManyParams
		for range min(b.config.Batch, events-inserted) {
			params = append(params, b.paramsOf(uuid.NewString())...)
		}
		if _, err := client.InsertManyFast(ctx, params); err != nil {
			return fmt.Errorf("insert jobs: %w", err)
		}
	}
	return nil
}

// paramsOf are the jobs of one message.
func (b *bus) paramsOf(messageID string) []river.InsertManyParams {
	params := make([]river.InsertManyParams, len(b.consumers))
	for i, c := range b.consumers {
		params[i].Args = c.args(messageID)
	}
	return params
}

// emit emits events, each batch in a transaction.
func (b *bus) emit(ctx context.Context, events int) error {
	return b.emitEach(ctx, events, func(int) eventlog.Event[event.MessageQueued] {
		return newEvent(organization(), uuid.NewString())
	})
}

// emitEach is emit with the i-th event, from 0.
func (b *bus) emitEach(ctx context.Context, events int, ith func(i int) eventlog.Event[event.MessageQueued]) error {
	for emitted := 0; emitted < events; emitted += b.config.Batch {
		batch := make([]eventlog.Event[event.MessageQueued], min(b.config.Batch, events-emitted))
		for i := range batch {
			batch[i] = ith(emitted + i)
		}
		err := pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
			_, err := eventlog.EmitMany(ctx, tx, batch)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func newEvent(organization uuid.UUID, messageID string) eventlog.Event[event.MessageQueued] {
	return eventlog.Event[event.MessageQueued]{
		OrganizationID: organization,
		Payload:        event.MessageQueued{MessageID: messageID},
	}
}

// drain fans out all that is due, in two steps at a time, as a bridge does that
// runs.
func drain(ctx context.Context, bridge *eventlog.Bridge) error {
	var g errgroup.Group
	for range 2 {
		g.Go(func() error {
			for {
				if n, err := bridge.Step(ctx); n == 0 || err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// working calls f while a client works.
func working(ctx context.Context, client *river.Client[pgx.Tx], f func() error) (err error) {
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("start river: %w", err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		err = errors.Join(err, client.StopAndCancel(ctx))
	}()
	return f()
}

// bridging calls f while a bridge runs.
func bridging(ctx context.Context, bridge *eventlog.Bridge, f func() error) error {
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	running.Go(func() { _ = bridge.Run(ctx) }) // outlives every error
	return f()
}

// await waits until each of the jobs that the tally expects has run once and
// the database says that nothing is left to do.
func (b *bus) await(ctx context.Context, done string) error {
	stalled := time.NewTicker(stall)
	defer stalled.Stop()
	for left, ran := b.tally.left.Load(), false; !ran; {
		select {
		case <-b.tally.done:
			ran = true
		case <-stalled.C:
			if now := b.tally.left.Load(); now == left {
				return fmt.Errorf("no job has run for %s, and %d have not", stall, left)
			}
			left = b.tally.left.Load()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	err := until(ctx, "all jobs have run, but not all is done", func() (yes bool, err error) {
		if err := b.pool.QueryRow(ctx, done).Scan(&yes); err != nil {
			return false, fmt.Errorf("ask whether all is done: %w", err)
		}
		return yes, nil
	})
	if err != nil {
		return err
	}
	if left := b.tally.left.Load(); left != 0 {
		return fmt.Errorf("%d jobs ran more than once", -left)
	}
	return nil
}

// until asks whether something is so until it is; otherwise is the error after stall.
func until(ctx context.Context, otherwise string, isSo func() (bool, error)) error {
	ask := time.NewTicker(askAgain)
	defer ask.Stop()
	for deadline := time.Now().Add(stall); ; {
		if yes, err := isSo(); yes || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s after %s", otherwise, stall)
		}
		select {
		case <-ask.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
