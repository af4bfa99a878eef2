package main

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/getsentry/sentry-go"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/rivertype"
	"go.opentelemetry.io/otel"
	"go.uber.org/zap"

	"afluente/eventlog"
	"afluente/eventlog/observe"
)

// alertTimeout bounds one post of an alert.
const alertTimeout = 10 * time.Second

// observers are those who watch the program.
type observers struct {
	metrics    http.Handler
	telemetry  *eventlog.Telemetry
	middleware []rivertype.Middleware
	monitor    *observe.Monitor
	shutDown   func(context.Context) // sends what is on its way, for up to 5 s
}

// newObservers makes those that the settings ask for. What they do not ask for
// costs nothing: no span is made without a collector.
func newObservers(
	ctx context.Context, config Config, pool *pgxpool.Pool, plan *eventlog.Plan, log *zap.Logger,
) (o *observers, err error) {
	o = &observers{}
	var stops []func(context.Context) error
	o.shutDown = func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		for _, stop := range stops {
			if err := stop(ctx); err != nil { // a collector that is gone is no reason to fail
				log.Warn("telemetry not flushed", zap.Error(err))
			}
		}
	}
	// OpenTelemetry has one handler in a process for what goes wrong behind the
	// back of whoever measures; its default prints lines of its own.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("telemetry not sent", zap.Error(err)) }))

	metrics, meters, err := observe.NewMeterProvider(ctx, config.OTLPEndpoint)
	if err != nil {
		return nil, err
	}
	o.metrics = metrics
	stops = append(stops, meters.Shutdown)
	meter := meters.Meter("afluente")
	if o.telemetry, err = eventlog.NewTelemetry(meter); err != nil {
		return nil, err
	}
	if err := observe.RegisterPool(meter, pool); err != nil {
		return nil, err
	}
	if config.OTLPEndpoint != "" {
		traces, err := observe.NewTracerProvider(ctx, config.OTLPEndpoint)
		if err != nil {
			return nil, err
		}
		stops = append(stops, traces.Shutdown)
		o.middleware = append(o.middleware, observe.NewTracing(traces))
	}
	var hub *sentry.Hub
	if config.SentryDSN != "" {
		if hub, err = observe.NewSentry(config.SentryDSN); err != nil {
			return nil, err
		}
		stops = append(stops, func(context.Context) error { observe.FlushSentry(hub); return nil })
		o.middleware = append(o.middleware, &observe.Sentry{Hub: hub})
	}
	channels, routes := alertChannels(config, hub, log)
	for _, consumer := range slices.Sorted(maps.Keys(routes)) {
		if !slices.ContainsFunc(plan.Entries(), func(e eventlog.Entry) bool { return e.Job == consumer }) {
			log.Warn("alert route to a consumer that this version does not have", zap.String("consumer", consumer))
		}
	}
	o.monitor, err = observe.NewMonitor(observe.MonitorConfig{
		Pool: pool, Plan: plan, Log: log, Telemetry: o.telemetry, Meter: meter,
		Channels: channels, Routes: routes, ConsoleURL: config.consoleURL(),
	})
	return o, err
}

// alertChannels returns whom the settings want told of everything, and whom of
// one consumer.
func alertChannels(config Config, hub *sentry.Hub, log *zap.Logger) ([]observe.Channel, map[string]observe.Channel) {
	client := &http.Client{Timeout: alertTimeout}
	server := observe.SMTP{URL: config.SMTPURL, From: config.AlertFrom}
	channels := []observe.Channel{observe.LogChannel(log.Named("alerts"))}
	if config.AlertWebhookURL != "" {
		channels = append(channels, observe.WebhookChannel("webhook", config.AlertWebhookURL, client))
	}
	if len(config.AlertEmail) > 0 {
		channels = append(channels, observe.MailChannel("mail", server, config.AlertEmail...))
	}
	if hub != nil {
		channels = append(channels, observe.SentryChannel(hub))
	}
	routes := make(map[string]observe.Channel)
	for _, consumer := range slices.Sorted(maps.Keys(config.AlertRoutes)) {
		to, name := config.AlertRoutes[consumer], "route:"+consumer
		if to.Scheme == "mailto" {
			routes[consumer] = observe.MailChannel(name, server, to.Opaque)
		} else {
			routes[consumer] = observe.WebhookChannel(name, to.String(), client)
		}
	}
	return channels, routes
}
