package jobs

import (
	"context"
	"encoding/json"
	"flag"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"afluente/db"
	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/jobs/archive"
	"afluente/jobs/sandbox"
	"afluente/jobs/waha"
	"afluente/jobs/webhook"
)

const (
	deliveryKind = "webhook-delivery-worker"
	dispatchKind = "webhook-dispatch-worker"
	sendKind     = "whatsapp-send-worker"
	wahaKey      = "the key of waha"
)

var update = flag.Bool("update", false, "rewrite testdata/plan.golden")

func TestMain(m *testing.M) { os.Exit(dbtest.Main(m)) }

func TestPlanIsTheGoldenOne(t *testing.T) {
	t.Parallel()
	const golden = "testdata/plan.golden"
	plan, err := eventlog.Compile(All(Deps{})...)
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile(golden, []byte(plan.String()), 0o600))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), plan.String(), "go test ./jobs -run Golden -update rewrites it")
}

func TestEachJobHasItsFileAndItsTest(t *testing.T) {
	t.Parallel()
	plan, err := eventlog.Compile(All(Deps{})...)
	require.NoError(t, err)
	for _, entry := range plan.Entries() {
		name := strings.ReplaceAll(entry.Job, "-", "_")
		require.FileExists(t, name+".go")
		require.FileExists(t, name+"_test.go")
	}
}

// system is the program around one database, with stand-ins for the outside.
type system struct {
	pool   *pgxpool.Pool
	deps   Deps
	bridge *eventlog.Bridge
	client *river.Client[pgx.Tx]
	logs   *observer.ObservedLogs
	waha   *sandbox.WAHA
	org    uuid.UUID
}

// newSystem returns a system whose client does not work yet. Its bridge moves
// by step alone. A failed job is tried again after a millisecond.
func newSystem(tb testing.TB) *system {
	tb.Helper()
	config, err := pgxpool.ParseConfig(dbtest.URL(tb))
	require.NoError(tb, err)
	config.MaxConns = 12
	s := &system{pool: dbtest.Pool(tb, config)}
	s.org = s.newOrganization(tb)

	s.waha, err = sandbox.StartWAHA(tb.Context(), sandbox.Config{Addr: "127.0.0.1:0", Secret: wahaKey})
	require.NoError(tb, err)
	tb.Cleanup(s.waha.Close)
	transport := &http.Transport{}
	tb.Cleanup(transport.CloseIdleConnections)
	s.deps = Deps{
		Archive:  &archive.Archive{},
		Pool:     s.pool,
		Events:   eventlog.NewEvents(s.pool),
		WAHA:     &waha.Client{BaseURL: s.waha.URL(), APIKey: wahaKey, HTTP: &http.Client{Transport: transport}},
		Webhooks: newWebhooks(tb, s.pool),
	}

	plan, err := eventlog.Compile(All(s.deps)...)
	require.NoError(tb, err)
	require.NoError(tb, eventlog.Register(tb.Context(), s.pool, plan))
	s.bridge, err = eventlog.NewBridge(eventlog.BridgeConfig{Pool: s.pool, Plan: plan, Log: zap.NewNop()})
	require.NoError(tb, err)
	core, logs := observer.New(zapcore.InfoLevel)
	s.logs = logs
	s.client, err = eventlog.NewClient(eventlog.ClientConfig{
		Pool: s.pool, Plan: plan, Log: zap.New(core), MaxWorkers: 60, Backoff: []time.Duration{time.Millisecond},
	})
	require.NoError(tb, err)
	return s
}

// webhookKeys are of the kind of AFLUENTE_WEBHOOK_KEYS.
const webhookKeys = "test:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="

// newWebhooks returns what may send to this machine and begins every attempt a
// millisecond after the one before.
func newWebhooks(tb testing.TB, pool *pgxpool.Pool) *Webhooks {
	tb.Helper()
	inserter, err := eventlog.NewInserter(pool, zap.NewNop())
	require.NoError(tb, err)
	keys, err := webhook.ParseKeys(webhookKeys)
	require.NoError(tb, err)
	guard := &webhook.Guard{Allowed: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
	transport := webhook.NewTransport(guard)
	tb.Cleanup(transport.CloseIdleConnections)
	return &Webhooks{
		Pool:    pool,
		Jobs:    inserter,
		Sender:  &webhook.Sender{Guard: guard, Transport: Correlate(transport), UserAgent: "Webhooks/1.0"},
		Keys:    keys,
		Backoff: []time.Duration{time.Millisecond},
	}
}

// startSystem is newSystem with the client at work until the test ends.
func startSystem(tb testing.TB) *system {
	tb.Helper()
	s := newSystem(tb)
	s.start(tb)
	return s
}

func (s *system) start(tb testing.TB) {
	tb.Helper()
	require.NoError(tb, s.client.Start(context.WithoutCancel(tb.Context())))
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(tb.Context()), 10*time.Second)
		defer cancel()
		if err := s.client.StopAndCancel(ctx); err != nil {
			tb.Error("stop client:", err)
		}
	})
}

func (s *system) exec(tb testing.TB, statement string, args ...any) {
	tb.Helper()
	_, err := s.pool.Exec(tb.Context(), statement, args...)
	require.NoError(tb, err)
}

// one returns the only value of the only row of a query.
func one[T any](tb testing.TB, s *system, query string, args ...any) T {
	tb.Helper()
	rows, err := s.pool.Query(tb.Context(), query, args...)
	require.NoError(tb, err)
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(tb, err, query)
	return value
}

func (s *system) newOrganization(tb testing.TB) uuid.UUID {
	tb.Helper()
	return one[uuid.UUID](tb, s, "INSERT INTO organizations DEFAULT VALUES RETURNING id")
}

// emit puts an event on the bus and fans it out, with all others that wait.
func (s *system) emit(tb testing.TB, event eventlog.RawEvent) uuid.UUID {
	tb.Helper()
	var id uuid.UUID
	require.NoError(tb, pgx.BeginFunc(tb.Context(), s.pool, func(tx pgx.Tx) (err error) {
		id, err = eventlog.EmitRaw(tb.Context(), tx, event)
		return err
	}))
	s.step(tb)
	return id
}

func (s *system) step(tb testing.TB) {
	tb.Helper()
	for {
		events, err := s.bridge.Step(tb.Context())
		require.NoError(tb, err)
		if events == 0 {
			return
		}
	}
}

// await looks until done says true, and hurries the client along: it is not
// told of a job that is to be tried again, and would look once a second.
func (s *system) await(tb testing.TB, what string, done func() bool) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), 30*time.Second)
	defer cancel()
	tick := time.NewTicker(15 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			require.FailNow(tb, "waited in vain for "+what, "%v", s.logs.All())
		}
		s.exec(tb, `SELECT pg_notify('river.river_insert', '{"queue": "' || q || '"}') FROM unnest('{maintenance,webhooks,webhook-deliveries,whatsapp}'::text[]) AS q`)
	}
}

// awaitSettled returns the event when each of its jobs is finished or dead.
func (s *system) awaitSettled(t *testing.T, id uuid.UUID) db.EventLog {
	t.Helper()
	var event db.EventLog
	s.await(t, "the end of event "+id.String(), func() bool {
		var err error
		event, err = db.New(s.pool).GetEvent(t.Context(), id)
		require.NoError(t, err)
		return (event.Status == "done" || event.Status == "dead") &&
			len(event.ConsumedBy)+len(event.DeadConsumers) == len(event.Consumers)
	})
	return event
}

func (s *system) awaitDone(t *testing.T, id uuid.UUID) {
	t.Helper()
	event := s.awaitSettled(t, id)
	require.Equal(t, "done", event.Status, "%v", event.LastError)
	require.ElementsMatch(t, event.Consumers, event.ConsumedBy)
	require.Empty(t, event.DeadConsumers)
	require.Nil(t, event.NextAttemptAt)
}

// awaitDead returns the event when whatsapp-send-worker is its one dead consumer.
func (s *system) awaitDead(t *testing.T, id uuid.UUID) db.EventLog {
	t.Helper()
	event := s.awaitSettled(t, id)
	require.Equal(t, "dead", event.Status)
	require.Equal(t, []string{sendKind}, event.DeadConsumers)
	require.NotNil(t, event.LastError)
	require.Contains(t, *event.LastError, sendKind+": ")
	return event
}

// job is the part of a River job that tests look at.
type job struct {
	ID          int64
	State       string
	Attempt     int16
	MaxAttempts int16
	Queue       string
	Args        string
	Errors      []string // oldest first
}

func (s *system) job(t *testing.T, eventID uuid.UUID, kind string) job {
	t.Helper()
	rows, err := s.pool.Query(t.Context(), `
		SELECT id, state::text, attempt, max_attempts, queue, args::text AS args,
			ARRAY(SELECT e ->> 'error' FROM unnest(errors) WITH ORDINALITY AS u (e, n) ORDER BY n) AS errors
		FROM river.river_job WHERE metadata ->> 'event_id' = $1 AND kind = $2`, eventID.String(), kind)
	require.NoError(t, err)
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[job])
	require.NoError(t, err)
	return found
}

// retry does what an operator does to a dead job in River UI.
func (s *system) retry(t *testing.T, id int64) {
	t.Helper()
	_, err := s.client.JobRetry(t.Context(), id)
	require.NoError(t, err)
}

// payloads returns those of all events of a type about an entity.
func (s *system) payloads(t *testing.T, eventType string, entityID uuid.UUID) []map[string]any {
	t.Helper()
	rows, err := s.pool.Query(t.Context(), `
		SELECT payload::text FROM event_log
		WHERE event_type = $1 AND entity_id = $2 AND entity_kind = 'message' AND organization_id = $3
		ORDER BY created_at`, eventType, entityID, s.org)
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	payloads := make([]map[string]any, len(texts))
	for i, text := range texts {
		require.NoError(t, json.Unmarshal([]byte(text), &payloads[i]))
	}
	return payloads
}
