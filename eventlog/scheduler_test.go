package eventlog_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.uber.org/zap"

	"afluente/db/dbtest"
	"afluente/eventlog"
)

type tickArgs struct{}

func (tickArgs) Kind() string { return "tick-worker" }

type tockArgs struct{}

func (tockArgs) Kind() string { return "tock-worker" }

type tackArgs struct{}

func (tackArgs) Kind() string { return "tack-worker" }

func cron[A river.JobArgs](spec string, policy eventlog.Policy) eventlog.Declaration {
	var args A
	return eventlog.Cron(spec, args, &worker[A]{}, policy)
}

// clock is what time schedulers think it is.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func newClock(at string) *clock {
	start, err := time.Parse(time.RFC3339, at)
	if err != nil {
		panic(err)
	}
	return &clock{at: start}
}

func (c *clock) now(context.Context) (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at, nil
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// newScheduler starts a process on a database, whose crons are registered.
func newScheduler(t *testing.T, pool *pgxpool.Pool, c *clock, declarations ...eventlog.Declaration) *eventlog.Scheduler {
	t.Helper()
	plan, err := eventlog.Compile(declarations...)
	require.NoError(t, err)
	return schedulePlan(t, pool, c, plan)
}

func schedulePlan(t *testing.T, pool *pgxpool.Pool, c *clock, plan *eventlog.Plan) *eventlog.Scheduler {
	t.Helper()
	scheduler, err := eventlog.NewScheduler(eventlog.SchedulerConfig{Pool: pool, Plan: plan, Log: zap.NewNop(), Now: c.now})
	require.NoError(t, err)
	require.NoError(t, scheduler.Register(t.Context()))
	return scheduler
}

// finish lets every job of a cron that waits be done.
func finish(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	exec(t, pool, "UPDATE river.river_job SET state = 'completed', finalized_at = now() WHERE state IN ('available', 'scheduled', 'running')")
}

// ticks returns the ticks of a cron's jobs, with * for late ones, as hours and
// minutes in UTC.
func ticks(t *testing.T, pool *pgxpool.Pool, kind string) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT id, kind, metadata FROM river.river_job WHERE kind = $1 ORDER BY metadata ->> 'tick', id`, kind)
	require.NoError(t, err)
	texts := []string{}
	var job rivertype.JobRow
	_, err = pgx.ForEachRow(rows, []any{&job.ID, &job.Kind, &job.Metadata}, func() error {
		tick, ok := eventlog.TickOf(&job)
		require.True(t, ok)
		text := tick.At.UTC().Format("02 15:04")
		if tick.Late {
			text += "*"
		}
		texts = append(texts, text)
		return nil
	})
	require.NoError(t, err)
	return texts
}

// Ten days of three processes that are killed at any moment, freeze, and whose
// clock jumps: every tick of each cron is one job.
func TestEachTickIsOneJobWhateverHappensToProcesses(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	c := newClock("2027-03-08T00:00:00Z") // New York moves its clocks on the 14th
	start := c.at
	declarations := []eventlog.Declaration{
		cron[tickArgs]("*/30 * * * *", eventlog.Policy{Missed: eventlog.MissedSkip, Zone: "America/New_York"}),
		cron[tockArgs]("@every 97m", eventlog.Policy{Missed: eventlog.MissedOnce}),
		cron[tackArgs]("30 2,14 * * *", eventlog.Policy{Missed: eventlog.MissedAll, Zone: "America/New_York"}),
	}
	specs := map[string][2]string{
		"tick-worker": {"*/30 * * * *", "America/New_York"}, "tock-worker": {"@every 97m", "UTC"}, "tack-worker": {"30 2,14 * * *", "America/New_York"},
	}
	random := rand.New(rand.NewPCG(1, 2))
	processes := make([]*eventlog.Scheduler, 3)
	for i := range processes {
		processes[i] = newScheduler(t, pool, c, declarations...)
	}
	end := start.AddDate(0, 0, 10)
	killed := 0
	for latest := start; latest.Before(end); {
		// To some seconds after the next tick, or back by some minutes.
		var next time.Time
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT min(next_tick) FROM crons").Scan(&next))
		c.at = next.Add(time.Duration(random.IntN(50)) * time.Second)
		if random.IntN(20) == 0 {
			c.at = c.at.Add(-time.Duration(random.IntN(600)) * time.Second)
		}
		if c.at.After(latest) {
			latest = c.at
		}
		var all sync.WaitGroup
		var dead []int
		for i, process := range processes {
			if random.IntN(4) == 0 {
				continue // frozen
			}
			ctx, kill := context.WithCancel(t.Context())
			if random.IntN(4) == 0 {
				dead = append(dead, i)
				time.AfterFunc(time.Duration(random.IntN(4000))*time.Microsecond, kill)
			}
			all.Go(func() {
				defer kill()
				_ = process.Step(ctx)
			})
		}
		all.Wait()
		for _, i := range dead {
			processes[i] = newScheduler(t, pool, c, declarations...)
		}
		killed += len(dead)
		require.NoError(t, processes[0].Step(t.Context())) // somebody is alive
		finish(t, pool)
	}
	require.Greater(t, killed, 50)
	for name, spec := range specs {
		want, err := eventlog.Ticks(spec[0], spec[1], start, end, 10_000)
		require.NoError(t, err)
		rows, err := pool.Query(t.Context(), `SELECT (metadata ->> 'tick')::timestamptz FROM river.river_job
			WHERE kind = $1 AND (metadata ->> 'tick')::timestamptz <= $2 ORDER BY 1`, name, end)
		require.NoError(t, err)
		got, err := pgx.CollectRows(rows, pgx.RowTo[time.Time])
		require.NoError(t, err)
		require.Len(t, got, len(want), name)
		for i := range want {
			require.True(t, want[i].Equal(got[i]), "%s %s %s", name, want[i], got[i])
		}
	}
	require.Zero(t, count(t, pool, "SELECT sum(skipped) FROM crons"))
}

func TestMissedTicksAreMadeUpForAsThePolicySays(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		policy  eventlog.Policy
		down    time.Duration
		want    []string
		skipped int
	}{
		"skip":                       {eventlog.Policy{Missed: eventlog.MissedSkip}, 3*time.Hour + 30*time.Minute, nil, 3},
		"skip, but one of now":       {eventlog.Policy{Missed: eventlog.MissedSkip}, 3*time.Hour + 30*time.Second, []string{"01 03:00"}, 2},
		"once":                       {eventlog.Policy{}, 3*time.Hour + 30*time.Minute, []string{"01 03:00*"}, 2},
		"once, but one of now":       {eventlog.Policy{}, 3*time.Hour + 30*time.Second, []string{"01 03:00"}, 2},
		"all":                        {eventlog.Policy{Missed: eventlog.MissedAll}, 3*time.Hour + 30*time.Second, []string{"01 01:00*", "01 02:00*", "01 03:00"}, 0},
		"all, the newest two":        {eventlog.Policy{Missed: eventlog.MissedAll, MaxMissed: 2}, 5*time.Hour + 30*time.Minute, []string{"01 04:00*", "01 05:00*"}, 3},
		"nothing missed in a minute": {eventlog.Policy{Missed: eventlog.MissedSkip}, time.Hour + 59*time.Second, []string{"01 01:00"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, c := dbtest.New(t), newClock("2027-01-01T00:30:00Z")
			c.add(-30 * time.Minute)
			newScheduler(t, pool, c, cron[tickArgs]("0 * * * *", tt.policy)) // and is gone
			c.add(tt.down)
			scheduler := newScheduler(t, pool, c, cron[tickArgs]("0 * * * *", tt.policy))
			require.NoError(t, scheduler.Step(t.Context()))
			require.ElementsMatch(t, tt.want, ticks(t, pool, "tick-worker"))
			require.Equal(t, tt.skipped, count(t, pool, "SELECT skipped FROM crons"))
			require.NoError(t, scheduler.Step(t.Context()))
			require.Len(t, ticks(t, pool, "tick-worker"), len(tt.want), "once is enough")
		})
	}
}

// One cron cannot be inserted while two others are due in the same second.
func TestCronThatFailsCostsNoOtherItsTick(t *testing.T) {
	t.Parallel()
	pool, c := dbtest.New(t), newClock("2027-01-01T00:00:00Z")
	scheduler := newScheduler(t, pool, c, cron[tackArgs]("0 * * * *", eventlog.Policy{}), cron[tickArgs]("0 * * * *", eventlog.Policy{}),
		cron[tockArgs]("0 * * * *", eventlog.Policy{}))
	exec(t, pool, "ALTER TABLE river.river_job ADD CONSTRAINT broken CHECK (kind <> 'tick-worker')")
	c.add(time.Hour + time.Second)
	require.ErrorContains(t, scheduler.Step(t.Context()), "decide ticks of tick-worker")
	require.Equal(t, []string{"01 01:00"}, ticks(t, pool, "tack-worker"))
	require.Equal(t, []string{"01 01:00"}, ticks(t, pool, "tock-worker"))
	require.Empty(t, ticks(t, pool, "tick-worker"))
	exec(t, pool, "ALTER TABLE river.river_job DROP CONSTRAINT broken")
	c.add(10 * time.Second)
	require.NoError(t, scheduler.Step(t.Context()))
	require.Equal(t, []string{"01 01:00"}, ticks(t, pool, "tick-worker"), "its tick is not lost")
	require.Len(t, ticks(t, pool, "tack-worker"), 1)
}

// A process that freezes while it decides holds the cron back for ten seconds,
// not for as long as it is frozen.
func TestFrozenProcessLetsGoOfTheCron(t *testing.T) {
	t.Parallel()
	pool, c := dbtest.New(t), newClock("2027-01-01T00:00:00Z")
	scheduler := newScheduler(t, pool, c, cron[tickArgs]("0 * * * *", eventlog.Policy{}))
	c.add(time.Hour)
	frozen, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = frozen.Exec(t.Context(), "SELECT set_config('idle_in_transaction_session_timeout', '1s', true) FROM (SELECT FROM crons FOR UPDATE) AS locked")
	require.NoError(t, err)
	require.NoError(t, scheduler.Step(t.Context()))
	require.Empty(t, ticks(t, pool, "tick-worker"), "another one is at it")
	eventually(t, "the lock is gone", func() bool {
		require.NoError(t, scheduler.Step(t.Context()))
		return len(ticks(t, pool, "tick-worker")) == 1
	})
	require.Error(t, frozen.Commit(t.Context()))
}

func TestAtMostOneJobWaits(t *testing.T) {
	t.Parallel()
	pool, c := dbtest.New(t), newClock("2027-01-01T00:00:00Z")
	scheduler := newScheduler(t, pool, c, cron[tickArgs]("* * * * *", eventlog.Policy{}))
	step := func() {
		c.add(time.Minute)
		require.NoError(t, scheduler.Step(t.Context()))
	}
	step()
	step()
	require.Equal(t, []string{"01 00:01"}, ticks(t, pool, "tick-worker"))
	require.Equal(t, 1, count(t, pool, "SELECT skipped FROM crons"))
	exec(t, pool, "UPDATE river.river_job SET state = 'running', attempted_at = now()")
	step()
	step()
	require.Equal(t, []string{"01 00:01", "01 00:03"}, ticks(t, pool, "tick-worker"), "one runs, one waits")
	exec(t, pool, "UPDATE river.river_job SET state = 'retryable' WHERE state = 'running'")
	exec(t, pool, "UPDATE river.river_job SET state = 'completed', finalized_at = now() WHERE state = 'available'")
	step()
	require.Len(t, ticks(t, pool, "tick-worker"), 2, "a retry waits as well")
	finish(t, pool)
	exec(t, pool, "UPDATE river.river_job SET state = 'discarded', finalized_at = now() WHERE state = 'retryable'")
	step()
	require.Len(t, ticks(t, pool, "tick-worker"), 3, "a dead letter holds nothing up")
}

// Jobs of the same cron wait for each other, in any number of processes.
func TestJobsOfACronNeverRunAtATime(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	running, most, done := 0, 0, 0
	declaration := eventlog.Cron("* * * * *", tickArgs{}, &worker[tickArgs]{work: func(ctx context.Context, _ *river.Job[tickArgs]) error {
		mu.Lock()
		running++
		most = max(most, running)
		mu.Unlock()
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
		mu.Lock()
		defer mu.Unlock()
		running--
		done++
		return nil
	}}, eventlog.Policy{Missed: eventlog.MissedAll})
	b := newBus(t, declaration)
	c := newClock("2027-01-01T00:00:00Z")
	scheduler := newScheduler(t, b.pool, c, declaration)
	c.add(5 * time.Minute)
	require.NoError(t, scheduler.Step(t.Context()))
	require.Len(t, ticks(t, b.pool, "tick-worker"), 5)
	b.start(t)
	joinBus(t, b.pool, b.organization, declaration).start(t)
	eventually(t, "all five done", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return done == 5
	})
	require.Equal(t, 1, most)
	require.Zero(t, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE attempt > 1"), "waiting is no attempt")
}

func TestPausedCronStaysPausedAndGoesOnWithItsNextTick(t *testing.T) {
	t.Parallel()
	pool, c := dbtest.New(t), newClock("2027-01-01T00:00:00Z")
	declaration := cron[tickArgs]("0 * * * *", eventlog.Policy{Missed: eventlog.MissedAll})
	scheduler := newScheduler(t, pool, c, declaration)
	require.NoError(t, scheduler.Pause(t.Context(), "tick-worker", "ada"))
	require.NoError(t, scheduler.Pause(t.Context(), "tick-worker", "bea"))
	c.add(48 * time.Hour)
	scheduler = newScheduler(t, pool, c, declaration) // started anew
	require.NoError(t, scheduler.Step(t.Context()))
	require.Empty(t, ticks(t, pool, "tick-worker"))
	require.Equal(t, 1, count(t, pool, "SELECT count(*) FROM crons WHERE paused_by = 'ada'"))

	require.NoError(t, scheduler.Resume(t.Context(), "tick-worker"))
	require.NoError(t, scheduler.Step(t.Context()))
	require.Empty(t, ticks(t, pool, "tick-worker"))
	c.add(time.Hour)
	require.NoError(t, scheduler.Step(t.Context()))
	require.Equal(t, []string{"03 01:00"}, ticks(t, pool, "tick-worker"))
	for _, name := range []string{"nobody", "no\x00body"} {
		require.ErrorIs(t, scheduler.Pause(t.Context(), name, "ada"), eventlog.ErrNoCron)
		require.ErrorIs(t, scheduler.Resume(t.Context(), name), eventlog.ErrNoCron)
		_, err := scheduler.RunNow(t.Context(), name)
		require.ErrorIs(t, err, eventlog.ErrNoCron)
	}
}

func TestChangedCronFiresAtItsNewTimeAndARemovedOneNever(t *testing.T) {
	t.Parallel()
	pool, c := dbtest.New(t), newClock("2027-01-01T00:00:00Z")
	newScheduler(t, pool, c, cron[tickArgs]("0 * * * *", eventlog.Policy{Missed: eventlog.MissedAll}))
	c.add(3*time.Hour + time.Minute)
	scheduler := newScheduler(t, pool, c, cron[tickArgs]("30 * * * *", eventlog.Policy{Missed: eventlog.MissedAll}))
	require.NoError(t, scheduler.Step(t.Context()))
	require.Empty(t, ticks(t, pool, "tick-worker"))
	c.add(30 * time.Minute)
	require.NoError(t, scheduler.Step(t.Context()))
	require.Equal(t, []string{"01 03:30*"}, ticks(t, pool, "tick-worker"))

	scheduler = newScheduler(t, pool, c, cron[tockArgs]("0 * * * *", eventlog.Policy{}))
	c.add(time.Hour)
	require.NoError(t, scheduler.Step(t.Context()))
	require.Len(t, ticks(t, pool, "tick-worker"), 1)
	require.Len(t, ticks(t, pool, "tock-worker"), 1)
}

func TestRunByHand(t *testing.T) {
	t.Parallel()
	pool, c := dbtest.New(t), newClock("2027-01-01T00:00:00Z")
	scheduler := newScheduler(t, pool, c, cron[tickArgs]("0 * * * *", eventlog.Policy{Jitter: time.Minute}))
	require.NoError(t, scheduler.Pause(t.Context(), "tick-worker", "ada"))
	c.add(time.Minute)
	id, err := scheduler.RunNow(t.Context(), "tick-worker")
	require.NoError(t, err)
	require.Equal(t, 1, count(t, pool, fmt.Sprintf("SELECT count(*) FROM river.river_job WHERE id = %d AND state = 'available' AND metadata @> '{\"by_hand\": true}'", id)))
	_, err = scheduler.RunNow(t.Context(), "tick-worker")
	require.ErrorIs(t, err, eventlog.ErrCronWaits)
	finish(t, pool)
	c.add(time.Second)
	_, err = scheduler.RunNow(t.Context(), "tick-worker")
	require.NoError(t, err)
}

func TestJitterDelaysAJobByNoMoreThanItsBound(t *testing.T) {
	t.Parallel()
	pool, c := dbtest.New(t), newClock("2027-01-01T00:00:00Z")
	scheduler := newScheduler(t, pool, c, cron[tickArgs]("* * * * *", eventlog.Policy{Jitter: 10 * time.Second, Missed: eventlog.MissedAll}))
	c.add(40 * time.Minute)
	require.NoError(t, scheduler.Step(t.Context()))
	require.Equal(t, 40, count(t, pool, "SELECT count(*) FROM river.river_job WHERE scheduled_at - (metadata ->> 'tick')::timestamptz BETWEEN interval '0' AND interval '10 seconds'"))
	require.Greater(t, count(t, pool, "SELECT count(DISTINCT scheduled_at - (metadata ->> 'tick')::timestamptz) FROM river.river_job"), 10)
}

func TestOverridesChangeCronsAndRefuseMistakes(t *testing.T) {
	t.Parallel()
	pool, c := dbtest.New(t), newClock("2027-01-01T00:00:00Z")
	plan, err := eventlog.Compile(cron[tickArgs]("0 * * * *", eventlog.Policy{}), cron[tockArgs]("0 * * * *", eventlog.Policy{}), alpha(nil))
	require.NoError(t, err)
	changed, err := plan.Override(map[string]eventlog.CronOverride{
		"tick-worker": {Spec: "30 21 * * *", Zone: "America/Sao_Paulo"}, "tock-worker": {Paused: true},
	})
	require.NoError(t, err)
	require.Contains(t, changed.String(), "cron 30 21 * * * America/Sao_Paulo")
	require.NotContains(t, plan.String(), "America", "the plan itself stays")
	scheduler := schedulePlan(t, pool, c, changed)
	c.add(30 * time.Minute)
	require.NoError(t, scheduler.Step(t.Context()))
	c.add(30 * time.Minute)
	require.NoError(t, scheduler.Step(t.Context()))
	require.Equal(t, []string{"01 00:30"}, ticks(t, pool, "tick-worker"))
	require.Empty(t, ticks(t, pool, "tock-worker"))
	require.ErrorIs(t, scheduler.Resume(t.Context(), "tock-worker"), eventlog.ErrCronSwitchedOff)
	_, err = scheduler.RunNow(t.Context(), "tock-worker")
	require.NoError(t, err)

	// Switched on again it makes up for nothing.
	scheduler = schedulePlan(t, pool, c, plan)
	require.NoError(t, scheduler.Step(t.Context()))
	require.Len(t, ticks(t, pool, "tock-worker"), 1)

	_, err = plan.Override(map[string]eventlog.CronOverride{
		"nobody": {}, "alpha-worker": {Paused: true}, "tick-worker": {Zone: "Mars/Olympus"}, "tock-worker": {Missed: "perhaps"},
	})
	for _, want := range []string{
		`override "nobody": there is no such cron`, `override "alpha-worker": there is no such cron`,
		`override "tick-worker": the time zone "Mars/Olympus" is unknown`, `override "tock-worker": the policy for missed ticks "perhaps"`,
	} {
		require.ErrorContains(t, err, want)
	}
}

// The one test with the real clock: the database's.
func TestSchedulerRunsByTheClockOfTheDatabase(t *testing.T) {
	t.Parallel()
	declaration := cron[tickArgs]("@every 1s", eventlog.Policy{Missed: eventlog.MissedAll})
	b := newBus(t, declaration)
	scheduler, err := eventlog.NewScheduler(eventlog.SchedulerConfig{Pool: b.pool, Plan: b.plan, Log: zap.NewNop()})
	require.NoError(t, err)
	require.NoError(t, scheduler.Register(t.Context()))
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- scheduler.Run(ctx) }()
	reader := sdkmetric.NewManualReader()
	telemetry, err := eventlog.NewTelemetry(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("test"))
	require.NoError(t, err)
	b.client, err = eventlog.NewClient(eventlog.ClientConfig{Pool: b.pool, Plan: b.plan, Log: zap.NewNop(), Telemetry: telemetry})
	require.NoError(t, err)
	b.start(t)
	eventually(t, "three ticks done", func() bool {
		return count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE state = 'completed'") >= 3
	})
	cancel()
	require.NoError(t, <-stopped)
	require.Zero(t, count(t, b.pool, "SELECT extract(epoch FROM max(tick) - min(tick))::integer + 1 - count(*) FROM cron_ticks"))
	var measured metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &measured))
	var names []string
	for _, m := range measured.ScopeMetrics[0].Metrics {
		names = append(names, m.Name)
	}
	require.Contains(t, names, "cron.lateness_seconds")
}
