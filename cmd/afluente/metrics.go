package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"afluente/db"
)

// maxMetricFaults is how many pairs of event type and fault have a series.
const maxMetricFaults = 50

// newMetrics returns the handler of /metrics and what shuts its meters down.
// What it tells of the database is asked when it is scraped.
func newMetrics(ctx context.Context, pool *pgxpool.Pool) (http.Handler, func(context.Context) error, error) {
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry), otelprometheus.WithoutScopeInfo())
	if err != nil {
		return nil, nil, fmt.Errorf("make metrics: %w", err)
	}
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	meter := provider.Meter("afluente")

	faults, err := meter.Int64ObservableGauge("event_log.schema_faults",
		metric.WithDescription("Events of the last hour that depart from the catalogue."))
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make metrics: %w", err), provider.Shutdown(ctx))
	}
	_, err = meter.RegisterCallback(func(ctx context.Context, observer metric.Observer) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		rows, err := db.New(pool).ListSchemaFaults(ctx, time.Now().Add(-time.Hour), maxMetricFaults)
		if err != nil {
			return fmt.Errorf("list schema faults: %w", err)
		}
		for _, row := range rows {
			observer.ObserveInt64(faults, row.Events, metric.WithAttributes(
				attribute.String("event_type", row.EventType), attribute.String("fault", row.Fault)))
		}
		return nil
	}, faults)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make metrics: %w", err), provider.Shutdown(ctx))
	}
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}), provider.Shutdown, nil
}
