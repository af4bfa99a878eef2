package bench

import (
	"context"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/riverqueue/river"

	"afluente/eventlog"
	"afluente/eventlog/event"
)

// maxFanOut is how many consumers there are.
const maxFanOut = 10

// tally counts jobs down, but for those without a message, which are only in
// the way of the others.
type tally struct {
	left   atomic.Int64  // below 0 for those that ran once more
	done   chan struct{} // closed when none is left
	takes  time.Duration // each job, 0 for no time
	onWork func(messageID string)
}

// expect begins to count; no job may be running.
func (t *tally) expect(jobs int) {
	t.done = make(chan struct{})
	t.left.Store(int64(jobs))
}

// consumer is a no-op, or waits as long as the tally says, that takes message.queued: for the bus a declaration, for
// plain River a worker and args.
type consumer struct {
	declaration eventlog.Declaration
	addTo       func(*river.Workers) error
	args        func(messageID string) river.JobArgs
}

// consumers are as many as there may be.
func consumers(t *tally) []consumer {
	return []consumer{
		noop[[1]int](t), noop[[2]int](t), noop[[3]int](t), noop[[4]int](t), noop[[5]int](t),
		noop[[6]int](t), noop[[7]int](t), noop[[8]int](t), noop[[9]int](t), noop[[maxFanOut]int](t),
	}
}

func noop[N any](t *tally) consumer {
	worker := &noopWorker[N]{tally: t}
	return consumer{
		declaration: eventlog.On(func(e eventlog.Event[event.MessageQueued]) noopArgs[N] {
			return noopArgs[N]{MessageID: e.Payload.MessageID}
		}, worker),
		addTo: func(workers *river.Workers) error { return river.AddWorkerSafely(workers, worker) },
		args:  func(messageID string) river.JobArgs { return noopArgs[N]{MessageID: messageID} },
	}
}

// noopArgs are those of one kind of job. Each kind needs a type, and N is an
// array whose length numbers them.
type noopArgs[N any] struct {
	MessageID string `json:"message_id"`
}

func (noopArgs[N]) Kind() string { return fmt.Sprintf("noop-%d-worker", reflect.TypeFor[N]().Len()) }

type noopWorker[N any] struct {
	river.WorkerDefaults[noopArgs[N]]

	tally *tally
}

func (*noopWorker[N]) Timeout(*river.Job[noopArgs[N]]) time.Duration { return time.Minute }

func (w *noopWorker[N]) Work(ctx context.Context, job *river.Job[noopArgs[N]]) error {
	return w.tally.work(ctx, job.Args.MessageID)
}

// work does one job.
func (t *tally) work(ctx context.Context, messageID string) error {
	if t.onWork != nil {
		t.onWork(messageID)
	}
	if t.takes > 0 {
		select {
		case <-time.After(t.takes):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if messageID != "" && t.left.Add(-1) == 0 {
		close(t.done)
	}
	return nil
}
