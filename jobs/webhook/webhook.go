// Package webhook signs an event and posts it to a customer's URL.
//
// It promises that nothing goes out unsigned, that one call makes at most one POST to the URL given and to no other, and that
// an answer costs at most 64 KiB of body and, with the client of [NewHTTPClient], 64 KiB of header, whatever the receiver sends.
package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"afluente/jobs/httperr"
)

const (
	maxAnswer = 64 << 10 // bytes of body that are read

	// secretPrefix marks a secret of ours: base64 of the key follows. Imported ones do not have it.
	secretPrefix = "whsec_"
)

// Request is one attempt at one delivery.
type Request struct {
	URL        string    // http or https
	EventID    string    // required, lower-case UUID; the receiver's idempotency key, the same in each attempt
	EventType  string    // such as message.sent
	DeliveryID string    // event × subscription, the same in each attempt
	Attempt    int       // 1 for the first; grows over retries and re-sends
	Secret     string    // required: whsec_ and base64 of the key, or an imported secret of any form
	Body       []byte    // JSON, sent byte for byte
	At         time.Time // required: the time of this attempt, signed in whole seconds
}

// StatusError is an answer other than 2xx, a redirect included. [Sender.Send] returns it.
type StatusError struct {
	Code       int           // HTTP status
	Excerpt    string        // start of the body, at most 200 bytes of printable UTF-8; a receiver may repeat the event in it
	RetryAfter time.Duration // what the Retry-After header asks for, at most 24 h; 0 when it asks for nothing
}

// Error leaves the excerpt out: see there.
func (e *StatusError) Error() string { return fmt.Sprintf("answer %d", e.Code) }

// Permanent tells whether the receiver asked for no more attempts: true for 410 alone. All other answers, 404 and 401 too, are
// what a receiver under repair gives, and are worth a retry.
func (e *StatusError) Permanent() bool { return e.Code == http.StatusGone }

// Sign returns the headers by which a receiver checks and deduplicates r, made of its EventID, Secret, Body and At:
//
//	webhook-id, X-Deskcomm-Idempotency-Key    EventID
//	webhook-timestamp, X-Webhook-Timestamp    At in Unix seconds
//	webhook-signature                         "v1," and base64 of HMAC-SHA256(K, id.timestamp.body): Standard Webhooks
//	X-Deskcomm-Signature                      hex of HMAC-SHA256(L, body)
//	X-Webhook-Signature                       "sha256=" and hex of HMAC-SHA256(L, timestamp.body)
//
// L is the secret as shown to the customer, prefix included. K is what the base64 after whsec_ decodes to; of a secret without
// that prefix, its bytes. A missing id, time or key and a secret that does not decode are errors.
func Sign(r Request) (http.Header, error) {
	if r.EventID == "" || r.At.IsZero() {
		return nil, errors.New("sign: no event id or no time")
	}
	legacy := []byte(r.Secret)
	key := legacy
	if encoded, ok := strings.CutPrefix(r.Secret, secretPrefix); ok {
		var err error
		if key, err = base64.StdEncoding.DecodeString(encoded); err != nil {
			return nil, fmt.Errorf("sign: decode secret: %w", err)
		}
	}
	if len(key) == 0 {
		return nil, errors.New("sign: empty secret")
	}
	timestamp := strconv.FormatInt(r.At.Unix(), 10)

	h := http.Header{}
	h.Set("Webhook-Id", r.EventID)
	h.Set("Webhook-Timestamp", timestamp)
	h.Set("Webhook-Signature", "v1,"+base64.StdEncoding.EncodeToString(mac(key, r.EventID+"."+timestamp+".", r.Body)))
	h.Set("X-Deskcomm-Idempotency-Key", r.EventID)
	h.Set("X-Deskcomm-Signature", hex.EncodeToString(mac(legacy, "", r.Body)))
	h.Set("X-Webhook-Timestamp", timestamp)
	h.Set("X-Webhook-Signature", "sha256="+hex.EncodeToString(mac(legacy, timestamp+".", r.Body)))
	return h, nil
}

// mac returns HMAC-SHA256 of prefix and body.
func mac(key []byte, prefix string, body []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(prefix)) // a hash never returns an error
	h.Write(body)
	return h.Sum(nil)
}

// Sender posts events. Its fields must not change while it is used; Send may be called from several goroutines.
type Sender struct {
	HTTP      *http.Client // required, see NewHTTPClient; its CheckRedirect is not used, since no redirect is followed
	UserAgent string       // neutral, since customers see it; empty means "Webhooks/1.0"
}

// NewHTTPClient returns the client for a [Sender], to be shared by all of a process: no proxy from the environment, no redirects,
// no cookies, no decompression, TLS 1.2 or later, 3 s to connect, 5 s for the TLS handshake, 64 KiB of answer header. It sets no
// timeout on the exchange: the context of a call does.
func NewHTTPClient() *http.Client {
	return &http.Client{
		CheckRedirect: refuseRedirect,
		Transport: &http.Transport{
			DialContext:            (&net.Dialer{Timeout: 3 * time.Second}).DialContext,
			DisableCompression:     true,
			ForceAttemptHTTP2:      true, // a transport with its own dialer or TLS settings speaks HTTP/1.1 otherwise
			HTTP2:                  &http.HTTP2Config{PingTimeout: 5 * time.Second, SendPingTimeout: 15 * time.Second},
			IdleConnTimeout:        90 * time.Second,
			MaxIdleConns:           100,
			MaxResponseHeaderBytes: 64 << 10,
			TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout:    5 * time.Second,
		},
	}
}

// Send signs r and posts it once. It returns nil when the receiver answers 2xx, even if the body that follows breaks off; a
// [*StatusError] for any other answer; and the reason when there is no answer. There is no timeout but ctx's (the event log's
// specification asks for 10 s), which bounds the whole exchange. Error texts hold the delivery's id, never the URL, which may
// carry a token.
func (s *Sender) Send(ctx context.Context, r Request) error {
	if err := s.post(ctx, r); err != nil {
		return fmt.Errorf("webhook: send delivery %s: %w", r.DeliveryID, err)
	}
	return nil
}

func (s *Sender) post(ctx context.Context, r Request) error {
	header, err := Sign(r)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL, bytes.NewReader(r.Body))
	if err != nil {
		return httperr.Cause(err)
	}
	req.Header = header
	req.Header.Set("Accept-Encoding", "identity") // asked for by name, no transport unpacks an answer: 40 KB can hold 40 MB
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "Webhooks/1.0")
	if s.UserAgent != "" {
		req.Header.Set("User-Agent", s.UserAgent)
	}
	req.Header.Set("X-Deskcomm-Event", r.EventType)
	req.Header.Set("X-Webhook-Attempt", strconv.Itoa(r.Attempt))
	req.Header.Set("X-Webhook-Delivery", r.DeliveryID)

	client := *s.HTTP
	client.CheckRedirect = refuseRedirect
	resp, err := client.Do(req)
	if err != nil {
		return httperr.Cause(err)
	}
	defer resp.Body.Close()

	// A body that breaks off changes nothing: the status has been said. Reading it lets the connection be used again.
	answer, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if resp.StatusCode/100 == 2 {
		return nil
	}
	return &StatusError{
		Code: resp.StatusCode, Excerpt: httperr.Excerpt(answer), RetryAfter: httperr.RetryAfter(resp.Header, time.Now()),
	}
}

// refuseRedirect makes a redirect an answer like any other: followed, it would carry body and signatures to another host.
func refuseRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
