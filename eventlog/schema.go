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

// checkTags returns an error that names the field of a payload which is not of
// the format or the values in its tag jsonschema.
func checkTags(payload Payload) error {
	value := reflect.ValueOf(payload)
	if value.Kind() != reflect.Struct {
		return nil
	}
	for i := range value.NumField() {
		field := value.Type().Field(i)
		tag := field.Tag.Get("jsonschema")
		if tag == "" || field.Type.Kind() != reflect.String {
			continue
		}
		text := value.Field(i).String()
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		if text == "" && options == "omitempty" {
			continue
		}
		enum, found := false, false
		for rule := range strings.SplitSeq(tag, ",") {
			key, want, _ := strings.Cut(rule, "=")
			switch {
			case key == "enum":
				enum = true
				found = found || text == want
			case rule == "format=uuid" && (len(text) != 36 || uuid.Validate(text) != nil):
				return fmt.Errorf("the field %q is not a UUID", name)
			case rule == "format=date" && !isDate(text):
				return fmt.Errorf("the field %q is not a date", name)
			}
		}
		if enum && !found {
			return fmt.Errorf("the field %q has none of the values in its schema", name)
		}
	}
	return nil
}

func isDate(text string) bool {
	_, err := time.Parse(time.DateOnly, text)
	return err == nil
}
