package observe

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
)

// NewMeterProvider returns a handler that shows the metrics made with the
// provider to Prometheus. With an OTLP endpoint, such as http://127.0.0.1:4318,
// they are also sent there each minute, and by the provider's Shutdown.
func NewMeterProvider(ctx context.Context, otlpEndpoint string) (http.Handler, *sdkmetric.MeterProvider, error) {
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry), otelprometheus.WithoutScopeInfo())
	if err != nil {
		return nil, nil, fmt.Errorf("make metrics: %w", err)
	}
	about, err := about(ctx)
	if err != nil {
		return nil, nil, err
	}
	options := []sdkmetric.Option{sdkmetric.WithReader(exporter), sdkmetric.WithResource(about)}
	if otlpEndpoint != "" {
		exporter, err := otlpmetrichttp.New(ctx, otlpmetrichttp.WithEndpointURL(otlpEndpoint+"/v1/metrics"))
		if err != nil {
			return nil, nil, fmt.Errorf("make metric exporter: %w", err)
		}
		options = append(options, sdkmetric.WithReader(sdkmetric.NewPeriodicReader(exporter)))
	}
	handler := promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
	return handler, sdkmetric.NewMeterProvider(options...), nil
}

// RegisterPool makes the metrics of a pool: pool.connections by state,
// pool.max_connections, and pool.acquire_wait_seconds, in which somebody waited
// for a connection.
func RegisterPool(meter metric.Meter, pool *pgxpool.Pool) error {
	connections, err1 := meter.Int64ObservableGauge("pool.connections", metric.WithDescription("Database connections of this process."))
	most, err2 := meter.Int64ObservableGauge("pool.max_connections", metric.WithDescription("Database connections that this process may have."))
	waited, err3 := meter.Float64ObservableCounter("pool.acquire_wait_seconds", metric.WithDescription("Time spent waiting for a database connection."))
	if err := errors.Join(err1, err2, err3); err != nil {
		return fmt.Errorf("make metrics: %w", err)
	}
	_, err := meter.RegisterCallback(func(_ context.Context, observer metric.Observer) error {
		stat := pool.Stat()
		observer.ObserveInt64(connections, int64(stat.AcquiredConns()), metric.WithAttributes(attribute.String("state", "used")))
		observer.ObserveInt64(connections, int64(stat.IdleConns()), metric.WithAttributes(attribute.String("state", "idle")))
		observer.ObserveInt64(most, int64(stat.MaxConns()))
		observer.ObserveFloat64(waited, stat.EmptyAcquireWaitTime().Seconds())
		return nil
	}, connections, most, waited)
	if err != nil {
		return fmt.Errorf("make metrics: %w", err)
	}
	return nil
}

// gauge is one metric of what the Monitor measures.
type gauge struct {
	name, label, description string
	values                   func(measurement) map[string]float64
}

// gauges are shown by the one process that measures.
func gauges() []gauge {
	return []gauge{
		{
			"event_log.lag_seconds", "event_type", "How long the oldest event that is due has waited for a bridge.",
			func(m measurement) map[string]float64 { return m.lag },
		},
		{
			"event_log.fail_rate", "worker", "Share of the attempts of the last five minutes that failed.",
			func(m measurement) map[string]float64 { return m.failRate },
		},
		{
			"event_log.dlq_size", "event_type", "Events that are dead.",
			func(m measurement) map[string]float64 { return m.dead },
		},
		{
			"bridge.lag_seconds", "", "How long the oldest event of all that is due has waited for a bridge.",
			func(m measurement) map[string]float64 { return map[string]float64{"": largest(m.lag)} },
		},
		{
			"worker.dead_jobs", "worker", "Jobs in the dead letters, also those without an event.",
			func(m measurement) map[string]float64 { return m.deadJobs },
		},
		{
			"worker.overdue_jobs", "worker", "Jobs that have run for a minute longer than they may.",
			func(m measurement) map[string]float64 { return m.overdue },
		},
		{
			"worker.processing_p95_ms", "worker", "What 95 % of the attempts of the last five minutes took at most.",
			func(m measurement) map[string]float64 { return m.p95 },
		},
		{
			"cron.overdue_seconds", "worker", "How long a cron has had a tick that did not become a job.",
			func(m measurement) map[string]float64 { return m.crons },
		},
		// The name is older than River.
		{
			"pg_boss.queue_size", "queue", "Jobs that wait for a worker.",
			func(m measurement) map[string]float64 { return m.queues },
		},
		{
			"queue.oldest_age_seconds", "queue", "How long the oldest job has waited for a worker.",
			func(m measurement) map[string]float64 { return m.oldest },
		},
	}
}

// register makes the metrics of what the monitor measures last.
func (m *Monitor) register(meter metric.Meter) error {
	all := gauges()
	instruments := make([]metric.Float64ObservableGauge, len(all))
	observables := make([]metric.Observable, 0, len(all)+1)
	for i, g := range all {
		var err error
		if instruments[i], err = meter.Float64ObservableGauge(g.name, metric.WithDescription(g.description)); err != nil {
			return fmt.Errorf("make metric %s: %w", g.name, err)
		}
		observables = append(observables, instruments[i])
	}
	faults, err := meter.Int64ObservableGauge("event_log.schema_faults",
		metric.WithDescription("Events of the last hour that depart from the catalogue."))
	if err != nil {
		return fmt.Errorf("make metric: %w", err)
	}
	observables = append(observables, faults)
	_, err = meter.RegisterCallback(func(_ context.Context, observer metric.Observer) error {
		measured := m.last.Load()
		if measured == nil { // another process measures
			return nil
		}
		for _, row := range measured.faults {
			observer.ObserveInt64(faults, row.Events, metric.WithAttributes(
				attribute.String("event_type", row.EventType), attribute.String("fault", row.Fault)))
		}
		for i, g := range all {
			for value, n := range g.values(*measured) {
				var options []metric.ObserveOption
				if g.label != "" {
					options = append(options, metric.WithAttributes(attribute.String(g.label, value)))
				}
				observer.ObserveFloat64(instruments[i], n, options...)
			}
		}
		return nil
	}, observables...)
	if err != nil {
		return fmt.Errorf("make metrics: %w", err)
	}
	return nil
}

func largest(values map[string]float64) float64 {
	top := 0.0
	for _, value := range values {
		top = max(top, value)
	}
	return top
}
