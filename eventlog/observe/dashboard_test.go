package observe_test

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"afluente/eventlog/observe"
)

// The dashboard and the rules ask for metrics that there are, and the dashboard
// for all of them.
func TestDashboardAndRulesKnowTheMetrics(t *testing.T) {
	t.Parallel()
	known := map[string]bool{
		"event_log_emitted_total": true, "event_log_consumed_total": true, "worker_processing_duration_ms_bucket": true,
		"cron_lateness_seconds_bucket": true, "event_log_schema_faults": true, "pool_connections": true, "pool_acquire_wait_seconds_total": true,
	}
	for _, name := range observe.GaugeNames() {
		known[strings.ReplaceAll(name, ".", "_")] = true
	}
	dashboard, err := os.ReadFile("dashboard.json")
	require.NoError(t, err)
	require.True(t, json.Valid(dashboard))
	rules, err := os.ReadFile("alerts.yaml")
	require.NoError(t, err)
	asked := regexp.MustCompile(`\b(event_log|worker|queue|bridge|cron|pool|pg_boss)_[a-z0-9_]+`)
	for _, name := range asked.FindAllString(string(dashboard)+string(rules), -1) {
		require.True(t, known[name], name)
	}
	for name := range known {
		if name != "bridge_lag_seconds" && name != "worker_processing_p95_ms" {
			require.Contains(t, string(dashboard), name)
		}
	}
}
