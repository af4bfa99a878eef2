package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sync/errgroup"

	"afluente/eventlog"
)

func newEventsTail(load func() (Config, error)) *cobra.Command {
	var organization string
	var interest eventlog.Interest
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "tail",
		Short: "Print events as they are fanned out, until Ctrl-C",
		Args:  usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if organization != "" {
				var mistakes []error
				if interest.OrganizationID = parseUUID("--org", organization, &mistakes); mistakes != nil {
					return &usageError{mistakes[0]}
				}
			}
			config, err := load()
			if err != nil {
				return err
			}
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				log := newLogger(config.LogLevel, zapcore.NewConsoleEncoder, zapcore.AddSync(cmd.ErrOrStderr()))
				stream := eventlog.NewStream(pool, log)
				g, ctx := errgroup.WithContext(cmd.Context())
				g.Go(func() error { return stream.Run(ctx) })
				g.Go(func() error { return tail(ctx, cmd, stream, interest, asJSON) })
				return g.Wait()
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&organization, "org", "", "organization, a UUID; all by default")
	flags.StringSliceVar(&interest.Types, "type", nil, "event types such as lead.won or lead.*; all by default")
	flags.BoolVar(&asJSON, "json", false, "print a line of JSON for each event")
	return cmd
}

// tail prints events until ctx ends. When the stream is lost it goes on after
// the last event that it has printed.
func tail(ctx context.Context, cmd *cobra.Command, stream *eventlog.Stream, interest eventlog.Interest, asJSON bool) error {
	last := uuid.Nil
	for {
		reader, err := stream.Subscribe(ctx, interest, last)
		if errors.Is(err, eventlog.ErrStreamLost) { // not connected yet
			select {
			case <-time.After(100 * time.Millisecond):
				continue
			case <-ctx.Done():
				return nil
			}
		}
		if errors.Is(err, eventlog.ErrInterest) {
			return &usageError{err}
		} else if err != nil {
			return ignoreEnd(ctx, err)
		}
		for {
			event, err := reader.Next(ctx)
			if errors.Is(err, eventlog.ErrStreamLost) {
				break
			} else if err != nil {
				return ignoreEnd(ctx, err)
			}
			last = event.ID
			if err := printTailed(cmd, event, asJSON); err != nil {
				return err
			}
		}
		reader.Close()
	}
}

// ignoreEnd returns nil for an error that comes of the end of ctx.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return nil
}

func printTailed(cmd *cobra.Command, event eventlog.Loaded, asJSON bool) error {
	if asJSON {
		_, err := fmt.Fprintln(cmd.OutOrStdout(), string(encodeStreamData(event)))
		return err
	}
	text := string(event.Payload)
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s  %s  %s  %s\n",
		event.CreatedAt.Format("2006-01-02T15:04:05.000Z"), event.ID, event.Type, oneLine(&text, 200))
	return err
}
