package observe_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/emersion/go-smtp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/eventlog/event"
	"afluente/eventlog/observe"
)

// secretsOf are personal data that no observer may pass on.
var secretsOf = []string{"123.456.789-09", "12345678909", "ada@example.com", "+55 11 99999-0000"}

func errWithSecrets() error {
	return fmt.Errorf("send to %s: refused", strings.Join(secretsOf, ", "))
}

func newOrganization(t *testing.T, pool *pgxpool.Pool) (id uuid.UUID) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), "INSERT INTO organizations DEFAULT VALUES RETURNING id").Scan(&id))
	return id
}

// collector is a server that takes what observers send.
type collector struct {
	*httptest.Server

	mu     sync.Mutex
	bodies map[string]string // by path, joined
}

func newCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{bodies: make(map[string]string)}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			if unzipped, err := gzip.NewReader(bytes.NewReader(body)); err == nil {
				body, _ = io.ReadAll(unzipped)
			}
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.bodies[r.URL.Path] += string(body)
		w.WriteHeader(http.StatusOK)
	}))
	t.Cleanup(c.Close)
	return c
}

func (c *collector) body(path string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bodies[path]
}

func TestSentryGetsTheErrorWithItsEventAndNoPersonalData(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	sentryServer := newCollector(t)
	hub, err := observe.NewSentry(strings.Replace(sentryServer.URL, "http://", "http://key@", 1) + "/1")
	require.NoError(t, err)
	attempts := 0
	plan := newPlan(t, func(context.Context, *river.Job[leadArgs]) error {
		attempts++
		switch attempts {
		case 1:
			return errWithSecrets()
		case 2:
			panic(errWithSecrets())
		}
		return nil
	})
	organization := newOrganization(t, pool)
	work(t, pool, plan, organization, eventlog.ClientConfig{Middleware: []rivertype.Middleware{&observe.Sentry{Hub: hub}}})
	observe.FlushSentry(hub)
	got := sentryServer.body("/api/1/envelope/")
	for _, want := range []string{
		`"category":"event_log"`, `"message":"consume lead.won"`, `"type":"lead.won"`, `"worker":"lead-worker"`, `"request_id":"r-1"`,
		`"org_id":"` + organization.String() + `"`, `"level":"warning"`, `[cpf], [number], [email], [phone]`, "panic: send to",
	} {
		require.Contains(t, got, want)
	}
	for _, secret := range secretsOf {
		require.NotContains(t, got, secret)
	}
	require.Equal(t, 2, strings.Count(got, `"event_id":"`+firstEvent(t, pool)+`"`), "one breadcrumb for each failure")

	require.NoError(t, observe.SentryChannel(hub).Send(t.Context(), observe.Notice{Rule: "dead_letter", Subject: "a-worker", Text: "a job died"}))
	require.Contains(t, sentryServer.body("/api/1/envelope/"), `"fingerprint":["afluente","dead_letter","a-worker"]`)
}

func firstEvent(t *testing.T, pool *pgxpool.Pool) (id string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT id::text FROM event_log").Scan(&id))
	return id
}

func TestSentryDSNStaysSecret(t *testing.T) {
	t.Parallel()
	_, err := observe.NewSentry("https://hush@sentry.example/no-number/")
	if err != nil {
		require.NotContains(t, err.Error(), "hush")
	}
	_, err = observe.NewSentry("hush")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hush")
}

// A job's span belongs to the trace of its emitter and is linked to its span,
// and what the job emits belongs to the job's span.
func TestSpanOfAJobIsLinkedToItsEmitter(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	spans := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	var emitted trace.SpanContext
	attempts := 0
	plan := newPlan(t, func(ctx context.Context, _ *river.Job[leadArgs]) error {
		if attempts++; attempts == 1 {
			return errWithSecrets()
		}
		emitted = trace.SpanContextFromContext(ctx)
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		var organization uuid.UUID
		if err := tx.QueryRow(ctx, "SELECT id FROM organizations").Scan(&organization); err != nil {
			return err
		}
		_, err = eventlog.Emit(ctx, tx, eventlog.Event[event.LeadLost]{
			OrganizationID: organization, Payload: event.LeadLost{Reason: "price", LostAt: time.Now()},
		})
		return errors.Join(err, tx.Commit(ctx))
	})
	organization := newOrganization(t, pool)
	work(t, pool, plan, organization, eventlog.ClientConfig{Middleware: []rivertype.Middleware{observe.NewTracing(provider)}})

	got := spans.GetSpans()
	require.Len(t, got, 2)
	for _, span := range got {
		require.Equal(t, "process lead-worker", span.Name)
		require.Equal(t, trace.SpanKindConsumer, span.SpanKind)
		require.Equal(t, "4bf92f3577b34da6a3ce929d0e0e4736", span.SpanContext.TraceID().String())
		require.Equal(t, "00f067aa0ba902b7", span.Parent.SpanID().String())
		require.Equal(t, "00f067aa0ba902b7", span.Links[0].SpanContext.SpanID().String())
	}
	require.Equal(t, "send to [cpf], [number], [email], [phone]: refused", got[0].Status.Description)
	require.Empty(t, got[1].Status.Description)
	var metadata string
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT concat_ws(' ', metadata ->> 'trace_id', metadata ->> 'span_id') FROM event_log WHERE event_type = 'lead.lost'").Scan(&metadata))
	require.Equal(t, emitted.TraceID().String()+" "+emitted.SpanID().String(), metadata)
}

func TestTracesAndMetricsReachACollector(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	otlp := newCollector(t)
	traces, err := observe.NewTracerProvider(t.Context(), otlp.URL)
	require.NoError(t, err)
	_, meters, err := observe.NewMeterProvider(t.Context(), otlp.URL)
	require.NoError(t, err)
	telemetry, err := eventlog.NewTelemetry(meters.Meter("test"))
	require.NoError(t, err)
	plan := newPlan(t, func(context.Context, *river.Job[leadArgs]) error { return nil })
	work(t, pool, plan, newOrganization(t, pool), eventlog.ClientConfig{
		Telemetry: telemetry, Middleware: []rivertype.Middleware{observe.NewTracing(traces)},
	})
	require.NoError(t, traces.Shutdown(t.Context()))
	require.NoError(t, meters.Shutdown(t.Context()))
	require.Contains(t, otlp.body("/v1/traces"), "process lead-worker")
	require.Contains(t, otlp.body("/v1/metrics"), "worker.processing_duration_ms")
}

// Every metric of the specification is there under its name, bounded in its
// labels, and without the organizations.
func TestMetricsAreThoseOfTheSpecification(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	reader := sdkmetric.NewManualReader()
	meter := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("test")
	telemetry, err := eventlog.NewTelemetry(meter)
	require.NoError(t, err)
	require.NoError(t, observe.RegisterPool(meter, pool))
	attempts := 0
	plan := newPlan(t, func(context.Context, *river.Job[leadArgs]) error {
		if attempts++; attempts == 1 {
			return errors.New("boom")
		}
		return nil
	})
	organization := newOrganization(t, pool)
	exec(t, pool, "SELECT emit_event('lead.painted', 'lead', NULL, '{}', '{}', $1)", organization)
	exec(t, pool, "INSERT INTO event_log (organization_id, event_type, entity_kind, status) VALUES ($1, 'lead.lost', 'lead', 'dead')", organization)
	work(t, pool, plan, organization, eventlog.ClientConfig{Telemetry: telemetry})
	exec(t, pool, "INSERT INTO event_log (organization_id, event_type, entity_kind, created_at) VALUES ($1, 'lead.created', 'lead', now() - interval '90 seconds')", organization)
	exec(t, pool, `INSERT INTO river.river_job (kind, queue, args, max_attempts, created_at, scheduled_at)
		VALUES ('x', 'default', '{}', 8, now() - interval '30 seconds', now() - interval '1 hour')`) // its place, not its age
	monitor := newMonitor(t, pool, observe.MonitorConfig{Plan: plan, Telemetry: telemetry, Meter: meter})
	require.NoError(t, monitor.Pass(t.Context()))

	values := collect(t, reader)
	for name, want := range map[string]float64{
		"event_log.emitted{event_type=lead.won}":                                    1,
		"event_log.emitted{event_type=other}":                                       1,
		"event_log.consumed{event_type=lead.won,worker=lead-worker}":                1,
		"worker.processing_duration_ms{event_type=lead.won,worker=lead-worker}":     2, // how many
		"event_log.fail_rate{worker=lead-worker}":                                   0.5,
		"event_log.dlq_size{event_type=lead.lost}":                                  1,
		"pg_boss.queue_size{queue=default}":                                         1,
		"event_log.schema_faults{event_type=lead.painted,fault=unknown event type}": 1,
		"pool.max_connections{}":                                                    4,
	} {
		require.Contains(t, values, name)
		require.InDelta(t, want, values[name], 1e-9, name)
	}
	for _, name := range []string{"event_log.lag_seconds{event_type=lead.created}", "bridge.lag_seconds{}"} {
		require.GreaterOrEqual(t, values[name], 90.0, name)
	}
	require.GreaterOrEqual(t, values["queue.oldest_age_seconds{queue=default}"], 30.0)
	require.Less(t, values["queue.oldest_age_seconds{queue=default}"], 600.0)
	require.Contains(t, values, "worker.processing_p95_ms{worker=lead-worker}")
	require.Contains(t, values, "pool.connections{state=idle}")
	for name := range values {
		require.NotContains(t, name, organization.String())
	}
}

// collect returns the value of each series, of a histogram how many it has.
func collect(t *testing.T, reader *sdkmetric.ManualReader) map[string]float64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &all))
	values := make(map[string]float64)
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, point := range data.DataPoints {
					values[m.Name+"{"+point.Attributes.Encoded(attribute.DefaultEncoder())+"}"] = float64(point.Value)
				}
			case metricdata.Sum[float64]:
				for _, point := range data.DataPoints {
					values[m.Name+"{"+point.Attributes.Encoded(attribute.DefaultEncoder())+"}"] = point.Value
				}
			case metricdata.Gauge[int64]:
				for _, point := range data.DataPoints {
					values[m.Name+"{"+point.Attributes.Encoded(attribute.DefaultEncoder())+"}"] = float64(point.Value)
				}
			case metricdata.Gauge[float64]:
				for _, point := range data.DataPoints {
					values[m.Name+"{"+point.Attributes.Encoded(attribute.DefaultEncoder())+"}"] = point.Value
				}
			case metricdata.Histogram[float64]:
				for _, point := range data.DataPoints {
					values[m.Name+"{"+point.Attributes.Encoded(attribute.DefaultEncoder())+"}"] = float64(point.Count)
				}
			}
		}
	}
	return values
}

// mailbox is an SMTP server that keeps what it gets.
type mailbox struct {
	mu    sync.Mutex
	mails []string
}

func (m *mailbox) NewSession(*smtp.Conn) (smtp.Session, error) { return &mailSession{box: m}, nil }

type mailSession struct {
	box *mailbox
	to  []string
}

func (*mailSession) Reset()                               {}
func (*mailSession) Logout() error                        { return nil }
func (*mailSession) Mail(string, *smtp.MailOptions) error { return nil }

func (s *mailSession) Rcpt(to string, _ *smtp.RcptOptions) error {
	s.to = append(s.to, to)
	return nil
}

func (s *mailSession) Data(r io.Reader) error {
	content, err := io.ReadAll(r)
	s.box.mu.Lock()
	defer s.box.mu.Unlock()
	s.box.mails = append(s.box.mails, strings.Join(s.to, " ")+"\n"+string(content))
	return err
}

func TestMailIsSent(t *testing.T) {
	t.Parallel()
	box := &mailbox{}
	server := smtp.NewServer(box)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = server.Serve(listener) }()
	channel := observe.MailChannel("mail", observe.SMTP{URL: "smtp://" + listener.Addr().String(), From: "bus@example.com"},
		"ops@example.com", "dpo@example.com")
	notice := observe.Notice{Rule: "dead_letter", Subject: "a-worker", Text: "3 jobs died.", URL: "https://example.com/x"}
	require.NoError(t, channel.Send(t.Context(), notice))
	require.Len(t, box.mails, 1)
	require.Contains(t, box.mails[0], "ops@example.com dpo@example.com")
	require.Contains(t, box.mails[0], "[afluente] dead_letter a-worker")
	require.Contains(t, box.mails[0], "3 jobs died.\r\n\r\nhttps://example.com/x")
	require.NoError(t, server.Close())
	require.Error(t, channel.Send(t.Context(), notice))

	for _, url := range []string{"http://x", "smtp://", "smtp://x:port", "x"} {
		require.Error(t, observe.CheckSMTP(url), url)
	}
	require.NoError(t, observe.CheckSMTP("smtps://u:p@mail.example"))
}
