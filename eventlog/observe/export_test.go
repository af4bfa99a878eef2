package observe

import "time"

// SetPause is how long a channel rests between two notices of the same thing.
func (m *Monitor) SetPause(pause time.Duration) { m.pause = pause }

// SetNow gives the monitor another clock.
func (m *Monitor) SetNow(now func() time.Time) { m.now = now }

// Percentile and RetryAfter are for tests of many values.
var (
	Percentile = percentile
	RetryAfter = retryAfter
)

// GaugeNames are the names of the metrics that the monitor measures.
func GaugeNames() []string {
	var names []string
	for _, g := range gauges() {
		names = append(names, g.name)
	}
	return names
}
