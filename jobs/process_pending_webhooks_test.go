package jobs

import (
	"encoding/json"
	"testing"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"afluente/jobs/webhook"
)

func TestProcessPendingWebhooksReleasesWhatIsDue(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	// No leader could do it: River's own work is not started until later.
	s.exec(t, `INSERT INTO river.river_job (kind, queue, args, state, attempt, max_attempts, scheduled_at)
		SELECT kind, queue, '{}', 'retryable', 1, 8, now() - ago
		FROM (VALUES ('webhook-dispatch-worker', 'webhooks', interval '1 minute'), ('webhook-dispatch-worker', 'webhooks', '10 seconds'),
			('webhook-dispatch-worker', 'webhooks', '-1 hour'), ('whatsapp-send-worker', 'whatsapp', '1 minute')) AS v (kind, queue, ago)`)
	worker := &processPendingWebhooksWorker{webhooks: s.deps.Webhooks}
	job := &river.Job[ProcessPendingWebhooksArgs]{JobRow: &rivertype.JobRow{}}
	_ = worker.Work(t.Context(), job) // its output has no place to go outside River
	require.Equal(t, 1, one[int](t, s, "SELECT count(*) FROM river.river_job WHERE state = 'available' AND queue = 'webhooks'"))
	require.Equal(t, 3, one[int](t, s, "SELECT count(*) FROM river.river_job WHERE state = 'retryable'"))

	s.exec(t, "DELETE FROM river.river_job")
	s.start(t)
	inserted, err := s.client.Insert(t.Context(), ProcessPendingWebhooksArgs{}, nil)
	require.NoError(t, err)
	require.JSONEq(t, `{"released": 0, "found": 0, "sealed": 0, "unsealed": 0, "expired": 0, "deleted": 0}`, string(s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted).Output()))
}

// process runs the cron once and returns what it did.
func (s *system) process(t *testing.T) (done processed) {
	t.Helper()
	inserted, err := s.client.Insert(t.Context(), ProcessPendingWebhooksArgs{}, nil)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted).Output(), &done))
	return done
}

func TestDeliveryWhoseJobIsGoneGetsANewOne(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	lost, waits := s.emitLead(t), s.emitLead(t)
	s.dispatch(t, lost)
	s.dispatch(t, waits)
	s.exec(t, "DELETE FROM river.river_job WHERE kind = $1", deliveryKind)
	s.exec(t, "UPDATE webhook_deliveries SET next_attempt_at = now() - interval '10 minutes' WHERE event_id = $1", lost)
	s.start(t)
	s.awaitDone(t, lost) // whose job locks the row
	s.awaitDone(t, waits)

	require.Equal(t, processed{Found: 1, Sealed: 1}, s.process(t))
	s.awaitDelivered(t, lost, subscription, 1)
	require.Equal(t, processed{}, s.process(t))
	require.Equal(t, 1, receiver.Total())
}

func TestSecretsAreSealedWithTheCurrentKey(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	plain := s.subscribe(t, s.org, receiver.URL(), "contact.created")
	made, _, err := s.deps.Webhooks.Create(t.Context(), s.scope(), s.org, NewWebhook{
		WebhookSettings: WebhookSettings{
			URL: new(receiver.URL()), EventTypes: []string{"lead.created"}, Headers: map[string]string{"X-Api-Key": "k"},
		},
		Secret: webhookSecret,
	})
	require.NoError(t, err)
	require.Equal(t, processed{Sealed: 1}, s.process(t), "the one in plain")
	require.Nil(t, s.subscription(t, plain).Secret)

	keys, err := webhook.ParseKeys("new:YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXphYmNkZWY=," + webhookKeys)
	require.NoError(t, err)
	s.deps.Webhooks.Keys = keys
	require.Equal(t, processed{Sealed: 3}, s.process(t), "two secrets and the headers of one")
	require.Zero(t, one[int](t, s, `SELECT (SELECT count(*) FROM webhook_secrets WHERE key_id <> 'new')
		+ (SELECT count(*) FROM webhook_subscriptions WHERE headers_key <> 'new')`))
	s.awaitDelivered(t, s.emitLead(t), made.ID, 1)
	require.Equal(t, "k", receiver.Calls()[0].Header.Get("X-Api-Key"))

	s.exec(t, "UPDATE webhook_secrets SET key_id = 'lost' WHERE subscription_id = $1", plain)
	require.Equal(t, processed{Unsealed: 1}, s.process(t))
}

func TestWhatIsLongOverIsForgotten(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	made, _ := s.create(t, "http://127.0.0.1:1/")
	for state, age := range map[string]string{"succeeded": "31 days", "held": "32 days", "dead": "33 days", "cancelled": "29 days"} {
		event := uuid.New()
		s.exec(t, `INSERT INTO webhook_deliveries (event_id, subscription_id, organization_id, state, created_at)
			VALUES ($1, $2, $3, $4, now() - $5::text::interval)`, event, made.ID, s.org, state, age)
		s.exec(t, `INSERT INTO webhook_bodies (event_id, organization_id, body, created_at) VALUES ($1, $2, '', now() - $3::text::interval)`, event, s.org, age)
	}
	s.exec(t, "INSERT INTO webhook_attempts (delivery_id, number, trigger) SELECT id, 1, 'auto' FROM webhook_deliveries")
	_, err := s.deps.Webhooks.Rotate(t.Context(), s.scope(), made.ID, 1, "")
	require.NoError(t, err)

	require.Equal(t, processed{Deleted: 2, Expired: 1}, s.process(t))
	require.Equal(t, 2, one[int](t, s, "SELECT count(*) FROM webhook_deliveries"), "dead ones stay until somebody decides")
	require.Equal(t, 2, one[int](t, s, "SELECT count(*) FROM webhook_attempts"))
	require.Equal(t, 2, one[int](t, s, "SELECT count(*) FROM webhook_bodies"))
}
