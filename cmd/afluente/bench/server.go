package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"go.uber.org/zap"

	"afluente/db/migrate"
)

const (
	// prefix is what the names of all databases of all runs begin with.
	prefix = "afluente_bench_"

	// dropTimeout bounds the dropping of one database.
	dropTimeout = 30 * time.Second
)

// server is where databases are made and dropped.
type server struct {
	config    Config
	admin     *pgxpool.Pool
	prefix    string   // of the databases of this run
	databases []string // that are there, or half there
	unchecked bool     // CHECKPOINT was refused
}

func openServer(ctx context.Context, config Config) (*server, error) {
	poolConfig := config.Pool.Copy()
	poolConfig.MaxConns = 1
	admin, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	if err := admin.Ping(ctx); err != nil {
		admin.Close()
		return nil, fmt.Errorf("connect to database: %w", err)
	}
	s := &server{config: config, admin: admin, prefix: prefix + strings.ReplaceAll(uuid.NewString(), "-", "")[:12]}
	config.Log.Info("making databases", zap.String("prefix", s.prefix))
	return s, nil
}

// settings are those of the server that decide about figures.
func (s *server) settings(ctx context.Context) (map[string]string, error) {
	settings := make(map[string]string)
	for _, name := range []string{
		"server_version", "shared_buffers", "max_wal_size", "fsync", "synchronous_commit", "full_page_writes", "autovacuum",
	} {
		var value string
		if err := s.admin.QueryRow(ctx, "SELECT current_setting($1)", name).Scan(&value); err != nil {
			return nil, fmt.Errorf("read setting %s: %w", name, err)
		}
		settings[name] = value
	}
	return settings, nil
}

// create makes a database, of a template or empty. Once begun it is not
// interrupted: the server might finish it after the database was dropped.
func (s *server) create(ctx context.Context, name, template string) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	name = s.prefix + "_" + name
	s.databases = append(s.databases, name)
	_, err := s.admin.Exec(context.WithoutCancel(ctx), "CREATE DATABASE "+name+" TEMPLATE "+template)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == pgerrcode.InsufficientPrivilege {
		return "", fmt.Errorf("create database: %w (bench needs a role with CREATEDB)", err)
	} else if err != nil {
		return "", fmt.Errorf("create database %s: %w", name, err)
	}
	return name, nil
}

// drop does so whether or not ctx has ended.
func (s *server) drop(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	if _, err := s.admin.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	s.databases = slices.DeleteFunc(s.databases, func(other string) bool { return other == name })
	return nil
}

// close drops what is left and disconnects.
func (s *server) close(ctx context.Context) error {
	var errs []error
	for _, name := range slices.Clone(s.databases) {
		errs = append(errs, s.drop(ctx, name))
	}
	s.admin.Close()
	return errors.Join(errs...)
}

func (s *server) connect(ctx context.Context, database string) (*pgxpool.Pool, error) {
	config := s.config.Pool.Copy()
	config.ConnConfig.Database = database
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", database, err)
	}
	return pool, nil
}

// makeTemplates makes the two databases that those of the runs are copies of:
// one as River's own migrations leave it, and one as ours do.
func (s *server) makeTemplates(ctx context.Context) error {
	for name, build := range map[string]func(context.Context, *pgxpool.Pool) error{
		"plain": func(ctx context.Context, pool *pgxpool.Pool) error {
			migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
			if err != nil {
				return fmt.Errorf("load river migrations: %w", err)
			}
			if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
				return fmt.Errorf("migrate river up: %w", err)
			}
			return nil
		},
		"ours": func(ctx context.Context, pool *pgxpool.Pool) error {
			if _, err := migrate.Up(ctx, pool); err != nil {
				return err
			}
			if _, err := pool.Exec(ctx, "INSERT INTO public.organizations (id) VALUES ($1), ($2)", organization(), visitor()); err != nil {
				return fmt.Errorf("insert organizations: %w", err)
			}
			return nil
		},
	} {
		database, err := s.create(ctx, name, "template0")
		if err != nil {
			return err
		}
		pool, err := s.connect(ctx, database)
		if err != nil {
			return err
		}
		err = build(ctx, pool)
		if err == nil {
			_, err = pool.Exec(ctx, "VACUUM ANALYZE") // the catalogues too
		}
		pool.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// organization is the one that emits.
func organization() uuid.UUID { return uuid.UUID{15: 1} }

// visitor is another one, which emits little beside it.
func visitor() uuid.UUID { return uuid.UUID{15: 2} }

// run runs a variant in a new database.
func (s *server) run(ctx context.Context, v variant, fanOut int) (_ figures, err error) {
	template, tables := s.prefix+"_plain", "public.river_job"
	if v.ours {
		template, tables = s.prefix+"_ours", "river.river_job, public.event_log, public.event_lanes, public.event_consumers, public.event_types"
	}
	name, err := s.create(ctx, "run", template)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.drop(ctx, name)) }()
	pool, err := s.connect(ctx, name)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	b := &bus{
		server: s, pool: pool, tables: tables, events: max(1, s.config.Jobs/fanOut), maxWorkers: s.config.MaxWorkers, tally: &tally{},
	}
	b.consumers = consumers(b.tally)[:fanOut]
	return v.run(ctx, b)
}
