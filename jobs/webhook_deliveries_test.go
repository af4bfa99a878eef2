package jobs

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"afluente/eventlog"
	"afluente/jobs/sandbox"
)

func TestReSendMakesOnePostEach(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	webhooks, ctx := s.deps.Webhooks, t.Context()
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	eventID := s.emitLead(t)
	s.awaitDelivered(t, eventID, subscription, 1)
	delivery, _ := s.delivery(t, eventID, subscription)
	for n := 2; n <= 4; n++ {
		view, err := webhooks.Resend(ctx, s.scope(), subscription, delivery.ID, "")
		require.NoError(t, err)
		require.Equal(t, "pending manual", view.State+" "+view.Trigger)
		s.awaitDelivered(t, eventID, subscription, n)
	}
	requireOneDelivery(t, eventID, receiver.Calls())

	for range 3 { // a client that asks again since it did not hear the answer
		_, err := webhooks.Resend(ctx, s.scope(), subscription, delivery.ID, "key 1")
		require.NoError(t, err)
		s.awaitDelivered(t, eventID, subscription, 5)
	}
	_, err := webhooks.Resend(ctx, s.scope(), subscription, delivery.ID, "key 2")
	require.NoError(t, err)
	s.awaitDelivered(t, eventID, subscription, 6)
	require.Equal(t, 6, receiver.Total())
	for _, key := range []string{strings.Repeat("a", 256), "\x00", "\xff"} {
		_, err = webhooks.Resend(ctx, s.scope(), subscription, delivery.ID, key)
		require.ErrorIs(t, err, ErrInvalid)
	}

	receiver.SetFault(sandbox.Fault{Hang: true})
	_, err = webhooks.Resend(ctx, s.scope(), subscription, delivery.ID, "")
	require.NoError(t, err)
	require.NoError(t, receiver.AwaitCalls(ctx, 7))
	_, err = webhooks.Resend(ctx, s.scope(), subscription, delivery.ID, "")
	require.ErrorIs(t, err, ErrUnderWay)
	receiver.ClearFault()
	s.awaitDelivered(t, eventID, subscription, 7)
	_, err = webhooks.Disable(ctx, s.scope(), subscription)
	require.NoError(t, err)
	_, err = webhooks.Resend(ctx, s.scope(), subscription, delivery.ID, "")
	require.ErrorIs(t, err, ErrDisabled)

	view, attempts, err := webhooks.Delivery(ctx, s.scope(), subscription, delivery.ID)
	require.NoError(t, err)
	require.Equal(t, "succeeded", view.State)
	require.Len(t, attempts, 7)
	require.Equal(t, "auto", attempts[0].Trigger)
	require.Equal(t, 7, attempts[6].Number)
	require.Equal(t, `manual success 200 {"ok":true}`, fmt.Sprint(attempts[6].Trigger, " ", attempts[6].Class, " ", *attempts[6].StatusCode, " ", *attempts[6].Answer))
	require.NotNil(t, attempts[6].DurationMS)
	require.Contains(t, *attempts[6].Remote, "127.0.0.1:")
}

// What a person tries does no harm to the subscription, and has a full set of attempts.
func TestReSendThatFailsDoesNotCount(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "lead.created")
	eventID := s.emitLead(t)
	s.awaitDelivered(t, eventID, subscription, 1)
	delivery, _ := s.delivery(t, eventID, subscription)
	receiver.SetFault(sandbox.Fault{Status: 500})
	s.deps.Webhooks.Backoff = []time.Duration{time.Hour}
	_, err := s.deps.Webhooks.Resend(t.Context(), s.scope(), subscription, delivery.ID, "")
	require.NoError(t, err)
	s.await(t, "the attempt", func() bool {
		delivery, _ = s.delivery(t, eventID, subscription)
		return delivery.Attempts == 2 && delivery.State == "pending"
	})
	require.Zero(t, s.subscription(t, subscription).ConsecutiveFailures)
	require.EqualValues(t, 9, delivery.MaxAttempts)
}

// An answer that no text column takes costs no attempt its row.
func TestAnyAnswerIsRecorded(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Status: 500, Garbage: true, Times: 1})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	eventID := s.emitLead(t)
	s.awaitDelivered(t, eventID, subscription, 2)
	delivery, _ := s.delivery(t, eventID, subscription)
	_, attempts, err := s.deps.Webhooks.Delivery(t.Context(), s.scope(), subscription, delivery.ID)
	require.NoError(t, err)
	require.Contains(t, *attempts[0].Answer, "\uFFFD")
	require.NotContains(t, *attempts[0].Answer, "\x00")
}

func TestRecoverSendsAllThatFailedAndNothingElse(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Status: 413})
	mine := s.subscribe(t, s.org, receiver.URL(), "lead.created")
	theirs := s.subscribe(t, s.newOrganization(t), receiver.URL(), "lead.created")
	s.exec(t, "UPDATE webhook_subscriptions SET rate_per_second = 1000, max_concurrent = 50")
	s.emit(t, eventlog.RawEvent{Type: "lead.created", OrganizationID: s.subscription(t, theirs).OrganizationID, Payload: []byte(`{}`)})
	const many = 250
	require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		events := slices.Repeat([]eventlog.RawEvent{{Type: "lead.created", OrganizationID: s.org, Payload: []byte(`{}`)}}, many)
		for _, event := range events {
			if _, err := eventlog.EmitRaw(t.Context(), tx, event); err != nil {
				return err
			}
		}
		return nil
	}))
	s.step(t)
	count := func(state string, subscription uuid.UUID) int {
		return one[int](t, s, "SELECT count(*) FROM webhook_deliveries WHERE state = $1 AND subscription_id = $2", state, subscription)
	}
	s.await(t, "dead deliveries", func() bool { return count("dead", mine) == many && count("dead", theirs) == 1 })
	s.await(t, "dead letters", func() bool {
		return one[int](t, s, "SELECT count(*) FROM river.river_job WHERE state = 'cancelled'") == many+1
	})
	old := one[uuid.UUID](t, s, `UPDATE webhook_deliveries SET created_at = now() - interval '2 hours'
		WHERE id = (SELECT id FROM webhook_deliveries WHERE subscription_id = $1 LIMIT 1) RETURNING id`, mine)
	gone := one[int64](t, s, "SELECT job_id FROM webhook_deliveries WHERE subscription_id = $1 AND id <> $2 LIMIT 1", mine, old)
	s.exec(t, "DELETE FROM river.river_job WHERE id = $1", gone) // an operator discarded its dead letter

	receiver.ClearFault()
	recovered, err := s.deps.Webhooks.Recover(t.Context(), s.scope(), mine, time.Now().Add(-time.Hour))
	require.NoError(t, err)
	require.Equal(t, many-1, recovered)
	again, err := s.deps.Webhooks.Recover(t.Context(), s.scope(), mine, time.Now().Add(-time.Hour))
	require.NoError(t, err)
	require.Zero(t, again, "they are under way")
	s.await(t, "all deliveries", func() bool { return count("succeeded", mine) == many-1 })
	require.Equal(t, "dead", one[string](t, s, "SELECT state FROM webhook_deliveries WHERE id = $1", old))
	require.Equal(t, 1, count("dead", theirs))
	s.await(t, "the dead letters that are left", func() bool {
		return one[int](t, s, "SELECT count(*) FROM river.river_job WHERE state = 'cancelled'") == 2
	})
	for delivery, times := range receiver.Accepted() {
		require.Equal(t, 1, times, delivery)
	}
	require.Equal(t, many+1+many-1, receiver.Total())
}

func TestReplayMissingSendsWhatAWebhookNeverHad(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	var before []uuid.UUID
	for range 5 {
		before = append(before, s.emitLead(t))
	}
	other := s.emit(t, eventlog.RawEvent{Type: "contact.created", OrganizationID: s.org, Payload: []byte(`{}`)})
	foreign := s.emit(t, eventlog.RawEvent{Type: "lead.created", OrganizationID: s.newOrganization(t), Payload: []byte(`{}`)})
	for _, eventID := range append(before, other, foreign) {
		s.awaitDone(t, eventID)
	}
	s.exec(t, "UPDATE event_log SET consumers = '{}', consumed_by = '{}' WHERE id = $1", before[1]) // from before there were webhooks
	s.exec(t, "UPDATE event_log SET created_at = now() - interval '2 hours' WHERE id = $1", before[0])
	subscription := s.subscribe(t, s.org, receiver.URL(), "lead.*")
	s.awaitDelivered(t, s.emitLead(t), subscription, 1)

	for i, want := range []int{4, 0} {
		replayed, err := s.deps.Webhooks.ReplayMissing(t.Context(), s.scope(), subscription, time.Now().Add(-time.Hour))
		require.NoError(t, err)
		require.Equal(t, want, replayed, "call %d", i)
	}
	for _, eventID := range before[1:] {
		s.awaitDelivered(t, eventID, subscription, 1)
	}
	require.Equal(t, 5, receiver.Total())
	_, ok := s.delivery(t, before[0], subscription)
	require.False(t, ok)

	_, err := s.deps.Webhooks.ReplayMissing(t.Context(), s.scope(), subscription, time.Now().Add(-deliveryRetention-time.Hour))
	require.ErrorIs(t, err, ErrInvalid, "what was delivered then is not remembered")
	_, err = s.deps.Webhooks.Disable(t.Context(), s.scope(), subscription)
	require.NoError(t, err)
	_, err = s.deps.Webhooks.ReplayMissing(t.Context(), s.scope(), subscription, time.Now())
	require.ErrorIs(t, err, ErrDisabled)
}

func TestDeliveriesAreListedPageByPage(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	made, _ := s.create(t, "http://127.0.0.1:1/")
	s.exec(t, `INSERT INTO webhook_deliveries (event_id, subscription_id, organization_id, state)
		SELECT gen_random_uuid(), $1, $2, CASE WHEN i % 2 = 0 THEN 'dead' ELSE 'succeeded' END FROM generate_series(1, 25) AS i`, made.ID, s.org)
	seen := make(map[uuid.UUID]bool)
	filter := DeliveryFilter{Limit: 10}
	for _, want := range []int{10, 10, 5, 0} { // all of one time
		page, err := s.deps.Webhooks.Deliveries(t.Context(), s.scope(), made.ID, filter)
		require.NoError(t, err)
		require.Len(t, page, want)
		for _, delivery := range page {
			seen[delivery.ID] = true
			filter.After = delivery.ID
		}
	}
	require.Len(t, seen, 25)
	dead, err := s.deps.Webhooks.Deliveries(t.Context(), s.scope(), made.ID, DeliveryFilter{State: "dead", Limit: 1000})
	require.NoError(t, err)
	require.Len(t, dead, 12)
	for _, wrong := range []DeliveryFilter{{Limit: 0}, {Limit: 1001}, {Limit: 1, State: "lost"}} {
		_, err = s.deps.Webhooks.Deliveries(t.Context(), s.scope(), made.ID, wrong)
		require.ErrorIs(t, err, ErrInvalid)
	}
}
