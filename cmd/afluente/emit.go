package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"afluente/eventlog"
)

func newEmit(load func() (Config, error)) *cobra.Command {
	var organization, kind, id, payload, metadata, at string
	cmd := &cobra.Command{
		Use:   "emit TYPE",
		Short: "Write one event and print its id",
		Long: `Write one event and print its id.

A value of --payload or --metadata that begins with @ names a file; @- is the
standard input. With an idempotency_key in the metadata that the organization
used before, the first event's id is printed and nothing is written.`,
		Example: `  afluente emit message.queued --org 00000000-0000-4000-8000-000000000001 \
    --payload '{"message_id": "00000000-0000-4000-8000-000000000009"}'`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			event := eventlog.RawEvent{Type: args[0], EntityKind: kind}
			var mistakes []error
			event.OrganizationID = parseUUID("--org", organization, &mistakes)
			if id != "" {
				event.EntityID = parseUUID("--id", id, &mistakes)
			}
			event.Payload = readJSON("--payload", payload, cmd.InOrStdin(), &mistakes)
			event.Metadata = readJSON("--metadata", metadata, cmd.InOrStdin(), &mistakes)
			if at != "" {
				var err error
				if event.At, err = time.Parse(time.RFC3339, at); err != nil {
					mistakes = append(mistakes, fmt.Errorf("--at %q is not a time such as 2026-12-31T08:00:00Z", at))
				}
			}
			if len(mistakes) > 0 {
				return &usageError{errors.Join(mistakes...)}
			}
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				var eventID uuid.UUID
				err := pgx.BeginFunc(cmd.Context(), pool, func(tx pgx.Tx) (err error) {
					eventID, err = eventlog.EmitRaw(cmd.Context(), tx, event)
					return err
				})
				if err != nil {
					return err
				}
				_, err = fmt.Fprintln(cmd.OutOrStdout(), eventID)
				return err
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&organization, "org", "", "organization, a UUID (required)")
	flags.StringVar(&kind, "kind", "", "what the event is about; the type up to its dot by default")
	flags.StringVar(&id, "id", "", "the entity's UUID")
	flags.StringVar(&payload, "payload", "{}", "payload, a JSON object")
	flags.StringVar(&metadata, "metadata", "{}", "metadata, a JSON object")
	flags.StringVar(&at, "at", "", "do not fan the event out before this time (RFC 3339)")
	return cmd
}

func parseUUID(name, value string, mistakes *[]error) uuid.UUID {
	id, err := uuid.Parse(value)
	if err != nil {
		*mistakes = append(*mistakes, fmt.Errorf("%s %q is not a UUID", name, value))
	}
	return id
}

// readJSON returns the value of a flag, or the file that it names.
func readJSON(name, value string, stdin io.Reader, mistakes *[]error) json.RawMessage {
	content, err := readValue(value, stdin)
	if err == nil && !json.Valid(content) {
		err = errors.New("it is not JSON")
	}
	if err != nil {
		*mistakes = append(*mistakes, fmt.Errorf("read %s: %w", name, err))
	}
	return bytes.TrimSpace(content)
}

// readValue returns a value, or what is in the file that it names.
func readValue(value string, stdin io.Reader) ([]byte, error) {
	path, ok := strings.CutPrefix(value, "@")
	switch {
	case !ok:
		return []byte(value), nil
	case path == "-":
		return io.ReadAll(stdin)
	default:
		return os.ReadFile(path)
	}
}
