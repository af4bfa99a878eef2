package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"afluente/db"
)

func TestTraceShowsWhatARequestBroughtAbout(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(t)
	mustExec(t, w.pool, `BEGIN;
		SET LOCAL afluente.metadata = '{"request_id": "req-1", "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}';
		INSERT INTO audit_log (organization_id, actor_id, action, metadata)
			VALUES ('`+demoOrganization+`', 'user-7', 'message.create', '{"request_id": "req-1"}');
		INSERT INTO demo_messages (body) VALUES ('hello');
		COMMIT`)
	eventually(t, time.Minute, "both events done", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM event_log WHERE status = 'done'") == 2
	})

	code, stdout, stderr := runCommand(t, w.url, "events", "trace", "req-1")
	require.Zero(t, code, stderr)
	require.Regexp(t, `(?m)^\S+ +audit +message\.create +- +user-7 `, stdout)
	require.Regexp(t, `(?m)^\S+ +event +message\.queued +done +demo_messages `, stdout)
	require.Regexp(t, `(?m)^\S+ +event +└─ message\.sent +done +whatsapp-send-worker `, stdout)

	code, stdout, _ = runCommand(t, w.url, "events", "trace", "req-1", "--json")
	require.Zero(t, code)
	var roots []traced
	require.NoError(t, json.Unmarshal([]byte(stdout), &roots))
	require.Len(t, roots, 2)
	require.Len(t, roots[1].Causes, 1)

	for _, call := range append(w.waha.Calls(), w.receiver.Calls()...) {
		require.Equal(t, "req-1", call.Header.Get("X-Request-Id"))
		require.Regexp(t, "^00-4bf92f3577b34da6a3ce929d0e0e4736-[0-9a-f]{16}-01$", call.Header.Get("Traceparent"))
	}
	code, _, stderr = runCommand(t, w.url, "events", "trace", "req-2")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, `nothing carries the request id "req-2"`)
}

// What causes itself, as an emitter may claim, is shown all the same.
func TestTreeOfACircleEnds(t *testing.T) {
	t.Parallel()
	row := func(id, cause string) db.ListRequestRow {
		return db.ListRequestRow{ID: id, CausationID: cause, Kind: "event"}
	}
	roots := growTree([]db.ListRequestRow{row("a", "b"), row("b", "a"), row("c", "c"), row("d", "gone"), row("e", "a")})
	var shown bytes.Buffer
	require.NoError(t, printTree(&shown, roots))
	require.Equal(t, 6, strings.Count(shown.String(), "\n"))
	require.Len(t, roots, 4)
}

// The archive's process is killed with kill -9 again and again, wherever it is
// then; in the end nothing is lost and nothing doubled, and a day comes back.
func TestKilledArchiveLosesNothing(t *testing.T) {
	t.Parallel()
	const rows, days = 6000, 5
	w := newWorld(t)
	folder := filepath.Join(t.TempDir(), "archive")
	mustExec(t, w.pool, fmt.Sprintf(`INSERT INTO event_log (organization_id, event_type, entity_kind, status, created_at, updated_at)
		SELECT '%s', 'lead.won', 'lead', 'done', date_trunc('day', now(), 'UTC') - make_interval(days => 100 + i %% %d), now() FROM generate_series(1, %d) AS i`,
		demoOrganization, days, rows))
	stored := func() (lines int) {
		_ = filepath.WalkDir(folder, func(path string, _ os.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(path, ".ndjson.gz") {
				lines++
			}
			return nil
		})
		return lines
	}
	for attempt := range 5 {
		mustExec(t, w.pool, "DELETE FROM river.river_job")
		p := start(t, w.environ("AFLUENTE_ARCHIVE_URL=file://"+folder), "serve", "--listen", "127.0.0.1:0")
		p.stderr.await(t, `"serving"`)
		mustExec(t, w.pool, "INSERT INTO river.river_job (kind, queue, max_attempts, args) VALUES ('audit-archive-worker', 'maintenance', 8, '{}')")
		eventually(t, time.Minute, "a part is there", func() bool {
			return stored() > attempt || number(t, w.pool, "SELECT count(*) FROM event_log") == 0
		})
		require.NoError(t, p.command.Process.Kill())
		p.wait(t)
	}
	mustExec(t, w.pool, "DELETE FROM river.river_job")
	p := start(t, w.environ("AFLUENTE_ARCHIVE_URL=file://"+folder), "serve", "--listen", "127.0.0.1:0")
	mustExec(t, w.pool, "INSERT INTO river.river_job (kind, queue, max_attempts, args) VALUES ('audit-archive-worker', 'maintenance', 8, '{}')")
	eventually(t, time.Minute, "the archive is whole", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE kind = 'audit-archive-worker' AND state = 'completed' AND metadata ? 'output'") == 1
	})
	p.stop(t)
	require.Zero(t, number(t, w.pool, "SELECT count(*) FROM event_log"))

	for i := range days {
		day := time.Now().UTC().AddDate(0, 0, -100-i).Format(time.DateOnly)
		args := []string{"events", "restore", "--day", day, "--archive-url", "file://" + folder}
		code, stdout, stderr := runCommand(t, w.url, append(args, "--print")...)
		require.Zero(t, code, stderr)
		require.Equal(t, rows/days, strings.Count(stdout, "\n"))
		code, stdout, stderr = runCommand(t, w.url, args...)
		require.Zero(t, code, stderr)
		require.Contains(t, stdout, fmt.Sprintf("restored %d\n", rows/days))
	}
	require.Equal(t, rows, number(t, w.pool, "SELECT count(DISTINCT id) FROM event_log"))
	code, _, stderr := runCommand(t, w.url, "events", "restore", "--day", "2001-01-01", "--archive-url", "file://"+folder)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "the archive has nothing of event_log on 2001-01-01")
	require.Zero(t, number(t, w.pool, "SELECT count(*) FROM pg_class WHERE relname = 'event_log_200101'"))
	code, _, _ = runCommand(t, w.url, "events", "restore", "--day", "yesterday")
	require.Equal(t, 2, code)
}
