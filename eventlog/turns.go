package eventlog

import (
	"maps"
	"slices"
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

	// baseInterval is how long the places of jobs that find nothing waiting begin at
	// the same time, in all bridges: two steps that meet there do not see each
	// other's jobs, and by their own times the later one's would come after all that
	// the other one's organization has got, at a microsecond a job.
	baseInterval = time.Second
	// baseRoom is how far behind now that time is at least, for as many jobs.
	baseRoom = 100 * time.Millisecond
)

// turns is whose turn it is: of the organizations when events are claimed, and of
// their jobs when a queue has more than its workers can do.
//
// River works a queue off in the order of scheduled_at. So that is where a job's
// place is kept, by start-time fair queueing: an organization's first job is put
// right behind the head of the queue, and each further one a microsecond, the least that
// PostgreSQL knows, behind its last. Of two organizations with a backlog each thus
// has every other place, and one with a few events waits for none of another's
// hundred thousand. Without a backlog all of it makes no difference, but that jobs
// are ahead of those of the last second that came another way.
//
// Each bridge remembers by itself, so an organization may get as many places a round as
// there are bridges.
type turns struct {
	large, small round // of Step and of StepInTurn

	mu      sync.Mutex
	backlog bool                  // the last Step left events behind
	oldest  [2]map[uuid.UUID]bool // the organizations of the oldest events of the last two, which may be under way
	placed  map[place]placed

	underWay int       // steps
	base     time.Time // of places in a queue where nothing waits
}

// round is how far the turns have gone round the organizations.
type round struct {
	mu    sync.Mutex
	after uuid.UUID // the last organization that had a turn
}

func (r *round) get() uuid.UUID {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.after
}

func (r *round) set(after uuid.UUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.after = after
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

// placed is what an organization has got of a queue.
type placed struct {
	last time.Time
	jobs int // since none of them waited, so at most as many wait
}

// pickedOldest remembers whose the oldest events are, and whether there are more
// than one step takes. It returns whether there were not before.
func (t *turns) pickedOldest(events []db.PickDueEventsRow, backlog bool) (began bool) {
	organizations := make(map[uuid.UUID]bool)
	for _, event := range events {
		organizations[event.OrganizationID] = true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.oldest[0], t.oldest[1] = t.oldest[1], organizations
	began = backlog && !t.backlog
	t.backlog = backlog
	return began
}

// haveBacklog returns whether turns need to be taken.
func (t *turns) haveBacklog() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.backlog
}

// busy returns the organizations that Step is busy with.
func (t *turns) busy() []uuid.UUID {
	t.mu.Lock()
	defer t.mu.Unlock()
	organizations := slices.AppendSeq([]uuid.UUID{}, maps.Keys(t.oldest[0]))
	return slices.AppendSeq(organizations, maps.Keys(t.oldest[1]))
}

// begin tells of a step, until what it returns is called.
func (t *turns) begin() (end func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.underWay++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.underWay--
	}
}

// places returns each job's place in its queue, none of them later than now, which is
// the database's time.
func (t *turns) places(now time.Time, heads []db.ListQueueHeadsRow, jobs []jobOfEvent) []time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.placed == nil || len(t.placed) > maxTurns {
		t.placed = make(map[place]placed)
	}
	oldest := now.Add(-maxHeadStart)
	head := make(map[queueKey]time.Time, len(heads))
	for _, h := range heads {
		head[queueKey{h.Queue, int(h.Priority)}] = later(h.ScheduledAt, oldest)
	}
	if t.underWay <= 1 || t.base.IsZero() { // no other one goes by the base that there is
		t.base = now.Add(-baseRoom).Truncate(baseInterval)
	}
	base := later(t.base, oldest)
	places := make([]time.Time, len(jobs))
	for i, job := range jobs {
		key := place{queueKey{job.params.InsertOpts.Queue, job.params.InsertOpts.Priority}, job.organization}
		own := t.placed[key]
		next := own.last.Add(time.Microsecond)
		first, waiting := head[key.queueKey]
		switch {
		case !waiting:
			first = base
		case own.last.Before(first):
			own.jobs = 0
		default: // it may have got its last place when nothing seemed to wait
			next = earlier(next, first.Add(time.Duration(own.jobs)*time.Microsecond))
		}
		own.last = earlier(later(first, next), now)
		own.jobs++
		t.placed[key] = own
		places[i] = own.last
	}
	return places
}
