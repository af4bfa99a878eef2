package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"go.uber.org/zap"
	"go.uber.org/zap/exp/zapslog"
	"riverqueue.com/riverui"

	"afluente/db"
)

const (
	// maxClicked is how many jobs River UI may act on at once, and
	// maxClickedBody the bytes that name them.
	maxClicked     = 1000
	maxClickedBody = 64 << 10

	clickTimeout = 30 * time.Second

	// reasonHeader tells why a dead job is deleted.
	reasonHeader = "X-Reason"
)

// console is River UI. It takes two of its endpoints over: River UI deletes
// without a word of who did it, and where one of the jobs to retry or delete
// cannot be, it does none of them.
type console struct {
	pool   *pgxpool.Pool
	client *river.Client[pgx.Tx]
	log    *zap.Logger
}

// newConsole returns River UI for requests whose path begins with uiPath. The
// paths in its pages begin with public before that. ctx bounds its background
// work.
func newConsole(ctx context.Context, public string, c console) (http.Handler, error) {
	ui, err := riverui.NewHandler(&riverui.HandlerOpts{
		Endpoints: riverui.NewEndpoints(c.client, nil),
		Logger:    slog.New(zapslog.NewHandler(c.log.Core(), zapslog.WithName("riverui"))),
		Prefix:    public + uiPath,
	})
	if err != nil {
		return nil, fmt.Errorf("make river ui: %w", err)
	}
	if err := ui.Start(ctx); err != nil {
		return nil, fmt.Errorf("start river ui: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle(uiPath+"/", addPrefix(public, ui))
	mux.Handle("POST "+uiPath+"/api/jobs/retry", c.click("retried", c.retry))
	mux.Handle("POST "+uiPath+"/api/jobs/delete", c.click("deleted", c.delete))
	return mux, nil
}

// addPrefix is the opposite of http.StripPrefix.
func addPrefix(prefix string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r = r.Clone(r.Context())
		r.URL.Path = prefix + r.URL.Path
		r.URL.RawPath = "" // of no use: the paths of River UI hold nothing that is escaped
		next.ServeHTTP(w, r)
	})
}

// unable is why one job of several stays as it is.
type unable struct {
	status int
	reason string
}

func (e *unable) Error() string { return e.reason }

// click serves an endpoint of River UI that acts on jobs: on each for itself,
// all in one transaction. It answers like River UI, but tells of the jobs that
// it could do nothing about.
func (c *console) click(done string, act func(context.Context, pgx.Tx, int64) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ids, err := readClicked(w, r)
		if err != nil {
			writeMessage(w, http.StatusBadRequest, err.Error())
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), clickTimeout)
		defer cancel()
		var stay []string
		status := http.StatusOK
		err = pgx.BeginFunc(ctx, c.pool, func(tx pgx.Tx) error {
			if err := db.New(tx).SetActor(ctx, actor(ctx), r.Header.Get(reasonHeader)); err != nil {
				return err
			}
			for _, id := range ids {
				err := pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error { return act(ctx, savepoint, id) })
				if reason, ok := errors.AsType[*unable](err); ok {
					status = reason.status
					stay = append(stay, fmt.Sprintf("job %d %s", id, reason.reason))
				} else if err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			c.log.Error("operator's click failed", zap.String("action", done), zap.Error(err))
			writeMessage(w, http.StatusInternalServerError, "the database does not answer as it should; nothing was "+done)
			return
		}
		moved := len(ids) - len(stay)
		c.log.Info("operator acted", zap.String("action", done), zap.String("actor", actor(ctx)),
			zap.Int("jobs", moved), zap.Int("left", len(stay)))
		if len(stay) > 0 {
			writeMessage(w, status, fmt.Sprintf("%d of %d %s; %s", moved, len(ids), done, strings.Join(stay, ", ")))
			return
		}
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		_, _ = w.Write([]byte(`{"status":"ok"}`))
	})
}

// readClicked reads ids as River UI sends them, texts of numbers, and sorts
// them, so that two requests take their locks in one order.
func readClicked(w http.ResponseWriter, r *http.Request) ([]int64, error) {
	var body struct {
		IDs []string `json:"ids"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxClickedBody)).Decode(&body); err != nil {
		return nil, errors.New(`the body is not {"ids": ["1", …]}`)
	}
	if len(body.IDs) < 1 || len(body.IDs) > maxClicked {
		return nil, fmt.Errorf("ids are %d, not from 1 to %d", len(body.IDs), maxClicked)
	}
	ids := make([]int64, len(body.IDs))
	for i, text := range body.IDs {
		var err error
		if ids[i], err = strconv.ParseInt(text, 10, 64); err != nil {
			return nil, fmt.Errorf("the id %.40q is not a job's", text)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

func (c *console) retry(ctx context.Context, tx pgx.Tx, id int64) error {
	_, err := c.client.JobRetryTx(ctx, tx, id)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == pgerrcode.UniqueViolation {
		return &unable{http.StatusConflict, "has a twin of the same unique key that is not dead"}
	}
	return notFound(err)
}

func (c *console) delete(ctx context.Context, tx pgx.Tx, id int64) error {
	_, err := c.client.JobDeleteTx(ctx, tx, id)
	if errors.Is(err, rivertype.ErrJobRunning) {
		return &unable{http.StatusBadRequest, "is running"}
	}
	return notFound(err)
}

func notFound(err error) error {
	if errors.Is(err, river.ErrNotFound) {
		return &unable{http.StatusNotFound, "is gone"}
	}
	return err
}

// writeMessage answers with an error as River UI's page reads it.
func writeMessage(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"message": message})
}
