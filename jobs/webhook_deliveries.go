package jobs

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"afluente/db"
	"afluente/eventlog"
)

// What made a delivery begin, and begin anew.
const (
	triggerManual  = "manual"
	triggerRecover = "recover"
)

const (
	// maxRestarted is how many deliveries [Webhooks.Recover] moves at a time.
	maxRestarted = 10_000

	// missingBatch is how many events [Webhooks.ReplayMissing] takes in one
	// transaction.
	missingBatch = 100

	// MaxDeliveries is how many deliveries [Webhooks.Deliveries] returns at most.
	MaxDeliveries = 1000

	// maxResendKey is in bytes.
	maxResendKey = 255
)

// Delivery is an event on its way to a webhook.
type Delivery struct {
	ID        uuid.UUID `json:"id"`
	EventID   uuid.UUID `json:"event_id"`
	EventType string    `json:"event_type"`
	// State is pending or sending; succeeded, dead or cancelled when it is over; held
	// while its webhook was disabled, until it is recovered.
	State string `json:"state"`
	// Trigger is auto, manual after a re-send, recover after a recovery.
	Trigger  string `json:"trigger"`
	Attempts int    `json:"attempts"`
	// NextAttemptAt is nil unless it is pending.
	NextAttemptAt *time.Time `json:"next_attempt_at"`
	// ErrorClass, StatusCode and LastError are of the last attempt; nil if that was
	// good or there was none.
	ErrorClass  *string    `json:"error_class"`
	StatusCode  *int32     `json:"status_code"`
	LastError   *string    `json:"last_error"`
	CreatedAt   time.Time  `json:"created_at"`
	DeliveredAt *time.Time `json:"delivered_at"`
}

func deliveryView(d db.WebhookDelivery) Delivery {
	view := Delivery{
		ID:         d.ID,
		EventID:    d.EventID,
		EventType:  d.EventType,
		State:      d.State,
		Trigger:    d.Trigger,
		Attempts:   int(d.Attempts),
		ErrorClass: d.ErrorClass,
		StatusCode: d.StatusCode,
		LastError:  d.LastError,
		CreatedAt:  d.CreatedAt.UTC(),
	}
	if d.State == "pending" {
		view.NextAttemptAt = new(d.NextAttemptAt.UTC())
	}
	if d.DeliveredAt != nil {
		view.DeliveredAt = new(d.DeliveredAt.UTC())
	}
	return view
}

// DeliveryAttempt is one POST of a delivery.
type DeliveryAttempt struct {
	Number    int       `json:"number"`
	Trigger   string    `json:"trigger"`
	StartedAt time.Time `json:"started_at"`
	// DurationMS is of the exchange alone.
	DurationMS *int32 `json:"duration_ms"`
	// Class is success, what went wrong, or started for one that was cut off, whose
	// outcome is unknown.
	Class      string  `json:"class"`
	StatusCode *int32  `json:"status_code"`
	Error      *string `json:"error"`
	// Remote is the address that was connected to, with its port.
	Remote *string `json:"remote"`
	// Answer is the beginning of what the receiver said, at most 8 KiB.
	Answer *string `json:"answer"`
}

// DeliveryFilter chooses deliveries. What is zero matches all.
type DeliveryFilter struct {
	State string
	// After is the last delivery of the page before.
	After uuid.UUID
	// Limit is from 1 to [MaxDeliveries].
	Limit int
}

// DeliveryStates are the states that a delivery can be in.
func DeliveryStates() []string {
	return []string{"pending", "sending", "succeeded", "dead", "held", "cancelled"}
}

// Deliveries returns deliveries to a webhook, the newest first.
func (w *Webhooks) Deliveries(ctx context.Context, scope Scope, id uuid.UUID, filter DeliveryFilter) ([]Delivery, error) {
	if filter.State != "" && !slices.Contains(DeliveryStates(), filter.State) {
		return nil, fmt.Errorf("%w: the states are %s", ErrInvalid, strings.Join(DeliveryStates(), ", "))
	}
	if filter.Limit < 1 || filter.Limit > MaxDeliveries {
		return nil, fmt.Errorf("%w: limit %d is not from 1 to %d", ErrInvalid, filter.Limit, MaxDeliveries)
	}
	if _, err := w.Get(ctx, scope, id); err != nil {
		return nil, err
	}
	params := db.ListDeliveriesParams{SubscriptionID: id, MaxRows: int32(filter.Limit)}
	if filter.State != "" {
		params.State = &filter.State
	}
	if filter.After != uuid.Nil {
		params.After = &filter.After
	}
	rows, err := db.New(w.Pool).ListDeliveries(ctx, params)
	if err != nil {
		return nil, fmt.Errorf("list deliveries: %w", err)
	}
	views := make([]Delivery, len(rows))
	for i, row := range rows {
		views[i] = deliveryView(row)
	}
	return views, nil
}

// Delivery returns one delivery to a webhook and its attempts, the oldest first.
func (w *Webhooks) Delivery(ctx context.Context, scope Scope, id, delivery uuid.UUID) (view Delivery, attempts []DeliveryAttempt, err error) {
	_, err = w.change(ctx, scope, id, "", func(tx pgx.Tx, _ *db.WebhookSubscription) error {
		d, err := getDelivery(ctx, db.New(tx), id, delivery)
		if err != nil {
			return err
		}
		view = deliveryView(d)
		rows, err := db.New(tx).ListAttempts(ctx, delivery)
		if err != nil {
			return fmt.Errorf("list attempts: %w", err)
		}
		attempts = make([]DeliveryAttempt, len(rows))
		for i, row := range rows {
			attempts[i] = DeliveryAttempt{
				Number: int(row.Number), Trigger: row.Trigger, StartedAt: row.StartedAt.UTC(), DurationMS: row.DurationMs,
				Class: row.Class, StatusCode: row.StatusCode, Error: row.Error, Remote: row.Remote, Answer: row.Answer,
			}
		}
		return nil
	})
	return view, attempts, err
}

// WebhookOf returns whose delivery it is, in any organization.
func (w *Webhooks) WebhookOf(ctx context.Context, delivery uuid.UUID) (uuid.UUID, error) {
	id, err := db.New(w.Pool).GetSubscriptionOfDelivery(ctx, delivery)
	if errors.Is(err, pgx.ErrNoRows) {
		return uuid.Nil, fmt.Errorf("%w: no such delivery", ErrNotFound)
	} else if err != nil {
		return uuid.Nil, fmt.Errorf("get delivery: %w", err)
	}
	return id, nil
}

func getDelivery(ctx context.Context, queries *db.Queries, subscription, id uuid.UUID) (db.WebhookDelivery, error) {
	d, err := queries.GetDelivery(ctx, id, subscription)
	if errors.Is(err, pgx.ErrNoRows) {
		return d, fmt.Errorf("%w: no such delivery", ErrNotFound)
	} else if err != nil {
		return d, fmt.Errorf("get delivery: %w", err)
	}
	return d, nil
}

// Resend sends a delivery that is over once more, past the breaker and the rate,
// with all attempts anew should it fail. It returns [ErrUnderWay] for one that is not
// over, and does nothing where the last call for the delivery had the same key,
// which may be empty for none.
func (w *Webhooks) Resend(ctx context.Context, scope Scope, id, delivery uuid.UUID, key string) (view Delivery, err error) {
	if len(key) > maxResendKey || !validText(key) {
		return Delivery{}, fmt.Errorf("%w: the idempotency key has more than %d bytes or is no text", ErrInvalid, maxResendKey)
	}
	_, err = w.change(ctx, scope, id, "webhook.resent", func(tx pgx.Tx, s *db.WebhookSubscription) error {
		queries := db.New(tx)
		d, err := getDelivery(ctx, queries, id, delivery)
		if err != nil {
			return err
		}
		view = deliveryView(d)
		switch {
		case key != "" && d.ResendKey != nil && *d.ResendKey == key:
			return nil
		case d.State == "pending" || d.State == "sending":
			return ErrUnderWay
		case !s.Enabled:
			return ErrDisabled
		}
		if err := w.restart(ctx, tx, []db.WebhookDelivery{d}, triggerManual, key); err != nil {
			return err
		}
		if d, err = getDelivery(ctx, queries, id, delivery); err != nil {
			return err
		}
		view = deliveryView(d)
		return nil
	})
	return view, err
}

// restart gives deliveries that are over all attempts anew, and a job: their own,
// if that is a dead letter, or a new one.
func (w *Webhooks) restart(ctx context.Context, tx pgx.Tx, deliveries []db.WebhookDelivery, trigger, key string) error {
	if len(deliveries) == 0 {
		return nil
	}
	queries := db.New(tx)
	params := db.ResetDeliveriesParams{Trigger: trigger, MoreAttempts: webhookAttempts}
	if key != "" {
		params.ResendKey = &key
	}
	var dead []int64
	for _, d := range deliveries {
		params.Ids = append(params.Ids, d.ID)
		if d.State == "dead" && d.JobID != nil {
			dead = append(dead, *d.JobID)
		}
	}
	if err := queries.ResetDeliveries(ctx, params); err != nil {
		return fmt.Errorf("begin deliveries anew: %w", err)
	}
	retried, err := queries.RetryDeadJobs(ctx, dead)
	if err != nil {
		return fmt.Errorf("retry jobs: %w", err)
	}
	has := make(map[int64]bool, len(retried))
	for _, job := range retried {
		has[job.ID] = true
	}
	var without []undelivered
	for _, d := range deliveries {
		if d.JobID == nil || !has[*d.JobID] {
			without = append(without, undelivered{id: d.ID, subscription: d.SubscriptionID, organization: d.OrganizationID, eventType: d.EventType})
		}
	}
	if err := w.enqueue(ctx, tx, without); err != nil {
		return err
	}
	return wakeDeliveries(ctx, queries) // for those that were retried
}

// Recover sends what was given up or held, of deliveries made since a time, with
// all attempts anew, and returns how many those are: at most 10,000, the oldest
// events first, after which it is called again.
func (w *Webhooks) Recover(ctx context.Context, scope Scope, id uuid.UUID, since time.Time) (recovered int, err error) {
	_, err = w.change(ctx, scope, id, "webhook.recovered", func(tx pgx.Tx, s *db.WebhookSubscription) error {
		if !s.Enabled {
			return ErrDisabled
		}
		rows, err := db.New(tx).ListRecoverable(ctx, id, since, maxRestarted)
		if err != nil {
			return fmt.Errorf("list deliveries: %w", err)
		}
		recovered = len(rows)
		return w.restart(ctx, tx, rows, triggerRecover, "")
	})
	if err != nil {
		return 0, err
	}
	return recovered, nil
}

// ReplayMissing makes deliveries of the events since a time, at most 30 days ago,
// that the webhook wants and has none of, such as those from before it was made, and
// returns how many. It works in small transactions: after an error, what is counted
// is committed, and calling it again goes on with the rest.
func (w *Webhooks) ReplayMissing(ctx context.Context, scope Scope, id uuid.UUID, since time.Time) (replayed int, err error) {
	if oldest := time.Now().Add(-deliveryRetention); since.Before(oldest) {
		return 0, fmt.Errorf("%w: deliveries are remembered for %s; since is before that", ErrInvalid, deliveryRetention)
	}
	for action := "webhook.replayed"; ; action = "" {
		batch := 0
		_, err := w.change(ctx, scope, id, action, func(tx pgx.Tx, s *db.WebhookSubscription) error {
			if !s.Enabled {
				return ErrDisabled
			}
			events, err := db.New(tx).ListMissingEvents(ctx, db.ListMissingEventsParams{
				SubscriptionID: id, Since: since, Consumer: WebhookDispatchArgs{}.Kind(), MaxRows: missingBatch,
			})
			if err != nil {
				return fmt.Errorf("list events: %w", err)
			}
			dispatches, subscriptions := make([]dispatch, len(events)), make(map[uuid.UUID][]uuid.UUID, len(events))
			for i, e := range events {
				dispatches[i] = dispatch{event: eventlog.Loaded{
					ID: e.ID, OrganizationID: s.OrganizationID, Type: e.EventType, Payload: e.Payload, CreatedAt: e.CreatedAt.UTC(),
				}}
				subscriptions[e.ID] = []uuid.UUID{id}
			}
			if err := w.deliver(ctx, tx, dispatches, subscriptions); err != nil {
				return fmt.Errorf("deliver events: %w", err)
			}
			batch = len(events)
			return nil
		})
		if err != nil {
			return replayed, err
		}
		replayed += batch
		if batch < missingBatch {
			return replayed, nil
		}
	}
}
