package eventlog_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"afluente/eventlog"
	"afluente/eventlog/event"
)

// kill lets every job that waits die, as a failing worker's last attempt does.
func kill(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	exec(t, pool, "UPDATE river.river_job SET "+run+" WHERE state = 'available'")
	exec(t, pool, "UPDATE river.river_job SET "+discard+" WHERE state = 'running'")
}

// newDeadLetters is a bus on which n events died for alpha.
func newDeadLetters(t *testing.T, n int) (*bus, *eventlog.DeadLetters) {
	t.Helper()
	b := newBus(t, alpha(nil))
	b.emitMany(t, n)
	drain(t, b.bridge)
	kill(t, b.pool)
	require.Equal(t, n, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'dead'"))
	return b, &eventlog.DeadLetters{Pool: b.pool}
}

func (b *bus) emitMany(t *testing.T, n int) {
	t.Helper()
	events := make([]eventlog.Event[event.MessageQueued], n)
	for i := range events {
		events[i] = b.queued(fmt.Sprint(i))
	}
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := eventlog.EmitMany(t.Context(), tx, events)
		return err
	})
}

// states counts the jobs by state.
func states(t *testing.T, pool *pgxpool.Pool) map[string]int {
	t.Helper()
	rows, err := pool.Query(t.Context(), "SELECT state::text, count(*) FROM river.river_job GROUP BY state")
	require.NoError(t, err)
	states := make(map[string]int)
	var state string
	var n int
	_, err = pgx.ForEachRow(rows, []any{&state, &n}, func() error {
		states[state] = n
		return nil
	})
	require.NoError(t, err)
	return states
}

func TestRetryMovesWhatCountCountsAndEventsFollow(t *testing.T) {
	t.Parallel()
	b, letters := newDeadLetters(t, 1200) // three batches
	found, err := letters.Count(t.Context(), eventlog.DeadLetterFilter{})
	require.NoError(t, err)
	require.Equal(t, 1200, found)

	batches := 0
	moved, err := letters.Retry(t.Context(), eventlog.DeadLetterFilter{}, eventlog.Pace{Progress: func(eventlog.Moved) { batches++ }})
	require.NoError(t, err)
	require.Equal(t, eventlog.Moved{Found: 1200, Moved: 1200}, moved)
	require.Equal(t, 3, batches)
	require.Equal(t, 1200, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'processing'"))
	require.Equal(t, 1200, count(t, b.pool, `SELECT count(*) FROM river.river_job
		WHERE state = 'available' AND attempt = 0 AND max_attempts = 8 AND priority = 4 AND cardinality(errors) = 1 AND finalized_at IS NULL`),
		"all attempts anew, the error kept, behind all other work")

	b.start(t)
	eventually(t, "all done", func() bool {
		return count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'done'") == 1200
	})
}

func TestFiltersChooseDeadLetters(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil), anyEvent())
	other := newOrganization(t, b.pool)
	b.emit(t, "m")                 // alpha, beta, any
	b.emitRaw(t, "lead.won", `{}`) // any
	b.organization, other = other, b.organization
	b.emitRaw(t, "lead.lost", `{}`) // any
	drain(t, b.bridge)
	start := time.Now().Add(-time.Minute)
	kill(t, b.pool)
	exec(t, b.pool, "UPDATE river.river_job SET finalized_at = now() - interval '1 hour' WHERE kind = 'beta-worker'")
	letters := &eventlog.DeadLetters{Pool: b.pool}
	for name, tt := range map[string]struct {
		filter eventlog.DeadLetterFilter
		want   int
	}{
		"all":          {eventlog.DeadLetterFilter{}, 5},
		"consumer":     {eventlog.DeadLetterFilter{Consumer: "any-worker"}, 3},
		"type":         {eventlog.DeadLetterFilter{EventType: "message.queued"}, 3},
		"organization": {eventlog.DeadLetterFilter{OrganizationID: b.organization}, 1},
		"entity kind":  {eventlog.DeadLetterFilter{EntityKind: "lead"}, 2},
		"since":        {eventlog.DeadLetterFilter{Since: start}, 4},
		"until":        {eventlog.DeadLetterFilter{Until: start}, 1},
		"several":      {eventlog.DeadLetterFilter{Consumer: "any-worker", EntityKind: "lead", OrganizationID: other}, 1},
		"none":         {eventlog.DeadLetterFilter{Consumer: "nobody"}, 0},
		"not SQL":      {eventlog.DeadLetterFilter{EventType: "' OR true --"}, 0},
	} {
		found, err := letters.Count(t.Context(), tt.filter)
		require.NoError(t, err, name)
		require.Equal(t, tt.want, found, name)
		listed, err := letters.List(t.Context(), tt.filter, 100)
		require.NoError(t, err, name)
		require.Len(t, listed, tt.want, name)
	}
	listed, err := letters.List(t.Context(), eventlog.DeadLetterFilter{}, 1)
	require.NoError(t, err)
	require.Len(t, listed, 1)
	require.Equal(t, "boom", listed[0].LastError)

	moved, err := letters.Retry(t.Context(), eventlog.DeadLetterFilter{Consumer: "any-worker", EntityKind: "lead"}, eventlog.Pace{})
	require.NoError(t, err)
	require.Equal(t, 2, moved.Moved)
	require.Equal(t, map[string]int{"available": 2, "discarded": 3}, states(t, b.pool))
}

func TestStoppedRetryGoesOnWithTheRest(t *testing.T) {
	t.Parallel()
	b, letters := newDeadLetters(t, 1100)
	ctx, cancel := context.WithCancel(t.Context())
	moved, err := letters.Retry(ctx, eventlog.DeadLetterFilter{}, eventlog.Pace{Progress: func(eventlog.Moved) { cancel() }})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, eventlog.Moved{Found: 1100, Moved: 500}, moved)
	require.Equal(t, map[string]int{"available": 500, "discarded": 600}, states(t, b.pool))

	moved, err = letters.Retry(t.Context(), eventlog.DeadLetterFilter{}, eventlog.Pace{})
	require.NoError(t, err)
	require.Equal(t, eventlog.Moved{Found: 600, Moved: 600}, moved)
}

// What dies again while the others are retried is not retried a second time.
func TestRetryDoesNotRunInACircle(t *testing.T) {
	t.Parallel()
	b, letters := newDeadLetters(t, 600)
	moved, err := letters.Retry(t.Context(), eventlog.DeadLetterFilter{}, eventlog.Pace{Progress: func(eventlog.Moved) { kill(t, b.pool) }})
	require.NoError(t, err)
	require.Equal(t, eventlog.Moved{Found: 600, Moved: 600}, moved)
	require.Equal(t, map[string]int{"discarded": 600}, states(t, b.pool))
}

type uniqueArgs struct {
	N int `json:"n"`
}

func (uniqueArgs) Kind() string { return "unique-worker" }

func (uniqueArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}
}

func TestRetryThatConflictsLeavesTheOthersAloneAndIsReported(t *testing.T) {
	t.Parallel()
	b := newBus(t, eventlog.Job(&worker[uniqueArgs]{}))
	insert := func(n int) int64 {
		result, err := b.client.Insert(t.Context(), uniqueArgs{n}, nil)
		require.NoError(t, err)
		return result.Job.ID
	}
	var dead []int64
	for n := range 5 {
		dead = append(dead, insert(n))
	}
	kill(t, b.pool)
	insert(2) // the twin of a dead one, alive

	letters := &eventlog.DeadLetters{Pool: b.pool}
	moved, err := letters.Retry(t.Context(), eventlog.DeadLetterFilter{}, eventlog.Pace{})
	require.NoError(t, err)
	require.Equal(t, eventlog.Moved{Found: 5, Moved: 4, Conflicts: []int64{dead[2]}}, moved)
	require.Equal(t, map[string]int{"available": 5, "discarded": 1}, states(t, b.pool))
}

func TestRetriedQueueIsWokenAtOnce(t *testing.T) {
	t.Parallel()
	b, letters := newDeadLetters(t, 3)
	conn, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), `LISTEN "river.river_insert"`)
	require.NoError(t, err)
	_, err = letters.Retry(t.Context(), eventlog.DeadLetterFilter{}, eventlog.Pace{})
	require.NoError(t, err)
	notification, err := conn.Conn().WaitForNotification(t.Context())
	require.NoError(t, err)
	require.JSONEq(t, `{"queue": "default"}`, notification.Payload)
}

func TestDiscardSettlesTheEventAndSaysWhoAndWhy(t *testing.T) {
	t.Parallel()
	b, letters := newDeadLetters(t, 3)
	for _, who := range [][2]string{{"", "a reason"}, {"ada", ""}} {
		_, err := letters.Discard(t.Context(), eventlog.DeadLetterFilter{}, eventlog.Pace{}, who[0], who[1])
		require.Error(t, err)
	}
	moved, err := letters.Discard(t.Context(), eventlog.DeadLetterFilter{}, eventlog.Pace{}, "ada", "a test order")
	require.NoError(t, err)
	require.Equal(t, eventlog.Moved{Found: 3, Moved: 3}, moved)
	require.Empty(t, states(t, b.pool))
	require.Equal(t, 3, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'done'"))
	require.Equal(t, 3, count(t, b.pool, `SELECT count(*) FROM audit_log WHERE action = 'dead_letter.discarded'
		AND actor_id = 'ada' AND reason = 'a test order' AND metadata ->> 'event_type' = 'message.queued'`))
}

// A lock that somebody else holds on one of them for a while is waited for.
func TestRetryOutlivesALockThatIsHeldForAWhile(t *testing.T) {
	t.Parallel()
	b, letters := newDeadLetters(t, 5)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM river.river_job ORDER BY id DESC LIMIT 1 FOR UPDATE")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := letters.Retry(t.Context(), eventlog.DeadLetterFilter{}, eventlog.Pace{})
		done <- err
	}()
	waiting := func() (since time.Time) {
		err := b.pool.QueryRow(t.Context(), `SELECT coalesce(max(xact_start), 'epoch') FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&since)
		require.NoError(t, err)
		return since
	}
	var first time.Time
	eventually(t, "it waits", func() bool {
		first = waiting()
		return first.Unix() > 0
	})
	eventually(t, "it gave up once and waits again", func() bool { return waiting().After(first) })
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-done)
	require.Equal(t, map[string]int{"available": 5}, states(t, b.pool))
}

// The statement of the specification for an event that is to be worked again.
func TestDeadEventSetToPendingRetriesItsDeadJob(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil), beta(nil))
	id := b.emit(t, "m")
	drain(t, b.bridge)
	exec(t, b.pool, "UPDATE river.river_job SET "+run)
	exec(t, b.pool, "UPDATE river.river_job SET "+complete+" WHERE kind = 'beta-worker'")
	exec(t, b.pool, "UPDATE river.river_job SET "+discard+" WHERE kind = 'alpha-worker'")
	dead := b.job(t, id, "alpha-worker").ID

	exec(t, b.pool, `UPDATE event_log SET status = 'pending', attempts = 0, next_attempt_at = now(), last_error = NULL,
		consumed_by = array_remove(consumed_by, 'alpha-worker') WHERE id = $1`, id)
	drain(t, b.bridge)
	require.Equal(t, "processing", b.event(t, id).Status)
	job := b.job(t, id, "alpha-worker") // one, not two
	require.Equal(t, dead, job.ID)
	require.Equal(t, "available 0", fmt.Sprint(job.State, " ", job.Attempt))
	require.Equal(t, "completed", string(b.job(t, id, "beta-worker").State))
	b.start(t)
	b.awaitStatus(t, id, "done")
}

func TestReplaySendsOnlyWhatTheConsumerNeverHad(t *testing.T) {
	t.Parallel()
	old := newBus(t, alpha(nil))
	old.emitMany(t, 700)
	drain(t, old.bridge)
	exec(t, old.pool, "UPDATE river.river_job SET "+complete)

	b := joinBus(t, old.pool, old.organization, alpha(nil), beta(nil)) // beta is new
	had := b.emit(t, "m")
	drain(t, b.bridge)
	pending := b.emit(t, "m") // the bridge is about to send it
	b.emitRaw(t, "lead.won", `{}`)
	filter := eventlog.ReplayFilter{Consumer: "beta-worker", Since: time.Now().Add(-time.Hour), Until: time.Now().Add(time.Hour)}
	found, err := b.bridge.CountReplay(t.Context(), filter)
	require.NoError(t, err)
	require.Equal(t, 700, found)

	moved, err := b.bridge.Replay(t.Context(), filter, eventlog.Pace{})
	require.NoError(t, err)
	require.Equal(t, eventlog.Moved{Found: 700, Moved: 700}, moved)
	require.Equal(t, 700, count(t, b.pool, `SELECT count(*) FROM river.river_job WHERE kind = 'beta-worker' AND queue = 'beta'
		AND priority = 4 AND 'replay' = ANY (tags) AND metadata @> '{"replay": true}' AND args ? 'message_id'`))
	require.Equal(t, 700, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'processing' AND consumers = '{alpha-worker,beta-worker}' AND consumed_by = '{alpha-worker}'"))
	require.Len(t, b.jobs(t, had), 2)
	require.Empty(t, b.jobs(t, pending))

	moved, err = b.bridge.Replay(t.Context(), filter, eventlog.Pace{})
	require.NoError(t, err)
	require.Zero(t, moved, "a second time sends nothing")
	b.start(t)
	drain(t, b.bridge)
	eventually(t, "all done", func() bool {
		return count(t, b.pool, "SELECT count(*) FROM event_log WHERE status <> 'done'") == 0
	})
	moved, err = b.bridge.Replay(t.Context(), filter, eventlog.Pace{})
	require.NoError(t, err)
	require.Zero(t, moved)
}

func TestReplayKeepsToItsFilter(t *testing.T) {
	t.Parallel()
	old := newBus(t)
	ours, other := old.organization, newOrganization(t, old.pool)
	for _, organization := range []uuid.UUID{ours, other} {
		old.organization = organization
		old.emit(t, "m")
		old.emitRaw(t, "lead.won", `{}`)
	}
	drain(t, old.bridge)
	exec(t, old.pool, "UPDATE event_log SET created_at = created_at - interval '3 hours' WHERE event_type = 'lead.won'")
	b := joinBus(t, old.pool, ours, alpha(nil), anyEvent())
	now := time.Now()
	for name, tt := range map[string]struct {
		filter eventlog.ReplayFilter
		want   int
	}{
		"a consumer of all":   {eventlog.ReplayFilter{Consumer: "any-worker", Until: now}, 4},
		"a consumer's types":  {eventlog.ReplayFilter{Consumer: "alpha-worker", Until: now}, 2},
		"a type":              {eventlog.ReplayFilter{Consumer: "any-worker", EventType: "lead.won", Until: now}, 2},
		"an organization":     {eventlog.ReplayFilter{Consumer: "any-worker", OrganizationID: other, Until: now}, 2},
		"since":               {eventlog.ReplayFilter{Consumer: "any-worker", Since: now.Add(-time.Hour), Until: now}, 2},
		"until":               {eventlog.ReplayFilter{Consumer: "any-worker", Until: now.Add(-time.Hour)}, 2},
		"a span with nothing": {eventlog.ReplayFilter{Consumer: "any-worker", Since: now, Until: now.Add(-time.Hour)}, 0},
	} {
		found, err := b.bridge.CountReplay(t.Context(), tt.filter)
		require.NoError(t, err, name)
		require.Equal(t, tt.want, found, name)
	}
	_, err := b.bridge.Replay(t.Context(), eventlog.ReplayFilter{Consumer: "nobody"}, eventlog.Pace{})
	require.ErrorIs(t, err, eventlog.ErrNoConsumer)
	_, err = b.bridge.Replay(t.Context(), eventlog.ReplayFilter{Consumer: "alpha-worker", EventType: "lead.won"}, eventlog.Pace{})
	require.ErrorContains(t, err, "does not consume lead.won")
}

// A dead event stays dead while another consumer gets it.
func TestReplayLeavesADeadEventDead(t *testing.T) {
	t.Parallel()
	b, _ := newDeadLetters(t, 1)
	b = joinBus(t, b.pool, b.organization, alpha(nil), beta(nil))
	moved, err := b.bridge.Replay(t.Context(), eventlog.ReplayFilter{Consumer: "beta-worker", Until: time.Now()}, eventlog.Pace{Rate: 1})
	require.NoError(t, err)
	require.Equal(t, 1, moved.Moved)
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'dead'"))
	exec(t, b.pool, "UPDATE river.river_job SET "+complete+" WHERE kind = 'beta-worker'")
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'dead' AND consumed_by = '{beta-worker}'"))
}

func TestJobsAreTaggedWithWhatRiverTakes(t *testing.T) {
	t.Parallel()
	b := newBus(t, anyEvent())
	long := strings.Repeat("a", 254)
	for eventType, want := range map[string][]string{
		"message.queued":  {"message-queued", "kind-message"},
		"a.b":             {"a-b", "kind-a"},
		long + ".created": {long, "kind-" + long[:250]},
	} {
		id := b.emitRaw(t, eventType, `{}`)
		drain(t, b.bridge)
		job, err := b.client.JobGet(t.Context(), b.job(t, id, "any-worker").ID)
		require.NoError(t, err)
		require.Equal(t, slices.Concat(want[:1], []string{b.organization.String()}, want[1:]), job.Tags)
		if eventType != long+".created" {
			require.Equal(t, eventType, eventlog.EventType(job))
		}
	}
	exec(t, b.pool, "INSERT INTO event_log (organization_id, event_type, entity_kind) VALUES ($1, 'x.y', 'São Paulo/-')", b.organization)
	exec(t, b.pool, "INSERT INTO event_log (organization_id, event_type, entity_kind) VALUES ($1, 'x.y', '')", b.organization)
	drain(t, b.bridge)
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE tags[3] = 'kind-S_o_Paulo_'"))
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE cardinality(tags) = 2"))
}
