package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"afluente/eventlog"
	"afluente/eventlog/event"
)

const (
	// fairWorkers are so few, and fairWork so long, that it is workers that are
	// scarce, and not the processor.
	fairWorkers = 20
	fairWork    = 2 * time.Millisecond

	// visitInterval is between two events of the visitor.
	visitInterval = 100 * time.Millisecond
	// floodPerVisit is how many events of a flood there are for each of the
	// visitor's, so that it outlasts them.
	floodPerVisit = 2500
	// minFlood is the least flood that a visit fits in.
	minFlood = 10_000
	// firstVisit is in events. It is not timed; see steady.
	firstVisit = 10

	visitDone = "SELECT NOT EXISTS (SELECT FROM public.event_log WHERE status <> 'done' AND organization_id = '00000000-0000-0000-0000-000000000002')"
	// floodLeft is whether there is something left to claim, and to work.
	floodLeft = `SELECT EXISTS (SELECT FROM public.event_log WHERE status = 'pending'),
		EXISTS (SELECT FROM river.river_job WHERE state = 'available')`
)

func fairnessRows() []row {
	var alone, beside []row
	for _, p := range []struct {
		name        string
		ratioAtMost float64
	}{{"p50", 0}, {"p95", 3}, {"max", 0}} {
		alone = append(alone, row{name: "alone: emit → start, " + p.name, figure: "alone " + p.name, unit: "ms"})
		beside = append(beside, row{
			name: "beside a flood of another: emit → start, " + p.name, figure: "beside " + p.name, unit: "ms",
			of: "alone " + p.name, ratioAtMost: p.ratioAtMost,
		})
	}
	return append(alone, beside...)
}

// fairness has one organization emit a little, by the clock, alone or, with a
// flood, while very many events of another one wait to be claimed and to be
// worked. It fails when the flood did not outlast the visit, but not when workers
// wait for the bridge at that moment, as they do on a slow machine.
func fairness(name string, flood bool) func(context.Context, *bus) (figures, error) {
	return func(ctx context.Context, b *bus) (figures, error) {
		b.maxWorkers, b.tally.takes = min(b.maxWorkers, fairWorkers), fairWork
		client, bridge, err := b.ours(ctx)
		if err != nil {
			return nil, err
		}
		events := max(b.events, minFlood)
		watch := newStopwatch()
		b.tally.onWork = watch.lap
		err = working(ctx, client, func() error {
			if err := b.flood(ctx, minFlood); err != nil {
				return err
			}
			if err := b.visited(ctx, bridge, firstVisit, nil, eventsDone); err != nil {
				return err
			}
			if flood {
				if err := b.flood(ctx, events); err != nil {
					return err
				}
			}
			if err := b.rest(ctx); err != nil {
				return err
			}
			return b.visited(ctx, bridge, events/floodPerVisit, watch, visitDone)
		})
		if err != nil {
			return nil, err
		}
		if flood {
			if err := b.outlasted(ctx); err != nil {
				return nil, err
			}
		}
		return figures{
			name + " p50": watch.percentile(0.5),
			name + " p95": watch.percentile(0.95),
			name + " max": watch.percentile(1),
		}, nil
	}
}

// flood emits events of the other organization, whose jobs nobody counts.
func (b *bus) flood(ctx context.Context, events int) error {
	return b.emitEach(ctx, events, func(int) eventlog.Event[event.MessageQueued] { return newEvent(organization(), "") })
}

// visited runs the bridge while the visitor emits events, until the database says that
// there is nothing left to do.
func (b *bus) visited(ctx context.Context, bridge *eventlog.Bridge, events int, watch *stopwatch, done string) error {
	return bridging(ctx, bridge, func() error {
		err := until(ctx, "the bridge does not listen", func() (bool, error) {
			return b.config.PollOnly || bridge.Status().Listening, nil
		})
		if err != nil {
			return err
		}
		return b.pass(ctx, events, done, func(events int) error {
			return steadily(ctx, events, visitInterval, func() error {
				return b.put(ctx, watch, func(tx pgx.Tx, messageID string) error {
					_, err := eventlog.Emit(ctx, tx, newEvent(visitor(), messageID))
					return err
				})
			})
		})
	})
}

// outlasted returns an error when nothing of a flood is left to be claimed or to be
// worked.
func (b *bus) outlasted(ctx context.Context) error {
	var claim, work bool
	if err := b.pool.QueryRow(ctx, floodLeft).Scan(&claim, &work); err != nil {
		return fmt.Errorf("ask what is left of the flood: %w", err)
	}
	if !claim && !work {
		return errors.New("the flood was over before the events beside it")
	}
	return nil
}
