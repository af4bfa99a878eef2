package eventlog

import (
	"errors"
	"fmt"
	"strings"
	"time"
	_ "time/tzdata" // so that every zone is there on every machine

	"github.com/robfig/cron/v3"
)

// schedule is when a cron ticks.
//
// A spec is read on the clock on the wall of its zone. Where clocks change, a
// spec for every hour keeps its real spacing, and any other one ticks once for
// each time that it names: at the end of a gap for a time that the gap leaves
// out, and at the first of two for a time that comes twice. That is what cron of
// Debian does. Ticks of @every are multiples of its length since 1970, so that
// every process finds the same ones.
type schedule struct {
	zone  *time.Location
	every time.Duration      // of @every, else 0
	spec  *cron.SpecSchedule // in UTC, in place of the zone
	// hourly says that the spec names every hour.
	hourly bool
}

const (
	allHours = 1<<24 - 1

	// maxShift is more than any clock was ever changed by: Samoa left out a day.
	maxShift = 36 * time.Hour
)

// parseSchedule reads a spec, and finds out whether it ever ticks.
func parseSchedule(spec, zone string) (schedule, error) {
	location, err := time.LoadLocation(zone)
	if err != nil || zone == "Local" {
		return schedule{}, fmt.Errorf("the time zone %q is unknown", zone)
	}
	if strings.Contains(spec, "TZ=") {
		return schedule{}, fmt.Errorf("the spec %q: the zone has a place of its own", spec)
	}
	parsed, err := cron.ParseStandard(spec)
	if err != nil {
		return schedule{}, fmt.Errorf("the spec %q: %w", spec, err)
	}
	switch parsed := parsed.(type) {
	case cron.ConstantDelaySchedule: // which the library rounds to what it likes
		every, err := time.ParseDuration(strings.TrimPrefix(spec, "@every "))
		if err != nil || every != parsed.Delay {
			return schedule{}, fmt.Errorf("the spec %q: the time is not in whole seconds, at least one", spec)
		}
		return schedule{zone: location, every: every}, nil
	case *cron.SpecSchedule:
		parsed.Location = time.UTC
		s := schedule{zone: location, spec: parsed, hourly: parsed.Hour&allHours == allHours}
		if s.next(time.Date(planYear, 1, 1, 0, 0, 0, 0, time.UTC)).IsZero() {
			return schedule{}, fmt.Errorf("the spec %q never fires", spec)
		}
		return s, nil
	default:
		return schedule{}, errors.New("the spec is of no known kind")
	}
}

// next returns the first tick after a time, zero for none.
func (s schedule) next(after time.Time) time.Time {
	switch {
	case s.every > 0:
		return after.Add(s.every - time.Duration(after.UnixNano()%int64(s.every))).UTC()
	case s.hourly:
		inZone := *s.spec
		inZone.Location = s.zone
		return utcOrZero(inZone.Next(after.UTC()))
	}
	for wall := asWall(after.In(s.zone)).Add(-maxShift); ; {
		if wall = s.spec.Next(wall); wall.IsZero() {
			return wall
		}
		if at := s.instant(wall); at.After(after) {
			return at.UTC()
		}
	}
}

func utcOrZero(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC()
}

// asWall is what a clock on the wall shows, as if it were in UTC.
func asWall(t time.Time) time.Time {
	return time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), t.Second(), t.Nanosecond(), time.UTC)
}

// instant returns when a clock on the wall of the zone first shows a time, or
// would have shown it, had it not been moved past it.
func (s schedule) instant(wall time.Time) time.Time {
	_, before := wall.Add(-maxShift).In(s.zone).Zone()
	_, after := wall.Add(maxShift).In(s.zone).Zone()
	early, late := wall.Add(-time.Duration(before)*time.Second), wall.Add(-time.Duration(after)*time.Second)
	if late.Before(early) && asWall(late.In(s.zone)).Equal(wall) {
		return late
	}
	if asWall(early.In(s.zone)).Equal(wall) {
		return early
	}
	if asWall(late.In(s.zone)).Equal(wall) {
		return late
	}
	gapEnd, _ := early.In(s.zone).ZoneBounds()
	return gapEnd
}
