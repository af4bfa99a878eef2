package sql_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"afluente/db/dbtest"
)

func insertAt(t *testing.T, pool *pgxpool.Pool, organization uuid.UUID, at time.Time) (partition string) {
	t.Helper()
	return one[string](t, pool, `INSERT INTO event_log (organization_id, event_type, entity_kind, created_at)
		VALUES ($1, 'lead.won', 'lead', $2) RETURNING tableoid::regclass::text`, organization, at)
}

// With the clock at each hour around the end of a month and of a year, every
// event has its month's partition, which was there days ahead.
func TestNoInsertFailsAtAMonthsEnd(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	for _, end := range []time.Time{
		time.Date(2027, 2, 1, 0, 0, 0, 0, time.UTC), time.Date(2028, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2028, 3, 1, 0, 0, 0, 0, time.UTC),
	} {
		for hour := -24; hour < 24; hour++ {
			now := end.Add(time.Duration(hour) * time.Hour)
			require.Equal(t, hour == -24 || hour == 0, one[int](t, pool, "SELECT create_event_log_partitions(3, $1)", now) > 0, "%s", now)
			for _, at := range []time.Time{now, now.Add(time.Hour - time.Microsecond)} {
				require.Equal(t, at.Format("event_log_200601"), insertAt(t, pool, organization, at))
			}
			require.NotNil(t, one[*string](t, pool, "SELECT to_regclass($1)::text", now.AddDate(0, 0, 60).Format("event_log_200601")), "two months ahead")
		}
	}
	require.Zero(t, one[int](t, pool, "SELECT count(*) FROM event_log_default"))
}

// Nothing was maintained for months: events go on being taken, and find their
// partitions later.
func TestMonthsThatWereMissedAreMadeUpFor(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	may := time.Date(2031, 5, 1, 0, 0, 0, 0, time.UTC)
	for day := range 62 {
		require.Equal(t, "event_log_default", insertAt(t, pool, organization, may.AddDate(0, 0, day)))
	}
	require.Equal(t, 4, one[int](t, pool, "SELECT create_event_log_partitions(3, $1)", may.AddDate(0, 0, 40)))
	require.Equal(t, []string{"event_log_203106 30"}, column[string](t, pool,
		"SELECT tableoid::regclass || ' ' || count(*) FROM event_log WHERE created_at >= '2031-06-01' AND created_at < '2031-07-01' GROUP BY tableoid"))
	require.Equal(t, 31, one[int](t, pool, "SELECT count(*) FROM event_log_default"), "May lies in the past")
	require.True(t, one[bool](t, pool, "SELECT create_event_log_partition($1)", may))
	require.Zero(t, one[int](t, pool, "SELECT count(*) FROM event_log_default"))
	require.Equal(t, 62, one[int](t, pool, "SELECT count(*) FROM event_log"))
	require.Equal(t, "event_log_203105", insertAt(t, pool, organization, may))
}

// While a month moves to its partition, and two callers want to do it, writers
// of that month lose nothing and are refused nothing.
func TestConcurrentInsertsAreNotLostWhileAMonthMoves(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	june := time.Date(2031, 6, 1, 0, 0, 0, 0, time.UTC)
	done := make(chan struct{})
	inserted := make([]int, 2)
	var writers errgroup.Group
	for w := range inserted {
		writers.Go(func() error {
			for {
				select {
				case <-done:
					return nil
				default:
				}
				insertAt(t, pool, organization, june)
				inserted[w]++
			}
		})
	}
	for month := range 6 {
		var movers errgroup.Group
		for range 2 {
			movers.Go(func() error {
				exec(t, pool, "SELECT create_event_log_partitions(0, $1)", june.AddDate(0, month, 0))
				return nil
			})
		}
		require.NoError(t, movers.Wait())
	}
	close(done)
	require.NoError(t, writers.Wait())
	require.Equal(t, inserted[0]+inserted[1], one[int](t, pool, "SELECT count(*) FROM event_log"))
	require.Zero(t, one[int](t, pool, "SELECT count(*) FROM event_log_default"))
}

// A transaction that holds the table open holds nobody up: the month waits.
func TestBusyTableLeavesAMonthForTheNextTime(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	exec(t, tx, "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)", organization)
	june := time.Date(2031, 6, 1, 0, 0, 0, 0, time.UTC)
	require.Zero(t, one[int](t, pool, "SELECT create_event_log_partitions(0, $1)", june))
	require.Equal(t, "event_log_default", insertAt(t, pool, organization, june))
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, 1, one[int](t, pool, "SELECT create_event_log_partitions(0, $1)", june))
}

// Moving many events would hold the bus up for as long as it takes.
func TestMonthWithManyEventsThatAreNotDoneStays(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	june := time.Date(2031, 6, 1, 0, 0, 0, 0, time.UTC)
	exec(t, pool, "SELECT create_event_log_partition($1)", june)
	exec(t, pool, `INSERT INTO event_log (organization_id, event_type, entity_kind, status, created_at)
		SELECT $1, 'lead.won', 'lead', 'dead', $2 FROM generate_series(1, 100001)`, organization, june)
	require.False(t, one[bool](t, pool, "SELECT drop_event_log_partition($1)", june))
	require.Equal(t, 100001, one[int](t, pool, "SELECT count(*) FROM event_log_203106"))

	exec(t, pool, "DELETE FROM event_log WHERE ctid = (SELECT min(ctid) FROM event_log_203106) AND tableoid = 'event_log_203106'::regclass")
	require.True(t, one[bool](t, pool, "SELECT drop_event_log_partition($1)", june))
	require.Equal(t, 100000, one[int](t, pool, "SELECT count(*) FROM event_log_default"))
}
