package bench

import (
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"afluente/db/dbtest"
)

func TestMain(m *testing.M) { os.Exit(dbtest.Main(m)) }

// The statement that the bridge is compared with makes the very jobs that the
// bridge makes.
func TestBoundInsertsTheBridgesJobs(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	_, err := pool.Exec(t.Context(), "INSERT INTO organizations (id) VALUES ($1)", organization())
	require.NoError(t, err)
	b := &bus{
		server: &server{config: Config{Batch: 3, Log: zap.NewNop()}},
		pool:   pool, events: 7, maxWorkers: 1, tally: &tally{}, consumers: consumers(nil)[:3],
	}
	_, bridge, err := b.ours(t.Context())
	require.NoError(t, err)
	require.NoError(t, b.emit(t.Context(), b.events))

	_, err = pool.Exec(t.Context(), insertJobs)
	require.NoError(t, err)
	bySQL := jobsIn(t, pool)
	require.Len(t, bySQL, 21)
	require.NoError(t, drain(t.Context(), bridge))
	require.Equal(t, bySQL, jobsIn(t, pool))
}

// A visit whose flood is over has measured nothing.
func TestFloodMustOutlastTheVisit(t *testing.T) {
	t.Parallel()
	b := &bus{pool: dbtest.New(t)}
	require.ErrorContains(t, b.outlasted(t.Context()), "the flood was over")
}

// jobsIn returns what is in all jobs but ids and times, and deletes them.
func jobsIn(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `WITH deleted AS (DELETE FROM river.river_job RETURNING *)
		SELECT (to_jsonb(d) - '{id,created_at,scheduled_at}'::text[])::text FROM deleted AS d ORDER BY 1`)
	require.NoError(t, err)
	jobs, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return jobs
}

func TestSpread(t *testing.T) {
	t.Parallel()
	require.Equal(t, Spread{Median: 2, Min: 1, Max: 9}, spread([]float64{9, 1, 2}))
	require.Equal(t, Spread{Median: 3, Min: 1, Max: 9}, spread([]float64{9, 4, 1, 2}))
}

// A ratio is taken within each round: here the machine was half as fast in the
// second one.
func TestRatioIsTakenWithinARound(t *testing.T) {
	t.Parallel()
	m := measurement{name: "m", rows: []row{{name: "b", figure: "base"}, {name: "o", figure: "ours", of: "base", atLeast: 0.9}}}
	rows := m.report([]figures{{"base": 100, "ours": 80}, {"base": 50, "ours": 40}})
	require.Equal(t, Row{
		Measurement: "m", Name: "o", Spread: Spread{Median: 60, Min: 40, Max: 80},
		Ratio: &Ratio{Spread: Spread{Median: 0.8, Min: 0.8, Max: 0.8}, Of: "b", AtLeast: 0.9},
	}, rows[1])
}
