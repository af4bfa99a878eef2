package eventlog

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/robfig/cron/v3"
)

// MaxAttemptsDefault is how often a job is tried when its args name no other
// number in InsertOpts.
const MaxAttemptsDefault = 8

// planYear is the year whose first runs a plan shows, so that it does not
// change with the day.
const planYear = 2026

// anyType is the event type of event.Any: every event.
const anyType = "*"

// A Declaration is one kind of job: what brings it about and who does it. Make
// one with [On], [Cron] or [Job] and hand them all to [Compile].
type Declaration struct {
	kind      string
	eventType string // empty for a job that no event brings about
	opts      river.InsertOpts
	plainOpts bool // opts set no more than the bridge heeds
	timeout   time.Duration
	addWorker func(*river.Workers) error
	cron      *cronTrigger // nil without
	// project makes the args of the job for an event, encoded. It may panic.
	project func(record) (json.RawMessage, error)
}

// On declares a consumer: each event of type P becomes one job with the args
// that project makes of it, done by worker. The consumer's name is the kind of
// A; its queue, priority and number of attempts are those of A's InsertOpts,
// which may set nothing else.
//
// Args hold ids, never payloads or personal data: they stay in the dead
// letters for ever. A worker that needs the payload loads it with
// [Events.Load]. The worker's Timeout must be positive.
//
// project must be a pure function. It runs in the bridge, or, when the bridge
// of an older process fanned the event out, or the payload is large or does
// not fit P, before the worker in the job itself. An event that does not fit P
// ends in the dead letters of this consumer.
func On[P Payload, A river.JobArgs](project func(Event[P]) A, worker river.Worker[A]) Declaration {
	var payload P
	declaration := declare(&consumer[P, A]{Worker: worker, project: project})
	declaration.eventType = payload.EventType()
	declaration.project = func(r record) (json.RawMessage, error) {
		event, err := decode[P](r)
		if err != nil {
			return nil, err
		}
		args, err := json.Marshal(project(event))
		if err != nil {
			return nil, fmt.Errorf("encode args: %w", err)
		}
		return args, checkObject(args)
	}
	return declaration
}

// Cron declares a job that runs at the times of a spec: the five fields of
// cron(8) in UTC, or @daily, @every 10m and their like. args are those of each
// run. The worker's Timeout must be positive.
//
// One process at a time, River's leader, brings the jobs about, each tick
// once; a job starts up to 5 s after its tick. A tick that comes while no
// process leads, as for up to 20 s after the leader was killed, is left out, so
// what a run has to do should be a question to the database.
func Cron[A river.JobArgs](spec string, args A, worker river.Worker[A]) Declaration {
	declaration := declare(worker)
	declaration.cron = &cronTrigger{spec: spec, args: args}
	return declaration
}

// cronTrigger is when a cron runs.
type cronTrigger struct {
	spec     string
	args     river.JobArgs
	schedule cron.Schedule // set by Compile
}

// parse reads the spec and finds out whether it ever fires.
func (c *cronTrigger) parse() (err error) {
	if c.schedule, err = cron.ParseStandard(c.spec); err != nil {
		return fmt.Errorf("the spec %q: %w", c.spec, err)
	}
	if len(c.runs(1)) == 0 {
		return fmt.Errorf("the spec %q never fires", c.spec)
	}
	return nil
}

// runs returns the first n runs of planYear.
func (c *cronTrigger) runs(n int) []time.Time {
	var runs []time.Time
	at := time.Date(planYear, 1, 1, 0, 0, 0, 0, time.UTC).Add(-time.Nanosecond)
	for range n {
		if at = c.schedule.Next(at); at.IsZero() {
			break
		}
		runs = append(runs, at)
	}
	return runs
}

// minGap is the least time between two runs, by which River tells a tick that
// two leaders both bring about from the next one.
func (c *cronTrigger) minGap() time.Duration {
	gap := 24 * time.Hour
	runs := c.runs(100)
	for i := 1; i < len(runs); i++ {
		gap = min(gap, runs[i].Sub(runs[i-1]))
	}
	return max(gap, time.Second)
}

// periodicJobs returns the plan's crons for River.
func (p *Plan) periodicJobs() []*river.PeriodicJob {
	var all []*river.PeriodicJob
	for _, d := range p.declarations {
		if d.cron == nil {
			continue
		}
		opts := d.opts
		opts.UniqueOpts = river.UniqueOpts{ByPeriod: d.cron.minGap()}
		ticks := &ticker{schedule: d.cron.schedule}
		all = append(all, river.NewPeriodicJob(ticks, func() (river.JobArgs, *river.InsertOpts) {
			opts := opts
			opts.ScheduledAt = ticks.next
			return d.cron.args, &opts
		}, &river.PeriodicJobOpts{ID: d.kind}))
	}
	return all
}

// ticker runs a schedule in UTC, whatever the machine's zone, and knows the
// tick that a job is for. River 0.51 inserts a job up to 100 ms before its tick
// and, unless the job says when it is for, makes the unique key of the time of
// the insert: that of the period before, whose job is there already.
type ticker struct {
	schedule cron.Schedule
	next     time.Time
}

// Next implements river.PeriodicSchedule. River makes the job of a tick before
// it asks for the one after it, in the same goroutine.
func (t *ticker) Next(now time.Time) time.Time {
	t.next = t.schedule.Next(now.UTC())
	return t.next
}

// Job declares a worker for jobs that Go code inserts itself, with River's
// InsertTx. The worker's Timeout must be positive.
func Job[A river.JobArgs](worker river.Worker[A]) Declaration {
	return declare(worker)
}

func declare[A river.JobArgs](worker river.Worker[A]) Declaration {
	var args A
	declaration := Declaration{
		kind:      args.Kind(),
		timeout:   worker.Timeout(&river.Job[A]{JobRow: &rivertype.JobRow{}, Args: args}),
		addWorker: func(workers *river.Workers) error { return river.AddWorkerSafely(workers, worker) },
	}
	if withOpts, ok := any(args).(river.JobArgsWithInsertOpts); ok {
		declaration.opts = withOpts.InsertOpts()
	}
	rest := declaration.opts
	rest.MaxAttempts, rest.Priority, rest.Queue = 0, 0, ""
	declaration.plainOpts = reflect.ValueOf(rest).IsZero()
	if declaration.opts.Queue == "" {
		declaration.opts.Queue = river.QueueDefault
	}
	if declaration.opts.Priority == 0 {
		declaration.opts.Priority = river.PriorityDefault
	}
	if declaration.opts.MaxAttempts == 0 {
		declaration.opts.MaxAttempts = MaxAttemptsDefault
	}
	return declaration
}

// Plan is a checked set of declarations. It does not change after Compile and
// may be used by several goroutines.
type Plan struct {
	declarations []Declaration // by kind
	workers      *river.Workers
}

var (
	kindRE     = regexp.MustCompile(`^[a-z][a-z0-9]*([_-][a-z0-9]+)*$`)
	trailingRE = regexp.MustCompile(` +\n`)
	queueRE    = regexp.MustCompile(`^[a-z0-9]+([_|-]?[a-z0-9]+)*$`) // River's own rule
)

// Compile checks the declarations together and returns every mistake, joined.
func Compile(declarations ...Declaration) (*Plan, error) {
	plan := &Plan{workers: river.NewWorkers()}
	seen := make(map[string]bool, len(declarations))
	var mistakes []error
	for _, d := range declarations {
		mistake := func(format string, args ...any) {
			mistakes = append(mistakes, fmt.Errorf("declare %q: "+format, append([]any{d.kind}, args...)...))
		}
		if d.addWorker == nil {
			mistakes = append(mistakes, errors.New("declare: empty declaration"))
			continue
		}
		if seen[d.kind] {
			mistake("the kind is declared twice")
			continue
		}
		seen[d.kind] = true
		if !kindRE.MatchString(d.kind) || len(d.kind) > 127 {
			mistake("the kind is not lower case words joined by - or _, at most 127 bytes")
		}
		if d.project != nil && d.eventType != anyType && !eventTypeRE.MatchString(d.eventType) {
			mistake("the event type %q is not entity.action in lower snake case", d.eventType)
		}
		if d.cron != nil {
			if err := d.cron.parse(); err != nil {
				mistake("%w", err)
			}
		}
		if len(d.opts.Queue) > 64 || !queueRE.MatchString(d.opts.Queue) {
			mistake("the queue %q is not letters and digits joined by _ or -, at most 64 bytes", d.opts.Queue)
		}
		if d.opts.Priority < 1 || d.opts.Priority > 4 {
			mistake("the priority %d is not from 1 to 4", d.opts.Priority)
		}
		if d.opts.MaxAttempts < 1 || d.opts.MaxAttempts > 1000 {
			mistake("the number of attempts %d is not from 1 to 1000", d.opts.MaxAttempts)
		}
		if (d.project != nil || d.cron != nil) && !d.plainOpts {
			mistake("InsertOpts of a consumer or a cron may set MaxAttempts, Priority and Queue and nothing else")
		}
		if d.timeout <= 0 {
			mistake("the worker's Timeout must be positive")
		}
		if err := d.addWorker(plan.workers); err != nil {
			mistake("%w", err)
		}
		plan.declarations = append(plan.declarations, d)
	}
	if len(mistakes) > 0 {
		return nil, errors.Join(mistakes...)
	}
	slices.SortFunc(plan.declarations, func(a, b Declaration) int { return strings.Compare(a.kind, b.kind) })
	return plan, nil
}

// Entry is one line of a plan.
type Entry struct {
	Job         string        `json:"job"`
	Trigger     string        `json:"trigger"`
	Queue       string        `json:"queue"`
	MaxAttempts int           `json:"max_attempts"`
	Timeout     time.Duration `json:"timeout_ns"`
	// FirstRuns is when a cron runs first in 2026.
	FirstRuns []time.Time `json:"first_runs,omitempty"`
}

// Entries returns the plan's lines, sorted by the job's kind.
func (p *Plan) Entries() []Entry {
	entries := make([]Entry, len(p.declarations))
	for i, d := range p.declarations {
		trigger := "go code"
		var runs []time.Time
		switch {
		case d.project != nil:
			trigger = "event " + d.eventType
		case d.cron != nil:
			trigger, runs = "cron "+d.cron.spec, d.cron.runs(3)
		}
		entries[i] = Entry{
			Job:         d.kind,
			Trigger:     trigger,
			Queue:       d.opts.Queue,
			MaxAttempts: d.opts.MaxAttempts,
			Timeout:     d.timeout,
			FirstRuns:   runs,
		}
	}
	return entries
}

// String returns the plan as a table.
func (p *Plan) String() string {
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "JOB\tTRIGGER\tQUEUE\tATTEMPTS\tTIMEOUT\tFIRST RUNS OF %d (UTC)\n", planYear)
	for _, e := range p.Entries() {
		runs := make([]string, len(e.FirstRuns))
		for i, run := range e.FirstRuns {
			runs[i] = run.Format("Jan 02 15:04")
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\n", e.Job, e.Trigger, e.Queue, e.MaxAttempts, e.Timeout, strings.Join(runs, ", "))
	}
	_ = w.Flush() // a strings.Builder does not fail
	return trailingRE.ReplaceAllString(table.String(), "\n")
}

// Queues returns the names of the queues that the plan's jobs run on, sorted.
func (p *Plan) Queues() []string {
	queues := make(map[string]bool)
	for _, d := range p.declarations {
		queues[d.opts.Queue] = true
	}
	return slices.Sorted(maps.Keys(queues))
}

// consumers returns the declared consumers by name.
func (p *Plan) consumers() map[string]Declaration {
	consumers := make(map[string]Declaration)
	for _, d := range p.declarations {
		if d.project != nil {
			consumers[d.kind] = d
		}
	}
	return consumers
}
