package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
)

// figures are what one run of a variant found, by name.
type figures map[string]float64

// measurement is what is compared with each other.
type measurement struct {
	name     string
	fanOut   int       // consumers of each event
	variants []variant // in the order of the first round
	rows     []row
}

// variant is one side of a measurement.
type variant struct {
	name string
	ours bool // in a database with our schema, not plain River's
	run  func(context.Context, *bus) (figures, error)
}

// row says how a figure is shown, and beside which other one.
type row struct {
	name        string
	figure      string
	unit        string
	of          string  // a figure, empty for none
	atLeast     float64 // target of the ratio, 0 for none
	ratioAtMost float64 // the same
	atMost      float64 // target of the figure, 0 for none
}

// measurements are all there are.
func measurements() []measurement {
	return []measurement{
		fanOut(1, 0),
		fanOut(3, 0.9),
		fanOut(maxFanOut, 0),
		{
			name: "bridge", fanOut: 3,
			variants: []variant{
				{"one INSERT … SELECT", true, bound},
				{"bridge", true, bridgeAlone},
			},
			rows: []row{
				{name: "one INSERT … SELECT of the jobs in SQL", figure: "bound", unit: "jobs/s"},
				{name: "bridge", figure: "bridge", unit: "jobs/s", of: "bound", atLeast: 0.8},
			},
		},
		{
			name: "latency", fanOut: 3,
			variants: []variant{
				{"plain River", false, plainLatency},
				{"ours", true, latency},
			},
			rows: latencyRows(),
		},
		{
			name: "fairness", fanOut: 1,
			variants: []variant{
				{"alone", true, fairness("alone", false)},
				{"beside a flood", true, fairness("beside", true)},
			},
			rows: fairnessRows(),
		},
		{
			name: "order", fanOut: 1,
			variants: []variant{
				{"in no order", true, order("none", manyKeys, unordered)},
				{"in the order of many keys", true, order("many", manyKeys, ordered)},
				{"in the order of one key", true, ofOneKey},
			},
			rows: []row{
				{name: "fan-out → settle in no order", figure: "none", unit: "jobs/s"},
				{name: "in the order of many keys", figure: "many", unit: "jobs/s", of: "none", atLeast: 0.8},
				{name: "in the order of a single key", figure: "one", unit: "jobs/s"},
			},
		},
		{
			name: "behind", fanOut: 3,
			variants: []variant{
				{"nothing behind", true, behind("empty", func(Config) int { return 0 })},
				{"done events behind", true, behind("full", func(c Config) int { return c.Behind })},
			},
			rows: []row{
				{name: "emit → settle, in an empty database", figure: "empty", unit: "jobs/s"},
				{name: "behind done events", figure: "full", unit: "jobs/s", of: "empty", atLeast: 0.9},
			},
		},
		{
			name: "size", fanOut: 3,
			variants: []variant{{"emit to settle", true, size}},
			rows: []row{
				{name: "event_log with its indexes, for a million events", figure: "events", unit: "MB"},
				{name: "river_job with its indexes, for a million jobs", figure: "jobs", unit: "MB"},
				{name: "WAL for an event and its three jobs", figure: "wal", unit: "bytes"},
				{name: "CPU time of this process for a thousand events", figure: "cpu", unit: "ms"},
				{name: "most connections", figure: "conns", unit: "connections"},
			},
		},
		{
			name: "settle", fanOut: 3,
			variants: []variant{
				{"without the trigger", true, stages("unsettled", unsettle)},
				{"with it", true, stages("settled", nothing)},
			},
			rows: []row{
				{name: "work without the settle trigger", figure: "unsettled work", unit: "jobs/s"},
				{name: "work and settle", figure: "settled work", unit: "jobs/s", of: "unsettled work"},
			},
		},
		{
			name: "gin", fanOut: 3,
			variants: []variant{
				{"with GIN indexes", true, together("", nothing)},
				{"without", true, together("bare", dropGIN)},
				{"stages with GIN indexes", true, stages("", nothing)},
				{"stages without", true, stages("bare", dropGIN)},
			},
			rows: []row{
				{name: "with River's GIN indexes: emit → settle", figure: " together", unit: "jobs/s"},
				{name: "with them: fan-out alone", figure: " fan-out", unit: "jobs/s"},
				{name: "with them: work and settle alone", figure: " work", unit: "jobs/s"},
				{name: "without: emit → settle", figure: "bare together", unit: "jobs/s", of: " together"},
				{name: "without: fan-out alone", figure: "bare fan-out", unit: "jobs/s", of: " fan-out"},
				{name: "without: work and settle alone", figure: "bare work", unit: "jobs/s", of: " work"},
			},
		},
	}
}

// fanOut is the whole way of events with n consumers, and each part of it,
// beside plain River's. atLeast is the target of the whole.
func fanOut(n int, atLeast float64) measurement {
	return measurement{
		name: fmt.Sprintf("fanout-%d", n), fanOut: n,
		variants: []variant{
			{"emit to settle", true, together("", nothing)},
			{"plain River", false, plainTogether},
			{"fan-out to settle", true, backlog},
			{"plain River's stages", false, plainStages},
			{"stages", true, stages("", nothing)},
		},
		rows: []row{
			{name: "plain River: insert + work, at once", figure: "plain", unit: "jobs/s"},
			{name: "emit → settle, at once", figure: " together", unit: "jobs/s", of: "plain", atLeast: atLeast},
			{name: "fan-out → settle, at once, emitted before", figure: "backlog", unit: "jobs/s", of: "plain"},
			{name: "plain River: insert alone", figure: "plain insert", unit: "jobs/s"},
			{name: "plain River: work alone", figure: "plain work", unit: "jobs/s"},
			{name: "emit alone", figure: " emit", unit: "events/s"},
			{name: "fan-out alone", figure: " fan-out", unit: "jobs/s", of: "plain insert"},
			{name: "work and settle alone", figure: " work", unit: "jobs/s", of: "plain work"},
		},
	}
}

// pass puts the jobs of some events in and waits until they are done.
func (b *bus) pass(ctx context.Context, events int, done string, put func(events int) error) error {
	b.tally.expect(events * len(b.consumers))
	if err := put(events); err != nil {
		return err
	}
	return b.await(ctx, done)
}

// warmPass is pass for all events after a tenth as many more, for which connections
// and statements are made and whoever listens has begun to. They are not fewer, as
// statistics of a single row make the planner choose plans that no table in use has.
func (b *bus) warmPass(ctx context.Context, done string, put func(events int) error) (jobsPerSecond float64, err error) {
	if err := b.pass(ctx, max(1, b.events/10), done, put); err != nil {
		return 0, err
	}
	if err := b.rest(ctx); err != nil {
		return 0, err
	}
	return rate(b.jobs(), func() error { return b.pass(ctx, b.events, done, put) })
}

// workOff starts a client on jobs that wait, and returns how many of them it
// works off a second, its start included.
func (b *bus) workOff(ctx context.Context, client *river.Client[pgx.Tx], done string) (jobsPerSecond float64, err error) {
	b.tally.expect(b.jobs())
	start := time.Now()
	err = working(ctx, client, func() error {
		err := b.await(ctx, done)
		jobsPerSecond = float64(b.jobs()) / time.Since(start).Seconds()
		return err
	})
	return jobsPerSecond, err
}

func plainTogether(ctx context.Context, b *bus) (figures, error) {
	client, err := b.plain()
	if err != nil {
		return nil, err
	}
	got := make(figures)
	err = working(ctx, client, func() error {
		got["plain"], err = b.warmPass(ctx, plainDone, func(events int) error { return b.insert(ctx, client, events) })
		return err
	})
	return got, err
}

func plainStages(ctx context.Context, b *bus) (figures, error) {
	client, err := b.plain()
	if err != nil {
		return nil, err
	}
	got := make(figures)
	if err := b.rest(ctx); err != nil {
		return nil, err
	}
	if got["plain insert"], err = rate(b.jobs(), func() error { return b.insert(ctx, client, b.events) }); err != nil {
		return nil, err
	}
	if err := b.rest(ctx); err != nil {
		return nil, err
	}
	got["plain work"], err = b.workOff(ctx, client, plainDone)
	return got, err
}

// together emits while a bridge and a client run. prepare changes the schema
// first; the figure's name begins with name.
func together(name string, prepare func(context.Context, *bus) error) func(context.Context, *bus) (figures, error) {
	return func(ctx context.Context, b *bus) (figures, error) {
		if err := prepare(ctx, b); err != nil {
			return nil, err
		}
		client, bridge, err := b.ours(ctx)
		if err != nil {
			return nil, err
		}
		got := make(figures)
		err = working(ctx, client, func() error {
			return bridging(ctx, bridge, func() error {
				got[name+" together"], err = b.warmPass(ctx, eventsDone, func(events int) error { return b.emit(ctx, events) })
				return err
			})
		})
		return got, err
	}
}

func backlog(ctx context.Context, b *bus) (figures, error) {
	jobsPerSecond, err := b.workBacklog(ctx, func() error { return b.emit(ctx, b.events) })
	return figures{"backlog": jobsPerSecond}, err
}

// workBacklog starts a bridge and a client when emit has emitted all events, and
// returns how many jobs a second they work off.
func (b *bus) workBacklog(ctx context.Context, emit func() error) (jobsPerSecond float64, err error) {
	client, bridge, err := b.ours(ctx)
	if err != nil {
		return 0, err
	}
	if err := emit(); err != nil {
		return 0, err
	}
	if err := b.rest(ctx); err != nil {
		return 0, err
	}
	b.tally.expect(b.jobs())
	start := time.Now()
	err = working(ctx, client, func() error {
		return bridging(ctx, bridge, func() error {
			err := b.await(ctx, eventsDone)
			jobsPerSecond = float64(b.jobs()) / time.Since(start).Seconds()
			return err
		})
	})
	return jobsPerSecond, err
}

// stages emits, then fans out, then works. prepare changes the schema first;
// the figures' names begin with name.
func stages(name string, prepare func(context.Context, *bus) error) func(context.Context, *bus) (figures, error) {
	return func(ctx context.Context, b *bus) (figures, error) {
		if err := prepare(ctx, b); err != nil {
			return nil, err
		}
		client, bridge, err := b.ours(ctx)
		if err != nil {
			return nil, err
		}
		got := make(figures)
		if err := b.rest(ctx); err != nil {
			return nil, err
		}
		if got[name+" emit"], err = rate(b.events, func() error { return b.emit(ctx, b.events) }); err != nil {
			return nil, err
		}
		if err := b.rest(ctx); err != nil {
			return nil, err
		}
		if got[name+" fan-out"], err = rate(b.jobs(), func() error { return drain(ctx, bridge) }); err != nil {
			return nil, err
		}
		if err := b.rest(ctx); err != nil {
			return nil, err
		}
		got[name+" work"], err = b.workOff(ctx, client, jobsDone)
		return got, err
	}
}

func nothing(context.Context, *bus) error { return nil }

func unsettle(ctx context.Context, b *bus) error {
	return b.exec(ctx, "ALTER TABLE river.river_job DISABLE TRIGGER afluente_settle_updated")
}

func dropGIN(ctx context.Context, b *bus) error {
	return b.exec(ctx, "DROP INDEX river.river_job_args_index, river.river_job_metadata_index")
}

func (b *bus) exec(ctx context.Context, statement string) error {
	if _, err := b.pool.Exec(ctx, statement); err != nil {
		return fmt.Errorf("%s: %w", statement, err)
	}
	return nil
}

// pending leaves a database with events that are due, and at rest.
func (b *bus) pending(ctx context.Context) error {
	if err := b.emit(ctx, b.events); err != nil {
		return err
	}
	return b.rest(ctx)
}

func bridgeAlone(ctx context.Context, b *bus) (figures, error) {
	_, bridge, err := b.ours(ctx)
	if err != nil {
		return nil, err
	}
	if err := b.pending(ctx); err != nil {
		return nil, err
	}
	jobsPerSecond, err := rate(b.jobs(), func() error { return drain(ctx, bridge) })
	return figures{"bridge": jobsPerSecond}, err
}

// insertJobs inserts the jobs that the bridge makes of the pending events, all
// at once. It leaves the events as they are, which the bridge does not.
const insertJobs = `
INSERT INTO river.river_job
    (args, created_at, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags)
SELECT
    jsonb_build_object('message_id', e.payload -> 'message_id'),
    now(),
    c.name,
    c.max_attempts,
    jsonb_build_object(
        'event_id', e.id,
        'event_created_at', rtrim(rtrim(to_char(e.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '0'), '.') || 'Z',
        'consumer', c.name),
    c.priority,
    c.queue,
    now(),
    'available',
    ARRAY[replace(e.event_type, '.', '-'), e.organization_id::text, 'kind-' || e.entity_kind]
FROM public.event_log AS e
JOIN public.event_consumers AS c ON c.event_types && ARRAY[e.event_type, '*']
WHERE e.status = 'pending'
ORDER BY e.created_at, e.id, c.name`

func bound(ctx context.Context, b *bus) (figures, error) {
	if _, _, err := b.ours(ctx); err != nil { // registers the consumers
		return nil, err
	}
	if err := b.pending(ctx); err != nil {
		return nil, err
	}
	jobsPerSecond, err := rate(b.jobs(), func() error {
		tag, err := b.pool.Exec(ctx, insertJobs)
		if err != nil {
			return fmt.Errorf("insert jobs in SQL: %w", err)
		}
		if tag.RowsAffected() != int64(b.jobs()) {
			return fmt.Errorf("inserted %d jobs in SQL in place of %d", tag.RowsAffected(), b.jobs())
		}
		return nil
	})
	return figures{"bound": jobsPerSecond}, err
}
