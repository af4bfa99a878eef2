package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"afluente/eventlog"
	"afluente/jobs"
)

// compilePlan returns the jobs of this version for those who only look at them:
// they have nothing to work with.
func compilePlan() (*eventlog.Plan, error) {
	plan, err := eventlog.Compile(jobs.All(jobs.Deps{})...)
	if err != nil {
		return nil, fmt.Errorf("compile plan: %w", err)
	}
	return plan, nil
}

func newPlan() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show every job with what brings it about, its queue, attempts and timeout",
		Args:  usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			plan, err := compilePlan()
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), plan.Entries())
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), plan)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
