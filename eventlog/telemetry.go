package eventlog

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/rivertype"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"afluente/db"
	"afluente/eventlog/event"
)

// DurationBuckets are the upper bounds of worker.processing_duration_ms, in
// milliseconds.
func DurationBuckets() []float64 {
	return []float64{5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000}
}

// Telemetry counts what the bridge and the workers of a process do. Its
// metrics, by their names in OpenTelemetry:
//
//	event_log.emitted              events fanned out, by event_type: whoever
//	                               emitted them, only the bridge sees them all
//	event_log.consumed             jobs done, by event_type and worker
//	worker.processing_duration_ms  what attempts took, by event_type and worker
//	cron.lateness_seconds          from a cron's tick to its first attempt, by worker
//
// Types that are not in the catalogue count as "other", so that an emitter
// cannot make series without end. Make it with [NewTelemetry]; it may be used
// by several goroutines, and a nil one counts nothing.
type Telemetry struct {
	emitted, consumed  metric.Int64Counter
	duration, lateness metric.Float64Histogram
	known              map[string]bool
	bounds             []float64 // DurationBuckets

	mu      sync.Mutex
	workers map[string]*WorkerStats // since the last Flush
}

// WorkerStats is what one kind of worker did in a span of time.
type WorkerStats struct {
	Attempts int64
	Failed   int64
	// Durations are the attempts by the [DurationBuckets], and one more for
	// those that took longer.
	Durations []int64
}

// NewTelemetry makes the metrics on a meter.
func NewTelemetry(meter metric.Meter) (*Telemetry, error) {
	t := &Telemetry{known: make(map[string]bool), bounds: DurationBuckets(), workers: make(map[string]*WorkerStats)}
	for _, payload := range event.All() {
		t.known[payload.EventType()] = true
	}
	var err error
	t.emitted, err = meter.Int64Counter("event_log.emitted", metric.WithDescription("Events fanned out."))
	if err != nil {
		return nil, fmt.Errorf("make metric: %w", err)
	}
	t.consumed, err = meter.Int64Counter("event_log.consumed", metric.WithDescription("Jobs of events that are done."))
	if err != nil {
		return nil, fmt.Errorf("make metric: %w", err)
	}
	t.duration, err = meter.Float64Histogram("worker.processing_duration_ms",
		metric.WithDescription("What attempts took, in milliseconds."), metric.WithExplicitBucketBoundaries(t.bounds...))
	if err != nil {
		return nil, fmt.Errorf("make metric: %w", err)
	}
	t.lateness, err = meter.Float64Histogram("cron.lateness_seconds",
		metric.WithDescription("From a cron's tick to its first attempt."), metric.WithExplicitBucketBoundaries(1, 2, 5, 10, 30, 60, 300, 3600))
	if err != nil {
		return nil, fmt.Errorf("make metric: %w", err)
	}
	return t, nil
}

// TypeLabel is the event type as a metric names it.
func (t *Telemetry) TypeLabel(eventType string) string {
	if eventType == "" || t.known[eventType] {
		return eventType
	}
	return "other"
}

func (t *Telemetry) fannedOut(ctx context.Context, events []db.ClaimEventsRow) {
	if t == nil {
		return
	}
	counts := make(map[string]int64)
	for _, event := range events {
		counts[t.TypeLabel(event.EventType)]++
	}
	for label, n := range counts {
		t.emitted.Add(ctx, n, metric.WithAttributes(attribute.String("event_type", label)))
	}
}

// worked counts one attempt that ended.
func (t *Telemetry) worked(ctx context.Context, job *rivertype.JobRow, took time.Duration, failed bool) {
	if t == nil {
		return
	}
	millis := float64(took) / float64(time.Millisecond)
	worker := attribute.String("worker", job.Kind)
	eventType := EventType(job)
	labels := metric.WithAttributes(worker, attribute.String("event_type", t.TypeLabel(eventType)))
	t.duration.Record(ctx, millis, labels)
	if !failed && eventType != "" {
		t.consumed.Add(ctx, 1, labels)
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	stats := t.stats(job.Kind)
	stats.Attempts++
	if failed {
		stats.Failed++
	}
	stats.Durations[sort.SearchFloat64s(t.bounds, millis)]++
}

// started counts how late the run of a cron is.
func (t *Telemetry) started(ctx context.Context, job *rivertype.JobRow, tick Tick) {
	if t != nil && job.Attempt == 1 && job.AttemptedAt != nil {
		t.lateness.Record(ctx, max(0, job.AttemptedAt.Sub(tick.At).Seconds()),
			metric.WithAttributes(attribute.String("worker", job.Kind)))
	}
}

func (t *Telemetry) stats(worker string) *WorkerStats {
	stats, ok := t.workers[worker]
	if !ok {
		stats = &WorkerStats{Durations: make([]int64, len(t.bounds)+1)}
		t.workers[worker] = stats
	}
	return stats
}

// Flush adds what was counted since the last time to the table worker_minutes,
// which holds that of all processes. After an error it is kept for the next time.
func (t *Telemetry) Flush(ctx context.Context, pool *pgxpool.Pool) error {
	t.mu.Lock()
	taken := t.workers
	t.workers = make(map[string]*WorkerStats)
	t.mu.Unlock()
	if len(taken) == 0 {
		return nil
	}
	var params []db.AddWorkerMinutesParams
	for _, worker := range slices.Sorted(maps.Keys(taken)) { // so that two processes cannot deadlock
		stats := taken[worker]
		params = append(params, db.AddWorkerMinutesParams{
			Worker: worker, Attempts: stats.Attempts, Failed: stats.Failed, Durations: stats.Durations,
		})
	}
	var err error
	db.New(pool).AddWorkerMinutes(ctx, params).Exec(keepFirst(&err))
	if err == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for worker, stats := range taken {
		t.stats(worker).Add(*stats)
	}
	return fmt.Errorf("flush worker statistics: %w", err)
}

// Add adds what was done in another span of time.
func (s *WorkerStats) Add(other WorkerStats) {
	s.Attempts += other.Attempts
	s.Failed += other.Failed
	for i, n := range other.Durations {
		if i < len(s.Durations) {
			s.Durations[i] += n
		}
	}
}
