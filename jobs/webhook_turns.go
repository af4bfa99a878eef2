package jobs

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
)

const (
	// beginsAtOnce is how many deliveries of a subscription begin at a time in one
	// process: one that has the row, and one that asks for it meanwhile.
	beginsAtOnce = 2

	// turnWait is how long a delivery waits for its turn before it is put off.
	turnWait = 3 * time.Second
)

// errNoTurn says that a delivery waited for its turn in vain.
var errNoTurn = errors.New("no turn to begin yet")

// turns lets the deliveries of a subscription in one process begin a few at a time:
// those that waited for its row would keep all connections of the pool from
// everybody else, and those that are to end from ending.
type turns [256]line

// of returns where the deliveries of a subscription wait. Some subscriptions share
// one.
func (t *turns) of(subscription uuid.UUID) *line { return &t[subscription[len(subscription)-1]] }

// line is where deliveries wait to begin, in the order in which they came, while any
// of them ends. Those that end had begun before, so that they run out when nothing
// begins, and none waits for ever.
type line struct {
	mu        sync.Mutex
	ending    int
	beginning int
	waiting   []chan struct{} // to begin; closed when it is their turn
}

// begin returns when it is the turn of a delivery to begin, with what ends the turn.
// It returns [errNoTurn] if that takes too long, and the error of ctx if that ends
// before.
func (l *line) begin(ctx context.Context) (end func(), err error) {
	turn := make(chan struct{})
	l.mu.Lock()
	l.waiting = append(l.waiting, turn)
	l.call()
	l.mu.Unlock()

	late := time.NewTimer(turnWait)
	defer late.Stop()
	select {
	case <-turn:
		return l.ended(&l.beginning), nil
	case <-late.C:
		err = errNoTurn
	case <-ctx.Done():
		err = ctx.Err()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.waiting, turn)
	if i < 0 { // it came at the last moment
		return l.ended(&l.beginning), nil
	}
	l.waiting = slices.Delete(l.waiting, i, i+1)
	return nil, err
}

// end keeps others from beginning until what it returns is called. It does not wait.
func (l *line) end() (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ending++
	return l.ended(&l.ending)
}

// ended returns what takes one off a count and calls those whose turn it is then.
func (l *line) ended(count *int) func() {
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		*count--
		l.call()
	}
}

// call lets those go whose turn it is. The caller has locked l.mu.
func (l *line) call() {
	for l.ending == 0 && l.beginning < beginsAtOnce && len(l.waiting) > 0 {
		l.beginning++
		close(l.waiting[0])
		l.waiting = l.waiting[1:]
	}
}
