// Package dbtest gives each test a migrated PostgreSQL database of its own.
//
// The server is the one that DATABASE_URL names, else a private one that lives
// as long as the test binary. A database is cloned from a template, which is
// made once for each state of the migrations; test binaries that run at the
// same time share it.
package dbtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"afluente/db/embedded"
	"afluente/db/migrate"
	"afluente/sql"
)

// setup is done once a binary, by the first test that wants a database.
var setup struct {
	once     sync.Once
	server   *embedded.Server // nil with DATABASE_URL
	url      string
	template string
	err      error
}

// Main runs the tests of a package and then stops the server that they
// started, if any. Call it from TestMain: os.Exit(dbtest.Main(m)).
func Main(m *testing.M) int {
	code := m.Run()
	if setup.server != nil {
		if err := setup.server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, "dbtest: stop server:", err)
			return max(code, 1)
		}
	}
	return code
}

// New returns a pool of four connections to a new migrated database. The
// database goes with the test, unless the test failed on a server that stays.
func New(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	config, err := pgxpool.ParseConfig(URL(tb))
	if err != nil {
		tb.Fatal("parse database URL:", err)
	}
	config.MaxConns = 4
	return Pool(tb, config)
}

// Pool opens a pool that is closed with the test.
func Pool(tb testing.TB, config *pgxpool.Config) *pgxpool.Pool {
	tb.Helper()
	pool, err := pgxpool.NewWithConfig(tb.Context(), config)
	if err != nil {
		tb.Fatal("open pool:", err)
	}
	tb.Cleanup(pool.Close)
	return pool
}

// URL is New for those who open their own connections.
func URL(tb testing.TB) string {
	tb.Helper()
	start(tb)
	return create(tb, setup.template)
}

// Empty returns the URL of a new database without any migration.
func Empty(tb testing.TB) string {
	tb.Helper()
	start(tb)
	return create(tb, "template0")
}

func start(tb testing.TB) {
	tb.Helper()
	setup.once.Do(func() { setup.err = startServer() })
	if setup.err != nil {
		tb.Fatal(setup.err)
	}
}

func create(tb testing.TB, template string) string {
	tb.Helper()
	name := "afluente_test_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	admin(tb, fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, template))
	tb.Cleanup(func() {
		if tb.Failed() && setup.server == nil {
			tb.Logf("database kept: %s", name)
			return
		}
		admin(tb, fmt.Sprintf("DROP DATABASE %s WITH (FORCE)", name))
	})
	return withDatabase(setup.url, name)
}

func admin(tb testing.TB, statement string) {
	tb.Helper()
	err := withConn(setup.url, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, statement)
		return err
	})
	if err != nil {
		tb.Fatalf("%s: %v", statement, err)
	}
}

func startServer() error {
	setup.url = os.Getenv("DATABASE_URL")
	if setup.url == "" {
		server, err := embedded.Start(context.Background(), embedded.Config{FastUnsafe: true})
		if err != nil {
			return fmt.Errorf("start database server: %w", err)
		}
		setup.server, setup.url = server, server.URL()
	}
	return withConn(setup.url, makeTemplate)
}

// makeTemplate makes the template database unless it is there. It takes an
// advisory lock, so that test binaries do not make it twice at the same time.
func makeTemplate(ctx context.Context, conn *pgx.Conn) error {
	version, err := schemaVersion()
	if err != nil {
		return err
	}
	setup.template = "afluente_template_" + version
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock(hashtextextended('afluente.dbtest', 0))"); err != nil {
		return fmt.Errorf("lock template: %w", err)
	}
	var exists bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1 AND datistemplate)",
		setup.template).Scan(&exists); err != nil {
		return fmt.Errorf("look for template: %w", err)
	}
	if exists {
		return nil
	}
	for _, statement := range []string{
		"DROP DATABASE IF EXISTS " + setup.template, // of a run that was killed half way
		"CREATE DATABASE " + setup.template + " TEMPLATE template0",
	} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return fmt.Errorf("create template: %w", err)
		}
	}
	pool, err := pgxpool.New(ctx, withDatabase(setup.url, setup.template))
	if err != nil {
		return fmt.Errorf("open template: %w", err)
	}
	_, err = migrate.Up(ctx, pool)
	pool.Close()
	if err != nil {
		return fmt.Errorf("migrate template: %w", err)
	}
	if _, err := conn.Exec(ctx, "ALTER DATABASE "+setup.template+" IS_TEMPLATE true ALLOW_CONNECTIONS false"); err != nil {
		return fmt.Errorf("seal template: %w", err)
	}
	return nil
}

// schemaVersion is a hash over all migrations and River's version.
func schemaVersion() (string, error) {
	hash := sha256.New()
	migrations, err := sql.Migrations()
	if err != nil {
		return "", fmt.Errorf("read migrations: %w", err)
	}
	err = fs.WalkDir(migrations, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(migrations, path)
		fmt.Fprintf(hash, "%s\n%s\n", path, content)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read migrations: %w", err)
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			if strings.HasPrefix(module.Path, "github.com/riverqueue/") {
				fmt.Fprintln(hash, module.Path, module.Version)
			}
		}
	}
	return hex.EncodeToString(hash.Sum(nil))[:16], nil
}

// withConn runs f on a connection to a database. Cloning fails while another
// test binary is connected to the template, so f runs again then.
func withConn(databaseURL string, f func(context.Context, *pgx.Conn) error) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, databaseURL)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	for {
		err = f(ctx, conn)
		pgErr, ok := errors.AsType[*pgconn.PgError](err)
		if !ok || pgErr.Code != pgerrcode.ObjectInUse {
			return err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

func withDatabase(databaseURL, name string) string {
	u, err := url.Parse(databaseURL)
	if err != nil || u.Scheme == "" { // the key=value form: the last one wins
		return databaseURL + " dbname=" + name
	}
	u.Path = "/" + name
	return u.String()
}
