package jobs

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"

	"afluente/jobs/sandbox"
	"afluente/jobs/webhook"
)

// create makes a webhook of the system's organization for all events.
func (s *system) create(t *testing.T, url string) (Webhook, string) {
	t.Helper()
	created, secret, err := s.deps.Webhooks.Create(t.Context(), s.scope(), s.org, NewWebhook{
		WebhookSettings: WebhookSettings{URL: &url, EventTypes: []string{"*"}},
	})
	require.NoError(t, err)
	return created, secret
}

func (s *system) scope() Scope { return Scope{Organization: &s.org, Actor: "test"} }

func TestWebhookIsMadeChangedAndDeleted(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	webhooks := s.deps.Webhooks
	settings := NewWebhook{
		WebhookSettings: WebhookSettings{
			URL: new(receiver.URL()), EventTypes: []string{"lead.*"}, Description: new("the CRM"),
			Headers: map[string]string{"X-Api-Key": "hidden", "Authorization": "Bearer hidden"}, MaxConcurrent: new(7), RatePerSecond: new(8),
		},
		Secret: webhookSecret, Disabled: true,
	}
	created, secret, err := webhooks.Create(t.Context(), s.scope(), s.org, settings)
	require.NoError(t, err)
	require.Equal(t, webhookSecret, secret)
	want := Webhook{
		ID: created.ID, OrganizationID: s.org, URL: receiver.URL(), EventTypes: []string{"lead.*"}, Description: "the CRM",
		Headers: map[string]string{"X-Api-Key": "***", "Authorization": "***"}, MaxConcurrent: 7, RatePerSecond: 8, CreatedAt: created.CreatedAt,
	}
	require.Equal(t, want, created)
	held := s.emitLead(t)
	s.awaitDelivery(t, held, created.ID, "held")

	enabled, err := webhooks.Enable(t.Context(), s.scope(), created.ID)
	require.NoError(t, err)
	require.True(t, enabled.Enabled)
	s.awaitDelivered(t, s.emitLead(t), created.ID, 1)
	require.Equal(t, "hidden", receiver.Calls()[0].Header.Get("X-Api-Key"))
	require.Equal(t, "Bearer hidden", receiver.Calls()[0].Header.Get("Authorization"))

	updated, err := webhooks.Update(t.Context(), s.scope(), created.ID, WebhookSettings{
		Headers: map[string]string{"X-Api-Key": "***", "X-New": "new"}, Description: new(""),
	})
	require.NoError(t, err)
	want.Enabled, want.Description, want.Headers = true, "", map[string]string{"X-Api-Key": "***", "X-New": "***"}
	require.Equal(t, want, updated)
	got, err := webhooks.Get(t.Context(), s.scope(), created.ID)
	require.NoError(t, err)
	require.Equal(t, want, got)
	list, err := webhooks.List(t.Context(), s.scope())
	require.NoError(t, err)
	require.Equal(t, []Webhook{want}, list)
	s.awaitDelivered(t, s.emitLead(t), created.ID, 1)
	header := receiver.Calls()[1].Header
	require.Equal(t, "hidden new", header.Get("X-Api-Key")+" "+header.Get("X-New"))
	require.Empty(t, header.Get("Authorization"))

	// Neither the secret nor a header's value is anywhere in the database.
	for _, table := range []string{"webhook_subscriptions", "webhook_secrets", "webhook_deliveries", "webhook_attempts", "audit_log", "river.river_job", "event_log"} {
		for _, text := range []string{"hidden", webhookSecret, strings.TrimPrefix(webhookSecret, "whsec_")} {
			require.Zero(t, one[int](t, s, "SELECT count(*) FROM "+table+" AS r WHERE to_jsonb(r)::text LIKE '%' || $1 || '%'", text), table)
		}
	}

	require.NoError(t, webhooks.Delete(t.Context(), s.scope(), created.ID))
	s.awaitDelivery(t, held, created.ID, "cancelled")
	_, err = webhooks.Get(t.Context(), s.scope(), created.ID)
	require.ErrorIs(t, err, ErrNotFound)
	require.Equal(t, "webhook.created webhook.enabled webhook.updated webhook.deleted",
		one[string](t, s, "SELECT string_agg(action, ' ' ORDER BY created_at) FROM audit_log WHERE entity_id = $1 AND actor_id = 'test'", created.ID))
}

func TestWhatAWebhookMayNotBe(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	good := func() NewWebhook {
		return NewWebhook{WebhookSettings: WebhookSettings{URL: new("http://127.0.0.1:9000/"), EventTypes: []string{"*"}}}
	}
	_, _, err := s.deps.Webhooks.Create(t.Context(), s.scope(), s.org, good())
	require.NoError(t, err)
	made, _ := s.create(t, "http://127.0.0.1:9000/")
	for name, spoil := range map[string]func(*NewWebhook){
		"no url":                 func(w *NewWebhook) { w.URL = nil },
		"no types":               func(w *NewWebhook) { w.EventTypes = nil },
		"zero types":             func(w *NewWebhook) { w.EventTypes = []string{} },
		"too many types":         func(w *NewWebhook) { w.EventTypes = make([]string, 101) },
		"a type that is none":    func(w *NewWebhook) { w.EventTypes = []string{"lead"} },
		"a star in a name":       func(w *NewWebhook) { w.EventTypes = []string{"lead.c*"} },
		"a star before the dot":  func(w *NewWebhook) { w.EventTypes = []string{"*.created"} },
		"NUL in a type":          func(w *NewWebhook) { w.EventTypes = []string{"lead.created\x00"} },
		"NUL in the description": func(w *NewWebhook) { w.Description = new("\x00") },
		"invalid UTF-8":          func(w *NewWebhook) { w.Description = new("\xff") },
		"a long description":     func(w *NewWebhook) { w.Description = new(strings.Repeat("a", 201)) },
		"no concurrency":         func(w *NewWebhook) { w.MaxConcurrent = new(0) },
		"a huge concurrency":     func(w *NewWebhook) { w.MaxConcurrent = new(1 << 40) },
		"a negative rate":        func(w *NewWebhook) { w.RatePerSecond = new(-1) },
		"a huge rate":            func(w *NewWebhook) { w.RatePerSecond = new(1001) },
		"our header":             func(w *NewWebhook) { w.Headers = map[string]string{"webhook-signature": "v1,x"} },
		"a header's two lines":   func(w *NewWebhook) { w.Headers = map[string]string{"X-A": "a\r\nX-B: b"} },
		"a mask without value":   func(w *NewWebhook) { w.Headers = map[string]string{"X-A": "***"} },
		"a short secret":         func(w *NewWebhook) { w.Secret = "segredo" },
		"a secret's prefix":      func(w *NewWebhook) { w.Secret = "whsec_" },
		"a private address":      func(w *NewWebhook) { w.URL = new("https://10.0.0.1/") },
	} {
		bad := good()
		spoil(&bad)
		_, _, err := s.deps.Webhooks.Create(t.Context(), s.scope(), s.org, bad)
		require.ErrorIs(t, err, ErrInvalid, name)
		if bad.URL != nil && bad.EventTypes != nil && bad.Secret == "" {
			_, err = s.deps.Webhooks.Update(t.Context(), s.scope(), made.ID, bad.WebhookSettings)
			require.ErrorIs(t, err, ErrInvalid, name)
		}
		if bad.Secret != "" {
			_, err = s.deps.Webhooks.Rotate(t.Context(), s.scope(), made.ID, 0, bad.Secret)
			require.ErrorIs(t, err, ErrInvalid, name)
		}
	}
	unchanged, err := s.deps.Webhooks.Get(t.Context(), s.scope(), made.ID)
	require.NoError(t, err)
	require.Equal(t, made, unchanged)
	require.Equal(t, 2, one[int](t, s, "SELECT count(*) FROM webhook_subscriptions"))

	_, _, err = s.deps.Webhooks.Create(t.Context(), Scope{Actor: "test"}, uuid.New(), good())
	require.ErrorIs(t, err, ErrNotFound, "no such organization")
	s.exec(t, `INSERT INTO webhook_subscriptions (organization_id, url, event_types) SELECT $1, '', '{}' FROM generate_series(1, 98)`, s.org)
	_, _, err = s.deps.Webhooks.Create(t.Context(), s.scope(), s.org, good())
	require.ErrorContains(t, err, "has 100 already")
	s.deps.Webhooks.Keys = nil
	_, err = s.deps.Webhooks.Rotate(t.Context(), s.scope(), made.ID, 0, "")
	require.ErrorIs(t, err, webhook.ErrNoKey, "no secret is ever stored in plain by us")
}

// What is refused is refused at all doors, and nothing is dialled.
func TestUnsafeURLsAreRefusedAtEveryDoor(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	var dialled atomic.Int32
	webhooks := s.deps.Webhooks
	webhooks.Sender.Guard.Allowed = nil
	webhooks.Sender.Guard.Dial = func(context.Context, string, string, func(string, string, syscall.RawConn) error) (net.Conn, error) {
		dialled.Add(1)
		return nil, net.ErrClosed
	}
	made, _ := s.create(t, "https://93.184.216.34/")
	_, err := webhooks.Disable(t.Context(), s.scope(), made.ID)
	require.NoError(t, err)
	for _, url := range []string{
		"http://93.184.216.34/", "ftp://93.184.216.34/", "https://user:pw@93.184.216.34/", "https://93.184.216.34:22/", "https://localhost/",
		"https://redis/", "https://metadata.google.internal/", "https://127.0.0.1/", "https://127.1/", "https://2130706433/", "https://0x7f.0.0.1/",
		"https://①②⑦.⓪.⓪.①/", "https://0.0.0.0/", "https://10.0.0.5/", "https://100.64.1.1/", "https://169.254.169.254/latest/meta-data/",
		"https://192.0.0.192/", "https://168.63.129.16/", "https://198.18.0.1/", "https://[::1]/", "https://[::ffff:127.0.0.1]/",
		"https://[::127.0.0.1]/", "https://[64:ff9b::a9fe:a9fe]/", "https://[2002:7f00:1::1]/", "https://[fd00:ec2::254]/", "https://[fe80::1%25lo]/",
	} {
		_, _, err := webhooks.Create(t.Context(), s.scope(), s.org, NewWebhook{WebhookSettings: WebhookSettings{URL: &url, EventTypes: []string{"*"}}})
		require.ErrorIs(t, err, ErrInvalid, url)
		_, err = webhooks.Update(t.Context(), s.scope(), made.ID, WebhookSettings{URL: &url})
		require.ErrorIs(t, err, ErrInvalid, url)

		subscription := s.subscribe(t, s.org, url, "lead.created") // past both
		result, err := webhooks.Test(t.Context(), s.scope(), subscription)
		require.NoError(t, err)
		require.False(t, result.OK, url)
		require.Contains(t, []string{"invalid_url", "unsafe_address"}, result.Class, url)

		eventID := s.emitLead(t)
		s.dispatch(t, eventID)
		delivery, _ := s.delivery(t, eventID, subscription)
		for range 2 { // the delivery, and the re-send
			_ = s.attempt(t, delivery.ID)
			class := one[string](t, s, "SELECT class FROM webhook_attempts WHERE delivery_id = $1 ORDER BY number DESC LIMIT 1", delivery.ID)
			require.Equal(t, result.Class, class, url)
			s.exec(t, "UPDATE webhook_deliveries SET state = 'held' WHERE id = $1", delivery.ID)
			_, err = webhooks.Enable(t.Context(), s.scope(), subscription)
			require.NoError(t, err)
			_, err = webhooks.Resend(t.Context(), s.scope(), subscription, delivery.ID, "")
			require.NoError(t, err)
		}
		s.exec(t, "DELETE FROM webhook_subscriptions WHERE id = $1", subscription)
	}
	require.Zero(t, dialled.Load())
}

func TestWebhooksOfAnotherOrganizationDoNotExist(t *testing.T) {
	t.Parallel()
	s, receiver := startSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Status: 413})
	theirs, _ := s.create(t, receiver.URL())
	eventID := s.emitLead(t)
	delivery := s.awaitDelivery(t, eventID, theirs.ID, "dead")
	before := one[string](t, s, "SELECT to_jsonb(s)::text || (SELECT to_jsonb(d)::text FROM webhook_deliveries AS d) FROM webhook_subscriptions AS s")
	webhooks, ctx := s.deps.Webhooks, t.Context()
	other := Scope{Organization: new(s.newOrganization(t)), Actor: "eve"}
	mine, _, err := webhooks.Create(ctx, other, *other.Organization, NewWebhook{
		WebhookSettings: WebhookSettings{URL: new(receiver.URL()), EventTypes: []string{"*"}},
	})
	require.NoError(t, err)

	list, err := webhooks.List(ctx, other)
	require.NoError(t, err)
	require.Equal(t, []Webhook{mine}, list)
	for name, call := range map[string]func(id uuid.UUID) error{
		"create": func(uuid.UUID) error { _, _, err := webhooks.Create(ctx, other, s.org, NewWebhook{}); return err },
		"get":    func(id uuid.UUID) error { _, err := webhooks.Get(ctx, other, id); return err },
		"update": func(id uuid.UUID) error {
			_, err := webhooks.Update(ctx, other, id, WebhookSettings{Description: new("eve")})
			return err
		},
		"enable":         func(id uuid.UUID) error { _, err := webhooks.Enable(ctx, other, id); return err },
		"disable":        func(id uuid.UUID) error { _, err := webhooks.Disable(ctx, other, id); return err },
		"delete":         func(id uuid.UUID) error { return webhooks.Delete(ctx, other, id) },
		"rotate":         func(id uuid.UUID) error { _, err := webhooks.Rotate(ctx, other, id, 0, ""); return err },
		"promote":        func(id uuid.UUID) error { _, err := webhooks.Promote(ctx, other, id); return err },
		"test":           func(id uuid.UUID) error { _, err := webhooks.Test(ctx, other, id); return err },
		"recover":        func(id uuid.UUID) error { _, err := webhooks.Recover(ctx, other, id, time.Time{}); return err },
		"replay missing": func(id uuid.UUID) error { _, err := webhooks.ReplayMissing(ctx, other, id, time.Now()); return err },
		"deliveries": func(id uuid.UUID) error {
			_, err := webhooks.Deliveries(ctx, other, id, DeliveryFilter{Limit: 1})
			return err
		},
		"delivery": func(id uuid.UUID) error { _, _, err := webhooks.Delivery(ctx, other, id, delivery.ID); return err },
		"resend":   func(id uuid.UUID) error { _, err := webhooks.Resend(ctx, other, id, delivery.ID, ""); return err },
	} {
		require.ErrorIs(t, call(theirs.ID), ErrNotFound, name)
		require.ErrorIs(t, call(uuid.New()), ErrNotFound, name)
	}
	// Nor by way of one's own webhook.
	_, _, err = webhooks.Delivery(ctx, other, mine.ID, delivery.ID)
	require.ErrorIs(t, err, ErrNotFound)
	_, err = webhooks.Resend(ctx, other, mine.ID, delivery.ID, "")
	require.ErrorIs(t, err, ErrNotFound)
	recovered, err := webhooks.Recover(ctx, other, mine.ID, time.Time{})
	require.NoError(t, err)
	require.Zero(t, recovered)
	page, err := webhooks.Deliveries(ctx, other, mine.ID, DeliveryFilter{Limit: 10, After: delivery.ID})
	require.NoError(t, err)
	require.Empty(t, page)

	require.Equal(t, before, one[string](t, s, `SELECT to_jsonb(s)::text || (SELECT to_jsonb(d)::text FROM webhook_deliveries AS d)
		FROM webhook_subscriptions AS s WHERE organization_id = $1`, s.org))
	require.Equal(t, 1, receiver.Total())
}

// signers are those among some secrets whose signature a call has, and whether the
// headers that hold one are of the first.
func signers(t *testing.T, call sandbox.Call, secrets ...string) string {
	t.Helper()
	var found []string
	for i, secret := range secrets {
		verifier, err := standardwebhooks.NewWebhook(secret)
		require.NoError(t, err)
		if verifier.Verify([]byte(call.Body), call.Header) == nil {
			found = append(found, fmt.Sprint(i+1))
		}
		signed, err := webhook.Sign(webhook.Request{
			EventID: "x", At: time.Now(), Secrets: []string{secret}, Legacy: secret, Body: []byte(call.Body),
		})
		require.NoError(t, err)
		if signed.Get("X-Deskcomm-Signature") == call.Header.Get("X-Deskcomm-Signature") {
			found = append(found, fmt.Sprintf("legacy %d", i+1))
		}
	}
	require.Len(t, strings.Fields(call.Header.Get("webhook-signature")), len(found)-1)
	return strings.Join(found, ", ")
}

// A secret is rotated without a moment at which a receiver of either kind fails.
func TestSecretsRotateInTwoPhases(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	receiver, err := sandbox.StartReceiver(t.Context(), sandbox.Config{Addr: "127.0.0.1:0"})
	require.NoError(t, err)
	t.Cleanup(receiver.Close)
	webhooks, ctx := s.deps.Webhooks, t.Context()
	made, first := s.create(t, receiver.URL())
	last := func() sandbox.Call {
		s.awaitDelivered(t, s.emitLead(t), made.ID, 1)
		calls := receiver.Calls()
		return calls[len(calls)-1]
	}
	require.Equal(t, "1, legacy 1", signers(t, last(), first))

	second, err := webhooks.Rotate(ctx, s.scope(), made.ID, time.Hour, "")
	require.NoError(t, err)
	require.NotEqual(t, first, second)
	require.Equal(t, "1, legacy 1, 2", signers(t, last(), first, second))
	_, err = webhooks.Promote(ctx, s.scope(), made.ID)
	require.NoError(t, err)
	require.Equal(t, "1, 2, legacy 2", signers(t, last(), first, second))
	third, err := webhooks.Rotate(ctx, s.scope(), made.ID, time.Hour, "")
	require.NoError(t, err)
	require.Equal(t, "1, 2, legacy 2, 3", signers(t, last(), first, second, third))
	_, err = webhooks.Rotate(ctx, s.scope(), made.ID, time.Hour, "")
	require.ErrorIs(t, err, ErrInvalid, "three are the most")

	// The grace is over, promoted or not.
	s.exec(t, "UPDATE webhook_secrets SET expires_at = now() WHERE expires_at IS NOT NULL")
	require.Equal(t, "3, legacy 3", signers(t, last(), first, second, third))
	fourth, err := webhooks.Rotate(ctx, s.scope(), made.ID, time.Hour, "")
	require.NoError(t, err)
	require.Equal(t, "3, legacy 3, 4", strings.NewReplacer("1", "3", "2", "4").Replace(signers(t, last(), third, fourth)))

	// One that leaked ends at once.
	fifth, err := webhooks.Rotate(ctx, s.scope(), made.ID, 0, "")
	require.NoError(t, err)
	require.Equal(t, "3, legacy 3", signers(t, last(), third, fourth, fifth))
	require.Equal(t, 1, one[int](t, s, "SELECT count(*) FROM webhook_secrets"))
	for _, grace := range []time.Duration{-1, MaxGrace + 1} {
		_, err = webhooks.Rotate(ctx, s.scope(), made.ID, grace, "")
		require.ErrorIs(t, err, ErrInvalid)
	}
	require.Equal(t, 4, one[int](t, s, "SELECT count(*) FROM audit_log WHERE action = 'webhook.secret_rotated'"))

	// One that came in plain, by SQL, goes on signing as well.
	plain := s.subscribe(t, s.org, receiver.URL(), "contact.created")
	rotated, err := webhooks.Rotate(ctx, s.scope(), plain, time.Hour, "")
	require.NoError(t, err)
	s.exec(t, "UPDATE webhook_subscriptions SET event_types = '{lead.created}' WHERE id = $1", plain)
	s.exec(t, "DELETE FROM webhook_subscriptions WHERE id = $1", made.ID)
	made.ID = plain
	require.Equal(t, "1, legacy 1, 2", signers(t, last(), webhookSecret, rotated))
}

func TestTestTellsWhatCameOfItAndCountsForNothing(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	status, header := http.StatusOK, http.Header{}
	var body map[string]any
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header = r.Header
		_ = json.NewDecoder(r.Body).Decode(&body)
		w.WriteHeader(status)
	}))
	t.Cleanup(server.Close)
	made, _ := s.create(t, server.URL)
	result, err := s.deps.Webhooks.Test(t.Context(), s.scope(), made.ID)
	require.NoError(t, err)
	require.True(t, result.OK)
	require.Equal(t, "success 200", fmt.Sprint(result.Class, " ", result.StatusCode))
	require.Equal(t, "webhook.test", header.Get("X-Deskcomm-Event"))
	require.NotEmpty(t, header.Get("webhook-signature"))
	require.Equal(t, "webhook.test", body["type"])

	status = http.StatusGone
	result, err = s.deps.Webhooks.Test(t.Context(), s.scope(), made.ID)
	require.NoError(t, err)
	require.Equal(t, "gone 410 false", fmt.Sprint(result.Class, " ", result.StatusCode, " ", result.OK))
	require.Contains(t, result.Error, "answer 410")
	after, err := s.deps.Webhooks.Get(t.Context(), s.scope(), made.ID)
	require.NoError(t, err)
	require.Equal(t, made, after)
	require.Zero(t, one[int](t, s, "SELECT count(*) FROM webhook_deliveries"))
}

func TestEnablingWhatIsEnabledChangesNothing(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	made, _ := s.create(t, "http://127.0.0.1:1/")
	s.exec(t, "UPDATE webhook_subscriptions SET consecutive_failures = 5")
	same, err := s.deps.Webhooks.Enable(t.Context(), s.scope(), made.ID)
	require.NoError(t, err)
	require.Equal(t, 5, same.ConsecutiveFailures)
	_, err = s.deps.Webhooks.Disable(t.Context(), s.scope(), made.ID)
	require.NoError(t, err)
	off, err := s.deps.Webhooks.Disable(t.Context(), s.scope(), made.ID)
	require.NoError(t, err)
	require.Equal(t, "by_user", *off.DisabledReason)
	require.NotNil(t, off.DisabledAt)
	on, err := s.deps.Webhooks.Enable(t.Context(), s.scope(), made.ID)
	require.NoError(t, err)
	require.Zero(t, on.ConsecutiveFailures)
	require.Nil(t, on.DisabledAt)
	require.True(t, one[bool](t, s, "SELECT probing FROM webhook_subscriptions"), "it proves itself with one delivery")
}
