package jobs

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"afluente/db"
	"afluente/eventlog"
	"afluente/jobs/webhook"
)

const (
	// retryOverdue is how long after its time a job may wait for River's leader,
	// which looks every 5 s.
	retryOverdue = 30 * time.Second

	// deliveryLost is how long after its time a delivery may wait before its job is
	// looked for.
	deliveryLost = 5 * time.Minute

	// deliveryRetention is how long deliveries that are over, their attempts and
	// what they sent are kept. Those that were given up stay as their jobs do.
	deliveryRetention = 30 * 24 * time.Hour

	// maxReleased bounds what one run does of each thing.
	maxReleased = 1000
)

// ProcessPendingWebhooksArgs asks for the webhooks that are due and wait all the
// same, and for what is left of those that are over.
type ProcessPendingWebhooksArgs struct{}

func (ProcessPendingWebhooksArgs) Kind() string { return "process-pending-webhooks" }

func (ProcessPendingWebhooksArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: "maintenance"}
}

func processPendingWebhooks(d Deps) eventlog.Declaration {
	return eventlog.Cron("* * * * *", ProcessPendingWebhooksArgs{}, &processPendingWebhooksWorker{webhooks: d.Webhooks},
		eventlog.Policy{Missed: eventlog.MissedSkip})
}

type processPendingWebhooksWorker struct {
	river.WorkerDefaults[ProcessPendingWebhooksArgs]

	webhooks *Webhooks
}

func (w *processPendingWebhooksWorker) Timeout(*river.Job[ProcessPendingWebhooksArgs]) time.Duration {
	return 50 * time.Second
}

// processed is what a run did.
type processed struct {
	Released int64 `json:"released"` // jobs that River's leader had no time for
	Found    int   `json:"found"`    // deliveries whose job was gone
	Sealed   int   `json:"sealed"`   // secrets in plain or of an old key
	Unsealed int   `json:"unsealed"` // secrets that no key opens
	Expired  int64 `json:"expired"`  // secrets that sign no more
	Deleted  int64 `json:"deleted"`  // deliveries that are long over
}

// Work does what River's leader may have had no time for, wakes the workers,
// should a notification have been lost, gives deliveries new jobs whose job is
// gone, seals secrets with the current key, and deletes what is over.
func (w *processPendingWebhooksWorker) Work(ctx context.Context, _ *river.Job[ProcessPendingWebhooksArgs]) error {
	queries := db.New(w.webhooks.Pool)
	var done processed
	var err error
	queues := []string{WebhookDispatchArgs{}.InsertOpts().Queue, WebhookDeliveryArgs{}.InsertOpts().Queue}
	done.Released, err = queries.ReleaseOverdueRetries(ctx, db.ReleaseOverdueRetriesParams{
		Queues:  queues,
		Kinds:   []string{WebhookDispatchArgs{}.Kind(), WebhookDeliveryArgs{}.Kind()},
		Before:  time.Now().Add(-retryOverdue),
		MaxJobs: maxReleased,
	})
	if err != nil {
		return fmt.Errorf("release retries: %w", err)
	}
	if err := queries.WakeQueues(ctx, queues); err != nil {
		return fmt.Errorf("wake queues: %w", err)
	}
	if done.Found, err = w.webhooks.find(ctx); err != nil {
		return fmt.Errorf("find lost deliveries: %w", err)
	}
	if done.Sealed, done.Unsealed, err = w.webhooks.reseal(ctx); err != nil {
		return fmt.Errorf("seal secrets: %w", err)
	}
	if done.Expired, err = queries.DeleteExpiredSecrets(ctx); err != nil {
		return fmt.Errorf("delete expired secrets: %w", err)
	}
	before := time.Now().Add(-deliveryRetention)
	if done.Deleted, err = queries.DeleteOldDeliveries(ctx, before, maxReleased); err != nil {
		return fmt.Errorf("delete old deliveries: %w", err)
	}
	if _, err = queries.DeleteOldBodies(ctx, before, maxReleased); err != nil {
		return fmt.Errorf("delete old bodies: %w", err)
	}
	return river.RecordOutput(ctx, done)
}

// find gives new jobs to deliveries that are long due and have none that is alive.
func (w *Webhooks) find(ctx context.Context) (found int, err error) {
	err = pgx.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		lost, err := db.New(tx).ListLostDeliveries(ctx, time.Now().Add(-deliveryLost), maxReleased)
		if err != nil {
			return err
		}
		found = len(lost)
		deliveries := make([]undelivered, len(lost))
		for i, row := range lost {
			deliveries[i] = undelivered{id: row.ID, subscription: row.SubscriptionID, organization: row.OrganizationID, eventType: row.EventType}
		}
		return w.enqueue(ctx, tx, deliveries)
	})
	return found, err
}

// reseal seals what came in plain and what an older key sealed, each in a
// transaction of its own.
func (w *Webhooks) reseal(ctx context.Context) (sealed, unsealed int, err error) {
	if w.Keys.Current() == "" {
		return 0, 0, nil
	}
	queries := db.New(w.Pool)
	plain, err := queries.ListPlainSecrets(ctx, maxReleased)
	if err != nil {
		return 0, 0, fmt.Errorf("list plain secrets: %w", err)
	}
	old, err := queries.ListHeadersOfOtherKeys(ctx, new(w.Keys.Current()), maxReleased)
	if err != nil {
		return 0, 0, fmt.Errorf("list headers: %w", err)
	}
	secrets, err := queries.ListSecretsOfOtherKeys(ctx, w.Keys.Current(), maxReleased)
	if err != nil {
		return 0, 0, fmt.Errorf("list secrets: %w", err)
	}
	count := func(err error) error {
		switch {
		case errors.Is(err, webhook.ErrSealed), errors.Is(err, errSecret):
			unsealed++
		case err != nil:
			return err
		default:
			sealed++
		}
		return nil
	}
	for _, id := range append(plain, old...) {
		if err := count(w.resealSubscription(ctx, id)); err != nil {
			return sealed, unsealed, err
		}
	}
	for _, secret := range secrets {
		if err := count(w.resealSecret(ctx, queries, secret)); err != nil {
			return sealed, unsealed, err
		}
	}
	return sealed, unsealed, nil
}

func (w *Webhooks) resealSubscription(ctx context.Context, id uuid.UUID) error {
	return pgx.BeginFunc(ctx, w.Pool, func(tx pgx.Tx) error {
		queries := db.New(tx)
		s, err := queries.LockSubscription(ctx, id, nil)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil // deleted meanwhile
		} else if err != nil {
			return fmt.Errorf("lock subscription: %w", err)
		}
		if s.Secret != nil {
			if err := w.sealPlain(ctx, queries, s); err != nil {
				return err
			}
		}
		headers, err := w.openHeaders(s)
		if err != nil {
			return err
		}
		sealed, key, err := w.sealHeaders(id, headers)
		if err != nil {
			return err
		}
		return queries.SealHeaders(ctx, sealed, key, id)
	})
}

func (w *Webhooks) resealSecret(ctx context.Context, queries *db.Queries, secret db.ListSecretsOfOtherKeysRow) error {
	owner := secretOwner(secret.SubscriptionID, secret.ID)
	plain, err := w.Keys.Open(secret.Sealed, secret.KeyID, owner)
	if err != nil {
		return err
	}
	sealed, key, err := w.Keys.Seal(plain, owner)
	if err != nil {
		return err
	}
	return queries.ResealSecret(ctx, sealed, key, secret.ID)
}
