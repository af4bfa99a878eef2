package eventlog_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/eventlog/event"
)

// fill gives every field of a payload a value that its schema allows.
func fill(t *testing.T, value reflect.Value, tag string) {
	t.Helper()
	if _, ok := reflect.TypeAssert[time.Time](value); ok {
		value.Set(reflect.ValueOf(time.Date(2026, 12, 1, 12, 0, 0, 123456000, time.FixedZone("", -3*3600))))
		return
	}
	switch value.Kind() { //nolint:exhaustive // the default fails
	case reflect.Struct:
		for i := range value.NumField() {
			fill(t, value.Field(i), value.Type().Field(i).Tag.Get("jsonschema"))
		}
	case reflect.String:
		switch _, enum, ok := strings.Cut(tag, "enum="); {
		case ok:
			enum, _, _ = strings.Cut(enum, ",")
			value.SetString(enum)
		case strings.Contains(tag, "format=uuid"):
			value.SetString(uuid.NewString())
		case strings.Contains(tag, "format=date"):
			value.SetString("2026-12-01")
		default:
			value.SetString("text")
		}
	case reflect.Int64:
		value.SetInt(9007199254740993)
	case reflect.Float64:
		value.SetFloat(1.5)
	case reflect.Bool:
		value.SetBool(true)
	case reflect.Slice:
		value.Set(reflect.MakeSlice(value.Type(), 2, 2))
		for i := range 2 {
			fill(t, value.Index(i), tag)
		}
	case reflect.Map:
		element := reflect.New(value.Type().Elem()).Elem()
		fill(t, element, tag)
		value.Set(reflect.MakeMap(value.Type()))
		value.SetMapIndex(reflect.ValueOf("field"), element)
	case reflect.Interface:
		value.Set(reflect.ValueOf("anything"))
	default:
		require.Fail(t, "a kind that the schemas do not know", value.Kind())
	}
}

func schemaFault(t *testing.T, pool *pgxpool.Pool, eventType, payload string) *string {
	t.Helper()
	var fault *string
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT event_schema_fault($1, $2, '{}')", eventType, payload).Scan(&fault))
	return fault
}

// Emit takes every type when its fields are good, and names the one that is
// not, without its value.
func TestEmitChecksTheFormatsAndValuesOfEveryType(t *testing.T) {
	t.Parallel()
	checked := 0
	for _, zero := range event.All() {
		value := reflect.New(reflect.TypeOf(zero)).Elem()
		fill(t, value, "")
		check := func() error { return eventlog.CheckTags(value.Interface().(event.Payload)) }
		require.NoError(t, check(), zero.EventType())
		for i := range value.NumField() {
			tag := value.Type().Field(i).Tag
			field, rules := value.Field(i), tag.Get("jsonschema")
			if !strings.Contains(rules, "enum=") && rules != "format=uuid" && rules != "format=date" {
				continue
			}
			checked++
			name, option, _ := strings.Cut(tag.Get("json"), ",")
			good := field.String()
			field.SetString("secret")
			require.ErrorContains(t, check(), fmt.Sprintf("the field %q", name), zero.EventType())
			require.NotContains(t, check().Error(), "secret")
			field.SetString("")
			if option == "omitempty" {
				require.NoError(t, check(), "%s without %s", zero.EventType(), name)
			} else {
				require.ErrorContains(t, check(), fmt.Sprintf("the field %q", name), zero.EventType())
			}
			field.SetString(good)
		}
	}
	require.Greater(t, checked, len(event.All())/2, "few types are without a tag")
}

// Whatever a Go type can hold fits its schema in the database, and the
// database finds each field that does not.
func TestDatabaseChecksEveryTypeAsGoDoes(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	require.NoError(t, eventlog.RegisterTypes(t.Context(), pool))
	for _, payload := range []string{`[]`, `[{"message_id": "m"}]`, `"text"`, `null`} {
		require.Equal(t, "the payload is not an object", *schemaFault(t, pool, "message.queued", payload), payload)
	}
	for _, zero := range event.All() {
		value := reflect.New(reflect.TypeOf(zero)).Elem()
		fill(t, value, "")
		full, err := json.Marshal(value.Interface())
		require.NoError(t, err)
		require.Nil(t, schemaFault(t, pool, zero.EventType(), string(full)), "%s %s", zero.EventType(), full)
		extra := strings.Replace(string(full), "{", `{"one_more_field": 1, `, 1)
		require.Nil(t, schemaFault(t, pool, zero.EventType(), strings.Replace(extra, ", }", "}", 1)))

		var fields map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(full, &fields))
		for i := range value.NumField() {
			name, option, _ := strings.Cut(value.Type().Field(i).Tag.Get("json"), ",")
			without := make(map[string]json.RawMessage)
			for key, field := range fields {
				if key != name {
					without[key] = field
				}
			}
			encoded, err := json.Marshal(without)
			require.NoError(t, err)
			got := schemaFault(t, pool, zero.EventType(), string(encoded))
			if option == "" {
				require.Equal(t, fmt.Sprintf("field %q is missing", name), *got, zero.EventType())
			} else {
				require.Nil(t, got, "%s without %s", zero.EventType(), name)
				without[name] = json.RawMessage("null")
				encoded, err = json.Marshal(without)
				require.NoError(t, err)
				require.Nil(t, schemaFault(t, pool, zero.EventType(), string(encoded)), "%s with %s null", zero.EventType(), name)
			}
			if value.Field(i).Kind() == reflect.Interface {
				continue
			}
			for _, wrong := range []string{
				`[[1]]`, `[null]`, `["text"]`, `[["text"]]`, `[]`, `{"a": 1}`, `{"a": [{"from": 1}]}`, `{"a": null}`, `1.25`, `1e30`, `true`,
				`"wrong"`, `"2026-12-01 12:00:00Z"`, `"2026-12-01t12:00:00z"`, `"2026-13-01T12:00:00Z"`, `"2026-12-32T12:00:00Z"`,
				`"2026-12-01T24:00:00Z"`, `"2026-12-01T12:60:00Z"`, `"2026-12-01T12:00:00+24:00"`, `"2026-12-01T12:00:00,5Z"`,
			} {
				without[name] = json.RawMessage(wrong)
				encoded, err = json.Marshal(without)
				require.NoError(t, err)
				got := schemaFault(t, pool, zero.EventType(), string(encoded))
				if decoded := reflect.New(value.Type()); json.Unmarshal(encoded, decoded.Interface()) == nil {
					continue // Go takes it; whether the schema does is the format's to say
				}
				require.NotNil(t, got, "%s %s = %s", zero.EventType(), name, wrong)
				require.Contains(t, *got, fmt.Sprintf("field %q", name))
			}
		}
	}
}

func TestEventThatDepartsFromTheCatalogueIsMarkedOrRefused(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	tests := map[string]struct{ eventType, payload, metadata, want string }{
		"fits":            {"message.queued", `{"message_id": "m"}`, `{}`, ""},
		"unknown type":    {"message.painted", `{}`, `{}`, "unknown event type"},
		"missing":         {"message.queued", `{}`, `{}`, `field "message_id" is missing`},
		"wrong type":      {"message.queued", `{"message_id": 7}`, `{}`, `field "message_id" is not of the type`},
		"array":           {"message.queued", `{"message_id": ["m"]}`, `{}`, `field "message_id" is not of the type`},
		"wrong value":     {"contact.blocked", `{"reason": "mood"}`, `{}`, `field "reason" is not of the type, the format or the values`},
		"no UUID":         {"lead.assigned", `{"to_owner_id": "x"}`, `{}`, `field "to_owner_id" is not of the type, the format`},
		"no whole number": {"conversation.resolved", `{"resolved_by": "x", "duration_s": 1.5}`, `{}`, `field "duration_s"`},
		"wrong element":   {"contact.anonymized", `{"lgpd_request_id": "00000000-0000-4000-8000-000000000001", "anonymized_fields": [1]}`, `{}`, `field "anonymized_fields"`},
		"unknown version": {"message.queued", `{"message_id": "m"}`, `{"schema_version": "9.0.0"}`, "unknown schema version"},
		"newer minor":     {"message.queued", `{"message_id": "m"}`, `{"schema_version": "1.7.0"}`, ""},
		"no version":      {"message.queued", `{"message_id": "m"}`, `{"schema_version": "new"}`, "metadata.schema_version"},
		"leading zero":    {"message.queued", `{"message_id": "m"}`, `{"schema_version": "01.0.0"}`, "metadata.schema_version"},
		"version too big": {"message.queued", `{"message_id": "m"}`, `{"schema_version": "1.10000.0"}`, "metadata.schema_version"},
	}
	strict, err := pgx.ConnectConfig(t.Context(), b.pool.Config().ConnConfig)
	require.NoError(t, err)
	defer func() { require.NoError(t, strict.Close(t.Context())) }()
	_, err = strict.Exec(t.Context(), "SET afluente.strict_events = on")
	require.NoError(t, err)
	for name, tt := range tests {
		var id uuid.UUID
		const emit = "SELECT emit_event($1, NULL, NULL, $2, $3, $4)"
		require.NoError(t, b.pool.QueryRow(t.Context(), emit, tt.eventType, tt.payload, tt.metadata, b.organization).Scan(&id), name)
		got := b.event(t, id).SchemaFault
		err := strict.QueryRow(t.Context(), emit, tt.eventType, tt.payload, tt.metadata, b.organization).Scan(&id)
		if tt.want == "" {
			require.Nil(t, got, name)
			require.NoError(t, err, name)
			continue
		}
		require.NotNil(t, got, name)
		require.Contains(t, *got, tt.want, name)
		require.ErrorContains(t, err, tt.eventType+": "+*got, name)
	}
}

func TestWrongFieldOfATypedEventIsRefusedBeforeItIsSent(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	tests := map[string]struct {
		payload event.ContactBlocked
		want    string
	}{
		"value":         {event.ContactBlocked{Reason: "secret mood"}, `the field "reason" has none of the values`},
		"missing value": {event.ContactBlocked{}, `the field "reason" has none of the values`},
	}
	b.inTx(t, func(tx pgx.Tx) error {
		for name, tt := range tests {
			_, err := eventlog.Emit(t.Context(), tx, eventlog.Event[event.ContactBlocked]{OrganizationID: b.organization, Payload: tt.payload})
			require.ErrorIs(t, err, eventlog.ErrInvalidEvent, name)
			require.ErrorContains(t, err, tt.want, name)
			require.NotContains(t, err.Error(), "mood")
		}
		for _, id := range []string{"", "x", "{00000000-0000-4000-8000-000000000001}", "00000000000040008000000000000001"} {
			_, err := eventlog.Emit(t.Context(), tx, eventlog.Event[event.LeadAssigned]{
				OrganizationID: b.organization, Payload: event.LeadAssigned{ToOwnerID: id},
			})
			require.ErrorIs(t, err, eventlog.ErrInvalidEvent, id)
			require.ErrorContains(t, err, `the field "to_owner_id" is not a UUID`)
		}
		for _, version := range []string{"new", "1", "1.0", "0.1.0", "01.0.0", "1.10000.0"} {
			queued := b.queued("m")
			queued.Metadata.SchemaVersion = version
			_, err := eventlog.Emit(t.Context(), tx, queued)
			require.ErrorIs(t, err, eventlog.ErrInvalidEvent, version)
			require.ErrorContains(t, err, "metadata.schema_version: not of the form MAJOR.MINOR.PATCH")
		}
		_, err := eventlog.Emit(t.Context(), tx, eventlog.Event[event.LeadAssigned]{
			OrganizationID: b.organization, Payload: event.LeadAssigned{ToOwnerID: uuid.NewString()},
		})
		return err
	})
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM event_log WHERE schema_fault IS NULL AND metadata ->> 'schema_version' = '1.0.0'"))
}

// painted is a type that was of another shape in versions 1 and 2.
type painted struct {
	Colors []string `json:"colors"`
	Size   int64    `json:"size"`
}

func (painted) EventType() string     { return "test.painted" }
func (painted) SchemaVersion() string { return "3.1.0" }

func (painted) Upcasts() []func(map[string]json.RawMessage) error {
	return []func(map[string]json.RawMessage) error{
		func(payload map[string]json.RawMessage) error { // color was called colour
			payload["color"] = payload["colour"]
			return nil
		},
		func(payload map[string]json.RawMessage) error { // and there was only one
			payload["colors"] = json.RawMessage("[" + string(payload["color"]) + "]")
			return nil
		},
	}
}

type paintArgs struct {
	Painted painted `json:"painted"`
}

func (paintArgs) Kind() string { return "paint-worker" }

func TestConsumersSeeTheNewestShape(t *testing.T) {
	t.Parallel()
	b := newBus(t, eventlog.On(func(e eventlog.Event[painted]) paintArgs { return paintArgs{e.Payload} }, &worker[paintArgs]{}))
	want := `{"painted": {"size": 9007199254740993, "colors": ["red"]}}`
	for version, payload := range map[string]string{
		"":      `{"colour": "red", "size": 9007199254740993}`,
		"1.4.0": `{"colour": "red", "size": 9007199254740993}`,
		"2.0.0": `{"color": "red", "size": 9007199254740993}`,
		"3.0.0": `{"colors": ["red"], "size": 9007199254740993}`,
		"3.9.0": `{"colors": ["red"], "size": 9007199254740993, "new": 1}`,
	} {
		metadata := `{}`
		if version != "" {
			metadata = `{"schema_version": "` + version + `"}`
		}
		var id uuid.UUID
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT emit_event('test.painted', NULL, NULL, $1, $2, $3)", payload, metadata, b.organization).Scan(&id))
		drain(t, b.bridge)
		var args string
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT args::text FROM river.river_job WHERE metadata ->> 'event_id' = $1", id.String()).Scan(&args))
		require.Equal(t, want, args, version)
	}
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := eventlog.Emit(t.Context(), tx, eventlog.Event[painted]{OrganizationID: b.organization})
		return err
	})
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM event_log WHERE metadata ->> 'schema_version' = '3.1.0'"))
}

// An event of a version that is too new waits for a newer process; one that
// cannot be read at all is dead for its consumer at once.
func TestEventOfANewerVersionIsTriedAgain(t *testing.T) {
	t.Parallel()
	b := newBus(t, eventlog.On(func(e eventlog.Event[painted]) paintArgs { return paintArgs{e.Payload} }, &worker[paintArgs]{}))
	emit := func(version string) (id uuid.UUID) {
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT emit_event('test.painted', NULL, NULL, '{}', jsonb_build_object('schema_version', $1::text), $2)",
			version, b.organization).Scan(&id))
		return id
	}
	newer, broken := emit("4.0.0"), emit("four")
	drain(t, b.bridge)
	b.start(t)
	require.Contains(t, *b.awaitStatus(t, broken, "dead").LastError, "MAJOR.MINOR.PATCH")
	require.Equal(t, "cancelled", string(b.job(t, broken, "paint-worker").State))
	dead := b.awaitStatus(t, newer, "dead")
	require.Contains(t, *dead.LastError, "newer than this program")
	require.Equal(t, int16(eventlog.MaxAttemptsDefault), dead.Attempts)
}

// Processes of two versions may start in any order.
func TestOlderProcessDoesNotReplaceANewerSchema(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	require.NoError(t, eventlog.RegisterTypes(t.Context(), pool))
	exec(t, pool, "UPDATE event_types SET schema_version = '1.10.0', schema = '{}' WHERE event_type = 'lead.won'")
	exec(t, pool, "UPDATE event_types SET schema_version = '0.9.0', schema = '{}' WHERE event_type = 'lead.lost'")
	require.NoError(t, eventlog.RegisterTypes(t.Context(), pool))
	require.Equal(t, 1, count(t, pool, "SELECT count(*) FROM event_types WHERE schema = '{}' AND schema_version = '1.10.0' AND event_type = 'lead.won'"))
	require.Equal(t, len(event.All())-1, count(t, pool, "SELECT count(*) FROM event_types WHERE schema_version IN ('1.0.0', '1.1.0') AND schema <> '{}'"))
}

func TestCatalogNamesConsumersAndFields(t *testing.T) {
	t.Parallel()
	plan, err := eventlog.Compile(alpha(nil), beta(nil), anyEvent())
	require.NoError(t, err)
	entries, err := eventlog.Catalog(plan)
	require.NoError(t, err)
	require.Len(t, entries, len(event.All()))
	i := slices.IndexFunc(entries, func(e eventlog.TypeEntry) bool { return e.Type == "message.queued" })
	entry := entries[i]
	entry.Schema = nil
	require.Equal(t, eventlog.TypeEntry{
		Type: "message.queued", Version: "1.1.0",
		Description: "MessageQueued asks for one message to be sent. The application emits it in the transaction that writes the row in messages.",
		Fields: []eventlog.FieldEntry{
			{Name: "message_id", Type: "string", Required: true, Description: "MessageID is the id in messages."},
			{
				Name: "conversation_id", Type: "string (uuid)",
				Description: "ConversationID is that of the message. The messages of a conversation are sent in the order of their events; without it, in any order.",
			},
		},
		Consumers: []string{"alpha-worker", "beta-worker"},
	}, entry)
}
