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
	metadata, err := eventlog.CorrelationMetadata(ctx)
	if err != nil {
		return fmt.Errorf("correlate event %s: %w", e.ID, err)
	}
	if _, err = w.webhooks.dispatches.Do(ctx, struct{}{}, dispatch{e, metadata}, w.webhooks.dispatchAll); err != nil {
		return fmt.Errorf("make deliveries of event %s: %w", e.ID, err)
	}
	return nil
}

// dispatchTimeout bounds the transaction that several dispatches share.
const dispatchTimeout = 20 * time.Second

// dispatch is an event of which deliveries are to be made, and the metadata of their
// jobs, nil for what belongs to the context.
type dispatch struct {
	event    eventlog.Loaded
	metadata json.RawMessage
}

// dispatchAll makes the deliveries of events, in one transaction.
func (w *Webhooks) dispatchAll(ctx context.Context, dispatches []dispatch) ([]struct{}, error) {
	ctx, cancel := context.WithTimeout(ctx, dispatchTimeout)
	defer cancel()
	done := make([]struct{}, len(dispatches))
	var events, organizations []uuid.UUID
	var types []string
	for _, d := range dispatches {
		events = append(events, d.event.ID)
		organizations = append(organizations, d.event.OrganizationID)
		types = append(types, d.event.Type)
	}
	wanting, err := db.New(w.Pool).ListWantingSubscriptions(ctx, events, organizations, types)
	if err != nil {
		return nil, fmt.Errorf("list subscriptions: %w", err)
	}
	if len(wanting) == 0 {
		return done, nil
	}
	subscriptions := make(map[uuid.UUID][]uuid.UUID) // by the event
	for _, row := range wanting {
		subscriptions[row.EventID] = append(subscriptions[row.EventID], row.SubscriptionID)
	}
	return done, pgx.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error { return w.deliver(ctx, tx, dispatches, subscriptions) })
}

// ownEvent tells whether an event is about webhooks.
func ownEvent(eventType string) bool { return strings.HasPrefix(eventType, "webhook.") }

// deliver makes the deliveries of events to subscriptions, where there are none.
func (w *Webhooks) deliver(ctx context.Context, tx pgx.Tx, dispatches []dispatch, subscriptions map[uuid.UUID][]uuid.UUID) error {
	var events, organizations []uuid.UUID
	var bodies [][]byte
	deliveries := db.InsertDeliveriesParams{MaxAttempts: webhookAttempts}
	byEvent := make(map[uuid.UUID]dispatch, len(dispatches))
	for _, d := range dispatches {
		e := d.event
		if _, twice := byEvent[e.ID]; twice || len(subscriptions[e.ID]) == 0 {
			continue
		}
		byEvent[e.ID] = d
		body, err := webhookBody(e)
		if err != nil {
			return err
		}
		events, organizations, bodies = append(events, e.ID), append(organizations, e.OrganizationID), append(bodies, body)
		for _, subscription := range subscriptions[e.ID] {
			deliveries.EventIds = append(deliveries.EventIds, e.ID)
			deliveries.SubscriptionIds = append(deliveries.SubscriptionIds, subscription)
			deliveries.EventTypes = append(deliveries.EventTypes, e.Type)
			deliveries.EventCreatedAts = append(deliveries.EventCreatedAts, e.CreatedAt)
		}
	}
	queries := db.New(tx)
	if err := queries.FreezeBodies(ctx, events, organizations, bodies); err != nil {
		return fmt.Errorf("freeze bodies: %w", err)
	}
	rows, err := queries.InsertDeliveries(ctx, deliveries)
	if err != nil {
		return fmt.Errorf("insert deliveries: %w", err)
	}
	waiting := make([]undelivered, len(rows))
	for i, row := range rows {
		d := byEvent[row.EventID]
		waiting[i] = undelivered{
			id: row.ID, subscription: row.SubscriptionID, organization: d.event.OrganizationID, eventType: d.event.Type, metadata: d.metadata,
		}
	}
	return w.enqueue(ctx, tx, waiting)
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
