package observe

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/metric"
	"go.uber.org/zap"

	"afluente/db"
	"afluente/eventlog"
)

const (
	// interval is between two looks at the database, and leaseDuration how long
	// the process that looks is the only one: after it was killed the next one
	// takes over in time to tell of a dead letter within a minute.
	interval      = 10 * time.Second
	leaseDuration = 40 * time.Second
	leaseName     = "monitor"

	// passTimeout is less than the lease, so that nobody tells what another
	// process tells already.
	passTimeout = 30 * time.Second

	// maxMeasuring is the largest share of the time that goes into measuring:
	// the larger the backlog, the more rarely it is counted.
	maxMeasuring = 0.05

	// databaseGrace is how long the database may be gone before people are told.
	databaseGrace = 30 * time.Second
)

// MonitorConfig is what a [Monitor] is made of.
type MonitorConfig struct {
	Pool      *pgxpool.Pool
	Plan      *eventlog.Plan
	Log       *zap.Logger
	Telemetry *eventlog.Telemetry
	Meter     metric.Meter
	// Channels are told everything.
	Channels []Channel
	// Routes are channels that are also told of one consumer, by its name.
	Routes map[string]Channel
	// ConsoleURL is where River UI is, for the notices.
	ConsoleURL string
}

// Monitor measures the bus and tells people. Each process runs one; one at a
// time measures and tells.
type Monitor struct {
	pool       *pgxpool.Pool
	plan       *eventlog.Plan
	log        *zap.Logger
	telemetry  *eventlog.Telemetry
	channels   []Channel
	routes     map[string]Channel
	consoleURL string
	holder     uuid.UUID
	interval   time.Duration // but in tests
	pause      time.Duration // alertPause, but in tests
	now        func() time.Time

	last        atomic.Pointer[measurement] // nil while another process measures
	nextMeasure time.Time
	down        outage
}

// NewMonitor returns a monitor, not running, and registers its metrics.
func NewMonitor(config MonitorConfig) (*Monitor, error) {
	m := &Monitor{
		pool:       config.Pool,
		plan:       config.Plan,
		log:        config.Log.Named("monitor"),
		telemetry:  config.Telemetry,
		channels:   config.Channels,
		routes:     config.Routes,
		consoleURL: config.ConsoleURL,
		holder:     uuid.New(),
		interval:   interval,
		pause:      alertPause,
		now:        time.Now,
	}
	return m, m.register(config.Meter)
}

// Run looks until ctx ends, then returns nil. It outlives every error.
func (m *Monitor) Run(ctx context.Context) error {
	ticker := time.NewTicker(m.interval)
	defer ticker.Stop()
	for {
		if err := m.Pass(ctx); err != nil && ctx.Err() == nil {
			m.log.Error("look at the bus failed, will be retried", zap.Error(err))
		}
		select {
		case <-ctx.Done():
			m.stop(ctx)
			return nil
		case <-ticker.C:
		}
	}
}

// stop adds what was counted last, and lets the next process measure at once.
func (m *Monitor) stop(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	err := errors.Join(m.telemetry.Flush(ctx, m.pool), db.New(m.pool).ReleaseLease(ctx, leaseName, m.holder))
	if err != nil {
		m.log.Warn("stopped without a word to the database", zap.Error(err))
	}
}

// Pass adds what this process counted to that of the others, and, where no
// other process does, measures and tells. Each part is tried, also after the one
// before has failed.
func (m *Monitor) Pass(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, passTimeout)
	defer cancel()
	queries := db.New(m.pool)
	leads, err := queries.AcquireLease(ctx, leaseName, m.holder, leaseDuration)
	m.watchDatabase(ctx, err)
	if err != nil {
		return fmt.Errorf("acquire lease: %w", err)
	}
	flushErr := m.telemetry.Flush(ctx, m.pool)
	if !leads {
		m.last.Store(nil)
		return flushErr
	}
	return errors.Join(flushErr, m.measureAll(ctx), m.alert(ctx), queries.DeleteOldWorkerMinutes(ctx))
}

// measureAll measures, unless the last time took so long that it is too early.
func (m *Monitor) measureAll(ctx context.Context) error {
	start := m.now()
	if m.last.Load() != nil && start.Before(m.nextMeasure) {
		return nil
	}
	measured, err := m.measure(ctx)
	took := m.now().Sub(start)
	m.nextMeasure = start.Add(time.Duration(float64(took) / maxMeasuring))
	if err != nil {
		return err
	}
	m.last.Store(&measured)
	return nil
}
