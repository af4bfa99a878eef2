package jobs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"golang.org/x/sync/errgroup"

	"afluente/db"
	"afluente/eventlog"
	"afluente/eventlog/event"
	"afluente/jobs/webhook"
)

const (
	// deliveryTimeout bounds one delivery, from the dial to the end of the answer.
	deliveryTimeout = 10 * time.Second
	// maxParallelDeliveries bounds the deliveries of one event under way.
	maxParallelDeliveries = 10
	// maxWebhookData is the largest payload that is sent along, in bytes. Above
	// it receivers get the event without data, marked as truncated.
	maxWebhookData = 256 << 10
)

// WebhookDispatchArgs asks for one event to be delivered to every subscription
// of its organization that wants it.
type WebhookDispatchArgs struct {
	EventID uuid.UUID `json:"event_id"`
}

func (WebhookDispatchArgs) Kind() string { return "webhook-dispatch-worker" }

func (WebhookDispatchArgs) InsertOpts() river.InsertOpts { return river.InsertOpts{Queue: "webhooks"} }

func webhookDispatch(d Deps) eventlog.Declaration {
	return eventlog.On(func(e eventlog.Event[event.Any]) WebhookDispatchArgs {
		return WebhookDispatchArgs{EventID: e.ID}
	}, &webhookDispatchWorker{pool: d.Pool, events: d.Events, sender: d.Webhook})
}

// webhookDispatchWorker posts an event to the webhooks of its organization.
// Each delivery that succeeds is committed by itself, so a retry goes only to
// those who do not have the event yet. A receiver may see an event twice when
// the process dies between its answer and the commit; it drops the second by
// X-Deskcomm-Idempotency-Key, which is the event's id.
type webhookDispatchWorker struct {
	river.WorkerDefaults[WebhookDispatchArgs]

	pool   *pgxpool.Pool
	events *eventlog.Events
	sender *webhook.Sender
}

func (w *webhookDispatchWorker) Timeout(*river.Job[WebhookDispatchArgs]) time.Duration {
	return 45 * time.Second
}

func (w *webhookDispatchWorker) Work(ctx context.Context, job *river.Job[WebhookDispatchArgs]) error {
	e, err := w.events.Load(ctx, job.JobRow)
	if errors.Is(err, eventlog.ErrNoEvent) {
		return river.JobCancel(err)
	} else if err != nil {
		return err
	}
	subscriptions, err := db.New(w.pool).ListUndeliveredSubscriptions(ctx, e.OrganizationID, e.Type, e.ID)
	if err != nil {
		return fmt.Errorf("list subscriptions of event %s: %w", e.ID, err)
	}
	if len(subscriptions) == 0 {
		return nil
	}
	body, err := webhookBody(e)
	if err != nil {
		return river.JobCancel(err)
	}

	errs := make([]error, len(subscriptions))
	var deliveries errgroup.Group
	deliveries.SetLimit(maxParallelDeliveries)
	for i, subscription := range subscriptions {
		deliveries.Go(func() error {
			errs[i] = w.deliver(ctx, e, body, subscription)
			return nil // one that fails does not stop the others
		})
	}
	_ = deliveries.Wait()
	return errors.Join(errs...)
}

// deliver posts the event to one subscription and records the outcome.
func (w *webhookDispatchWorker) deliver(
	ctx context.Context, e eventlog.Loaded, body []byte, subscription db.ListUndeliveredSubscriptionsRow,
) error {
	queries := db.New(w.pool)
	delivery, err := queries.BeginDelivery(ctx, e.ID, subscription.ID)
	if err != nil {
		return fmt.Errorf("begin delivery to subscription %s: %w", subscription.ID, err)
	}
	sendCtx, cancel := context.WithTimeout(ctx, deliveryTimeout)
	defer cancel()
	sendErr := w.sender.Send(sendCtx, webhook.Request{
		URL:        subscription.Url,
		EventID:    e.ID.String(),
		EventType:  e.Type,
		DeliveryID: delivery.ID.String(),
		Attempt:    int(delivery.Attempts),
		Secret:     subscription.Secret,
		Body:       body,
		At:         time.Now(),
	})
	var lastError *string
	if sendErr != nil {
		text := sendErr.Error()
		lastError = &text
	}
	if err := queries.FinishDelivery(context.WithoutCancel(ctx), lastError, delivery.ID); err != nil {
		err = fmt.Errorf("record delivery %s: %w", delivery.ID, err)
		return errors.Join(sendErr, err)
	}
	return sendErr
}

// webhookBody is the event as receivers see it: the payload's numbers and texts
// as the database prints them, so that no number loses a digit.
func webhookBody(e eventlog.Loaded) ([]byte, error) {
	data, truncated := e.Payload, false
	if len(data) > maxWebhookData {
		data, truncated = nil, true
	}
	var body bytes.Buffer
	encoder := json.NewEncoder(&body)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(struct {
		ID        uuid.UUID       `json:"id"`
		Type      string          `json:"type"`
		Timestamp time.Time       `json:"timestamp"`
		Data      json.RawMessage `json:"data,omitempty"`
		Truncated bool            `json:"truncated,omitempty"`
	}{e.ID, e.Type, e.CreatedAt, data, truncated})
	if err != nil {
		return nil, fmt.Errorf("encode event %s: %w", e.ID, err)
	}
	return bytes.TrimRight(body.Bytes(), "\n"), nil
}
