package main

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"go.uber.org/zap"

	"afluente/eventlog"
)

// cronHandler serves POST /api/cron/{name} and /api/v1/cron/{name}: it runs a
// cron now and answers 202 with the job. The caller shows one of the secrets, as
// a bearer token or in X-Cron-Secret.
type cronHandler struct {
	scheduler *eventlog.Scheduler
	secrets   []string
	log       *zap.Logger
}

// ServeHTTP implements http.Handler.
func (h *cronHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !h.knows(r) {
		writeMessage(w, http.StatusUnauthorized, "the secret is missing or wrong")
		return
	}
	id, err := h.scheduler.RunNow(r.Context(), r.PathValue("name"))
	switch {
	case errors.Is(err, eventlog.ErrNoCron):
		writeMessage(w, http.StatusNotFound, err.Error())
	case errors.Is(err, eventlog.ErrCronWaits):
		writeMessage(w, http.StatusConflict, err.Error())
	case err != nil:
		h.log.Error("cron not run", zap.Error(err))
		writeMessage(w, http.StatusInternalServerError, "the database does not answer as it should")
	default:
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		w.WriteHeader(http.StatusAccepted)
		_ = json.NewEncoder(w).Encode(map[string]int64{"job_id": id})
	}
}

// knows compares hashes, each with each, so that it takes as long for every
// guess.
func (h *cronHandler) knows(r *http.Request) bool {
	known := 0
	bearer, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	for _, shown := range []string{bearer, r.Header.Get("X-Cron-Secret")} {
		got := sha256.Sum256([]byte(shown))
		for _, secret := range h.secrets {
			want := sha256.Sum256([]byte(secret))
			known |= subtle.ConstantTimeCompare(got[:], want[:])
		}
	}
	return known == 1
}
