// Package waha is a client of WAHA, the WhatsApp HTTP API (https://waha.devlike.pro).
//
// It promises that one call makes at most one delivery to WAHA, that the API key goes to BaseURL and nowhere else, that an answer
// of any size costs at most 64 KiB, and that no error text holds a chat id, a message or the key.
package waha

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode"

	"afluente/jobs/httperr"
)

// maxAnswer is how many bytes of an answer are read.
const maxAnswer = 64 << 10

// Client calls one WAHA server. Its fields must not change while it is used; its methods may be called from several goroutines.
type Client struct {
	BaseURL string       // required, such as http://waha:3000; a path in it is kept
	APIKey  string       // sent as X-Api-Key; empty sends none
	HTTP    *http.Client // nil means http.DefaultClient; its CheckRedirect is not used, since no redirect is followed
}

// Text is one text message to one chat.
type Text struct {
	Session string // WAHA's name of the connected number, such as "default"
	ChatID  string // receiver, such as 5511999999999@c.us
	Body    string

	// IdempotencyKey is required: the message's own id, the same in each attempt.
	IdempotencyKey string
}

// StatusError is an answer other than 2xx, a redirect included. [Client.SendText] returns it.
type StatusError struct {
	Code       int           // HTTP status
	Excerpt    string        // start of the body, at most 200 bytes of printable UTF-8; WAHA may repeat chat id and text in it
	RetryAfter time.Duration // what the Retry-After header asks for, at most 24 h; 0 when it asks for nothing
}

// Error leaves the excerpt out: see there.
func (e *StatusError) Error() string { return fmt.Sprintf("answer %d", e.Code) }

// Permanent tells whether the same call would fail again: true for 4xx other than 408 (timeout) and 429 (too many requests).
func (e *StatusError) Permanent() bool {
	return e.Code/100 == 4 && e.Code != http.StatusRequestTimeout && e.Code != http.StatusTooManyRequests
}

// SendText sends t and returns WAHA's id of the message: never empty, without control characters. There is no timeout but ctx's,
// which bounds the whole exchange.
//
//	error                      the message      try again
//	*StatusError, Permanent    was not sent     useless
//	*StatusError, otherwise    may be sent      yes, with the same key
//	any other                  may be sent      yes, with the same key
//
// "Any other" includes an ended ctx and a 2xx answer without an id.
func (c *Client) SendText(ctx context.Context, t Text) (messageID string, err error) {
	if t.IdempotencyKey == "" {
		return "", errors.New("waha: send text: no idempotency key")
	}
	answer, err := c.postText(ctx, t)
	if err != nil {
		return "", fmt.Errorf("waha: send text: %w", err)
	}
	id := findID(answer)
	if id == "" {
		return "", errors.New("waha: send text: answer without a message id")
	}
	return id, nil
}

// postText returns the body of a 2xx answer.
func (c *Client) postText(ctx context.Context, t Text) ([]byte, error) {
	endpoint, err := url.JoinPath(c.BaseURL, "api/sendText")
	if err != nil {
		return nil, httperr.Cause(err)
	}
	body, err := json.Marshal(map[string]string{
		"chatId": t.ChatID, "idempotency_key": t.IdempotencyKey, "session": t.Session, "text": t.Body,
	})
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, endpoint, bytes.NewReader(body))
	if err != nil {
		return nil, httperr.Cause(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if c.APIKey != "" {
		req.Header.Set("X-Api-Key", c.APIKey)
	}
	// Lower case on purpose: a request with the canonical name is one that http.Transport sends again by itself when a kept
	// connection breaks. Whether to send again is for the caller to say.
	req.Header["idempotency-key"] = []string{t.IdempotencyKey}

	client := *cmp.Or(c.HTTP, http.DefaultClient)
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := client.Do(req)
	if err != nil {
		return nil, httperr.Cause(err)
	}
	defer resp.Body.Close()

	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if resp.StatusCode/100 != 2 {
		// The status says enough; of the body, whatever came.
		return nil, &StatusError{
			Code: resp.StatusCode, Excerpt: httperr.Excerpt(answer), RetryAfter: httperr.RetryAfter(resp.Header, time.Now()),
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read answer: %w", httperr.Cause(err))
	}
	return answer, nil
}

// findID returns the message's id, or "" when there is none that a text column could hold. Where it stands depends on WAHA's
// engine: {"id":"…"}, {"id":{"_serialized":"…"}} or {"key":{"id":"…"}}.
func findID(answer []byte) string {
	var fields map[string]any
	if json.Unmarshal(answer, &fields) != nil {
		return ""
	}
	plain, _ := fields["id"].(string)
	object, _ := fields["id"].(map[string]any)
	serialized, _ := object["_serialized"].(string)
	key, _ := fields["key"].(map[string]any)
	keyID, _ := key["id"].(string)

	id := cmp.Or(plain, serialized, keyID)
	if strings.ContainsFunc(id, unicode.IsControl) {
		return ""
	}
	return id
}
