package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/zap"

	"afluente/eventlog"
)

const maxDLQBody = 64 << 10

// dlqHandler serves POST /api/dlq/{list,retry,discard}: what the commands of
// 'afluente dlq' do, with the names of their flags as keys of a JSON object.
// retry and discard answer when they are done; a client that goes away stops
// them after the batch that is under way.
type dlqHandler struct {
	pool *pgxpool.Pool
	log  *zap.Logger
}

type dlqRequest struct {
	eventlog.DeadLetterFilter
	Limit  int    `json:"limit"`
	Rate   *int   `json:"rate"`
	DryRun bool   `json:"dry_run"`
	Reason string `json:"reason"`
}

// ServeHTTP implements http.Handler.
func (h *dlqHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	action := r.PathValue("action")
	request, err := readDLQRequest(w, r, action)
	if errors.Is(err, errNoSuchAction) {
		writeMessage(w, http.StatusNotFound, err.Error())
		return
	} else if err != nil {
		writeMessage(w, http.StatusBadRequest, err.Error())
		return
	}
	ctx := r.Context()
	letters := &eventlog.DeadLetters{Pool: h.pool}
	pace := eventlog.Pace{Rate: *request.Rate}
	var moved eventlog.Moved
	var answer any = &moved
	switch {
	case action == "list":
		answer, err = letters.List(ctx, request.DeadLetterFilter, request.Limit)
	case request.DryRun:
		moved.Found, err = letters.Count(ctx, request.DeadLetterFilter)
	case action == "retry":
		moved, err = letters.Retry(ctx, request.DeadLetterFilter, pace)
	default:
		moved, err = letters.Discard(ctx, request.DeadLetterFilter, pace, actor(ctx), request.Reason)
	}
	if action != "list" && !request.DryRun {
		h.log.Info("operator acted", zap.String("action", action), zap.String("actor", actor(ctx)),
			zap.Int("jobs", moved.Moved), zap.Int("left", moved.Found-moved.Moved))
	}
	if err != nil {
		h.log.Error("operator's request failed", zap.String("action", action), zap.Error(err))
		writeMessage(w, http.StatusInternalServerError,
			fmt.Sprintf("the database does not answer as it should; %d of %d were moved, ask again for the rest", moved.Moved, moved.Found))
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	_ = json.NewEncoder(w).Encode(answer)
}

var errNoSuchAction = errors.New("there are list, retry and discard")

func readDLQRequest(w http.ResponseWriter, r *http.Request, action string) (dlqRequest, error) {
	request := dlqRequest{Limit: 50}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxDLQBody))
	if err != nil {
		return request, errors.New("the body is too long")
	}
	if len(bytes.TrimSpace(body)) > 0 {
		decoder := json.NewDecoder(bytes.NewReader(body))
		decoder.DisallowUnknownFields() // a filter with a typo would match all
		if err := decoder.Decode(&request); err != nil {
			return request, fmt.Errorf("read body: %w", err)
		}
	}
	if request.Rate == nil {
		request.Rate = new(defaultRate)
	}
	var mistakes []error
	checkRate(*request.Rate, &mistakes)
	if request.Limit < 1 || request.Limit > maxListed {
		mistakes = append(mistakes, fmt.Errorf("limit %d is not from 1 to %d", request.Limit, maxListed))
	}
	if strings.ContainsRune(request.Consumer+request.EventType+request.EntityKind+request.Reason, 0) {
		mistakes = append(mistakes, errors.New("a text holds a NUL byte"))
	}
	switch action {
	case "list", "retry":
	case "discard":
		if request.Reason == "" {
			mistakes = append(mistakes, errors.New("a reason is required"))
		}
	default:
		return request, errNoSuchAction
	}
	return request, errors.Join(mistakes...)
}
