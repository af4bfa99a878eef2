package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/eventlog/event"
	"afluente/jobs/sandbox"
)

// The tests of chaos do to the program what happens to it in the end, while
// events come in at a steady rate, and let an auditor compare what was promised
// with what is there. They need the machine for themselves and run where they are
// asked for: in a short form (task chaos, a stage of task ci), or in a long one,
// which has longer faults, more load and several rounds (task chaos-long).
var chaos = flag.Bool("chaos", false, "run the tests of chaos and the soak")

var chaosLong = flag.Bool("chaos.long", false, "longer faults, more load and several rounds in the tests of chaos")

// chaosSlots bounds how many worlds are under load at a time: on a machine that
// cannot keep up, waiting proves nothing.
var chaosSlots = make(chan struct{}, 3)

// onDemand skips a test of chaos that nobody asked for.
func onDemand(t *testing.T) {
	t.Helper()
	if !*chaos && !*chaosLong {
		t.Skip("it needs the machine for itself: task chaos runs it")
	}
}

// takeSlot waits for a slot, and returns how to give it back before the end of
// the test: while one only waits for a rescue, others may go on.
func takeSlot(t *testing.T) (free func()) {
	t.Helper()
	onDemand(t)
	chaosSlots <- struct{}{}
	mark(t, "the test has its slot")
	free = sync.OnceFunc(func() { <-chaosSlots })
	t.Cleanup(free)
	return free
}

// long chooses between the forms of the tests.
func long[T any](short, long T) T {
	if *chaosLong {
		return long
	}
	return short
}

// spend lets the time of a fault pass.
func spend(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// cannotRun skips a test that this machine cannot run, but not in CI.
func cannotRun(t *testing.T, why string) {
	t.Helper()
	require.NotEqual(t, "true", os.Getenv("CI"), why)
	t.Skip(why)
}

// chaosRate is how many transactions of each load begin in a second.
func chaosRate() int { return long(10, 60) }

// settleWithin is how long after a fault work may stand still: jobs of a process
// that was cut off are taken for lost after a minute, found within half of one by a
// leader that may have to be elected, and tried again.
const settleWithin = 4 * time.Minute

// mark puts down when something was done to the world, to be found in the logs of
// its processes.
func mark(t *testing.T, format string, args ...any) {
	t.Helper()
	t.Logf("%s %s", time.Now().UTC().Format("15:04:05.000"), fmt.Sprintf(format, args...))
}

// load is a steady stream of transactions that emit events.
type load struct {
	*ledger

	world   *world
	pool    *pgxpool.Pool
	done    chan struct{}
	running sync.WaitGroup

	transactions atomic.Int64
	refused      atomic.Int64 // transactions that the database did not take
	lastErr      atomic.Pointer[error]
}

// startLoad begins to emit in a world, rate transactions a second, whatever becomes
// of the database meanwhile, over connections of its own.
func (w *world) startLoad(t *testing.T, rate int) *load {
	t.Helper()
	const emitters = 8 // some may hang in a transaction
	config, err := pgxpool.ParseConfig(w.url)
	require.NoError(t, err)
	config.MaxConns = emitters
	l := &load{ledger: newLedger(), world: w, pool: dbtest.Pool(t, config), done: make(chan struct{})}
	ticks := make(chan int)
	for range emitters {
		l.running.Go(func() {
			for n := range ticks {
				l.transaction(context.WithoutCancel(t.Context()), n)
			}
		})
	}
	l.running.Go(func() {
		defer close(ticks)
		interval := time.Second / time.Duration(rate)
		due := time.Now()
		for n := 0; ; n++ {
			if due = due.Add(interval); time.Since(due) > time.Second {
				due = time.Now() // what an outage has cost is not made up for
			}
			select {
			case <-time.After(time.Until(due)):
			case <-l.done:
				return
			}
			select {
			case ticks <- n:
			case <-l.done:
				return
			}
		}
	})
	t.Cleanup(l.end)
	return l
}

func (l *load) end() {
	select {
	case <-l.done:
	default:
		close(l.done)
	}
	l.running.Wait()
}

// stop returns when the last transaction has ended.
func (l *load) stop(t *testing.T) {
	t.Helper()
	l.end()
	if refused := l.refused.Load(); refused > 0 {
		t.Logf("%d of %d transactions were refused, the last one: %v", refused, l.transactions.Load(), *l.lastErr.Load())
	}
}

// conclude is how a test of chaos ends: no more is emitted, others may take the slot,
// and once everything is done nothing is lost and nothing doubled.
func (l *load) conclude(t *testing.T, may edge) {
	t.Helper()
	l.stop(t)
	l.world.free()
	mark(t, "nothing more is emitted")
	l.world.requireAudit(t, l.ledger, may)
}

// await returns when n more events have been committed.
func (l *load) await(t *testing.T, n int) {
	t.Helper()
	n += l.count(committed)
	eventually(t, 2*time.Minute, fmt.Sprintf("%d events emitted", n), func() bool { return l.count(committed) >= n })
}

var errRollBack = errors.New("roll back")

// transaction emits some events in one transaction and puts down what became of
// them.
func (l *load) transaction(ctx context.Context, n int) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	l.transactions.Add(1)
	refuse := func(err error) {
		l.refused.Add(1)
		l.lastErr.Store(&err)
	}
	tx, err := l.pool.Begin(ctx)
	if err != nil {
		refuse(err)
		return
	}
	events := make(map[uuid.UUID]emission)
	err = emitSome(ctx, tx, n, events)
	if err != nil {
		_ = tx.Rollback(ctx) // where that fails too, COMMIT was never sent all the same
		l.enter(rolledBack, events)
		if !errors.Is(err, errRollBack) {
			refuse(err)
		}
		return
	}
	err = tx.Commit(ctx)
	refusal, refused := errors.AsType[*pgconn.PgError](err)
	switch {
	case err == nil:
		l.enter(committed, events)
	case errors.Is(err, pgx.ErrTxCommitRollback), refused && refusal.Severity == "ERROR":
		l.enter(rolledBack, events)
		refuse(err)
	default:
		l.enter(unknown, events)
		refuse(err)
	}
}

// emitSome emits what the nth transaction does: one message by SQL, one event
// from Go, several of both, or some that are rolled back.
func emitSome(ctx context.Context, tx pgx.Tx, n int, events map[uuid.UUID]emission) error {
	switch n % 5 {
	case 0:
		return emitMessages(ctx, tx, 1, events)
	case 1:
		id, err := eventlog.Emit(ctx, tx, lost(n))
		events[id] = emission{eventType: "lead.lost"}
		return err
	case 2:
		if err := emitMessages(ctx, tx, 3, events); err != nil {
			return err
		}
	default:
		if err := emitMessages(ctx, tx, 1, events); err != nil {
			return err
		}
	}
	ids, err := eventlog.EmitMany(ctx, tx, []eventlog.Event[event.LeadLost]{lost(n), lost(n)})
	for _, id := range ids {
		events[id] = emission{eventType: "lead.lost"}
	}
	if err == nil && n%5 == 4 {
		return errRollBack
	}
	return err
}

func lost(n int) eventlog.Event[event.LeadLost] {
	return eventlog.Event[event.LeadLost]{
		OrganizationID: uuid.MustParse(demoOrganization),
		Payload:        event.LeadLost{Reason: fmt.Sprintf("reason %d", n), LostAt: time.Now()},
	}
}

// emitMessages queues messages in the way of an application that knows only SQL.
// The text of each ends with its id, by which an auditor knows it again.
func emitMessages(ctx context.Context, tx pgx.Tx, n int, events map[uuid.UUID]emission) error {
	rows, err := tx.Query(ctx, `
		WITH new AS (
			INSERT INTO messages (id, organization_id, conversation_id, body)
			SELECT i.id, $1::uuid, v.id, 'hello ' || i.id
			FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, $2::integer)) AS i, conversations AS v
			WHERE v.organization_id = $1::uuid
			RETURNING id
		)
		SELECT emit_event('message.queued', 'message', new.id, jsonb_build_object('message_id', new.id), '{}', $1::uuid), new.id
		FROM new`, demoOrganization, n)
	if err != nil {
		return err
	}
	var id, message uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&id, &message}, func() error {
		events[id] = emission{eventType: "message.queued", message: message}
		return nil
	})
	return err
}

// chaosWorld is a world with a slot whose processes share the server with those of
// others.
func chaosWorld(t *testing.T) *world {
	t.Helper()
	free := takeSlot(t)
	w := newWorld(t)
	w.beginChaos(t, free)
	w.settings = []string{"AFLUENTE_MAX_CONNS=10"}
	return w
}

// beginChaos gives a world its slot, and sees to it that a failure can be understood.
func (w *world) beginChaos(t *testing.T, free func()) {
	t.Helper()
	w.free = free
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("what is not as usual:\n%s", w.unusual(context.WithoutCancel(t.Context())))
		}
	})
}

// bridge and worker are processes with one role each.
func (w *world) bridge(t *testing.T) *process {
	t.Helper()
	p, _ := w.serve(t, "--queues=", "--no-crons")
	return p
}

func (w *world) worker(t *testing.T) *process {
	t.Helper()
	p, _ := w.serve(t, "--no-bridge")
	return p
}

func (p *process) kill(t *testing.T) {
	t.Helper()
	mark(t, "process %d is killed", p.command.Process.Pid)
	require.NoError(t, p.command.Process.Kill())
	p.wait(t)
}

// freeze stops a process as a machine does that is short of everything, and
// returns what lets it go on.
func (p *process) freeze(t *testing.T) (thaw func()) {
	t.Helper()
	mark(t, "process %d stands still", p.command.Process.Pid)
	require.NoError(t, p.command.Process.Signal(syscall.SIGSTOP))
	return func() {
		mark(t, "process %d goes on", p.command.Process.Pid)
		require.NoError(t, p.command.Process.Signal(syscall.SIGCONT))
	}
}

// Its messages have gone out when it is killed, and it could not say so. They are
// sent again once its jobs are taken for lost, under the same keys.
func TestChaosKilledWorkerLosesNothing(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	w.bridge(t)
	load := w.startLoad(t, chaosRate())
	for range long(1, 5) {
		victim := w.worker(t)
		load.await(t, 30)
		w.waha.SetFault(sandbox.Fault{AfterDoing: true, Hang: true})
		before := w.unconfirmed(t)
		eventually(t, time.Minute, "messages that went out", func() bool { return w.unconfirmed(t) >= before+5 })
		victim.kill(t)
		w.waha.ClearFault()
	}
	w.worker(t)
	load.await(t, 30)
	load.conclude(t, atLeastOnce)
	require.Positive(t, w.waha.Duplicates(), "nothing was under way")
}

// unconfirmed returns how many messages have gone out of which no job has said so.
func (w *world) unconfirmed(t *testing.T) int {
	t.Helper()
	sent := len(w.waha.Sent())
	return sent - number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE state = 'completed' AND kind = 'whatsapp-send-worker'")
}

// What a bridge does is one transaction, so its end repeats nothing.
func TestChaosKilledBridgeLosesAndRepeatsNothing(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	w.worker(t)
	load := w.startLoad(t, chaosRate())
	victim := w.bridge(t)
	for range long(2, 10) {
		next := w.bridge(t)
		load.await(t, 30)
		victim.kill(t)
		victim = next
	}
	load.await(t, 30)
	load.conclude(t, onceOnly)
}

// Failed jobs wait for the leader to make them available again. The leader here
// works on nothing of ours, so that no job dies with it.
func TestChaosKilledLeaderIsReplacedAndRetriesGoOn(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	const failing = 3
	w.waha.SetFault(sandbox.Fault{Status: http.StatusServiceUnavailable, Times: failing})
	victim, _ := w.serve(t, "--no-bridge", "--queues", "maintenance")
	first := w.leaderBut(t, "")
	w.serve(t)
	load := w.startLoad(t, chaosRate())
	eventually(t, time.Minute, "jobs that wait for the leader", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE state = 'retryable'") == failing
	})
	victim.kill(t)
	load.await(t, 60)
	load.conclude(t, onceOnly)
	t.Logf("leader %s was replaced by %s", first, w.leaderBut(t, first))
}

// leaderBut waits for a leader that is not a certain one.
func (w *world) leaderBut(t *testing.T, but string) string {
	t.Helper()
	var leader string
	eventually(t, time.Minute, "another leader", func() bool {
		err := w.pool.QueryRow(t.Context(), "SELECT leader_id FROM river.river_leader WHERE expires_at > now()").Scan(&leader)
		return err == nil && leader != but
	})
	return leader
}

// A process that stood still goes on in the middle of what it did, and says of
// jobs what may no longer be true. It is the leader as well. In the long form its
// jobs have run elsewhere meanwhile.
func TestChaosFrozenWorkerDoesNoHarm(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	w.waha.SetFault(sandbox.Fault{Delay: 50 * time.Millisecond})
	frozen := w.worker(t)
	leader := w.leaderBut(t, "")
	w.bridge(t)
	w.worker(t)
	load := w.startLoad(t, chaosRate())
	for _, standstill := range long([]time.Duration{15 * time.Second}, []time.Duration{time.Minute, 2 * time.Minute}) {
		load.await(t, 40)
		thaw := frozen.freeze(t)
		before := w.done(t)
		spend(t, standstill)
		require.Greater(t, w.done(t), before, "nothing was done elsewhere")
		thaw()
	}
	t.Logf("leader before %s, after %s", leader, w.leaderBut(t, ""))
	load.await(t, 30)
	load.conclude(t, atLeastOnce)
}

// The events that a bridge held when it stood still wait for it, the others not.
func TestChaosFrozenBridgeDoesNoHarm(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	w.worker(t)
	frozen := w.bridge(t)
	w.bridge(t)
	load := w.startLoad(t, chaosRate())
	for range long(1, 3) {
		load.await(t, 40)
		thaw := frozen.freeze(t)
		before := w.done(t)
		spend(t, long(15*time.Second, time.Minute))
		require.Greater(t, w.done(t), before, "nothing was fanned out elsewhere")
		thaw()
	}
	load.await(t, 30)
	load.conclude(t, onceOnly)
}

func TestChaosFourBridgesFanOutOnce(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	for range 4 {
		w.serve(t, "--queues=", "--no-crons", "--batch", "5") // so small that they get into each other's way
	}
	w.worker(t)
	load := w.startLoad(t, long(30, 150))
	load.await(t, long(300, 5000))
	load.conclude(t, onceOnly)
}

func (w *world) done(t *testing.T) int {
	t.Helper()
	return number(t, w.pool, "SELECT count(*) FROM event_log WHERE status = 'done'")
}
