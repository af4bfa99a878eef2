package eventlog_test

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
	"afluente/eventlog"
)

func TestMain(m *testing.M) { os.Exit(dbtest.Main(m)) }

func newOrganization(t testing.TB, pool *pgxpool.Pool) uuid.UUID {
	t.Helper()
	var id uuid.UUID
	require.NoError(t, pool.QueryRow(t.Context(), "INSERT INTO organizations DEFAULT VALUES RETURNING id").Scan(&id))
	return id
}

func exec(t testing.TB, pool *pgxpool.Pool, statement string, args ...any) {
	t.Helper()
	_, err := pool.Exec(context.WithoutCancel(t.Context()), statement, args...)
	require.NoError(t, err)
}

// drain steps the bridge until nothing is due.
func drain(t testing.TB, bridge *eventlog.Bridge) {
	t.Helper()
	for {
		events, err := bridge.Step(t.Context())
		require.NoError(t, err)
		if events == 0 {
			return
		}
	}
}

func waitABit(t testing.TB) {
	t.Helper()
	select {
	case <-time.After(20 * time.Millisecond):
	case <-t.Context().Done():
		require.NoError(t, t.Context().Err())
	}
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
