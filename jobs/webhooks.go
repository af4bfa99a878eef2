package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"afluente/db"
	"afluente/eventlog"
	"afluente/eventlog/batch"
	"afluente/jobs/webhook"
)

// webhookAttempts is how many attempts a delivery has before it is given up.
const webhookAttempts = 8

// Webhooks is what organizations do with their webhooks: subscribe, look at
// deliveries, send them again. What it does is committed when it returns. It may
// be used by several goroutines.
type Webhooks struct {
	Pool   *pgxpool.Pool
	Jobs   *river.Client[pgx.Tx] // inserts jobs; see eventlog.NewInserter
	Sender *webhook.Sender
	Keys   *webhook.Keyring // seals secrets; without a key none can be made
	// Backoff is the delays between the attempts of a delivery, and of a breaker
	// that is open; nil means [eventlog.Backoff].
	Backoff []time.Duration

	// What many jobs ask for at a time; beginnings by the subscription.
	dispatches batch.Group[struct{}, dispatch, struct{}]
	beginnings batch.Group[uuid.UUID, beginning, begun]
	endings    batch.Group[struct{}, *deliveryAttempt, bool]
}

var (
	// ErrNotFound is returned for a subscription or delivery that is not there, or
	// is another organization's.
	ErrNotFound = errors.New("no such webhook")
	// ErrInvalid is returned for settings that a subscription may not have.
	ErrInvalid = errors.New("invalid webhook")
	// ErrUnderWay is returned for a delivery that is not over yet.
	ErrUnderWay = errors.New("the delivery is under way")
	// ErrDisabled is returned for a webhook that sends nothing until it is enabled.
	ErrDisabled = errors.New("the webhook is disabled")
)

func (w *Webhooks) delay(n int) time.Duration {
	delays := w.Backoff
	if delays == nil {
		delays = eventlog.Backoff()
	}
	return delays[min(max(n, 0), len(delays)-1)]
}

// undelivered is a delivery that needs a job.
type undelivered struct {
	id, subscription, organization uuid.UUID
	eventType                      string
	metadata                       json.RawMessage // of the job; nil for what belongs to its context
}

// enqueue gives deliveries jobs, which are their timers.
func (w *Webhooks) enqueue(ctx context.Context, tx pgx.Tx, deliveries []undelivered) error {
	if len(deliveries) == 0 {
		return nil
	}
	metadata, err := eventlog.CorrelationMetadata(ctx)
	if err != nil {
		return err
	}
	params := make([]river.InsertManyParams, len(deliveries))
	for i, delivery := range deliveries {
		if delivery.metadata == nil {
			delivery.metadata = metadata
		}
		params[i] = river.InsertManyParams{
			Args:       WebhookDeliveryArgs{DeliveryID: delivery.id, SubscriptionID: delivery.subscription},
			InsertOpts: &river.InsertOpts{Metadata: delivery.metadata, Tags: eventlog.Tags(delivery.eventType, "", delivery.organization)},
		}
	}
	inserted, err := w.Jobs.InsertManyTx(ctx, tx, params)
	if err != nil {
		return fmt.Errorf("insert jobs: %w", err)
	}
	ids, jobs := make([]uuid.UUID, len(deliveries)), make([]int64, len(deliveries))
	for i, delivery := range deliveries {
		ids[i], jobs[i] = delivery.id, inserted[i].Job.ID
	}
	queries := db.New(tx)
	if err := queries.SetDeliveryJobs(ctx, ids, jobs); err != nil {
		return fmt.Errorf("set jobs of deliveries: %w", err)
	}
	return wakeDeliveries(ctx, queries)
}

// wakeDeliveries tells River's clients of work. River itself tells of one insert in a
// tenth of a second, and what others insert meanwhile would wait for the next poll.
func wakeDeliveries(ctx context.Context, queries *db.Queries) error {
	if err := queries.WakeQueues(ctx, []string{WebhookDeliveryArgs{}.InsertOpts().Queue}); err != nil {
		return fmt.Errorf("wake queue: %w", err)
	}
	return nil
}

// signing is what a subscription signs and sends besides the event.
type signing struct {
	secrets []string // newest first
	legacy  string
	headers map[string]string
}

// errSecret says that a subscription has no secret which opens.
var errSecret = errors.New("no secret that can be opened")

// signing opens the secrets and headers of a subscription. One that came in plain
// by SQL is sealed on the way, if there is a key.
func (w *Webhooks) signing(ctx context.Context, tx pgx.Tx, s db.WebhookSubscription) (signing, error) {
	queries := db.New(tx)
	var result signing
	if s.Secret != nil && w.Keys.Current() == "" {
		result.secrets, result.legacy = []string{*s.Secret}, *s.Secret
	} else if s.Secret != nil {
		if err := w.sealPlain(ctx, queries, s); err != nil {
			return signing{}, err
		}
	}
	rows, err := queries.ListSecrets(ctx, s.ID)
	if err != nil {
		return signing{}, fmt.Errorf("list secrets: %w", err)
	}
	for _, row := range rows {
		plain, err := w.Keys.Open(row.Sealed, row.KeyID, secretOwner(s.ID, row.ID))
		if err != nil {
			return signing{}, fmt.Errorf("%w: %w", errSecret, err)
		}
		result.secrets = append(result.secrets, string(plain))
		if row.Legacy || result.legacy == "" { // the newest, once the old one has expired
			result.legacy = string(plain)
		}
	}
	if len(result.secrets) == 0 {
		return signing{}, errSecret
	}
	result.headers, err = w.openHeaders(s)
	return result, err
}

// sealPlain makes a secret in plain the oldest sealed one, or the only one.
func (w *Webhooks) sealPlain(ctx context.Context, queries *db.Queries, s db.WebhookSubscription) error {
	if err := w.insertSecret(ctx, queries, s.ID, *s.Secret); err != nil {
		return err
	}
	if err := queries.ClearPlainSecret(ctx, s.ID); err != nil {
		return fmt.Errorf("clear plain secret: %w", err)
	}
	return nil
}

// insertSecret adds a sealed secret. Those that are there go on signing the legacy
// headers: the one that does, or the newest, if that one has expired.
func (w *Webhooks) insertSecret(ctx context.Context, queries *db.Queries, subscription uuid.UUID, secret string) error {
	rows, err := queries.ListSecrets(ctx, subscription)
	if err != nil {
		return fmt.Errorf("list secrets: %w", err)
	}
	if len(rows) >= maxSecrets {
		return fmt.Errorf("%w: it has %d secrets, wait for one to expire", ErrInvalid, len(rows))
	}
	id := uuid.New()
	sealed, key, err := w.Keys.Seal([]byte(secret), secretOwner(subscription, id))
	if err != nil {
		return err
	}
	signsLegacy := func(row db.ListSecretsRow) bool { return row.Legacy }
	if !slices.ContainsFunc(rows, signsLegacy) {
		if err := queries.ClearLegacySecret(ctx, subscription); err != nil {
			return fmt.Errorf("clear legacy secret: %w", err)
		}
		if len(rows) > 0 {
			if err := queries.SetLegacySecret(ctx, rows[0].ID); err != nil {
				return fmt.Errorf("set legacy secret: %w", err)
			}
		}
	}
	err = queries.InsertSecret(ctx, db.InsertSecretParams{
		ID: id, SubscriptionID: subscription, Sealed: sealed, KeyID: key, Legacy: len(rows) == 0,
	})
	if err != nil {
		return fmt.Errorf("insert secret: %w", err)
	}
	return nil
}

// maxSecrets is how many secrets of a subscription sign at a time.
const maxSecrets = 3

// secretOwner and headersOwner are what a sealed text is bound to, so that it
// cannot be moved to another row.
func secretOwner(subscription, secret uuid.UUID) string {
	return "webhook secret " + subscription.String() + " " + secret.String()
}

func headersOwner(subscription uuid.UUID) string { return "webhook headers " + subscription.String() }

func (w *Webhooks) openHeaders(s db.WebhookSubscription) (map[string]string, error) {
	if s.SealedHeaders == nil || s.HeadersKey == nil {
		return nil, nil
	}
	plain, err := w.Keys.Open(s.SealedHeaders, *s.HeadersKey, headersOwner(s.ID))
	if err != nil {
		return nil, fmt.Errorf("%w: headers: %w", errSecret, err)
	}
	var headers map[string]string
	if err := json.Unmarshal(plain, &headers); err != nil {
		return nil, fmt.Errorf("%w: headers: not JSON", errSecret)
	}
	return headers, nil
}

func (w *Webhooks) sealHeaders(subscription uuid.UUID, headers map[string]string) (sealed []byte, key *string, err error) {
	if len(headers) == 0 {
		return nil, nil, nil
	}
	plain, err := json.Marshal(headers)
	if err != nil {
		return nil, nil, fmt.Errorf("encode headers: %w", err)
	}
	sealed, name, err := w.Keys.Seal(plain, headersOwner(subscription))
	return sealed, &name, err
}
