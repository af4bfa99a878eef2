package main

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"afluente/eventlog"
)

const (
	testSecret        = "a-secret-of-at-least-thirty-two-bytes"
	otherOrganization = "00000000-0000-4000-8000-0000000000ff"
)

// sign makes a token with the claims, for an hour unless they say otherwise.
func sign(t *testing.T, method jwt.SigningMethod, key any, claims jwt.MapClaims) string {
	t.Helper()
	if _, ok := claims["exp"]; !ok {
		claims["exp"] = time.Now().Add(time.Hour).Unix()
	}
	token := jwt.NewWithClaims(method, claims)
	token.Header["kid"] = "k1"
	text, err := token.SignedString(key)
	require.NoError(t, err)
	return text
}

// demoToken is a good token of the demo organization.
func demoToken(t *testing.T) string {
	t.Helper()
	return sign(t, jwt.SigningMethodHS256, []byte(testSecret), jwt.MapClaims{"organization_id": demoOrganization})
}

// serveStream starts a process whose stream is on, and returns the stream's URL.
func (w *world) serveStream(t *testing.T, args ...string) (p *process, url string) {
	t.Helper()
	p = start(t, w.environ(), append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)...)
	return p, "http://" + address(t, p.stderr.await(t, `"serving"`)) + "/api/events/stream"
}

func (w *world) emit(t *testing.T, organization, eventType, payload string) (id string) {
	t.Helper()
	var made uuid.UUID
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) (err error) {
		made, err = eventlog.EmitRaw(t.Context(), tx, eventlog.RawEvent{
			Type: eventType, OrganizationID: uuid.MustParse(organization), Payload: []byte(payload),
		})
		return err
	}))
	return made.String()
}

// sse is an open stream.
type sse struct {
	response *http.Response
	lines    *bufio.Reader
}

func openStream(t *testing.T, url string, header http.Header) *sse {
	t.Helper()
	var response *http.Response
	eventually(t, time.Minute, "stream open", func() bool { // the process may still be connecting
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
		require.NoError(t, err)
		request.Header = header
		response, err = http.DefaultClient.Do(request) //nolint:bodyclose // below
		require.NoError(t, err)
		return response.StatusCode != http.StatusServiceUnavailable
	})
	t.Cleanup(func() { _ = response.Body.Close() })
	return &sse{response: response, lines: bufio.NewReader(response.Body)}
}

// next returns the fields of the next event that has data.
func (s *sse) next(t *testing.T) map[string]string {
	t.Helper()
	fields := make(map[string]string)
	for {
		line, err := s.lines.ReadString('\n')
		require.NoError(t, err)
		line = strings.TrimSuffix(line, "\n")
		if line == "" && fields["data"] != "" {
			return fields
		}
		if name, value, ok := strings.Cut(line, ": "); ok {
			fields[name] = value
		}
	}
}

func TestStreamShowsEventsAndResumes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	mustExec(t, w.pool, "INSERT INTO organizations (id) VALUES ('"+otherOrganization+"')")
	_, url := w.serveStream(t)
	header := http.Header{"Authorization": {"Bearer " + demoToken(t)}}
	stream := openStream(t, url+"?type=lead.*", header.Clone())
	require.Equal(t, "text/event-stream", stream.response.Header.Get("Content-Type"))
	require.Equal(t, "no-store", stream.response.Header.Get("Cache-Control"))

	w.emit(t, otherOrganization, "lead.won", `{}`)
	w.emit(t, demoOrganization, "message.received", `{}`)
	id := w.emit(t, demoOrganization, "lead.won", `{"value": 9007199254740993, "text": "<b>\nline"}`)
	got := stream.next(t)
	require.Equal(t, id, got["id"])
	require.Equal(t, "lead.won", got["event"])
	require.Contains(t, got["data"], `"payload":{"text":"<b>\nline","value":9007199254740993}`)
	require.NoError(t, stream.response.Body.Close())

	missed := w.emit(t, demoOrganization, "lead.lost", `{}`)
	header.Set("Last-Event-ID", id)
	again := openStream(t, url, header)
	require.Equal(t, missed, again.next(t)["id"])
	live := w.emit(t, demoOrganization, "lead.lost", `{"filler": "`+strings.Repeat("x", maxStreamData)+`"}`)
	got = again.next(t)
	require.Equal(t, live, got["id"])
	require.Contains(t, got["data"], `"truncated":true`)

	header.Set("Last-Event-ID", uuid.NewString())
	require.Equal(t, "reset", openStream(t, url, header).next(t)["event"])
}

func TestStreamEndsWithTheServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, url := w.serveStream(t)
	stream := openStream(t, url+"?access_token="+demoToken(t), nil)
	p.stop(t)
	_, err := io.ReadAll(stream.lines)
	require.NoError(t, err, "it was closed, not cut")
	require.NotContains(t, p.stderr.String(), "eyJ", "no token in the log")
}

func TestStreamIsOffWithoutKeysAndWithoutListen(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, at := w.serve(t, "--jwt-secret", "")
	code, body := get(t, "http://"+at+"/api/events/stream")
	require.Equal(t, http.StatusNotFound, code)
	require.Contains(t, body, "AFLUENTE_JWT_SECRET")

	_, url := w.serveStream(t, "--poll-only")
	code, body = get(t, url+"?access_token="+demoToken(t))
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Contains(t, body, "AFLUENTE_POLL_ONLY")
}

func TestTailPrintsEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(t)
	tail := start(t, []string{"DATABASE_URL=" + w.url}, "events", "tail", "--type", "lead.*")
	lines := start(t, []string{"DATABASE_URL=" + w.url}, "events", "tail", "--json", "--org", demoOrganization)
	eventually(t, time.Minute, "both listen", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN event_stream' AND datname = current_database()") == 2
	})
	w.emit(t, demoOrganization, "message.read", `{}`)
	id := w.emit(t, demoOrganization, "lead.won", `{"value": 1}`)
	require.Contains(t, tail.stdout.await(t, id), `lead.won  {"value": 1}`)
	require.Contains(t, lines.stdout.await(t, id), `"payload":{"value":1}`)
	require.NotContains(t, tail.stdout.String(), "message.read")
	tail.stop(t)
	lines.stop(t)
	code, _, stderr := runCommand(t, w.url, "events", "tail", "--type", "lead")
	require.Equal(t, 2, code, stderr)
}

// Every token but a good one of an organization is refused.
func TestStreamTokens(t *testing.T) {
	t.Parallel()
	elliptical, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	stranger, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	server := httptest.NewServer(keySet(t, map[string]any{"k1": elliptical.Public(), "k2": rsaKey.Public()}))
	defer server.Close()
	public, err := json.Marshal(elliptical.Public())
	require.NoError(t, err)

	good := jwt.MapClaims{"organization_id": demoOrganization}
	with := func(key string, value any) jwt.MapClaims {
		return jwt.MapClaims{"organization_id": demoOrganization, key: value}
	}
	hs := func(claims jwt.MapClaims) string { return sign(t, jwt.SigningMethodHS256, []byte(testSecret), claims) }
	es := sign(t, jwt.SigningMethodES256, elliptical, good)
	none, err := jwt.NewWithClaims(jwt.SigningMethodNone, with("exp", time.Now().Add(time.Hour).Unix())).SignedString(jwt.UnsafeAllowNoneSignatureType)
	require.NoError(t, err)
	forever, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{"organization_id": demoOrganization}).SignedString([]byte(testSecret))
	require.NoError(t, err)
	tests := map[string]struct {
		token string
		want  int
	}{
		"HS256":               {hs(good), http.StatusOK},
		"ES256":               {es, http.StatusOK},
		"nested claim":        {hs(jwt.MapClaims{"app_metadata": map[string]any{"organization_id": demoOrganization}}), http.StatusOK},
		"no token":            {"", http.StatusUnauthorized},
		"garbage":             {"a.b.c", http.StatusUnauthorized},
		"other secret":        {sign(t, jwt.SigningMethodHS256, []byte("another-secret-of-thirty-two-bytes"), good), http.StatusUnauthorized},
		"other key":           {sign(t, jwt.SigningMethodES256, stranger, good), http.StatusUnauthorized},
		"expired":             {hs(with("exp", time.Now().Add(-time.Minute).Unix())), http.StatusUnauthorized},
		"not valid yet":       {hs(with("nbf", time.Now().Add(time.Minute).Unix())), http.StatusUnauthorized},
		"never expires":       {forever, http.StatusUnauthorized},
		"none":                {none, http.StatusUnauthorized},
		"HS512":               {sign(t, jwt.SigningMethodHS512, []byte(testSecret), good), http.StatusUnauthorized},
		"public key as HS256": {sign(t, jwt.SigningMethodHS256, public, good), http.StatusUnauthorized},
		"payload swapped":     {strings.Join([]string{strings.Split(es, ".")[0], strings.Split(hs(jwt.MapClaims{"organization_id": otherOrganization}), ".")[1], strings.Split(es, ".")[2]}, "."), http.StatusUnauthorized},
		"no organization":     {hs(jwt.MapClaims{"sub": "x"}), http.StatusForbidden},
		"nil organization":    {hs(jwt.MapClaims{"organization_id": uuid.Nil.String()}), http.StatusForbidden},
		"bad organization":    {hs(jwt.MapClaims{"organization_id": "' OR true"}), http.StatusForbidden},
	}
	tokens, err := newTokens(t.Context(), Config{JWTSecret: testSecret, JWKSURL: server.URL}, zap.NewNop())
	require.NoError(t, err)
	onlyKeys, err := newTokens(t.Context(), Config{JWKSURL: server.URL}, zap.NewNop())
	require.NoError(t, err)
	for name, tt := range tests {
		handler := &streamHandler{tokens: tokens, stream: eventlog.NewStream(nil, zap.NewNop()), stopping: t.Context().Done()}
		response := httptest.NewRecorder()
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/api/events/stream", http.NoBody)
		request.Header.Set("Authorization", "Bearer "+tt.token)
		handler.ServeHTTP(response, request)
		if tt.want == http.StatusOK { // the stream does not run here
			require.Equal(t, http.StatusServiceUnavailable, response.Code, name)
			continue
		}
		require.Equal(t, tt.want, response.Code, "%s: %s", name, response.Body)
		require.NotContains(t, response.Body.String(), "secret", name)
	}
	_, err = onlyKeys.read(hs(good))
	require.Error(t, err, "no secret, so nothing is signed with one")
	_, err = onlyKeys.read(sign(t, jwt.SigningMethodHS256, []byte{}, good))
	require.Error(t, err)
}

// keySet serves public keys by their ids.
func keySet(t *testing.T, keys map[string]any) http.Handler {
	t.Helper()
	set := jwkset.NewMemoryStorage()
	for id, key := range keys {
		jwk, err := jwkset.NewJWKFromKey(key, jwkset.JWKOptions{Metadata: jwkset.JWKMetadataOptions{KID: id}})
		require.NoError(t, err)
		require.NoError(t, set.KeyWrite(t.Context(), jwk))
	}
	encoded, err := set.JSONPublic(t.Context())
	require.NoError(t, err)
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(encoded) })
}

func TestStreamAnswersThePreflight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, url := w.serveStream(t)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, url, http.NoBody)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusNoContent, response.StatusCode)
	require.Equal(t, "*", response.Header.Get("Access-Control-Allow-Origin"))
	require.Contains(t, response.Header.Get("Access-Control-Allow-Headers"), "Authorization")
	code, body := get(t, url+"?type=nonsense&access_token="+demoToken(t))
	require.Equal(t, http.StatusBadRequest, code, body)
}

// The stream of a token ends with the token, and beats while it is silent.
func TestStreamBeatsAndEndsWithItsToken(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stream := eventlog.NewStream(w.pool, zap.NewNop())
	ctx, stop := context.WithCancel(t.Context())
	running := make(chan error, 1)
	go func() { running <- stream.Run(ctx) }()
	tokens, err := newTokens(t.Context(), Config{JWTSecret: testSecret}, zap.NewNop())
	require.NoError(t, err)
	server := httptest.NewServer(&streamHandler{stream: stream, tokens: tokens, heartbeat: 10 * time.Millisecond, stopping: ctx.Done()})
	soon := sign(t, jwt.SigningMethodHS256, []byte(testSecret), jwt.MapClaims{
		"organization_id": demoOrganization, "exp": time.Now().Add(2*time.Second - maxTokenLeeway).Unix(),
	})
	body, err := io.ReadAll(openStream(t, server.URL+"?access_token="+soon, nil).lines)
	require.NoError(t, err)
	require.Contains(t, string(body), "retry: 2000\n\n: heartbeat\n\n: heartbeat\n\n")
	stop()
	require.NoError(t, <-running)
	server.Close()
}
