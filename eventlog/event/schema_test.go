package event_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/invopop/jsonschema"
	"github.com/stretchr/testify/require"

	"afluente/eventlog/event"
)

var update = flag.Bool("update", false, "write schema/ anew from the types")

const schemaDir = "schema"

// TestSchemasAreThoseOfTheTypes compares each type with its committed schema.
// With -update it writes what is new and compatible; it never writes over a
// schema that consumers may rely on.
func TestSchemasAreThoseOfTheTypes(t *testing.T) {
	t.Parallel()
	reflector := &jsonschema.Reflector{Anonymous: true, DoNotReference: true, AllowAdditionalProperties: true}
	require.NoError(t, reflector.AddGoComments("afluente/eventlog/event", ".", jsonschema.WithFullComment()))
	expected := make(map[string]bool)
	for _, payload := range event.All() {
		current := encodeSchema(t, reflector, payload)
		version := versionOf(payload)
		major, _, _ := strings.Cut(version, ".")
		for older, err := strconv.Atoi(major); err == nil && older > 0; older-- {
			expected[fmt.Sprintf("%s.v%d.json", payload.EventType(), older)] = true
		}
		path := filepath.Join(schemaDir, fmt.Sprintf("%s.v%s.json", payload.EventType(), major))
		committed, err := os.ReadFile(path)
		switch {
		case os.IsNotExist(err) && *update:
			require.NoError(t, os.WriteFile(path, current, 0o644))
		case os.IsNotExist(err):
			t.Errorf("%s has no schema yet: go test ./eventlog/event -update", payload.EventType())
		case err != nil:
			t.Error(err)
		case bytes.Equal(committed, current):
		default:
			if fault := compare(t, committed, current); fault != "" {
				t.Errorf("%s: %s", payload.EventType(), fault)
			} else if *update {
				require.NoError(t, os.WriteFile(path, current, 0o644))
			} else {
				t.Errorf("%s: the schema is stale: go test ./eventlog/event -update", payload.EventType())
			}
		}
	}
	files, err := os.ReadDir(schemaDir)
	require.NoError(t, err)
	for _, file := range files {
		require.True(t, expected[file.Name()], "schema/%s belongs to no type: an event that was emitted once stays readable", file.Name())
		delete(expected, file.Name())
	}
	require.Empty(t, expected, "the schema of an older major version is gone")
}

func versionOf(payload event.Payload) string {
	if versioned, ok := payload.(interface{ SchemaVersion() string }); ok {
		return versioned.SchemaVersion()
	}
	return "1.0.0"
}

func encodeSchema(t *testing.T, reflector *jsonschema.Reflector, payload event.Payload) []byte {
	t.Helper()
	schema := reflector.ReflectFromType(reflect.TypeOf(payload))
	version := versionOf(payload)
	major, _, _ := strings.Cut(version, ".")
	schema.ID = jsonschema.ID("urn:afluente:event:" + payload.EventType() + ":" + major)
	schema.Title = payload.EventType()
	schema.Extras = map[string]any{"version": version}
	schema.Description = strings.Join(strings.Fields(schema.Description), " ")
	for field := schema.Properties.Oldest(); field != nil; field = field.Next() {
		field.Value.Description = strings.Join(strings.Fields(field.Value.Description), " ")
	}
	encoded, err := json.MarshalIndent(schema, "", "  ")
	require.NoError(t, err)
	return append(encoded, '\n')
}

// compare returns why a schema may not take the place of the committed one,
// or nothing.
func compare(t *testing.T, committed, current []byte) string {
	t.Helper()
	older, newer := decodeSchema(t, committed), decodeSchema(t, current)
	from, to := fmt.Sprint(older["version"]), fmt.Sprint(newer["version"])
	if breaks := incompatible("payload", older, newer); len(breaks) > 0 {
		major, _, _ := strings.Cut(from, ".")
		next, err := strconv.Atoi(major)
		require.NoError(t, err)
		return fmt.Sprintf("%s: readers of version %s would break, so this needs a new major version: "+
			"let SchemaVersion return \"%d.0.0\" and add an upcast from %s", strings.Join(breaks, "; "), from, next+1, major)
	}
	oldMinor, newMinor := minorOf(t, from), minorOf(t, to)
	switch {
	case newMinor < oldMinor:
		return fmt.Sprintf("its version %s is older than the committed %s", to, from)
	case newMinor == oldMinor && !reflect.DeepEqual(bare(older), bare(newer)):
		return fmt.Sprintf("the schema has grown, so its version %s must: let SchemaVersion return the next minor version", from)
	}
	return ""
}

// minorOf returns the second number of a version.
func minorOf(t *testing.T, version string) int {
	t.Helper()
	parts := strings.Split(version, ".")
	require.Len(t, parts, 3, version)
	minor, err := strconv.Atoi(parts[1])
	require.NoError(t, err, version)
	return minor
}

func decodeSchema(t *testing.T, encoded []byte) map[string]any {
	t.Helper()
	var schema map[string]any
	require.NoError(t, json.Unmarshal(encoded, &schema))
	return schema
}

// bare is a schema without what says nothing about a payload.
func bare(schema any) any {
	switch schema := schema.(type) {
	case map[string]any:
		rest := make(map[string]any)
		for key, value := range schema {
			if text, ok := value.(string); ok && text != "" && (key == "description" || key == "version") {
				continue
			}
			rest[key] = bare(value)
		}
		return rest
	case []any:
		rest := make([]any, len(schema))
		for i, value := range schema {
			rest[i] = bare(value)
		}
		return rest
	}
	return schema
}

// incompatible returns in what a payload that newer describes would surprise
// who reads it by older, or one that older describes would not fit newer.
func incompatible(path string, older, newer map[string]any) []string {
	var breaks []string
	for _, keyword := range []string{"type", "format", "pattern"} {
		if !reflect.DeepEqual(older[keyword], newer[keyword]) {
			breaks = append(breaks, fmt.Sprintf("%s changes its %s from %v to %v", path, keyword, or(older[keyword]), or(newer[keyword])))
		}
	}
	oldEnum, newEnum := list(older["enum"]), list(newer["enum"])
	if len(oldEnum) == 0 != (len(newEnum) == 0) {
		breaks = append(breaks, fmt.Sprintf("%s changes its values from %v to %v", path, or(older["enum"]), or(newer["enum"])))
	}
	for _, value := range oldEnum {
		if len(newEnum) > 0 && !slices.Contains(newEnum, value) {
			breaks = append(breaks, fmt.Sprintf("%s may not be %v any more", path, value))
		}
	}
	for _, value := range newEnum {
		if len(oldEnum) > 0 && !slices.Contains(oldEnum, value) {
			breaks = append(breaks, fmt.Sprintf("%s may be %v, which older readers do not know", path, value))
		}
	}
	required := list(older["required"])
	for _, name := range list(newer["required"]) {
		if !slices.Contains(required, name) {
			breaks = append(breaks, fmt.Sprintf("%s.%v becomes required", path, name))
		}
	}
	for _, name := range required {
		if !slices.Contains(list(newer["required"]), name) {
			breaks = append(breaks, fmt.Sprintf("%s.%v is no longer required", path, name))
		}
	}
	oldFields, newFields := object(older["properties"]), object(newer["properties"])
	for name, field := range oldFields {
		if _, ok := newFields[name]; !ok {
			breaks = append(breaks, fmt.Sprintf("%s.%s is gone", path, name))
			continue
		}
		breaks = append(breaks, incompatible(path+"."+name, object(field), object(newFields[name]))...)
	}
	for _, keyword := range []string{"items", "additionalProperties"} {
		if older[keyword] == nil && newer[keyword] == nil {
			continue
		}
		breaks = append(breaks, incompatible(path+"."+keyword, object(older[keyword]), object(newer[keyword]))...)
	}
	slices.Sort(breaks)
	return slices.Compact(breaks)
}

func or(value any) any {
	if value == nil {
		return "none"
	}
	return value
}

func list(value any) []any {
	values, _ := value.([]any)
	return values
}

func object(value any) map[string]any {
	fields, _ := value.(map[string]any)
	return fields
}

func TestBreakingChangesAreFound(t *testing.T) {
	t.Parallel()
	const committed = `{"version": "1.2.0", "type": "object", "required": ["a", "e"], "properties": {
		"a": {"type": "string", "format": "uuid"}, "b": {"type": "integer"}, "e": {"type": "string", "enum": ["x", "y"]},
		"l": {"type": "array", "items": {"type": "string"}}, "m": {"type": "object", "additionalProperties": {"type": "object", "properties": {"n": {}}}}}}`
	tests := map[string]struct{ from, to, want string }{
		"nothing":              {`"b"`, `"b"`, ""},
		"other description":    {`"type": "integer"`, `"type": "integer", "description": "x"`, ""},
		"removed":              {`"b": {"type": "integer"}, `, ``, "payload.b is gone"},
		"renamed":              {`"b": {`, `"c": {`, "payload.b is gone"},
		"retyped":              {`"type": "integer"`, `"type": "number"`, "payload.b changes its type from integer to number"},
		"newly required":       {`["a", "e"]`, `["a", "e", "b"]`, "payload.b becomes required"},
		"no longer required":   {`["a", "e"]`, `["a"]`, "payload.e is no longer required"},
		"other format":         {`"format": "uuid"`, `"format": "uri"`, "payload.a changes its format from uuid to uri"},
		"value removed":        {`["x", "y"]`, `["x"]`, "payload.e may not be y any more"},
		"value added":          {`["x", "y"]`, `["x", "y", "z"]`, "payload.e may be z"},
		"values no longer set": {`, "enum": ["x", "y"]`, ``, "payload.e changes its values"},
		"other items":          {`"items": {"type": "string"}`, `"items": {"type": "integer"}`, "payload.l.items changes its type"},
		"removed deep down":    {`{"n": {}}`, `{}`, "payload.m.additionalProperties.n is gone"},
		"added and required":   {`["a", "e"], "properties": {`, `["a", "e", "z"], "properties": {"z": {}, `, "payload.z becomes required"},
		"added":                {`"properties": {"n"`, `"properties": {"o": {}, "n"`, "the schema has grown, so its version 1.2.0 must"},
		"added, new version":   {`1.2.0", "type": "object", "required": ["a", "e"], "properties": {`, `1.3.0", "type": "object", "required": ["a", "e"], "properties": {"z": {}, `, ""},
		"added, new patch":     {`1.2.0", "type": "object", "required": ["a", "e"], "properties": {`, `1.2.1", "type": "object", "required": ["a", "e"], "properties": {"z": {}, `, "the schema has grown"},
		"older version":        {`"version": "1.2.0"`, `"version": "1.1.0"`, "its version 1.1.0 is older than the committed 1.2.0"},
		"description as field": {`"properties": {"n"`, `"properties": {"description": {}, "n"`, "the schema has grown"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, 1, strings.Count(committed, tt.from))
			fault := compare(t, []byte(committed), []byte(strings.Replace(committed, tt.from, tt.to, 1)))
			if tt.want == "" {
				require.Empty(t, fault)
				return
			}
			require.Contains(t, fault, tt.want)
			if strings.HasPrefix(tt.want, "payload.") {
				require.Contains(t, fault, `needs a new major version: let SchemaVersion return "2.0.0"`)
			}
		})
	}
}

func TestAllNamesEachTypeOnceInOrder(t *testing.T) {
	t.Parallel()
	types := make([]string, 0, len(event.All()))
	for _, payload := range event.All() {
		types = append(types, payload.EventType())
	}
	require.True(t, slices.IsSorted(types))
	require.Equal(t, types, slices.Compact(slices.Clone(types)))

	// Each type with an EventType in this package's files is in All.
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	declared := 0
	for _, file := range files {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		if !strings.HasSuffix(file, "_test.go") {
			declared += strings.Count(string(source), ") EventType() string {")
		}
	}
	require.Equal(t, declared, len(types)+1, "all but Any")
}

func TestUpcastsLeadToTheNewestVersion(t *testing.T) {
	t.Parallel()
	for _, payload := range event.All() {
		major, err := strconv.Atoi(strings.SplitN(versionOf(payload), ".", 2)[0])
		require.NoError(t, err)
		upcasts := 0
		if old, ok := payload.(interface {
			Upcasts() []func(map[string]json.RawMessage) error
		}); ok {
			upcasts = len(old.Upcasts())
		}
		require.Equal(t, major-1, upcasts, payload.EventType())
	}
}
