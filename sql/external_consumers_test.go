package sql_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"afluente/db/dbtest"
	"afluente/eventlog"
)

// external is a database with a registered consumer, "x-worker", of lead.won,
// which is given up after three attempts.
type external struct {
	pool         *pgxpool.Pool
	service      *pgx.Conn // with the role of a back end
	bridge       *eventlog.Bridge
	organization uuid.UUID
}

func newExternal(t *testing.T) *external {
	t.Helper()
	pool := dbtest.New(t)
	x := &external{
		pool:         pool,
		service:      as(t, pool, "service_role", ""),
		bridge:       newBridge(t, pool),
		organization: newOrganization(t, pool),
	}
	exec(t, x.service, "SELECT register_consumer('x-worker', '{lead.won}', 3)")
	return x
}

// emit commits n events and fans them out.
func (x *external) emit(t *testing.T, n int) []uuid.UUID {
	t.Helper()
	ids := column[uuid.UUID](t, x.pool, "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1) FROM generate_series(1, $2)", x.organization, n)
	step(t, x.bridge)
	return ids
}

func (x *external) claim(t *testing.T) []uuid.UUID {
	t.Helper()
	return column[uuid.UUID](t, x.service, "SELECT id FROM claim_events('x-worker')")
}

// pass lets the time of leases and retries come, as River's scheduler does.
func (x *external) pass(t *testing.T) {
	t.Helper()
	exec(t, x.pool, "UPDATE river.river_job SET state = 'available', scheduled_at = now() WHERE state IN ('scheduled', 'retryable')")
}

// state is the event's status with the consumers that are done and dead.
func (x *external) state(t *testing.T, id uuid.UUID) string {
	t.Helper()
	return one[string](t, x.pool, `SELECT concat_ws(' ', status, 'by', consumed_by, 'dead', dead_consumers, attempts, coalesce(last_error, '-'))
		FROM event_log WHERE id = $1`, id)
}

func TestClaimedEventThatIsAckedIsDone(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	ids := x.emit(t, 3)
	exec(t, x.pool, "SELECT emit_event('lead.lost', 'lead', NULL, '{}', '{}', $1)", x.organization)
	step(t, x.bridge)

	claimed := x.claim(t)
	require.ElementsMatch(t, ids, claimed)
	require.Empty(t, x.claim(t))
	require.Equal(t, "processing by {} dead {} 1 -", x.state(t, ids[0]))
	for _, id := range ids {
		require.True(t, one[bool](t, x.service, "SELECT ack_event($1, 'x-worker')", id))
		require.False(t, one[bool](t, x.service, "SELECT ack_event($1, 'x-worker')", id), "it is answered")
		require.Equal(t, "done by {x-worker} dead {} 1 -", x.state(t, id))
	}
	x.pass(t)
	require.Empty(t, x.claim(t))
}

func TestConcurrentClaimsNeverShareAnEvent(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	ids := x.emit(t, 500)
	var mu sync.Mutex
	var all []uuid.UUID
	var claims errgroup.Group
	for range 4 {
		claims.Go(func() error {
			for {
				got := column[uuid.UUID](t, x.pool, "SELECT id FROM claim_events('x-worker', NULL, 7)")
				mu.Lock()
				all = append(all, got...)
				mu.Unlock()
				if len(got) == 0 {
					return nil
				}
			}
		})
	}
	require.NoError(t, claims.Wait())
	require.ElementsMatch(t, ids, all)
}

func TestClaimOfATransactionThatRollsBackIsNone(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	ids := x.emit(t, 1)
	tx, err := x.service.Begin(t.Context())
	require.NoError(t, err)
	require.Equal(t, ids, column[uuid.UUID](t, tx, "SELECT id FROM claim_events('x-worker')"))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, ids, x.claim(t))
	require.Equal(t, int16(1), one[int16](t, x.pool, "SELECT attempt FROM river.river_job"))
}

func TestNackedEventComesBackUntilItIsDead(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	id := x.emit(t, 1)[0]
	for attempt := 1; attempt <= 3; attempt++ {
		require.Equal(t, attempt, one[int](t, x.service, "SELECT attempts FROM claim_events('x-worker')"))
		require.True(t, one[bool](t, x.service, "SELECT nack_event($1, 'x-worker', $2)", id, fmt.Sprint("broken ", attempt)))
		require.Empty(t, x.claim(t), "it waits first")
		if attempt < 3 {
			require.Equal(t, fmt.Sprintf("processing by {} dead {} %d x-worker: broken %[1]d", attempt), x.state(t, id))
			x.pass(t)
		}
	}
	require.Equal(t, "dead by {} dead {x-worker} 3 x-worker: broken 3", x.state(t, id))
	require.Equal(t, []string{"broken 1", "broken 2", "broken 3"},
		column[string](t, x.pool, "SELECT e ->> 'error' FROM river.river_job, unnest(errors) AS e"))
	require.False(t, one[bool](t, x.service, "SELECT ack_event($1, 'x-worker')", id))

	// An operator retries it, as River UI does.
	exec(t, x.pool, "UPDATE river.river_job SET state = 'available', finalized_at = NULL, max_attempts = max_attempts + 1, scheduled_at = now()")
	require.Equal(t, []uuid.UUID{id}, x.claim(t))
	require.True(t, one[bool](t, x.service, "SELECT ack_event($1, 'x-worker')", id))
	require.Equal(t, "done by {x-worker} dead {} 3 x-worker: broken 3", x.state(t, id))
}

func TestPermanentNackIsDeadAtOnce(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	id := x.emit(t, 1)[0]
	x.claim(t)
	require.True(t, one[bool](t, x.service, "SELECT nack_event($1, 'x-worker', '', true)", id))
	require.Equal(t, "dead by {} dead {x-worker} 1 x-worker: no reason given", x.state(t, id))
}

// nack_event waits as River does for a worker in Go.
func TestBackoffIsThatOfTheProgram(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	id := x.emit(t, 1)[0]
	exec(t, x.pool, "UPDATE river.river_job SET max_attempts = 100")
	backoff := eventlog.Backoff()
	for attempt := range len(backoff) + 2 {
		x.claim(t)
		exec(t, x.service, "SELECT nack_event($1, 'x-worker', 'x')", id)
		wait := time.Duration(one[float64](t, x.pool,
			"SELECT extract(epoch FROM scheduled_at - (errors[cardinality(errors)] ->> 'at')::timestamptz)::float8 FROM river.river_job") * float64(time.Second))
		least := backoff[min(attempt, len(backoff)-1)]
		require.GreaterOrEqual(t, wait, least-time.Millisecond)
		require.LessOrEqual(t, wait, least*13/10+time.Millisecond)
		x.pass(t)
	}
}

func TestLeaseThatEndsHandsTheEventOut(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	id := x.emit(t, 1)[0]
	ack := func(attempt int) bool {
		return one[bool](t, x.service, "SELECT ack_event($1, 'x-worker', $2)", id, attempt)
	}
	for range 2 {
		require.Len(t, x.claim(t), 1)
		x.pass(t)
	}
	require.Len(t, x.claim(t), 1)
	require.False(t, ack(2), "another has it by now")
	require.False(t, one[bool](t, x.service, "SELECT nack_event($1, 'x-worker', 'x', false, 2)", id))
	x.pass(t)
	require.False(t, one[bool](t, x.service, "SELECT nack_event($1, 'x-worker', 'x', false, 3)", id), "the lease has ended")
	require.Empty(t, x.claim(t), "that was the third and last")
	require.Equal(t, "dead by {} dead {x-worker} 3 x-worker: the lease ended without ack_event or nack_event", x.state(t, id))
	require.Equal(t, 3, one[int](t, x.pool, "SELECT cardinality(errors) FROM river.river_job"))

	// Work that was done late but before the next claim counts.
	late := x.emit(t, 1)[0]
	x.claim(t)
	x.pass(t)
	require.True(t, one[bool](t, x.service, "SELECT ack_event($1, 'x-worker', 1)", late))
	require.Equal(t, "done by {x-worker} dead {} 1 -", x.state(t, late))
}

// A River client that leads gives back what was leased, and its rescuer does
// not discard it as a job of a kind it does not know.
func TestRiverGivesBackWhatWasLeased(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	id := x.emit(t, 1)[0]
	startClient(t, x.pool)
	require.Equal(t, []uuid.UUID{id}, column[uuid.UUID](t, x.service, "SELECT id FROM claim_events('x-worker', NULL, 1, '1 second')"))
	exec(t, x.pool, "UPDATE river.river_job SET attempted_at = now() - interval '1 day'")
	deadline := time.Now().Add(time.Minute)
	for len(x.claim(t)) == 0 {
		require.True(t, time.Now().Before(deadline))
		exec(t, x.service, "SELECT pg_sleep(0.1)")
	}
	require.Equal(t, "processing by {} dead {} 2 -", x.state(t, id))
}

// Locks that a slow caller holds on what it claims hold up nobody else's job.
func TestOpenClaimHoldsNoSchedulerUp(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	x.emit(t, 1)
	tx, err := x.service.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	require.Len(t, column[uuid.UUID](t, tx, "SELECT id FROM claim_events('x-worker')"), 1)
	exec(t, x.pool, `INSERT INTO river.river_job (kind, max_attempts, args, state, scheduled_at) VALUES ('other', 8, '{}', 'scheduled', now())`)
	startClient(t, x.pool)
	deadline := time.Now().Add(20 * time.Second)
	for one[string](t, x.pool, "SELECT state::text FROM river.river_job WHERE kind = 'other'") != "available" {
		require.True(t, time.Now().Before(deadline))
		exec(t, x.pool, "SELECT pg_sleep(0.1)")
	}
}

func TestClaimOfSomeTypesLeavesTheOthers(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	exec(t, x.service, "SELECT register_consumer('x-worker', '{lead.lost}', 3)")
	won := x.emit(t, 1)
	lost := one[uuid.UUID](t, x.pool, "SELECT emit_event('lead.lost', 'lead', NULL, '{}', '{}', $1)", x.organization)
	step(t, x.bridge)
	require.Equal(t, []uuid.UUID{lost}, column[uuid.UUID](t, x.service, "SELECT id FROM claim_events('x-worker', '{lead.lost}')"))
	require.Equal(t, won, x.claim(t))
}

func TestConsumersOutsideGoAreCheckedWhenTheyRegister(t *testing.T) {
	t.Parallel()
	x := newExternal(t)
	exec(t, x.pool, "INSERT INTO event_consumers (name, event_types, queue, max_attempts) VALUES ('go-worker', '{*}', 'default', 8)")
	for statement, want := range map[string]string{
		"SELECT register_consumer('X', '{*}')":                               "consumer name",
		"SELECT register_consumer(NULL, '{*}')":                              "consumer name",
		"SELECT register_consumer('" + strings.Repeat("x", 65) + "', '{*}')": "consumer name",
		"SELECT register_consumer('y-worker', '{}')":                         "names no event type",
		"SELECT register_consumer('y-worker', NULL)":                         "names no event type",
		"SELECT register_consumer('y-worker', '{lead.*}')":                   `event type "lead.*"`,
		"SELECT register_consumer('y-worker', '{NULL}')":                     "event type",
		"SELECT register_consumer('y-worker', '{*}', 0)":                     "from 1 to 1000",
		"SELECT register_consumer('go-worker', '{*}')":                       "one of the program's own",
		"SELECT claim_events('go-worker')":                                   `consumer "go-worker" is not registered`,
		"SELECT claim_events('nobody')":                                      `consumer "nobody" is not registered`,
		"SELECT claim_events('x-worker', NULL, 0)":                           "from 1 to 1000",
		"SELECT claim_events('x-worker', NULL, 1001)":                        "from 1 to 1000",
		"SELECT claim_events('x-worker', NULL, 1, '0.5 seconds')":            "p_lease",
		"SELECT claim_events('x-worker', NULL, 1, '2 days')":                 "p_lease",
	} {
		require.ErrorContains(t, run(t, x.service, statement), want, statement)
	}
	requireCode(t, run(t, x.service, "SELECT claim_events('nobody')"), pgerrcode.UndefinedObject, "")
	require.False(t, one[bool](t, x.service, "SELECT ack_event(gen_random_uuid(), 'x-worker')"))
	require.False(t, one[bool](t, x.service, "SELECT nack_event(gen_random_uuid(), 'x-worker', 'x')"))
}

// startClient runs a River client, which leads, until the test ends.
func startClient(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	plan, err := eventlog.Compile(eventlog.Job(&noWorker{}))
	require.NoError(t, err)
	client, err := eventlog.NewClient(eventlog.ClientConfig{Pool: pool, Plan: plan, Log: zap.NewNop()})
	require.NoError(t, err)
	require.NoError(t, client.Start(context.WithoutCancel(t.Context())))
	t.Cleanup(func() { require.NoError(t, client.StopAndCancel(context.WithoutCancel(t.Context()))) })
}

type noArgs struct{}

func (noArgs) Kind() string { return "no-worker" }

type noWorker struct{ river.WorkerDefaults[noArgs] }

func (*noWorker) Timeout(*river.Job[noArgs]) time.Duration       { return time.Second }
func (*noWorker) Work(context.Context, *river.Job[noArgs]) error { return nil }
