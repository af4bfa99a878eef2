package eventlog

import (
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"

	"afluente/db"
)

// SetPollInterval is for tests that must tell a hint from the poll. Call it
// before Run.
func (b *Bridge) SetPollInterval(interval time.Duration) { b.poll = interval }

// CheckTags is the check that Emit makes of a payload, for tests that go
// through all types.
func CheckTags(payload Payload) error { return checkTags(payload) }

// Ticks are those of a spec after a time and up to another, n at most.
func Ticks(spec, zone string, after, until time.Time, n int) ([]time.Time, error) {
	s, err := parseSchedule(spec, zone)
	if err != nil {
		return nil, err
	}
	var ticks []time.Time
	for at := s.next(after); !at.IsZero() && !at.After(until) && len(ticks) < n; at = s.next(at) {
		ticks = append(ticks, at)
	}
	return ticks, nil
}

// Turns are what a bridge remembers, for tests of steps that do not see each other.
type Turns struct{ turns turns }

// Begin tells of a step.
func (t *Turns) Begin() (end func()) { return t.turns.begin() }

// Places returns those of an organization's jobs in a queue, whose oldest job waits
// since head, or which is empty.
func (t *Turns) Places(now, head time.Time, organization uuid.UUID, jobs int) []time.Time {
	made := make([]jobOfEvent, jobs)
	for i := range made {
		made[i].organization = organization
		made[i].params.InsertOpts = &river.InsertOpts{}
	}
	var heads []db.ListQueueHeadsRow
	if !head.IsZero() {
		heads = []db.ListQueueHeadsRow{{ScheduledAt: head}}
	}
	return t.turns.places(now, heads, made)
}
