package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"afluente/eventlog"
	"afluente/jobs/archive"
)

func newReplay(load func() (Config, error)) *cobra.Command {
	var filter eventlog.ReplayFilter
	var organization, since, until string
	var perSecond int
	var archived, dryRun, asJSON bool
	cmd := &cobra.Command{
		Use:   "replay",
		Short: "Send stored events to a consumer that never had them",
		Long: `Send stored events to a consumer that never had them: a new one, or one whose
dead letters were discarded. What it has consumed, or has a job for, is left
out, so that running the command again, also after it was stopped, sends nothing
twice.

The jobs go behind all other work of their queue and carry the tag replay.
Events that were archived come along with --archived, which first restores the
days in question, as 'afluente events restore' does.`,
		Example: `  afluente replay --consumer lead-greeting-worker --since 2026-11-01 --dry-run
  afluente replay --consumer lead-greeting-worker --since 2026-01-01 --archived --rate 200`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, now := cmd.Context(), time.Now()
			var mistakes []error
			if filter.Consumer == "" {
				mistakes = append(mistakes, errors.New("--consumer is required"))
			}
			if since == "" {
				mistakes = append(mistakes, errors.New("--since is required"))
			}
			filter.Since = parseTime("--since", since, now, &mistakes)
			if filter.Until = parseTime("--until", until, now, &mistakes); filter.Until.IsZero() {
				filter.Until = now
			}
			if organization != "" {
				filter.OrganizationID = parseUUID("--org", organization, &mistakes)
			}
			checkRate(perSecond, &mistakes)
			if archived && dryRun {
				mistakes = append(mistakes, errors.New("--dry-run cannot count what is archived: leave --archived out, or restore the days first"))
			}
			if len(mistakes) > 0 {
				return &usageError{errors.Join(mistakes...)}
			}
			config, err := load()
			if err != nil {
				return err
			}
			return withPool(ctx, load, func(pool *pgxpool.Pool) error {
				bridge, err := newReplayBridge(pool)
				if err != nil {
					return err
				}
				if archived {
					if err := restoreDays(ctx, cmd.ErrOrStderr(), newArchive(config, pool), filter.Since, filter.Until); err != nil {
						return err
					}
				}
				var moved eventlog.Moved
				if dryRun {
					moved.Found, err = bridge.CountReplay(ctx, filter)
				} else {
					moved, err = bridge.Replay(ctx, filter, eventlog.Pace{Rate: perSecond, Progress: progress(cmd.ErrOrStderr(), "sent")})
				}
				if errors.Is(err, eventlog.ErrNoConsumer) {
					return fmt.Errorf("%w; 'afluente plan' lists those of this version, which a process of it registers at its start", err)
				}
				switch {
				case asJSON:
					return errors.Join(err, printJSON(cmd.OutOrStdout(), moved))
				case dryRun && err == nil:
					fmt.Fprintf(cmd.OutOrStdout(), "%d would be sent\n", moved.Found)
				case !dryRun:
					fmt.Fprintf(cmd.OutOrStdout(), "%d sent\n", moved.Moved)
				}
				return err
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&filter.Consumer, "consumer", "", "who gets the events (required)")
	flags.StringVar(&filter.EventType, "type", "", "one of its event types; all of them by default")
	flags.StringVar(&organization, "org", "", "organization, a UUID")
	flags.StringVar(&since, "since", "", "made at this time or later: RFC 3339, a day, or how long ago, such as 2h (required)")
	flags.StringVar(&until, "until", "", "made before this time; now by default")
	rateFlag(flags, &perSecond)
	flags.BoolVar(&archived, "archived", false, "restore the days from the archive first")
	flags.BoolVar(&dryRun, "dry-run", false, "only count")
	flags.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// newReplayBridge returns a bridge that makes the args of this version's jobs.
func newReplayBridge(pool *pgxpool.Pool) (*eventlog.Bridge, error) {
	plan, err := compilePlan()
	if err != nil {
		return nil, err
	}
	return eventlog.NewBridge(eventlog.BridgeConfig{Pool: pool, Plan: plan, Log: zap.NewNop()})
}

// restoreDays brings the archived events of a span of time back.
func restoreDays(ctx context.Context, w io.Writer, store *archive.Archive, since, until time.Time) error {
	days, err := store.Days(ctx, archive.Events)
	if err != nil {
		return err
	}
	for _, day := range days {
		if !day.Before(until) || !day.AddDate(0, 0, 1).After(since) {
			continue
		}
		restored, err := store.Restore(ctx, archive.Events, day)
		if err != nil {
			return fmt.Errorf("restore %s: %w", day.Format(time.DateOnly), err)
		}
		fmt.Fprintf(w, "restored %d events of %s\n", restored.Inserted, day.Format(time.DateOnly))
	}
	return nil
}
