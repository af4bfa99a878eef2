package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/jobs/sandbox"
)

// fate is what an emitter knows of its transaction.
type fate int

const (
	rolledBack fate = iota
	committed
	unknown // the connection was lost after COMMIT had been sent
)

// emission is an event as its emitter knows it.
type emission struct {
	eventType string
	message   uuid.UUID // of message.queued
	fate      fate
	at        time.Time // when the emitter heard of it
}

// ledger is what emitters know of the events that they emitted, by id.
type ledger struct {
	mu        sync.Mutex
	emissions map[uuid.UUID]emission
}

func newLedger() *ledger { return &ledger{emissions: make(map[uuid.UUID]emission)} }

// enter puts down what became of the events of one transaction.
func (l *ledger) enter(f fate, events map[uuid.UUID]emission) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, e := range events {
		e.fate, e.at = f, time.Now()
		l.emissions[id] = e
	}
}

func (l *ledger) snapshot() map[uuid.UUID]emission {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.emissions)
}

// count returns how many events have a fate.
func (l *ledger) count(f fate) (n int) {
	for _, e := range l.snapshot() {
		if e.fate == f {
			n++
		}
	}
	return n
}

// consumersOf returns who is to get an event of a type that the load emits or
// that comes of it, in the order of their names; nil for a type that is not to
// turn up at all.
func consumersOf(eventType string) []string {
	switch eventType {
	case "message.queued":
		return []string{"webhook-dispatch-worker", "whatsapp-send-worker"}
	case "lead.lost", "message.sent":
		return []string{"webhook-dispatch-worker"}
	default:
		return nil
	}
}

// difference is one thing that is not as it was promised.
type difference struct {
	kind string // lost, doubled or wrong
	what string
}

// audit is what an auditor found.
type audit struct {
	emitted, unknown, rolledBack int // what the emitters say; of those unknown, some were committed
	done                         int // events
	jobs                         int // of events and deliveries
	effects                      int // messages that went out and deliveries that arrived
	repeats                      int // calls that a receiver knows by their keys and drops
	differences                  []difference
}

func (a *audit) differ(kind, format string, args ...any) {
	a.differences = append(a.differences, difference{kind, fmt.Sprintf(format, args...)})
}

func (a *audit) of(kind string) (n int) {
	for _, d := range a.differences {
		if d.kind == kind {
			n++
		}
	}
	return n
}

// String is the report, on one line.
func (a *audit) String() string {
	return fmt.Sprintf("emitted=%d unknown=%d rolled_back=%d done=%d jobs=%d side_effects=%d repeats=%d lost=%d doubled=%d wrong=%d",
		a.emitted, a.unknown, a.rolledBack, a.done, a.jobs, a.effects, a.repeats, a.of("lost"), a.of("doubled"), a.of("wrong"))
}

// list names the first differences of each kind, one a line.
func (a *audit) list() string {
	const most = 20
	var list strings.Builder
	for _, kind := range []string{"lost", "doubled", "wrong"} {
		shown := 0
		for _, d := range a.differences {
			if d.kind != kind {
				continue
			}
			if shown++; shown > most {
				fmt.Fprintf(&list, "%s: and %d more\n", kind, a.of(kind)-most)
				break
			}
			fmt.Fprintf(&list, "%s: %s\n", d.kind, d.what)
		}
	}
	return list.String()
}

// auditedEvent is an event with its jobs and its delivery.
type auditedEvent struct {
	ID            uuid.UUID
	EventType     string
	EntityID      *uuid.UUID
	Status        string
	Consumers     []string
	ConsumedBy    []string
	DeadConsumers []string
}

// auditedJob is all jobs with the same purpose: of one event and consumer, or of
// one delivery.
type auditedJob struct {
	Owner  string // id of the event or delivery
	Kind   string
	Count  int
	States []string
}

type auditedDelivery struct {
	ID       uuid.UUID
	EventID  uuid.UUID
	State    string
	Attempts int // that were put down before they were made
}

// evidence is what there is to compare: what emitters say, what the database
// has, and what the systems outside saw.
type evidence struct {
	emissions  map[uuid.UUID]emission
	events     []auditedEvent
	jobs       []auditedJob
	deliveries []auditedDelivery
	sent       []sandbox.Message
	duplicates int
	accepted   map[string]int
	calls      []sandbox.Call // at the receiver, the last ones
}

// gather reads the evidence in a world at rest.
func (w *world) gather(ctx context.Context, l *ledger) (*evidence, error) {
	e := &evidence{
		emissions: l.snapshot(), sent: w.waha.Sent(), duplicates: w.waha.Duplicates(),
		accepted: w.receiver.Accepted(), calls: w.receiver.Calls(),
	}
	// One snapshot for all of them, so that something that still moves is not
	// taken for a difference between two tables.
	err := pgx.BeginTxFunc(ctx, w.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error { return e.read(ctx, tx) })
	if err != nil {
		return nil, fmt.Errorf("gather evidence: %w", err)
	}
	return e, nil
}

// read reads what the database has.
func (e *evidence) read(ctx context.Context, tx pgx.Tx) (err error) {
	e.events, err = rowsOf[auditedEvent](ctx, tx, `
		SELECT id, event_type, entity_id, status, consumers, consumed_by, dead_consumers FROM event_log ORDER BY created_at, id`)
	if err != nil {
		return err
	}
	e.jobs, err = rowsOf[auditedJob](ctx, tx, `
		SELECT coalesce(metadata ->> 'event_id', args ->> 'delivery_id') AS owner, kind, count(*) AS count,
			array_agg(state::text ORDER BY id) AS states
		FROM river.river_job
		WHERE metadata ? 'event_id' OR kind = 'webhook-delivery-worker'
		GROUP BY 1, 2 ORDER BY 1, 2`)
	if err != nil {
		return err
	}
	e.deliveries, err = rowsOf[auditedDelivery](ctx, tx, `
		SELECT d.id, d.event_id, d.state,
			(SELECT count(*) FROM webhook_attempts AS a WHERE a.delivery_id = d.id) AS attempts
		FROM webhook_deliveries AS d ORDER BY d.id`)
	return err
}

func rowsOf[T any](ctx context.Context, tx pgx.Tx, query string) ([]T, error) {
	rows, err := tx.Query(ctx, query)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[T])
}

// audit compares everything with everything.
func (e *evidence) audit() *audit {
	a := &audit{}
	jobs := make(map[[2]string]auditedJob, len(e.jobs))
	for _, job := range e.jobs {
		a.jobs += job.Count
		jobs[[2]string{job.Owner, job.Kind}] = job
	}
	e.auditEmissions(a)
	e.auditEvents(a, jobs)
	e.auditDeliveries(a, jobs)
	e.auditMessages(a)
	for _, job := range slices.SortedFunc(maps.Values(jobs), func(x, y auditedJob) int { return strings.Compare(x.Owner+x.Kind, y.Owner+y.Kind) }) {
		a.differ("wrong", "job %s of %s, which is not there or not for it", job.Kind, job.Owner)
	}
	return a
}

// auditEmissions compares what emitters were told with the events that are there.
func (e *evidence) auditEmissions(a *audit) {
	there := make(map[uuid.UUID]auditedEvent, len(e.events))
	for _, event := range e.events {
		there[event.ID] = event
	}
	for id, emission := range e.emissions {
		event, ok := there[id]
		switch emission.fate {
		case committed:
			a.emitted++
			if !ok {
				a.differ("lost", "event %s (%s) was committed and is not in event_log", id, emission.eventType)
			}
		case unknown:
			a.unknown++
		case rolledBack:
			a.rolledBack++
			if ok {
				a.differ("wrong", "event %s (%s) was rolled back and is in event_log", id, emission.eventType)
			}
		}
		if ok && event.EventType != emission.eventType {
			a.differ("wrong", "event %s is %s and was emitted as %s", id, event.EventType, emission.eventType)
		}
	}
}

// auditEvents requires that each event is done and has its jobs, and takes those
// from jobs. An event that nobody emitted has to be the message.sent of a message.
func (e *evidence) auditEvents(a *audit, jobs map[[2]string]auditedJob) {
	queued, sent := make(map[uuid.UUID]int), make(map[uuid.UUID]int)
	for _, event := range e.events {
		want := consumersOf(event.EventType)
		_, emitted := e.emissions[event.ID]
		switch {
		case want == nil, !emitted && event.EventType != "message.sent":
			a.differ("wrong", "event %s (%s) was emitted by nobody", event.ID, event.EventType)
		case event.EntityID == nil:
		case event.EventType == "message.queued":
			queued[*event.EntityID]++
		case event.EventType == "message.sent":
			sent[*event.EntityID]++
		}
		if event.Status == "done" {
			a.done++
		} else {
			a.differ("lost", "event %s (%s) is %s, consumed by %q of %q, dead for %q",
				event.ID, event.EventType, event.Status, event.ConsumedBy, event.Consumers, event.DeadConsumers)
		}
		for column, names := range map[string][]string{"consumers": event.Consumers, "consumed_by": event.ConsumedBy} {
			if got := slices.Sorted(slices.Values(names)); !slices.Equal(got, want) {
				a.differ("wrong", "event %s (%s) has %s %q, not %q", event.ID, event.EventType, column, got, want)
			}
		}
		if len(event.DeadConsumers) > 0 {
			a.differ("wrong", "event %s (%s) is dead for %q", event.ID, event.EventType, event.DeadConsumers)
		}
		for _, consumer := range want {
			a.oneJob(jobs, event.ID.String(), consumer)
		}
	}
	for message, times := range queued {
		switch {
		case times > 1:
			a.differ("doubled", "message %s has %d events message.queued", message, times)
		case sent[message] == 0:
			a.differ("lost", "message %s has no event message.sent", message)
		case sent[message] > 1:
			a.differ("doubled", "message %s has %d events message.sent", message, sent[message])
		}
	}
	for message := range sent {
		if queued[message] == 0 {
			a.differ("wrong", "message %s has an event message.sent and none message.queued", message)
		}
	}
}

// oneJob requires that there is one job for a purpose, which completed, and takes
// it from jobs.
func (a *audit) oneJob(jobs map[[2]string]auditedJob, owner, kind string) {
	key := [2]string{owner, kind}
	job, ok := jobs[key]
	delete(jobs, key)
	switch {
	case !ok:
		a.differ("lost", "no job %s of %s", kind, owner)
	case job.Count > 1:
		a.differ("doubled", "%d jobs %s of %s: %q", job.Count, kind, owner, job.States)
	case job.States[0] != "completed":
		a.differ("lost", "job %s of %s is %s", kind, owner, job.States[0])
	}
}

// auditDeliveries requires that each event was delivered, by one delivery, which
// the receiver knows however often it got it, and that no POST was made which
// had not been put down before.
func (e *evidence) auditDeliveries(a *audit, jobs map[[2]string]auditedJob) {
	accepted := maps.Clone(e.accepted)
	byEvent := make(map[uuid.UUID]int, len(e.events))
	events := make(map[string]string, len(e.deliveries)) // by delivery
	for _, delivery := range e.deliveries {
		id := delivery.ID.String()
		byEvent[delivery.EventID]++
		events[id] = delivery.EventID.String()
		if delivery.State != "succeeded" {
			a.differ("lost", "delivery %s of event %s is %s", id, delivery.EventID, delivery.State)
		}
		a.oneJob(jobs, id, "webhook-delivery-worker")
		times := accepted[id]
		delete(accepted, id)
		switch {
		case times == 0:
			a.differ("lost", "delivery %s of event %s never arrived", id, delivery.EventID)
			continue
		case times > delivery.Attempts:
			a.differ("doubled", "delivery %s of event %s arrived %d times in %d attempts", id, delivery.EventID, times, delivery.Attempts)
		}
		a.effects++
		a.repeats += times - 1
	}
	for _, event := range e.events {
		switch n := byEvent[event.ID]; {
		case n == 0:
			a.differ("lost", "event %s (%s) has no delivery", event.ID, event.EventType)
		case n > 1:
			a.differ("doubled", "event %s (%s) has %d deliveries", event.ID, event.EventType, n)
		}
		delete(byEvent, event.ID)
	}
	for event, n := range byEvent {
		a.differ("wrong", "%d deliveries of event %s, which is not there", n, event)
	}
	for id, times := range accepted {
		a.differ("wrong", "delivery %q arrived %d times and is not there", id, times)
	}
	for _, call := range e.calls {
		id := call.Header.Get("X-Webhook-Delivery")
		if got := call.Header.Get("Webhook-Id"); got != events[id] {
			a.differ("doubled", "delivery %q of event %q came with webhook-id %q, by which nobody knows it again", id, events[id], got)
		}
	}
}

// auditMessages requires that each message that was queued went out once, and no
// other. WAHA drops a call that repeats a key; a message that went out under two
// keys is doubled.
func (e *evidence) auditMessages(a *audit) {
	a.repeats += e.duplicates
	keys := make(map[string][]string, len(e.sent)) // by the message's id
	for _, message := range e.sent {
		id := message.Text[strings.LastIndex(message.Text, " ")+1:]
		keys[id] = append(keys[id], message.IdempotencyKey)
	}
	for _, event := range e.events {
		if event.EventType != "message.queued" || event.EntityID == nil {
			continue
		}
		id := event.EntityID.String()
		switch got := keys[id]; {
		case len(got) == 0:
			a.differ("lost", "message %s never went out", id)
		case len(got) > 1:
			a.differ("doubled", "message %s went out under the keys %q", id, got)
		case got[0] != id:
			a.differ("wrong", "message %s went out under the key %q", id, got[0])
		default:
			a.effects++
		}
		delete(keys, id)
	}
	for id, got := range keys {
		a.differ("wrong", "message %q went out under the keys %q and nobody queued it", id, got)
	}
}

// edge says whether a fault may make a call be repeated.
type edge int

const (
	onceOnly edge = iota // nothing was cut off, so nothing is repeated
	atLeastOnce
)

// requireAudit waits until everything that was emitted is done, and requires that
// nothing is lost and nothing doubled.
func (w *world) requireAudit(t *testing.T, l *ledger, may edge) {
	t.Helper()
	w.awaitRest(t)
	w.auditNow(t, l, may)
}

func (w *world) auditNow(t *testing.T, l *ledger, may edge) {
	t.Helper()
	e, err := w.gather(t.Context(), l)
	require.NoError(t, err)
	a := e.audit()
	if may == onceOnly && a.repeats > 0 {
		a.differ("doubled", "%d calls were repeated though nothing was cut off", a.repeats)
	}
	t.Log(a)
	require.Empty(t, a.differences, "%s\n%s", a, a.list())
	require.Positive(t, a.emitted, "nothing was emitted")
}

// awaitRest waits until nothing is left to do, or until for long it has not become
// less, since how fast that goes is the machine's: what is left then is the auditor's
// to name.
func (w *world) awaitRest(t *testing.T) {
	t.Helper()
	least, stuck := math.MaxInt, time.After(settleWithin)
	for {
		n := left(t.Context(), w.pool)
		if n == 0 {
			return
		}
		if n > 0 && n < least {
			least, stuck = n, time.After(settleWithin)
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-stuck:
			mark(t, "%d left, no fewer within %s; the sessions:\n%s", least, settleWithin, w.sessions(t.Context()))
			return
		}
	}
}

// left returns how many events, jobs and deliveries are not over, -1 when the
// database does not answer.
func left(ctx context.Context, pool *pgxpool.Pool) int {
	n := -1
	err := pool.QueryRow(ctx, `SELECT
		(SELECT count(*) FROM event_log WHERE status <> 'done')
		+ (SELECT count(*) FROM webhook_deliveries WHERE state <> 'succeeded')
		+ (SELECT count(*) FROM river.river_job
			WHERE (metadata ? 'event_id' OR kind = 'webhook-delivery-worker') AND state <> 'completed')`).Scan(&n)
	if err != nil {
		return -1
	}
	return n
}

// sessions returns those of the database, who waits for whom included.
func (w *world) sessions(ctx context.Context) string {
	return w.report(ctx, "session", `
		SELECT pid, application_name, state, wait_event_type, wait_event, xact_start, state_change,
			pg_blocking_pids(pid) AS waits_for, left(query, 200) AS query
		FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid()`)
}

// unusual returns what did not go through at once: it is not over, or was tried again.
func (w *world) unusual(ctx context.Context) string {
	return w.report(ctx, "leader", "SELECT *, clock_timestamp() AS now FROM river.river_leader") +
		w.report(ctx, "event", `
			SELECT id, event_type, status, consumers, consumed_by, dead_consumers, attempts, last_error, created_at, updated_at, next_attempt_at
			FROM event_log WHERE status <> 'done' OR attempts > 1 ORDER BY created_at, id`) +
		w.report(ctx, "job", `
			SELECT id, kind, state, attempt, attempted_at, attempted_by, scheduled_at, finalized_at, args,
				metadata ->> 'event_id' AS event_id, errors[array_upper(errors, 1)] ->> 'error' AS error
			FROM river.river_job WHERE state <> 'completed' OR errors IS NOT NULL ORDER BY id`) +
		w.report(ctx, "delivery", `
			SELECT d.id, d.event_id, d.state, d.attempts, d.job_id, d.next_attempt_at, d.lease_until, d.last_error, d.updated_at, (
				SELECT json_agg(json_build_object('started_at', a.started_at, 'class', a.class, 'ms', a.duration_ms) ORDER BY a.number)
				FROM webhook_attempts AS a WHERE a.delivery_id = d.id
			) AS tries
			FROM webhook_deliveries AS d WHERE d.state <> 'succeeded' OR d.attempts > 1 ORDER BY d.created_at, d.id`)
}

// report returns the first rows of a query, one a line.
func (w *world) report(ctx context.Context, name, query string) string {
	const most = 20
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var text strings.Builder
	rows, err := w.pool.Query(ctx, "SELECT to_jsonb(r)::text FROM ("+query+") AS r")
	if err == nil {
		var row string
		n := 0
		_, err = pgx.ForEachRow(rows, []any{&row}, func() error {
			if n++; n <= most {
				fmt.Fprintf(&text, "%s: %s\n", name, row)
			}
			return nil
		})
		if n > most {
			fmt.Fprintf(&text, "%s: and %d more\n", name, n-most)
		}
	}
	if err != nil {
		fmt.Fprintf(&text, "%s: %s\n", name, err)
	}
	return text.String()
}

// An auditor that overlooks something makes every test that trusts it worthless.
func TestAuditorNamesEveryDamage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(t)
	load := w.startLoad(t, 50)
	load.await(t, 60)
	load.stop(t)
	w.requireAudit(t, load.ledger, onceOnly)
	e, err := w.gather(t.Context(), load.ledger)
	require.NoError(t, err)
	var id, message uuid.UUID
	for eventID, emission := range e.emissions {
		if emission.fate == committed && emission.eventType == "message.queued" {
			id, message = eventID, emission.message
		}
	}
	job := fmt.Sprintf("metadata ->> 'event_id' = '%s' AND kind = 'webhook-dispatch-worker'", id)
	copyJob := `INSERT INTO river.river_job (args, kind, max_attempts, metadata, state, finalized_at, queue)
		SELECT args, kind, max_attempts, metadata, state, finalized_at, queue FROM river.river_job WHERE `

	// Each is done in a transaction that is rolled back.
	for name, damage := range map[string]struct {
		statement string
		want      difference
	}{
		"event is missing": {
			fmt.Sprintf("DELETE FROM event_log WHERE id = '%s'", id),
			difference{"lost", fmt.Sprintf("event %s (message.queued) was committed and is not in event_log", id)},
		},
		"event of nobody": {
			`SELECT emit_event('lead.lost', 'lead', NULL, '{}', '{}', '` + demoOrganization + `')`,
			difference{"wrong", "(lead.lost) was emitted by nobody"},
		},
		"event is not done": {
			fmt.Sprintf("UPDATE event_log SET status = 'processing' WHERE id = '%s'", id),
			difference{"lost", fmt.Sprintf("event %s (message.queued) is processing", id)},
		},
		"consumer is missing": {
			fmt.Sprintf("UPDATE event_log SET consumed_by = '{whatsapp-send-worker}' WHERE id = '%s'", id),
			difference{"wrong", fmt.Sprintf("event %s (message.queued) has consumed_by", id)},
		},
		"consumer is double": {
			fmt.Sprintf("UPDATE event_log SET consumed_by = consumed_by || '{whatsapp-send-worker}' WHERE id = '%s'", id),
			difference{"wrong", fmt.Sprintf("event %s (message.queued) has consumed_by", id)},
		},
		"job is missing": {
			"ALTER TABLE river.river_job DISABLE TRIGGER USER; DELETE FROM river.river_job WHERE " + job,
			difference{"lost", fmt.Sprintf("no job webhook-dispatch-worker of %s", id)},
		},
		"job is double": {
			copyJob + job,
			difference{"doubled", fmt.Sprintf("2 jobs webhook-dispatch-worker of %s", id)},
		},
		"job did not end": {
			"ALTER TABLE river.river_job DISABLE TRIGGER USER; " +
				"UPDATE river.river_job SET state = 'running', finalized_at = NULL WHERE " + job,
			difference{"lost", fmt.Sprintf("job webhook-dispatch-worker of %s is running", id)},
		},
		"job of a consumer that is not its own": {
			fmt.Sprintf("UPDATE river.river_job SET metadata = metadata || '{\"event_id\": \"%s\"}' "+
				"WHERE id = (SELECT max(id) FROM river.river_job WHERE metadata ->> 'event_id' <> '%s')", uuid.Nil, id),
			difference{"wrong", "of 00000000-0000-0000-0000-000000000000, which is not there"},
		},
		"delivery is missing": {
			fmt.Sprintf("DELETE FROM webhook_deliveries WHERE event_id = '%s'", id),
			difference{"lost", fmt.Sprintf("event %s (message.queued) has no delivery", id)},
		},
		"delivery is double": {
			fmt.Sprintf(`INSERT INTO webhook_deliveries (event_id, subscription_id, organization_id, state)
				SELECT event_id, gen_random_uuid(), organization_id, state FROM webhook_deliveries WHERE event_id = '%s'`, id),
			difference{"doubled", fmt.Sprintf("event %s (message.queued) has 2 deliveries", id)},
		},
		"delivery has no job": {
			`DELETE FROM river.river_job WHERE kind = 'webhook-delivery-worker' AND args ->> 'delivery_id' =
				(SELECT d.id::text FROM webhook_deliveries AS d WHERE d.event_id = '` + id.String() + `')`,
			difference{"lost", "no job webhook-delivery-worker of"},
		},
		"delivery has two jobs": {
			copyJob + `kind = 'webhook-delivery-worker' AND args ->> 'delivery_id' =
				(SELECT d.id::text FROM webhook_deliveries AS d WHERE d.event_id = '` + id.String() + `')`,
			difference{"doubled", "2 jobs webhook-delivery-worker of"},
		},
		"delivery did not end": {
			fmt.Sprintf("UPDATE webhook_deliveries SET state = 'pending' WHERE event_id = '%s'", id),
			difference{"lost", fmt.Sprintf("of event %s is pending", id)},
		},
		"attempt was not put down": {
			"DELETE FROM webhook_attempts",
			difference{"doubled", fmt.Sprintf("of event %s arrived 1 times in 0 attempts", id)},
		},
	} {
		tx, err := w.pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), damage.statement)
		require.NoError(t, err, name)
		damaged := *e
		require.NoError(t, damaged.read(t.Context(), tx), name)
		require.NoError(t, tx.Rollback(t.Context()))
		requireDifference(t, name, damaged.audit(), damage.want)
	}

	// What is outside the database.
	delivery := slices.Sorted(maps.Keys(e.accepted))[0]
	strange := uuid.NewString()
	for name, damage := range map[string]struct {
		do   func(*evidence)
		want difference
	}{
		"emitter knows of more": {
			func(e *evidence) { e.emissions[uuid.Nil] = emission{eventType: "lead.lost", fate: committed} },
			difference{"lost", "event 00000000-0000-0000-0000-000000000000 (lead.lost) was committed"},
		},
		"rolled back and there": {
			func(e *evidence) { e.emissions[id] = emission{eventType: "message.queued", fate: rolledBack} },
			difference{"wrong", fmt.Sprintf("event %s (message.queued) was rolled back", id)},
		},
		"message did not go out": {
			func(e *evidence) {
				e.sent = slices.DeleteFunc(e.sent, func(m sandbox.Message) bool { return m.IdempotencyKey == message.String() })
			},
			difference{"lost", fmt.Sprintf("message %s never went out", message)},
		},
		"message went out under another key": {
			func(e *evidence) {
				e.sent = append(e.sent, sandbox.Message{Text: "hello " + message.String(), IdempotencyKey: "other"})
			},
			difference{"doubled", fmt.Sprintf("message %s went out under the keys", message)},
		},
		"message of nobody": {
			func(e *evidence) {
				e.sent = append(e.sent, sandbox.Message{Text: "hello " + strange, IdempotencyKey: strange})
			},
			difference{"wrong", fmt.Sprintf("message %q went out", strange)},
		},
		"delivery did not arrive": {
			func(e *evidence) { delete(e.accepted, delivery) },
			difference{"lost", fmt.Sprintf("delivery %s of event", delivery)},
		},
		"delivery arrived too often": {
			func(e *evidence) { e.accepted[delivery]++ },
			difference{"doubled", "arrived 2 times in 1 attempts"},
		},
		"delivery of nobody": {
			func(e *evidence) { e.accepted[strange]++ },
			difference{"wrong", fmt.Sprintf("delivery %q arrived 1 times and is not there", strange)},
		},
		"delivery under another id": {
			func(e *evidence) {
				call := e.calls[0]
				call.Header = call.Header.Clone()
				call.Header.Set("Webhook-Id", strange)
				e.calls = append(e.calls, call)
			},
			difference{"doubled", fmt.Sprintf("came with webhook-id %q", strange)},
		},
	} {
		damaged := *e
		damaged.emissions, damaged.accepted = maps.Clone(e.emissions), maps.Clone(e.accepted)
		damaged.sent, damaged.calls = slices.Clone(e.sent), slices.Clone(e.calls)
		damage.do(&damaged)
		requireDifference(t, name, damaged.audit(), damage.want)
	}
}

func requireDifference(t *testing.T, name string, a *audit, want difference) {
	t.Helper()
	require.True(t, slices.ContainsFunc(a.differences, func(d difference) bool {
		return d.kind == want.kind && strings.Contains(d.what, want.what)
	}), "%s: want %s: %s, got\n%s", name, want.kind, want.what, a.list())
}
