package eventlog_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"afluente/db"
	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/eventlog/event"
)

// chatArgs is a consumer of message.received, the n-th message of a
// conversation being one with the body "conversation n".
type chatArgs struct {
	Body string `json:"body"`
}

func (chatArgs) Kind() string { return "chat-worker" }

func chat(work func(context.Context, *river.Job[chatArgs]) error) eventlog.Declaration {
	return eventlog.On(func(e eventlog.Event[event.MessageReceived]) chatArgs {
		return chatArgs{Body: e.Payload.Body}
	}, &worker[chatArgs]{work: work})
}

// received is the payload of the n-th message of a conversation.
func received(conversation string, n int) string {
	return fmt.Sprintf(`{"conversation_id": %q, "body": "%s %d"}`, conversation, conversation, n)
}

// emitAll commits events in one transaction and returns their ids.
func (b *bus) emitAll(t *testing.T, payloads ...string) (ids []uuid.UUID) {
	t.Helper()
	b.inTx(t, func(tx pgx.Tx) error {
		for _, payload := range payloads {
			id, err := eventlog.EmitRaw(t.Context(), tx, eventlog.RawEvent{
				Type: "message.received", OrganizationID: b.organization, Payload: []byte(payload),
			})
			if err != nil {
				return err
			}
			ids = append(ids, id)
		}
		return nil
	})
	return ids
}

// diary is what jobs did, by the first word of their body.
type diary struct {
	mu      sync.Mutex
	running map[string]int
	most    map[string]int      // that ran at a time
	done    map[string][]string // the second words, in the order in which they were done
}

func newDiary() *diary {
	return &diary{running: map[string]int{}, most: map[string]int{}, done: map[string][]string{}}
}

func (d *diary) begin(body string) {
	key, _, _ := strings.Cut(body, " ")
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running[key]++
	d.most[key] = max(d.most[key], d.running[key])
}

func (d *diary) end(body string) {
	key, n, _ := strings.Cut(body, " ")
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running[key]--
	d.done[key] = append(d.done[key], n)
}

func (d *diary) of(key string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.done[key])
}

func (d *diary) mostOf(key string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.most[key]
}

func (d *diary) work(took time.Duration) func(context.Context, *river.Job[chatArgs]) error {
	return func(ctx context.Context, job *river.Job[chatArgs]) error {
		d.begin(job.Args.Body)
		defer d.end(job.Args.Body)
		select {
		case <-time.After(took):
		case <-ctx.Done():
		}
		return nil
	}
}

// numbers are the words from 1 to a number.
func numbers(to int) (words []string) {
	for n := range to {
		words = append(words, fmt.Sprint(n+1))
	}
	return words
}

func TestEventsOfOneKeyAreDoneOneAtATimeInTheirOrder(t *testing.T) {
	t.Parallel()
	const keys, each = 4, 15
	diary := newDiary()
	ordered := chat(diary.work(5*time.Millisecond)).Ordered("conversation_id", eventlog.Blocks)
	b := newBus(t, ordered)
	b.start(t)
	joinBus(t, b.pool, b.organization, ordered).start(t)
	ctx, stop := context.WithCancel(t.Context())
	var bridges errgroup.Group
	for range 3 {
		bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: b.pool, Plan: b.plan, Log: zap.NewNop(), MaxBatch: 7})
		require.NoError(t, err)
		bridge.SetPollInterval(20 * time.Millisecond)
		bridges.Go(func() error { return bridge.Run(ctx) })
	}
	defer func() {
		stop()
		require.NoError(t, bridges.Wait())
	}()
	for n := 1; n <= each; n += 3 { // three of a key in a transaction, without a time between them
		for key := range keys {
			name := fmt.Sprintf("chat%d", key)
			b.emitAll(t, received(name, n), received(name, n+1), received(name, n+2))
		}
	}
	eventually(t, "all done", func() bool {
		return count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'done'") == keys*each
	})
	for key := range keys {
		name := fmt.Sprintf("chat%d", key)
		require.Equal(t, numbers(each), diary.of(name))
		require.Equal(t, 1, diary.mostOf(name))
	}
}

// What counts is when a transaction emits, not when it began.
func TestTransactionThatBeganFirstAndEmittedLastComesLast(t *testing.T) {
	t.Parallel()
	diary := newDiary()
	b := newBus(t, chat(diary.work(0)).Ordered("conversation_id", eventlog.Blocks))
	early, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = early.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = early.Exec(t.Context(), "SELECT now()")
	require.NoError(t, err)
	b.emitAll(t, received("chat", 1))
	_, err = eventlog.EmitRaw(t.Context(), early, eventlog.RawEvent{
		Type: "message.received", OrganizationID: b.organization, Payload: []byte(received("chat", 2)),
	})
	require.NoError(t, err)
	require.NoError(t, early.Commit(t.Context()))

	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: b.pool, Plan: b.plan, Log: zap.NewNop(), MaxBatch: 1})
	require.NoError(t, err)
	drain(t, bridge)
	b.start(t)
	eventually(t, "both done", func() bool { return len(diary.of("chat")) == 2 })
	require.Equal(t, []string{"1", "2"}, diary.of("chat"))
}

// An event that waits for its retry keeps those of its key back, and nobody else.
func TestRetryKeepsItsKeyInOrder(t *testing.T) {
	t.Parallel()
	diary := newDiary()
	broken := &fault{err: errBroken}
	b := newBus(t, chat(func(ctx context.Context, job *river.Job[chatArgs]) error {
		if err := broken.get(); err != nil && job.Args.Body == "ill 1" {
			return err
		}
		return diary.work(0)(ctx, job)
	}).Ordered("conversation_id", eventlog.Blocks))
	ids := b.emitAll(t, received("ill", 1), received("well", 1), received("ill", 2), received("well", 2))
	drain(t, b.bridge)
	require.Equal(t, map[string]int{"available": 2, "pending": 2}, states(t, b.pool))
	b.start(t)
	eventually(t, "the other key done", func() bool { return len(diary.of("well")) == 2 })
	eventually(t, "several attempts", func() bool { return b.event(t, ids[0]).Attempts >= 2 })
	require.Empty(t, diary.of("ill"))

	broken.mend()
	b.awaitStatus(t, ids[2], "done")
	require.Equal(t, numbers(2), diary.of("ill"))
}

// dies is a worker that gives the first message of the conversation "ill" up.
func dies(diary *diary, broken *fault) func(context.Context, *river.Job[chatArgs]) error {
	return func(ctx context.Context, job *river.Job[chatArgs]) error {
		if err := broken.get(); err != nil && job.Args.Body == "ill 1" {
			return river.JobCancel(err)
		}
		return diary.work(0)(ctx, job)
	}
}

func TestDeadEventBlocksItsKeyAloneUntilItIsRetried(t *testing.T) {
	t.Parallel()
	diary, broken := newDiary(), &fault{err: errBroken}
	b := newBus(t, chat(dies(diary, broken)).Ordered("conversation_id", eventlog.Blocks))
	ids := b.emitAll(t, received("ill", 1), received("ill", 2), received("well", 1))
	drain(t, b.bridge)
	b.start(t)
	b.awaitStatus(t, ids[0], "dead")
	b.awaitStatus(t, ids[2], "done")
	ids = append(ids, b.emitAll(t, received("ill", 3), received("well", 2))...)
	drain(t, b.bridge)
	b.awaitStatus(t, ids[4], "done")
	require.Equal(t, "processing", b.event(t, ids[1]).Status)
	require.Equal(t, map[string]int{"cancelled": 1, "completed": 2, "pending": 2}, states(t, b.pool))
	require.Empty(t, diary.of("ill"))

	broken.mend()
	_, err := b.client.JobRetry(t.Context(), b.job(t, ids[0], "chat-worker").ID)
	require.NoError(t, err)
	b.awaitStatus(t, ids[3], "done")
	require.Equal(t, numbers(3), diary.of("ill"))
	require.Zero(t, b.job(t, ids[0], "chat-worker").MaxAttempts-8, "it had all its attempts anew")
}

func TestDeadEventThatIsDiscardedBlocksNobodyAnyMore(t *testing.T) {
	t.Parallel()
	diary := newDiary()
	b := newBus(t, chat(dies(diary, &fault{err: errBroken})).Ordered("conversation_id", eventlog.Blocks))
	ids := b.emitAll(t, received("ill", 1), received("ill", 2))
	drain(t, b.bridge)
	b.start(t)
	b.awaitStatus(t, ids[0], "dead")
	_, err := b.client.JobDelete(t.Context(), b.job(t, ids[0], "chat-worker").ID)
	require.NoError(t, err)
	b.awaitStatus(t, ids[1], "done")
}

// A dead one that is skipped and retried later waits for whoever runs by then,
// and goes before those that wait.
func TestDeadEventIsSkippedWhereItsConsumerSaysSo(t *testing.T) {
	t.Parallel()
	diary, broken := newDiary(), &fault{err: errBroken}
	gate := make(chan struct{})
	b := newBus(t, chat(func(ctx context.Context, job *river.Job[chatArgs]) error {
		if job.Args.Body == "ill 3" {
			<-gate
		}
		return dies(diary, broken)(ctx, job)
	}).Ordered("conversation_id", eventlog.Skips))
	ids := b.emitAll(t, received("ill", 1), received("ill", 2), received("ill", 3), received("ill", 4))
	drain(t, b.bridge)
	b.start(t)
	b.awaitStatus(t, ids[1], "done")
	require.Equal(t, "dead", b.event(t, ids[0]).Status)
	eventually(t, "the third to run", func() bool { return b.job(t, ids[2], "chat-worker").State == rivertype.JobStateRunning })

	broken.mend()
	retried, err := b.client.JobRetry(t.Context(), b.job(t, ids[0], "chat-worker").ID)
	require.NoError(t, err)
	require.Equal(t, rivertype.JobStatePending, retried.State)
	close(gate)
	b.awaitStatus(t, ids[3], "done")
	require.Equal(t, []string{"2", "3", "1", "4"}, diary.of("ill"))
}

func TestOperatorCannotPushAJobOutOfItsOrder(t *testing.T) {
	t.Parallel()
	b := newBus(t, chat(nil).Ordered("conversation_id", eventlog.Blocks))
	ids := b.emitAll(t, received("chat", 1), received("chat", 2), received("chat", 3))
	drain(t, b.bridge)
	retried, err := b.client.JobRetry(t.Context(), b.job(t, ids[2], "chat-worker").ID)
	require.NoError(t, err)
	require.Equal(t, rivertype.JobStatePending, retried.State)

	// One that is cancelled while it waits holds up those behind it, not those before.
	_, err = b.client.JobCancel(t.Context(), b.job(t, ids[1], "chat-worker").ID)
	require.NoError(t, err)
	b.start(t)
	b.awaitStatus(t, ids[0], "done")
	require.Equal(t, map[string]int{"cancelled": 1, "completed": 1, "pending": 1}, states(t, b.pool))
	_, err = b.client.JobDelete(t.Context(), b.job(t, ids[1], "chat-worker").ID)
	require.NoError(t, err)
	b.awaitStatus(t, ids[2], "done")
}

// The bridge adds a job behind one that ends in the same moment: whichever comes
// first, the job is not forgotten.
func TestJobIsNotForgottenThatComesAsTheOneBeforeItEnds(t *testing.T) {
	t.Parallel()
	b := newBus(t, chat(nil).Ordered("conversation_id", eventlog.Blocks))
	ids := b.emitAll(t, received("chat", 1))
	drain(t, b.bridge)
	exec(t, b.pool, "UPDATE river.river_job SET "+run)

	// A bridge that has added the job and not committed yet.
	ids = append(ids, b.emitAll(t, received("chat", 2))...)
	exec(t, b.pool, `CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$`)
	exec(t, b.pool, "CREATE TRIGGER wait AFTER INSERT ON river.river_job FOR EACH STATEMENT EXECUTE FUNCTION wait()")
	gate, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = gate.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = gate.Exec(t.Context(), "SELECT pg_advisory_xact_lock(7)")
	require.NoError(t, err)
	var both errgroup.Group
	both.Go(func() error {
		_, err := b.bridge.Step(t.Context())
		return err
	})
	waiting := func(what string) int {
		return count(t, b.pool, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = '"+what+"'")
	}
	eventually(t, "the bridge to wait", func() bool { return waiting("advisory") == 1 })
	both.Go(func() error {
		_, err := b.pool.Exec(t.Context(), "UPDATE river.river_job SET "+complete)
		return err
	})
	eventually(t, "the first job's end to wait for the bridge", func() bool { return waiting("transactionid") == 1 })
	require.NoError(t, gate.Commit(t.Context()))
	require.NoError(t, both.Wait())
	require.Equal(t, rivertype.JobStateAvailable, b.job(t, ids[1], "chat-worker").State)
}

func TestOnlyOneBridgeClaimsEventsThatAreWantedInOrder(t *testing.T) {
	t.Parallel()
	b := newBus(t, chat(nil).Ordered("conversation_id", eventlog.Blocks), alpha(nil))
	b.emitAll(t, received("chat", 1), received("chat", 2))
	b.emit(t, "m-1")
	other, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = other.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = db.New(other).PickDueEvents(t.Context(), 1) // what it locks besides is that order
	require.NoError(t, err)

	drain(t, b.bridge)
	require.Equal(t, 2, count(t, b.pool, "SELECT count(*) FROM event_log WHERE event_type = 'message.received' AND status = 'pending'"))
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE kind = 'alpha-worker'"))
	require.NoError(t, other.Rollback(t.Context()))
	drain(t, b.bridge)
	require.Equal(t, 2, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE kind = 'chat-worker'"))
}

func TestNoMoreOfAnOrganizationRunAtATimeThanItsLimit(t *testing.T) {
	t.Parallel()
	const each = 30
	diary := newDiary()
	failed := make(map[string]bool)
	var mu sync.Mutex
	limited := chat(func(ctx context.Context, job *river.Job[chatArgs]) error {
		diary.begin(job.Args.Body)
		defer diary.end(job.Args.Body)
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
		mu.Lock()
		defer mu.Unlock()
		if strings.HasSuffix(job.Args.Body, "7") && !failed[job.Args.Body] {
			failed[job.Args.Body] = true
			return errBroken
		}
		return nil
	}).LimitedPerOrganization(3)
	b := newBus(t, limited)
	other := joinBus(t, b.pool, newOrganization(t, b.pool), limited)
	for n := range each {
		b.emitAll(t, received("a", n))
		other.emitAll(t, received("b", n))
	}
	drain(t, b.bridge)
	require.Equal(t, map[string]int{"available": 6, "pending": 2*each - 6}, states(t, b.pool))
	b.start(t)
	other.start(t)
	eventually(t, "all done", func() bool {
		return count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'done'") == 2*each
	})
	require.Equal(t, 3, diary.mostOf("a"))
	require.Equal(t, 3, diary.mostOf("b"))
	require.Len(t, diary.of("a"), each+3)
}

// A dead job, or one that waits for its retry, takes up no room.
func TestDeadJobsAreNotCountedInALimit(t *testing.T) {
	t.Parallel()
	b := newBus(t, chat(nil).LimitedPerOrganization(1))
	ids := b.emitAll(t, received("chat", 1), received("chat", 2), received("chat", 3))
	drain(t, b.bridge)
	exec(t, b.pool, "UPDATE river.river_job SET "+run+" WHERE state = 'available'")
	exec(t, b.pool, "UPDATE river.river_job SET "+discard+" WHERE state = 'running'")
	require.Equal(t, rivertype.JobStateAvailable, b.job(t, ids[1], "chat-worker").State)
	exec(t, b.pool, "UPDATE river.river_job SET "+run+" WHERE state = 'available'")
	exec(t, b.pool, "UPDATE river.river_job SET state = 'retryable' WHERE state = 'running'")
	require.Equal(t, rivertype.JobStateAvailable, b.job(t, ids[2], "chat-worker").State)

	// The retry comes due while there is no room.
	exec(t, b.pool, "UPDATE river.river_job SET state = 'available' WHERE state = 'retryable'")
	require.Equal(t, rivertype.JobStatePending, b.job(t, ids[1], "chat-worker").State)
	exec(t, b.pool, "UPDATE river.river_job SET "+run+" WHERE state = 'available'")
	exec(t, b.pool, "UPDATE river.river_job SET "+complete+" WHERE state = 'running'")
	require.Equal(t, rivertype.JobStateAvailable, b.job(t, ids[1], "chat-worker").State)
}

func TestEventsWithoutAKeyAreInNoOrder(t *testing.T) {
	t.Parallel()
	b := newBus(t, chat(nil).Ordered("conversation_id", eventlog.Blocks))
	b.emitAll(t, `{"body": "a"}`, `{"body": "b"}`, `{"conversation_id": "", "body": "c"}`, `{"conversation_id": null}`)
	drain(t, b.bridge)
	require.Equal(t, map[string]int{"available": 4}, states(t, b.pool))
}

// The key is read by the database, so neither a payload that is too large for
// the bridge nor a bridge that does not know the consumer loses the order; and a
// long key is one all the same.
func TestOrderHoldsForDeferredJobsAndLongKeys(t *testing.T) {
	t.Parallel()
	b := newBus(t, chat(nil).Ordered("conversation_id", eventlog.Blocks))
	stranger := joinBus(t, b.pool, b.organization)
	long := strings.Repeat("k", 5000)
	b.emitAll(t,
		fmt.Sprintf(`{"conversation_id": "a", "body": %q}`, strings.Repeat("x", 100_000)), `{"conversation_id": "a"}`,
		fmt.Sprintf(`{"conversation_id": %q}`, long), fmt.Sprintf(`{"conversation_id": %q}`, long))
	drain(t, stranger.bridge)
	require.Equal(t, map[string]int{"available": 2, "pending": 2}, states(t, b.pool))
	require.Less(t, count(t, b.pool, "SELECT max(length(metadata::text)) FROM river.river_job"), 500)
}

func TestEventsOfAnEntityAreInOrder(t *testing.T) {
	t.Parallel()
	b := newBus(t, eventlog.On(func(e eventlog.Event[event.Any]) anyArgs {
		return anyArgs{EventID: e.ID}
	}, &worker[anyArgs]{}).Ordered("entity_id", eventlog.Skips))
	entity := uuid.New()
	b.inTx(t, func(tx pgx.Tx) error {
		for _, id := range []uuid.UUID{entity, entity, uuid.New(), uuid.Nil, uuid.Nil} {
			_, err := eventlog.EmitRaw(t.Context(), tx, eventlog.RawEvent{
				Type: "lead.deleted", OrganizationID: b.organization, EntityID: id, Payload: []byte(`{}`),
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	drain(t, b.bridge)
	require.Equal(t, map[string]int{"available": 4, "pending": 1}, states(t, b.pool))
}

func TestReconcileLetsALaneGoOnThatWasForgotten(t *testing.T) {
	t.Parallel()
	b := newBus(t, chat(nil).Ordered("conversation_id", eventlog.Blocks))
	ids := b.emitAll(t, received("chat", 1), received("chat", 2), received("busy", 1), received("busy", 2))
	drain(t, b.bridge)
	exec(t, b.pool, "ALTER TABLE river.river_job DISABLE TRIGGER afluente_yield_updated")
	exec(t, b.pool, "UPDATE river.river_job SET "+run+" WHERE id = $1", b.job(t, ids[0], "chat-worker").ID)
	exec(t, b.pool, "UPDATE river.river_job SET "+complete+" WHERE state = 'running'")
	require.Equal(t, map[string]int{"available": 1, "completed": 1, "pending": 2}, states(t, b.pool))
	exec(t, b.pool, "UPDATE event_lanes SET used_at = now() - interval '2 days'")
	exec(t, b.pool, "INSERT INTO event_lanes VALUES ('chat-worker', 'idle', now() - interval '2 days'), ('chat-worker', 'new', now())")

	done, err := eventlog.Reconcile(t.Context(), b.pool, time.Time{}, time.Hour)
	require.NoError(t, err)
	require.Equal(t, eventlog.Reconciled{Advanced: 1}, done)
	require.Equal(t, rivertype.JobStateAvailable, b.job(t, ids[1], "chat-worker").State)
	require.Equal(t, rivertype.JobStatePending, b.job(t, ids[3], "chat-worker").State)
	require.Equal(t, 3, count(t, b.pool, "SELECT count(*) FROM event_lanes WHERE lane <> 'idle'"))
	require.Zero(t, count(t, b.pool, "SELECT count(*) FROM event_lanes WHERE lane = 'idle'"))
}

func TestCompileReportsMistakesInOrderAndLimit(t *testing.T) {
	t.Parallel()
	_, err := eventlog.Compile(
		chat(nil).Ordered("conversation", "wait").LimitedPerOrganization(0),
		eventlog.Job(&worker[anyArgs]{}).LimitedPerOrganization(1),
		alpha(nil).Ordered("", eventlog.Skips),
	)
	for _, want := range []string{
		`declare "chat-worker": the limit 0 for an organization`,
		`it has an order and a limit`,
		`the events of message.received have no field "conversation" to be ordered by`,
		`what a dead job does is "wait", neither "block" nor "skip"`,
		`declare "any-worker": only a consumer has an order or a limit`,
		`declare "alpha-worker": the events of message.queued have no field ""`,
	} {
		require.ErrorContains(t, err, want)
	}
	plan, err := eventlog.Compile(chat(nil).Ordered("conversation_id", eventlog.Skips), alpha(nil).LimitedPerOrganization(4))
	require.NoError(t, err)
	require.Equal(t, "event message.queued, 4 of an organization", plan.Entries()[0].Trigger)
	require.Equal(t, "event message.received, in order of conversation_id (skip dead)", plan.Entries()[1].Trigger)
}

func TestLongLanesAndDeadJobsAreNotReadForEachJob(t *testing.T) {
	t.Parallel()
	const others = 1000
	b := newBus(t, chat(nil).Ordered("conversation_id", eventlog.Blocks))
	payloads := make([]string, 2*others)
	for i := range others {
		payloads[i], payloads[others+i] = received("dead", i), received("a", i)
	}
	b.emitAll(t, payloads...)
	drain(t, b.bridge)
	exec(t, b.pool, "ALTER TABLE river.river_job SET (autovacuum_enabled = off)") // the plan is to be that of before
	exec(t, b.pool, "ANALYZE river.river_job")
	session, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer session.Release()
	_, err = session.Exec(t.Context(), "SELECT advance_lanes('{chat-worker}', '{none}')")
	require.NoError(t, err)
	_, err = session.Exec(t.Context(), "UPDATE river.river_job SET state = 'cancelled', finalized_at = now() WHERE args ->> 'body' ^@ 'dead'")
	require.NoError(t, err)

	tx, err := session.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	read := func() (rows int) {
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT seq_tup_read + idx_tup_fetch
			FROM pg_stat_xact_user_tables WHERE relid = 'river.river_job'::regclass`).Scan(&rows))
		return rows
	}
	before := read()
	_, err = tx.Exec(t.Context(), "UPDATE river.river_job SET "+complete+" WHERE args ->> 'body' = 'a 0' AND state = 'available'")
	require.NoError(t, err)
	require.Less(t, read()-before, others/2)
	var available int
	require.NoError(t, tx.QueryRow(t.Context(), "SELECT count(*) FROM river.river_job WHERE state = 'available' AND args ->> 'body' = 'a 1'").Scan(&available))
	require.Equal(t, 1, available)
}

// completions holds up the completion of jobs until release: of those in a
// transaction, which are ours, or of the others, which are River's.
type completions struct {
	ours    bool
	after   chan struct{} // not nil: held up after the statement, which closes it
	release chan struct{}
}

type heldUpKey struct{}

func (c *completions) TraceQueryStart(ctx context.Context, conn *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	if !strings.Contains(query.SQL, "JobSetStateIfRunningMany") || c.ours != (conn.PgConn().TxStatus() == 'T') {
		return ctx
	}
	if c.after == nil {
		<-c.release
	}
	return context.WithValue(ctx, heldUpKey{}, true)
}

func (c *completions) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if c.after != nil && ctx.Value(heldUpKey{}) != nil {
		close(c.after)
		<-c.release
	}
}

// startHeldUp starts a client whose completions are held up until the test ends.
func (b *bus) startHeldUp(t *testing.T, held *completions, declarations ...eventlog.Declaration) {
	t.Helper()
	held.release = make(chan struct{})
	config := b.pool.Config()
	config.ConnConfig.Tracer = held
	joinBus(t, dbtest.Pool(t, config), b.organization, declarations...).start(t)
	t.Cleanup(func() { close(held.release) }) // before the client is stopped
}

func TestKeyGoesOnWithoutRiversNextBatch(t *testing.T) {
	t.Parallel()
	done := newDiary()
	ordered := chat(done.work(0)).Ordered("conversation_id", eventlog.Blocks)
	b := newBus(t, ordered)
	b.startHeldUp(t, &completions{ours: false}, ordered)
	payloads := make([]string, 5)
	for i := range payloads {
		payloads[i] = received("a", i+1)
	}
	ids := b.emitAll(t, payloads...)
	drain(t, b.bridge)
	for _, id := range ids {
		b.awaitStatus(t, id, "done")
	}
	require.Equal(t, numbers(5), done.of("a"))
}

func TestRiverCompletesWhatCannotBeCompletedAtOnce(t *testing.T) {
	t.Parallel()
	const keys = 20
	var arrived sync.WaitGroup
	arrived.Add(keys)
	ordered := chat(func(context.Context, *river.Job[chatArgs]) error {
		arrived.Done()
		arrived.Wait()
		return nil
	}).Ordered("conversation_id", eventlog.Blocks)
	b := newBus(t, ordered)
	b.startHeldUp(t, &completions{ours: true}, ordered)
	payloads := make([]string, keys)
	for i := range payloads {
		payloads[i] = received(fmt.Sprint("key", i), 1)
	}
	b.emitAll(t, payloads...)
	drain(t, b.bridge)
	eventually(t, "that River completes them", func() bool { return states(t, b.pool)["completed"] >= keys-8 })
}

func TestProcessThatFreezesAsItCompletesAJobHoldsUpNobody(t *testing.T) {
	t.Parallel()
	ordered := chat(newDiary().work(0)).Ordered("conversation_id", eventlog.Blocks)
	b := newBus(t, ordered)
	held := &completions{ours: true, after: make(chan struct{})}
	b.startHeldUp(t, held, ordered)
	b.emitAll(t, received("a", 1))
	drain(t, b.bridge)
	<-held.after
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := b.pool.Exec(ctx, "SELECT FROM event_log, event_lanes FOR UPDATE")
	require.NoError(t, err)
}
