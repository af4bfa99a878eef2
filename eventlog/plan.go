package eventlog

import (
	"cmp"
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
	fields    []string     // of the payload
	orderedBy string       // see Ordered
	death     Death
	limit     *int // see LimitedPerOrganization
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
	declaration.fields = fieldsOf(payload)
	declaration.project = func(r record) (json.RawMessage, error) {
		event, err := decodeOnce[P](r)
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
			if err := d.cron.check(); err != nil {
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
		for _, err := range d.checkLane() {
			mistake("%w", err)
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
			trigger = "event " + d.eventType + d.lane()
		case d.cron != nil:
			trigger, runs = d.cron.String(), d.cron.runs(3)
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
			runs[i] = run.UTC().Format("Jan 02 15:04")
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

// CronOverride changes a declared cron without a rebuild. What is empty stays as
// it was declared.
type CronOverride struct {
	Spec      string         `yaml:"spec"`
	Zone      string         `yaml:"zone"`
	Missed    Missed         `yaml:"missed"`
	MaxMissed int            `yaml:"max_missed"`
	Jitter    *time.Duration `yaml:"jitter"`
	// Paused switches the cron off.
	Paused bool `yaml:"paused"`
}

// Override returns the plan with some of its crons changed, by name, or every
// mistake in the changes, joined.
func (p *Plan) Override(overrides map[string]CronOverride) (*Plan, error) {
	changed := &Plan{declarations: slices.Clone(p.declarations), workers: p.workers}
	var mistakes []error
	for _, name := range slices.Sorted(maps.Keys(overrides)) {
		i := slices.IndexFunc(changed.declarations, func(d Declaration) bool { return d.kind == name && d.cron != nil })
		if i < 0 {
			mistakes = append(mistakes, fmt.Errorf("override %q: %w", name, ErrNoCron))
			continue
		}
		override, trigger := overrides[name], *changed.declarations[i].cron
		trigger.spec = cmp.Or(override.Spec, trigger.spec)
		trigger.policy.Zone = cmp.Or(override.Zone, trigger.policy.Zone)
		trigger.policy.Missed = cmp.Or(override.Missed, trigger.policy.Missed)
		trigger.policy.MaxMissed = cmp.Or(override.MaxMissed, trigger.policy.MaxMissed)
		if override.Jitter != nil {
			trigger.policy.Jitter = *override.Jitter
		}
		trigger.disabled = override.Paused
		if err := trigger.check(); err != nil {
			mistakes = append(mistakes, fmt.Errorf("override %q: %w", name, err))
		}
		changed.declarations[i].cron = &trigger
	}
	if len(mistakes) > 0 {
		return nil, errors.Join(mistakes...)
	}
	return changed, nil
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
