package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/cmd/afluente/bench"
	"afluente/db/dbtest"
)

func TestBenchPrintsEveryRow(t *testing.T) {
	t.Parallel()
	url := dbtest.Empty(t)
	code, stdout, stderr := runCommand(t, url, "bench", "--jobs", "300", "--rounds", "1", "--behind", "500", "--max-workers", "50", "--json")
	require.Zero(t, code, stderr)
	var report bench.Report
	require.NoError(t, json.Unmarshal([]byte(stdout), &report))
	require.Equal(t, 300, report.Jobs)
	require.Equal(t, 1, report.Rounds)
	require.Equal(t, 500, report.Behind)
	require.Equal(t, 50, report.MaxWorkers)
	require.Contains(t, report.Server["server_version"], ".")
	var measured []string
	names := make(map[string]bool)
	for _, row := range report.Rows {
		measured = append(measured, row.Measurement)
		names[row.Measurement+row.Name] = true
		require.Positive(t, row.Min, row.Name)
		require.LessOrEqual(t, row.Min, row.Median, row.Name)
		require.LessOrEqual(t, row.Median, row.Max, row.Name)
		if row.Ratio != nil {
			require.Positive(t, row.Ratio.Median, row.Name)
			require.True(t, names[row.Measurement+row.Ratio.Of], "%s is compared with a row above it, not %q", row.Name, row.Ratio.Of)
		}
	}
	require.Len(t, names, len(report.Rows))
	require.Equal(t, bench.Names(), slices.Compact(measured))
	requireNoBenchDatabases(t, url, stderr)
}

func TestBenchTakesOnlyWhatIsAskedFor(t *testing.T) {
	t.Parallel()
	url := dbtest.Empty(t)
	code, stdout, stderr := runCommand(t, url, "bench", "--jobs", "300", "--rounds", "2", "--only", "settle,bridge")
	require.Zero(t, code, stderr)
	require.Regexp(t, `(?m)^bridge +one INSERT … SELECT .* jobs/s`, stdout)
	require.Regexp(t, `(?m)^ +bridge +\d+ \(\d+–\d+\) jobs/s +\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\) +one INSERT … SELECT .* at least 0\.80`, stdout)
	require.Regexp(t, `(?m)^settle `, stdout)
	require.NotContains(t, stdout, "fanout")
	require.Equal(t, 3*4, strings.Count(stderr, "measured"), "the round that does not count, and two")
	requireNoBenchDatabases(t, url, stderr)
}

func TestBenchPrintsUnitsAndTargets(t *testing.T) {
	t.Parallel()
	url := dbtest.Empty(t)
	code, stdout, stderr := runCommand(t, url, "bench", "--jobs", "300", "--rounds", "1", "--only", "fairness,order,size")
	require.Zero(t, code, stderr)
	require.Regexp(t, `(?m)^ +beside a flood of another: emit → start, p95 .* ms .* alone: emit → start, p95 +at most 3\.00`, stdout)
	require.Regexp(t, `(?m)^ +in the order of many keys .* jobs/s .* fan-out → settle in no order +at least 0\.80`, stdout)
	require.Regexp(t, `(?m)^size +event_log with its indexes, for a million events .* MB`, stdout)
	require.Regexp(t, `(?m)^ +most connections .* connections`, stdout)
	requireNoBenchDatabases(t, url, stderr)
}

func TestBenchWrongUsage(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"unknown measurement": {[]string{"--only", "bridge,speed"}, `no measurement "speed"; the measurements are fanout-1, fanout-3, `},
		"too few jobs":        {[]string{"--jobs", "9"}, "--jobs 9 is not a whole number from 10 to"},
		"no rounds":           {[]string{"--rounds", "0"}, "--rounds 0"},
		"nothing behind":      {[]string{"--behind", "0"}, "--behind 0"},
		"no workers":          {[]string{"--max-workers", "0"}, "--max-workers 0"},
		"an argument":         {[]string{"bridge"}, "unknown command"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, _, stderr := runCommand(t, "", append([]string{"bench"}, test.args...)...)
			require.Equal(t, 2, code)
			require.Contains(t, stderr, test.want)
		})
	}
}

func TestBenchLeavesNothingWhenInterrupted(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"making databases", "measured"} { // in the templates, in a run
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			url := dbtest.Empty(t)
			p := start(t, []string{"DATABASE_URL=" + url}, "bench", "--only", "fanout-3,latency")
			p.stderr.await(t, line)
			require.NoError(t, p.command.Process.Signal(os.Interrupt))
			p.wait(t)
			require.Equal(t, 1, p.command.ProcessState.ExitCode())
			require.Contains(t, p.stderr.String(), context.Canceled.Error())
			requireNoBenchDatabases(t, url, p.stderr.String())
		})
	}
}

func TestBenchLeavesNothingAfterAnError(t *testing.T) {
	t.Parallel()
	url := dbtest.Empty(t)
	p := start(t, []string{"DATABASE_URL=" + url}, "bench", "--only", "latency")
	pool := benchPool(t, url)
	name := benchPrefix(t, p.stderr.await(t, "making databases")) + "_run"
	eventually(t, time.Minute, "the first run has a connection", func() bool {
		return number(t, pool, fmt.Sprintf("SELECT count(*) FROM pg_stat_activity WHERE datname = '%s'", name)) > 0
	})
	_, err := pool.Exec(t.Context(), "DROP DATABASE "+name+" WITH (FORCE)")
	require.NoError(t, err)
	p.wait(t)
	require.Equal(t, 1, p.command.ProcessState.ExitCode())
	require.Contains(t, p.stderr.String(), "measure latency: plain River")
	requireNoBenchDatabases(t, url, p.stderr.String())
}

// requireNoBenchDatabases checks that those are gone which a run named in its log.
func requireNoBenchDatabases(t *testing.T, url, stderr string) {
	t.Helper()
	pool := benchPool(t, url)
	require.Zero(t, number(t, pool, fmt.Sprintf("SELECT count(*) FROM pg_database WHERE starts_with(datname, '%s')", benchPrefix(t, stderr))))
	require.Zero(t, number(t, pool, "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace"), "the named database is left alone")
}

func benchPrefix(t *testing.T, stderr string) string {
	t.Helper()
	name := regexp.MustCompile(`afluente_bench_[0-9a-f]{12}`).FindString(stderr)
	require.NotEmpty(t, name)
	return name
}

func benchPool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	return dbtest.Pool(t, config)
}
