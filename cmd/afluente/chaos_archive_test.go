package main

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// The disk is full when the first of three days is in the archive. What has to be
// deleted is only that day then, and the next run does the rest.
func TestChaosFullDiskOfTheArchiveLosesNothing(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	dir := openDir(t)
	mount := func(args ...string) error {
		return exec.CommandContext(t.Context(), "mount", append(args, "-t", "tmpfs", "tmpfs", dir)...).Run()
	}
	if err := mount("-o", "size=192k"); err != nil {
		t.Skip("a small disk cannot be mounted here: " + err.Error()) // containers without privileges cannot, in CI either
	}
	t.Cleanup(func() { _ = exec.Command("umount", "-l", dir).Run() }) //nolint:noctx // after the test; what is left the folder's removal tells

	w.serve(t, "--archive-url", "file://"+dir)
	load := w.startLoad(t, chaosRate())
	load.await(t, long(150, 600))
	load.conclude(t, onceOnly)

	// Old by now, and so random that they do not get smaller.
	_, err := w.pool.Exec(t.Context(), `
		UPDATE event_log AS e
		SET created_at = date_trunc('day', now()) - make_interval(days => 100 + (o.n % 3)::integer) + make_interval(mins => (o.n % 1000)::integer),
			payload = e.payload || jsonb_build_object('padding', o.padding)
		FROM (
			SELECT id, row_number() OVER (ORDER BY id) AS n, string_agg(md5(random()::text || id), '') AS padding
			FROM event_log, generate_series(1, $1::integer)
			GROUP BY id
		) AS o
		WHERE o.id = e.id`, long(64, 16))
	require.NoError(t, err)
	rows, err := w.pool.Query(t.Context(), "SELECT DISTINCT to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') FROM event_log")
	require.NoError(t, err)
	days, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Len(t, days, 3)
	all := w.rowsOfEvents(t)

	// archived returns the events in the archive.
	archived := func() map[string]string {
		found := make(map[string]string)
		for _, day := range days {
			code, stdout, stderr := runCommand(t, w.url, "events", "restore", "--archive-url", "file://"+dir, "--day", day, "--print")
			require.Zero(t, code, stderr)
			for line := range strings.Lines(stdout) {
				var row struct {
					ID string `json:"id"`
				}
				require.NoError(t, json.Unmarshal([]byte(line), &row))
				found[row.ID] = strings.TrimSpace(line)
			}
		}
		return found
	}
	// requireSafe requires that each event is in its table or in the archive, as it was.
	requireSafe := func() (inTable, inArchive int) {
		table, stored := w.rowsOfEvents(t), archived()
		for id, row := range all {
			if table[id] == "" {
				require.JSONEq(t, row, stored[id], "event %s is gone", id)
			}
		}
		return len(table), len(stored)
	}

	runs := func(condition string) int {
		return number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE kind = 'audit-archive-worker' AND "+condition)
	}
	code, _, stderr := runCommand(t, w.url, "cron", "run", "audit-archive-worker")
	require.Zero(t, code, stderr)
	eventually(t, time.Minute, "a run that fails", func() bool { return runs("state = 'retryable'") == 1 })
	inTable, inArchive := requireSafe()
	t.Logf("full: %d of %d events in the table, %d in the archive", inTable, len(all), inArchive)
	require.Positive(t, inTable, "the disk was not full")
	require.Positive(t, inArchive, "nothing was archived before")
	require.Equal(t, 1, number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE kind = 'audit-archive-worker' AND errors::text LIKE '%no space left%'"))

	// A cron does not run beside a job of its own that waits, so it is that one that
	// makes up for it; it is what an operator would press retry for.
	require.NoError(t, mount("-o", "remount,size=64m"))
	_, err = w.pool.Exec(t.Context(), `UPDATE river.river_job SET state = 'available', scheduled_at = now()
		WHERE kind = 'audit-archive-worker' AND state = 'retryable'`)
	require.NoError(t, err)
	eventually(t, time.Minute, "a run that goes through", func() bool { return runs("state = 'completed'") == 1 })
	inTable, inArchive = requireSafe()
	t.Logf("not full: %d events in the table, %d in the archive", inTable, inArchive)
	require.Zero(t, inTable)
	require.Equal(t, len(all), inArchive)

	for _, day := range days {
		code, _, stderr := runCommand(t, w.url, "events", "restore", "--archive-url", "file://"+dir, "--day", day)
		require.Zero(t, code, stderr)
	}
	w.auditNow(t, load.ledger, onceOnly)
}

// rowsOfEvents returns all events as JSON, by their ids.
func (w *world) rowsOfEvents(t *testing.T) map[string]string {
	t.Helper()
	rows, err := w.pool.Query(t.Context(), "SELECT id::text, to_jsonb(e)::text FROM event_log AS e")
	require.NoError(t, err)
	found := make(map[string]string)
	var id, row string
	_, err = pgx.ForEachRow(rows, []any{&id, &row}, func() error {
		found[id] = row
		return nil
	})
	require.NoError(t, err)
	return found
}
