// Package bench measures the bus beside what it is to be compared with, plain
// River and plain SQL, in one run on one server.
//
// Whatever it measures runs in a database of its own, which is made for it and
// dropped after it; none other is touched. The variants of a measurement take
// turns within each round, in the reverse order every other round, and a ratio
// is taken within a round and only then the median of them, so that a machine
// with other work to do slows both sides of it.
package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/zap"
)

// Config says what to measure, and how.
type Config struct {
	// Pool leads to a database of the server, in which nothing is changed, as a
	// role that may create others. Each run gets a pool like it.
	Pool *pgxpool.Config
	// Jobs is how many each run inserts or works, at least 10. What takes
	// time by the clock, not by jobs, has at most 2000 events. A flood is of 10,000
	// events at least, and beside it there is one event for each 2500 of them.
	Jobs int
	// Rounds is how often each variant counts, at least 1.
	Rounds int
	// Only names the measurements to take; empty means all of [Names].
	Only []string
	// Behind is how many done events lie behind the measurement of that name.
	Behind int
	// MaxWorkers is how many jobs a client runs at a time, plain River's too.
	MaxWorkers int
	// Batch is how many events are emitted at a time and a bridge takes at a
	// time, and of how many plain River inserts the jobs at a time.
	Batch int
	// PollOnly does without LISTEN.
	PollOnly bool
	Log      *zap.Logger
}

// Report is what was measured, and on what.
type Report struct {
	Server     map[string]string `json:"server"`
	CPUs       int               `json:"cpus"`
	Jobs       int               `json:"jobs"`
	Rounds     int               `json:"rounds"`
	Behind     int               `json:"behind"`
	MaxConns   int               `json:"max_conns"`
	MaxWorkers int               `json:"max_workers"`
	Batch      int               `json:"batch"`
	Rows       []Row             `json:"rows"`
}

// Row is one figure.
type Row struct {
	Measurement string `json:"measurement"`
	Name        string `json:"name"`
	Unit        string `json:"unit"`
	Spread
	// Ratio is nil for what is compared with nothing.
	Ratio *Ratio `json:"ratio,omitempty"`
	// AtMost is the target of the figure, 0 for none.
	AtMost float64 `json:"at_most,omitempty"`
}

// Spread is the median of the rounds, with the least and the most of them.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// Ratio is a figure divided by another one of the same round.
type Ratio struct {
	Spread
	// Of is the name of the row that the figure is compared with.
	Of string `json:"of"`
	// AtLeast is the target, 0 for none.
	AtLeast float64 `json:"at_least,omitempty"`
	// AtMost is the target, 0 for none. A ratio has at most one target.
	AtMost float64 `json:"at_most,omitempty"`
}

// Names are the measurements there are.
func Names() []string {
	var names []string
	for _, m := range measurements() {
		names = append(names, m.name)
	}
	return names
}

// Run takes the measurements: one round that does not count, then those that do.
// When it returns, its databases are gone, also after an error or the end of ctx.
func Run(ctx context.Context, config Config) (report Report, err error) {
	var chosen []measurement
	for _, m := range measurements() {
		if len(config.Only) == 0 || slices.Contains(config.Only, m.name) {
			chosen = append(chosen, m)
		}
	}
	s, err := openServer(ctx, config)
	if err != nil {
		return Report{}, err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	report = Report{
		CPUs:       runtime.NumCPU(),
		Jobs:       config.Jobs,
		Rounds:     config.Rounds,
		Behind:     config.Behind,
		MaxConns:   int(config.Pool.MaxConns),
		MaxWorkers: config.MaxWorkers,
		Batch:      config.Batch,
	}
	if report.Server, err = s.settings(ctx); err != nil {
		return Report{}, err
	}
	if err := s.makeTemplates(ctx); err != nil {
		return Report{}, err
	}

	rounds := make(map[string][]figures) // by measurement
	for round := range config.Rounds + 1 {
		for _, m := range chosen {
			all, err := s.measure(ctx, m, round)
			if err != nil {
				return Report{}, fmt.Errorf("measure %s: %w", m.name, err)
			}
			if round > 0 {
				rounds[m.name] = append(rounds[m.name], all)
			}
		}
	}
	for _, m := range chosen {
		report.Rows = append(report.Rows, m.report(rounds[m.name])...)
	}
	return report, nil
}

// measure runs each variant once.
func (s *server) measure(ctx context.Context, m measurement, round int) (figures, error) {
	variants := slices.Clone(m.variants)
	if round%2 == 1 {
		slices.Reverse(variants)
	}
	all := make(figures)
	for _, v := range variants {
		start := time.Now()
		got, err := s.run(ctx, v, m.fanOut)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", v.name, err)
		}
		maps.Copy(all, got)
		s.config.Log.Info("measured", zap.Int("round", round), zap.Int("rounds", s.config.Rounds),
			zap.String("measurement", m.name), zap.String("variant", v.name), zap.Duration("duration", time.Since(start)))
	}
	return all, nil
}

func (m measurement) report(rounds []figures) []Row {
	names := make(map[string]string) // by figure
	for _, r := range m.rows {
		names[r.figure] = r.name
	}
	var rows []Row
	for _, r := range m.rows {
		var values, ratios []float64
		for _, round := range rounds {
			values = append(values, round[r.figure])
			if r.of != "" {
				ratios = append(ratios, round[r.figure]/round[r.of])
			}
		}
		row := Row{Measurement: m.name, Name: r.name, Unit: r.unit, Spread: spread(values), AtMost: r.atMost}
		if r.of != "" {
			row.Ratio = &Ratio{Spread: spread(ratios), Of: names[r.of], AtLeast: r.atLeast, AtMost: r.ratioAtMost}
		}
		rows = append(rows, row)
	}
	return rows
}

func spread(values []float64) Spread {
	slices.Sort(values)
	n := len(values)
	return Spread{Median: (values[(n-1)/2] + values[n/2]) / 2, Min: values[0], Max: values[n-1]}
}
