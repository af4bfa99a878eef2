package sql_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"afluente/db/dbtest"
	"afluente/eventlog"
)

func TestMain(m *testing.M) { os.Exit(dbtest.Main(m)) }

// querier is a pool or a connection.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// column returns the only column of a query.
func column[T any](t *testing.T, q querier, query string, args ...any) []T {
	t.Helper()
	rows, err := q.Query(t.Context(), query, args...)
	require.NoError(t, err, query)
	values, err := pgx.CollectRows(rows, pgx.RowTo[T])
	require.NoError(t, err, query)
	return values
}

// one returns the only value of a query.
func one[T any](t *testing.T, q querier, query string, args ...any) T {
	t.Helper()
	values := column[T](t, q, query, args...)
	require.Len(t, values, 1, query)
	return values[0]
}

// run runs a statement and returns its error, which must not end the test.
func run(t *testing.T, q querier, statement string, args ...any) error {
	t.Helper()
	rows, err := q.Query(t.Context(), statement, args...)
	if err != nil {
		return err
	}
	rows.Close()
	return rows.Err()
}

func exec(t *testing.T, q querier, statement string, args ...any) {
	t.Helper()
	require.NoError(t, run(t, q, statement, args...), statement)
}

// requireCode demands that err is PostgreSQL's error with a code and a text.
func requireCode(t *testing.T, err error, code, text string) {
	t.Helper()
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, code, pgErr.Code, pgErr.Message)
	require.Contains(t, pgErr.Message, text)
}

func requireDenied(t *testing.T, err error) {
	t.Helper()
	requireCode(t, err, pgerrcode.InsufficientPrivilege, "")
}

func newOrganization(t *testing.T, pool *pgxpool.Pool) uuid.UUID {
	t.Helper()
	return one[uuid.UUID](t, pool, "INSERT INTO organizations DEFAULT VALUES RETURNING id")
}

// as opens a connection with a role and the claims of a token, as PostgREST
// gives each request.
func as(t *testing.T, pool *pgxpool.Pool, role, claims string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Second)
		defer cancel()
		require.NoError(t, conn.Close(ctx))
	})
	exec(t, conn, "SELECT set_config('request.jwt.claims', $1, false)", claims)
	exec(t, conn, "SET ROLE "+pgx.Identifier{role}.Sanitize())
	return conn
}

// tenant is a connection of a signed-in user of an organization.
func tenant(t *testing.T, pool *pgxpool.Pool, organization uuid.UUID) *pgx.Conn {
	t.Helper()
	return as(t, pool, "authenticated", `{"sub": "user-1", "organization_id": "`+organization.String()+`"}`)
}

// newBridge returns a bridge that knows no consumer of its own.
func newBridge(t *testing.T, pool *pgxpool.Pool) *eventlog.Bridge {
	t.Helper()
	plan, err := eventlog.Compile()
	require.NoError(t, err)
	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: pool, Plan: plan, Log: zap.NewNop()})
	require.NoError(t, err)
	return bridge
}

func step(t *testing.T, bridge *eventlog.Bridge) {
	t.Helper()
	_, err := bridge.Step(t.Context())
	require.NoError(t, err)
}
