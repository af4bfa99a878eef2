package main

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"go.uber.org/zap"
	"go.uber.org/zap/exp/zapslog"
	"riverqueue.com/riverui"
)

const uiPrefix = "/riverui"

// uiBackend is what the web server shows.
type uiBackend struct {
	stream  http.Handler
	metrics http.Handler
	pool    *pgxpool.Pool
	client  *river.Client[pgx.Tx]
	log     *zap.Logger
}

// newHandler returns the program's web server: River UI, the event stream, /metrics, /healthz, which says
// that the process runs, and /readyz, which says that it reaches its database.
// ctx bounds River UI's background work.
func newHandler(ctx context.Context, config Config, backend uiBackend) (http.Handler, error) {
	ui, err := riverui.NewHandler(&riverui.HandlerOpts{
		Endpoints: riverui.NewEndpoints(backend.client, nil),
		Logger:    slog.New(zapslog.NewHandler(backend.log.Core(), zapslog.WithName("riverui"))),
		Prefix:    uiPrefix,
	})
	if err != nil {
		return nil, fmt.Errorf("make river ui: %w", err)
	}
	if err := ui.Start(ctx); err != nil {
		return nil, fmt.Errorf("start river ui: %w", err)
	}

	mux := http.NewServeMux()
	// River UI takes POSTs of any content type, so a page of another site
	// could press its buttons.
	mux.Handle(uiPrefix+"/", basicAuth(config, http.NewCrossOriginProtection().Handler(ui)))
	mux.Handle("GET /api/events/stream", backend.stream)
	mux.Handle("OPTIONS /api/events/stream", backend.stream)
	mux.Handle("GET /metrics", backend.metrics)
	mux.Handle("GET /{$}", http.RedirectHandler(uiPrefix+"/", http.StatusFound))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok\n")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 3*time.Second)
		defer cancel()
		if err := backend.pool.Ping(ctx); err != nil {
			http.Error(w, "the database does not answer", http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	})
	return mux, nil
}

// basicAuth asks for the credentials of River UI, if there are any. Both
// sides are hashed, so that a comparison takes as long for every guess.
func basicAuth(config Config, next http.Handler) http.Handler {
	if config.UIUser == "" {
		return next
	}
	want := sha256.Sum256([]byte(config.UIUser + ":" + config.UIPassword))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		got := sha256.Sum256([]byte(user + ":" + password))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", `Basic realm="afluente", charset="UTF-8"`)
			http.Error(w, "wrong user or password", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}
