package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.yaml.in/yaml/v3"

	"afluente/eventlog"
)

// nextTicks is how many coming ticks are shown.
const nextTicks = 3

func newCron(load func() (Config, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cron",
		Short: "Look at crons, run, pause or resume one",
		Args:  usage(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCronList(load), newCronRun(load), newCronPause(load), newCronResume(load))
	return cmd
}

// withScheduler calls f with a scheduler of this version's crons, not running.
func withScheduler(cmd *cobra.Command, load func() (Config, error), f func(*eventlog.Scheduler) error) error {
	return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
		plan, err := compilePlan()
		if err != nil {
			return err
		}
		scheduler, err := eventlog.NewScheduler(eventlog.SchedulerConfig{Pool: pool, Plan: plan, Log: zap.NewNop()})
		if err != nil {
			return err
		}
		return f(scheduler)
	})
}

func newCronList(load func() (Config, error)) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List crons with their last and next ticks",
		Long: `List crons with their last and next ticks (UTC).

STATE is on, paused, off by the file of overrides, or retired: this version has
no such cron. SKIPPED counts the ticks that became no job, since they were missed
or the job before them still waited.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withScheduler(cmd, load, func(scheduler *eventlog.Scheduler) error {
				states, err := scheduler.List(cmd.Context(), nextTicks)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), states)
				}
				return printCrons(cmd.OutOrStdout(), states)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printCrons(w io.Writer, states []eventlog.CronState) error {
	const layout = "Jan 02 15:04:05"
	rows := make([][]string, len(states))
	for i, s := range states {
		last := "-"
		if s.LastTick != nil {
			last = s.LastTick.Format(layout) + " " + s.LastState
		}
		next := make([]string, len(s.NextTicks))
		for j, at := range s.NextTicks {
			next[j] = at.Format(layout)
		}
		state := s.State
		if s.PausedBy != "" {
			state += " by " + s.PausedBy
		}
		policy := string(s.Missed)
		if s.Missed == eventlog.MissedAll {
			policy += " " + strconv.Itoa(s.MaxMissed)
		}
		if s.Jitter > 0 {
			policy += ", jitter " + s.Jitter.String()
		}
		rows[i] = []string{s.Name, s.Spec, s.Zone, policy, state, last, strings.Join(next, ", "), strconv.FormatInt(s.Skipped, 10)}
	}
	return printTable(w, []string{"CRON", "SPEC", "ZONE", "MISSED", "STATE", "LAST TICK", "NEXT TICKS", "SKIPPED"}, rows)
}

func newCronRun(load func() (Config, error)) *cobra.Command {
	return &cobra.Command{
		Use:   "run NAME",
		Short: "Run a cron now, also one that is paused, and print its job",
		Args:  usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withScheduler(cmd, load, func(scheduler *eventlog.Scheduler) error {
				id, err := scheduler.RunNow(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				_, err = fmt.Fprintln(cmd.OutOrStdout(), id)
				return err
			})
		},
	}
}

func newCronPause(load func() (Config, error)) *cobra.Command {
	return &cobra.Command{
		Use:   "pause NAME",
		Short: "Stop a cron in every process until it is resumed",
		Args:  usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withScheduler(cmd, load, func(scheduler *eventlog.Scheduler) error {
				return scheduler.Pause(cmd.Context(), args[0], shellActor())
			})
		},
	}
}

func newCronResume(load func() (Config, error)) *cobra.Command {
	return &cobra.Command{
		Use:   "resume NAME",
		Short: "Let a paused cron go on with its next tick",
		Args:  usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withScheduler(cmd, load, func(scheduler *eventlog.Scheduler) error {
				return scheduler.Resume(cmd.Context(), args[0])
			})
		},
	}
}

// overrideCrons returns the plan as a file changes it:
//
//	crons:
//	  audit-archive-worker:
//	    spec: 30 2 * * *
//	    zone: America/Sao_Paulo
//	    missed: once # or skip, all
//	    max_missed: 10
//	    jitter: 5m
//	    paused: false
func overrideCrons(plan *eventlog.Plan, path string) (*eventlog.Plan, error) {
	if path == "" {
		return plan, nil
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read AFLUENTE_CRONS_FILE: %w", err)
	}
	var file struct {
		Crons map[string]eventlog.CronOverride `yaml:"crons"`
	}
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	decoder.KnownFields(true)
	if err := decoder.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read AFLUENTE_CRONS_FILE: %w", err)
	}
	plan, err = plan.Override(file.Crons)
	if err != nil {
		return nil, fmt.Errorf("read AFLUENTE_CRONS_FILE: %w", err)
	}
	return plan, nil
}
