package jobs

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"regexp"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"afluente/eventlog"
)

var traceIDRE = regexp.MustCompile(`^[0-9a-f]{32}$`)

// Correlate returns a transport that tells the other side which request a
// job's calls belong to: X-Request-Id, and traceparent of W3C Trace Context,
// with the span that is under way or else with the event's trace id, where it
// is one.
func Correlate(next http.RoundTripper) http.RoundTripper { return &correlated{next: next} }

type correlated struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (c *correlated) RoundTrip(request *http.Request) (*http.Response, error) {
	ctx := request.Context()
	correlation := eventlog.CorrelationFrom(ctx)
	request = request.Clone(ctx)
	if id := correlation.RequestID; id != "" && printable(id) {
		request.Header.Set("X-Request-Id", id)
	}
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(request.Header))
	} else if id := correlation.TraceID; traceIDRE.MatchString(id) {
		var span [8]byte
		_, _ = rand.Read(span[:]) // never fails
		request.Header.Set("Traceparent", "00-"+id+"-"+hex.EncodeToString(span[:])+"-01")
	}
	return c.next.RoundTrip(request)
}

// printable tells whether a header may carry the text.
func printable(text string) bool {
	for i := range len(text) {
		if text[i] < ' ' || text[i] > '~' {
			return false
		}
	}
	return true
}
