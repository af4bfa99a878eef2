package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"afluente/eventlog"
)

func newCatalog() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "catalog",
		Short: "Print the catalogue of events as Markdown, or as JSON Schema",
		Args:  usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			plan, err := compilePlan()
			if err != nil {
				return err
			}
			entries, err := eventlog.Catalog(plan)
			if err != nil {
				return err
			}
			if asJSON {
				schemas := make(map[string]json.RawMessage, len(entries))
				for _, entry := range entries {
					schemas[entry.Type] = entry.Schema
				}
				return printJSON(cmd.OutOrStdout(), schemas)
			}
			return printCatalog(cmd.OutOrStdout(), entries, consumersOfAll(plan))
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON Schema for each event type")
	return cmd
}

// consumersOfAll returns the consumers that get every event.
func consumersOfAll(plan *eventlog.Plan) []string {
	var names []string
	for _, entry := range plan.Entries() {
		if entry.Trigger == "event *" {
			names = append(names, entry.Job)
		}
	}
	return names
}

func printCatalog(w io.Writer, entries []eventlog.TypeEntry, ofAll []string) error {
	var page strings.Builder
	fmt.Fprintf(&page, `# Events

%d event types. Written from the types in this folder by `+"`afluente catalog`"+`; the JSON Schemas are in [schema](schema).
A field with * is always there. Every event goes to %s too.
`, len(entries), strings.Join(ofAll, ", "))
	subject := ""
	for _, entry := range entries {
		if s, _, _ := strings.Cut(entry.Type, "."); s != subject {
			subject = s
			fmt.Fprintf(&page, "\n## %s\n", subject)
		}
		fmt.Fprintf(&page, "\n### %s\n\nVersion %s. %s\n", entry.Type, entry.Version, withoutName(entry.Description))
		if len(entry.Consumers) > 0 {
			fmt.Fprintf(&page, "Consumed by %s.\n", strings.Join(entry.Consumers, ", "))
		}
		if len(entry.Fields) == 0 {
			continue
		}
		page.WriteString("\n| field | type | |\n|---|---|---|\n")
		for _, field := range entry.Fields {
			name := field.Name
			if field.Required {
				name += " *"
			}
			fmt.Fprintf(&page, "| %s | %s | %s |\n", name, strings.ReplaceAll(field.Type, " | ", ", "), withoutName(field.Description))
		}
	}
	_, err := io.WriteString(w, page.String())
	return err
}

// withoutName is a doc comment without the name that it begins with.
func withoutName(comment string) string {
	_, text, _ := strings.Cut(comment, " ")
	text = strings.TrimPrefix(text, "is ")
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + text[1:]
}
