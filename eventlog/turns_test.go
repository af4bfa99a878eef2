package eventlog_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"afluente/eventlog"
)

// placesOf returns the places, from 0, that an organization's jobs have in the queue.
func (b *bus) placesOf(t *testing.T) []int {
	t.Helper()
	rows, err := b.pool.Query(t.Context(), `SELECT place FROM (
			SELECT tags, row_number() OVER (ORDER BY priority, scheduled_at, id) - 1 AS place FROM river.river_job WHERE state = 'available'
		) AS j WHERE $1 = ANY (tags) ORDER BY 1`, b.organization.String())
	require.NoError(t, err)
	places, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	return places
}

func TestEventsOfOneOrganizationAreNotClaimedAfterAllOfAnother(t *testing.T) {
	t.Parallel()
	large := newBus(t, alpha(nil))
	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: large.pool, Plan: large.plan, Log: zap.NewNop(), MaxBatch: 100})
	require.NoError(t, err)
	large.emitMany(t, 2000)
	_, err = bridge.Step(t.Context())
	require.NoError(t, err)

	var small []*bus
	for range 40 { // more than have a turn in one step
		b := *large
		b.organization = newOrganization(t, large.pool)
		b.emitMany(t, 2)
		small = append(small, &b)
	}
	for range 5 {
		events, err := bridge.Step(t.Context())
		require.NoError(t, err)
		require.Equal(t, 100, events)
	}
	for _, b := range small {
		require.Len(t, b.placesOf(t), 2)
	}
	drain(t, bridge)
	require.Equal(t, 2080, count(t, large.pool, "SELECT count(*) FROM river.river_job"))
}

func TestJobsOfOneOrganizationDoNotWaitForAllOfAnother(t *testing.T) {
	t.Parallel()
	large := newBus(t, alpha(nil))
	small, third := *large, *large
	small.organization, third.organization = newOrganization(t, large.pool), newOrganization(t, large.pool)
	large.emitMany(t, 500)
	drain(t, large.bridge)
	small.emitMany(t, 10)
	drain(t, large.bridge)
	require.Less(t, small.placesOf(t)[9], 25, "every other place, from the head on")

	// They go on from there, behind their own.
	small.emitMany(t, 10)
	third.emitMany(t, 10)
	drain(t, large.bridge)
	require.Less(t, small.placesOf(t)[19], 60)
	require.Less(t, third.placesOf(t)[9], 40)
	require.Equal(t, 529, large.placesOf(t)[499], "the last of all")

	// In a queue that has been worked off nobody is ahead.
	exec(t, large.pool, "DELETE FROM river.river_job")
	large.emitMany(t, 10)
	drain(t, large.bridge)
	small.emitMany(t, 10)
	drain(t, large.bridge)
	require.Zero(t, count(t, large.pool, "SELECT count(*) FROM river.river_job WHERE scheduled_at > now() OR scheduled_at < created_at - interval '1 minute'"))
}

// A job that nobody works on must not put new ones before all retries for ever.
func TestHeadStartIsBounded(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	b.emit(t, "m-1")
	drain(t, b.bridge)
	exec(t, b.pool, "UPDATE river.river_job SET scheduled_at = now() - interval '1 year'")
	other := *b
	other.organization = newOrganization(t, b.pool)
	other.emit(t, "m-2")
	drain(t, b.bridge)
	require.Equal(t, 1, count(t, b.pool, `SELECT count(*) FROM river.river_job
		WHERE scheduled_at BETWEEN now() - interval '61 minutes' AND now() - interval '59 minutes'`))
}
