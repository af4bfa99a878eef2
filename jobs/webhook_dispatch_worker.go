package jobs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"afluente/db"
	"afluente/eventlog"
	"afluente/eventlog/event"
)

// maxWebhookData is the largest payload that is sent along, in bytes. Above
// it receivers get the event without data, marked as truncated.
const maxWebhookData = 256 << 10

// WebhookDispatchArgs asks for the deliveries of one event.
type WebhookDispatchArgs struct {
	EventID uuid.UUID `json:"event_id"`
}

func (WebhookDispatchArgs) Kind() string { return "webhook-dispatch-worker" }

func (WebhookDispatchArgs) InsertOpts() river.InsertOpts { return river.InsertOpts{Queue: "webhooks"} }

func webhookDispatch(d Deps) eventlog.Declaration {
	return eventlog.On(func(e eventlog.Event[event.Any]) WebhookDispatchArgs {
		return WebhookDispatchArgs{EventID: e.ID}
	}, &webhookDispatchWorker{events: d.Events, webhooks: d.Webhooks})
}

// webhookDispatchWorker makes a delivery of an event for every subscription of its
// organization that wants it, each with a job of its own, and freezes what they
// send. It is one transaction, which changes nothing the second time.
//
// Subscriptions that are disabled get a delivery that is held, so that it can be
// recovered.
type webhookDispatchWorker struct {
	river.WorkerDefaults[WebhookDispatchArgs]

	events   *eventlog.Events
	webhooks *Webhooks
}

func (w *webhookDispatchWorker) Timeout(*river.Job[WebhookDispatchArgs]) time.Duration {
	return 30 * time.Second
}

func (w *webhookDispatchWorker) Work(ctx context.Context, job *river.Job[WebhookDispatchArgs]) error {
	e, err := w.events.Load(ctx, job.JobRow)
	if errors.Is(err, eventlog.ErrNoEvent) {
		return river.JobCancel(err)
	} else if err != nil {
		return err
	}
	if e.Type == (event.WebhookDeliveryFailed{}).EventType() {
		return nil // for us alone, or one dead endpoint would feed another
	}
	subscriptions, err := db.New(w.webhooks.Pool).ListWantingSubscriptions(ctx, e.OrganizationID, e.Type)
	if err != nil {
		return fmt.Errorf("list subscriptions of event %s: %w", e.ID, err)
	}
	if len(subscriptions) == 0 {
		return nil
	}
	err = pgx.BeginFunc(ctx, w.webhooks.Pool, func(tx pgx.Tx) error { return w.webhooks.deliver(ctx, tx, e, subscriptions) })
	if err != nil {
		return fmt.Errorf("make deliveries of event %s: %w", e.ID, err)
	}
	return nil
}

// ownEvent tells whether an event is about webhooks.
func ownEvent(eventType string) bool { return strings.HasPrefix(eventType, "webhook.") }

// deliver makes the deliveries of an event to subscriptions, where there are none.
func (w *Webhooks) deliver(ctx context.Context, tx pgx.Tx, e eventlog.Loaded, subscriptions []uuid.UUID) error {
	queries := db.New(tx)
	body, err := webhookBody(e)
	if err != nil {
		return err
	}
	if err := queries.FreezeBody(ctx, e.ID, e.OrganizationID, body); err != nil {
		return fmt.Errorf("freeze body: %w", err)
	}
	err = queries.InsertDeliveries(ctx, db.InsertDeliveriesParams{
		EventID:         e.ID,
		EventType:       e.Type,
		EventCreatedAt:  e.CreatedAt,
		MaxAttempts:     webhookAttempts,
		SubscriptionIds: subscriptions,
	})
	if err != nil {
		return fmt.Errorf("insert deliveries: %w", err)
	}
	waiting, err := queries.ListDeliveriesWithoutJob(ctx, e.ID)
	if err != nil {
		return fmt.Errorf("list deliveries: %w", err)
	}
	deliveries := make([]undelivered, len(waiting))
	for i, row := range waiting {
		deliveries[i] = undelivered{id: row.ID, subscription: row.SubscriptionID, organization: e.OrganizationID, eventType: e.Type}
	}
	return w.enqueue(ctx, tx, deliveries)
}

// webhookBody is the event as receivers see it: the payload's numbers and texts
// as the database prints them, so that no number loses a digit.
func webhookBody(e eventlog.Loaded) ([]byte, error) {
	data, truncated := e.Payload, false
	if len(data) > maxWebhookData {
		data, truncated = nil, true
	}
	return encodeBody(e.ID, e.Type, e.CreatedAt, data, truncated)
}

func encodeBody(id uuid.UUID, eventType string, at time.Time, data json.RawMessage, truncated bool) ([]byte, error) {
	var body bytes.Buffer
	encoder := json.NewEncoder(&body)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(struct {
		ID        uuid.UUID       `json:"id"`
		Type      string          `json:"type"`
		Timestamp time.Time       `json:"timestamp"`
		Data      json.RawMessage `json:"data,omitempty"`
		Truncated bool            `json:"truncated,omitempty"`
	}{id, eventType, at, data, truncated})
	if err != nil {
		return nil, fmt.Errorf("encode event %s: %w", id, err)
	}
	return bytes.TrimRight(body.Bytes(), "\n"), nil
}
