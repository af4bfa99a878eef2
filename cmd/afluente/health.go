package main

import (
	"bytes"
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/zap"

	"afluente/eventlog"
)

const (
	// healthAge is how long an answer of /readyz is good for, so that nobody can
	// keep the database busy with asking.
	healthAge = 5 * time.Second

	healthTimeout = 5 * time.Second

	// bridgeFault is how long ago the bridge may have looked for events.
	bridgeFault = 30 * time.Second
)

// health serves /readyz: what 'afluente doctor' finds in the database and what
// this process knows of itself, as a table. The status is 503 when there is a
// fault.
type health struct {
	pool      *pgxpool.Pool
	retention time.Duration
	bridge    *eventlog.Bridge // nil without
	listens   bool             // the bridge is to
	log       *zap.Logger

	mu       sync.Mutex
	at       time.Time
	findings []finding
}

// ServeHTTP implements http.Handler.
func (h *health) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	findings := h.examine(r.Context())
	var table bytes.Buffer
	_ = printFindings(&table, findings, false) // a buffer does not fail
	status := http.StatusOK
	for _, f := range findings {
		if f.State == stateFault {
			status = http.StatusServiceUnavailable
		}
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(table.Bytes())
}

// examine examines anew where the last time was too long ago.
func (h *health) examine(ctx context.Context) []finding {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.at) < healthAge {
		return h.findings
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), healthTimeout)
	defer cancel()
	var err error
	h.findings, err = examine(ctx, h.pool, h.retention)
	if err != nil {
		h.log.Warn("health not examined", zap.Error(err))
		h.findings = []finding{{"database", stateFault, "it does not answer as it should"}}
	}
	h.findings = append(h.findings, h.checkBridge()...)
	h.at = time.Now()
	return h.findings
}

func (h *health) checkBridge() []finding {
	if h.bridge == nil {
		return nil
	}
	status := h.bridge.Status()
	findings := []finding{{"bridge", stateOK, "it looks for events"}}
	if since := time.Since(status.LastStep); status.LastStep.IsZero() || since > bridgeFault {
		findings[0] = finding{"bridge", stateFault, "it has not looked for events for " + since.Round(time.Second).String()}
		if status.LastStep.IsZero() {
			findings[0].Detail = "it has not looked for events yet"
		}
	}
	if h.listens && !status.Listening {
		findings = append(findings, finding{"listen", stateWarn, "the connection that hears of urgent events is lost: they wait for half a second"})
	}
	return findings
}
