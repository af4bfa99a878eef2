package jobs

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

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

func (s *system) subscribe(t *testing.T, org uuid.UUID, url string, eventTypes ...string) uuid.UUID {
	t.Helper()
	return one[uuid.UUID](t, s, `
		INSERT INTO webhook_subscriptions (organization_id, url, secret, event_types) VALUES ($1, $2, $3, $4) RETURNING id`,
		org, url, webhookSecret, append([]string{}, eventTypes...))
}

func (s *system) emitLead(t *testing.T) uuid.UUID {
	t.Helper()
	return s.emit(t, eventlog.RawEvent{Type: "lead.created", OrganizationID: s.org, Payload: []byte(`{"name": "João"}`)})
}

// requireDelivered checks the record of a delivery that took some attempts.
func (s *system) requireDelivered(t *testing.T, eventID, subscription uuid.UUID, attempts int) {
	t.Helper()
	require.Equal(t, fmt.Sprintf("%d true true", attempts), s.delivery(t, eventID, subscription))
}

// delivery returns its attempts, whether it was delivered and whether the last
// attempt left no error.
func (s *system) delivery(t *testing.T, eventID, subscription uuid.UUID) string {
	t.Helper()
	return one[string](t, s, `
		SELECT concat_ws(' ', attempts, (delivered_at IS NOT NULL)::text, (last_error IS NULL)::text)
		FROM webhook_deliveries WHERE event_id = $1 AND subscription_id = $2`, eventID, subscription)
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

	require.Equal(t, 1, receiver.Total())
	call := receiver.Calls()[0]
	require.Equal(t, "POST /hook", call.Method+" "+call.Path)
	require.Equal(t, "lead.created", call.Header.Get("X-Deskcomm-Event"))
	requireOneDelivery(t, eventID, receiver.Calls())
	delivery := one[uuid.UUID](t, s, "SELECT id FROM webhook_deliveries WHERE event_id = $1", eventID)
	require.Equal(t, map[string]int{delivery.String(): 1}, receiver.Accepted(), "which checks the signature too")
	s.requireDelivered(t, eventID, subscription, 1)

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
}

func TestLargePayloadIsLeftOutOfTheDelivery(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	receiver := startReceiver(t)
	s.subscribe(t, s.org, receiver.URL(), "*")
	eventID := s.emit(t, eventlog.RawEvent{
		Type: "lead.created", OrganizationID: s.org, Payload: []byte(`{"s": "` + strings.Repeat("x", 1<<20-1000) + `"}`),
	})
	s.awaitDone(t, eventID)
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
		"a star after a dot is no pattern":       {"lead.*", "lead.created", false},
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
			require.Equal(t, 1, receiver.Total())
			require.Equal(t, "/", receiver.Calls()[0].Path)
			s.requireDelivered(t, eventID, subscription, 1)
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

func TestDeliveryThatFailsForATimeIsRetried(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fault    sandbox.Fault
		failures int
		accepted int
	}{
		"500 three times":                    {sandbox.Fault{Status: 500, Times: 3}, 3, 1},
		"a redirect is not followed":         {sandbox.Fault{Status: 302, Times: 1}, 1, 1},
		"404":                                {sandbox.Fault{Status: 404, Times: 1}, 1, 1},
		"429":                                {sandbox.Fault{Status: 429, RetryAfter: time.Hour, Times: 1}, 1, 1},
		"500 with garbage":                   {sandbox.Fault{Status: 500, Garbage: true, Times: 2}, 2, 1},
		"cut":                                {sandbox.Fault{Cut: true, Times: 2}, 2, 1},
		"hang":                               {sandbox.Fault{Hang: true, Times: 1}, 1, 1},
		"cut after taking it, so told twice": {sandbox.Fault{AfterDoing: true, Times: 1}, 1, 2},
		"200 with garbage is a success":      {sandbox.Fault{Garbage: true}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, receiver := newSystem(t), startReceiver(t)
			if test.fault.Hang {
				s.deps.Webhook.HTTP.Timeout = 200 * time.Millisecond
			}
			s.start(t)
			receiver.SetFault(test.fault)
			subscription := s.subscribe(t, s.org, receiver.URL()+"/?token=hidden", "*")

			eventID := s.emitLead(t)
			s.awaitDone(t, eventID)

			require.Equal(t, test.failures+1, receiver.Total())
			requireOneDelivery(t, eventID, receiver.Calls())
			s.requireDelivered(t, eventID, subscription, test.failures+1)
			delivery := receiver.Calls()[0].Header.Get("X-Webhook-Delivery")
			require.Equal(t, map[string]int{delivery: test.accepted}, receiver.Accepted())
			got := s.job(t, eventID, dispatchKind)
			require.Len(t, got.Errors, test.failures)
			for _, text := range got.Errors {
				require.Contains(t, text, delivery)
				for _, secret := range []string{"hidden", webhookSecret, "João", "\x00"} {
					require.NotContains(t, text, secret)
				}
			}
		})
	}
}

func TestReceiverThatFailsDoesNotTouchTheOthers(t *testing.T) {
	t.Parallel()
	s, good, bad := startSystem(t), startReceiver(t), startReceiver(t)
	bad.SetFault(sandbox.Fault{Status: 503, Times: 4})
	goodID, badID := s.subscribe(t, s.org, good.URL(), "*"), s.subscribe(t, s.org, bad.URL(), "lead.created")

	eventID := s.emitLead(t)
	s.awaitDone(t, eventID)

	require.Equal(t, 1, good.Total(), "once over all retries")
	s.requireDelivered(t, eventID, goodID, 1)
	require.Equal(t, 5, bad.Total())
	requireOneDelivery(t, eventID, bad.Calls())
	s.requireDelivered(t, eventID, badID, 5)
	require.NotEqual(t, good.Calls()[0].Header.Get("X-Webhook-Delivery"), bad.Calls()[0].Header.Get("X-Webhook-Delivery"))
}

func TestDeliveryThatIsGivenUpGoesOutWhenAnOperatorRetriesTheJob(t *testing.T) {
	t.Parallel()
	s, good, bad := startSystem(t), startReceiver(t), startReceiver(t)
	bad.SetFault(sandbox.Fault{Status: 500, Garbage: true})
	s.subscribe(t, s.org, good.URL(), "*")
	subscription := s.subscribe(t, s.org, bad.URL()+"/?token=hidden", "*")
	eventID := s.emitLead(t)

	event := s.awaitDead(t, eventID, dispatchKind)
	require.EqualValues(t, 8, event.Attempts)
	require.Empty(t, event.ConsumedBy)
	require.Contains(t, *event.LastError, "answer 500")
	require.Equal(t, 8, bad.Total())
	require.Equal(t, "8 false false", s.delivery(t, eventID, subscription))
	require.NotContains(t, one[string](t, s, "SELECT last_error FROM webhook_deliveries WHERE subscription_id = $1", subscription), "hidden")
	dead := s.job(t, eventID, dispatchKind)
	require.Equal(t, "discarded", dead.State)

	bad.ClearFault()
	s.retry(t, dead.ID)
	s.awaitDone(t, eventID)

	require.Equal(t, 9, bad.Total())
	requireOneDelivery(t, eventID, bad.Calls())
	s.requireDelivered(t, eventID, subscription, 9)
	require.Equal(t, 1, good.Total())
}

func TestSubscriptionThatGoesMeanwhileHoldsNothingUp(t *testing.T) {
	t.Parallel()
	for name, statement := range map[string]string{
		"disabled": "UPDATE webhook_subscriptions SET enabled = false",
		"deleted":  "DELETE FROM webhook_subscriptions",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, receiver := startSystem(t), startReceiver(t)
			receiver.SetFault(sandbox.Fault{Hang: true})
			s.subscribe(t, s.org, receiver.URL(), "*")
			eventID := s.emitLead(t)
			require.NoError(t, receiver.AwaitCalls(t.Context(), 1))

			s.exec(t, statement)
			receiver.SetFault(sandbox.Fault{Status: 500}) // which lets the first call through
			s.awaitDone(t, eventID)

			require.Equal(t, 1, receiver.Total())
		})
	}
}

func TestSecretThatCannotSignSendsNothing(t *testing.T) {
	t.Parallel()
	s, good, bad := startSystem(t), startReceiver(t), startReceiver(t)
	s.subscribe(t, s.org, good.URL(), "*")
	unsigned := s.subscribe(t, s.org, bad.URL(), "*")
	s.exec(t, "UPDATE webhook_subscriptions SET secret = 'whsec_***' WHERE id = $1", unsigned)

	event := s.awaitDead(t, s.emitLead(t), dispatchKind)

	require.NotContains(t, *event.LastError, "***")
	require.Zero(t, bad.Total())
	require.Equal(t, 1, good.Total())
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

func TestDispatchEndsWithItsTime(t *testing.T) {
	t.Parallel()
	s, good, bad := newSystem(t), startReceiver(t), startReceiver(t)
	goodID, badID := s.subscribe(t, s.org, good.URL(), "*"), s.subscribe(t, s.org, bad.URL(), "*")
	bad.SetFault(sandbox.Fault{Hang: true})
	eventID := s.emitLead(t)
	row, err := s.client.JobGet(t.Context(), s.job(t, eventID, dispatchKind).ID)
	require.NoError(t, err)
	worker := &webhookDispatchWorker{pool: s.pool, events: s.deps.Events, sender: s.deps.Webhook}
	work := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		return worker.Work(ctx, &river.Job[WebhookDispatchArgs]{JobRow: row, Args: WebhookDispatchArgs{EventID: eventID}})
	}

	err = work()
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, &rivertype.JobCancelError{})
	s.requireDelivered(t, eventID, goodID, 1)
	require.Equal(t, "1 false false", s.delivery(t, eventID, badID))

	bad.ClearFault()
	require.NoError(t, work())
	s.requireDelivered(t, eventID, badID, 2)

	require.NoError(t, work(), "and once more for nothing")
	require.Equal(t, 1, good.Total())
	require.Equal(t, 2, bad.Total())
}

func TestManySubscriptionsAreAllServed(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	for range 3 * maxParallelDeliveries {
		s.subscribe(t, s.org, receiver.URL(), "*")
	}

	s.awaitDone(t, s.emitLead(t))

	require.Len(t, receiver.Accepted(), 3*maxParallelDeliveries)
	require.Equal(t, 3*maxParallelDeliveries, receiver.Total())
}
