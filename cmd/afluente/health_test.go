package main

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"afluente/db/dbtest"
)

func TestReadyzTellsTheTruth(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	bridge, err := newReplayBridge(pool)
	require.NoError(t, err)
	mustExec(t, pool, "INSERT INTO river.river_leader (leader_id, elected_at, expires_at) VALUES ('x', now(), now() + interval '1 hour')")
	ready := func(pool *pgxpool.Pool) (int, string) {
		h := &health{pool: pool, retention: 90 * 24 * time.Hour, bridge: bridge, listens: true, log: zap.NewNop()}
		response := httptest.NewRecorder()
		h.ServeHTTP(response, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/readyz", nil))
		return response.Code, response.Body.String()
	}
	code, body := ready(pool)
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Regexp(t, `bridge +fault +it has not looked for events yet`, body)

	_, err = bridge.Step(t.Context())
	require.NoError(t, err)
	code, body = ready(pool)
	require.Equal(t, http.StatusOK, code, body)
	require.Regexp(t, `bridge +ok`, body)
	require.Regexp(t, `listen +warn +the connection that hears of urgent events is lost`, body)

	mustExec(t, pool, "DELETE FROM river.river_leader")
	code, body = ready(pool)
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Regexp(t, `leader +fault`, body)

	gone, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none?connect_timeout=1")
	require.NoError(t, err)
	defer gone.Close()
	code, body = ready(gone)
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Regexp(t, `database +fault +it does not answer as it should`, body)
}

// An answer is good for some seconds, so that asking again and again costs
// nothing.
func TestReadyzAsksTheDatabaseRarely(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	h := &health{pool: pool, retention: 90 * 24 * time.Hour, log: zap.NewNop()}
	before := pool.Stat().AcquireCount()
	h.examine(t.Context())
	once := pool.Stat().AcquireCount()
	require.Greater(t, once, before)
	for range 10 {
		h.examine(t.Context())
	}
	require.Equal(t, once, pool.Stat().AcquireCount())
}
