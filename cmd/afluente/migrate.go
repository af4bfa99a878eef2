package main

import (
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"afluente/db/migrate"
	"afluente/eventlog"
)

func newMigrate(load func() (Config, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Bring the database's schema up or down",
		Args:  usage(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}

	up := &cobra.Command{
		Use:   "up",
		Short: "Apply every migration that the database lacks",
		Args:  usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				applied, err := migrate.Up(cmd.Context(), pool)
				if err != nil {
					return err
				}
				if err := eventlog.RegisterTypes(cmd.Context(), pool); err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "applied %d migrations\n", applied)
				return err
			})
		},
	}

	down := &cobra.Command{
		Use:   "down TARGET",
		Short: "Roll back to a version; 0 drops everything, River's jobs with it",
		Args:  usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, err := strconv.ParseInt(args[0], 10, 64)
			if err != nil || target < 0 {
				return &usageError{fmt.Errorf("the target %q is not a version number", args[0])}
			}
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				rolledBack, err := migrate.Down(cmd.Context(), pool, target)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "rolled back %d migrations\n", rolledBack)
				return err
			})
		},
	}

	var asJSON bool
	status := &cobra.Command{
		Use:   "status",
		Short: "List the migrations and which of them the database has",
		Args:  usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				list, err := migrate.List(cmd.Context(), pool)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), list)
				}
				rows := make([][]string, len(list))
				for i, m := range list {
					state := "pending"
					if m.Applied {
						state = "applied"
					}
					rows[i] = []string{m.Component, strconv.FormatInt(m.Version, 10), m.Name, state}
				}
				return printTable(cmd.OutOrStdout(), []string{"COMPONENT", "VERSION", "NAME", "STATE"}, rows)
			})
		},
	}
	status.Flags().BoolVar(&asJSON, "json", false, "print JSON")

	cmd.AddCommand(up, down, status)
	return cmd
}
