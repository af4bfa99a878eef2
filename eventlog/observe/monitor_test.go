package observe_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric/noop"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/eventlog/event"
	"afluente/eventlog/observe"
)

func TestMain(m *testing.M) { os.Exit(dbtest.Main(m)) }

type leadArgs struct{}

func (leadArgs) Kind() string { return "lead-worker" }

type leadWorker struct {
	river.WorkerDefaults[leadArgs]

	work func(context.Context, *river.Job[leadArgs]) error
}

func (*leadWorker) Timeout(*river.Job[leadArgs]) time.Duration { return 10 * time.Second }

func (w *leadWorker) Work(ctx context.Context, job *river.Job[leadArgs]) error {
	return w.work(ctx, job)
}

// newPlan declares lead-worker for lead.won.
func newPlan(t *testing.T, work func(context.Context, *river.Job[leadArgs]) error) *eventlog.Plan {
	t.Helper()
	plan, err := eventlog.Compile(eventlog.On(func(eventlog.Event[event.LeadWon]) leadArgs { return leadArgs{} }, &leadWorker{work: work}))
	require.NoError(t, err)
	return plan
}

func exec(t *testing.T, pool *pgxpool.Pool, statement string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), statement, args...)
	require.NoError(t, err)
}

// die lets n jobs of a consumer die, as River does.
func die(t *testing.T, pool *pgxpool.Pool, consumer string, n int) {
	t.Helper()
	exec(t, pool, `INSERT INTO river.river_job (kind, queue, args, state, attempt, max_attempts, attempted_at)
		SELECT $1, 'default', '{}', 'running', 8, 8, now() FROM generate_series(1, $2)`, consumer, n)
	exec(t, pool, "UPDATE river.river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running' AND kind = $1", consumer)
}

// told is a channel that remembers, and fails while it is told to.
type told struct {
	name string
	down atomic.Bool

	mu      sync.Mutex
	notices []observe.Notice
}

func (c *told) channel() observe.Channel {
	return observe.Channel{Name: c.name, Send: func(_ context.Context, n observe.Notice) error {
		if c.down.Load() {
			return errors.New("the other side is broken")
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.notices = append(c.notices, n)
		return nil
	}}
}

// take returns what was told since the last time, as "rule subject count".
func (c *told) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	texts := []string{}
	for _, n := range c.notices {
		texts = append(texts, fmt.Sprint(n.Rule, " ", n.Subject, " ", n.Count))
	}
	c.notices = nil
	return texts
}

func newMonitor(t *testing.T, pool *pgxpool.Pool, config observe.MonitorConfig) *observe.Monitor {
	t.Helper()
	config.Pool = pool
	if config.Plan == nil {
		config.Plan = newPlan(t, nil)
	}
	if config.Log == nil {
		config.Log = zap.NewNop()
	}
	if config.Meter == nil {
		config.Meter = noop.NewMeterProvider().Meter("")
	}
	if config.Telemetry == nil {
		var err error
		config.Telemetry, err = eventlog.NewTelemetry(config.Meter)
		require.NoError(t, err)
	}
	config.ConsoleURL = "https://example.com/riverui"
	monitor, err := observe.NewMonitor(config)
	require.NoError(t, err)
	return monitor
}

func TestDeathIsToldOnceAPauseWithACount(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	ops := &told{name: "ops"}
	monitor := newMonitor(t, pool, observe.MonitorConfig{Channels: []observe.Channel{ops.channel()}})
	require.NoError(t, monitor.Pass(t.Context()))
	require.Empty(t, ops.take())

	die(t, pool, "a-worker", 3)
	die(t, pool, "b-worker", 1)
	require.NoError(t, monitor.Pass(t.Context()))
	require.Equal(t, []string{"dead_letter a-worker 3", "dead_letter b-worker 1"}, ops.take())

	die(t, pool, "a-worker", 2)
	require.NoError(t, monitor.Pass(t.Context()))
	die(t, pool, "a-worker", 2)
	require.NoError(t, monitor.Pass(t.Context()))
	require.Empty(t, ops.take(), "it was told less than ten minutes ago")
	exec(t, pool, "UPDATE alerts SET next_at = next_at - interval '9 minutes 50 seconds'")
	require.NoError(t, monitor.Pass(t.Context()))
	require.Empty(t, ops.take())
	exec(t, pool, "UPDATE alerts SET next_at = next_at - interval '10 seconds'")
	require.NoError(t, monitor.Pass(t.Context()))
	require.Equal(t, []string{"dead_letter a-worker 4"}, ops.take())
	exec(t, pool, "UPDATE alerts SET next_at = now()")
	require.NoError(t, monitor.Pass(t.Context()))
	require.Empty(t, ops.take(), "there is nothing new")
}

// A channel that is dead gets what it missed when it is back, the others get it
// meanwhile, and its failures are no alerts.
func TestDeadChannelIsCaughtUpWithAndFeedsNothing(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	ops, hook := &told{name: "ops"}, &told{name: "hook"}
	core, logs := observer.New(zapcore.ErrorLevel)
	monitor := newMonitor(t, pool, observe.MonitorConfig{
		Channels: []observe.Channel{hook.channel(), ops.channel()}, Log: zap.New(core),
	})
	hook.down.Store(true)
	die(t, pool, "a-worker", 3)
	for range 3 {
		require.NoError(t, monitor.Pass(t.Context()))
		die(t, pool, "a-worker", 1)
		exec(t, pool, "UPDATE alerts SET next_at = now() WHERE channel = 'hook'")
	}
	require.Equal(t, []string{"dead_letter a-worker 3"}, ops.take())
	require.Equal(t, 3, logs.FilterMessage("alert not told, will be retried").Len())
	hook.down.Store(false)
	require.NoError(t, monitor.Pass(t.Context()))
	require.Equal(t, []string{"dead_letter a-worker 6"}, hook.take())
	require.Empty(t, ops.take())
}

func TestFailingChannelIsLeftAloneForLongerEachTime(t *testing.T) {
	t.Parallel()
	for failures, want := range []time.Duration{
		20 * time.Second, 40 * time.Second, 80 * time.Second, 160 * time.Second, 320 * time.Second, 10 * time.Minute, 10 * time.Minute,
	} {
		require.Equal(t, want, observe.RetryAfter(int32(failures)))
	}
	require.Equal(t, 10*time.Minute, observe.RetryAfter(1<<30))
}

func TestConsumersOwnAddressIsToldToo(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	ops, officer := &told{name: "ops"}, &told{name: "route:lgpd-redact-worker"}
	monitor := newMonitor(t, pool, observe.MonitorConfig{
		Channels: []observe.Channel{ops.channel()},
		Routes:   map[string]observe.Channel{"lgpd-redact-worker": officer.channel()},
	})
	die(t, pool, "lgpd-redact-worker", 1)
	die(t, pool, "a-worker", 1)
	require.NoError(t, monitor.Pass(t.Context()))
	require.Equal(t, []string{"dead_letter a-worker 1", "dead_letter lgpd-redact-worker 1"}, ops.take())
	require.Equal(t, []string{"dead_letter lgpd-redact-worker 1"}, officer.take())
}

func TestThresholdsAreTold(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		passed, ended string // statements
		want          string
	}{
		"lag": {
			"INSERT INTO event_log (organization_id, event_type, entity_kind, created_at) SELECT id, 'lead.won', 'lead', now() - interval '61 seconds' FROM organizations",
			"UPDATE event_log SET status = 'done'", "lag lead.won 0",
		},
		"fail rate": {
			"INSERT INTO worker_minutes VALUES (now(), 'a-worker', 20, 2, '{20,0,0,0,0,0,0,0,0,0,0,0,0,0}')",
			"DELETE FROM worker_minutes", "fail_rate a-worker 0",
		},
		"dead letters": {
			"INSERT INTO event_log (organization_id, event_type, entity_kind, status) SELECT id, 'lead.won', 'lead', 'dead' FROM organizations, generate_series(1, 101)",
			"DELETE FROM event_log WHERE id = (SELECT id FROM event_log LIMIT 1)", "dlq_size lead.won 0",
		},
		"slow": {
			"INSERT INTO worker_minutes VALUES (now(), 'a-worker', 20, 0, '{18,0,0,0,0,0,0,0,0,0,2,0,0,0}')",
			"DELETE FROM worker_minutes", "slow a-worker 0",
		},
		"queue": {
			"INSERT INTO river.river_job (kind, queue, args, max_attempts) SELECT 'x', 'q', '{}', 8 FROM generate_series(1, 1001)",
			"DELETE FROM river.river_job WHERE id = (SELECT id FROM river.river_job LIMIT 1)", "queue_size q 0",
		},
		"cron": {
			`INSERT INTO crons (name, spec, zone, missed, max_missed, jitter, disabled, next_tick)
				VALUES ('lead-worker', '* * * * *', 'UTC', 'skip', 1, '0', false, now() - interval '301 seconds')`,
			"DELETE FROM crons", "cron_overdue lead-worker 0",
		},
		"overdue": {
			"INSERT INTO river.river_job (kind, queue, args, max_attempts, state, attempted_at) VALUES ('lead-worker', 'q', '{}', 8, 'running', now() - interval '71 seconds')",
			"UPDATE river.river_job SET attempted_at = now()", "overdue lead-worker 0",
		},
		"disabled webhook": {
			`INSERT INTO webhook_subscriptions (organization_id, url, event_types, enabled, disabled_at, disabled_reason)
				SELECT id, '', '{}', false, now(), reason FROM organizations, (VALUES ('gone'), ('by_user')) AS r (reason)`,
			"DELETE FROM webhook_subscriptions", "webhook_disabled 00000000-0000-4000-8000-000000000001 0",
		},
		"faulty webhook": {
			"INSERT INTO webhook_subscriptions (organization_id, url, event_types, secret_fault) SELECT id, '', '{}', 'no key' FROM organizations",
			"DELETE FROM webhook_subscriptions", "webhook_fault 00000000-0000-4000-8000-000000000001 0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := dbtest.New(t)
			exec(t, pool, "INSERT INTO organizations (id) VALUES ('00000000-0000-4000-8000-000000000001')")
			ops := &told{name: "ops"}
			pass := func() []string {
				// A monitor of its own each time, so that it measures at once.
				monitor := newMonitor(t, pool, observe.MonitorConfig{Channels: []observe.Channel{ops.channel()}})
				exec(t, pool, "DELETE FROM leases")
				require.NoError(t, monitor.Pass(t.Context()))
				return ops.take()
			}
			require.Empty(t, pass())
			exec(t, pool, tt.passed)
			require.Equal(t, []string{tt.want}, pass())
			require.Empty(t, pass(), "it is told once an hour")
			exec(t, pool, "UPDATE alerts SET next_at = now()")
			require.Equal(t, []string{tt.want}, pass())
			exec(t, pool, tt.ended)
			exec(t, pool, "UPDATE alerts SET next_at = now()")
			require.Empty(t, pass())
			exec(t, pool, tt.passed)
			require.Equal(t, []string{tt.want}, pass(), "it is passed again")
		})
	}
}

// Few attempts say nothing about a worker.
func TestFewAttemptsAreNoFailRate(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	ops := &told{name: "ops"}
	exec(t, pool, "INSERT INTO worker_minutes VALUES (now(), 'a-worker', 19, 19, '{0,0,0,0,0,0,0,0,0,0,0,0,0,19}')")
	require.NoError(t, newMonitor(t, pool, observe.MonitorConfig{Channels: []observe.Channel{ops.channel()}}).Pass(t.Context()))
	require.Empty(t, ops.take())
}

func TestOneProcessTellsAndTheNextTakesOver(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	first, second := &told{name: "ops"}, &told{name: "ops"}
	one := newMonitor(t, pool, observe.MonitorConfig{Channels: []observe.Channel{first.channel()}})
	two := newMonitor(t, pool, observe.MonitorConfig{Channels: []observe.Channel{second.channel()}})
	require.NoError(t, one.Pass(t.Context()))
	die(t, pool, "a-worker", 1)
	require.NoError(t, two.Pass(t.Context()))
	require.Empty(t, second.take())
	// The first one is killed.
	exec(t, pool, "UPDATE leases SET expires_at = now() - interval '1 second'")
	require.NoError(t, two.Pass(t.Context()))
	require.Equal(t, []string{"dead_letter a-worker 1"}, second.take())
	require.NoError(t, one.Pass(t.Context()))
	require.Empty(t, first.take())
}

// With the database gone people are told all the same, by each process, and
// not again and again.
func TestDatabaseThatIsGoneIsTold(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?connect_timeout=1")
	require.NoError(t, err)
	pool := dbtest.Pool(t, config)
	ops, hook := &told{name: "ops"}, &told{name: "hook"}
	hook.down.Store(true)
	monitor := newMonitor(t, pool, observe.MonitorConfig{Channels: []observe.Channel{hook.channel(), ops.channel()}})
	at := time.Now()
	monitor.SetNow(func() time.Time { return at })
	pass := func(after time.Duration) []string {
		at = at.Add(after)
		require.Error(t, monitor.Pass(t.Context()))
		return ops.take()
	}
	require.Empty(t, pass(0))
	require.Empty(t, pass(29*time.Second))
	require.Equal(t, []string{"database  0"}, pass(time.Second))
	require.Empty(t, pass(9*time.Minute))
	require.Equal(t, []string{"database  0"}, pass(time.Minute))
}

func TestStatisticsOfAllProcessesAreAdded(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	exec(t, pool, "INSERT INTO organizations DEFAULT VALUES")
	var organization uuid.UUID
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT id FROM organizations").Scan(&organization))
	for range 2 { // processes
		telemetry, err := eventlog.NewTelemetry(noop.NewMeterProvider().Meter(""))
		require.NoError(t, err)
		attempts := 0
		plan := newPlan(t, func(context.Context, *river.Job[leadArgs]) error {
			attempts++
			if attempts == 1 {
				return errors.New("boom")
			}
			return nil
		})
		work(t, pool, plan, organization, eventlog.ClientConfig{Telemetry: telemetry})
		monitor := newMonitor(t, pool, observe.MonitorConfig{Telemetry: telemetry})
		require.NoError(t, monitor.Pass(t.Context()))
	}
	var attempts, failed, durations int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT sum(attempts), sum(failed), sum((SELECT sum(d) FROM unnest(durations) AS d))
		FROM worker_minutes WHERE worker = 'lead-worker'`).Scan(&attempts, &failed, &durations))
	require.Equal(t, []int{4, 2, 4}, []int{attempts, failed, durations})
}

// work emits one lead.won and works its job until the event is done.
func work(t *testing.T, pool *pgxpool.Pool, plan *eventlog.Plan, organization uuid.UUID, config eventlog.ClientConfig) {
	t.Helper()
	require.NoError(t, eventlog.Register(t.Context(), pool, plan))
	exec(t, pool, "SELECT emit_event('lead.won', 'lead', NULL, '{}', $2, $1)", organization,
		`{"request_id": "r-1", "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "span_id": "00f067aa0ba902b7"}`)
	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: pool, Plan: plan, Log: zap.NewNop(), Telemetry: config.Telemetry})
	require.NoError(t, err)
	_, err = bridge.Step(t.Context())
	require.NoError(t, err)
	config.Pool, config.Plan, config.Log, config.Backoff = pool, plan, zap.NewNop(), []time.Duration{time.Millisecond}
	client, err := eventlog.NewClient(config)
	require.NoError(t, err)
	require.NoError(t, client.Start(context.WithoutCancel(t.Context())))
	defer func() { require.NoError(t, client.Stop(context.WithoutCancel(t.Context()))) }()
	for deadline := time.Now().Add(time.Minute); ; {
		var waiting int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM event_log WHERE event_type = 'lead.won' AND status NOT IN ('done', 'dead')").Scan(&waiting))
		if waiting == 0 {
			return
		}
		require.True(t, time.Now().Before(deadline), "not within a minute")
		select {
		case <-time.After(20 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
}

func TestWebhookTakesWhatSlackTakes(t *testing.T) {
	t.Parallel()
	var status atomic.Int64
	status.Store(http.StatusNoContent)
	bodies := make(chan string, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		bodies <- r.Header.Get("Content-Type") + " " + string(body)
		w.WriteHeader(int(status.Load()))
	}))
	channel := observe.WebhookChannel("hook", server.URL+"/secret", server.Client())
	notice := observe.Notice{Rule: "dead_letter", Subject: "a-worker", Count: 3, Text: "3 jobs.", URL: "https://example.com"}
	require.NoError(t, channel.Send(t.Context(), notice))
	kind, body, _ := strings.Cut(<-bodies, " ")
	require.Equal(t, "application/json", kind)
	require.JSONEq(t, `{"rule": "dead_letter", "subject": "a-worker", "count": 3, "text": "3 jobs. https://example.com", "url": "https://example.com"}`, body)

	status.Store(http.StatusInternalServerError)
	require.EqualError(t, channel.Send(t.Context(), notice), "post alert: status 500")
	server.Close()
	err := channel.Send(t.Context(), notice)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}

func TestPercentileReadsBuckets(t *testing.T) {
	t.Parallel()
	counts := make([]int64, len(eventlog.DurationBuckets())+1)
	require.Zero(t, observe.Percentile(counts, 0.95))
	counts[0] = 100 // up to 5 ms
	require.InDelta(t, 4.75, observe.Percentile(counts, 0.95), 1e-9)
	counts[len(counts)-1] = 100 // beyond the last bound
	require.InDelta(t, 60_000, observe.Percentile(counts, 0.95), 1e-9)
}
