package sandbox

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/http"
	"sync"

	"go.uber.org/zap"
)

// Receiver stands in for a customer's webhook endpoint. It takes a call at any path and, with a secret, only if
// X-Deskcomm-Signature is right: 401 otherwise.
type Receiver struct {
	*server

	acceptedMu sync.Mutex
	accepted   map[string]int // delivery id → times accepted
}

// StartReceiver listens and serves until Close; ctx bounds only the start.
func StartReceiver(ctx context.Context, c Config) (*Receiver, error) {
	r := &Receiver{accepted: map[string]int{}}
	var err error
	r.server, err = start(ctx, c, func(call Call) reply {
		if c.Secret != "" && !signedWith(c.Secret, call) {
			return reply{status: http.StatusUnauthorized, body: `{"message":"wrong signature"}`, log: "wrong signature"}
		}
		return r.accept(call)
	})
	if err != nil {
		return nil, fmt.Errorf("sandbox: start receiver: %w", err)
	}
	return r, nil
}

// Accepted returns how many times each delivery, by its X-Webhook-Delivery, was accepted: 1 is the aim, more a repetition that
// a customer drops by the idempotency key. All are kept until the process ends, so that none is missing from an audit.
func (r *Receiver) Accepted() map[string]int {
	r.acceptedMu.Lock()
	defer r.acceptedMu.Unlock()
	return maps.Clone(r.accepted)
}

func (r *Receiver) accept(call Call) reply {
	delivery := call.Header.Get("X-Webhook-Delivery")
	r.acceptedMu.Lock()
	r.accepted[delivery]++
	r.acceptedMu.Unlock()
	return reply{status: http.StatusOK, body: `{"ok":true}`, log: "event received", fields: []zap.Field{
		zap.String("event_type", call.Header.Get("X-Deskcomm-Event")),
		zap.String("event_id", call.Header.Get("X-Deskcomm-Idempotency-Key")),
		zap.String("attempt", call.Header.Get("X-Webhook-Attempt")),
	}}
}

// signedWith checks the signature the way a customer does, on purpose without the code that made it.
func signedWith(secret string, call Call) bool {
	signature, err := hex.DecodeString(call.Header.Get("X-Deskcomm-Signature"))
	if err != nil {
		return false
	}
	h := hmac.New(sha256.New, []byte(secret))
	h.Write([]byte(call.Body)) // a hash never returns an error
	return hmac.Equal(signature, h.Sum(nil))
}
