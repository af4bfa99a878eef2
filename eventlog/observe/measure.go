package observe

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"afluente/db"
	"afluente/eventlog"
)

const (
	// overdueGrace is how much longer than its kind may a job has run to count as
	// overdue.
	overdueGrace = time.Minute

	// measureTimeout bounds the look at the database.
	measureTimeout = 10 * time.Second

	// maxFaults is how many pairs of event type and fault have a series, the most
	// frequent ones.
	maxFaults = 50
)

// measurement is what a look at the database found, each by its label.
type measurement struct {
	lag      map[string]float64 // seconds, by event type
	dead     map[string]float64 // events, by event type
	queues   map[string]float64 // jobs, by queue
	oldest   map[string]float64 // seconds, by queue
	deadJobs map[string]float64 // by worker
	overdue  map[string]float64 // jobs, by worker
	failRate map[string]float64 // 0 to 1, by worker
	p95      map[string]float64 // milliseconds, by worker
	crons    map[string]float64 // seconds, by cron
	attempts map[string]int64   // of the last five minutes, by worker

	webhooksDisabled map[string]float64 // in the last hour, not by a user; by organization
	webhooksFaulty   map[string]float64 // that cannot sign; by organization

	faults []db.ListSchemaFaultsRow
}

// measure looks at the database, at all of it as of one moment.
func (m *Monitor) measure(ctx context.Context) (measured measurement, err error) {
	ctx, cancel := context.WithTimeout(ctx, measureTimeout)
	defer cancel()
	options := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, m.pool, options, func(tx pgx.Tx) error {
		measured, err = m.measureIn(ctx, db.New(tx))
		return err
	})
	if err != nil {
		return measurement{}, fmt.Errorf("measure: %w", err)
	}
	return measured, nil
}

func (m *Monitor) measureIn(ctx context.Context, queries *db.Queries) (measurement, error) {
	measured := measurement{
		lag: map[string]float64{}, dead: map[string]float64{},
		queues: map[string]float64{}, oldest: map[string]float64{}, deadJobs: map[string]float64{},
		overdue: map[string]float64{}, failRate: map[string]float64{}, p95: map[string]float64{},
		attempts: map[string]int64{}, crons: map[string]float64{},
		webhooksDisabled: map[string]float64{}, webhooksFaulty: map[string]float64{},
	}
	lag, err := queries.MeasureLag(ctx)
	if err != nil {
		return measured, fmt.Errorf("lag: %w", err)
	}
	for _, row := range lag {
		label := m.telemetry.TypeLabel(row.EventType)
		measured.lag[label] = max(measured.lag[label], row.Seconds)
	}
	dead, err := queries.MeasureDeadEvents(ctx)
	if err != nil {
		return measured, fmt.Errorf("dead events: %w", err)
	}
	for _, row := range dead {
		measured.dead[m.telemetry.TypeLabel(row.EventType)] += float64(row.Events)
	}
	deadJobs, err := queries.MeasureDeadJobs(ctx)
	if err != nil {
		return measured, fmt.Errorf("dead jobs: %w", err)
	}
	for _, row := range deadJobs {
		measured.deadJobs[row.Kind] = float64(row.Jobs)
	}
	measured.faults, err = queries.ListSchemaFaults(ctx, time.Now().Add(-time.Hour), maxFaults)
	if err != nil {
		return measured, fmt.Errorf("schema faults: %w", err)
	}
	queues, err := queries.MeasureQueues(ctx)
	if err != nil {
		return measured, fmt.Errorf("queues: %w", err)
	}
	for _, queue := range m.plan.Queues() {
		measured.queues[queue], measured.oldest[queue] = 0, 0 // a series that goes is no news of an empty queue
	}
	for _, row := range queues {
		measured.queues[row.Queue], measured.oldest[row.Queue] = float64(row.Jobs), row.OldestSeconds
	}
	var kinds []string
	var limits []float64
	for _, entry := range m.plan.Entries() {
		kinds = append(kinds, entry.Job)
		limits = append(limits, (entry.Timeout + overdueGrace).Seconds())
	}
	overdue, err := queries.MeasureOverdue(ctx, kinds, limits)
	if err != nil {
		return measured, fmt.Errorf("overdue jobs: %w", err)
	}
	for _, row := range overdue {
		measured.overdue[row.Kind] = float64(row.Jobs)
	}
	crons, err := queries.MeasureCrons(ctx, kinds)
	if err != nil {
		return measured, fmt.Errorf("crons: %w", err)
	}
	for _, row := range crons {
		measured.crons[row.Name] = row.Seconds
	}
	webhooks, err := queries.MeasureWebhooks(ctx)
	if err != nil {
		return measured, fmt.Errorf("webhooks: %w", err)
	}
	for _, row := range webhooks {
		organization := row.OrganizationID.String()
		measured.webhooksDisabled[organization], measured.webhooksFaulty[organization] = float64(row.Disabled), float64(row.Faulty)
	}
	minutes, err := queries.ListWorkerMinutes(ctx)
	if err != nil {
		return measured, fmt.Errorf("workers: %w", err)
	}
	for worker, stats := range sumMinutes(minutes) {
		measured.attempts[worker] = stats.Attempts
		measured.failRate[worker] = float64(stats.Failed) / float64(stats.Attempts)
		measured.p95[worker] = percentile(stats.Durations, 0.95)
	}
	return measured, nil
}

func sumMinutes(minutes []db.ListWorkerMinutesRow) map[string]*eventlog.WorkerStats {
	sums := make(map[string]*eventlog.WorkerStats)
	for _, minute := range minutes {
		sum, ok := sums[minute.Worker]
		if !ok {
			sum = &eventlog.WorkerStats{Durations: make([]int64, len(eventlog.DurationBuckets())+1)}
			sums[minute.Worker] = sum
		}
		sum.Add(eventlog.WorkerStats{Attempts: minute.Attempts, Failed: minute.Failed, Durations: minute.Durations})
	}
	return sums
}

// percentile reads a share off the buckets of a histogram, as far as they tell:
// between the bounds of a bucket the values count as spread evenly, and what is
// beyond the last bound counts as the bound.
func percentile(counts []int64, share float64) float64 {
	bounds := eventlog.DurationBuckets()
	total := int64(0)
	for _, n := range counts {
		total += n
	}
	if total == 0 {
		return 0
	}
	rank, below, low := share*float64(total), 0.0, 0.0
	for i, bound := range bounds {
		n := float64(counts[i])
		if below+n >= rank && n > 0 {
			return low + (bound-low)*(rank-below)/n
		}
		below += n
		low = bound
	}
	return low
}
