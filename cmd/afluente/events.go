package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"afluente/db"
)

func newEvents(load func() (Config, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Look at events",
		Args:  usage(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newEventsList(load), newEventsRestore(load), newEventsShow(load), newEventsTail(load), newEventsTrace(load))
	return cmd
}

// eventView is an event as it is printed.
type eventView struct {
	ID             uuid.UUID       `json:"id"`
	Type           string          `json:"event_type"`
	OrganizationID uuid.UUID       `json:"organization_id"`
	EntityKind     string          `json:"entity_kind"`
	EntityID       *uuid.UUID      `json:"entity_id"`
	Status         string          `json:"status"`
	Consumers      []string        `json:"consumers"`
	ConsumedBy     []string        `json:"consumed_by"`
	DeadConsumers  []string        `json:"dead_consumers"`
	Attempts       int16           `json:"attempts"`
	LastError      *string         `json:"last_error"`
	NextAttemptAt  *time.Time      `json:"next_attempt_at"`
	CreatedAt      time.Time       `json:"created_at"`
	UpdatedAt      *time.Time      `json:"updated_at,omitempty"`
	Payload        json.RawMessage `json:"payload,omitempty"`
	Metadata       json.RawMessage `json:"metadata,omitempty"`
	SchemaFault    *string         `json:"schema_fault,omitempty"`
	Jobs           []jobView       `json:"jobs,omitempty"`
}

type jobView struct {
	ID          int64      `json:"id"`
	Kind        string     `json:"kind"`
	Queue       string     `json:"queue"`
	State       string     `json:"state"`
	Attempt     int16      `json:"attempt"`
	MaxAttempts int16      `json:"max_attempts"`
	ScheduledAt time.Time  `json:"scheduled_at"`
	FinalizedAt *time.Time `json:"finalized_at"`
	LastError   string     `json:"last_error"`
}

func newEventsList(load func() (Config, error)) *cobra.Command {
	var status, eventType, organization string
	var limit int32
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List events, newest first",
		Args:  usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			params := db.ListEventsParams{MaxEvents: limit}
			var mistakes []error
			if limit < 1 {
				mistakes = append(mistakes, fmt.Errorf("--limit %d is not positive", limit))
			}
			switch status {
			case "":
			case "pending", "processing", "done", "dead":
				params.Status = &status
			default:
				mistakes = append(mistakes, fmt.Errorf("--status %q is not pending, processing, done or dead", status))
			}
			if eventType != "" {
				params.EventType = &eventType
			}
			if organization != "" {
				id := parseUUID("--org", organization, &mistakes)
				params.OrganizationID = &id
			}
			if len(mistakes) > 0 {
				return &usageError{errors.Join(mistakes...)}
			}
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				rows, err := db.New(pool).ListEvents(cmd.Context(), params)
				if err != nil {
					return fmt.Errorf("list events: %w", err)
				}
				return printEvents(cmd.OutOrStdout(), rows, asJSON)
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&status, "status", "", "pending, processing, done or dead")
	flags.StringVar(&eventType, "type", "", "event type")
	flags.StringVar(&organization, "org", "", "organization, a UUID")
	flags.Int32Var(&limit, "limit", 50, "the most events to list")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printEvents(w io.Writer, rows []db.ListEventsRow, asJSON bool) error {
	views := make([]eventView, len(rows))
	table := make([][]string, len(rows))
	for i, row := range rows {
		views[i] = eventView{
			ID:             row.ID,
			Type:           row.EventType,
			OrganizationID: row.OrganizationID,
			EntityKind:     row.EntityKind,
			EntityID:       row.EntityID,
			Status:         row.Status,
			Consumers:      row.Consumers,
			ConsumedBy:     row.ConsumedBy,
			DeadConsumers:  row.DeadConsumers,
			Attempts:       row.Attempts,
			LastError:      row.LastError,
			NextAttemptAt:  row.NextAttemptAt,
			CreatedAt:      row.CreatedAt.UTC(),
		}
		table[i] = []string{
			row.CreatedAt.UTC().Format(time.RFC3339),
			row.ID.String(),
			row.EventType,
			row.Status,
			fmt.Sprintf("%d/%d", len(row.ConsumedBy), len(row.Consumers)),
			fmt.Sprint(row.Attempts),
			oneLine(row.LastError, 60),
		}
	}
	if asJSON {
		return printJSON(w, views)
	}
	return printTable(w, []string{"CREATED", "ID", "TYPE", "STATUS", "CONSUMED", "ATTEMPTS", "LAST ERROR"}, table)
}

func newEventsShow(load func() (Config, error)) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show one event with its consumers, jobs, attempts and errors",
		Args:  usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := uuid.Parse(args[0])
			if err != nil {
				return &usageError{fmt.Errorf("%q is not a UUID", args[0])}
			}
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				view, err := getEvent(cmd.Context(), pool, id)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), view)
				}
				return printEvent(cmd.OutOrStdout(), view)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func getEvent(ctx context.Context, pool *pgxpool.Pool, id uuid.UUID) (eventView, error) {
	queries := db.New(pool)
	event, err := queries.GetEvent(ctx, id)
	if errors.Is(err, pgx.ErrNoRows) {
		return eventView{}, fmt.Errorf("no event %s", id)
	} else if err != nil {
		return eventView{}, fmt.Errorf("get event %s: %w", id, err)
	}
	jobs, err := queries.ListEventJobs(ctx, id.String())
	if err != nil {
		return eventView{}, fmt.Errorf("list jobs of event %s: %w", id, err)
	}
	updatedAt := event.UpdatedAt.UTC()
	view := eventView{
		ID:             event.ID,
		Type:           event.EventType,
		OrganizationID: event.OrganizationID,
		EntityKind:     event.EntityKind,
		EntityID:       event.EntityID,
		Status:         event.Status,
		Consumers:      event.Consumers,
		ConsumedBy:     event.ConsumedBy,
		DeadConsumers:  event.DeadConsumers,
		Attempts:       event.Attempts,
		LastError:      event.LastError,
		NextAttemptAt:  event.NextAttemptAt,
		CreatedAt:      event.CreatedAt.UTC(),
		UpdatedAt:      &updatedAt,
		Payload:        event.Payload,
		Metadata:       event.Metadata,
		SchemaFault:    event.SchemaFault,
	}
	for _, job := range jobs {
		view.Jobs = append(view.Jobs, jobView{
			ID:          job.ID,
			Kind:        job.Kind,
			Queue:       job.Queue,
			State:       string(job.State),
			Attempt:     job.Attempt,
			MaxAttempts: job.MaxAttempts,
			ScheduledAt: job.ScheduledAt.UTC(),
			FinalizedAt: job.FinalizedAt,
			LastError:   job.LastError,
		})
	}
	return view, nil
}

func printEvent(w io.Writer, e eventView) error {
	list := func(names []string) string {
		if len(names) == 0 {
			return "-"
		}
		return strings.Join(names, ", ")
	}
	rows := [][]string{
		{"type", e.Type},
		{"status", e.Status},
		{"organization", e.OrganizationID.String()},
		{"entity", e.EntityKind},
		{"created", e.CreatedAt.Format(time.RFC3339Nano)},
		{"updated", e.UpdatedAt.Format(time.RFC3339Nano)},
		{"consumers", list(e.Consumers)},
		{"consumed by", list(e.ConsumedBy)},
		{"dead", list(e.DeadConsumers)},
		{"attempts", fmt.Sprint(e.Attempts)},
		{"last error", oneLine(e.LastError, 500)},
		{"payload", string(e.Payload)},
		{"metadata", string(e.Metadata)},
		{"schema fault", oneLine(e.SchemaFault, 500)},
	}
	if e.EntityID != nil {
		rows[3][1] += " " + e.EntityID.String()
	}
	if e.NextAttemptAt != nil {
		rows = append(rows, []string{"next attempt", e.NextAttemptAt.UTC().Format(time.RFC3339)})
	}
	if err := printTable(w, []string{"id", e.ID.String()}, rows); err != nil {
		return err
	}
	if len(e.Jobs) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	jobs := make([][]string, len(e.Jobs))
	for i, job := range e.Jobs {
		jobs[i] = []string{
			fmt.Sprint(job.ID), job.Kind, job.Queue, job.State,
			fmt.Sprintf("%d/%d", job.Attempt, job.MaxAttempts), oneLine(&job.LastError, 200),
		}
	}
	return printTable(w, []string{"JOB", "KIND", "QUEUE", "STATE", "ATTEMPT", "LAST ERROR"}, jobs)
}

// oneLine is a text as a table takes it: "-" for none, and not too long.
func oneLine(text *string, limit int) string {
	if text == nil || *text == "" {
		return "-"
	}
	runes := []rune(strings.Join(strings.Fields(*text), " "))
	if len(runes) > limit {
		return string(runes[:limit-1]) + "…"
	}
	return string(runes)
}
