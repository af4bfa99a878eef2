package jobs_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"afluente/eventlog"
	"afluente/jobs"
)

func TestOutgoingCallsCarryTheRequest(t *testing.T) {
	t.Parallel()
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	tests := map[string]struct {
		correlation eventlog.Correlation
		requestID   string
		traceparent string
	}{
		"nothing":          {},
		"both":             {eventlog.Correlation{RequestID: "r-1", TraceID: trace}, "r-1", "^00-" + trace + "-[0-9a-f]{16}-01$"},
		"no W3C trace id":  {eventlog.Correlation{RequestID: "r-1", TraceID: "sentry"}, "r-1", ""},
		"no header's text": {eventlog.Correlation{RequestID: "a\r\nX-Evil: 1"}, "", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := make(chan http.Header, 1)
			server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r.Header }))
			defer server.Close()
			client := &http.Client{Transport: jobs.Correlate(server.Client().Transport)}
			request, err := http.NewRequestWithContext(eventlog.WithCorrelation(t.Context(), tt.correlation), http.MethodGet, server.URL, http.NoBody)
			require.NoError(t, err)
			response, err := client.Do(request)
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			header := <-got
			require.Equal(t, tt.requestID, header.Get("X-Request-Id"))
			if tt.traceparent == "" {
				require.Empty(t, header.Get("Traceparent"))
			} else {
				require.Regexp(t, tt.traceparent, header.Get("Traceparent"))
			}
			require.Empty(t, request.Header, "the caller's request is left alone")
		})
	}
}
