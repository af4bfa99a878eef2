package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"afluente/db"
	"afluente/eventlog/batch"
)

// jobMetadata is what every job of an event carries in River's metadata. The
// settle trigger reads the first two and the consumer.
type jobMetadata struct {
	EventID   uuid.UUID `json:"event_id"`
	CreatedAt string    `json:"event_created_at"` // createdAtLayout, for partition pruning
	// RequestID, TraceID and SpanID are the event's, if it has them.
	RequestID string `json:"request_id,omitempty"`
	TraceID   string `json:"trace_id,omitempty"`
	SpanID    string `json:"span_id,omitempty"`
	// CausationID is the event that brought a job about which is not a consumer's.
	CausationID uuid.UUID `json:"causation_id,omitzero"`
	// Replay says that the event was fanned out long ago, to others.
	Replay bool `json:"replay,omitempty"`
	// Cron is what a cron's job has in place of an event; see cronMetadata.
	Cron string `json:"cron,omitempty"`

	consumerMetadata
}

// consumerMetadata is the part that differs from consumer to consumer.
type consumerMetadata struct {
	Consumer string `json:"consumer,omitempty"`
	// Deferred says that the args are still to be made of the event.
	Deferred bool `json:"deferred,omitempty"`
	// Lane is within the consumer what the job waits its turn in; see laneOf.
	Lane string `json:"lane,omitempty"`
}

// createdAtLayout keeps all that PostgreSQL does of a timestamp: microseconds.
const createdAtLayout = "2006-01-02T15:04:05.999999Z"

// consumer is a worker for the jobs of events of type P.
type consumer[P Payload, A river.JobArgs] struct {
	river.Worker[A]
	project func(Event[P]) A
}

// Work makes the args first where the bridge left that to the job.
func (c *consumer[P, A]) Work(ctx context.Context, job *river.Job[A]) error {
	if r, ok := ctx.Value(deferredKey{}).(record); ok {
		var payload P
		if want := payload.EventType(); want != anyType && want != r.eventType {
			// Registered types are only ever added, so an event may still come
			// of a type that this consumer has given up.
			return river.RecordOutput(ctx, "no longer subscribed to "+r.eventType)
		}
		e, err := decode[P](r)
		if errors.Is(err, errNewer) {
			return err // one of the next attempts may find a newer process
		} else if err != nil {
			return river.JobCancel(err)
		}
		job.Args = c.project(e)
	}
	return c.Worker.Work(ctx, job)
}

// deferredKey is the context key of the record that a deferred job is made of.
type deferredKey struct{}

// ErrNoEvent is returned by [Events.Load] for a job that stems from no event
// or whose event is gone. Trying again is useless.
var ErrNoEvent = errors.New("no event")

// Events reads the events behind jobs. Concurrent loads share round trips.
// Make it with [NewEvents]; it may be used by several goroutines.
type Events struct {
	queries *db.Queries
	loads   batch.Group[struct{}, eventKey, *record]
}

// NewEvents returns a reader that works on a pool or a connection.
func NewEvents(conn db.DBTX) *Events { return &Events{queries: db.New(conn)} }

// loadTimeout bounds one query, which serves several jobs and so does not end with
// any one of them.
const loadTimeout = 10 * time.Second

// eventKey is the primary key of an event.
type eventKey struct {
	id        uuid.UUID
	createdAt time.Time
}

// Loaded is an event with its payload as it is stored.
type Loaded struct {
	ID             uuid.UUID
	OrganizationID uuid.UUID
	Type           string
	EntityKind     string
	EntityID       *uuid.UUID
	Payload        json.RawMessage
	Metadata       json.RawMessage
	CreatedAt      time.Time
}

func loaded(row db.LoadEventsRow) Loaded {
	return Loaded{
		ID:             row.ID,
		OrganizationID: row.OrganizationID,
		Type:           row.EventType,
		EntityKind:     row.EntityKind,
		EntityID:       row.EntityID,
		Payload:        row.Payload,
		Metadata:       row.Metadata,
		CreatedAt:      row.CreatedAt.UTC(),
	}
}

// Load returns the event that a job stems from, or [ErrNoEvent].
func (e *Events) Load(ctx context.Context, job *rivertype.JobRow) (Loaded, error) {
	r, err := e.load(ctx, job)
	if err != nil {
		return Loaded{}, err
	}
	return Loaded{
		ID:             r.id,
		OrganizationID: r.organizationID,
		Type:           r.eventType,
		EntityKind:     r.entityKind,
		EntityID:       r.entityID,
		Payload:        r.payload,
		Metadata:       r.metadata,
		CreatedAt:      r.createdAt,
	}, nil
}

func (e *Events) load(ctx context.Context, job *rivertype.JobRow) (record, error) {
	var metadata jobMetadata
	if err := json.Unmarshal(job.Metadata, &metadata); err != nil || metadata.EventID == uuid.Nil {
		return record{}, fmt.Errorf("load event of job %d: %w", job.ID, ErrNoEvent)
	}
	createdAt, err := time.Parse(createdAtLayout, metadata.CreatedAt)
	if err != nil {
		return record{}, fmt.Errorf("load event of job %d: %w", job.ID, ErrNoEvent)
	}

	r, err := e.loads.Do(ctx, struct{}{}, eventKey{metadata.EventID, createdAt}, e.loadAll)
	if err == nil && r == nil {
		err = ErrNoEvent
	}
	if err != nil {
		return record{}, fmt.Errorf("load event %s: %w", metadata.EventID, err)
	}
	return *r, nil
}

// loadAll returns events in the order of their keys, nil for those that are gone.
func (e *Events) loadAll(ctx context.Context, keys []eventKey) ([]*record, error) {
	ids := make([]uuid.UUID, len(keys))
	createdAts := make([]time.Time, len(keys))
	for i, key := range keys {
		ids[i], createdAts[i] = key.id, key.createdAt
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	rows, err := e.queries.LoadEvents(ctx, ids, createdAts)
	if err != nil {
		return nil, err
	}
	found := make(map[uuid.UUID]*record, len(rows))
	for _, row := range rows {
		found[row.ID] = &record{
			id:             row.ID,
			createdAt:      row.CreatedAt.UTC(),
			organizationID: row.OrganizationID,
			eventType:      row.EventType,
			entityKind:     row.EntityKind,
			entityID:       row.EntityID,
			payload:        row.Payload,
			metadata:       row.Metadata,
		}
	}
	records := make([]*record, len(keys))
	for i, key := range keys {
		records[i] = found[key.id]
	}
	return records, nil
}
