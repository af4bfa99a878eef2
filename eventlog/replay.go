package eventlog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"afluente/db"
)

// ErrNoConsumer is returned by [Bridge.Replay] and [Bridge.CountReplay] for a
// consumer that is not registered.
var ErrNoConsumer = errors.New("the consumer is not registered")

// ReplayFilter chooses stored events to send to a consumer.
type ReplayFilter struct {
	Consumer string
	// EventType is one of the consumer's types; empty means all of them.
	EventType      string
	OrganizationID uuid.UUID // uuid.Nil for all
	// Since and Until bound when the events were made, [Since, Until).
	Since, Until time.Time
}

// replayWindow is the span of time whose keys are in memory at once.
const replayWindow = time.Hour

// Replay sends stored events to a consumer that never had them: one made after
// them, or one whose dead letter of an event was discarded. Events that the
// consumer has consumed, has a job for, even a dead one, or is about to get
// from the bridge are left out, so that running it twice sends nothing twice.
//
// Oldest first, batch by batch; each is committed with its jobs before the
// next. The jobs have the lowest priority, the tag replay and "replay": true in
// their metadata. The result is how many events were sent, also with an error.
func (b *Bridge) Replay(ctx context.Context, filter ReplayFilter, pace Pace) (Moved, error) {
	moved, err := b.replay(ctx, filter, pace)
	if err != nil {
		return moved, fmt.Errorf("replay to %s: %w", filter.Consumer, err)
	}
	return moved, nil
}

func (b *Bridge) replay(ctx context.Context, filter ReplayFilter, pace Pace) (Moved, error) {
	var moved Moved
	limiter, size := pace.limiter()
	err := b.eachReplayable(ctx, filter, func(keys []db.ListEventsToReplayRow) error {
		moved.Found += len(keys)
		for batch := range slices.Chunk(keys, size) {
			if err := limiter.WaitN(ctx, len(batch)); err != nil {
				return err
			}
			sent, err := b.replayBatch(ctx, filter.Consumer, batch)
			if err != nil {
				return err
			}
			moved.Moved += sent
			moved.Gone += len(batch) - sent
			if pace.Progress != nil {
				pace.Progress(moved)
			}
		}
		return nil
	})
	return moved, err
}

// CountReplay returns how many events [Bridge.Replay] would send.
func (b *Bridge) CountReplay(ctx context.Context, filter ReplayFilter) (int, error) {
	count := 0
	err := b.eachReplayable(ctx, filter, func(keys []db.ListEventsToReplayRow) error {
		count += len(keys)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("count events to replay to %s: %w", filter.Consumer, err)
	}
	return count, nil
}

// eachReplayable calls f with the keys of the events to replay, window by window.
func (b *Bridge) eachReplayable(ctx context.Context, filter ReplayFilter, f func([]db.ListEventsToReplayRow) error) error {
	queries := db.New(b.pool)
	consumer, err := b.registered(ctx, filter.Consumer)
	if err != nil {
		return err
	}
	types := consumer.EventTypes
	if filter.EventType != "" {
		if !slices.Contains(types, filter.EventType) && !slices.Contains(types, anyType) {
			return fmt.Errorf("it does not consume %s but %q", filter.EventType, types)
		}
		types = []string{filter.EventType}
	}
	oldest, err := queries.GetOldestMonth(ctx)
	if err != nil {
		return fmt.Errorf("find oldest events: %w", err)
	}
	for since := later(oldest, filter.Since); since.Before(filter.Until); since = since.Add(replayWindow) {
		keys, err := queries.ListEventsToReplay(ctx, db.ListEventsToReplayParams{
			Since:          since,
			Until:          earlier(since.Add(replayWindow), filter.Until),
			EventTypes:     types,
			OrganizationID: orNil(filter.OrganizationID),
			Consumer:       filter.Consumer,
		})
		if err != nil {
			return fmt.Errorf("list events: %w", err)
		}
		if len(keys) == 0 {
			continue
		}
		if err := f(keys); err != nil {
			return err
		}
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func (b *Bridge) registered(ctx context.Context, name string) (db.EventConsumer, error) {
	all, err := db.New(b.pool).ListConsumers(ctx)
	if err != nil {
		return db.EventConsumer{}, fmt.Errorf("list consumers: %w", err)
	}
	i := slices.IndexFunc(all, func(c db.EventConsumer) bool { return c.Name == name })
	if i < 0 {
		return db.EventConsumer{}, ErrNoConsumer
	}
	return all[i], nil
}

// replayBatch sends those of the events that the consumer still never had.
func (b *Bridge) replayBatch(ctx context.Context, consumer string, rows []db.ListEventsToReplayRow) (sent int, err error) {
	var keys eventKeys
	for _, row := range rows {
		keys.ids = append(keys.ids, row.ID)
		keys.createdAts = append(keys.createdAts, row.CreatedAt)
	}
	err = pgx.BeginTxFunc(ctx, b.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		sent, err = b.sendTo(ctx, tx, consumer, keys, true)
		return err
	})
	return sent, err
}

// sendTo fans events out to one more consumer, those that it never had, and
// returns how many they are.
func (b *Bridge) sendTo(ctx context.Context, tx pgx.Tx, consumer string, keys eventKeys, replay bool) (int, error) {
	queries := db.New(tx)
	registered, err := queries.ListConsumers(ctx)
	if err != nil {
		return 0, fmt.Errorf("list consumers: %w", err)
	}
	claimed, err := queries.ClaimEventsToReplay(ctx, db.ClaimEventsToReplayParams{
		Ids:          keys.ids,
		CreatedAts:   keys.createdAts,
		Consumer:     consumer,
		PayloadTypes: b.payloadTypes,
		MaxPayload:   maxProjectedPayload,
		OrderFields:  orderFields(registered),
	})
	if err != nil {
		return 0, fmt.Errorf("claim events: %w", err)
	}
	if len(claimed) == 0 {
		return 0, nil
	}
	events := make([]db.ClaimEventsRow, len(claimed))
	for i, event := range claimed {
		events[i] = db.ClaimEventsRow(event)
	}
	jobs, err := b.fanOut(events, registered, replay)
	if err != nil {
		return 0, err
	}
	queues, err := b.insert(ctx, tx, events[0].ClaimedAt, jobs)
	if err != nil {
		return 0, err
	}
	if err := queries.WakeQueues(ctx, queues); err != nil {
		return 0, fmt.Errorf("wake queues: %w", err)
	}
	return len(claimed), nil
}
