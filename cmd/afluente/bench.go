package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.uber.org/zap/zapcore"

	"afluente/cmd/afluente/bench"
	"afluente/db/embedded"
)

func newBench(load func() (Config, error)) *cobra.Command {
	var asJSON bool
	var options bench.Config
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the bus beside plain River and plain SQL",
		Long: `Measure the bus beside plain River and plain SQL, with no-op jobs, on one server:
the whole way of events to 1, 3 and 10 consumers and each part of it, the bridge,
the latency at 200 events a second, what settling costs, what River's GIN
indexes do, the latency beside a flood of another organization, what the order of
keys costs, the rate with many done events behind it, and what an event leaves on
disk. Each figure is the median of the rounds, after one that does not count, each
ratio the median of the ratios of the rounds; least and most are in brackets.

The server is the one of DATABASE_URL, whose role must be allowed to create
databases, else a private one. Everything happens in databases whose names begin
with afluente_bench_. They are dropped at the end, also on Ctrl-C.

The measurements are ` + strings.Join(bench.Names(), ", ") + `.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkBench(options); err != nil {
				return &usageError{err}
			}
			config, err := load()
			if err != nil {
				return err
			}
			report, err := runBench(cmd.Context(), cmd.ErrOrStderr(), config, options)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), report)
			}
			return printReport(cmd.OutOrStdout(), report)
		},
	}
	cmd.Flags().IntVar(&options.Jobs, "jobs", 30_000, "jobs of each run, 10 to 10000000; the latency is that of 2000 events at most, and beside a flood, of at least 10000, that of one for each 2500")
	cmd.Flags().IntVar(&options.Rounds, "rounds", 3, "rounds that count, 1 to 100")
	cmd.Flags().StringSliceVar(&options.Only, "only", nil, "take these measurements only, comma separated")
	cmd.Flags().IntVar(&options.Behind, "behind", 1_000_000, "done events behind the measurement of that name, 1 to 100000000; ten million take ten minutes or more to insert, each round")
	// In place of the setting of the same name, whose default would hold a fast
	// machine back: River fetches so many jobs at a time, and no more often than
	// each 10 ms.
	cmd.Flags().IntVar(&options.MaxWorkers, "max-workers", 500, "jobs that a client runs at a time, plain River's too, 1 to 10000")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func checkBench(options bench.Config) error {
	var mistakes []error
	for _, name := range options.Only {
		if !slices.Contains(bench.Names(), name) {
			mistakes = append(mistakes, fmt.Errorf("--only: there is no measurement %q; the measurements are %s",
				name, strings.Join(bench.Names(), ", ")))
		}
	}
	between := func(flag string, n, low, high int) {
		if n < low || n > high {
			mistakes = append(mistakes, fmt.Errorf("--%s %d is not a whole number from %d to %d", flag, n, low, high))
		}
	}
	between("jobs", options.Jobs, 10, 10_000_000)
	between("rounds", options.Rounds, 1, 100)
	between("behind", options.Behind, 1, 100_000_000)
	between("max-workers", options.MaxWorkers, 1, 10_000)
	return errors.Join(mistakes...)
}

// runBench tells stderr how far it is.
func runBench(ctx context.Context, stderr io.Writer, config Config, options bench.Config) (report bench.Report, err error) {
	options.Batch, options.PollOnly = config.Batch, config.PollOnly
	options.Log = newLogger(config.LogLevel, zapcore.NewConsoleEncoder, zapcore.AddSync(stderr))
	if config.DatabaseURL == "" {
		server, err := embedded.Start(ctx, embedded.Config{Logger: options.Log.Named("postgres")})
		if err != nil {
			return report, fmt.Errorf("start private database: %w", err)
		}
		defer func() { err = errors.Join(err, server.Stop()) }()
		config.DatabaseURL = server.URL()
	}
	if options.Pool, err = newPoolConfig(config); err != nil {
		return report, err
	}
	return bench.Run(ctx, options)
}

func printReport(w io.Writer, report bench.Report) error {
	fmt.Fprintf(w, "afluente bench with jobs=%d rounds=%d behind=%d max_workers=%d max_conns=%d batch=%d on %d CPUs\n",
		report.Jobs, report.Rounds, report.Behind, report.MaxWorkers, report.MaxConns, report.Batch, report.CPUs)
	var settings []string
	for _, name := range slices.Sorted(maps.Keys(report.Server)) {
		settings = append(settings, name+"="+report.Server[name])
	}
	fmt.Fprintf(w, "PostgreSQL with %s\n\n", strings.Join(settings, " "))

	var rows [][]string
	for i, row := range report.Rows {
		name := row.Measurement
		if i > 0 && report.Rows[i-1].Measurement == name {
			name = ""
		}
		digits := 0
		if row.Unit == "ms" || row.Median < 100 {
			digits = 1
		}
		var ratio, of, target string
		if row.AtMost > 0 {
			target = fmt.Sprintf("at most %.0f %s", row.AtMost, row.Unit)
		}
		if row.Ratio != nil {
			ratio, of = formatSpread(row.Ratio.Spread, 2), row.Ratio.Of
			if row.Ratio.AtLeast > 0 {
				target = fmt.Sprintf("at least %.2f", row.Ratio.AtLeast)
			}
			if row.Ratio.AtMost > 0 {
				target = fmt.Sprintf("at most %.2f", row.Ratio.AtMost)
			}
		}
		rows = append(rows, []string{name, row.Name, formatSpread(row.Spread, digits) + " " + row.Unit, ratio, of, target})
	}
	return printTable(w, []string{"MEASUREMENT", "WHAT", "FIGURE", "RATIO", "TO", "TARGET"}, rows)
}

func formatSpread(s bench.Spread, digits int) string {
	return fmt.Sprintf("%.*f (%.*f–%.*f)", digits, s.Median, digits, s.Min, digits, s.Max)
}
