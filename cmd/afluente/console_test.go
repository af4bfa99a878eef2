package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/crypto/bcrypt"

	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/jobs"
)

// webServer is the program's web server on a database, without a bridge or
// workers.
type webServer struct {
	*httptest.Server

	pool *pgxpool.Pool
}

func newWebServer(t *testing.T, config Config) *webServer {
	t.Helper()
	pool := dbtest.New(t)
	plan, err := eventlog.Compile(jobs.All(jobs.Deps{})...)
	require.NoError(t, err)
	client, err := eventlog.NewClient(eventlog.ClientConfig{Pool: pool, Plan: plan, Log: zap.NewNop(), Queues: []string{}})
	require.NoError(t, err)
	scheduler, err := eventlog.NewScheduler(eventlog.SchedulerConfig{Pool: pool, Plan: plan, Log: zap.NewNop()})
	require.NoError(t, err)
	require.NoError(t, scheduler.Register(t.Context()))
	handler, err := newHandler(t.Context(), config, backend{
		crons:  &cronHandler{scheduler: scheduler, secrets: config.CronSecrets, log: zap.NewNop()},
		stream: http.NotFoundHandler(), metrics: http.NotFoundHandler(), health: &health{pool: pool, log: zap.NewNop()},
		pool: pool, client: client, log: zap.NewNop(),
	})
	require.NoError(t, err)
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return &webServer{Server: server, pool: pool}
}

// do asks with headers in pairs; "user" and "password" sign in.
func (s *webServer) do(t *testing.T, method, path, body string, headers ...string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, strings.NewReader(body))
	require.NoError(t, err)
	for i := 0; i < len(headers); i += 2 {
		if headers[i] == "user" {
			user, password, _ := strings.Cut(headers[i+1], ":")
			request.SetBasicAuth(user, password)
		} else {
			request.Header.Set(headers[i], headers[i+1])
		}
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := client.Do(request)
	require.NoError(t, err)
	content, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	return response.StatusCode, response.Header.Get("Location") + string(content)
}

// die makes dead jobs of an event and returns their ids. The first letter
// belongs to the first consumer.
func (s *webServer) die(t *testing.T, consumers ...string) (ids []int64) {
	t.Helper()
	mustExec(t, s.pool, "INSERT INTO organizations (id) VALUES ('"+demoOrganization+"') ON CONFLICT DO NOTHING")
	for _, consumer := range consumers {
		var id int64
		require.NoError(t, s.pool.QueryRow(t.Context(), `WITH e AS (
				INSERT INTO event_log (organization_id, event_type, entity_kind, status, consumers, dead_consumers)
				VALUES ($2, 'lead.won', 'lead', 'dead', ARRAY[$1], ARRAY[$1]) RETURNING id, created_at
			)
			INSERT INTO river.river_job (kind, queue, args, state, attempt, max_attempts, finalized_at, metadata)
			SELECT $1, 'default', '{}', 'discarded', 8, 8, now(), jsonb_build_object('event_id', id, 'event_created_at', created_at, 'consumer', $1) FROM e
			RETURNING id`, consumer, demoOrganization).Scan(&id))
		ids = append(ids, id)
	}
	return ids
}

func clicked(ids ...int64) string {
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = fmt.Sprint(id)
	}
	body, _ := json.Marshal(map[string]any{"ids": texts})
	return string(body)
}

const statesPath = "/riverui/api/states"

func TestConsoleLetsInWhoKnowsThePassword(t *testing.T) {
	t.Parallel()
	hash, err := bcrypt.GenerateFromPassword([]byte("hush-hush"), bcrypt.MinCost)
	require.NoError(t, err)
	for name, password := range map[string]string{"plain": "hush-hush", "bcrypt": string(hash)} {
		server := newWebServer(t, Config{UIUser: "ada", UIPassword: password})
		for range 2 { // the second time without bcrypt
			code, _ := server.do(t, http.MethodGet, statesPath, "", "user", "ada:hush-hush")
			require.Equal(t, http.StatusOK, code, name)
			for _, wrong := range []string{"ada:hush", "eve:hush-hush", "ada:", ":hush-hush", ":", "ada:" + strings.Repeat("x", 100), "ada:" + string(hash)} {
				code, _ = server.do(t, http.MethodGet, statesPath, "", "user", wrong)
				require.Equal(t, http.StatusUnauthorized, code, name+" "+wrong)
			}
		}
		for _, path := range []string{"/riverui/", statesPath, "/riverui/api/health-checks/complete", "/riverui/../riverui/api/states"} {
			code, _ := server.do(t, http.MethodGet, path, "")
			require.Contains(t, []int{http.StatusUnauthorized, http.StatusTemporaryRedirect}, code, path)
		}
		code, _ := server.do(t, http.MethodPost, "/api/dlq/list", "")
		require.Equal(t, http.StatusUnauthorized, code)
	}
}

func TestConsoleBelievesTheTrustedProxyAlone(t *testing.T) {
	t.Parallel()
	config := Config{UIUserHeader: "X-Forwarded-User", TrustedProxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
	server := newWebServer(t, config)
	code, _ := server.do(t, http.MethodGet, statesPath, "", "X-Forwarded-User", "ada")
	require.Equal(t, http.StatusOK, code)
	code, _ = server.do(t, http.MethodGet, statesPath, "")
	require.Equal(t, http.StatusForbidden, code)

	config.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	server = newWebServer(t, config)
	code, _ = server.do(t, http.MethodGet, statesPath, "", "X-Forwarded-User", "ada")
	require.Equal(t, http.StatusForbidden, code, "anybody may send the header")

	config.UIUser, config.UIPassword = "bea", "hush-hush"
	server = newWebServer(t, config)
	code, _ = server.do(t, http.MethodGet, statesPath, "", "X-Forwarded-User", "ada")
	require.Equal(t, http.StatusUnauthorized, code)
	code, _ = server.do(t, http.MethodGet, statesPath, "", "user", "bea:hush-hush")
	require.Equal(t, http.StatusOK, code)
}

func TestPagesOfOtherSitesPressNoButtons(t *testing.T) {
	t.Parallel()
	server := newWebServer(t, Config{PublicURL: &url.URL{Scheme: "https", Host: "ops.example.com"}})
	ids := server.die(t, "x-worker")
	for _, path := range []string{
		"/riverui/api/jobs/retry", "/riverui/api/jobs/delete", "/riverui/api/jobs/cancel", "/riverui/api/queues/default/pause",
		"/api/dlq/retry", "/api/dlq/discard",
	} {
		for _, headers := range [][]string{
			{"Sec-Fetch-Site", "cross-site", "Content-Type", "text/plain"},
			{"Sec-Fetch-Site", "same-site"},
			{"Origin", "https://evil.example"},
			{"Origin", "null"},
		} {
			code, _ := server.do(t, http.MethodPost, path, clicked(ids...), headers...)
			require.Equal(t, http.StatusForbidden, code, path, headers)
		}
	}
	require.Equal(t, 1, number(t, server.pool, "SELECT count(*) FROM river.river_job WHERE state = 'discarded'"))
	// A proxy that sets another Host does not make its own page another site's.
	code, _ := server.do(t, http.MethodPost, "/riverui/api/jobs/retry", clicked(ids...), "Origin", "https://ops.example.com")
	require.Equal(t, http.StatusOK, code)

	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/riverui/", nil)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, "frame-ancestors 'none'", response.Header.Get("Content-Security-Policy"))
}

func TestConsoleStandsBehindAnyPath(t *testing.T) {
	t.Parallel()
	for _, public := range []string{"https://example.com", "https://example.com/", "https://example.com/ops/bus", "https://example.com/a%20b/"} {
		parsed, err := url.Parse(public)
		require.NoError(t, err)
		server := newWebServer(t, Config{PublicURL: parsed})
		path := strings.TrimRight(parsed.EscapedPath(), "/")
		for _, kept := range []string{path, ""} { // the proxy keeps the path, or strips it
			code, body := server.do(t, http.MethodGet, kept+"/riverui/", "")
			require.Equal(t, http.StatusOK, code, public, kept)
			require.Contains(t, body, `src="`+path+`/riverui/assets/`)
			code, _ = server.do(t, http.MethodGet, kept+statesPath, "")
			require.Equal(t, http.StatusOK, code, public, kept)
			code, _ = server.do(t, http.MethodGet, kept+"/healthz", "")
			require.Equal(t, http.StatusOK, code, public, kept)
			id := server.die(t, "x-worker")
			code, _ = server.do(t, http.MethodPost, kept+"/riverui/api/jobs/retry", clicked(id...))
			require.Equal(t, http.StatusOK, code, public, kept)
			for _, from := range []string{kept + "/", kept + "/riverui"} {
				code, location := server.do(t, http.MethodGet, from, "")
				require.Equal(t, http.StatusFound, code, from)
				require.Contains(t, location, path+"/riverui/")
			}
		}
		require.Zero(t, number(t, server.pool, "SELECT count(*) FROM river.river_job WHERE state = 'discarded'"))
	}
}

func TestDeleteInTheConsoleIsRecordedAndSettlesTheEvent(t *testing.T) {
	t.Parallel()
	server := newWebServer(t, Config{UIUser: "ada", UIPassword: "hush-hush"})
	ids := server.die(t, "x-worker", "y-worker")
	code, body := server.do(t, http.MethodPost, "/riverui/api/jobs/delete", clicked(ids...),
		"user", "ada:hush-hush", "X-Reason", "a test order")
	require.Equal(t, http.StatusOK, code)
	require.JSONEq(t, `{"status": "ok"}`, body)
	require.Equal(t, 2, number(t, server.pool, `SELECT count(*) FROM audit_log WHERE action = 'dead_letter.discarded'
		AND actor_id = 'ada' AND reason = 'a test order' AND metadata ->> 'event_type' = 'lead.won'`))
	require.Equal(t, 2, number(t, server.pool, "SELECT count(*) FROM event_log WHERE status = 'done'"))
}

type onceArgs struct {
	N int `json:"n"`
}

func (onceArgs) Kind() string { return "once-worker" }

func (onceArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}
}

func TestClickThatCannotBeLeavesTheOthersAloneAndIsReported(t *testing.T) {
	t.Parallel()
	server := newWebServer(t, Config{})
	client, err := river.NewClient(riverpgxv5.New(server.pool), &river.Config{Schema: "river"})
	require.NoError(t, err)
	first, err := client.Insert(t.Context(), onceArgs{1}, nil)
	require.NoError(t, err)
	mustExec(t, server.pool, "UPDATE river.river_job SET state = 'discarded', finalized_at = now()")
	_, err = client.Insert(t.Context(), onceArgs{1}, nil)
	require.NoError(t, err)

	dead := append(server.die(t, "x-worker", "y-worker"), first.Job.ID)
	code, body := server.do(t, http.MethodPost, "/riverui/api/jobs/retry", clicked(dead...))
	require.Equal(t, http.StatusConflict, code)
	require.JSONEq(t, fmt.Sprintf(`{"message": "2 of 3 retried; job %d has a twin of the same unique key that is not dead"}`, first.Job.ID), body)
	require.Equal(t, 2, number(t, server.pool, "SELECT count(*) FROM river.river_job WHERE state = 'available' AND kind <> 'once-worker'"))
	require.Equal(t, 2, number(t, server.pool, "SELECT count(*) FROM event_log WHERE status = 'processing'"))

	mustExec(t, server.pool, "UPDATE river.river_job SET state = 'running' WHERE kind = 'x-worker'")
	code, body = server.do(t, http.MethodPost, "/riverui/api/jobs/delete", clicked(dead[0], dead[1], 999_999))
	require.Equal(t, http.StatusNotFound, code)
	require.JSONEq(t, fmt.Sprintf(`{"message": "1 of 3 deleted; job %d is running, job 999999 is gone"}`, dead[0]), body)

	for _, wrong := range []string{"", "{}", `{"ids": []}`, `{"ids": ["x"]}`, `{"ids": ["99999999999999999999"]}`, "\x00", `{"ids": [` + strings.Repeat(`"1",`, 20_000) + `"1"]}`} {
		code, _ = server.do(t, http.MethodPost, "/riverui/api/jobs/retry", wrong)
		require.Equal(t, http.StatusBadRequest, code, wrong[:min(len(wrong), 20)])
	}
}

func TestDeadLettersOverHTTP(t *testing.T) {
	t.Parallel()
	server := newWebServer(t, Config{UIUser: "ada", UIPassword: "hush-hush"})
	ask := func(action, body string) (int, string) {
		return server.do(t, http.MethodPost, "/api/dlq/"+action, body, "user", "ada:hush-hush")
	}
	server.die(t, "x-worker", "x-worker", "y-worker")
	code, body := ask("list", `{"consumer": "y-worker", "type": "lead.won", "org": "`+demoOrganization+`", "kind": "lead", "since": "2026-01-01T00:00:00Z"}`)
	require.Equal(t, http.StatusOK, code)
	var letters []eventlog.DeadLetter
	require.NoError(t, json.Unmarshal([]byte(body), &letters))
	require.Len(t, letters, 1)
	require.Equal(t, uuid.MustParse(demoOrganization), *letters[0].OrganizationID)

	code, body = ask("retry", `{"consumer": "x-worker", "dry_run": true}`)
	require.Equal(t, http.StatusOK, code)
	require.JSONEq(t, `{"found": 2, "moved": 0, "gone": 0}`, body)
	code, body = ask("retry", `{"consumer": "x-worker", "rate": 0}`)
	require.Equal(t, http.StatusOK, code)
	require.JSONEq(t, `{"found": 2, "moved": 2, "gone": 0}`, body)
	code, body = ask("discard", `{"reason": "a test order"}`)
	require.Equal(t, http.StatusOK, code)
	require.JSONEq(t, `{"found": 1, "moved": 1, "gone": 0}`, body)
	require.Equal(t, 1, number(t, server.pool, "SELECT count(*) FROM audit_log WHERE actor_id = 'ada' AND reason = 'a test order'"))

	for action, bodies := range map[string][]string{
		"list":    {`{"limit": 0}`, `{"limit": 1000000}`, "[]", `{"org": "x"}`, `{"since": "yesterday"}`, `{"comsumer": "x-worker"}`, `{"type": "\u0000"}`},
		"retry":   {`{"rate": -1}`, "\x00", `{"consumer": "` + strings.Repeat("x", 70<<10) + `"}`},
		"discard": {"", `{"reason": ""}`},
	} {
		for _, wrong := range bodies {
			code, body := ask(action, wrong)
			require.Equal(t, http.StatusBadRequest, code, wrong)
			require.Contains(t, body, `"message"`)
		}
	}
	code, _ = ask("eat", "")
	require.Equal(t, http.StatusNotFound, code)
	code, _ = server.do(t, http.MethodGet, "/api/dlq/list", "", "user", "ada:hush-hush")
	require.Equal(t, http.StatusMethodNotAllowed, code)
}
