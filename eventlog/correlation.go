package eventlog

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/trace"
)

// Correlation tells which request something belongs to and what brought it
// about. A job's context carries that of its event, and [Emit] gives it to the
// events emitted under that context, so that a request can be followed from
// event to job to event; 'afluente events trace' prints the way.
type Correlation struct {
	// RequestID and TraceID are the event's, as in [Metadata].
	RequestID string
	TraceID   string
	// CausationID is the event whose job this is; uuid.Nil outside a job.
	CausationID uuid.UUID
}

type correlationKey struct{}

// WithCorrelation returns a context under which events are emitted as part of
// a request. What an event says of itself wins.
func WithCorrelation(ctx context.Context, c Correlation) context.Context {
	return context.WithValue(ctx, correlationKey{}, c)
}

// CorrelationFrom returns what ctx belongs to, zero for nothing.
func CorrelationFrom(ctx context.Context) Correlation {
	c, _ := ctx.Value(correlationKey{}).(Correlation)
	return c
}

// correlate adds what ctx belongs to to the metadata of an event: the
// [Correlation], and the OpenTelemetry span that is under way.
func correlate(ctx context.Context, metadata json.RawMessage) (json.RawMessage, error) {
	c := CorrelationFrom(ctx)
	span := trace.SpanContextFromContext(ctx)
	if c == (Correlation{}) && !span.IsValid() {
		return metadata, nil
	}
	all := make(map[string]json.RawMessage)
	if err := json.Unmarshal(metadata, &all); err != nil {
		return nil, fmt.Errorf("decode metadata: %w", err)
	}
	add := func(key, value string) {
		if _, ok := all[key]; !ok && value != "" {
			all[key], _ = json.Marshal(value) // text always encodes
		}
	}
	add("request_id", c.RequestID)
	if _, ok := all["trace_id"]; !ok && span.IsValid() { // a span's id means nothing in another trace
		add("trace_id", span.TraceID().String())
		add("span_id", span.SpanID().String())
	}
	add("trace_id", c.TraceID)
	if c.CausationID != uuid.Nil {
		add("causation_id", c.CausationID.String())
	}
	return json.Marshal(all)
}

// CorrelationMetadata returns the metadata of a River job that is inserted under
// ctx and belongs to what ctx belongs to. Its context then has the same
// [Correlation].
func CorrelationMetadata(ctx context.Context) (json.RawMessage, error) {
	return correlate(ctx, json.RawMessage("{}"))
}

// maxCorrelation is the longest request or trace id, in bytes, that goes from
// an event to its jobs.
const maxCorrelation = 255

// correlationIDs are what an event's jobs inherit of its metadata.
type correlationIDs struct{ RequestID, TraceID, SpanID string }

func readCorrelation(metadata json.RawMessage) correlationIDs {
	if !bytes.Contains(metadata, []byte(`"request_id"`)) && !bytes.Contains(metadata, []byte(`"trace_id"`)) {
		return correlationIDs{}
	}
	var ids map[string]any // whatever an emitter put there
	if json.Unmarshal(metadata, &ids) != nil {
		return correlationIDs{}
	}
	read := func(key string) string {
		id, _ := ids[key].(string)
		if len(id) > maxCorrelation {
			return ""
		}
		return id
	}
	return correlationIDs{RequestID: read("request_id"), TraceID: read("trace_id"), SpanID: read("span_id")}
}
