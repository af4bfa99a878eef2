package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/user"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"afluente/eventlog"
)

const (
	// defaultRate is how many rows a second dlq and replay move.
	defaultRate = 1000
	maxRate     = 100_000

	maxListed = 10_000
)

func newDLQ(load func() (Config, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dlq",
		Short: "Look at dead letters, retry or discard them",
		Long: `Look at dead letters, retry or discard them.

A dead letter is a job that used up its attempts, gave up at once or was
cancelled. It stays until somebody retries or discards it, here, in River UI or
by POST /api/dlq/retry and /api/dlq/discard.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newDLQList(load), newDLQRetry(load), newDLQDiscard(load))
	return cmd
}

// filterFlags are the flags that choose dead letters.
type filterFlags struct {
	consumer, eventType, organization, entityKind, since, until string
}

func (f *filterFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.consumer, "consumer", "", "consumer or other job, by its kind")
	flags.StringVar(&f.eventType, "type", "", "event type")
	flags.StringVar(&f.organization, "org", "", "organization, a UUID")
	flags.StringVar(&f.entityKind, "kind", "", "what the event is about")
	flags.StringVar(&f.since, "since", "", "given up at this time or later: RFC 3339, a day, or how long ago, such as 2h")
	flags.StringVar(&f.until, "until", "", "given up before this time")
}

func (f *filterFlags) filter(now time.Time, mistakes *[]error) eventlog.DeadLetterFilter {
	filter := eventlog.DeadLetterFilter{
		Consumer:   f.consumer,
		EventType:  f.eventType,
		EntityKind: f.entityKind,
		Since:      parseTime("--since", f.since, now, mistakes),
		Until:      parseTime("--until", f.until, now, mistakes),
	}
	if f.organization != "" {
		filter.OrganizationID = parseUUID("--org", f.organization, mistakes)
	}
	return filter
}

// parseTime reads a point in time; empty is the zero time.
func parseTime(name, value string, now time.Time, mistakes *[]error) time.Time {
	if value == "" {
		return time.Time{}
	}
	for _, layout := range []string{time.RFC3339, time.DateOnly} {
		if at, err := time.Parse(layout, value); err == nil {
			return at
		}
	}
	if ago, err := time.ParseDuration(value); err == nil && ago >= 0 {
		return now.Add(-ago)
	}
	*mistakes = append(*mistakes, fmt.Errorf("%s %q is not a time such as 2026-12-31T08:00:00Z, 2026-12-31 or 2h, which is two hours ago", name, value))
	return time.Time{}
}

// rateFlag adds --rate.
func rateFlag(flags *pflag.FlagSet, perSecond *int) {
	flags.IntVar(perSecond, "rate", defaultRate, "the most a second, 0 for as fast as it goes")
}

func checkRate(perSecond int, mistakes *[]error) {
	if perSecond < 0 || perSecond > maxRate {
		*mistakes = append(*mistakes, fmt.Errorf("--rate %d is not from 0 to %d", perSecond, maxRate))
	}
}

func newDLQList(load func() (Config, error)) *cobra.Command {
	var flags filterFlags
	var limit int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List dead letters, newest first",
		Args:  usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var mistakes []error
			filter := flags.filter(time.Now(), &mistakes)
			if limit < 1 || limit > maxListed {
				mistakes = append(mistakes, fmt.Errorf("--limit %d is not from 1 to %d", limit, maxListed))
			}
			if len(mistakes) > 0 {
				return &usageError{errors.Join(mistakes...)}
			}
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				letters, err := (&eventlog.DeadLetters{Pool: pool}).List(cmd.Context(), filter, limit)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), letters)
				}
				return printDeadLetters(cmd.OutOrStdout(), letters)
			})
		},
	}
	flags.add(cmd.Flags())
	cmd.Flags().IntVar(&limit, "limit", 50, fmt.Sprintf("the most to list, 1 to %d", maxListed))
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printDeadLetters(w io.Writer, letters []eventlog.DeadLetter) error {
	text := func(s *string) string { return oneLine(s, 60) }
	id := func(u *uuid.UUID) string {
		if u == nil {
			return "-"
		}
		return u.String()
	}
	rows := make([][]string, len(letters))
	for i, letter := range letters {
		rows[i] = []string{
			letter.DiedAt.Format(time.RFC3339), fmt.Sprint(letter.JobID), letter.Consumer, letter.State,
			text(letter.EventType), id(letter.EventID), id(letter.OrganizationID), text(&letter.LastError),
		}
	}
	return printTable(w, []string{"DIED", "JOB", "CONSUMER", "STATE", "TYPE", "EVENT", "ORGANIZATION", "LAST ERROR"}, rows)
}

// mover is what retry and discard have in common.
type mover struct {
	flags  filterFlags
	rate   int
	dryRun bool
	asJSON bool
}

func (m *mover) add(flags *pflag.FlagSet) {
	m.flags.add(flags)
	rateFlag(flags, &m.rate)
	flags.BoolVar(&m.dryRun, "dry-run", false, "only count")
	flags.BoolVar(&m.asJSON, "json", false, "print JSON")
}

// run counts or moves dead letters and prints what became of them.
func (m *mover) run(
	cmd *cobra.Command, load func() (Config, error), done string,
	move func(context.Context, *eventlog.DeadLetters, eventlog.DeadLetterFilter, eventlog.Pace) (eventlog.Moved, error),
) error {
	var mistakes []error
	now := time.Now()
	filter := m.flags.filter(now, &mistakes)
	checkRate(m.rate, &mistakes)
	if len(mistakes) > 0 {
		return &usageError{errors.Join(mistakes...)}
	}
	return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
		letters := &eventlog.DeadLetters{Pool: pool}
		if m.dryRun {
			found, err := letters.Count(cmd.Context(), filter)
			if err != nil {
				return err
			}
			if m.asJSON {
				return printJSON(cmd.OutOrStdout(), eventlog.Moved{Found: found})
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d would be %s\n", found, done)
			return err
		}
		moved, err := move(cmd.Context(), letters, filter, eventlog.Pace{Rate: m.rate, Progress: progress(cmd.ErrOrStderr(), done)})
		if m.asJSON {
			err = errors.Join(err, printJSON(cmd.OutOrStdout(), moved))
		} else {
			fmt.Fprintln(cmd.OutOrStdout(), movedText(moved, done))
		}
		if err != nil {
			return fmt.Errorf("%w; run the command again for the rest, with --until %s to leave out what has died since",
				err, now.UTC().Format(time.RFC3339))
		}
		if len(moved.Conflicts) > 0 {
			return fmt.Errorf("%d cannot be %s: another job with their unique key is alive", len(moved.Conflicts), done)
		}
		return nil
	})
}

func movedText(moved eventlog.Moved, done string) string {
	text := fmt.Sprintf("%d of %d %s", moved.Moved, moved.Found, done)
	if moved.Gone > 0 {
		text += fmt.Sprintf(", %d were no longer dead", moved.Gone)
	}
	if len(moved.Conflicts) > 0 {
		text += ", these jobs have a living twin: " + strings.Trim(fmt.Sprint(moved.Conflicts), "[]")
	}
	return text
}

// progress tells every few seconds how far it is.
func progress(w io.Writer, done string) func(eventlog.Moved) {
	last := time.Now()
	return func(moved eventlog.Moved) {
		if time.Since(last) >= 5*time.Second {
			last = time.Now()
			fmt.Fprintln(w, movedText(moved, done)+" so far")
		}
	}
}

func newDLQRetry(load func() (Config, error)) *cobra.Command {
	var m mover
	cmd := &cobra.Command{
		Use:   "retry",
		Short: "Let dead letters begin anew",
		Long: `Let dead letters begin anew, with all their attempts and their errors kept.

They go behind all other work of their queue. It is done in small transactions,
so that it can be stopped at any time and gone on with by the same command.
What dies again meanwhile is not retried a second time.`,
		Example: `  afluente dlq retry --consumer webhook-dispatch-worker --since 2h --dry-run
  afluente dlq retry --type message.queued --rate 50`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return m.run(cmd, load, "retried", func(
				ctx context.Context, letters *eventlog.DeadLetters, filter eventlog.DeadLetterFilter, pace eventlog.Pace,
			) (eventlog.Moved, error) {
				return letters.Retry(ctx, filter, pace)
			})
		},
	}
	m.add(cmd.Flags())
	return cmd
}

func newDLQDiscard(load func() (Config, error)) *cobra.Command {
	var m mover
	var reason string
	cmd := &cobra.Command{
		Use:   "discard",
		Short: "Delete dead letters, for good",
		Long: `Delete dead letters, for good. Each leaves a row in audit_log that says who did
it and why. An event that waits for no other job is done then.`,
		Example: `  afluente dlq discard --type lead.created --reason 'imported twice' --dry-run`,
		Args:    usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if reason == "" {
				return &usageError{errors.New("--reason is required: it is what audit_log tells those who ask later")}
			}
			return m.run(cmd, load, "discarded", func(
				ctx context.Context, letters *eventlog.DeadLetters, filter eventlog.DeadLetterFilter, pace eventlog.Pace,
			) (eventlog.Moved, error) {
				return letters.Discard(ctx, filter, pace, shellActor(), reason)
			})
		},
	}
	m.add(cmd.Flags())
	cmd.Flags().StringVar(&reason, "reason", "", "why (required)")
	return cmd
}

// shellActor is who runs the command.
func shellActor() string {
	if u, err := user.Current(); err == nil && u.Username != "" {
		return "shell:" + u.Username
	}
	return "shell"
}
