package eventlog

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"afluente/db"
	"afluente/eventlog/event"
)

// TypeEntry is what the catalogue says of one event type, in its newest version.
type TypeEntry struct {
	Type        string
	Version     string // of the schema, MAJOR.MINOR.PATCH
	Description string
	Fields      []FieldEntry
	// Consumers are the plan's, those of every event left out.
	Consumers []string
	Schema    json.RawMessage // JSON Schema of the payload
}

// FieldEntry is one field of a payload.
type FieldEntry struct {
	Name        string
	Type        string // such as "string (uuid)"
	Required    bool
	Description string
}

// Catalog returns every event type of the package event, sorted.
func Catalog(plan *Plan) ([]TypeEntry, error) {
	schemas, err := loadSchemas()
	if err != nil {
		return nil, err
	}
	var entries []TypeEntry
	for i, s := range schemas {
		if i+1 < len(schemas) && schemas[i+1].Title == s.Title {
			continue // an older version
		}
		entry := TypeEntry{Type: s.Title, Version: s.Version, Description: s.Description, Schema: s.encoded}
		for _, field := range s.Properties.ordered {
			schema := s.Properties.byName[field]
			entry.Fields = append(entry.Fields, FieldEntry{
				Name:        field,
				Type:        schema.kind(),
				Required:    slices.Contains(s.Required, field),
				Description: schema.Description,
			})
		}
		for name, d := range plan.consumers() {
			if d.eventType == s.Title {
				entry.Consumers = append(entry.Consumers, name)
			}
		}
		slices.Sort(entry.Consumers)
		entries = append(entries, entry)
	}
	return entries, nil
}

// RegisterTypes makes the catalogue known to the database, which checks events
// by it. It never puts an older schema in the place of a newer one, so
// processes of different versions may call it in any order.
func RegisterTypes(ctx context.Context, conn db.DBTX) error {
	schemas, err := loadSchemas()
	if err != nil {
		return err
	}
	var params db.PutEventTypesParams
	for _, s := range schemas {
		checks := make(map[string]string)
		for _, name := range s.Properties.ordered {
			checks[name] = s.check(name, "$")
		}
		encoded, err := json.Marshal(checks)
		if err != nil {
			return fmt.Errorf("encode checks of %s: %w", s.Title, err)
		}
		params.EventTypes = append(params.EventTypes, s.Title)
		params.Majors = append(params.Majors, int32(s.major))
		params.SchemaVersions = append(params.SchemaVersions, s.Version)
		params.Schemas = append(params.Schemas, string(s.encoded))
		params.Predicates = append(params.Predicates, s.predicate("$"))
		params.Checks = append(params.Checks, string(encoded))
	}
	if err := db.New(conn).PutEventTypes(ctx, params); err != nil {
		return fmt.Errorf("register event types: %w", err)
	}
	return nil
}

// schema is the part of JSON Schema that the payloads use.
type schema struct {
	Title                string     `json:"title"`
	Version              string     `json:"version"`
	Description          string     `json:"description"`
	Type                 string     `json:"type"` // empty for anything
	Format               string     `json:"format"`
	Enum                 []string   `json:"enum"`
	Required             []string   `json:"required"`
	Properties           properties `json:"properties"`
	Items                *schema    `json:"items"`
	AdditionalProperties *schema    `json:"additionalProperties"` //nolint:tagliatelle // JSON Schema's name

	major   int
	encoded json.RawMessage
}

// UnmarshalJSON takes the schema true for one that says nothing.
func (s *schema) UnmarshalJSON(data []byte) error {
	if string(data) == "true" {
		*s = schema{}
		return nil
	}
	type plain schema
	return json.Unmarshal(data, (*plain)(s))
}

// properties keeps the order of the fields.
type properties struct {
	ordered []string
	byName  map[string]*schema
}

// UnmarshalJSON implements json.Unmarshaler.
func (p *properties) UnmarshalJSON(data []byte) error {
	if err := json.Unmarshal(data, &p.byName); err != nil {
		return err
	}
	decoder := json.NewDecoder(strings.NewReader(string(data)))
	if _, err := decoder.Token(); err != nil { // the brace
		return err
	}
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return err
		}
		p.ordered = append(p.ordered, fmt.Sprint(name))
		var skipped json.RawMessage
		if err := decoder.Decode(&skipped); err != nil {
			return err
		}
	}
	return nil
}

// loadSchemas returns the schemas of every type and major version, in order.
func loadSchemas() ([]*schema, error) {
	files, err := event.Schemas()
	if err != nil {
		return nil, fmt.Errorf("open schemas: %w", err)
	}
	names, err := fs.Glob(files, "*.json")
	if err != nil {
		return nil, fmt.Errorf("list schemas: %w", err)
	}
	schemas := make([]*schema, 0, len(names))
	for _, name := range names {
		encoded, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, fmt.Errorf("read schema: %w", err)
		}
		s := &schema{}
		if err := json.Unmarshal(encoded, s); err != nil {
			return nil, fmt.Errorf("decode schema %s: %w", name, err)
		}
		s.encoded = encoded
		if s.major, err = majorOf(s.Version); err != nil || name != fmt.Sprintf("%s.v%d.json", s.Title, s.major) {
			return nil, fmt.Errorf("schema %s: it is of %q, version %q", name, s.Title, s.Version)
		}
		schemas = append(schemas, s)
	}
	slices.SortFunc(schemas, func(a, b *schema) int {
		return cmp.Or(strings.Compare(a.Title, b.Title), cmp.Compare(a.major, b.major))
	})
	return schemas, nil
}

var errVersion = errors.New("not of the form MAJOR.MINOR.PATCH")

// majorOf returns the major version of a semantic version; none at all is 1.
// Each number has at most four digits, as event_schema_fault has it.
func majorOf(version string) (int, error) {
	if version == "" {
		return 1, nil
	}
	parts := strings.Split(version, ".")
	if len(parts) != 3 {
		return 0, errVersion
	}
	for _, part := range parts {
		if n, err := strconv.ParseUint(part, 10, 16); err != nil || n > 9999 || strconv.FormatUint(n, 10) != part {
			return 0, errVersion
		}
	}
	major, err := strconv.Atoi(parts[0])
	if major == 0 {
		err = errVersion
	}
	return major, err
}

// kind is what a field may hold, in words.
func (s *schema) kind() string {
	switch {
	case s.Type == "":
		return "any"
	case len(s.Enum) > 0:
		return strings.Join(s.Enum, " | ")
	case s.Format != "":
		return fmt.Sprintf("%s (%s)", s.Type, s.Format)
	case s.Items != nil:
		return fmt.Sprintf("%s of %s", s.Type, s.Items.kind())
	}
	return s.Type
}

// predicate is a jsonpath that is true for the values at a path that fit. Its
// lax mode looks into arrays for all but type(), so types come first.
func (s *schema) predicate(at string) string {
	var all []string
	switch s.Type {
	case "":
		return "1 == 1" // true is no predicate
	case "integer":
		all = []string{at + `.type() == "number"`, at + ".floor() == " + at, at + " >= -9223372036854775808", at + " <= 9223372036854775807"}
	default:
		all = []string{fmt.Sprintf("%s.type() == %q", at, s.Type)}
	}
	const (
		date   = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
		minute = "([01][0-9]|2[0-3]):[0-5][0-9]"
	)
	switch s.Format { // no stricter and no laxer than Go, but for the length of a month
	case "uuid":
		all = append(all, at+` like_regex "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"`)
	case "date":
		all = append(all, fmt.Sprintf(`%s like_regex "^%s$"`, at, date))
	case "date-time":
		all = append(all, fmt.Sprintf(`%s like_regex "^%sT%s:[0-5][0-9]([.][0-9]+)?(Z|[+-]%[3]s)$"`, at, date, minute))
	}
	if len(s.Enum) > 0 {
		values := make([]string, len(s.Enum))
		for i, value := range s.Enum {
			values[i] = fmt.Sprintf("%s == %q", at, value)
		}
		all = append(all, "("+strings.Join(values, " || ")+")")
	}
	for _, name := range s.Properties.ordered {
		all = append(all, "("+s.check(name, at)+")")
	}
	if s.Items != nil {
		all = append(all, s.Items.forEach(at+"[*]"))
	}
	if s.AdditionalProperties != nil {
		all = append(all, s.AdditionalProperties.forEach(at+".*"))
	}
	return strings.Join(all, " && ")
}

// forEach is a jsonpath that is true when all the values at a path fit.
func (s *schema) forEach(at string) string {
	kind := s.Type
	switch kind {
	case "":
		return s.predicate(at)
	case "integer":
		kind = "number"
	}
	return fmt.Sprintf("!exists(%s.type() ? (@ != %q)) && !exists(%[1]s ? (!(%[3]s)))", at, kind, s.predicate("@"))
}

// check is the predicate of one field of an object. One that is not required
// may be null, as it may be left out. A field that is not there has no type.
func (s *schema) check(name, at string) string {
	field := fmt.Sprintf("%s.%q", at, name)
	property := s.Properties.byName[name]
	fits := property.predicate(field)
	switch {
	case !slices.Contains(s.Required, name):
		return fmt.Sprintf("(%s) || !exists(%s) || %[2]s.type() == \"null\"", fits, field)
	case property.Type == "":
		return fmt.Sprintf("exists(%s)", field)
	}
	return fits
}
