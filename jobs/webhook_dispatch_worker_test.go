package jobs

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"afluente/db"
	"afluente/eventlog"
	"afluente/jobs/sandbox"
)

const webhookSecret = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="

func startReceiver(t *testing.T) *sandbox.Receiver {
	t.Helper()
	r, err := sandbox.StartReceiver(t.Context(), sandbox.Config{Addr: "127.0.0.1:0", Secret: webhookSecret})
	require.NoError(t, err)
	t.Cleanup(r.Close)
	return r
}

// subscribe makes a subscription as an application does by SQL, with its secret in
// plain.
func (s *system) subscribe(tb testing.TB, org uuid.UUID, url string, eventTypes ...string) uuid.UUID {
	tb.Helper()
	return one[uuid.UUID](tb, s, `
		INSERT INTO webhook_subscriptions (organization_id, url, secret, event_types) VALUES ($1, $2, $3, $4) RETURNING id`,
		org, url, webhookSecret, append([]string{}, eventTypes...))
}

func (s *system) subscription(t *testing.T, id uuid.UUID) db.WebhookSubscription {
	t.Helper()
	rows, err := s.pool.Query(t.Context(), "SELECT * FROM webhook_subscriptions WHERE id = $1", id)
	require.NoError(t, err)
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByNameLax[db.WebhookSubscription])
	require.NoError(t, err)
	return found
}

func (s *system) emitLead(t *testing.T) uuid.UUID {
	t.Helper()
	return s.emit(t, eventlog.RawEvent{Type: "lead.created", OrganizationID: s.org, Payload: []byte(`{"name": "João"}`)})
}

// delivery returns the one of an event to a subscription, and whether it is there.
func (s *system) delivery(t *testing.T, eventID, subscription uuid.UUID) (db.WebhookDelivery, bool) {
	t.Helper()
	rows, err := s.pool.Query(t.Context(), "SELECT * FROM webhook_deliveries WHERE event_id = $1 AND subscription_id = $2", eventID, subscription)
	require.NoError(t, err)
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByNameLax[db.WebhookDelivery])
	if errors.Is(err, pgx.ErrNoRows) {
		return found, false
	}
	require.NoError(t, err)
	return found, true
}

// awaitDelivery waits until the delivery of an event is in a state.
func (s *system) awaitDelivery(t *testing.T, eventID, subscription uuid.UUID, state string) (found db.WebhookDelivery) {
	t.Helper()
	s.await(t, "a delivery that is "+state, func() bool {
		var ok bool
		found, ok = s.delivery(t, eventID, subscription)
		return ok && found.State == state
	})
	return found
}

// awaitDelivered waits for the end of a delivery and checks how many attempts it
// took.
func (s *system) awaitDelivered(t *testing.T, eventID, subscription uuid.UUID, attempts int) {
	t.Helper()
	found := s.awaitDelivery(t, eventID, subscription, "succeeded")
	require.EqualValues(t, attempts, found.Attempts)
	require.NotNil(t, found.DeliveredAt)
	require.Nil(t, found.LastError)
}

// attempts returns the classes of the attempts at a delivery.
func (s *system) attempts(t *testing.T, delivery uuid.UUID) []string {
	t.Helper()
	return one[[]string](t, s, "SELECT coalesce(array_agg(class ORDER BY number), '{}') FROM webhook_attempts WHERE delivery_id = $1", delivery)
}

// requireOneDelivery checks that calls are attempts 1, 2, 3… at one delivery.
func requireOneDelivery(t *testing.T, eventID uuid.UUID, calls []sandbox.Call) {
	t.Helper()
	for i, call := range calls {
		require.Equal(t, fmt.Sprint(i+1), call.Header.Get("X-Webhook-Attempt"))
		require.Equal(t, calls[0].Header.Get("X-Webhook-Delivery"), call.Header.Get("X-Webhook-Delivery"))
		require.Equal(t, eventID.String(), call.Header.Get("X-Deskcomm-Idempotency-Key"))
		require.Equal(t, calls[0].Body, call.Body)
	}
}

func TestAnyEventBecomesADispatchJob(t *testing.T) {
	t.Parallel()
	s := newSystem(t)

	eventID := s.emitLead(t)

	got := s.job(t, eventID, dispatchKind)
	require.JSONEq(t, fmt.Sprintf(`{"event_id": %q}`, eventID), got.Args)
	require.Equal(t, "available", got.State)
	require.Equal(t, "webhooks", got.Queue)
	require.EqualValues(t, 8, got.MaxAttempts)
}

func TestEventIsDeliveredSignedAndExact(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL()+"/hook?token=x", "lead.created")

	eventID := s.emit(t, eventlog.RawEvent{
		Type: "lead.created", OrganizationID: s.org,
		Payload: []byte(`{"id": 9007199254740993, "huge": 1e400, "cents": 1.10, "html": "<b>&</b>", "text": "João \u2028 \\ \" \u001f"}`),
	})
	s.awaitDone(t, eventID)
	s.awaitDelivered(t, eventID, subscription, 1)

	require.Equal(t, 1, receiver.Total())
	call := receiver.Calls()[0]
	require.Equal(t, "POST /hook", call.Method+" "+call.Path)
	require.Equal(t, "lead.created", call.Header.Get("X-Deskcomm-Event"))
	requireOneDelivery(t, eventID, receiver.Calls())
	delivery := one[uuid.UUID](t, s, "SELECT id FROM webhook_deliveries WHERE event_id = $1", eventID)
	require.Equal(t, map[string]int{delivery.String(): 1}, receiver.Accepted(), "which checks the signature too")

	sign := func(key []byte, text string) []byte {
		h := hmac.New(sha256.New, key)
		h.Write([]byte(text))
		return h.Sum(nil)
	}
	timestamp := call.Header.Get("X-Webhook-Timestamp")
	require.Equal(t, hex.EncodeToString(sign([]byte(webhookSecret), call.Body)), call.Header.Get("X-Deskcomm-Signature"))
	require.Equal(t, "sha256="+hex.EncodeToString(sign([]byte(webhookSecret), timestamp+"."+call.Body)),
		call.Header.Get("X-Webhook-Signature"))
	require.Equal(t, eventID.String(), call.Header.Get("webhook-id"))
	require.Equal(t, timestamp, call.Header.Get("webhook-timestamp"))
	require.Equal(t, "v1,"+base64.StdEncoding.EncodeToString(sign([]byte("0123456789abcdef0123456789abcdef"),
		eventID.String()+"."+timestamp+"."+call.Body)), call.Header.Get("webhook-signature"))

	var body map[string]json.RawMessage
	require.NoError(t, json.Unmarshal([]byte(call.Body), &body))
	require.Len(t, body, 4)
	require.Equal(t, `"`+eventID.String()+`"`, string(body["id"]))
	require.Equal(t, `"lead.created"`, string(body["type"]))
	var at time.Time
	require.NoError(t, json.Unmarshal(body["timestamp"], &at))
	require.WithinDuration(t, one[time.Time](t, s, "SELECT created_at FROM event_log WHERE id = $1", eventID), at, 0)
	require.Equal(t, time.UTC, at.Location())
	var stored bytes.Buffer
	require.NoError(t, json.Compact(&stored, []byte(one[string](t, s, "SELECT payload::text FROM event_log WHERE id = $1", eventID))))
	require.Equal(t, stored.String(), string(body["data"]))
	for _, part := range []string{`"id":9007199254740993`, `"huge":1` + strings.Repeat("0", 400), `"cents":1.10`, `"html":"<b>&</b>"`} {
		require.Contains(t, call.Body, part)
	}
	require.JSONEq(t, `{"event_id": "`+eventID.String()+`"}`, s.job(t, eventID, dispatchKind).Args, "no payload in args")
	require.JSONEq(t, `{"delivery_id": "`+delivery.String()+`", "subscription_id": "`+subscription.String()+`"}`,
		one[string](t, s, "SELECT args::text FROM river.river_job WHERE kind = $1", deliveryKind), "nor there")
}

func TestLargePayloadIsLeftOutOfTheDelivery(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	receiver := startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	eventID := s.emit(t, eventlog.RawEvent{
		Type: "lead.created", OrganizationID: s.org, Payload: []byte(`{"s": "` + strings.Repeat("x", 1<<20-1000) + `"}`),
	})
	s.awaitDelivered(t, eventID, subscription, 1)
	var body map[string]any
	require.NoError(t, json.Unmarshal([]byte(receiver.Calls()[0].Body), &body))
	delete(body, "timestamp")
	require.Equal(t, map[string]any{"id": eventID.String(), "type": "lead.created", "truncated": true}, body)
}

func TestSubscriptionGetsTheEventsItWants(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	for name, test := range map[string]struct {
		wants, event string
		got          bool
	}{
		"the exact type":                         {"lead.created", "lead.created", true},
		"one of several types":                   {"deal.won,lead.created", "lead.created", true},
		"a star is every type":                   {"*", "lead.created", true},
		"another type is not":                    {"lead.updated", "lead.created", false},
		"a longer type is not":                   {"lead.created", "lead.created_again", false},
		"another case is not":                    {"LEAD.CREATED", "lead.created", false},
		"a star after a dot is a subject's":      {"lead.*", "lead.created", true},
		"another subject's is not":               {"leads.*", "lead.created", false},
		"a star is nothing before a dot":         {"*.created", "lead.created", false},
		"nor within a name":                      {"lead.c*", "lead.created", false},
		"the webhooks' own by their subject":     {"webhook.*", "webhook.failed", true},
		"never that a delivery failed":           {"*,webhook.*,webhook.delivery_failed", "webhook.delivery_failed", false},
		"a percent sign is no pattern":           {"%", "lead.created", false},
		"no type is nothing":                     {"", "lead.created", false},
		"a star is not the webhooks' own":        {"*", "webhook.failed", false},
		"the webhooks' own by name":              {"webhook.failed", "webhook.failed", true},
		"the webhooks' own by name beside star":  {"*,webhook.failed", "webhook.failed", true},
		"a star is what only begins as webhooks": {"*", "webhooks.created", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			receiver, org := startReceiver(t), s.newOrganization(t)
			wants := strings.FieldsFunc(test.wants, func(r rune) bool { return r == ',' })
			subscription := s.subscribe(t, org, receiver.URL(), wants...)
			s.subscribe(t, s.newOrganization(t), receiver.URL()+"/other-organization", wants...)
			disabled := s.subscribe(t, org, receiver.URL()+"/disabled", wants...)
			s.exec(t, "UPDATE webhook_subscriptions SET enabled = false WHERE id = $1", disabled)

			eventID := s.emit(t, eventlog.RawEvent{Type: test.event, OrganizationID: org, Payload: []byte(`{}`)})
			s.awaitDone(t, eventID)

			if !test.got {
				require.Zero(t, receiver.Total())
				require.Zero(t, one[int](t, s, "SELECT count(*) FROM webhook_deliveries WHERE event_id = $1", eventID))
				return
			}
			s.awaitDelivered(t, eventID, subscription, 1)
			require.Equal(t, 1, receiver.Total())
			require.Equal(t, "/", receiver.Calls()[0].Path)
			require.Equal(t, 1, one[int](t, s, "SELECT count(*) FROM webhook_deliveries WHERE subscription_id = $1 AND state = 'held'", disabled))
			require.Equal(t, 2, one[int](t, s, "SELECT count(*) FROM webhook_deliveries WHERE event_id = $1", eventID))
		})
	}
}

func TestEventWithoutSubscriptionsIsDone(t *testing.T) {
	t.Parallel()
	s := startSystem(t)

	eventID := s.emitLead(t)
	s.awaitDone(t, eventID)

	require.EqualValues(t, 1, s.job(t, eventID, dispatchKind).Attempt)
	require.Zero(t, one[int](t, s, "SELECT count(*) FROM webhook_deliveries"))
}

func TestEventThatIsGoneIsCancelled(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	s.subscribe(t, s.org, receiver.URL(), "*")
	eventID := s.emitLead(t)
	s.exec(t, "DELETE FROM event_log WHERE id = $1", eventID)
	s.start(t)

	s.await(t, "the end of the job", func() bool { return s.job(t, eventID, dispatchKind).State == "cancelled" })

	require.Zero(t, receiver.Total())
}

func TestDispatchTwiceMakesEachDeliveryOnce(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.subscribe(t, s.org, "http://127.0.0.1:1/", "*")
	s.subscribe(t, s.org, "http://127.0.0.1:2/", "*")
	eventID := s.emitLead(t)
	row, err := s.client.JobGet(t.Context(), s.job(t, eventID, dispatchKind).ID)
	require.NoError(t, err)
	worker := &webhookDispatchWorker{events: s.deps.Events, webhooks: s.deps.Webhooks}
	var all errgroup.Group
	for range 5 { // as when a process that was thought dead goes on
		all.Go(func() error {
			return worker.Work(t.Context(), &river.Job[WebhookDispatchArgs]{JobRow: row, Args: WebhookDispatchArgs{EventID: eventID}})
		})
	}
	require.NoError(t, all.Wait())
	require.Equal(t, 2, one[int](t, s, "SELECT count(*) FROM webhook_deliveries WHERE job_id IS NOT NULL AND state = 'pending'"))
	require.Equal(t, 2, one[int](t, s, "SELECT count(*) FROM river.river_job WHERE kind = $1", deliveryKind))
	require.Equal(t, 1, one[int](t, s, "SELECT count(*) FROM webhook_bodies"))
}

func TestDispatchesShareATransaction(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	s.subscribe(t, s.org, startReceiver(t).URL(), "*")
	pool, counted := s.countedPool(t)
	worker := &webhookDispatchWorker{events: eventlog.NewEvents(pool), webhooks: newWebhooks(t, pool)}
	rows := make([]*rivertype.JobRow, 20)
	for i := range rows {
		var err error
		rows[i], err = s.client.JobGet(t.Context(), s.job(t, s.emitLead(t), dispatchKind).ID)
		require.NoError(t, err)
	}
	var dispatches errgroup.Group
	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "LOCK TABLE webhook_bodies IN ACCESS EXCLUSIVE MODE"); err != nil {
			return err
		}
		for _, row := range rows {
			dispatches.Go(func() error { return worker.Work(t.Context(), &river.Job[WebhookDispatchArgs]{JobRow: row}) })
		}
		s.await(t, "the first to wait", func() bool { return s.lockWaiters(t) == 1 })
		return nil
	}))
	require.NoError(t, dispatches.Wait())
	require.Equal(t, len(rows), one[int](t, s, "SELECT count(DISTINCT (event_id, job_id)) FROM webhook_deliveries WHERE job_id IS NOT NULL"))
	require.Less(t, int(counted.statements.Load()), 4*len(rows), "alone each takes nine")
}

func TestManySubscriptionsAreAllServed(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	const many = 50
	for range many {
		s.subscribe(t, s.org, receiver.URL(), "*")
	}

	s.emitLead(t)
	s.await(t, "all deliveries", func() bool { return len(receiver.Accepted()) == many })

	require.Equal(t, many, receiver.Total())
}
