package eventlog_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"afluente/eventlog"
	"afluente/eventlog/event"
)

func TestEventIsOnTheBusIfAndOnlyIfItsTransactionCommits(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = eventlog.Emit(t.Context(), tx, b.queued("never"))
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	committed := b.emit(t, "committed")

	drain(t, b.bridge)
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM event_log"))
	require.Equal(t, "processing", b.event(t, committed).Status)
}

func TestLateCommitIsFannedOut(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	late, err := eventlog.Emit(t.Context(), tx, b.queued("late"))
	require.NoError(t, err)
	for range 3 {
		b.emit(t, "early")
		drain(t, b.bridge)
	}
	require.NoError(t, tx.Commit(t.Context()))
	drain(t, b.bridge)
	require.Len(t, b.jobs(t, late), 1)
}

func TestEmitFillsIn(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	entity := uuid.New()
	full := b.queued("m")
	full.EntityKind, full.EntityID = "letter", entity
	full.Metadata = eventlog.Metadata{RequestID: "r", ActorID: "a", Source: "s", TraceID: "t", SchemaVersion: "1.0.0"}
	var ids []uuid.UUID
	b.inTx(t, func(tx pgx.Tx) (err error) {
		ids, err = eventlog.EmitMany(t.Context(), tx, []eventlog.Event[event.MessageQueued]{b.queued("m"), full})
		return err
	})

	plain := b.event(t, ids[0])
	require.Equal(t, "message", plain.EntityKind)
	require.Nil(t, plain.EntityID)
	e := b.event(t, ids[1])
	require.Equal(t, "letter", e.EntityKind)
	require.Equal(t, &entity, e.EntityID)
	require.Equal(t, "pending", e.Status)
	var metadata map[string]any
	require.NoError(t, json.Unmarshal(e.Metadata, &metadata))
	require.InDelta(t, time.Now().Unix(), metadata["emitted_at"], 60)
	delete(metadata, "emitted_at")
	require.Equal(t, map[string]any{
		"request_id": "r", "actor_id": "a", "source": "s", "trace_id": "t", "schema_version": "1.0.0",
	}, metadata)
}

func TestSameIdempotencyKeyGivesTheFirstEvent(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	other := joinBus(t, b.pool, newOrganization(t, b.pool))
	keyed := func(b *bus) eventlog.Event[event.MessageQueued] {
		e := b.queued("m")
		e.Metadata.IdempotencyKey = "key"
		return e
	}

	// At the same time, in transactions of their own, and twice in each.
	ids := make([]uuid.UUID, 8)
	var emits errgroup.Group
	for i := range 4 {
		emits.Go(func() error {
			return pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
				twice, err := eventlog.EmitMany(t.Context(), tx, []eventlog.Event[event.MessageQueued]{keyed(b), keyed(b)})
				copy(ids[2*i:], twice)
				return err
			})
		})
	}
	require.NoError(t, emits.Wait())
	for _, id := range ids {
		require.Equal(t, ids[0], id)
	}
	var others uuid.UUID
	b.inTx(t, func(tx pgx.Tx) (err error) {
		others, err = eventlog.Emit(t.Context(), tx, keyed(other))
		return err
	})
	require.NotEqual(t, ids[0], others)
	require.Equal(t, 2, count(t, b.pool, "SELECT count(*) FROM event_log"))
}

func TestIdempotencyKeyIsFreeAgainAfterARollback(t *testing.T) {
	t.Parallel()
	for name, commit := range map[string]bool{"committed": true, "rolled back": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBus(t)
			keyed := b.queued("m")
			keyed.Metadata.IdempotencyKey = "key"
			tx, err := b.pool.Begin(t.Context())
			require.NoError(t, err)
			first, err := eventlog.Emit(t.Context(), tx, keyed)
			require.NoError(t, err)
			var second uuid.UUID
			var emitting errgroup.Group
			emitting.Go(func() error {
				return pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) (err error) {
					second, err = eventlog.Emit(t.Context(), tx, keyed)
					return err
				})
			})
			b.awaitLockWaiter(t)
			if commit {
				require.NoError(t, tx.Commit(t.Context()))
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			require.NoError(t, emitting.Wait())
			require.Equal(t, commit, first == second)
			require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM event_log"))
			require.Equal(t, second, b.event(t, second).ID)
		})
	}
}

func TestInvalidEventIsRefusedAndTheTransactionIsStillGood(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	raw := func(eventType, payload string) eventlog.RawEvent {
		return eventlog.RawEvent{Type: eventType, OrganizationID: b.organization, Payload: []byte(payload)}
	}
	noOrganization := raw("a.b", `{}`)
	noOrganization.OrganizationID = uuid.Nil
	badMetadata := raw("a.b", `{}`)
	badMetadata.Metadata = []byte(`"x"`)
	badKind := raw("a.b", `{}`)
	badKind.EntityKind = "a\x00"
	tests := map[string]eventlog.RawEvent{
		"camel case":          raw("LeadCreated", `{}`),
		"kebab case":          raw("lead-created.x", `{}`),
		"no action":           raw("lead", `{}`),
		"empty type":          raw("", `{}`),
		"NUL":                 raw("a.b", `{"a": "x\u0000"}`),
		"raw NUL":             raw("a.b", "{\"a\": \"\x00\"}"),
		"invalid UTF-8":       raw("a.b", "{\"a\": \"\xff\"}"),
		"replaced UTF-8":      raw("a.b", `{"a": "\ufffd"}`),
		"high surrogate":      raw("a.b", `{"a": "\ud83dx"}`),
		"low surrogate":       raw("a.b", `{"a": "\ude00"}`),
		"surrogates reversed": raw("a.b", `{"a": "\ude00\ud83d"}`),
		"high surrogate last": raw("a.b", `{"\ud83d": 1}`),
		"two high surrogates": raw("a.b", `{"a": "\ud83d\ud83d\ude00"}`),
		"NUL in the kind":     badKind,
		"array":               raw("a.b", `[1]`),
		"null":                raw("a.b", `null`),
		"nothing":             raw("a.b", ``),
		"broken":              raw("a.b", `{"a":`),
		"no organization":     noOrganization,
		"metadata not object": badMetadata,
	}
	b.inTx(t, func(tx pgx.Tx) error {
		for name, e := range tests {
			_, err := eventlog.EmitRaw(t.Context(), tx, e)
			require.ErrorIs(t, err, eventlog.ErrInvalidEvent, name)
		}
		for _, text := range []string{"a\x00b", "a\xffb"} {
			_, err := eventlog.Emit(t.Context(), tx, b.queued(text))
			require.ErrorIs(t, err, eventlog.ErrInvalidEvent)
			require.NotContains(t, err.Error(), text)
			_, err = eventlog.EmitMany(t.Context(), tx, []eventlog.Event[event.MessageQueued]{b.queued("good"), b.queued(text)})
			require.ErrorIs(t, err, eventlog.ErrInvalidEvent)
		}
		_, err := eventlog.Emit(t.Context(), tx, b.queued("good"))
		return err
	})
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM event_log"))
}

func TestPayloadComesBackExactly(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ payload, want string }{
		"beyond float64":     {`{"n": 9007199254740993}`, `{"n": 9007199254740993}`},
		"huge number":        {`{"n": 1e400}`, `{"n": 1` + strings.Repeat("0", 400) + `}`},
		"trailing zero":      {`{"n": 1.10}`, `{"n": 1.10}`},
		"replacement itself": {`{"s": "�"}`, `{"s": "�"}`},
		"escaped backslash":  {`{"s": "\\u0000"}`, `{"s": "\\u0000"}`},
		"surrogate pair":     {`{"s": "\ud83d\ude00"}`, `{"s": "😀"}`},
		"escaped surrogate":  {`{"s": "\\ud83d"}`, `{"s": "\\ud83d"}`},
		"markup":             {`{"s": "<b>&</b>"}`, `{"s": "<b>&</b>"}`},
	}
	b := newBus(t)
	for name, tt := range tests {
		id := b.emitRaw(t, "a.b", tt.payload)
		require.Equal(t, tt.want, string(b.event(t, id).Payload), name)
	}
}

func TestEmitEventInSQLExplainsItself(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	tests := map[string]struct{ statement, want string }{
		"camel case":      {`SELECT emit_event('LeadCreated', 'lead', NULL, '{}', '{}', $1)`, "lower snake case"},
		"no type":         {`SELECT emit_event(NULL, 'lead', NULL, '{}', '{}', $1)`, "event type"},
		"no kind":         {`SELECT emit_event('lead.created', '', NULL, '{}', '{}', $1)`, "p_entity_kind"},
		"array":           {`SELECT emit_event('lead.created', 'lead', NULL, '[]', '{}', $1)`, "p_payload must be a JSON object, not array"},
		"metadata":        {`SELECT emit_event('lead.created', 'lead', NULL, '{}', '1', $1)`, "p_metadata must be a JSON object, not number"},
		"no organization": {`SELECT emit_event('lead.created', 'lead', NULL) WHERE $1::uuid IS NOT NULL`, "p_organization_id is required"},
		"unknown tenant":  {`SELECT emit_event('lead.created', 'lead', NULL, '{}', '{}', gen_random_uuid()) WHERE $1::uuid IS NOT NULL`, "organization_id"},
		"direct insert":   {`INSERT INTO event_log (organization_id, event_type, entity_kind) VALUES ($1, 'Bad', 'x')`, "event_type_format"},
	}
	for name, tt := range tests {
		_, err := b.pool.Exec(t.Context(), tt.statement, b.organization)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr, name)
		require.ErrorContains(t, err, tt.want, name)
	}
	exec(t, b.pool, `SELECT emit_event('lead.created', 'lead', NULL, NULL, NULL, $1)`, b.organization)
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM event_log"))
}

func TestEventIsNotFannedOutBeforeItsTime(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	later := b.queued("later")
	later.At = time.Now().Add(7 * 24 * time.Hour)
	var id uuid.UUID
	b.inTx(t, func(tx pgx.Tx) (err error) {
		id, err = eventlog.Emit(t.Context(), tx, later)
		return err
	})
	drain(t, b.bridge)
	require.Equal(t, "pending", b.event(t, id).Status)
	exec(t, b.pool, "UPDATE event_log SET next_attempt_at = now()")
	drain(t, b.bridge)
	e := b.event(t, id)
	require.Equal(t, "processing", e.Status)
	require.Nil(t, e.NextAttemptAt)
}

func TestEventBeyondAllPartitionsIsKept(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	for _, at := range []string{"2001-01-31 23:59:59.999999Z", "2101-02-01 00:00:00Z"} {
		exec(t, b.pool, `INSERT INTO event_log (organization_id, event_type, entity_kind, created_at)
			VALUES ($1, 'a.b', 'a', $2::timestamptz)`, b.organization, at)
	}
	require.Equal(t, 2, count(t, b.pool, "SELECT count(*) FROM event_log_default"))
}

func ExampleEmit() {
	var pool interface {
		Begin(context.Context) (pgx.Tx, error)
	} // a *pgxpool.Pool
	run := func(ctx context.Context, organization, message uuid.UUID) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			// … write the message …
			_, err := eventlog.Emit(ctx, tx, eventlog.Event[event.MessageQueued]{
				OrganizationID: organization,
				EntityID:       message,
				Payload:        event.MessageQueued{MessageID: message.String()},
			})
			return err
		})
	}
	_ = run
}
