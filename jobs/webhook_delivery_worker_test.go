package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"afluente/db"
	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/jobs/sandbox"
	"afluente/jobs/webhook"
)

// dispatch makes the deliveries of an event without River.
func (s *system) dispatch(t *testing.T, eventID uuid.UUID) {
	t.Helper()
	row, err := s.client.JobGet(t.Context(), s.job(t, eventID, dispatchKind).ID)
	require.NoError(t, err)
	worker := &webhookDispatchWorker{events: s.deps.Events, webhooks: s.deps.Webhooks}
	require.NoError(t, worker.Work(t.Context(), &river.Job[WebhookDispatchArgs]{JobRow: row, Args: WebhookDispatchArgs{EventID: eventID}}))
}

// attempt does what the job of a delivery does, once, and returns what River is
// told: nil, a snooze or a cancel.
func (s *system) attempt(t *testing.T, delivery uuid.UUID) error {
	t.Helper()
	args, job := s.timer(t, delivery)
	next, err := s.deps.Webhooks.attempt(t.Context(), args, job)
	if err != nil {
		return err
	}
	return next.result()
}

// timer is the job of a delivery.
func (s *system) timer(t *testing.T, delivery uuid.UUID) (args WebhookDeliveryArgs, job int64) {
	t.Helper()
	job = one[int64](t, s, "SELECT job_id FROM webhook_deliveries WHERE id = $1", delivery)
	require.NoError(t, json.Unmarshal([]byte(one[string](t, s, "SELECT args::text FROM river.river_job WHERE id = $1", job)), &args))
	return args, job
}

// dispatchLead makes the delivery of a new event without River.
func (s *system) dispatchLead(t *testing.T, subscription uuid.UUID) db.WebhookDelivery {
	t.Helper()
	eventID := s.emitLead(t)
	s.dispatch(t, eventID)
	delivery, ok := s.delivery(t, eventID, subscription)
	require.True(t, ok)
	return delivery
}

func requireSnoozed(t *testing.T, err error) time.Duration {
	t.Helper()
	snooze := &rivertype.JobSnoozeError{}
	require.ErrorAs(t, err, &snooze)
	return snooze.Duration
}

// awaitEvents returns the payloads of all events of a type, once there are as many.
func (s *system) awaitEvents(t *testing.T, eventType string, many int) []map[string]any {
	t.Helper()
	s.await(t, eventType, func() bool {
		return one[int](t, s, "SELECT count(*) FROM event_log WHERE event_type = $1", eventType) >= many
	})
	texts := one[[]string](t, s, "SELECT coalesce(array_agg(payload::text ORDER BY created_at), '{}') FROM event_log WHERE event_type = $1", eventType)
	require.Len(t, texts, many)
	payloads := make([]map[string]any, len(texts))
	for i, text := range texts {
		require.NoError(t, json.Unmarshal([]byte(text), &payloads[i]))
	}
	return payloads
}

func TestDeliveryThatFailsForATimeIsRetried(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fault    sandbox.Fault
		class    string
		failures int
		accepted int
	}{
		"500 three times":                     {sandbox.Fault{Status: 500, Times: 3}, "server_error", 3, 1},
		"a redirect is not followed":          {sandbox.Fault{Status: 302, Times: 1}, "redirect", 1, 1},
		"404":                                 {sandbox.Fault{Status: 404, Times: 1}, "client_error", 1, 1},
		"429":                                 {sandbox.Fault{Status: 429, Times: 3}, "throttled", 3, 1},
		"502, after which one goes at a time": {sandbox.Fault{Status: 502, Times: 2}, "server_error", 2, 1},
		"500 with garbage":                    {sandbox.Fault{Status: 500, Garbage: true, Times: 2}, "server_error", 2, 1},
		"cut":                                 {sandbox.Fault{Cut: true, Times: 2}, "connection", 2, 1},
		"hang":                                {sandbox.Fault{Hang: true, Times: 1}, "timeout", 1, 1},
		"cut after taking it, so told twice":  {sandbox.Fault{AfterDoing: true, Times: 1}, "connection", 1, 2},
		"200 with garbage is a success":       {sandbox.Fault{Garbage: true}, "", 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, receiver := newSystem(t), startReceiver(t)
			if test.fault.Hang {
				transport := webhook.NewTransport(s.deps.Webhooks.Sender.Guard)
				transport.ResponseHeaderTimeout = 200 * time.Millisecond
				t.Cleanup(transport.CloseIdleConnections)
				s.deps.Webhooks.Sender.Transport = transport
			}
			s.start(t)
			receiver.SetFault(test.fault)
			subscription := s.subscribe(t, s.org, receiver.URL()+"/?token=hidden", "*")

			eventID := s.emitLead(t)
			s.awaitDelivered(t, eventID, subscription, test.failures+1)

			require.Equal(t, test.failures+1, receiver.Total())
			requireOneDelivery(t, eventID, receiver.Calls())
			delivery, _ := s.delivery(t, eventID, subscription)
			require.Equal(t, map[string]int{delivery.ID.String(): test.accepted}, receiver.Accepted())
			require.Equal(t, append(slices.Repeat([]string{test.class}, test.failures), "success"), s.attempts(t, delivery.ID))
			for _, text := range one[[]string](t, s, "SELECT coalesce(array_agg(error), '{}') FROM webhook_attempts WHERE error IS NOT NULL") {
				for _, secret := range []string{"hidden", webhookSecret, "João", "\x00"} {
					require.NotContains(t, text, secret)
				}
			}
			require.Zero(t, s.subscription(t, subscription).ConsecutiveFailures, "a success forgets them")
			s.awaitDone(t, eventID)
		})
	}
}

// The bytes, and so the signature, are the same whenever and by whomever it is sent.
func TestBodyIsFrozenAndVerifiesWithThePublicLibrary(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Status: 500, Times: 2})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	eventID := s.emit(t, eventlog.RawEvent{
		Type: "lead.created", OrganizationID: s.org, Payload: []byte(`{"b": 1, "a": 2, "n": 1.10, "big": 12345678901234567890, "x": "<é>"}`),
	})
	s.awaitDelivered(t, eventID, subscription, 3)
	s.exec(t, "UPDATE event_log SET payload = '{}'")
	delivery, _ := s.delivery(t, eventID, subscription)
	_, err := s.deps.Webhooks.Resend(t.Context(), Scope{Actor: "test"}, subscription, delivery.ID, "")
	require.NoError(t, err)
	s.awaitDelivered(t, eventID, subscription, 4)

	verifier, err := standardwebhooks.NewWebhook(webhookSecret)
	require.NoError(t, err)
	requireOneDelivery(t, eventID, receiver.Calls())
	for _, call := range receiver.Calls() {
		require.NoError(t, verifier.Verify([]byte(call.Body), call.Header))
	}
}

func TestCallsCarryTheRequestOfTheirEvent(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	receiver.SetFault(sandbox.Fault{Status: 413})
	eventID := s.emit(t, eventlog.RawEvent{
		Type: "lead.created", OrganizationID: s.org, Payload: []byte(`{}`), Metadata: []byte(`{"request_id": "r-1"}`),
	})
	s.awaitDelivery(t, eventID, subscription, "dead")
	require.Equal(t, "r-1", receiver.Calls()[0].Header.Get("X-Request-Id"))
	s.awaitEvents(t, "webhook.delivery_failed", 1)
	require.Equal(t, "r-1 "+eventID.String(), one[string](t, s, `SELECT concat_ws(' ', metadata ->> 'request_id', metadata ->> 'causation_id')
		FROM event_log WHERE event_type = 'webhook.delivery_failed'`))
}

func TestReceiverThatFailsDoesNotTouchTheOthers(t *testing.T) {
	t.Parallel()
	s, good, bad := startSystem(t), startReceiver(t), startReceiver(t)
	bad.SetFault(sandbox.Fault{Status: 503, Times: 4})
	goodID, badID := s.subscribe(t, s.org, good.URL(), "*"), s.subscribe(t, s.org, bad.URL(), "lead.created")

	eventID := s.emitLead(t)
	s.awaitDelivered(t, eventID, goodID, 1)
	s.awaitDelivered(t, eventID, badID, 5)

	require.Equal(t, 1, good.Total(), "once over all retries")
	require.Equal(t, 5, bad.Total())
	requireOneDelivery(t, eventID, bad.Calls())
	require.NotEqual(t, good.Calls()[0].Header.Get("X-Webhook-Delivery"), bad.Calls()[0].Header.Get("X-Webhook-Delivery"))
}

func TestDeliveryThatIsGivenUpIsADeadLetterAndGoesOutWhenItIsRetried(t *testing.T) {
	t.Parallel()
	s, bad := startSystem(t), startReceiver(t)
	bad.SetFault(sandbox.Fault{Status: 500, Garbage: true})
	first := s.subscribe(t, s.org, bad.URL()+"/?token=hidden", "lead.created")
	second := s.subscribe(t, s.org, bad.URL(), "lead.created")
	eventID := s.emitLead(t)

	for _, subscription := range []uuid.UUID{first, second} { // neither has the other's attempts
		delivery := s.awaitDelivery(t, eventID, subscription, "dead")
		require.EqualValues(t, 8, delivery.Attempts)
		require.Len(t, s.attempts(t, delivery.ID), 8)
		require.Contains(t, *delivery.LastError, "answer 500")
		require.NotContains(t, *delivery.LastError, "hidden")
		require.EqualValues(t, 500, *delivery.StatusCode)
	}
	require.Equal(t, 16, bad.Total())
	s.awaitDone(t, eventID) // its deliveries have lives of their own
	for _, payload := range s.awaitEvents(t, "webhook.delivery_failed", 2) {
		require.Equal(t, eventID.String(), payload["event_id"])
		require.InDelta(t, 8, payload["attempt"], 0)
		require.InDelta(t, 500, payload["status_code"], 0)
	}
	var letters []eventlog.DeadLetter
	s.await(t, "dead letters", func() bool {
		var err error
		letters, err = (&eventlog.DeadLetters{Pool: s.pool}).List(t.Context(), eventlog.DeadLetterFilter{Consumer: deliveryKind}, 10)
		require.NoError(t, err)
		return len(letters) == 2
	})
	require.Contains(t, letters[0].LastError, "answer 500")
	require.Equal(t, 2, one[int](t, s, `SELECT count(*) FROM river.river_job WHERE kind = $1
		AND tags @> ARRAY['lead-created', $2]::varchar[]`, deliveryKind, s.org.String()), "River UI finds them by their tags")

	bad.ClearFault()
	delivery, _ := s.delivery(t, eventID, first)
	s.exec(t, "DELETE FROM event_log") // what it sends is frozen
	s.retry(t, *delivery.JobID)
	s.awaitDelivered(t, eventID, first, 9)
	require.Equal(t, 17, bad.Total())
	delivery, _ = s.delivery(t, eventID, second)
	require.Equal(t, "dead", delivery.State)
}

func TestFailedWebhookOfAWebhookFeedsNothing(t *testing.T) {
	t.Parallel()
	s, bad := startSystem(t), startReceiver(t)
	bad.SetFault(sandbox.Fault{Status: 413})
	subscription := s.subscribe(t, s.org, bad.URL(), "*", "webhook.subscription_disabled", "webhook.delivery_failed")

	own := s.emit(t, eventlog.RawEvent{Type: "webhook.subscription_disabled", OrganizationID: s.org, Payload: []byte(
		`{"subscription_id": "` + subscription.String() + `", "reason": "gone", "last_error": ""}`)})
	s.awaitDelivery(t, own, subscription, "dead")
	lead := s.emitLead(t)
	s.awaitDelivery(t, lead, subscription, "dead")
	s.awaitEvents(t, "webhook.delivery_failed", 1)
	s.step(t)
	s.awaitDone(t, one[uuid.UUID](t, s, "SELECT id FROM event_log WHERE event_type = 'webhook.delivery_failed'"))

	require.Equal(t, 2, bad.Total(), "and none for the failure itself")
	require.Len(t, s.awaitEvents(t, "webhook.delivery_failed", 1), 1)
}

// Three failures in a row open the breaker: nothing goes out until the next delay is
// over, then one delivery at a time.
func TestBreakerOpensAfterThreeFailures(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	s.deps.Webhooks.Backoff = []time.Duration{time.Hour}
	receiver.SetFault(sandbox.Fault{Status: 500})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	var deliveries []uuid.UUID
	for range 6 {
		delivery := s.dispatchLead(t, subscription)
		deliveries = append(deliveries, delivery.ID)
	}
	for i, delivery := range deliveries[:5] {
		wait := requireSnoozed(t, s.attempt(t, delivery))
		require.GreaterOrEqual(t, wait, 59*time.Minute)
		require.Equal(t, min(i+1, 3), receiver.Total())
	}
	row := s.subscription(t, subscription)
	require.EqualValues(t, 3, row.ConsecutiveFailures)
	require.True(t, row.Probing)

	// The time is over: one goes, and keeps the others back while it is under way.
	s.exec(t, "UPDATE webhook_subscriptions SET open_until = now(), next_slot_at = NULL")
	s.exec(t, "UPDATE webhook_deliveries SET next_attempt_at = now()")
	receiver.SetFault(sandbox.Fault{Hang: true})
	var probe errgroup.Group
	probe.Go(func() error { return s.attempt(t, deliveries[3]) })
	require.NoError(t, receiver.AwaitCalls(t.Context(), 4))
	requireSnoozed(t, s.attempt(t, deliveries[4]))
	require.Equal(t, 4, receiver.Total())
	receiver.ClearFault()
	require.NoError(t, probe.Wait())
	row = s.subscription(t, subscription)
	require.Zero(t, row.ConsecutiveFailures)
	require.False(t, row.Probing)
	require.Nil(t, row.OpenUntil)
	require.NoError(t, s.attempt(t, deliveries[5]))
	require.Equal(t, 5, receiver.Total())
}

// Somebody who has mended the receiver sees so by sending one again, and need not wait
// for the others.
func TestReSendThatSucceedsLetsTheOthersGo(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	s.deps.Webhooks.Backoff = []time.Duration{time.Hour}
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	good := s.emitLead(t)
	s.awaitDelivered(t, good, subscription, 1)
	s.exec(t, "UPDATE webhook_subscriptions SET open_until = now() + interval '1 hour'")
	var waiting []uuid.UUID
	for range 3 {
		waiting = append(waiting, s.emitLead(t))
		delivery := s.awaitDelivery(t, waiting[len(waiting)-1], subscription, "pending")
		s.awaitState(t, *delivery.JobID, rivertype.JobStateScheduled)
	}
	delivery, _ := s.delivery(t, good, subscription)
	_, err := s.deps.Webhooks.Resend(t.Context(), Scope{Actor: "test"}, subscription, delivery.ID, "")
	require.NoError(t, err)
	for _, eventID := range waiting {
		s.awaitDelivered(t, eventID, subscription, 1)
	}
	require.Equal(t, 5, receiver.Total())
}

func TestTenFailuresInARowDisableOnce(t *testing.T) {
	t.Parallel()
	s, good := startSystem(t), startReceiver(t)
	var calls atomic.Int32
	var healthy atomic.Bool
	gate := make(chan struct{})
	bad := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		calls.Add(1)
		<-gate
		if !healthy.Load() {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	t.Cleanup(bad.Close)
	subscription := s.subscribe(t, s.org, bad.URL, "lead.created")
	s.exec(t, "UPDATE webhook_subscriptions SET max_concurrent = 100, rate_per_second = 1000")
	// The same URL in another organization has failures of its own.
	other := s.subscribe(t, s.newOrganization(t), bad.URL, "*")
	admin := s.subscribe(t, s.org, good.URL(), "webhook.subscription_disabled")
	for range 50 {
		s.emitLead(t)
	}
	s.await(t, "calls", func() bool { return calls.Load() == 50 })
	close(gate) // fifty fail at once, then one after the other

	payloads := s.awaitEvents(t, "webhook.subscription_disabled", 1)
	require.Equal(t, subscription.String(), payloads[0]["subscription_id"])
	require.Equal(t, "10_consecutive_failures", payloads[0]["reason"])
	require.Contains(t, payloads[0]["last_error"], "answer 500")
	row := s.subscription(t, subscription)
	require.False(t, row.Enabled)
	require.Equal(t, "10_consecutive_failures", *row.DisabledReason)
	require.EqualValues(t, 10, row.ConsecutiveFailures)
	s.await(t, "all are held", func() bool {
		return one[int](t, s, "SELECT count(*) FROM webhook_deliveries WHERE state IN ('held', 'dead') AND subscription_id = $1", subscription) == 50
	})
	require.Equal(t, 1, one[int](t, s, "SELECT count(*) FROM audit_log WHERE action = 'webhook.disabled' AND reason = '10_consecutive_failures'"))
	before := calls.Load()
	s.step(t)
	s.awaitDelivered(t, one[uuid.UUID](t, s, "SELECT id FROM event_log WHERE event_type = 'webhook.subscription_disabled'"), admin, 1)
	require.Equal(t, 1, good.Total(), "who wants it is told, once")
	row = s.subscription(t, other)
	require.True(t, row.Enabled)
	require.Zero(t, row.ConsecutiveFailures)

	// What comes while it is disabled is not lost, and all of it goes out once.
	healthy.Store(true)
	for range 5 {
		s.awaitDelivery(t, s.emitLead(t), subscription, "held")
	}
	require.Equal(t, before, calls.Load())
	scope := Scope{Actor: "test"}
	_, err := s.deps.Webhooks.Recover(t.Context(), scope, subscription, time.Time{})
	require.ErrorIs(t, err, ErrDisabled)
	enabled, err := s.deps.Webhooks.Enable(t.Context(), scope, subscription)
	require.NoError(t, err)
	require.Zero(t, enabled.ConsecutiveFailures)
	recovered, err := s.deps.Webhooks.Recover(t.Context(), scope, subscription, time.Time{})
	require.NoError(t, err)
	require.Equal(t, 55, recovered)
	s.await(t, "all deliveries", func() bool {
		return one[int](t, s, "SELECT count(*) FROM webhook_deliveries WHERE state = 'succeeded' AND subscription_id = $1", subscription) == 55
	})
	require.Equal(t, before+55, calls.Load())
}

// Days may lie between the failures: nothing but a success forgets them.
func TestOneFailureADayDisablesOnTheTenthDay(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Status: 500})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	for day := range 10 {
		require.True(t, s.subscription(t, subscription).Enabled, "day %d", day)
		delivery := s.dispatchLead(t, subscription)
		_ = s.attempt(t, delivery.ID)
		s.exec(t, `UPDATE webhook_subscriptions SET open_until = open_until - interval '1 day', opened_at = opened_at - interval '1 day'`)
	}
	require.False(t, s.subscription(t, subscription).Enabled)
	require.Equal(t, 10, receiver.Total())
}

func TestAnswersThatEndADelivery(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		status        int
		state, reason string
	}{
		"410 disables the subscription and holds it": {410, "held", "gone"},
		"413 gives it up": {413, "dead", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, receiver := startSystem(t), startReceiver(t)
			receiver.SetFault(sandbox.Fault{Status: test.status})
			subscription := s.subscribe(t, s.org, receiver.URL(), "lead.created")
			s.awaitDelivery(t, s.emitLead(t), subscription, test.state)
			require.Equal(t, 1, receiver.Total())
			row := s.subscription(t, subscription)
			require.Zero(t, row.ConsecutiveFailures)
			if test.reason == "" {
				require.True(t, row.Enabled)
				return
			}
			require.False(t, row.Enabled)
			require.Equal(t, test.reason, *row.DisabledReason)
			require.Equal(t, test.reason, s.awaitEvents(t, "webhook.subscription_disabled", 1)[0]["reason"])
		})
	}
}

func TestRetryAfterIsObeyed(t *testing.T) {
	t.Parallel()
	seconds := func(text string) func() string { return func() string { return text } }
	for name, test := range map[string]struct {
		status  int
		after   func() string
		waits   time.Duration
		counted int32
	}{
		"429":                   {429, seconds("3600"), time.Hour, 0},
		"503":                   {503, seconds("3600"), time.Hour, 1},
		"a date":                {429, func() string { return time.Now().Add(time.Hour).UTC().Format(http.TimeFormat) }, time.Hour, 0},
		"never more than 2 h":   {429, seconds("86400"), 2 * time.Hour, 0},
		"malformed":             {429, seconds("soon"), 0, 0},
		"negative":              {503, seconds("-5"), 0, 1},
		"not asked for by 500s": {500, seconds("3600"), 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSystem(t)
			var hits atomic.Int32
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				hits.Add(1)
				w.Header().Set("Retry-After", test.after())
				w.WriteHeader(test.status)
			}))
			t.Cleanup(server.Close)
			subscription := s.subscribe(t, s.org, server.URL, "*")
			delivery := s.dispatchLead(t, subscription)
			wait := requireSnoozed(t, s.attempt(t, delivery.ID))
			require.InDelta(t, test.waits.Minutes(), wait.Minutes(), 1)
			require.Equal(t, test.counted, s.subscription(t, subscription).ConsecutiveFailures)
			if test.waits == 0 {
				return
			}
			other := s.emitLead(t) // waits with it
			s.dispatch(t, other)
			delivery, _ = s.delivery(t, other, subscription)
			wait = requireSnoozed(t, s.attempt(t, delivery.ID))
			require.InDelta(t, test.waits.Minutes(), wait.Minutes(), 1)
			require.EqualValues(t, 1, hits.Load())
		})
	}
}

func TestAddressThatIsNotPublicIsNeverDialledAndDisables(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	subscription := s.subscribe(t, s.org, "https://10.0.0.5/hook", "lead.created")
	eventID := s.emitLead(t)
	delivery := s.awaitDelivery(t, eventID, subscription, "held")
	require.Equal(t, []string{"unsafe_address", "unsafe_address", "unsafe_address"}, s.attempts(t, delivery.ID))
	require.Equal(t, "unsafe_address", s.awaitEvents(t, "webhook.subscription_disabled", 1)[0]["reason"])
	require.Equal(t, "unsafe_address", *s.subscription(t, subscription).DisabledReason)
	require.Zero(t, one[int](t, s, "SELECT count(*) FROM webhook_attempts WHERE remote IS NOT NULL"))
}

// Secrets that no key opens send nothing, lose nothing and harm nobody else.
func TestDeliveryThatCannotBeSignedIsHeldBackUnsigned(t *testing.T) {
	t.Parallel()
	s, good, bad := startSystem(t), startReceiver(t), startReceiver(t)
	goodID, badID := s.subscribe(t, s.org, good.URL(), "*"), s.subscribe(t, s.org, bad.URL(), "*")
	s.awaitDelivered(t, s.emitLead(t), badID, 1)
	s.exec(t, "UPDATE webhook_secrets SET key_id = 'lost' WHERE subscription_id = $1", badID)

	eventID := s.emitLead(t)
	s.awaitDelivered(t, eventID, goodID, 1)
	s.await(t, "a fault", func() bool { return s.subscription(t, badID).SecretFault != nil })
	delivery, _ := s.delivery(t, eventID, badID)
	require.Equal(t, "pending", delivery.State)
	require.Zero(t, delivery.Attempts)
	require.Greater(t, time.Until(delivery.NextAttemptAt), 4*time.Minute)
	require.Equal(t, 1, bad.Total())
	require.Zero(t, s.subscription(t, badID).ConsecutiveFailures)

	s.awaitState(t, *delivery.JobID, rivertype.JobStateScheduled)
	s.exec(t, "UPDATE webhook_secrets SET key_id = 'test'")
	s.exec(t, "UPDATE webhook_deliveries SET next_attempt_at = now()")
	s.exec(t, "UPDATE river.river_job SET state = 'available', scheduled_at = now() WHERE state = 'scheduled'")
	s.awaitDelivered(t, eventID, badID, 1)
	require.Nil(t, s.subscription(t, badID).SecretFault)
}

func TestSecretThatCannotSignIsHeldBack(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	s.exec(t, "UPDATE webhook_subscriptions SET secret = 'whsec_***'")
	delivery := s.dispatchLead(t, subscription)
	require.Greater(t, requireSnoozed(t, s.attempt(t, delivery.ID)), 4*time.Minute)
	delivery, _ = s.delivery(t, delivery.EventID, subscription)
	require.Equal(t, "pending config_error", delivery.State+" "+*delivery.ErrorClass)
	require.NotContains(t, *delivery.LastError, "***")
	require.Equal(t, delivery.Attempts+8, delivery.MaxAttempts, "none was spent")
	require.Zero(t, receiver.Total())
}

func TestPlainSecretIsSealedWhenItSignsFirst(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	s.awaitDelivered(t, s.emitLead(t), subscription, 1)
	require.Nil(t, s.subscription(t, subscription).Secret)
	s.awaitDelivered(t, s.emitLead(t), subscription, 1)
	require.Len(t, receiver.Accepted(), 2, "and signs as before")

	// Without a key they sign as they are.
	s.deps.Webhooks.Keys = nil
	plain := s.subscribe(t, s.org, receiver.URL(), "lead.created")
	s.awaitDelivered(t, s.emitLead(t), plain, 1)
	require.NotNil(t, s.subscription(t, plain).Secret)
}

func TestSubscriptionThatGoesMeanwhileHoldsNothingUp(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ statement, underWay, waiting string }{
		"disabled": {"UPDATE webhook_subscriptions SET enabled = false", "succeeded", "held"},
		"deleted":  {"DELETE FROM webhook_subscriptions", "cancelled", "cancelled"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, receiver := startSystem(t), startReceiver(t)
			receiver.SetFault(sandbox.Fault{Hang: true})
			subscription := s.subscribe(t, s.org, receiver.URL(), "*")
			s.exec(t, "UPDATE webhook_subscriptions SET max_concurrent = 1")
			underWay := s.emitLead(t)
			require.NoError(t, receiver.AwaitCalls(t.Context(), 1))
			waiting := s.emitLead(t)
			s.awaitDelivery(t, waiting, subscription, "pending")

			s.exec(t, test.statement)
			receiver.ClearFault()
			s.awaitDelivery(t, underWay, subscription, test.underWay)
			s.awaitDelivery(t, waiting, subscription, test.waiting)
			s.await(t, "the end of the jobs", func() bool {
				return one[int](t, s, "SELECT count(*) FROM river.river_job WHERE kind = $1 AND state <> 'completed'", deliveryKind) == 0
			})
			require.Equal(t, 1, receiver.Total())
			require.Equal(t, []string{"success"}, s.attempts(t, one[uuid.UUID](t, s, "SELECT id FROM webhook_deliveries WHERE event_id = $1", underWay)))
		})
	}
}

func TestChangesCountFromTheNextAttemptOn(t *testing.T) {
	t.Parallel()
	s, before, after := newSystem(t), startReceiver(t), startReceiver(t)
	webhooks, scope := s.deps.Webhooks, Scope{Actor: "test"}
	before.SetFault(sandbox.Fault{Status: 500})
	subscription := s.subscribe(t, s.org, before.URL(), "*")
	delivery := s.dispatchLead(t, subscription)
	requireSnoozed(t, s.attempt(t, delivery.ID))

	_, err := webhooks.Update(t.Context(), scope, subscription, WebhookSettings{
		URL: new(after.URL()), Headers: map[string]string{"X-Api-Key": "the key"},
	})
	require.NoError(t, err)
	secret, err := webhooks.Rotate(t.Context(), scope, subscription, time.Hour, "")
	require.NoError(t, err)
	s.exec(t, "UPDATE webhook_deliveries SET next_attempt_at = now()")
	require.NoError(t, s.attempt(t, delivery.ID))
	require.Equal(t, 1, before.Total())
	call := after.Calls()[0]
	require.Equal(t, "the key", call.Header.Get("X-Api-Key"))
	verifier, err := standardwebhooks.NewWebhook(secret)
	require.NoError(t, err)
	require.NoError(t, verifier.Verify([]byte(call.Body), call.Header))
}

// Neither a job that River runs twice nor one that was replaced makes a second POST.
func TestNoTwoPostsOfADeliveryAreUnderWay(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Hang: true})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	delivery := s.dispatchLead(t, subscription)
	args, replaced := s.timer(t, delivery.ID)
	var all errgroup.Group
	all.Go(func() error { return s.attempt(t, delivery.ID) })
	require.NoError(t, receiver.AwaitCalls(t.Context(), 1))
	for range 5 {
		requireSnoozed(t, s.attempt(t, delivery.ID))
	}
	receiver.ClearFault()
	require.NoError(t, all.Wait())
	require.Equal(t, 1, receiver.Total())

	_, err := s.deps.Webhooks.Resend(t.Context(), Scope{Actor: "test"}, subscription, delivery.ID, "")
	require.NoError(t, err)
	next, err := s.deps.Webhooks.attempt(t.Context(), args, replaced)
	require.NoError(t, err)
	require.Equal(t, "superseded", next.state)
	require.Equal(t, 1, receiver.Total())
	require.NoError(t, s.attempt(t, delivery.ID))
	require.Equal(t, 2, receiver.Total())
}

func TestLeaseLeavesTimeToRecord(t *testing.T) {
	t.Parallel()
	require.Greater(t, deliveryLease, webhook.Timeout+recordTimeout, "it begins before the POST does")
	timeout := (&webhookDeliveryWorker{}).Timeout(nil)
	require.LessOrEqual(t, timeout, deliveryLease, "a POST ends with its job")
	const rescuer, leader = 30 * time.Second, 20 * time.Second
	require.LessOrEqual(t, timeout+rescuer+leader, 2*time.Minute)
}

// Its number is taken before a POST, so that whatever happens to the process or the
// database the budget ends.
func TestAttemptsCountThoughTheirEndIsNotRecorded(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Status: 403})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	delivery := s.dispatchLead(t, subscription)
	s.exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'disk full'; END $$`)
	s.exec(t, `CREATE TRIGGER refuse BEFORE UPDATE ON webhook_attempts FOR EACH ROW EXECUTE FUNCTION refuse()`)
	for range 8 {
		require.ErrorContains(t, s.attempt(t, delivery.ID), "record delivery")
		requireSnoozed(t, s.attempt(t, delivery.ID)) // until the attempt must be over
		s.exec(t, "UPDATE webhook_deliveries SET lease_until = now() - interval '1 second'")
	}
	require.ErrorIs(t, s.attempt(t, delivery.ID), &rivertype.JobCancelError{})
	require.Equal(t, 8, receiver.Total())
	delivery, _ = s.delivery(t, delivery.EventID, subscription)
	require.Equal(t, "dead lost", delivery.State+" "+*delivery.ErrorClass)
	require.Equal(t, slices.Repeat([]string{"started"}, 8), s.attempts(t, delivery.ID))
	s.awaitEvents(t, "webhook.delivery_failed", 1)
}

// A database that is away for a moment costs no second POST.
func TestOutcomeIsRecordedOnceTheDatabaseIsBack(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	delivery := s.dispatchLead(t, s.subscribe(t, s.org, receiver.URL(), "*"))
	s.exec(t, "CREATE SEQUENCE tries") // which no rollback takes back
	s.exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF nextval('tries') < 3 THEN
				RAISE 'away' USING ERRCODE = 'cannot_connect_now';
			END IF;
			RETURN NEW;
		END $$`)
	s.exec(t, "CREATE TRIGGER refuse BEFORE UPDATE ON webhook_attempts FOR EACH ROW EXECUTE FUNCTION refuse()")
	require.NoError(t, s.attempt(t, delivery.ID))
	require.Equal(t, []string{"success"}, s.attempts(t, delivery.ID))
	require.Equal(t, 1, receiver.Total())
}

// Those whose outcomes share a statement would wait for it, and it for one of them.
func TestOutcomeDoesNotWaitForAnotherDelivery(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Hang: true})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	locked, other := s.dispatchLead(t, subscription), s.dispatchLead(t, subscription)
	var lockedOne, otherOne errgroup.Group
	lockedOne.Go(func() error { return s.attempt(t, locked.ID) })
	otherOne.Go(func() error { return s.attempt(t, other.ID) })
	require.NoError(t, receiver.AwaitCalls(t.Context(), 2))
	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "SELECT FROM webhook_deliveries WHERE id = $1 FOR UPDATE", locked.ID); err != nil {
			return err
		}
		receiver.ClearFault()
		return otherOne.Wait()
	}))
	require.NoError(t, lockedOne.Wait())
	for _, delivery := range []db.WebhookDelivery{locked, other} {
		require.Equal(t, "succeeded", one[string](t, s, "SELECT state FROM webhook_deliveries WHERE id = $1", delivery.ID))
	}
	require.Equal(t, 2, receiver.Total())
}

func TestDeliveriesOfASubscriptionAreCappedInNumber(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	var calls atomic.Int32
	gate := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		calls.Add(1)
		<-gate
	}))
	t.Cleanup(server.Close)
	s.subscribe(t, s.org, server.URL, "*")
	s.exec(t, "UPDATE webhook_subscriptions SET max_concurrent = 3, rate_per_second = 1000")
	for range 20 {
		s.emitLead(t)
	}
	s.await(t, "all others to wait", func() bool {
		return one[int](t, s, "SELECT count(*) FROM webhook_deliveries WHERE state = 'pending' AND has_slot") == 17
	})
	require.EqualValues(t, 3, calls.Load())
	close(gate)
	s.await(t, "all calls", func() bool { return calls.Load() == 20 })
}

// countedPool is another pool of the system, and what counts its statements.
func (s *system) countedPool(t *testing.T) (*pgxpool.Pool, *counter) {
	t.Helper()
	config, counted := s.pool.Config(), &counter{}
	config.ConnConfig.Tracer = counted
	return dbtest.Pool(t, config), counted
}

// counter counts the statements of a pool; each is a round trip.
type counter struct{ statements atomic.Int32 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.statements.Add(1)
	return ctx
}

func (*counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// With a database that is far away, round trips are what a delivery takes.
func TestDeliveryTakesFewRoundTrips(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	require.NoError(t, s.attempt(t, s.dispatchLead(t, subscription).ID)) // seals the secret
	args, job := s.timer(t, s.dispatchLead(t, subscription).ID)
	pool, counted := s.countedPool(t)
	webhooks := newWebhooks(t, pool)

	next, err := webhooks.attempt(t.Context(), args, job)
	require.NoError(t, err)
	require.Equal(t, "succeeded", next.state)
	require.LessOrEqual(t, counted.statements.Load(), int32(7), "begin, lock twice, secrets, start, commit; finish")
}

// The more deliveries wait, the less each of them takes.
func TestDeliveriesOfASubscriptionShareRoundTrips(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	s.exec(t, "UPDATE webhook_subscriptions SET max_concurrent = 100, rate_per_second = 1000")
	deliveries := make([]db.WebhookDelivery, rateBurst)
	for i := range deliveries {
		deliveries[i] = s.dispatchLead(t, subscription)
	}
	pool, counted := s.countedPool(t)
	webhooks := newWebhooks(t, pool)
	results := make(chan error, len(deliveries))
	s.whileLocked(t, subscription, func() {
		s.attemptAll(t, webhooks, deliveries, results)
		s.await(t, "the first to wait for the row, and the others for that one", func() bool { return s.lockWaiters(t) == 1 })
	})
	for range deliveries {
		require.NoError(t, <-results)
	}
	require.Equal(t, len(deliveries), receiver.Total())
	require.Less(t, int(counted.statements.Load()), 3*len(deliveries))
}

// A job that cannot begin is put off: it has not failed, and keeps neither a worker nor
// a connection.
func TestJobThatWaitsForItsTurnIsPutOff(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	deliveries := make([]db.WebhookDelivery, 5)
	for i := range deliveries {
		deliveries[i] = s.dispatchLead(t, subscription)
	}
	results := make(chan error, len(deliveries))
	s.whileLocked(t, subscription, func() {
		s.attemptAll(t, s.deps.Webhooks, deliveries, results)
		for range deliveries {
			select {
			case err := <-results:
				requireSnoozed(t, err)
			case <-time.After(2 * (turnWait + beginTimeout)):
				t.Error("a job was not put off")
			}
			require.LessOrEqual(t, s.lockWaiters(t), 1, "connections that wait")
		}
	})
	require.Zero(t, receiver.Total())
	s.attemptAll(t, s.deps.Webhooks, deliveries[:1], results)
	require.NoError(t, <-results)
	require.Equal(t, 1, receiver.Total())
}

// Nor does a success wait for others that begin, until its lease is over.
func TestSuccessIsRecordedThoughOthersHaveTheRow(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Hang: true})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	args, job := s.timer(t, s.dispatchLead(t, subscription).ID)
	var running errgroup.Group
	running.Go(func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := s.deps.Webhooks.attempt(ctx, args, job)
		return err
	})
	require.NoError(t, receiver.AwaitCalls(t.Context(), 1))
	s.whileLocked(t, subscription, func() {
		receiver.ClearFault()
		require.NoError(t, running.Wait())
	})
	require.Equal(t, []string{"success"}, s.attempts(t, args.DeliveryID))
	require.Equal(t, "succeeded", one[string](t, s, "SELECT state FROM webhook_deliveries WHERE id = $1", args.DeliveryID))
}

// Also in several processes: the number of those under way is looked at under the lock.
func TestDeliveriesThatBeginTogetherKeepTheCap(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Hang: true})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	s.exec(t, "UPDATE webhook_subscriptions SET max_concurrent = 1")
	deliveries := []db.WebhookDelivery{s.dispatchLead(t, subscription), s.dispatchLead(t, subscription)}
	results := make(chan error, len(deliveries))
	s.whileLocked(t, subscription, func() {
		s.attemptAll(t, s.deps.Webhooks, deliveries[:1], results)
		s.attemptAll(t, newWebhooks(t, s.pool), deliveries[1:], results)
		s.await(t, "both to wait", func() bool { return s.lockWaiters(t) == 2 })
	})
	requireSnoozed(t, <-results)
	require.NoError(t, receiver.AwaitCalls(t.Context(), 1))
	receiver.ClearFault()
	require.NoError(t, <-results)
	require.Equal(t, 1, receiver.Total())
}

func TestDeliveryWhoseBodyWasDeletedIsGivenUp(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	delivery := s.dispatchLead(t, s.subscribe(t, s.org, receiver.URL(), "*"))
	s.exec(t, "DELETE FROM webhook_bodies")
	require.ErrorIs(t, s.attempt(t, delivery.ID), &rivertype.JobCancelError{})
	delivery, _ = s.delivery(t, delivery.EventID, delivery.SubscriptionID)
	require.Equal(t, "dead config_error", delivery.State+" "+*delivery.ErrorClass)
	require.Empty(t, s.attempts(t, delivery.ID))
	require.Zero(t, receiver.Total())
}

func TestDeliveriesKeepTheRate(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	s.exec(t, "UPDATE webhook_subscriptions SET rate_per_second = 1")
	var waits []time.Time
	for i := range rateBurst + 5 {
		delivery := s.dispatchLead(t, subscription)
		if i < rateBurst {
			require.NoError(t, s.attempt(t, delivery.ID))
			continue
		}
		if i == rateBurst { // so far ahead that no slow machine catches up
			s.exec(t, "UPDATE webhook_subscriptions SET next_slot_at = now() + interval '1 hour'")
		}
		requireSnoozed(t, s.attempt(t, delivery.ID))
		delivery, _ = s.delivery(t, delivery.EventID, subscription)
		waits = append(waits, delivery.NextAttemptAt)
	}
	require.Equal(t, rateBurst, receiver.Total())
	for i := range waits[1:] {
		require.InDelta(t, 1, waits[i+1].Sub(waits[i]).Seconds(), 0.001, "each has its own time")
	}
}

func TestDelaysAreThoseOfTheSpecification(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	s.deps.Webhooks.Backoff = nil
	receiver.SetFault(sandbox.Fault{Status: 500})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	delivery := s.dispatchLead(t, subscription)
	for _, delay := range eventlog.Backoff()[:7] {
		wait := requireSnoozed(t, s.attempt(t, delivery.ID))
		require.GreaterOrEqual(t, wait, delay)
		require.LessOrEqual(t, wait, delay*13/10)
		s.exec(t, "UPDATE webhook_deliveries SET next_attempt_at = now()")
		s.exec(t, "UPDATE webhook_subscriptions SET open_until = NULL")
	}
	require.ErrorIs(t, s.attempt(t, delivery.ID), &rivertype.JobCancelError{})
	require.Equal(t, 8, receiver.Total())
}

// One that stops in the middle of an exchange records it, and spends one attempt.
func TestStoppedProcessRecordsWhatItSent(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Hang: true})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	delivery := s.dispatchLead(t, subscription)
	ctx, stop := context.WithCancel(t.Context())
	args, job := s.timer(t, delivery.ID)
	var running errgroup.Group
	running.Go(func() error {
		next, err := s.deps.Webhooks.attempt(ctx, args, job)
		if err != nil {
			return err
		}
		return next.result()
	})
	require.NoError(t, receiver.AwaitCalls(t.Context(), 1))
	stop()
	requireSnoozed(t, running.Wait())
	require.Equal(t, []string{"interrupted"}, s.attempts(t, delivery.ID))
	require.Zero(t, s.subscription(t, subscription).ConsecutiveFailures)
	receiver.ClearFault()
	require.NoError(t, s.attempt(t, delivery.ID))
	require.Equal(t, fmt.Sprint([]string{"interrupted", "success"}), fmt.Sprint(s.attempts(t, delivery.ID)))
}

// attemptAll begins an attempt at each delivery, all at once, and sends how they end.
func (s *system) attemptAll(t *testing.T, webhooks *Webhooks, deliveries []db.WebhookDelivery, results chan<- error) {
	t.Helper()
	for _, delivery := range deliveries {
		args, job := s.timer(t, delivery.ID)
		go func() {
			next, err := webhooks.attempt(t.Context(), args, job)
			results <- errors.Join(err, next.result())
		}()
	}
}

// whileLocked calls f while nobody else gets the row of a subscription.
func (s *system) whileLocked(t *testing.T, subscription uuid.UUID, f func()) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		if _, err := db.New(tx).LockSubscription(t.Context(), subscription, nil); err != nil {
			return err
		}
		f()
		return nil
	}))
}

// lockWaiters is how many connections wait for a lock.
func (s *system) lockWaiters(t *testing.T) int {
	t.Helper()
	return one[int](t, s, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
}
