package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"afluente/db"
	"afluente/jobs/webhook"
)

// Webhook is a subscription as its organization sees it.
type Webhook struct {
	ID             uuid.UUID `json:"id"`
	OrganizationID uuid.UUID `json:"organization_id"`
	URL            string    `json:"url"`
	EventTypes     []string  `json:"event_types"`
	Description    string    `json:"description"`
	Enabled        bool      `json:"enabled"`
	// Headers are its custom headers, their values masked.
	Headers       map[string]string `json:"headers"`
	MaxConcurrent int               `json:"max_concurrent"`
	RatePerSecond int               `json:"rate_per_second"`
	CreatedAt     time.Time         `json:"created_at"`

	ConsecutiveFailures int        `json:"consecutive_failures"`
	DisabledAt          *time.Time `json:"disabled_at"`
	DisabledReason      *string    `json:"disabled_reason"`
	// OpenUntil is until when nothing is sent, since too much failed.
	OpenUntil *time.Time `json:"open_until"`
	// Fault is why its secrets cannot sign; nil while they can.
	Fault *string `json:"fault"`
}

// masked stands for the value of a custom header.
const masked = "***"

func (w *Webhooks) view(s db.WebhookSubscription) Webhook {
	view := Webhook{
		ID:                  s.ID,
		OrganizationID:      s.OrganizationID,
		URL:                 s.Url,
		EventTypes:          s.EventTypes,
		Description:         s.Description,
		Enabled:             s.Enabled,
		Headers:             map[string]string{},
		MaxConcurrent:       int(s.MaxConcurrent),
		RatePerSecond:       int(s.RatePerSecond),
		CreatedAt:           s.CreatedAt.UTC(),
		ConsecutiveFailures: int(s.ConsecutiveFailures),
		DisabledAt:          s.DisabledAt,
		DisabledReason:      s.DisabledReason,
		OpenUntil:           s.OpenUntil,
		Fault:               s.SecretFault,
	}
	headers, err := w.openHeaders(s)
	if err != nil {
		view.Fault = new(err.Error())
	}
	for name := range headers {
		view.Headers[name] = masked
	}
	return view
}

// WebhookSettings is what an organization may set. In [Webhooks.Update] what is
// nil stays as it is.
type WebhookSettings struct {
	URL *string `json:"url"`
	// EventTypes are exact types, "lead.*" for all of a subject, and "*" for all but
	// those about webhooks. At most 100.
	EventTypes []string `json:"event_types"`
	// Description has at most 200 bytes.
	Description *string `json:"description"`
	// Headers are sent along; see [webhook.CheckHeaders]. In an update they take the
	// place of all before, but a value of *** stays what it was.
	Headers map[string]string `json:"headers"`
	// MaxConcurrent is from 1 to 100, RatePerSecond from 1 to 1000.
	MaxConcurrent *int `json:"max_concurrent"`
	RatePerSecond *int `json:"rate_per_second"`
}

// NewWebhook is a subscription that is to be made.
type NewWebhook struct {
	WebhookSettings

	// Secret is one that the customer brings; empty for a new one.
	Secret string `json:"secret"`
	// Disabled makes it so: its events are held until it is enabled and recovered.
	Disabled bool `json:"disabled"`
}

// Scope is whose webhooks somebody may touch, and who it is. No organization
// means all of them.
type Scope struct {
	Organization *uuid.UUID
	Actor        string
}

// maxWebhooks is how many subscriptions an organization may have.
const maxWebhooks = 100

var typePatternRE = regexp.MustCompile(`^(\*|[a-z][a-z0-9_]*\.(\*|[a-z][a-z0-9_]*))$`)

// apply checks settings and puts them into a subscription.
func (w *Webhooks) apply(ctx context.Context, s *db.WebhookSubscription, settings WebhookSettings) error {
	var mistakes []error
	if settings.URL != nil {
		s.Url = *settings.URL
		if err := w.Sender.Guard.CheckURL(ctx, s.Url); err != nil {
			mistakes = append(mistakes, fmt.Errorf("url: %w", err))
		}
	}
	if settings.EventTypes != nil {
		s.EventTypes = settings.EventTypes
		if len(s.EventTypes) == 0 || len(s.EventTypes) > 100 {
			mistakes = append(mistakes, errors.New("event_types: there must be 1 to 100"))
		}
		for _, pattern := range s.EventTypes {
			if len(pattern) > 100 || !typePatternRE.MatchString(pattern) {
				mistakes = append(mistakes, fmt.Errorf("event_types: %.100q is not a type such as lead.created, lead.* or *", pattern))
			}
		}
	}
	if settings.Description != nil {
		s.Description = *settings.Description
		if len(s.Description) > 200 || !validText(s.Description) {
			mistakes = append(mistakes, errors.New("description: it has more than 200 bytes or is no text"))
		}
	}
	for _, limit := range []struct {
		name    string
		value   *int
		field   *int32
		highest int
	}{
		{"max_concurrent", settings.MaxConcurrent, &s.MaxConcurrent, 100},
		{"rate_per_second", settings.RatePerSecond, &s.RatePerSecond, 1000},
	} {
		if limit.value == nil {
			continue
		}
		if *limit.value < 1 || *limit.value > limit.highest {
			mistakes = append(mistakes, fmt.Errorf("%s: %d is not from 1 to %d", limit.name, *limit.value, limit.highest))
			continue
		}
		*limit.field = int32(*limit.value)
	}
	if settings.Headers != nil {
		if err := w.applyHeaders(s, settings.Headers); err != nil {
			mistakes = append(mistakes, fmt.Errorf("headers: %w", err))
		}
	}
	if len(mistakes) > 0 {
		return fmt.Errorf("%w: %w", ErrInvalid, errors.Join(mistakes...))
	}
	return nil
}

func (w *Webhooks) applyHeaders(s *db.WebhookSubscription, headers map[string]string) error {
	before, err := w.openHeaders(*s)
	if err != nil {
		before = nil // and a masked value is then refused
	}
	headers = maps.Clone(headers)
	for name, value := range headers {
		if value != masked {
			continue
		}
		kept, ok := before[name]
		if !ok {
			return fmt.Errorf("header %.50q has no value to keep", name)
		}
		headers[name] = kept
	}
	if err := webhook.CheckHeaders(headers); err != nil {
		return err
	}
	s.SealedHeaders, s.HeadersKey, err = w.sealHeaders(s.ID, headers)
	return err
}

// Create makes a subscription and returns it with its secret, which is told this
// once.
func (w *Webhooks) Create(ctx context.Context, scope Scope, organization uuid.UUID, settings NewWebhook) (Webhook, string, error) {
	if scope.Organization != nil && *scope.Organization != organization {
		return Webhook{}, "", ErrNotFound
	}
	secret := settings.Secret
	if secret == "" {
		secret = webhook.NewSecret()
	} else if err := webhook.CheckSecret(secret); err != nil {
		return Webhook{}, "", fmt.Errorf("%w: secret: %w", ErrInvalid, err)
	}
	if settings.URL == nil || settings.EventTypes == nil {
		return Webhook{}, "", fmt.Errorf("%w: url and event_types are required", ErrInvalid)
	}
	s := db.WebhookSubscription{
		ID: uuid.New(), OrganizationID: organization, Enabled: !settings.Disabled, MaxConcurrent: 4, RatePerSecond: 10,
	}
	if err := w.apply(ctx, &s, settings.WebhookSettings); err != nil {
		return Webhook{}, "", err
	}
	err := pgx.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		queries := db.New(tx)
		count, err := queries.CountSubscriptions(ctx, organization)
		if errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("%w: no such organization", ErrNotFound)
		} else if err != nil {
			return fmt.Errorf("count webhooks: %w", err)
		}
		if count >= maxWebhooks {
			return fmt.Errorf("%w: the organization has %d already", ErrInvalid, count)
		}
		err = queries.InsertSubscription(ctx, db.InsertSubscriptionParams{
			ID: s.ID, OrganizationID: s.OrganizationID, Url: s.Url, EventTypes: s.EventTypes, Enabled: s.Enabled,
			Description: s.Description, SealedHeaders: s.SealedHeaders, HeadersKey: s.HeadersKey,
			MaxConcurrent: s.MaxConcurrent, RatePerSecond: s.RatePerSecond,
		})
		if err != nil {
			return fmt.Errorf("insert webhook: %w", err)
		}
		if err := w.insertSecret(ctx, queries, s.ID, secret); err != nil {
			return err
		}
		if s, err = queries.LockSubscription(ctx, s.ID, nil); err != nil {
			return fmt.Errorf("read webhook: %w", err)
		}
		return w.audit(ctx, queries, s, scope.Actor, "webhook.created", "")
	})
	if err != nil {
		return Webhook{}, "", err
	}
	return w.view(s), secret, nil
}

// List returns the webhooks in the scope, oldest first.
func (w *Webhooks) List(ctx context.Context, scope Scope) ([]Webhook, error) {
	rows, err := db.New(w.Pool).ListSubscriptions(ctx, scope.Organization)
	if err != nil {
		return nil, fmt.Errorf("list webhooks: %w", err)
	}
	views := make([]Webhook, len(rows))
	for i, row := range rows {
		views[i] = w.view(row)
	}
	return views, nil
}

// change calls f with a subscription of the scope, locked, and returns it as it is
// afterwards. An action that is not empty is recorded in audit_log.
func (w *Webhooks) change(
	ctx context.Context, scope Scope, id uuid.UUID, action string, f func(tx pgx.Tx, s *db.WebhookSubscription) error,
) (view Webhook, err error) {
	err = pgx.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		queries := db.New(tx)
		s, err := queries.LockSubscription(ctx, id, scope.Organization)
		if errors.Is(err, pgx.ErrNoRows) {
			return ErrNotFound
		} else if err != nil {
			return fmt.Errorf("lock webhook: %w", err)
		}
		if err := f(tx, &s); err != nil {
			return err
		}
		if action != "" {
			if err := w.audit(ctx, queries, s, scope.Actor, action, ""); err != nil {
				return err
			}
		}
		if s, err = queries.LockSubscription(ctx, id, nil); errors.Is(err, pgx.ErrNoRows) {
			return nil // f deleted it
		} else if err != nil {
			return fmt.Errorf("read webhook: %w", err)
		}
		view = w.view(s)
		return nil
	})
	return view, err
}

func (w *Webhooks) audit(ctx context.Context, queries *db.Queries, s db.WebhookSubscription, actor, action, reason string) error {
	params := db.InsertAuditParams{
		OrganizationID: &s.OrganizationID, ActorID: &actor, Action: action,
		EntityKind: new("webhook_subscription"), EntityID: &s.ID, Metadata: json.RawMessage(`{}`),
	}
	if reason != "" {
		params.Reason = &reason
	}
	if err := queries.InsertAudit(ctx, params); err != nil {
		return fmt.Errorf("record %s: %w", action, err)
	}
	return nil
}

// Get returns one webhook.
func (w *Webhooks) Get(ctx context.Context, scope Scope, id uuid.UUID) (Webhook, error) {
	return w.change(ctx, scope, id, "", func(pgx.Tx, *db.WebhookSubscription) error { return nil })
}

// Update changes settings. The next attempt at any delivery uses them.
func (w *Webhooks) Update(ctx context.Context, scope Scope, id uuid.UUID, settings WebhookSettings) (Webhook, error) {
	return w.change(ctx, scope, id, "webhook.updated", func(tx pgx.Tx, s *db.WebhookSubscription) error {
		if err := w.apply(ctx, s, settings); err != nil {
			return err
		}
		return db.New(tx).UpdateSubscription(ctx, db.UpdateSubscriptionParams{
			ID: id, Url: s.Url, EventTypes: s.EventTypes, Description: s.Description, SealedHeaders: s.SealedHeaders,
			HeadersKey: s.HeadersKey, MaxConcurrent: s.MaxConcurrent, RatePerSecond: s.RatePerSecond,
		})
	})
}

// Enable lets deliveries go again, the first ones one at a time. What was held
// stays so until it is recovered.
func (w *Webhooks) Enable(ctx context.Context, scope Scope, id uuid.UUID) (Webhook, error) {
	return w.change(ctx, scope, id, "webhook.enabled", func(tx pgx.Tx, _ *db.WebhookSubscription) error {
		return db.New(tx).EnableSubscription(ctx, id)
	})
}

// Disable holds the deliveries that wait, and those of events to come.
func (w *Webhooks) Disable(ctx context.Context, scope Scope, id uuid.UUID) (Webhook, error) {
	return w.change(ctx, scope, id, "webhook.disabled", func(tx pgx.Tx, _ *db.WebhookSubscription) error {
		if _, err := db.New(tx).DisableSubscription(ctx, new("by_user"), id); err != nil {
			return fmt.Errorf("disable: %w", err)
		}
		if _, err := db.New(tx).HoldDeliveries(ctx, id); err != nil {
			return fmt.Errorf("hold deliveries: %w", err)
		}
		return nil
	})
}

// Delete deletes a webhook. Deliveries that are not over are cancelled.
func (w *Webhooks) Delete(ctx context.Context, scope Scope, id uuid.UUID) error {
	_, err := w.change(ctx, scope, id, "webhook.deleted", func(tx pgx.Tx, _ *db.WebhookSubscription) error {
		return db.New(tx).DeleteSubscription(ctx, id)
	})
	return err
}

// MaxGrace is the longest that an old secret goes on signing after a rotation.
const MaxGrace = 7 * 24 * time.Hour

// Rotate adds a secret, new or the one that is given, and returns it. Until grace
// is over, webhook-signature has a signature of each; the headers that hold one
// stay with the old secret until [Webhooks.Promote] or the end of grace. A grace of
// 0 ends the old secrets at once.
func (w *Webhooks) Rotate(ctx context.Context, scope Scope, id uuid.UUID, grace time.Duration, secret string) (string, error) {
	if grace < 0 || grace > MaxGrace {
		return "", fmt.Errorf("%w: grace %s is not from 0 to %s", ErrInvalid, grace, MaxGrace)
	}
	if secret == "" {
		secret = webhook.NewSecret()
	} else if err := webhook.CheckSecret(secret); err != nil {
		return "", fmt.Errorf("%w: secret: %w", ErrInvalid, err)
	}
	_, err := w.change(ctx, scope, id, "webhook.secret_rotated", func(tx pgx.Tx, s *db.WebhookSubscription) error {
		queries := db.New(tx)
		if s.Secret != nil {
			if err := w.sealPlain(ctx, queries, *s); err != nil {
				return err
			}
		}
		if grace == 0 {
			if err := queries.DeleteSecrets(ctx, id); err != nil {
				return fmt.Errorf("delete secrets: %w", err)
			}
		} else if err := queries.ExpireSecrets(ctx, grace, id); err != nil {
			return fmt.Errorf("expire secrets: %w", err)
		}
		return w.insertSecret(ctx, queries, id, secret)
	})
	if err != nil {
		return "", err
	}
	return secret, nil
}

// Promote lets the newest secret sign all headers.
func (w *Webhooks) Promote(ctx context.Context, scope Scope, id uuid.UUID) (Webhook, error) {
	return w.change(ctx, scope, id, "webhook.secret_promoted", func(tx pgx.Tx, _ *db.WebhookSubscription) error {
		queries := db.New(tx)
		rows, err := queries.ListSecrets(ctx, id)
		if err != nil {
			return fmt.Errorf("list secrets: %w", err)
		}
		if len(rows) == 0 {
			return fmt.Errorf("%w: it has no secret", ErrInvalid)
		}
		if err := queries.ClearLegacySecret(ctx, id); err != nil {
			return fmt.Errorf("promote secret: %w", err)
		}
		return queries.SetLegacySecret(ctx, rows[0].ID)
	})
}

// TestResult is what came of a test.
type TestResult struct {
	OK         bool   `json:"ok"`
	Class      string `json:"class"`
	StatusCode int    `json:"status_code"`
	DurationMS int64  `json:"duration_ms"`
	Error      string `json:"error"`
}

// Test sends a signed event of type webhook.test and returns what came of it. It
// is no delivery: nothing is tried again and nothing counts.
func (w *Webhooks) Test(ctx context.Context, scope Scope, id uuid.UUID) (TestResult, error) {
	var request webhook.Request
	_, err := w.change(ctx, scope, id, "webhook.tested", func(tx pgx.Tx, s *db.WebhookSubscription) error {
		signing, err := w.signing(ctx, tx, *s)
		if errors.Is(err, errSecret) {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		} else if err != nil {
			return err
		}
		event, now := uuid.New(), time.Now()
		request = webhook.Request{
			URL: s.Url, EventID: event.String(), EventType: "webhook.test", DeliveryID: uuid.NewString(), Attempt: 1,
			Secrets: signing.secrets, Legacy: signing.legacy, Headers: signing.headers, At: now,
		}
		request.Body, err = encodeBody(event, request.EventType, now.UTC(), json.RawMessage(`{"test":true}`), false)
		return err
	})
	if err != nil {
		return TestResult{}, err
	}
	answer, sendErr := w.Sender.Send(ctx, request)
	result := TestResult{
		OK: sendErr == nil, Class: webhook.Classify(ctx, sendErr).Class, StatusCode: answer.Status, DurationMS: answer.Duration.Milliseconds(),
	}
	if sendErr != nil {
		result.Error = sendErr.Error()
	}
	return result, nil
}

// validText tells whether PostgreSQL stores a text as it is.
func validText(text string) bool {
	return !slices.Contains([]byte(text), 0) && utf8.ValidString(text)
}
