package sandbox

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"
)

// WAHA stands in for the WhatsApp HTTP API: POST /api/sendText, checked by X-Api-Key, and made safe to repeat by an idempotency
// key in the body or in the Idempotency-Key header.
type WAHA struct {
	*server

	sentMu     sync.Mutex
	byKey      map[string]string // idempotency key → message id
	duplicates int
	sent       []Message
}

// Message is a text that the stand-in has sent, so to speak.
type Message struct {
	ID             string // what the caller was told; unique over restarts
	IdempotencyKey string // empty when the caller gave none
	Session        string
	ChatID         string
	Text           string
	Time           time.Time
}

// StartWAHA listens and serves until Close; ctx bounds only the start.
func StartWAHA(ctx context.Context, c Config) (*WAHA, error) {
	w := &WAHA{byKey: map[string]string{}}
	var err error
	w.server, err = start(ctx, c, func(call Call) reply {
		key := call.Header.Get("X-Api-Key")
		if c.Secret != "" && subtle.ConstantTimeCompare([]byte(key), []byte(c.Secret)) != 1 {
			return reply{status: http.StatusUnauthorized, body: `{"message":"Unauthorized"}`, log: "wrong api key"}
		}
		if call.Method != http.MethodPost || call.Path != "/api/sendText" {
			return reply{status: http.StatusNotFound, body: `{"message":"Not Found"}`, log: "unknown call"}
		}
		return w.sendText(call)
	})
	if err != nil {
		return nil, fmt.Errorf("sandbox: start waha: %w", err)
	}
	return w, nil
}

// Sent returns the distinct messages, oldest first. All are kept until the process ends, so that none is missing from an audit.
func (w *WAHA) Sent() []Message {
	w.sentMu.Lock()
	defer w.sentMu.Unlock()
	return append([]Message(nil), w.sent...)
}

// Duplicates returns how many calls repeated the idempotency key of a message already sent. They got its id and sent nothing.
func (w *WAHA) Duplicates() int {
	w.sentMu.Lock()
	defer w.sentMu.Unlock()
	return w.duplicates
}

func (w *WAHA) sendText(call Call) reply {
	var text struct { // names match whatever their case, chatId among them
		ChatID         string
		IdempotencyKey string `json:"idempotency_key"`
		Session        string
		Text           string
	}
	if err := json.Unmarshal([]byte(call.Body), &text); err != nil {
		return reply{status: http.StatusBadRequest, body: `{"message":"Bad Request"}`, log: "message is not json"}
	}
	if text.ChatID == "" || text.Session == "" || text.Text == "" {
		return reply{
			status: http.StatusUnprocessableEntity, body: `{"message":"chatId, session and text are required"}`, log: "message incomplete",
		}
	}
	if text.IdempotencyKey == "" {
		text.IdempotencyKey = call.Header.Get("Idempotency-Key")
	}

	w.sentMu.Lock()
	defer w.sentMu.Unlock()
	if id, ok := w.byKey[text.IdempotencyKey]; ok {
		w.duplicates++
		return sentReply(id, "message already sent")
	}
	// Not WhatsApp's own form, which holds the chat id: ids are logged.
	message := Message{
		ID: "sandbox_" + rand.Text(), IdempotencyKey: text.IdempotencyKey, Session: text.Session, ChatID: text.ChatID, Text: text.Text,
		Time: call.Time,
	}
	w.sent = append(w.sent, message)
	if text.IdempotencyKey != "" {
		w.byKey[text.IdempotencyKey] = message.ID
	}
	return sentReply(message.ID, "message sent")
}

func sentReply(id, log string) reply {
	return reply{
		status: http.StatusCreated, body: fmt.Sprintf(`{"id":%q}`, id), log: log, fields: []zap.Field{zap.String("message_id", id)},
	}
}
