package observe

import (
	"context"
	"fmt"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"afluente/eventlog"
)

// scope names the spans and metrics of this program.
const scope = "afluente"

// NewTracerProvider returns what sends spans to an OTLP endpoint over HTTP, such
// as http://127.0.0.1:4318; headers and the like are OpenTelemetry's own
// variables. Its Shutdown sends what is still on its way.
func NewTracerProvider(ctx context.Context, endpoint string) (*sdktrace.TracerProvider, error) {
	exporter, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(endpoint+"/v1/traces"))
	if err != nil {
		return nil, fmt.Errorf("make trace exporter: %w", err)
	}
	about, err := about(ctx)
	if err != nil {
		return nil, err
	}
	return sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(about)), nil
}

// about says which program tells; OTEL_SERVICE_NAME and
// OTEL_RESOURCE_ATTRIBUTES win.
func about(ctx context.Context) (*resource.Resource, error) {
	about, err := resource.New(ctx,
		resource.WithTelemetrySDK(), resource.WithAttributes(attribute.String("service.name", scope)), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("describe program to OpenTelemetry: %w", err)
	}
	return about, nil
}

// Tracing is a River middleware that makes a span of each attempt at a job, in
// the trace of whoever emitted the event and linked to its span. What the job
// emits and calls belongs to that span in turn.
type Tracing struct {
	river.MiddlewareDefaults

	tracer trace.Tracer
}

// NewTracing returns a middleware that makes its spans with a provider.
func NewTracing(provider trace.TracerProvider) *Tracing {
	return &Tracing{tracer: provider.Tracer(scope)}
}

// Work implements River's WorkerMiddleware.
func (t *Tracing) Work(ctx context.Context, job *rivertype.JobRow, doInner func(context.Context) error) (err error) {
	metadata, eventType := readMetadata(job), eventlog.EventType(job)
	options := []trace.SpanStartOption{
		trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithAttributes(
			attribute.String("messaging.system", scope),
			attribute.String("messaging.operation.name", "process"),
			attribute.String("messaging.consumer.group.name", job.Kind),
			attribute.String("messaging.destination.name", job.Queue),
			attribute.Int64("job.id", job.ID),
			attribute.Int("job.attempt", job.Attempt),
		),
	}
	if eventType != "" {
		options = append(options, trace.WithAttributes(
			attribute.String("messaging.message.id", metadata.EventID.String()),
			attribute.String("event.type", eventType),
			attribute.String("organization.id", organizationOf(job)),
		))
	}
	if emitter, ok := emitterOf(metadata); ok {
		ctx = trace.ContextWithRemoteSpanContext(ctx, emitter)
		options = append(options, trace.WithLinks(trace.Link{SpanContext: emitter}))
	}
	ctx, span := t.tracer.Start(ctx, "process "+job.Kind, options...)
	defer span.End()
	defer func() {
		if value := recover(); value != nil {
			span.SetStatus(codes.Error, eventlog.Scrub(fmt.Sprintf("panic: %v", value)))
			panic(value)
		}
		if outcome := eventlog.OutcomeOf(ctx, job, err); outcome == eventlog.Retried || outcome == eventlog.Dead {
			span.SetStatus(codes.Error, eventlog.Scrub(err.Error()))
		}
	}()
	return doInner(ctx)
}

// emitterOf returns the span that emitted a job's event. Of an emitter that
// told its trace alone the event itself stands for the span.
func emitterOf(metadata eventMetadata) (trace.SpanContext, bool) {
	traceID, err := trace.TraceIDFromHex(metadata.TraceID)
	if err != nil {
		return trace.SpanContext{}, false
	}
	spanID, err := trace.SpanIDFromHex(metadata.SpanID)
	if err != nil {
		copy(spanID[:], metadata.EventID[:])
	}
	return trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: traceID, SpanID: spanID, TraceFlags: trace.FlagsSampled, Remote: true,
	}), true
}
