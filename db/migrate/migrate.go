// Package migrate brings a database to the schema that this program needs:
// River's tables in the schema "river" and ours in "public".
//
// Each migration commits by itself, so a run that stops half way leaves whole
// migrations behind and the next run goes on from there. Processes that
// migrate at the same time take turns by an advisory lock.
package migrate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	afluentesql "afluente/sql"
)

const (
	// RiverSchema is where River's tables live. It is never "public": on
	// Supabase all of public is reachable over the REST API.
	RiverSchema = "river"

	// versionTable is qualified, so that a hostile search_path cannot move it.
	versionTable = "public.afluente_migrations"
)

// Status is one migration and whether the database has it.
type Status struct {
	// Component is "river" or "afluente".
	Component string `json:"component"`
	Version   int64  `json:"version"`
	Name      string `json:"name"`
	Applied   bool   `json:"applied"`
}

// Up applies every migration that the database lacks: River's first, since our
// settle trigger stands on river.river_job. It returns how many it applied.
func Up(ctx context.Context, pool *pgxpool.Pool) (int, error) {
	applied := 0
	err := with(ctx, pool, func(m *migrator) error {
		if _, err := m.db.ExecContext(ctx, `CREATE SCHEMA IF NOT EXISTS `+RiverSchema); err != nil {
			return fmt.Errorf("create schema %s: %w", RiverSchema, err)
		}
		river, err := m.river.Migrate(ctx, rivermigrate.DirectionUp, nil)
		if err != nil {
			return fmt.Errorf("migrate river up: %w", err)
		}
		ours, err := m.goose.Up(ctx)
		if err != nil {
			return fmt.Errorf("migrate up: %w", err)
		}
		applied = len(river.Versions) + len(ours)
		return nil
	})
	return applied, err
}

// Down rolls our migrations back until target is the newest one left. With
// target 0 it rolls back all of ours and then drops River's tables and the
// schema "river", with every job in them. It returns how many it rolled back.
func Down(ctx context.Context, pool *pgxpool.Pool, target int64) (int, error) {
	rolledBack := 0
	err := with(ctx, pool, func(m *migrator) error {
		ours, err := m.goose.DownTo(ctx, target)
		if err != nil {
			return fmt.Errorf("migrate down to %d: %w", target, err)
		}
		rolledBack = len(ours)
		if target > 0 {
			return nil
		}
		river, err := m.river.Migrate(ctx, rivermigrate.DirectionDown, &rivermigrate.MigrateOpts{TargetVersion: -1})
		if err != nil {
			return fmt.Errorf("migrate river down: %w", err)
		}
		rolledBack += len(river.Versions)
		for _, drop := range []string{`DROP TABLE ` + versionTable, `DROP SCHEMA IF EXISTS ` + RiverSchema} {
			if _, err := m.db.ExecContext(ctx, drop); err != nil {
				return fmt.Errorf("%s: %w", drop, err)
			}
		}
		return nil
	})
	return rolledBack, err
}

// List returns every migration of River and of ours, oldest first, and changes
// nothing but for creating the version table on a database that lacks it. It also
// works through a transaction pooler, which keeps neither a session's lock nor its
// settings.
func List(ctx context.Context, pool *pgxpool.Pool) ([]Status, error) {
	var list []Status
	err := open(ctx, pool.Config(), func(m *migrator) error {
		existing, err := m.river.ExistingVersions(ctx)
		if err != nil {
			return fmt.Errorf("read river migrations: %w", err)
		}
		applied := make(map[int]bool, len(existing))
		for _, version := range existing {
			applied[version.Version] = true
		}
		for _, version := range m.river.AllVersions() {
			list = append(list, Status{
				Component: "river",
				Version:   int64(version.Version),
				Name:      version.Name,
				Applied:   applied[version.Version],
			})
		}
		ours, err := m.goose.Status(ctx)
		if err != nil {
			return fmt.Errorf("read migrations: %w", err)
		}
		for _, migration := range ours {
			list = append(list, Status{
				Component: "afluente",
				Version:   migration.Source.Version,
				Name:      migration.Source.Path,
				Applied:   migration.State == goose.StateApplied,
			})
		}
		return nil
	})
	return list, err
}

type migrator struct {
	db    *sql.DB
	goose *goose.Provider
	river *rivermigrate.Migrator[pgx.Tx]
}

// with runs f over connections of its own, whose search_path is fixed whatever
// the role or the database say, while nobody else does.
func with(ctx context.Context, pool *pgxpool.Pool, f func(*migrator) error) error {
	config := pool.Config()
	config.ConnConfig.RuntimeParams["search_path"] = "public"
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 600)) // each second, for 10 min
	if err != nil {
		return fmt.Errorf("make migration lock: %w", err)
	}
	return open(ctx, config, func(m *migrator) (err error) {
		// One lock over both: goose's own would leave River's half unguarded.
		conn, err := m.db.Conn(ctx)
		if err != nil {
			return fmt.Errorf("connect: %w", err)
		}
		defer func() { err = errors.Join(err, conn.Close()) }()
		if err := locker.SessionLock(ctx, conn); err != nil {
			return fmt.Errorf("lock migrations: %w", err)
		}
		defer func() { err = errors.Join(err, locker.SessionUnlock(context.WithoutCancel(ctx), conn)) }()
		return f(m)
	})
}

// open runs f over connections of its own.
func open(ctx context.Context, config *pgxpool.Config, f func(*migrator) error) (err error) {
	config.MaxConns = 3 // the session lock, goose and River
	config.MinConns = 0
	config.MinIdleConns = 0
	own, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("open migration pool: %w", err)
	}
	defer own.Close()
	database := stdlib.OpenDBFromPool(own)
	defer func() { err = errors.Join(err, database.Close()) }()

	migrations, err := afluentesql.Migrations()
	if err != nil {
		return fmt.Errorf("read embedded migrations: %w", err)
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, database, migrations,
		goose.WithDisableGlobalRegistry(true), goose.WithTableName(versionTable))
	if err != nil {
		return fmt.Errorf("load migrations: %w", err)
	}
	river, err := rivermigrate.New(riverpgxv5.New(own), &rivermigrate.Config{Schema: RiverSchema})
	if err != nil {
		return fmt.Errorf("load river migrations: %w", err)
	}
	return f(&migrator{db: database, goose: provider, river: river})
}
