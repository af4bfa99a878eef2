package eventlog

import (
	"sync"
	"time"

	"github.com/google/uuid"

	"afluente/db"
)

const (
	// maxHeadStart is how long the oldest job of a queue may have waited and a new
	// job of another organization still be put right behind it. It bounds how long
	// other jobs, such as retries, can be kept back by new ones.
	maxHeadStart = time.Hour

	// maxTurns is how many organizations a bridge remembers the places of. Those
	// forgotten begin at the head again.
	maxTurns = 100_000
)

// turns is whose turn it is: of the organizations when events are claimed, and of
// their jobs when a queue has more than its workers can do.
//
// River works a queue off in the order of scheduled_at. So that is where a job's
// place is kept, by start-time fair queueing: an organization's first job is put
// right behind the head of the queue, and each further one a microsecond, the least that
// PostgreSQL knows, behind its last. Of two organizations with a backlog each thus
// has every other place, and one with a few events waits for none of another's
// hundred thousand. In a queue without a backlog all of it makes no difference.
//
// Each bridge remembers by itself, so an organization may get as many places a round as
// there are bridges.
type turns struct {
	mu      sync.Mutex
	backlog bool      // the last step left events behind
	after   uuid.UUID // the last organization that had a turn at being claimed
	last    map[place]time.Time
}

// queueKey is a queue as River works it off, by priority.
type queueKey struct {
	queue    string
	priority int
}

type place struct {
	queueKey

	organization uuid.UUID
}

// next returns after which organization the turns go on, or false when nothing
// is left behind and they need not be taken.
func (t *turns) next() (after uuid.UUID, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.after, t.backlog
}

// took remembers the last organization that had a turn, or to begin anew when none
// was left.
func (t *turns) took(events int, last uuid.UUID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.after = last
	if events == 0 {
		t.after = uuid.Nil
	}
}

func (t *turns) setBacklog(backlog bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.backlog = backlog
}

// places returns each job's place in its queue, none of them later than now, which is
// the database's time.
func (t *turns) places(now time.Time, heads []db.ListQueueHeadsRow, jobs []jobOfEvent) []time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(heads) == 0 || len(t.last) > maxTurns {
		t.last = nil // behind the head, wherever it will be
	}
	if t.last == nil {
		t.last = make(map[place]time.Time)
	}
	head := make(map[queueKey]time.Time, len(heads))
	for _, h := range heads {
		head[queueKey{h.Queue, int(h.Priority)}] = later(h.ScheduledAt, now.Add(-maxHeadStart))
	}
	places := make([]time.Time, len(jobs))
	for i, job := range jobs {
		key := place{queueKey{job.params.InsertOpts.Queue, job.params.InsertOpts.Priority}, job.organization}
		first, waiting := head[key.queueKey]
		if !waiting {
			first = now.Add(-time.Duration(len(jobs)) * time.Microsecond) // room for all of them up to now
		}
		if last, ok := t.last[key]; ok {
			first = later(first, last.Add(time.Microsecond))
		}
		places[i] = earlier(first, now)
		t.last[key] = places[i]
	}
	return places
}
