package eventlog_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"afluente/db/dbtest"
	"afluente/eventlog"
)

// queryCounter is a tracer that counts the queries of a pool and calls
// onQuery, where it is set, before each.
type queryCounter struct {
	queries atomic.Int64
	onQuery atomic.Pointer[func()]
}

func (c *queryCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.queries.Add(1)
	if onQuery := c.onQuery.Load(); onQuery != nil {
		(*onQuery)()
	}
	return ctx
}

func (c *queryCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// newLoader returns a loader on a pool of its own, whose queries are counted.
func newLoader(t *testing.T, b *bus) (*eventlog.Events, *queryCounter) {
	t.Helper()
	counter := &queryCounter{}
	config := b.pool.Config()
	config.ConnConfig.Tracer = counter
	return eventlog.NewEvents(dbtest.Pool(t, config)), counter
}

// jobOf is a job of the event, as a worker gets it.
func (b *bus) jobOf(t *testing.T, id uuid.UUID) *rivertype.JobRow {
	t.Helper()
	var createdAt time.Time
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT created_at FROM event_log WHERE id = $1", id).Scan(&createdAt))
	return &rivertype.JobRow{Metadata: fmt.Appendf(nil, `{"event_id": %q, "event_created_at": %q, "consumer": "alpha-worker"}`,
		id, createdAt.UTC().Format(time.RFC3339Nano))}
}

// holdLoads makes every load wait until the function that it returns is called.
func (b *bus) holdLoads(t *testing.T) (release func()) {
	t.Helper()
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE event_log IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	return func() { require.NoError(t, tx.Rollback(t.Context())) }
}

// The plan of a load is kept, also one that was made when the month was new.
func TestLoadDoesNotReadAllOfAMonth(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	config := b.pool.Config()
	config.MaxConns = 1 // for the plan is the session's
	session := dbtest.Pool(t, config)
	events := eventlog.NewEvents(session)
	first := b.jobOf(t, b.emit(t, "first"))
	read := func() int {
		_, err := events.Load(t.Context(), first)
		require.NoError(t, err)
		exec(t, session, "SELECT pg_stat_force_next_flush()")
		return count(t, session, "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables WHERE relname ^@ 'event_log_'")
	}
	read()
	const others = 1000
	b.emitMany(t, others)
	before := read()
	require.Less(t, read()-before, others)
}

func TestConcurrentLoadsShareQueries(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	const loads = 90
	events, counter := newLoader(t, b)
	jobs := make(map[uuid.UUID]*rivertype.JobRow, loads)
	for range loads {
		id := b.emit(t, "m")
		jobs[id] = b.jobOf(t, id)
	}
	release := b.holdLoads(t)
	var loading errgroup.Group
	var called atomic.Int64
	for id, job := range jobs {
		loading.Go(func() error {
			called.Add(1)
			e, err := events.Load(t.Context(), job)
			if err == nil && e.ID != id {
				err = fmt.Errorf("loaded %s for %s", e.ID, id)
			}
			return err
		})
	}
	eventually(t, "all load", func() bool { return called.Load() == loads })
	b.awaitLockWaiter(t)
	release()
	require.NoError(t, loading.Wait())
	// One for the first load, one for all others; a few more for goroutines
	// that were slow between the count and the call.
	require.LessOrEqual(t, counter.queries.Load(), int64(10))
}

func TestCancelledLoadFailsNoOther(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	events, counter := newLoader(t, b)
	job := b.jobOf(t, b.emit(t, "m"))
	for range 10 { // chance decides whose turn it is to run the query for all
		release := b.holdLoads(t)
		cancelled, cancel := context.WithCancel(t.Context())
		var loading errgroup.Group
		load := func(ctx context.Context) func() error {
			return func() error {
				_, err := events.Load(ctx, job)
				if ctx == cancelled && errors.Is(err, context.Canceled) {
					return nil
				}
				return err
			}
		}
		loading.Go(load(t.Context()))
		b.awaitLockWaiter(t)
		for range 10 { // they wait for the query after that one
			loading.Go(load(cancelled))
			loading.Go(load(t.Context()))
		}
		counter.onQuery.Store((*func())(&cancel)) // when it has begun
		release()
		require.NoError(t, loading.Wait())
		counter.onQuery.Store(nil)
		cancel()

		release = b.holdLoads(t)
		loading.Go(load(t.Context()))
		b.awaitLockWaiter(t)
		_, err := events.Load(cancelled, job)
		require.ErrorIs(t, err, context.Canceled, "it does not wait for the query")
		release()
		require.NoError(t, loading.Wait())
	}
}

// Loads whose callers gave up stay queued; the next caller clears them away.
func TestLoadsGivenUpDoNotBlockLaterOnes(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	events, _ := newLoader(t, b)
	job := b.jobOf(t, b.emit(t, "m"))
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for range 15 { // chance decides who clears them away
		release := b.holdLoads(t)
		var first errgroup.Group
		first.Go(func() error {
			_, err := events.Load(t.Context(), job)
			return err
		})
		b.awaitLockWaiter(t)
		for range 500 { // chance decides which of them get into the queue
			_, err := events.Load(cancelled, job)
			require.ErrorIs(t, err, context.Canceled)
		}
		release()
		require.NoError(t, first.Wait())

		ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
		_, err := events.Load(ctx, job)
		stop()
		require.NoError(t, err)
	}
}

func TestLoadKeepsThePayloadExactly(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	events, _ := newLoader(t, b)
	large := `{"s": "` + strings.Repeat("ção ", (1<<20-1000)/6) + `"}`
	for payload, want := range map[string]string{
		`{"n": 9007199254740993}`: `{"n": 9007199254740993}`,
		`{"n": 1e400}`:            `{"n": 1` + strings.Repeat("0", 400) + `}`,
		large:                     large,
	} {
		id := b.emitRaw(t, "a.b", payload)
		e, err := events.Load(t.Context(), b.jobOf(t, id))
		require.NoError(t, err)
		require.Equal(t, id, e.ID)
		require.Equal(t, "a.b", e.Type)
		require.Equal(t, "a", e.EntityKind)
		require.Equal(t, want, string(e.Payload))
	}
}

func TestDeferredJobWhoseEventIsGoneIsDead(t *testing.T) {
	t.Parallel()
	older := newBus(t)
	newer := joinBus(t, older.pool, older.organization, alpha(nil))
	id := older.emit(t, "m")
	drain(t, older.bridge)
	exec(t, older.pool, "DELETE FROM event_log WHERE id = $1", id)
	newer.start(t)
	eventually(t, "job cancelled", func() bool { return string(newer.job(t, id, "alpha-worker").State) == "cancelled" })
	require.Contains(t, newer.job(t, id, "alpha-worker").LastError, eventlog.ErrNoEvent.Error())
}
