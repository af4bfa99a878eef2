package eventlog

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Missed says what becomes of the ticks of a cron that no process was there for.
type Missed string

// What becomes of missed ticks.
const (
	// MissedSkip leaves them out.
	MissedSkip Missed = "skip"
	// MissedOnce makes up for the newest one alone, and only if no tick of now is
	// to be run anyway.
	MissedOnce Missed = "once"
	// MissedAll makes up for all, the newest MaxMissed of them. Their jobs wait
	// for each other.
	MissedAll Missed = "all"
)

// Policy is how a cron runs beside its spec. The zero Policy will do for most.
type Policy struct {
	// Zone is the IANA name of the time zone that the spec is read in; empty means
	// UTC.
	Zone string
	// Missed is what becomes of missed ticks; empty means MissedOnce.
	Missed Missed
	// MaxMissed bounds MissedAll, 1 to 1000; 0 means 100.
	MaxMissed int
	// Jitter delays each job by a random time up to it, at most an hour.
	Jitter time.Duration
}

const (
	maxMissedDefault = 100
	maxMissedMost    = 1000
	maxJitterCron    = time.Hour

	// lateAfter is how long after its time a tick counts as missed. A process that
	// starts again in that time misses none.
	lateAfter = time.Minute
)

// Cron declares a job that runs at the times of a spec: the five fields of
// cron(8), or @daily, @every 10m and their like, in the zone of the policy. args
// are those of each run. The worker's Timeout must be positive. The cron's name
// is the kind of A.
//
// Each tick becomes one job, however many processes run, in the transaction that
// says so in the table cron_ticks. Ticks that come while no process runs are
// made up for as the policy says. Two jobs of a cron never run at a time, and
// but for MissedAll at most one waits: a tick that finds one waiting is skipped
// and counted. A retry of a failed job counts as waiting. [TickOf] tells a worker
// which tick its job is for.
//
// A cron that is no longer declared does not fire. With another spec or zone it
// fires at the next time of that.
func Cron[A river.JobArgs](spec string, args A, worker river.Worker[A], policy Policy) Declaration {
	declaration := declare(worker)
	if policy.Zone == "" {
		policy.Zone = "UTC"
	}
	if policy.Missed == "" {
		policy.Missed = MissedOnce
	}
	if policy.MaxMissed == 0 {
		policy.MaxMissed = maxMissedDefault
	}
	declaration.cron = &cronTrigger{spec: spec, policy: policy, args: args}
	return declaration
}

// cronTrigger is when a cron runs.
type cronTrigger struct {
	spec     string
	policy   Policy
	disabled bool // by an override
	args     river.JobArgs

	schedule schedule        // set by check
	encoded  json.RawMessage // args
}

// check reads the trigger, and returns the first thing that is wrong with it.
func (c *cronTrigger) check() (err error) {
	if c.schedule, err = parseSchedule(c.spec, c.policy.Zone); err != nil {
		return err
	}
	switch c.policy.Missed {
	case MissedSkip, MissedOnce, MissedAll:
	default:
		return fmt.Errorf("the policy for missed ticks %q is not skip, once or all", c.policy.Missed)
	}
	if c.policy.MaxMissed < 1 || c.policy.MaxMissed > maxMissedMost {
		return fmt.Errorf("the number of missed ticks %d is not from 1 to %d", c.policy.MaxMissed, maxMissedMost)
	}
	if c.policy.Jitter < 0 || c.policy.Jitter > maxJitterCron {
		return fmt.Errorf("the jitter %s is not from 0 to %s", c.policy.Jitter, maxJitterCron)
	}
	if c.encoded, err = json.Marshal(c.args); err != nil {
		return fmt.Errorf("encode args: %w", err)
	}
	return checkObject(c.encoded)
}

// String is the trigger as a plan shows it.
func (c *cronTrigger) String() string {
	text := "cron " + c.spec
	if c.policy.Zone != "UTC" {
		text += " " + c.policy.Zone
	}
	return text
}

// runs returns the first n runs of planYear, on the clock of the zone.
func (c *cronTrigger) runs(n int) []time.Time {
	at := time.Date(planYear, 1, 1, 0, 0, 0, 0, c.schedule.zone).Add(-time.Nanosecond)
	var runs []time.Time
	for range n {
		if at = c.schedule.next(at); at.IsZero() {
			break
		}
		runs = append(runs, at)
	}
	return runs
}

// Tick is the time that a cron's job is for.
type Tick struct {
	At time.Time
	// Late says that the tick was missed, and is made up for.
	Late bool
	// ByHand says that somebody asked for the run; At is when.
	ByHand bool
}

// TickOf returns the tick that a job is for; false for the job of no cron.
func TickOf(job *rivertype.JobRow) (Tick, bool) {
	var metadata cronMetadata
	if json.Unmarshal(job.Metadata, &metadata) != nil || metadata.Cron == "" {
		return Tick{}, false
	}
	return Tick{At: metadata.Tick, Late: metadata.Late, ByHand: metadata.ByHand}, true
}

// cronMetadata is what every job of a cron carries in River's metadata.
type cronMetadata struct {
	Cron   string    `json:"cron"`
	Tick   time.Time `json:"tick"`
	Late   bool      `json:"late"`
	ByHand bool      `json:"by_hand,omitempty"`
}
