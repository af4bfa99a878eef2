package eventlog

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"afluente/db"
	"afluente/eventlog/event"
)

// Payload is the content of an event. Types are in afluente/eventlog/event.
type Payload = event.Payload

// Event is one event on the bus, with its payload.
type Event[P Payload] struct {
	// ID is set by the database and ignored by Emit.
	ID uuid.UUID
	// OrganizationID is the tenant. Required.
	OrganizationID uuid.UUID
	// EntityKind names what the event is about. Empty for Emit means the part
	// of the type before the dot: "message" for "message.queued".
	EntityKind string
	// EntityID is the row the event is about; uuid.Nil for none.
	EntityID uuid.UUID
	Payload  P
	Metadata Metadata
	// At is the earliest time at which Emit wants the event fanned out; zero
	// means at once. It is not set on an event that was read.
	At time.Time
	// CreatedAt is when the emitting transaction began, by the database's
	// clock. Ignored by Emit.
	CreatedAt time.Time
}

// Metadata is the standard metadata of an event. Every field is optional.
type Metadata struct {
	RequestID string `json:"request_id,omitempty"`
	ActorID   string `json:"actor_id,omitempty"`
	Source    string `json:"source,omitempty"`
	// TraceID is a trace id of W3C Trace Context, 32 hexadecimal digits.
	TraceID string `json:"trace_id,omitempty"`
	// SpanID is the emitter's span in that trace, 16 hexadecimal digits.
	SpanID string `json:"span_id,omitempty"`
	// CausationID is the event whose consumer emitted this one.
	CausationID string `json:"causation_id,omitempty"`
	// IdempotencyKey, at most 255 characters, names the event within its organization: the second
	// event with the same key is not written.
	IdempotencyKey string `json:"idempotency_key,omitempty"`
	// SchemaVersion is that of the payload. Empty for Emit means the type's;
	// an event without it is of version 1.0.0.
	SchemaVersion string `json:"schema_version,omitempty"`
	// EmittedAt is set by the database, in seconds since 1970.
	EmittedAt json.Number `json:"emitted_at,omitempty"`
}

// ErrInvalidEvent is returned by [Emit] and [EmitMany] for an event that the
// database could not store, or whose payload breaks the formats and values in
// the tags of its type. Nothing was sent then, so the transaction is still good.
var ErrInvalidEvent = errors.New("invalid event")

// What an event may hold at most, in bytes of JSON as PostgreSQL prints it,
// which may be a little more than what was given.
const (
	maxPayload  = 1 << 20
	maxMetadata = 16 << 10

	maxIdempotencyKey = 255 // characters
)

var eventTypeRE = regexp.MustCompile(`^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$`)

// Emit writes an event in the caller's transaction and returns its id. The
// event is on the bus when that transaction commits.
//
// With Metadata.IdempotencyKey set, a key that its organization used before
// gives the id of the first event, and nothing is written; an Emit of the same
// key in a transaction still open waits for that one to end.
//
// The context's [Correlation], such as a job has, is added to the metadata.
//
// An event that cannot be stored gives [ErrInvalidEvent]. Any other error
// comes from the database and has spoilt the transaction.
func Emit[P Payload](ctx context.Context, tx pgx.Tx, e Event[P]) (uuid.UUID, error) {
	raw, err := encode(e)
	if err != nil {
		return uuid.Nil, err
	}
	return EmitRaw(ctx, tx, raw)
}

// EmitMany is [Emit] for many events of one type in one statement. The ids are
// in the order of the events. One invalid event refuses them all.
func EmitMany[P Payload](ctx context.Context, tx pgx.Tx, events []Event[P]) ([]uuid.UUID, error) {
	if len(events) == 0 {
		return nil, nil
	}
	elements := make([]element, len(events))
	for i, e := range events {
		raw, err := encode(e)
		if err != nil {
			return nil, fmt.Errorf("event %d: %w", i, err)
		}
		params, err := raw.params(ctx)
		if err != nil {
			return nil, fmt.Errorf("event %d: %w", i, err)
		}
		elements[i] = element(params)
	}
	eventType := elements[0].EventType
	batch, err := json.Marshal(elements)
	if err != nil {
		return nil, fmt.Errorf("emit %s: encode events: %w", eventType, err)
	}
	ids, err := db.New(tx).EmitEvents(ctx, batch)
	if err != nil {
		return nil, fmt.Errorf("emit %s: %w", eventType, err)
	}
	return ids, nil
}

// element is one event in the array that emit_events takes.
type element struct {
	EventType      string          `json:"event_type"`
	EntityKind     string          `json:"entity_kind"`
	EntityID       *uuid.UUID      `json:"entity_id"`
	Payload        json.RawMessage `json:"payload"`
	Metadata       json.RawMessage `json:"metadata"`
	OrganizationID uuid.UUID       `json:"organization_id"`
	At             *time.Time      `json:"at"`
}

// RawEvent is an event whose payload is JSON already.
type RawEvent struct {
	Type           string
	OrganizationID uuid.UUID
	EntityKind     string    // empty means the part of Type before the dot
	EntityID       uuid.UUID // uuid.Nil for none
	Payload        json.RawMessage
	Metadata       json.RawMessage // nil means {}
	At             time.Time       // zero means at once
}

// EmitRaw is [Emit] for an event of a type that need not be known at compile
// time.
func EmitRaw(ctx context.Context, tx pgx.Tx, e RawEvent) (uuid.UUID, error) {
	params, err := e.params(ctx)
	if err != nil {
		return uuid.Nil, err
	}
	id, err := db.New(tx).EmitEvent(ctx, params)
	if err != nil {
		return uuid.Nil, fmt.Errorf("emit %s: %w", e.Type, err)
	}
	return id, nil
}

func encode[P Payload](e Event[P]) (RawEvent, error) {
	raw := RawEvent{
		Type:           e.Payload.EventType(),
		OrganizationID: e.OrganizationID,
		EntityKind:     e.EntityKind,
		EntityID:       e.EntityID,
		At:             e.At,
	}
	invalid := func(what string, err error) (RawEvent, error) {
		return RawEvent{}, fmt.Errorf("emit %s: %w: %s%w", raw.Type, ErrInvalidEvent, what, err)
	}
	if err := checkTags(e.Payload); err != nil {
		return invalid("", err)
	}
	if utf8.RuneCountInString(e.Metadata.IdempotencyKey) > maxIdempotencyKey {
		return invalid("", errKeyLength)
	}
	if e.Metadata.SchemaVersion == "" {
		e.Metadata.SchemaVersion = schemaVersion(e.Payload)
	} else if _, err := majorOf(e.Metadata.SchemaVersion); err != nil {
		return invalid("metadata.schema_version: ", err)
	}
	e.Metadata.EmittedAt = "" // the database's to set
	var err error
	if raw.Payload, err = json.Marshal(e.Payload); err != nil {
		return invalid("encode payload: ", err)
	}
	if raw.Metadata, err = json.Marshal(e.Metadata); err != nil {
		return invalid("encode metadata: ", err)
	}
	return raw, nil
}

// params checks the event for what the database would refuse.
func (e RawEvent) params(ctx context.Context) (db.EmitEventParams, error) {
	invalid := func(reason string) (db.EmitEventParams, error) {
		return db.EmitEventParams{}, fmt.Errorf("emit %q: %w: %s", e.Type, ErrInvalidEvent, reason)
	}
	if !eventTypeRE.MatchString(e.Type) {
		return invalid("the type is not entity.action in lower snake case")
	}
	if e.OrganizationID == uuid.Nil {
		return invalid("no organization")
	}
	if e.EntityKind == "" {
		e.EntityKind, _, _ = strings.Cut(e.Type, ".")
	}
	if !utf8.ValidString(e.EntityKind) || strings.Contains(e.EntityKind, "\x00") {
		return invalid("the entity kind holds NUL or invalid UTF-8")
	}
	if e.Metadata == nil {
		e.Metadata = json.RawMessage(`{}`)
	}
	if err := checkObject(e.Payload); err != nil {
		return invalid("the payload " + err.Error())
	}
	if err := checkObject(e.Metadata); err != nil {
		return invalid("the metadata " + err.Error())
	}
	var err error
	if e.Metadata, err = correlate(ctx, e.Metadata); err != nil {
		return invalid(err.Error())
	}
	if len(e.Payload) > maxPayload {
		return invalid(fmt.Sprintf("the payload has %d bytes, the most is %d", len(e.Payload), maxPayload))
	}
	if len(e.Metadata) > maxMetadata {
		return invalid(fmt.Sprintf("the metadata has %d bytes, the most is %d", len(e.Metadata), maxMetadata))
	}
	params := db.EmitEventParams{
		EventType:      e.Type,
		EntityKind:     e.EntityKind,
		Payload:        e.Payload,
		Metadata:       e.Metadata,
		OrganizationID: e.OrganizationID,
	}
	if e.EntityID != uuid.Nil {
		params.EntityID = &e.EntityID
	}
	if !e.At.IsZero() {
		params.At = &e.At
	}
	return params, nil
}

var (
	errKeyLength = fmt.Errorf("the idempotency key has more than %d characters", maxIdempotencyKey)

	errNUL    = errors.New("holds a NUL character, which jsonb cannot store")
	errUTF8   = errors.New("holds invalid UTF-8")
	errObject = errors.New("is not a JSON object")
)

// checkObject tells whether jsonb can store a JSON object as it is.
func checkObject(encoded json.RawMessage) error {
	if !utf8.Valid(encoded) {
		return errUTF8
	}
	if !json.Valid(encoded) || !bytes.HasPrefix(bytes.TrimLeft(encoded, " \t\r\n"), []byte("{")) {
		return errObject
	}
	for i := 0; i < len(encoded); i++ {
		if encoded[i] != '\\' {
			continue
		}
		i++ // on the escape's letter
		if encoded[i] != 'u' {
			continue
		}
		first := hex4(encoded[i+1:])
		i += 4 // on the last digit
		switch {
		case first == 0:
			return errNUL
		case first == utf8.RuneError: // encoding/json writes it for invalid UTF-8; a genuine U+FFFD it does not escape
			return errUTF8
		case utf16.IsSurrogate(first):
			rest, escaped := bytes.CutPrefix(encoded[i+1:], []byte(`\u`))
			if !escaped || utf16.DecodeRune(first, hex4(rest)) == utf8.RuneError {
				return errUTF8
			}
			i += 6
		}
	}
	return nil
}

// hex4 reads the four digits of an escape in valid JSON.
func hex4(digits []byte) rune {
	code, _ := strconv.ParseUint(string(digits[:4]), 16, 16)
	return rune(code)
}

// record is an event as it is stored, before its payload is given a type. A
// nil payload was not loaded.
type record struct {
	id             uuid.UUID
	createdAt      time.Time
	organizationID uuid.UUID
	eventType      string
	entityKind     string
	entityID       *uuid.UUID
	payload        json.RawMessage
	metadata       json.RawMessage
	// decoded keeps the Event that was made of it for its next consumer, which has
	// the same type nearly always. Only the bridge, which has several, sets it.
	decoded *any
}

// decodeOnce is decode for a record that several consumers read.
func decodeOnce[P Payload](r record) (Event[P], error) {
	if e, ok := (*r.decoded).(Event[P]); ok {
		return e, nil
	}
	e, err := decode[P](r)
	if err == nil {
		*r.decoded = e
	}
	return e, err
}

// decode gives a record the type P. The error names the field that does not
// fit, never its value.
func decode[P Payload](r record) (Event[P], error) {
	e := Event[P]{
		ID:             r.id,
		OrganizationID: r.organizationID,
		EntityKind:     r.entityKind,
		CreatedAt:      r.createdAt,
	}
	if r.entityID != nil {
		e.EntityID = *r.entityID
	}
	if err := unmarshal(r.metadata, &e.Metadata); err != nil {
		return e, fmt.Errorf("decode metadata of %s: %w", r.eventType, err)
	}
	if e.Payload.EventType() == anyType {
		return e, nil
	}
	payload, err := toNewest(e.Payload, e.Metadata.SchemaVersion, r.payload)
	if err == nil {
		err = unmarshal(payload, &e.Payload)
	}
	if err != nil {
		return e, fmt.Errorf("decode payload of %s: %w", r.eventType, err)
	}
	return e, nil
}

func unmarshal(data []byte, v any) error {
	err := json.Unmarshal(data, v)
	if typeErr, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		got, _, _ := strings.Cut(typeErr.Value, " ") // "number 12" has the value in it
		return fmt.Errorf("field %q: want %s, got %s", typeErr.Field, typeErr.Type, got)
	}
	return err
}
