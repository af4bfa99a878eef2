package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"go.uber.org/zap"

	"afluente/eventlog"
)

const (
	// maxStreams is how many streams one process serves.
	maxStreams = 1000
	// maxStreamData is the largest payload that is sent along, in bytes. Above
	// it a screen gets the event without, marked as truncated.
	maxStreamData = 256 << 10
	// streamWriteTimeout is how long a write may hang before the other side is
	// taken for gone.
	streamWriteTimeout = 10 * time.Second
	// streamHeartbeat keeps proxies from closing a silent stream.
	streamHeartbeat = 15 * time.Second
	// maxTokenLeeway is how far the clock that made a token may be off.
	maxTokenLeeway = 30 * time.Second
)

// tokens reads the tokens of the application's users.
type tokens struct {
	secret []byte          // of HS256; nil without
	keys   keyfunc.Keyfunc // of ES256 and RS256; nil without
	parser *jwt.Parser
}

// newTokens returns nil when the settings name no key. ctx bounds the refresh
// of the key set.
func newTokens(ctx context.Context, config Config, log *zap.Logger) (*tokens, error) {
	t := &tokens{}
	var methods []string
	if config.JWTSecret != "" {
		t.secret = []byte(config.JWTSecret)
		methods = append(methods, "HS256")
	}
	if config.JWKSURL != "" {
		var err error
		t.keys, err = keyfunc.NewDefaultOverrideCtx(ctx, []string{config.JWKSURL}, keyfunc.Override{
			HTTPTimeout: 10 * time.Second,
			RefreshErrorHandlerFunc: func(string) func(context.Context, error) {
				return func(_ context.Context, err error) { log.Warn("key set not refreshed", zap.Error(err)) }
			},
		})
		if err != nil {
			return nil, fmt.Errorf("read key set: %w", err)
		}
		methods = append(methods, "ES256", "RS256")
	}
	if methods == nil {
		return nil, nil
	}
	t.parser = jwt.NewParser(jwt.WithValidMethods(methods), jwt.WithExpirationRequired(), jwt.WithLeeway(maxTokenLeeway))
	return t, nil
}

// errNoOrganization is returned by read for a good token of nobody's.
var errNoOrganization = errors.New("the token names no organization")

// identity is whose a token is.
type identity struct {
	organizationID uuid.UUID
	user, role     string // empty where the token does not tell
	until          time.Time
}

// read returns whose token it is. What stands in app_metadata, which a user cannot
// change, counts where the token itself does not tell; for the role, which is always
// "authenticated" with Supabase, it comes first.
func (t *tokens) read(token string) (identity, error) {
	type tenant struct {
		OrganizationID string `json:"organization_id"`
		Role           string `json:"role"`
	}
	var claims struct {
		jwt.RegisteredClaims
		tenant

		AppMetadata tenant `json:"app_metadata"`
	}
	_, err := t.parser.ParseWithClaims(token, &claims, func(parsed *jwt.Token) (any, error) {
		if parsed.Method == jwt.SigningMethodHS256 { // never with a public key
			return t.secret, nil
		}
		return t.keys.Keyfunc(parsed)
	})
	if err != nil {
		return identity{}, err
	}
	organizationID, err := uuid.Parse(cmp.Or(claims.OrganizationID, claims.AppMetadata.OrganizationID))
	if err != nil || organizationID == uuid.Nil {
		return identity{}, errNoOrganization
	}
	return identity{
		organizationID: organizationID,
		user:           claims.Subject,
		role:           cmp.Or(claims.AppMetadata.Role, claims.Role),
		until:          claims.ExpiresAt.Add(maxTokenLeeway),
	}, nil
}

// streamHandler serves GET /api/events/stream: the events of an organization
// as server-sent events, to whoever holds a token of it.
type streamHandler struct {
	stream    *eventlog.Stream // nil in poll-only mode
	tokens    *tokens          // nil without a key
	heartbeat time.Duration
	stopping  <-chan struct{} // closed when the server stops, which else would wait for streams
	open      atomic.Int64
}

// ServeHTTP implements http.Handler.
func (h *streamHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// A token in a header or the URL is no cookie: another site cannot use it.
	w.Header().Set("Access-Control-Allow-Origin", "*")
	if r.Method == http.MethodOptions {
		w.Header().Set("Access-Control-Allow-Headers", "Authorization, Last-Event-ID, Cache-Control")
		w.Header().Set("Access-Control-Max-Age", "86400")
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if h.tokens == nil {
		http.Error(w, "the stream is off: AFLUENTE_JWT_SECRET and AFLUENTE_JWKS_URL are unset", http.StatusNotFound)
		return
	}
	if h.stream == nil {
		http.Error(w, "the stream needs LISTEN, and AFLUENTE_POLL_ONLY is set", http.StatusServiceUnavailable)
		return
	}
	who, err := h.tokens.read(bearer(r))
	switch {
	case errors.Is(err, errNoOrganization):
		http.Error(w, err.Error(), http.StatusForbidden)
		return
	case err != nil:
		w.Header().Set("WWW-Authenticate", `Bearer error="invalid_token"`)
		http.Error(w, "the token is missing, expired or not ours", http.StatusUnauthorized)
		return
	}
	if h.open.Add(1) > maxStreams {
		h.open.Add(-1)
		w.Header().Set("Retry-After", "5")
		http.Error(w, "too many streams", http.StatusServiceUnavailable)
		return
	}
	defer h.open.Add(-1)

	ctx, cancel := context.WithDeadline(r.Context(), who.until)
	defer cancel()
	go func() {
		select {
		case <-h.stopping:
			cancel()
		case <-ctx.Done():
		}
	}()
	last, _ := uuid.Parse(r.Header.Get("Last-Event-ID")) // what is no id of ours is none
	interest := eventlog.Interest{OrganizationID: who.organizationID, Types: r.URL.Query()["type"]}
	reader, err := h.stream.Subscribe(ctx, interest, last)
	switch {
	case errors.Is(err, eventlog.ErrInterest):
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	case err != nil:
		w.Header().Set("Retry-After", "1")
		http.Error(w, "the database does not answer", http.StatusServiceUnavailable)
		return
	}
	defer reader.Close()
	h.send(ctx, w, reader)
}

// bearer returns the token of a request. EventSource cannot set headers, so it
// may be in the URL.
func bearer(r *http.Request) string {
	return cmp.Or(bearerHeader(r), r.URL.Query().Get("access_token"))
}

func bearerHeader(r *http.Request) string {
	if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		return token
	}
	return ""
}

// send writes events until ctx, the reader or the connection ends.
func (h *streamHandler) send(ctx context.Context, w http.ResponseWriter, reader *eventlog.Reader) {
	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Accel-Buffering", "no") // nginx would hold events back
	control := http.NewResponseController(w)
	write := func(text []byte) error {
		if err := control.SetWriteDeadline(time.Now().Add(streamWriteTimeout)); err != nil {
			return err
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
		return control.Flush()
	}
	greeting := "retry: 2000\n\n"
	if reader.Reset() {
		greeting += "event: reset\ndata: {}\n\n"
	}
	err := write([]byte(greeting))
	for err == nil {
		waiting, cancel := context.WithTimeout(ctx, h.heartbeat)
		var event eventlog.Loaded
		event, err = reader.Next(waiting)
		cancel()
		switch {
		case err == nil:
			err = write(encodeStreamEvent(event))
		case ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded):
			err = write([]byte(": heartbeat\n\n"))
		}
	}
}

// encodeStreamEvent is an event as EventSource reads it.
func encodeStreamEvent(e eventlog.Loaded) []byte {
	return fmt.Appendf(nil, "id: %s\nevent: %s\ndata: %s\n\n", e.ID, e.Type, encodeStreamData(e))
}

// encodeStreamData is an event as one line of JSON, its payload as the database
// prints it, so that no number loses a digit.
func encodeStreamData(e eventlog.Loaded) []byte {
	data, truncated := e.Payload, false
	if len(data) > maxStreamData {
		data, truncated = nil, true
	}
	var line bytes.Buffer
	encoder := json.NewEncoder(&line)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(struct { // the database's JSON is JSON, and a buffer takes all
		ID             uuid.UUID       `json:"id"`
		Type           string          `json:"type"`
		OrganizationID uuid.UUID       `json:"organization_id"`
		EntityKind     string          `json:"entity_kind"`
		EntityID       *uuid.UUID      `json:"entity_id"`
		Payload        json.RawMessage `json:"payload,omitempty"`
		Metadata       json.RawMessage `json:"metadata"`
		CreatedAt      time.Time       `json:"created_at"`
		Truncated      bool            `json:"truncated,omitempty"`
	}{e.ID, e.Type, e.OrganizationID, e.EntityKind, e.EntityID, data, e.Metadata, e.CreatedAt, truncated})
	return bytes.TrimRight(line.Bytes(), "\n")
}
