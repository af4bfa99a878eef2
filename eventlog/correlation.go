package eventlog

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
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

// correlate adds what ctx belongs to to the metadata of an event.
func correlate(ctx context.Context, metadata json.RawMessage) (json.RawMessage, error) {
	c := CorrelationFrom(ctx)
	if c == (Correlation{}) {
		return metadata, nil
	}
	all := make(map[string]json.RawMessage)
	if err := json.Unmarshal(metadata, &all); err != nil {
		return nil, fmt.Errorf("decode metadata: %w", err)
	}
	add := func(key, value string) error {
		if _, ok := all[key]; ok || value == "" {
			return nil
		}
		var err error
		all[key], err = json.Marshal(value)
		return err
	}
	if err := add("request_id", c.RequestID); err != nil {
		return nil, err
	}
	if err := add("trace_id", c.TraceID); err != nil {
		return nil, err
	}
	if c.CausationID != uuid.Nil {
		if err := add("causation_id", c.CausationID.String()); err != nil {
			return nil, err
		}
	}
	return json.Marshal(all)
}

// maxCorrelation is the longest request or trace id, in bytes, that goes from
// an event to its jobs.
const maxCorrelation = 255

// readCorrelation returns the request and trace ids in an event's metadata.
func readCorrelation(metadata json.RawMessage) (requestID, traceID string) {
	if !bytes.Contains(metadata, []byte(`"request_id"`)) && !bytes.Contains(metadata, []byte(`"trace_id"`)) {
		return "", ""
	}
	var ids map[string]any // whatever an emitter put there
	if json.Unmarshal(metadata, &ids) != nil {
		return "", ""
	}
	read := func(key string) string {
		id, _ := ids[key].(string)
		if len(id) > maxCorrelation {
			return ""
		}
		return id
	}
	return read("request_id"), read("trace_id")
}
