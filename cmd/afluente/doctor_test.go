package main

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
)

func TestDoctorFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		statement string // breaks something
		want      finding
	}{
		"no settle trigger": {
			"DROP TRIGGER afluente_settle_updated ON river.river_job",
			finding{"triggers", stateFault, "missing or disabled: afluente_settle_updated"},
		},
		"no trigger of lanes": {
			"DROP TRIGGER afluente_yield_updated ON river.river_job",
			finding{"triggers", stateFault, "missing or disabled: afluente_yield_updated"},
		},
		"trigger disabled": {
			"ALTER TABLE event_log DISABLE TRIGGER event_log_notify_high_priority",
			finding{"triggers", stateFault, "missing or disabled: event_log_notify_high_priority"},
		},
		"month without partition": {
			"DO $$ BEGIN EXECUTE format('DROP TABLE event_log_%s', to_char(now() AT TIME ZONE 'UTC' + interval '1 month', 'YYYYMM')); END $$",
			finding{"partitions", stateWarn, "no partition yet for"},
		},
		"stray event": {
			"INSERT INTO event_log (organization_id, event_type, entity_kind, created_at, status) SELECT id, 'a.b', 'a', '2001-01-01', 'processing' FROM organizations",
			finding{"partitions", stateWarn, "1 events in the default partition"},
		},
		"nobody fans out": {
			"INSERT INTO event_log (organization_id, event_type, entity_kind, created_at) SELECT id, 'a.b', 'a', now() - interval '2 minutes' FROM organizations",
			finding{"lag", stateFault, "does a process with the bridge run?"},
		},
		"dead letters": {
			"INSERT INTO event_log (organization_id, event_type, entity_kind, status, dead_consumers) SELECT id, 'a.b', 'a', 'dead', '{x-worker}' FROM organizations, generate_series(1, 3)",
			finding{"dead letters", stateWarn, "x-worker 3"},
		},
		"departs from the catalogue": {
			"INSERT INTO event_log (organization_id, event_type, entity_kind, schema_fault) SELECT id, 'a.b', 'a', 'unknown event type' FROM organizations, generate_series(1, 2)",
			finding{"catalogue", stateWarn, "a.b: unknown event type (2, last "},
		},
		"consumer of another version": {
			"INSERT INTO event_consumers (name, event_types, queue, max_attempts) VALUES ('new-worker', '{a.b}', 'q', 8)",
			finding{"consumers", stateWarn, "new-worker"},
		},
		"no leader": {
			"DELETE FROM river.river_leader",
			finding{"leader", stateFault, "no River client leads"},
		},
		"nobody listens": {
			"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'",
			finding{"listeners", stateWarn, "no bridge listens"},
		},
		"dead letters unguarded": {
			"ALTER TABLE river.river_job DISABLE TRIGGER afluente_keep_dead",
			finding{"triggers", stateFault, "afluente_keep_dead"},
		},
		"archive stands still": {
			"SELECT create_event_log_partition(now() - interval '100 days'); INSERT INTO event_log (organization_id, event_type, entity_kind, created_at, status) SELECT id, 'a.b', 'a', now() - interval '100 days', 'done' FROM organizations",
			finding{"retention", stateWarn, "does audit-archive-worker run"},
		},
		"job of another version": {
			"INSERT INTO river.river_job (kind, queue, args, state, max_attempts) VALUES ('new-worker', 'q', '{}', 'retryable', 8)",
			finding{"kinds", stateWarn, "new-worker"},
		},
		"cron that nobody fires": {
			`INSERT INTO crons (name, spec, zone, missed, max_missed, jitter, disabled, next_tick)
				VALUES ('audit-archive-worker', '* * * * *', 'UTC', 'skip', 1, '0', false, now() - interval '6 minutes')`,
			finding{"crons", stateFault, "due and not fired: audit-archive-worker"},
		},
		"secret in plain": {
			"INSERT INTO webhook_subscriptions (organization_id, url, secret, event_types) SELECT id, '', 'x', '{}' FROM organizations",
			finding{"webhooks", stateWarn, "1 have their secret in plain"},
		},
		"secret of a lost key": {
			"INSERT INTO webhook_subscriptions (organization_id, url, event_types, secret_fault) SELECT id, '', '{}', 'lost' FROM organizations",
			finding{"webhooks", stateWarn, "1 send nothing"},
		},
		"paused queue": {
			"INSERT INTO river.river_queue (name, paused_at, updated_at) VALUES ('webhooks', now(), now())",
			finding{"queues", stateWarn, "paused: webhooks"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := dbtest.New(t)
			mustExec(t, pool, "INSERT INTO organizations DEFAULT VALUES")
			mustExec(t, pool, "INSERT INTO river.river_leader (leader_id, elected_at, expires_at) VALUES ('x', now(), now() + interval '1 hour')")
			listener, err := pool.Acquire(t.Context())
			require.NoError(t, err)
			defer listener.Release()
			_, err = listener.Exec(t.Context(), "LISTEN event_log_high")
			require.NoError(t, err)
			findings, err := examine(t.Context(), pool, 90*24*time.Hour)
			require.NoError(t, err)
			for _, f := range findings {
				require.Equal(t, stateOK, f.State, f)
			}
			mustExec(t, pool, tt.statement)
			findings, err = examine(t.Context(), pool, 90*24*time.Hour)
			require.NoError(t, err)
			for _, f := range findings {
				if f.Check != tt.want.Check {
					require.Equal(t, stateOK, f.State, f)
					continue
				}
				require.Equal(t, tt.want.State, f.State, f)
				require.Contains(t, f.Detail, tt.want.Detail)
			}
		})
	}
}

func TestDoctorSaysWhoMayNotDoTheWork(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig(dbtest.URL(t))
	require.NoError(t, err)
	mustExec(t, dbtest.Pool(t, config.Copy()), `GRANT USAGE ON SCHEMA river TO authenticated;
		GRANT ALL ON ALL TABLES IN SCHEMA public TO authenticated;
		GRANT ALL ON ALL TABLES IN SCHEMA river TO authenticated`)
	config.ConnConfig.RuntimeParams["role"] = "authenticated"
	findings, err := examine(t.Context(), dbtest.Pool(t, config), 90*24*time.Hour)
	require.NoError(t, err)
	require.Equal(t, stateFault, findings[1].State)
	require.Contains(t, findings[1].Detail, "row level security")
}

func TestDoctorExits1OnAFaultAnd0Without(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	code, stdout, stderr := runCommand(t, w.url, "doctor", "--json")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "1 of 16 checks found a fault")
	var findings []finding
	require.NoError(t, json.Unmarshal([]byte(stdout), &findings))
	require.Len(t, findings, 16)

	w.serve(t)
	eventually(t, time.Minute, "a healthy program", func() bool {
		code, stdout, _ = runCommand(t, w.url, "doctor")
		return code == 0
	})
	require.NotContains(t, stdout, stateFault)

	code, stdout, _ = runCommand(t, dbtest.Empty(t), "doctor")
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "afluente migrate up")
}

func mustExec(t *testing.T, pool *pgxpool.Pool, statement string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), statement)
	require.NoError(t, err)
}

func TestMetricCountsEventsThatDepartFromTheCatalogue(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, at := w.serve(t)
	w.emit(t, demoOrganization, "lead.painted", `{}`)
	w.emit(t, demoOrganization, "lead.painted", `{}`)
	w.emit(t, demoOrganization, "lead.lost", `{"reason": "price", "lost_at": "2026-12-01T12:00:00Z"}`)
	eventually(t, time.Minute, "the metric", func() bool {
		code, body := get(t, "http://"+at+"/metrics")
		require.Equal(t, http.StatusOK, code)
		require.NotContains(t, body, `event_log_schema_faults{event_type="lead.lost"`)
		return strings.Contains(body, `event_log_schema_faults{event_type="lead.painted",fault="unknown event type"} 2`)
	})

	code, stdout, _ := runCommand(t, w.url, "events", "list", "--type", "lead.painted", "--json")
	require.Zero(t, code)
	var events []eventView
	require.NoError(t, json.Unmarshal([]byte(stdout), &events))
	code, stdout, _ = runCommand(t, w.url, "events", "show", events[0].ID.String())
	require.Zero(t, code)
	require.Regexp(t, `schema fault +unknown event type`, stdout)
}
