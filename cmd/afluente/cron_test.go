package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"afluente/eventlog"
	"afluente/jobs"
)

const cronSecret = "0123456789abcdef"

func TestCronCommands(t *testing.T) {
	t.Parallel()
	server := newWebServer(t, Config{})
	url := server.pool.Config().ConnString()
	mustExec(t, server.pool, `INSERT INTO crons (name, spec, zone, missed, max_missed, jitter, disabled, next_tick)
		VALUES ('old-cron', '* * * * *', 'UTC', 'all', 7, '5 seconds', false, now())`)
	list := func() map[string]eventlog.CronState {
		code, stdout, stderr := runCommand(t, url, "cron", "list", "--json")
		require.Zero(t, code, stderr)
		var states []eventlog.CronState
		require.NoError(t, json.Unmarshal([]byte(stdout), &states))
		byName := make(map[string]eventlog.CronState)
		for _, state := range states {
			byName[state.Name] = state
		}
		return byName
	}
	states := list()
	require.Equal(t, "retired", states["old-cron"].State)
	budget := states["daily-budget-reset"]
	require.Equal(t, "on", budget.State)
	require.Len(t, budget.NextTicks, 3)
	require.Equal(t, 3, budget.NextTicks[0].Hour())
	require.Equal(t, 24*time.Hour, budget.NextTicks[1].Sub(budget.NextTicks[0]))
	require.Nil(t, budget.LastTick)

	code, stdout, stderr := runCommand(t, url, "cron", "run", "daily-budget-reset")
	require.Zero(t, code, stderr)
	id, err := strconv.ParseInt(strings.TrimSpace(stdout), 10, 64)
	require.NoError(t, err)
	require.Equal(t, int(id), number(t, server.pool, "SELECT id FROM river.river_job WHERE kind = 'daily-budget-reset'"))
	code, _, stderr = runCommand(t, url, "cron", "run", "daily-budget-reset")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "a job of the cron waits already")

	code, _, stderr = runCommand(t, url, "cron", "pause", "daily-budget-reset")
	require.Zero(t, code, stderr)
	code, stdout, _ = runCommand(t, url, "cron", "list")
	require.Zero(t, code)
	require.Regexp(t, `daily-budget-reset +0 0 \* \* \* +America/Sao_Paulo +once +paused by shell\S* +\w+ \d\d \d\d:\d\d:\d\d available`, stdout)
	require.Regexp(t, `old-cron +\* \* \* \* \* +UTC +all 7, jitter 5s +retired`, stdout)
	code, _, _ = runCommand(t, url, "cron", "resume", "daily-budget-reset")
	require.Zero(t, code)
	require.Equal(t, "on", list()["daily-budget-reset"].State)
	for _, command := range []string{"run", "pause", "resume"} {
		code, _, stderr = runCommand(t, url, "cron", command, "nobody")
		require.Equal(t, 1, code)
		require.Contains(t, stderr, "there is no such cron")
		code, _, _ = runCommand(t, url, "cron", command)
		require.Equal(t, 2, code)
	}
}

func TestCronOverHTTP(t *testing.T) {
	t.Parallel()
	server := newWebServer(t, Config{CronSecrets: []string{cronSecret, "fedcba9876543210"}})
	for i, headers := range [][]string{
		{"Authorization", "Bearer " + cronSecret},
		{"Authorization", "Bearer fedcba9876543210"},
		{"X-Cron-Secret", cronSecret},
	} {
		path := "/api/cron/reconcile-events"
		if i == 1 {
			path = "/api/v1/cron/reconcile-events"
		}
		code, body := server.do(t, http.MethodPost, path, "", headers...)
		require.Equal(t, http.StatusAccepted, code, body)
		require.Regexp(t, `^\{"job_id":\d+\}`, body)
		code, _ = server.do(t, http.MethodPost, path, "", headers...)
		require.Equal(t, http.StatusConflict, code)
		mustExec(t, server.pool, "UPDATE river.river_job SET state = 'completed', finalized_at = now()")
	}
	for _, headers := range [][]string{
		nil,
		{"Authorization", "Bearer "},
		{"Authorization", cronSecret[:15]},
		{"X-Cron-Secret", cronSecret + "x"},
		{"Authorization", "Basic " + cronSecret},
	} {
		code, _ := server.do(t, http.MethodPost, "/api/cron/reconcile-events", "", headers...)
		require.Equal(t, http.StatusUnauthorized, code, headers)
	}
	for _, name := range []string{"nobody", "whatsapp-send-worker", "%00", "%ff", strings.Repeat("x", 5000)} {
		code, _ := server.do(t, http.MethodPost, "/api/cron/"+name, "", "X-Cron-Secret", cronSecret)
		require.Equal(t, http.StatusNotFound, code, name)
	}
	// Without a secret nobody may, also not who shows none.
	code, _ := newWebServer(t, Config{}).do(t, http.MethodPost, "/api/cron/reconcile-events", "", "X-Cron-Secret", "")
	require.Equal(t, http.StatusUnauthorized, code)
}

func TestCronsFileChangesCronsAndRefusesMistakes(t *testing.T) {
	t.Parallel()
	plan, err := eventlog.Compile(jobs.All(jobs.Deps{})...)
	require.NoError(t, err)
	read := func(content string) (*eventlog.Plan, error) {
		path := filepath.Join(t.TempDir(), "crons.yaml")
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		return overrideCrons(plan, path)
	}
	changed, err := read("crons:\n  audit-archive-worker:\n    spec: 30 2 * * *\n    zone: America/Sao_Paulo\n    missed: all\n    max_missed: 3\n    jitter: 5m\n    paused: true\n")
	require.NoError(t, err)
	require.Contains(t, changed.String(), "cron 30 2 * * * America/Sao_Paulo")
	_, err = read("")
	require.NoError(t, err)
	for content, want := range map[string]string{
		"crons:\n  audit-archive-worker:\n    sepc: 30 2 * * *\n": "field sepc not found",
		"cron:\n  audit-archive-worker: {}\n":                     "field cron not found",
		"crons:\n  audit-worker: {paused: true}\n":                "there is no such cron",
		"crons:\n  webhook-dispatch-worker: {paused: true}\n":     "there is no such cron",
		"crons:\n  audit-archive-worker: {spec: '61 * * * *'}\n":  "above maximum",
		"crons:\n  audit-archive-worker: {jitter: 2h}\n":          "the jitter 2h0m0s is not",
		"\x00": "control characters",
	} {
		_, err := read(content)
		require.ErrorContains(t, err, want, content)
	}
	_, err = overrideCrons(plan, "/nowhere/crons.yaml")
	require.ErrorContains(t, err, "AFLUENTE_CRONS_FILE")

	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "crons.yaml")
	require.NoError(t, os.WriteFile(path, []byte("crons: {nobody: {}}"), 0o600))
	code, _, stderr := runCommand(t, w.url, "serve", "--listen", "127.0.0.1:0", "--crons-file", path)
	require.Equal(t, 2, code)
	require.Contains(t, stderr, `override "nobody"`)
}

// The crons run in the processes that are to fire them, and are fired there.
func TestServeFiresCronsUnlessToldNotTo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "crons.yaml")
	require.NoError(t, os.WriteFile(path, []byte("crons: {partition-maintenance: {spec: '@every 1s'}}"), 0o600))
	idle, _ := w.serve(t, "--crons-file", path, "--no-crons")
	eventually(t, time.Minute, "a due cron", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM crons WHERE name = 'partition-maintenance' AND next_tick < now() - interval '2 seconds'") == 1
	})
	require.Zero(t, number(t, w.pool, "SELECT count(*) FROM cron_ticks WHERE cron = 'partition-maintenance'"))
	w.serve(t, "--crons-file", path)
	eventually(t, time.Minute, "three runs", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE kind = 'partition-maintenance' AND state = 'completed'") >= 3
	})
	idle.stop(t)
}
