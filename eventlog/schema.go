package eventlog

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/google/uuid"
)

// versioned is a payload whose schema is not at version 1.0.0.
type versioned interface{ SchemaVersion() string }

// upcast is a payload that was of another shape in older major versions.
// Element i turns the payload of major version i+1 into that of i+2.
type upcast interface {
	Upcasts() []func(map[string]json.RawMessage) error
}

func schemaVersion(payload Payload) string {
	if v, ok := payload.(versioned); ok {
		return v.SchemaVersion()
	}
	return "1.0.0"
}

// errNewer is the error for an event whose major version this program is too
// old to read. A newer process may read it.
var errNewer = errors.New("newer than this program")

// toNewest returns the payload of an event of a schema version in the shape of
// the type's own version.
func toNewest(payload Payload, version string, encoded json.RawMessage) (json.RawMessage, error) {
	want, err := majorOf(schemaVersion(payload))
	if err != nil {
		return nil, fmt.Errorf("schema version of the type: %w", err)
	}
	major, err := majorOf(version)
	if err != nil {
		return nil, fmt.Errorf("metadata.schema_version: %w", err)
	}
	switch {
	case major == want:
		return encoded, nil
	case major > want:
		return nil, fmt.Errorf("schema version %s: %w", version, errNewer)
	}
	old, ok := payload.(upcast)
	if !ok || len(old.Upcasts()) != want-1 {
		return nil, fmt.Errorf("schema version %s: no upcast to %d", version, want)
	}
	fields := make(map[string]json.RawMessage)
	if err := json.Unmarshal(encoded, &fields); err != nil {
		return nil, err
	}
	for i, step := range old.Upcasts()[major-1:] {
		if err := step(fields); err != nil {
			return nil, fmt.Errorf("upcast from version %d: %w", major+i, err)
		}
	}
	return json.Marshal(fields)
}

// fieldsOf returns the names that a payload's fields have in JSON.
func fieldsOf(payload Payload) []string {
	t := reflect.TypeOf(payload)
	if t.Kind() != reflect.Struct {
		return nil
	}
	var names []string
	for field := range t.Fields() {
		if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// checkTags returns an error that names the field of a payload which is not of
// the format or the values in its tag jsonschema. It runs for each event, so it
// looks at no more of a tag than it needs.
func checkTags(payload Payload) error {
	value := reflect.ValueOf(payload)
	if value.Kind() != reflect.Struct {
		return nil
	}
	for i := range value.NumField() {
		if value.Field(i).Kind() != reflect.String {
			continue
		}
		field := value.Type().Field(i)
		_, rules, tagged := strings.Cut(string(field.Tag), `jsonschema:"`)
		if !tagged {
			continue
		}
		rules, _, _ = strings.Cut(rules, `"`)
		text := value.Field(i).String()
		if reason := breaks(text, rules); reason != "" {
			name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
			if text == "" && options == "omitempty" {
				continue
			}
			return fmt.Errorf("the field %q %s", name, reason)
		}
	}
	return nil
}

// breaks returns in what a text breaks the rules of a tag, or nothing.
func breaks(text, rules string) string {
	enum, found := false, false
	for rules != "" {
		var rule string
		rule, rules, _ = strings.Cut(rules, ",")
		if value, ok := strings.CutPrefix(rule, "enum="); ok {
			enum = true
			found = found || text == value
			continue
		}
		switch {
		case rule == "format=uuid" && (len(text) != 36 || uuid.Validate(text) != nil):
			return "is not a UUID"
		case rule == "format=date" && !isDate(text):
			return "is not a date"
		}
	}
	if enum && !found {
		return "has none of the values in its schema"
	}
	return ""
}

func isDate(text string) bool {
	_, err := time.Parse(time.DateOnly, text)
	return err == nil
}
