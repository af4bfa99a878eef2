package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"afluente/jobs/archive"
)

func newEventsRestore(load func() (Config, error)) *cobra.Command {
	var day, table string
	var onlyPrint bool
	cmd := &cobra.Command{
		Use:   "restore",
		Short: "Bring a day back from the archive",
		Long: `Bring a day (UTC) back from the archive into its table, each row as it was but
for those that are there and those of organizations that are gone. Events come
back as done, so nothing is fanned out again. The next run of
audit-archive-worker takes them away again.`,
		Example: "  afluente events restore --day 2026-01-15\n  afluente events restore --day 2026-01-15 --print | jq .event_type",
		Args:    usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := time.Parse(time.DateOnly, day)
			if err != nil {
				return &usageError{fmt.Errorf("--day %q is not a day such as 2026-01-15", day)}
			}
			if table != archive.Events && table != archive.Audit {
				return &usageError{fmt.Errorf("--table %q is neither %s nor %s", table, archive.Events, archive.Audit)}
			}
			config, err := load()
			if err != nil {
				return err
			}
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				store := newArchive(config, pool)
				if onlyPrint {
					return store.Print(cmd.Context(), cmd.OutOrStdout(), table, at)
				}
				restored, err := store.Restore(cmd.Context(), table, at)
				if restored.Parts == 0 && err == nil {
					err = fmt.Errorf("the archive has nothing of %s on %s", table, day)
				}
				if restored.Parts > 0 {
					_, printErr := fmt.Fprintf(cmd.OutOrStdout(), "read %d rows from %d parts, restored %d\n"+
						"the next run of audit-archive-worker takes them away again\n",
						restored.Read, restored.Parts, restored.Inserted)
					err = errors.Join(err, printErr)
				}
				return err
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&day, "day", "", "the day in UTC, such as 2026-01-15 (required)")
	flags.StringVar(&table, "table", archive.Events, "event_log or audit_log")
	flags.BoolVar(&onlyPrint, "print", false, "print the rows as lines of JSON instead, and change nothing")
	return cmd
}
