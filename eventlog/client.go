package eventlog

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"go.uber.org/zap"
	"go.uber.org/zap/exp/zapslog"
	"go.uber.org/zap/zapcore"

	"afluente/db"
	"afluente/db/migrate"
)

const (
	// rescueAfter is how long a job may run before it is taken for lost, unless
	// its own Timeout is longer. River looks every 30 s and a new leader takes
	// up to 20 s more, so a killed process's jobs run elsewhere within 2 min.
	rescueAfter = time.Minute

	// FetchCooldown bounds how often a queue is asked for work, and so the
	// latency of a job and the rate of one client.
	FetchCooldown = 10 * time.Millisecond

	// NotifyCooldown bounds how often a client tells of the jobs it inserts. It is
	// the least that River takes: of those in between nobody is told, and they wait
	// for the next poll, a second at most.
	NotifyCooldown = river.FetchCooldownMin

	keepForever = -1
)

// ClientConfig is what a River client of this program is made of.
type ClientConfig struct {
	// Pool needs a connection for each two or so concurrent jobs, and a few more.
	Pool *pgxpool.Pool
	Plan *Plan
	Log  *zap.Logger
	// Queues are those of the plan to work on; nil means all of them.
	Queues []string
	// MaxWorkers is how many jobs of one queue run at a time; 0 means 100.
	MaxWorkers int
	// StopTimeout is how long a stop waits for running jobs before it cancels
	// their contexts; 0 means for ever.
	StopTimeout time.Duration
	// PollOnly does without LISTEN, for a pool behind a transaction pooler.
	PollOnly bool
	// Telemetry counts the attempts; nil for none.
	Telemetry *Telemetry
	// Middleware goes around every job, in this order, inside what this package
	// does itself.
	Middleware []rivertype.Middleware
	// Backoff is the delays between attempts; nil means [Backoff].
	Backoff []time.Duration
}

// NewClient returns a River client, not started, that works the plan's jobs
// and fetches no others. Discarded and cancelled jobs are kept for ever,
// completed ones for a day.
func NewClient(config ClientConfig) (*river.Client[pgx.Tx], error) {
	queues := config.Queues
	if queues == nil {
		queues = config.Plan.Queues()
	}
	maxWorkers := config.MaxWorkers
	if maxWorkers == 0 {
		maxWorkers = 100
	}
	queueConfigs := make(map[string]river.QueueConfig, len(queues))
	for _, queue := range queues {
		if !slices.Contains(config.Plan.Queues(), queue) {
			return nil, fmt.Errorf("make river client: no job runs on queue %q; the queues are %q", queue, config.Plan.Queues())
		}
		queueConfigs[queue] = river.QueueConfig{FetchCooldown: FetchCooldown, MaxWorkers: maxWorkers}
	}
	delays := config.Backoff
	if delays == nil {
		delays = Backoff()
	}
	client, err := river.NewClient(riverpgxv5.New(config.Pool), &river.Config{
		CancelledJobRetentionPeriod: keepForever,
		DiscardedJobRetentionPeriod: keepForever,
		FetchCooldown:               NotifyCooldown,
		FetchOnlyKnownKinds:         true, // a newer process's jobs wait for it
		JobTimeout:                  rescueAfter / 2,
		Logger:                      newSlog(config.Log),
		MaxAttempts:                 MaxAttemptsDefault,
		Middleware: append([]rivertype.Middleware{
			&guard{
				events:    NewEvents(config.Pool),
				log:       config.Log.Named("jobs"),
				telemetry: config.Telemetry,
				lanes:     newLaneCompleter(config.Pool),
			},
		}, config.Middleware...),
		PollOnly:             config.PollOnly,
		Queues:               queueConfigs,
		RescueStuckJobsAfter: rescueAfter,
		RetryPolicy:          &retryPolicy{delays: delays, rescueAfter: rescueAfter, now: time.Now},
		Schema:               migrate.RiverSchema,
		SoftStopTimeout:      config.StopTimeout,
		Workers:              config.Plan.workers,
	})
	if err != nil {
		return nil, fmt.Errorf("make river client: %w", err)
	}
	return client, nil
}

// NewInserter returns a River client that only inserts and changes jobs, of any
// kind.
func NewInserter(pool *pgxpool.Pool, log *zap.Logger) (*river.Client[pgx.Tx], error) {
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		FetchCooldown: NotifyCooldown,
		Logger:        newSlog(log),
		Schema:        migrate.RiverSchema,
	})
	if err != nil {
		return nil, fmt.Errorf("make river client: %w", err)
	}
	return client, nil
}

// newSlog gives River, which logs through slog, the program's own logger. What
// River tells at info level is counts every few seconds; it is kept for those
// who want debug.
func newSlog(log *zap.Logger) *slog.Logger {
	core := log.Core()
	if !core.Enabled(zapcore.DebugLevel) && core.Enabled(zapcore.WarnLevel) {
		core = log.WithOptions(zap.IncreaseLevel(zapcore.WarnLevel)).Core()
	}
	return slog.New(zapslog.NewHandler(core, zapslog.WithName("river")))
}

// Register makes the plan's consumers known to the bridge of every process and
// the catalogue of events to the database, in one transaction. Events fanned
// out before do not reach a new consumer.
func Register(ctx context.Context, pool *pgxpool.Pool, plan *Plan) error {
	params := plan.registrations()
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		if err := RegisterTypes(ctx, tx); err != nil {
			return err
		}
		if len(params) == 0 {
			return nil
		}
		db.New(tx).RegisterConsumer(ctx, params).Exec(keepFirst(&err))
		return err
	})
	if err != nil {
		return fmt.Errorf("register consumers: %w", err)
	}
	return nil
}

// keepFirst returns what keeps the first error of a batch.
func keepFirst(err *error) func(int, error) {
	return func(_ int, execErr error) {
		if *err == nil {
			*err = execErr
		}
	}
}

func (p *Plan) registrations() []db.RegisterConsumerParams {
	var params []db.RegisterConsumerParams
	for _, d := range p.declarations { // in the order of their names, so that two processes cannot deadlock
		if d.project == nil {
			continue
		}
		consumer := db.RegisterConsumerParams{
			Name:        d.kind,
			EventTypes:  []string{d.eventType},
			Queue:       d.opts.Queue,
			Priority:    int16(d.opts.Priority),
			MaxAttempts: int16(d.opts.MaxAttempts),
			SkipsDead:   d.death == Skips,
		}
		if d.orderedBy != "" {
			consumer.OrderedBy = &d.orderedBy
		}
		if d.limit != nil {
			consumer.MaxPerOrganization = new(int32(*d.limit))
		}
		params = append(params, consumer)
	}
	return params
}
