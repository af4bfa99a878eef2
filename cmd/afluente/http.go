package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"go.uber.org/zap"
)

const uiPath = "/riverui"

// backend is what the web server stands in front of.
type backend struct {
	stream   http.Handler
	metrics  http.Handler
	health   *health
	crons    *cronHandler
	webhooks *webhookAPI
	pool     *pgxpool.Pool
	client   *river.Client[pgx.Tx]
	log      *zap.Logger
}

// newHandler returns the program's web server: River UI, the APIs of dead
// letters, crons and webhooks, the event stream, /metrics, /healthz, which says that the process runs,
// and /readyz, which says whether it works. ctx bounds River UI's background
// work.
//
// A proxy in front may pass the path of AFLUENTE_PUBLIC_URL on or take it off.
func newHandler(ctx context.Context, config Config, b backend) (http.Handler, error) {
	public := config.publicPath()
	ui, err := newConsole(ctx, public, console{pool: b.pool, client: b.client, log: b.log.Named("console")})
	if err != nil {
		return nil, err
	}
	// River UI takes POSTs of any content type, so a page of another site
	// could press its buttons, or show it in a frame for others to press.
	guard := http.NewCrossOriginProtection()
	if origin := config.publicOrigin(); origin != "" {
		if err := guard.AddTrustedOrigin(origin); err != nil {
			return nil, fmt.Errorf("trust AFLUENTE_PUBLIC_URL: %w", err)
		}
	}
	signedIn := newAuth(config)
	operators := func(next http.Handler) http.Handler {
		next = signedIn.wrap(guard.Handler(next))
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Security-Policy", "frame-ancestors 'none'")
			w.Header().Set("X-Content-Type-Options", "nosniff")
			next.ServeHTTP(w, r)
		})
	}

	mux := http.NewServeMux()
	mux.Handle(uiPath+"/", operators(ui))
	mux.Handle("POST /api/dlq/{action}", operators(&dlqHandler{pool: b.pool, log: b.log.Named("dlq")}))
	mux.Handle("POST /api/cron/{name}", b.crons)
	mux.Handle("POST /api/v1/cron/{name}", b.crons)
	mux.Handle("GET /api/events/stream", b.stream)
	mux.Handle("OPTIONS /api/events/stream", b.stream)
	b.webhooks.register(mux)
	mux.Handle("GET /metrics", b.metrics)
	toConsole := http.RedirectHandler((&url.URL{Path: public + uiPath + "/"}).String(), http.StatusFound)
	mux.Handle("GET /{$}", toConsole)
	mux.Handle("GET "+uiPath, toConsole)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok\n")
	})
	mux.Handle("GET /readyz", b.health)
	if public == "" {
		return mux, nil
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rest, kept := strings.CutPrefix(r.URL.Path, public)
		switch {
		case kept && rest == "":
			toConsole.ServeHTTP(w, r)
		case kept && rest[0] == '/':
			http.StripPrefix(public, mux).ServeHTTP(w, r)
		default:
			mux.ServeHTTP(w, r)
		}
	}), nil
}
