// Command afluente runs the event bus: the bridge from event_log to River, the
// workers, and the web server with River UI.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
)

func main() { os.Exit(mainExit()) } // so that deferred calls run

func mainExit() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	return execute(ctx, os.Args[1:], environment{
		getenv: os.Getenv,
		stdin:  os.Stdin,
		stdout: os.Stdout,
		stderr: os.Stderr,
	})
}

// environment is what a command takes from outside.
type environment struct {
	getenv func(string) string
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer
}

// usageError is a mistake in the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// execute runs one command and returns the exit code: 0 good, 1 failed, 2
// wrong usage.
func execute(ctx context.Context, args []string, env environment) int {
	root := newRoot(env) //nolint:contextcheck // cobra hands the context to the commands
	root.SetArgs(args)
	root.SetIn(env.stdin)
	root.SetOut(env.stdout)
	root.SetErr(env.stderr)
	command, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintf(env.stderr, "afluente: %v\n", err)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Hint != "" {
		fmt.Fprintf(env.stderr, "hint: %s\n", pgErr.Hint)
	}
	if _, ok := errors.AsType[*usageError](err); ok {
		fmt.Fprintf(env.stderr, "see '%s --help'\n", command.CommandPath())
		return 2
	}
	return 1
}

func newRoot(env environment) *cobra.Command {
	root := &cobra.Command{
		Use:           "afluente",
		Short:         "An event bus in PostgreSQL that runs its work on River",
		Args:          usage(cobra.NoArgs),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	settings := addSettings(root.PersistentFlags())
	load := func() (Config, error) { return settings.load(env.getenv) }
	root.AddCommand(
		newDev(load),
		newServe(load),
		newMigrate(load),
		newEmit(load),
		newEvents(load),
		newDLQ(load),
		newReplay(load),
		newWebhook(load),
		newCron(load),
		newPlan(),
		newCatalog(),
		newDoctor(load),
		newBench(load),
	)
	return root
}

// usage makes the mistakes that check finds usage errors.
func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return &usageError{err}
		}
		return nil
	}
}
