// Package webhook signs an event and posts it to a customer's URL, and tells what an answer means.
//
// It promises that nothing goes out unsigned, that one call makes at most one POST to the URL given and to no other, that the
// address is one that the [Guard] lets pass, and that an answer costs at most 64 KiB of body and 64 KiB of header, whatever the
// receiver sends. It is the only way out to URLs that customers choose.
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
	"maps"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"afluente/jobs/httperr"
)

const (
	maxAnswer  = 64 << 10 // bytes of body that are read
	keptAnswer = 8 << 10  // bytes of it that are kept

	// Timeout bounds one exchange, from the look-up of the name to the end of the answer.
	Timeout        = 10 * time.Second
	connectTimeout = 3 * time.Second

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
	Body       []byte    // JSON, sent byte for byte
	At         time.Time // required: the time of this attempt, signed in whole seconds

	// Secrets all sign webhook-signature, newest first; at least one is required. Each is whsec_ and base64 of the key, or an
	// imported secret of any form. Legacy is the one among them that signs the headers which hold one signature.
	Secrets []string
	Legacy  string
	// Headers are the subscription's own, see [CheckHeaders].
	Headers map[string]string
}

// Answer is what a receiver said. All is zero where it did not get that far.
type Answer struct {
	Status   int
	Text     string        // start of the body, at most 8 KiB of UTF-8 without NUL; a receiver may repeat the event in it
	Remote   string        // address and port
	Duration time.Duration // of the exchange
}

// StatusError is an answer other than 2xx, a redirect included. [Sender.Send] returns it.
type StatusError struct {
	Code       int           // HTTP status
	RetryAfter time.Duration // what the Retry-After header asks for, at most 24 h; 0 when it asks for nothing
}

func (e *StatusError) Error() string { return fmt.Sprintf("answer %d", e.Code) }

// ErrUnsigned says that an attempt could not be signed. [Sign] and [Sender.Send] return it.
var ErrUnsigned = errors.New("cannot be signed")

// Sign returns the headers by which a receiver checks and deduplicates r, made of its EventID, secrets, Body and At:
//
//	webhook-id, X-Deskcomm-Idempotency-Key    EventID
//	webhook-timestamp, X-Webhook-Timestamp    At in Unix seconds
//	webhook-signature                         for each secret "v1," and base64 of HMAC-SHA256(K, id.timestamp.body): Standard Webhooks
//	X-Deskcomm-Signature                      hex of HMAC-SHA256(L, body)
//	X-Webhook-Signature                       "sha256=" and hex of HMAC-SHA256(L, timestamp.body)
//
// L is the legacy secret as shown to the customer, prefix included. K is what the base64 after whsec_ decodes to; of a secret
// without that prefix, its bytes. A missing id, time or key and a secret that does not decode give [ErrUnsigned].
func Sign(r Request) (http.Header, error) {
	if r.EventID == "" || r.At.IsZero() {
		return nil, fmt.Errorf("%w: no event id or no time", ErrUnsigned)
	}
	if !slices.Contains(r.Secrets, r.Legacy) {
		return nil, fmt.Errorf("%w: no secret for the legacy headers", ErrUnsigned)
	}
	timestamp := strconv.FormatInt(r.At.Unix(), 10)
	var signatures []string
	var legacy []byte
	for _, secret := range r.Secrets {
		whole, key, err := keys(secret)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnsigned, err)
		}
		if secret == r.Legacy {
			legacy = whole
		}
		signatures = append(signatures, "v1,"+base64.StdEncoding.EncodeToString(mac(key, r.EventID+"."+timestamp+".", r.Body)))
	}

	h := http.Header{}
	h.Set("Webhook-Id", r.EventID)
	h.Set("Webhook-Timestamp", timestamp)
	h.Set("Webhook-Signature", strings.Join(signatures, " "))
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

// Sender posts events. Its fields must not change while it is used; its methods may be called from several goroutines.
type Sender struct {
	Guard     *Guard            // required
	Transport http.RoundTripper // required, see NewTransport
	UserAgent string            // neutral, since customers see it; empty means "Webhooks/1.0"
}

// NewTransport returns the transport for a [Sender], to be shared by all of a process: it connects where guard allows, with no
// proxy from the environment, no decompression, TLS 1.2 or later, 3 s to connect, 5 s for the TLS handshake, 64 KiB of answer
// header.
func NewTransport(guard *Guard) *http.Transport {
	return &http.Transport{
		DialContext:            guard.DialContext,
		DisableCompression:     true,
		ForceAttemptHTTP2:      true, // a transport with its own dialer or TLS settings speaks HTTP/1.1 otherwise
		HTTP2:                  &http.HTTP2Config{PingTimeout: 5 * time.Second, SendPingTimeout: 15 * time.Second},
		IdleConnTimeout:        90 * time.Second,
		MaxIdleConns:           1000,
		MaxIdleConnsPerHost:    4,
		MaxResponseHeaderBytes: 64 << 10,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    5 * time.Second,
	}
}

// Send checks and signs r and posts it once, within [Timeout]. The error is nil when the receiver answers 2xx, even if the body
// that follows breaks off; a [*StatusError] for any other answer; ErrURL or ErrAddress where it may not go, and [ErrUnsigned]
// where nothing was sent; and the reason when there is no answer. [Classify] tells what follows from it. Error texts hold the
// delivery's id, never the URL, which may carry a token.
func (s *Sender) Send(ctx context.Context, r Request) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	start := time.Now()
	answer, err := s.post(ctx, r)
	answer.Duration = time.Since(start)
	if err != nil {
		return answer, fmt.Errorf("webhook: send delivery %s: %w", r.DeliveryID, err)
	}
	return answer, nil
}

func (s *Sender) post(ctx context.Context, r Request) (Answer, error) {
	signed, err := Sign(r)
	if err != nil {
		return Answer{}, err
	}
	if err := s.Guard.CheckURL(ctx, r.URL); err != nil {
		return Answer{}, httperr.Cause(err)
	}
	var remote atomic.Value // written by the transport's goroutine
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) { remote.Store(info.Conn.RemoteAddr().String()) },
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL, bytes.NewReader(r.Body))
	if err != nil {
		return Answer{}, httperr.Cause(err)
	}
	setHeaders(req.Header, r.Headers) // first, so that ours win
	maps.Copy(req.Header, signed)
	req.Header.Set("Accept-Encoding", "identity") // asked for by name, no transport unpacks an answer: 40 KB can hold 40 MB
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "Webhooks/1.0")
	if s.UserAgent != "" {
		req.Header.Set("User-Agent", s.UserAgent)
	}
	req.Header.Set("X-Deskcomm-Event", r.EventType)
	req.Header.Set("X-Webhook-Attempt", strconv.Itoa(r.Attempt))
	req.Header.Set("X-Webhook-Delivery", r.DeliveryID)

	resp, err := (&http.Client{Transport: s.Transport, CheckRedirect: refuseRedirect}).Do(req)
	answer := Answer{}
	answer.Remote, _ = remote.Load().(string)
	if err != nil {
		return answer, httperr.Cause(err)
	}
	defer resp.Body.Close()

	// A body that breaks off changes nothing: the status has been said. Reading it lets the connection be used again.
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	answer.Status = resp.StatusCode
	answer.Text = strings.ReplaceAll(strings.ToValidUTF8(string(body[:min(len(body), keptAnswer)]), "\uFFFD"), "\x00", "\uFFFD")
	if resp.StatusCode/100 == 2 {
		return answer, nil
	}
	return answer, &StatusError{Code: resp.StatusCode, RetryAfter: httperr.RetryAfter(resp.Header, time.Now())}
}

// refuseRedirect makes a redirect an answer like any other: followed, it would carry body and signatures to another host.
func refuseRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
