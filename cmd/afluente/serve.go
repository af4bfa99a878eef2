package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sync/errgroup"

	"afluente/db"
	"afluente/db/migrate"
	"afluente/eventlog"
	"afluente/jobs"
	"afluente/jobs/archive"
	"afluente/jobs/waha"
)

// roles says which parts of the program a process runs.
type roles struct {
	queues []string // nil: all; empty: none
	bridge bool
	crons  bool
}

func newServe(load func() (Config, error)) *cobra.Command {
	run := roles{}
	var noBridge, noCrons bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the bridge, the workers and the web server",
		Long: `Run the bridge, the workers and the web server until SIGINT or SIGTERM.

Any number of processes may serve one database. --queues, --no-bridge and
--no-crons split the work over them: every event needs a bridge somewhere, every
cron a process that fires it, and every queue one that works on it. --queues=
with nothing works on none.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := load()
			if err != nil {
				return err
			}
			run.bridge, run.crons = !noBridge, !noCrons
			if cmd.Flags().Changed("queues") {
				run.queues = slices.DeleteFunc(run.queues, func(queue string) bool { return queue == "" })
				if run.queues == nil {
					run.queues = []string{}
				}
			}
			log := newLogger(config.LogLevel, zapcore.NewJSONEncoder, zapcore.AddSync(cmd.ErrOrStderr()))
			log.Info("settings", config.fields()...)
			pool, err := openPool(cmd.Context(), config)
			if err != nil {
				return err
			}
			defer pool.Close()
			if err := requireMigrated(cmd.Context(), pool); err != nil {
				return err
			}
			listener, err := listen(cmd.Context(), config)
			if err != nil {
				return err
			}
			return (&program{config: config, roles: run, pool: pool, listener: listener, log: log}).run(cmd.Context())
		},
	}
	cmd.Flags().StringSliceVar(&run.queues, "queues", nil, "work on these queues only, comma separated")
	cmd.Flags().BoolVar(&noBridge, "no-bridge", false, "leave fanning events out to other processes")
	cmd.Flags().BoolVar(&noCrons, "no-crons", false, "leave firing crons to other processes")
	return cmd
}

func openPool(ctx context.Context, config Config) (*pgxpool.Pool, error) {
	poolConfig, err := newPoolConfig(config)
	if err != nil {
		return nil, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, fmt.Errorf("connect to database: %w", err)
	}
	return pool, nil
}

func newPoolConfig(config Config) (*pgxpool.Config, error) {
	if config.DatabaseURL == "" {
		return nil, &usageError{errNoDatabase}
	}
	poolConfig, err := pgxpool.ParseConfig(config.DatabaseURL)
	if err != nil {
		return nil, errors.New("parse DATABASE_URL: not a PostgreSQL URL")
	}
	poolConfig.MaxConns = int32(config.MaxConns)
	if poolConfig.ConnConfig.RuntimeParams["application_name"] == "" {
		poolConfig.ConnConfig.RuntimeParams["application_name"] = "afluente"
	}
	if config.PollOnly { // a transaction pooler does not keep prepared statements, nor settings
		poolConfig.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
		poolConfig.AfterConnect = nameTypes
	} else {
		poolConfig.AfterConnect = setUpSession
	}
	return poolConfig, nil
}

// nameTypes tells pgx, which does not ask the server without prepared statements,
// what the types of our arguments are called there.
func nameTypes(_ context.Context, conn *pgx.Conn) error {
	conn.TypeMap().RegisterDefaultPgType(uuid.UUID{}, "uuid")
	conn.TypeMap().RegisterDefaultPgType([]uuid.UUID{}, "_uuid")
	return nil
}

// setUpSession sets what sessions of this program need, whatever the database or the
// role say. All of it is written for READ COMMITTED, where transactions that meet
// wait for each other; stricter, most of them would fail. And a machine that
// vanishes or stands still in the middle of a transaction does not keep its locks.
func setUpSession(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, sessionSettings) //nolint:forbidigo // settings, before there is a query
	if err != nil {
		return fmt.Errorf("set up session: %w", err)
	}
	return nil
}

// sessionSettings has a time that is shorter than that after which jobs of a lost
// process run elsewhere.
const sessionSettings = `SET default_transaction_isolation = 'read committed'; SET idle_in_transaction_session_timeout = '30s'`

// withPool loads the settings and calls f with a pool that is closed after it.
func withPool(ctx context.Context, load func() (Config, error), f func(*pgxpool.Pool) error) error {
	config, err := load()
	if err != nil {
		return err
	}
	pool, err := openPool(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	return f(pool)
}

// requireMigrated returns an error that says what to do when the database is
// older than the program.
func requireMigrated(ctx context.Context, pool *pgxpool.Pool) error {
	list, err := migrate.List(ctx, pool)
	if err != nil {
		return err
	}
	pending := 0
	for _, migration := range list {
		if !migration.Applied {
			pending++
		}
	}
	if pending > 0 {
		return fmt.Errorf("the database lacks %d of %d migrations: run 'afluente migrate up'", pending, len(list))
	}
	return nil
}

// newLogger writes times as RFC 3339 and, at error level, no stack traces: the
// text says what went wrong where.
func newLogger(
	level zapcore.Level, encoder func(zapcore.EncoderConfig) zapcore.Encoder, sink zapcore.WriteSyncer,
) *zap.Logger {
	config := zap.NewProductionEncoderConfig()
	config.TimeKey = "time"
	config.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	config.EncodeDuration = zapcore.StringDurationEncoder
	return zap.New(zapcore.NewCore(encoder(config), zapcore.Lock(sink), level))
}

func listen(ctx context.Context, config Config) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", config.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen: %w (choose another address with --listen)", err)
	}
	return listener, nil
}

// program is one process of the bus.
type program struct {
	config   Config
	roles    roles
	pool     *pgxpool.Pool // left open
	listener net.Listener  // closed by run
	log      *zap.Logger
}

// run wires the program and runs it until ctx ends or one of its parts fails.
func (p *program) run(ctx context.Context) (err error) {
	defer p.listener.Close() // again, for an error before it is served
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	wahaHTTP := &http.Client{Transport: jobs.Correlate(http.DefaultTransport)}
	webhooks, err := newWebhooks(p.config, p.pool, p.log)
	if err != nil {
		return err
	}
	plan, err := eventlog.Compile(jobs.All(jobs.Deps{
		Archive:  newArchive(p.config, p.pool),
		Pool:     p.pool,
		Events:   eventlog.NewEvents(p.pool),
		WAHA:     &waha.Client{BaseURL: p.config.WAHAURL, APIKey: p.config.WAHAAPIKey, HTTP: wahaHTTP},
		Webhooks: webhooks,
	})...)
	if err != nil {
		return fmt.Errorf("compile plan: %w", err)
	}
	if plan, err = overrideCrons(plan, p.config.CronsFile); err != nil {
		return &usageError{err}
	}
	scheduler, err := eventlog.NewScheduler(eventlog.SchedulerConfig{Pool: p.pool, Plan: plan, Log: p.log})
	if err != nil {
		return err
	}
	p.config.Listen = p.listener.Addr().String() // the port, where the system chose it
	observers, err := newObservers(ctx, p.config, p.pool, plan, p.log)
	if err != nil {
		return err
	}
	defer observers.shutDown(ctx)
	client, err := eventlog.NewClient(eventlog.ClientConfig{
		Pool:        p.pool,
		Plan:        plan,
		Log:         p.log,
		Queues:      p.roles.queues,
		MaxWorkers:  p.config.MaxWorkers,
		StopTimeout: p.config.StopTimeout,
		PollOnly:    p.config.PollOnly,
		Telemetry:   observers.telemetry,
		Middleware:  observers.middleware,
	})
	if err != nil {
		return &usageError{err}
	}
	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{
		Pool:      p.pool,
		Plan:      plan,
		Log:       p.log,
		MaxBatch:  p.config.Batch,
		PollOnly:  p.config.PollOnly,
		Telemetry: observers.telemetry,
	})
	if err != nil {
		return err
	}

	g, ctx := errgroup.WithContext(ctx)
	tokens, err := newTokens(ctx, p.config, p.log)
	if err != nil {
		return err
	}
	streaming := &streamHandler{tokens: tokens, heartbeat: streamHeartbeat, stopping: ctx.Done()}
	if tokens != nil && !p.config.PollOnly {
		streaming.stream = eventlog.NewStream(p.pool, p.log)
	}
	readiness := &health{pool: p.pool, retention: p.config.Retention, log: p.log}
	if p.roles.bridge {
		readiness.bridge, readiness.listens = bridge, !p.config.PollOnly
	}
	handler, err := newHandler(ctx, p.config, backend{
		stream: streaming, metrics: observers.metrics, health: readiness, pool: p.pool, client: client, log: p.log,
		webhooks: &webhookAPI{webhooks: webhooks, tokens: tokens, roles: p.config.WebhookRoles, log: p.log.Named("webhooks")},
		crons:    &cronHandler{scheduler: scheduler, secrets: p.config.CronSecrets, log: p.log.Named("crons")},
	})
	if err != nil {
		return err
	}
	if err := eventlog.Register(ctx, p.pool, plan); err != nil {
		return err
	}
	if err := scheduler.Register(ctx); err != nil {
		return err
	}
	// The bus works without: the default partition takes what comes meanwhile.
	if _, err := db.New(p.pool).CreateEventLogPartitions(ctx); err != nil {
		p.log.Warn("partitions not created", zap.Error(err))
	}

	g.Go(func() error { return serveHTTP(ctx, p.listener, handler) })
	g.Go(func() error { return observers.monitor.Run(ctx) })
	if streaming.stream != nil {
		g.Go(func() error { return streaming.stream.Run(ctx) })
	}
	if p.roles.bridge {
		g.Go(func() error { return bridge.Run(ctx) })
	}
	if p.roles.crons {
		g.Go(func() error { return scheduler.Run(ctx) })
	}
	queues := p.roles.queues
	if queues == nil {
		queues = plan.Queues()
	}
	if len(queues) > 0 {
		g.Go(func() error { return work(ctx, client) })
	}
	p.log.Info("serving", zap.Stringer("address", p.listener.Addr()),
		zap.Bool("bridge", p.roles.bridge), zap.Bool("crons", p.roles.crons), zap.Strings("queues", queues))
	err = g.Wait()
	p.log.Info("stopped")
	return err
}

func newArchive(config Config, pool *pgxpool.Pool) *archive.Archive {
	return &archive.Archive{Pool: pool, URL: config.ArchiveURL, Retention: config.Retention, Now: time.Now}
}

// work runs the client until ctx ends and its jobs have stopped.
func work(ctx context.Context, client *river.Client[pgx.Tx]) error {
	if err := client.Start(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("start river: %w", err)
	} else if err == nil {
		<-client.Stopped()
	}
	return nil
}

// serveHTTP serves until ctx ends and then gives open requests 5 s.
func serveHTTP(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		stopped <- server.Shutdown(ctx)
	})
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve http: %w", err)
	}
	if err := <-stopped; err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("stop http: %w", err)
	}
	return nil
}
