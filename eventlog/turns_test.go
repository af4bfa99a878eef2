package eventlog_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
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

// flooded is a bus of an organization that has emitted more events than its bridge
// takes in a step, which it has done once.
func flooded(t *testing.T, declarations ...eventlog.Declaration) *bus {
	t.Helper()
	b := newBus(t, declarations...)
	var err error
	b.bridge, err = eventlog.NewBridge(eventlog.BridgeConfig{Pool: b.pool, Plan: b.plan, Log: zap.NewNop(), MaxBatch: 100})
	require.NoError(t, err)
	b.emitMany(t, 2000)
	events, err := b.bridge.Step(t.Context())
	require.NoError(t, err)
	require.Equal(t, 100, events)
	return b
}

// others are organizations that have emitted a few events each.
func (b *bus) others(t *testing.T, n, events int) []*bus {
	t.Helper()
	var others []*bus
	for range n {
		other := *b
		other.organization = newOrganization(t, b.pool)
		other.emitMany(t, events)
		others = append(others, &other)
	}
	return others
}

func TestEventsOfOneOrganizationAreNotClaimedAfterAllOfAnother(t *testing.T) {
	t.Parallel()
	large := flooded(t, alpha(nil))
	small := large.others(t, 40, 2) // more than have a turn in one step
	for _, want := range []int{32, 8, 32, 8, 0} {
		events, err := large.bridge.StepInTurn(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, events, "one of each organization, but for that which Step is busy with")
	}
	for _, b := range small {
		require.Len(t, b.placesOf(t), 2)
	}
	drain(t, large.bridge)
	require.Equal(t, 2080, count(t, large.pool, "SELECT count(*) FROM river.river_job"))
}

// Events that are wanted in order are not for small steps, so the large ones take
// turns as well.
func TestOrderedEventsOfOneOrganizationAreNotClaimedAfterAllOfAnother(t *testing.T) {
	t.Parallel()
	large := flooded(t, alpha(nil).Ordered("message_id", eventlog.Blocks))
	small := large.others(t, 40, 2)
	events, err := large.bridge.StepInTurn(t.Context())
	require.NoError(t, err)
	require.Zero(t, events)
	eventually(t, "all events are older than those that small steps would take", func() bool {
		return count(t, large.pool, "SELECT count(*) FROM event_log WHERE created_at > now() - interval '100 ms'") == 0
	})
	for range 5 {
		events, err := large.bridge.Step(t.Context())
		require.NoError(t, err)
		require.Equal(t, 100, events)
	}
	for _, b := range small {
		require.Len(t, b.jobsOf(t), 2)
	}
}

// The step of the flood waits for a lock, which could be for good.
func TestEventsOfOneOrganizationDoNotWaitForStepsOfAnother(t *testing.T) {
	t.Parallel()
	large := flooded(t, alpha(nil).LimitedPerOrganization(1))
	tx, err := large.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	tag, err := tx.Exec(t.Context(), "SELECT FROM event_lanes WHERE lane = $1 FOR UPDATE", large.organization.String())
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())

	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	running.Go(func() { _ = large.bridge.Run(ctx) })
	large.awaitLockWaiter(t)
	small := large.others(t, 3, 2)
	for _, b := range small {
		eventually(t, "events fanned out", func() bool { return len(b.jobsOf(t)) == 2 })
	}
	require.Len(t, large.jobsOf(t), 100, "of the first step alone")
}

// jobsOf returns the ids of an organization's jobs.
func (b *bus) jobsOf(t *testing.T) []int64 {
	t.Helper()
	rows, err := b.pool.Query(t.Context(), "SELECT id FROM river.river_job WHERE $1 = ANY (tags)", b.organization.String())
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	return ids
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

	// In a queue that has been worked off nobody waits.
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

// A step sees no jobs of another one that is under way, be it of the same bridge or of
// another.
func TestJobsOfStepsThatMeetAtAnEmptyQueueDoNotWaitForAllOfAnother(t *testing.T) {
	t.Parallel()
	var bridge, other eventlog.Turns
	large, small := uuid.New(), uuid.New()
	now := time.Date(2026, 1, 1, 12, 0, 5, 200_000_000, time.UTC)
	flood := bridge.Places(now, time.Time{}, large, 1000)
	for range 50 {
		now = now.Add(10 * time.Millisecond)
		flood = append(flood, bridge.Places(now, flood[0], large, 1000)...)
	}
	first := bridge.Places(now, time.Time{}, small, 1)[0]
	require.False(t, first.After(flood[0]))
	require.False(t, other.Places(now, time.Time{}, small, 1)[0].After(flood[0]))
	next := bridge.Places(now, flood[500], small, 1)[0]
	require.False(t, next.After(flood[501]))
	require.False(t, flood[len(flood)-1].After(now))

	// Those of two bridges may meet where the time moves on from which places begin.
	now = now.Add(time.Minute)
	defer bridge.Begin()()
	flood = bridge.Places(now, time.Time{}, large, 1000)
	defer bridge.Begin()()
	now = now.Add(time.Minute)
	require.False(t, bridge.Places(now, time.Time{}, small, 1)[0].After(flood[0]), "those of one do not")
	require.True(t, other.Places(now, time.Time{}, small, 1)[0].After(flood[999]))
	for _, place := range other.Places(now, flood[500], small, 3) {
		require.False(t, place.After(flood[505]), "those that come after it do not follow it")
	}
}
