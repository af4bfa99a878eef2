package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"afluente/eventlog"
)

func TestDLQCommands(t *testing.T) {
	t.Parallel()
	server := newWebServer(t, Config{})
	url := server.pool.Config().ConnString()
	server.die(t, "x-worker", "x-worker", "y-worker")

	code, stdout, stderr := runCommand(t, url, "dlq", "list", "--consumer", "x-worker")
	require.Zero(t, code, stderr)
	require.Regexp(t, `(?m)^\S+ +\d+ +x-worker +discarded +lead\.won +`, stdout)
	require.NotContains(t, stdout, "y-worker")

	code, stdout, _ = runCommand(t, url, "dlq", "retry", "--consumer", "x-worker", "--dry-run")
	require.Zero(t, code)
	require.Equal(t, "2 would be retried\n", stdout)
	code, stdout, _ = runCommand(t, url, "dlq", "retry", "--consumer", "x-worker", "--since", "1h", "--rate", "0", "--json")
	require.Zero(t, code)
	require.JSONEq(t, `{"found": 2, "moved": 2, "gone": 0}`, stdout)
	require.Equal(t, 2, number(t, server.pool, "SELECT count(*) FROM river.river_job WHERE state = 'available'"))

	code, _, stderr = runCommand(t, url, "dlq", "discard", "--consumer", "y-worker")
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "--reason is required")
	code, stdout, _ = runCommand(t, url, "dlq", "discard", "--consumer", "y-worker", "--reason", "a test order")
	require.Zero(t, code)
	require.Equal(t, "1 of 1 discarded\n", stdout)
	require.Equal(t, 1, number(t, server.pool, "SELECT count(*) FROM audit_log WHERE actor_id LIKE 'shell%' AND reason = 'a test order'"))

	for _, wrong := range [][]string{
		{"dlq", "list", "--limit", "0"},
		{"dlq", "list", "--since", "yesterday"},
		{"dlq", "retry", "--rate", "-1"},
		{"dlq", "retry", "--org", "x"},
		{"dlq", "retry", "x"},
	} {
		code, _, _ = runCommand(t, url, wrong...)
		require.Equal(t, 2, code, wrong)
	}
}

func TestReplaySendsStoredAndArchivedEvents(t *testing.T) {
	t.Parallel()
	server := newWebServer(t, Config{})
	url := server.pool.Config().ConnString()
	code, _, stderr := runCommand(t, url, "replay", "--consumer", "webhook-dispatch-worker", "--since", "1h")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "the consumer is not registered")
	mustExec(t, server.pool, `INSERT INTO event_consumers (name, event_types, queue, max_attempts) VALUES ('webhook-dispatch-worker', '{*}', 'webhooks', 8);
		INSERT INTO organizations (id) VALUES ('`+demoOrganization+`')`)
	mustExec(t, server.pool, `SELECT create_event_log_partition(now() - interval '100 days');
		INSERT INTO event_log (organization_id, event_type, entity_kind, status, created_at)
		SELECT id, 'lead.won', 'lead', 'done', at FROM organizations, unnest(ARRAY[now(), now() - interval '100 days']) AS at`)
	folder := t.TempDir()
	archiveURL := "file://" + filepath.ToSlash(folder)
	store := newArchive(Config{ArchiveURL: archiveURL, Retention: 90 * 24 * time.Hour}, server.pool)
	_, err := store.Run(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, number(t, server.pool, "SELECT count(*) FROM event_log"))
	entries, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.NotEmpty(t, entries)

	replay := func(args ...string) (int, string) {
		code, stdout, _ := runCommand(t, url, append([]string{
			"replay", "--consumer", "webhook-dispatch-worker", "--since", "9000h", "--archive-url", archiveURL,
		}, args...)...)
		return code, stdout
	}
	code, stdout := replay("--dry-run")
	require.Zero(t, code)
	require.Equal(t, "1 would be sent\n", stdout)
	code, stdout = replay("--archived")
	require.Zero(t, code)
	require.Equal(t, "2 sent\n", stdout)
	require.Equal(t, 2, number(t, server.pool, "SELECT count(*) FROM river.river_job WHERE 'replay' = ANY (tags)"))
	require.Equal(t, 2, number(t, server.pool, "SELECT count(*) FROM event_log WHERE status = 'processing'"))
	code, stdout = replay("--archived", "--json")
	require.Zero(t, code)
	var moved eventlog.Moved
	require.NoError(t, json.Unmarshal([]byte(stdout), &moved))
	require.Zero(t, moved)

	for _, wrong := range [][]string{
		{"replay"},
		{"replay", "--consumer", "x"},
		{"replay", "--consumer", "x", "--since", "x"},
		{"replay", "--consumer", "x", "--since", "1h", "--archived", "--dry-run"},
	} {
		code, _, _ = runCommand(t, url, wrong...)
		require.Equal(t, 2, code, wrong)
	}
}
