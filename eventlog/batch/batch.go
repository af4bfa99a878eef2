// Package batch lets those who ask a database for the same kind of thing at the same
// time share its round trips, transactions and locks.
package batch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Max is how many a batch has at most.
const Max = 100

// Group makes batches of what is asked for, for each key: whoever comes while a batch
// of the key is under way is in the next one. So nobody waits for others to come, and
// no key has two batches at a time. The zero Group is ready for use, by several
// goroutines; it must not be copied.
type Group[K comparable, Q, A any] struct {
	mu sync.Mutex
	// waiting is who is in no batch yet, in the order in which they came. A key is in
	// it while a goroutine takes care of it.
	waiting map[K][]*call[Q, A]
}

// call is one that asked.
type call[Q, A any] struct {
	ctx   context.Context
	ask   Q
	alone bool // its batch failed

	done   chan struct{} // closed once it has its answer
	answer A
	err    error
}

// Do calls do with a batch that ask is in, and returns its answer, which do returns at
// the same place. Everybody passes the same do for a key. Its context has the values of
// the first one of the batch, and neither its end nor its deadline.
//
// If ctx ends before a batch is begun that ask is in, Do returns its cause, and ask is
// in none. After that it waits for the answer, as what was asked for may be done.
//
// A batch that fails is made again of each ask alone, so that one which cannot be
// answered harms no other, except where it ran out of time: that is returned to all.
// A panic of do is an error, too.
func (g *Group[K, Q, A]) Do(ctx context.Context, key K, ask Q, do func(context.Context, []Q) ([]A, error)) (A, error) {
	c := &call[Q, A]{ctx: ctx, ask: ask, done: make(chan struct{})}
	if ctx.Err() != nil {
		return c.answer, context.Cause(ctx)
	}
	g.mu.Lock()
	if g.waiting == nil {
		g.waiting = make(map[K][]*call[Q, A])
	}
	waiting, underWay := g.waiting[key]
	g.waiting[key] = append(waiting, c)
	g.mu.Unlock()
	if !underWay {
		go g.run(key, do) //nolint:contextcheck // each batch has the context of its first call
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		if g.withdraw(key, c) {
			return c.answer, context.Cause(ctx)
		}
		<-c.done
	}
	return c.answer, c.err
}

// withdraw tells whether a call was still in no batch; it gets into none then.
func (g *Group[K, Q, A]) withdraw(key K, c *call[Q, A]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.waiting[key], c)
	if i < 0 {
		return false
	}
	g.waiting[key] = slices.Delete(g.waiting[key], i, i+1)
	return true
}

// run makes batches of a key until nobody waits.
func (g *Group[K, Q, A]) run(key K, do func(context.Context, []Q) ([]A, error)) {
	for calls := g.next(key); len(calls) > 0; calls = g.next(key) {
		answers, err := answer(calls, do)
		if err != nil && len(calls) > 1 && !errors.Is(err, context.DeadlineExceeded) {
			g.askAgain(key, calls)
			continue
		}
		for i, c := range calls {
			if err != nil {
				c.err = err
			} else {
				c.answer = answers[i]
			}
			close(c.done)
		}
	}
}

// next takes the calls of the next batch off those that wait. When there are none, the
// key is let go.
func (g *Group[K, Q, A]) next(key K) []*call[Q, A] {
	g.mu.Lock()
	defer g.mu.Unlock()
	waiting := g.waiting[key]
	if len(waiting) == 0 {
		delete(g.waiting, key)
		return nil
	}
	n := min(len(waiting), Max)
	if waiting[0].alone {
		n = 1
	}
	g.waiting[key] = slices.Clone(waiting[n:])
	return waiting[:n:n]
}

// askAgain puts the calls of a batch back in front of those that wait.
func (g *Group[K, Q, A]) askAgain(key K, calls []*call[Q, A]) {
	for _, c := range calls {
		c.alone = true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waiting[key] = append(calls, g.waiting[key]...)
}

// answer calls do with a batch.
func answer[Q, A any](calls []*call[Q, A], do func(context.Context, []Q) ([]A, error)) (answers []A, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	asks := make([]Q, len(calls))
	for i, c := range calls {
		asks[i] = c.ask
	}
	answers, err = do(context.WithoutCancel(calls[0].ctx), asks)
	if err == nil && len(answers) != len(asks) {
		return nil, fmt.Errorf("got %d answers for %d", len(answers), len(asks))
	}
	return answers, err
}
