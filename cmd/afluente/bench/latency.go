package bench

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"afluente/eventlog"
)

const (
	// latencyRate is in events a second.
	latencyRate = 200
	// latencyEvents is the most of one run, which takes 10 s, after half as many that
	// are not timed.
	latencyEvents = 10 * latencyRate
	// emitters are as many so that a slow commit does not slow the rate.
	emitters = 4
)

// percentiles are in the order of the rows.
func percentiles() []struct {
	name   string
	share  float64
	atMost float64 // ms, 0 for no target
} {
	return []struct {
		name   string
		share  float64
		atMost float64
	}{{"p50", 0.5, 10}, {"p95", 0.95, 0}, {"p99", 0.99, 50}, {"max", 1, 0}}
}

func latencyRows() []row {
	var plain, ours []row
	for _, p := range percentiles() {
		plain = append(plain, row{name: "plain River: insert → start, " + p.name, figure: "plain " + p.name, unit: "ms"})
		ours = append(ours, row{
			name: "emit → start, " + p.name, figure: "ours " + p.name, unit: "ms", of: "plain " + p.name, atMost: p.atMost,
		})
	}
	return append(append(plain, ours...), row{name: "events emitted meanwhile", figure: "ours rate", unit: "events/s"})
}

func plainLatency(ctx context.Context, b *bus) (figures, error) {
	client, err := b.plain()
	if err != nil {
		return nil, err
	}
	got := make(figures)
	err = working(ctx, client, func() error {
		return b.steady(ctx, got, "plain", plainDone, func(tx pgx.Tx, messageID string) error {
			_, err := client.InsertManyFastTx(ctx, tx, b.paramsOf(messageID))
			return err
		})
	})
	return got, err
}

func latency(ctx context.Context, b *bus) (figures, error) {
	client, bridge, err := b.ours(ctx)
	if err != nil {
		return nil, err
	}
	got := make(figures)
	err = working(ctx, client, func() error {
		return bridging(ctx, bridge, func() error {
			return b.steady(ctx, got, "ours", eventsDone, func(tx pgx.Tx, messageID string) error {
				_, err := eventlog.Emit(ctx, tx, newEvent(organization(), messageID))
				return err
			})
		})
	})
	return got, err
}

// steady puts messages in at latencyRate, each in its own transaction, and adds
// to got how long they took from there to the start of each of their jobs. The
// rate does not wait for what is slow.
func (b *bus) steady(ctx context.Context, got figures, name, done string, put func(pgx.Tx, string) error) error {
	watch := newStopwatch()
	b.tally.onWork = watch.lap
	events := min(b.events, latencyEvents)
	// Whoever listens has begun to when these are done, and connections know their
	// statements: the first one that a connection runs takes it some 10 ms, which is not
	// what a process takes that has been there for a while.
	if _, err := b.passSteadily(ctx, max(1, events/2), done, func() error { return b.put(ctx, nil, put) }); err != nil {
		return err
	}
	if err := b.rest(ctx); err != nil {
		return err
	}
	perSecond, err := b.passSteadily(ctx, events, done, func() error { return b.put(ctx, watch, put) })
	if err != nil {
		return err
	}
	for _, p := range percentiles() {
		got[name+" "+p.name] = watch.percentile(p.share)
	}
	got[name+" rate"] = perSecond
	return nil
}

// passSteadily is pass with one message after the other at latencyRate, and returns
// how many a second they were.
func (b *bus) passSteadily(ctx context.Context, events int, done string, put func() error) (perSecond float64, err error) {
	err = b.pass(ctx, events, done, func(events int) (err error) {
		perSecond, err = rate(events, func() error { return steadily(ctx, events, time.Second/latencyRate, put) })
		return err
	})
	return perSecond, err
}

// put puts a message in, in a transaction of its own, and starts the clock, if
// there is one, when that has nothing left to do but to commit.
func (b *bus) put(ctx context.Context, watch *stopwatch, put func(pgx.Tx, string) error) error {
	messageID := uuid.NewString()
	return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
		if err := put(tx, messageID); err != nil {
			return err
		}
		if watch != nil {
			watch.start(messageID)
		}
		return nil
	})
}

// stopwatch takes the times from messages to each of their jobs.
type stopwatch struct {
	mu      sync.Mutex
	started map[string]time.Time
	took    []time.Duration
}

func newStopwatch() *stopwatch { return &stopwatch{started: make(map[string]time.Time)} }

func (w *stopwatch) start(messageID string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.started[messageID] = time.Now()
}

// lap takes a time, of no message but those that were started.
func (w *stopwatch) lap(messageID string) {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if at, ok := w.started[messageID]; ok {
		w.took = append(w.took, now.Sub(at))
	}
}

// percentile returns what that share of the times, of which there must be one, is
// at most, in ms.
func (w *stopwatch) percentile(share float64) float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	slices.Sort(w.took)
	last := max(int(share*float64(len(w.took)))-1, 0)
	return float64(w.took[last]) / float64(time.Millisecond)
}

// steadily calls f n times, once each interval, from several goroutines.
func steadily(ctx context.Context, n int, interval time.Duration, f func() error) error {
	g, ctx := errgroup.WithContext(ctx)
	due := make(chan struct{}, n) // has room for all, so that the beat goes on
	g.Go(func() error {
		defer close(due)
		start := time.Now()
		for i := range n {
			timer := time.NewTimer(time.Until(start.Add(time.Duration(i) * interval)))
			select {
			case <-timer.C:
				due <- struct{}{}
			case <-ctx.Done():
				timer.Stop()
				return fmt.Errorf("keep the rate: %w", ctx.Err())
			}
		}
		return nil
	})
	for range emitters {
		g.Go(func() error {
			for range due {
				if err := f(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}
