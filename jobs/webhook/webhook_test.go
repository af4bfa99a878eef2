package webhook_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"

	"afluente/jobs/webhook"
)

const (
	newSecret = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWZY"
	oldSecret = "whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTBZ"
	eventID   = "0199f3a2-7c1e-7d55-9a0b-3f1c2d4e5f60"
	body      = `{"id":"0199f3a2-7c1e-7d55-9a0b-3f1c2d4e5f60","type":"lead.created","timestamp":"2023-11-14T22:13:20Z",` +
		`"data":{"name":"João <b>&</b>","value_cents":12345678901234567890}}`
)

func request(url string) webhook.Request {
	return webhook.Request{
		URL: url, EventID: eventID, EventType: "lead.created", DeliveryID: "d1", Attempt: 3, Secrets: []string{oldSecret}, Legacy: oldSecret, Body: []byte(body),
		At: time.Unix(1700000000, 999_999_999),
	}
}

// The values come from the Standard Webhooks library for Go and from plain Node, not from this package.
func TestSignGivesTheTestVector(t *testing.T) {
	t.Parallel()
	require.Len(t, body, 170)
	const (
		standardNew = "v1,ueQMP7JCFKtZcfeWY/5VJQ/BeHEN0e6KQK4fN/GVCyc="
		standardOld = "v1,X5B2O480oplvtJgKtNp1B0WlVZ8lMgjlJNY5Vp8DBxg="
		legacyNew   = "d0a873e00a44effe55b868c1827702f212177285c886c93dbb168df02085ad4e"
		legacyOld   = "edfc2f2189d1ddbf29f5cfc3c7bb8a77e7fe46ccc57108abc7febcf137a9c64e"
		timedOld    = "sha256=80cb8885cfd9f7ac094d705e0fd2eceeb52ea18d06c510776fbeeeb5dd12a3be"
	)
	for name, test := range map[string]struct {
		secrets                             []string
		legacy                              string
		standard, legacyHeader, timestamped string
	}{
		"new secret":                 {[]string{newSecret}, newSecret, standardNew, legacyNew, ""},
		"old secret":                 {[]string{oldSecret}, oldSecret, standardOld, legacyOld, timedOld},
		"while one is rotated":       {[]string{newSecret, oldSecret}, oldSecret, standardNew + " " + standardOld, legacyOld, timedOld},
		"after it has been promoted": {[]string{newSecret, oldSecret}, newSecret, standardNew + " " + standardOld, legacyNew, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := request("")
			r.Secrets, r.Legacy = test.secrets, test.legacy
			h, err := webhook.Sign(r)
			require.NoError(t, err)
			require.Equal(t, eventID, h.Get("webhook-id"))
			require.Equal(t, eventID, h.Get("X-Deskcomm-Idempotency-Key"))
			require.Equal(t, "1700000000", h.Get("webhook-timestamp"))
			require.Equal(t, "1700000000", h.Get("X-Webhook-Timestamp"))
			require.Equal(t, test.standard, h.Get("webhook-signature"))
			require.Equal(t, test.legacyHeader, h.Get("X-Deskcomm-Signature"))
			require.Regexp(t, `^sha256=[0-9a-f]{64}$`, h.Get("X-Webhook-Signature"))
			if test.timestamped != "" {
				require.Equal(t, test.timestamped, h.Get("X-Webhook-Signature"))
			}
			require.Len(t, h, 7)
		})
	}
}

func TestStandardWebhooksLibraryVerifies(t *testing.T) {
	t.Parallel()
	verifies := func(secret string, h http.Header, body []byte) error {
		verifier, err := standardwebhooks.NewWebhook(secret)
		require.NoError(t, err)
		return verifier.Verify(body, h)
	}
	for _, text := range []string{body, `{}`, `{"emoji":"🎉","html":"<b>&</b>","n":1.10,"big":1e308}`, "\x00\xff no JSON at all"} {
		r := request("")
		r.Secrets, r.Legacy, r.Body, r.At = []string{newSecret, oldSecret}, oldSecret, []byte(text), time.Now()
		h, err := webhook.Sign(r)
		require.NoError(t, err)
		require.NoError(t, verifies(newSecret, h, r.Body))
		require.NoError(t, verifies(oldSecret, h, r.Body))
		require.Error(t, verifies(webhook.NewSecret(), h, r.Body))
		require.Error(t, verifies(newSecret, h, append(r.Body, ' ')))
		r.At = time.Now().Add(-time.Hour)
		old, err := webhook.Sign(r)
		require.NoError(t, err)
		require.Error(t, verifies(newSecret, old, r.Body), "a replay")
		h.Set("webhook-timestamp", strconv.FormatInt(time.Now().Unix()+1, 10))
		require.Error(t, verifies(newSecret, h, r.Body), "the time is signed")
	}
}

// An imported secret is shown to users of a library as whsec_ and its base64, so both must sign alike.
func TestImportedSecretIsItsOwnKey(t *testing.T) {
	t.Parallel()
	imported, shown := request(""), request("")
	imported.Secrets, imported.Legacy = []string{"segredo"}, "segredo"
	shown.Secrets, shown.Legacy = []string{"whsec_c2VncmVkbw=="}, "whsec_c2VncmVkbw=="

	a, err := webhook.Sign(imported)
	require.NoError(t, err)
	b, err := webhook.Sign(shown)
	require.NoError(t, err)

	require.Equal(t, b.Get("webhook-signature"), a.Get("webhook-signature"))
	require.NotEqual(t, b.Get("X-Deskcomm-Signature"), a.Get("X-Deskcomm-Signature"))
}

func TestNothingGoesOutUnsigned(t *testing.T) {
	t.Parallel()
	sign := func(secret string) func(*webhook.Request) {
		return func(r *webhook.Request) { r.Secrets, r.Legacy = []string{secret}, secret }
	}
	for name, spoil := range map[string]func(*webhook.Request){
		"no secret":          func(r *webhook.Request) { r.Secrets, r.Legacy = nil, "" },
		"empty secret":       sign(""),
		"prefix alone":       sign("whsec_"),
		"line break alone":   sign("whsec_\n"),
		"url-safe alphabet":  sign("whsec_a-_b"),
		"unpadded base64":    sign("whsec_c2VncmVkbw"),
		"one of two is bad":  func(r *webhook.Request) { r.Secrets = append(r.Secrets, "whsec_") },
		"legacy is unknown":  func(r *webhook.Request) { r.Legacy = newSecret },
		"no event id":        func(r *webhook.Request) { r.EventID = "" },
		"no time":            func(r *webhook.Request) { r.At = time.Time{} },
		"line break in type": func(r *webhook.Request) { r.EventType = "a\r\nX-Deskcomm-Signature: b" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var hits atomic.Int32
			sender, r := serve(t, func(http.ResponseWriter, *http.Request) { hits.Add(1) })
			spoil(&r)

			_, err := sender.Send(t.Context(), r)

			require.ErrorContains(t, err, "webhook: send delivery d1: ")
			require.NotContains(t, err.Error(), "c2VncmVkbw")
			require.Zero(t, hits.Load())
		})
	}
}

// newSender returns a sender with a transport of its own.
func newSender(t *testing.T, guard *webhook.Guard) *webhook.Sender {
	t.Helper()
	transport := webhook.NewTransport(guard)
	t.Cleanup(transport.CloseIdleConnections)
	return &webhook.Sender{Guard: guard, Transport: transport, UserAgent: "Webhooks/1.0"}
}

// serve returns a sender and a request to a server that answers with handler.
func serve(t *testing.T, handler http.HandlerFunc) (*webhook.Sender, webhook.Request) {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	guard := &webhook.Guard{Allowed: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
	return newSender(t, guard), request(server.URL + "/hook?token=hidden")
}

func TestSendPostsTheBodyByteForByte(t *testing.T) {
	t.Parallel()
	var got *http.Request
	var gotBody []byte
	sender, r := serve(t, func(w http.ResponseWriter, req *http.Request) {
		got = req
		gotBody, _ = io.ReadAll(req.Body)
		w.WriteHeader(http.StatusAccepted)
	})
	signed, err := webhook.Sign(r)
	require.NoError(t, err)

	r.Headers = map[string]string{"Authorization": "Bearer mine", "X-Webhook-Attempt": "99", "webhook-id": "forged"}
	answer, err := sender.Send(t.Context(), r)
	require.NoError(t, err)

	require.Equal(t, http.StatusAccepted, answer.Status)
	require.Contains(t, answer.Remote, "127.0.0.1:")
	require.Positive(t, answer.Duration)
	require.Equal(t, r.Body, gotBody)
	require.Equal(t, "POST /hook?token=hidden", got.Method+" "+got.RequestURI)
	for name, want := range map[string]string{
		"Accept-Encoding":     "identity",
		"Authorization":       "Bearer mine",
		"Content-Type":        "application/json",
		"User-Agent":          "Webhooks/1.0",
		"X-Deskcomm-Event":    "lead.created",
		"X-Webhook-Attempt":   "3",
		"X-Webhook-Delivery":  "d1",
		"Content-Length":      "170",
		"Webhook-Id":          eventID,
		"X-Webhook-Timestamp": "1700000000",
	} {
		require.Equal(t, []string{want}, got.Header[name], name)
	}
	for name, want := range signed {
		require.Equal(t, want, got.Header[name])
	}

	sender.UserAgent = "Acme/2"
	_, err = sender.Send(t.Context(), r)
	require.NoError(t, err)
	require.Equal(t, "Acme/2", got.UserAgent())
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	for code, want := range map[int]struct {
		class  string
		action webhook.Action
		counts bool
		wait   time.Duration
	}{
		200: {"success", webhook.Succeed, false, 0},
		204: {"success", webhook.Succeed, false, 0},
		299: {"success", webhook.Succeed, false, 0},
		300: {"redirect", webhook.Retry, true, 0},
		304: {"redirect", webhook.Retry, true, 0},
		400: {"client_error", webhook.Retry, true, 0},
		401: {"client_error", webhook.Retry, true, 0},
		404: {"client_error", webhook.Retry, true, 0},
		408: {"client_error", webhook.Retry, true, 0},
		410: {"gone", webhook.Disable, false, 0},
		413: {"too_large", webhook.GiveUp, false, 0},
		425: {"client_error", webhook.Retry, true, 0},
		429: {"throttled", webhook.Retry, false, 2 * time.Minute},
		500: {"server_error", webhook.Retry, true, 0},
		502: {"server_error", webhook.Retry, true, 0},
		503: {"server_error", webhook.Retry, true, 2 * time.Minute},
		504: {"server_error", webhook.Retry, true, 0},
	} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			t.Parallel()
			sender, r := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "120")
				w.WriteHeader(code)
				_, _ = io.WriteString(w, "\x00cl\xe9 "+strings.Repeat("é", 1000))
			})
			answer, err := sender.Send(t.Context(), r)
			outcome := webhook.Classify(t.Context(), err)
			require.Equal(t, want.class, outcome.Class)
			require.Equal(t, want.action, outcome.Action)
			require.Equal(t, want.counts, outcome.Counts)
			require.Equal(t, want.wait, outcome.Wait)
			require.Equal(t, code == 429 || code == 502 || code == 504, outcome.Throttle)
			require.False(t, outcome.Unsafe)
			require.Equal(t, code, answer.Status)
			if code != http.StatusNotModified && code != http.StatusNoContent { // which have no body
				require.Equal(t, "\uFFFDcl\uFFFD "+strings.Repeat("é", 1000), answer.Text)
			}
			if want.action == webhook.Succeed {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, fmt.Sprintf("webhook: send delivery d1: answer %d", code))
		})
	}
}

func TestWhatHappensWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, test := range map[string]struct {
		ctx   context.Context //nolint:containedctx // a table
		err   error
		class string
		want  webhook.Outcome
	}{
		"no name":             {t.Context(), &net.DNSError{}, "dns", webhook.Outcome{Action: webhook.Retry, Counts: true}},
		"bad certificate":     {t.Context(), &tls.CertificateVerificationError{}, "tls", webhook.Outcome{Action: webhook.Retry, Counts: true}},
		"no TLS":              {t.Context(), tls.RecordHeaderError{}, "tls", webhook.Outcome{Action: webhook.Retry, Counts: true}},
		"too late":            {t.Context(), context.DeadlineExceeded, "timeout", webhook.Outcome{Action: webhook.Retry, Counts: true}},
		"broken off":          {t.Context(), io.ErrUnexpectedEOF, "connection", webhook.Outcome{Action: webhook.Retry, Counts: true}},
		"private address":     {t.Context(), webhook.ErrAddress, "unsafe_address", webhook.Outcome{Action: webhook.Retry, Counts: true, Unsafe: true}},
		"no URL of a webhook": {t.Context(), webhook.ErrURL, "invalid_url", webhook.Outcome{Action: webhook.Disable}},
		"unsigned":            {t.Context(), webhook.ErrUnsigned, "config_error", webhook.Outcome{Action: webhook.Hold}},
		"our own end":         {ended, context.Canceled, "interrupted", webhook.Outcome{Action: webhook.Retry}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test.want.Class = test.class
			require.Equal(t, test.want, webhook.Classify(test.ctx, fmt.Errorf("send: %w", test.err)))
		})
	}
}

func TestRedirectIsNotFollowed(t *testing.T) {
	t.Parallel()
	for _, code := range []int{301, 302, 303, 307, 308} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			t.Parallel()
			var hits atomic.Int32
			sink := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hits.Add(1) }))
			t.Cleanup(sink.Close)
			sender, r := serve(t, func(w http.ResponseWriter, req *http.Request) { http.Redirect(w, req, sink.URL, code) })

			answer, err := sender.Send(t.Context(), r)
			require.Equal(t, "redirect", webhook.Classify(t.Context(), err).Class)
			require.Equal(t, code, answer.Status)
			require.Zero(t, hits.Load())
		})
	}
}

func TestAnswerIsBounded(t *testing.T) {
	t.Parallel()

	t.Run("an endless body", func(t *testing.T) {
		t.Parallel()
		written := make(chan int, 1)
		sender, r := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			n, chunk := 0, bytes.Repeat([]byte("a"), 4096)
			for {
				m, err := w.Write(chunk)
				if n += m; err != nil {
					written <- n
					return
				}
			}
		})
		answer, err := sender.Send(t.Context(), r)
		require.Error(t, err)
		require.Equal(t, strings.Repeat("a", 8<<10), answer.Text)
		require.Less(t, <-written, 64<<20, "what socket buffers take, then the connection is closed")
	})

	t.Run("2 MB of header", func(t *testing.T) {
		t.Parallel()
		sender, r := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X-Big", strings.Repeat("a", 2<<20)) })
		_, err := sender.Send(t.Context(), r)
		require.ErrorContains(t, err, "header")
		require.Less(t, len(err.Error()), 300)
	})

	t.Run("a gzip bomb stays packed", func(t *testing.T) {
		t.Parallel()
		sender, r := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.WriteHeader(http.StatusBadGateway)
			z := gzip.NewWriter(w)
			_, _ = z.Write(make([]byte, 2<<20))
			_ = z.Close()
		})
		answer, err := sender.Send(t.Context(), r)
		require.Error(t, err)
		require.Less(t, len(answer.Text), 8<<10+1)
		require.Contains(t, answer.Text, "\x1f")
	})

	t.Run("a status line of 60 KB", func(t *testing.T) {
		t.Parallel()
		sender, r := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer conn.Close()
			_, _ = io.WriteString(conn, strings.Repeat("a\x00", 30_000)+"\r\n\r\n")
		})
		_, err := sender.Send(t.Context(), r)
		require.Error(t, err)
		require.Less(t, len(err.Error()), 300)
		require.NotContains(t, err.Error(), "\x00")
	})
}

func TestSuccessStaysWhenItsBodyBreaksOff(t *testing.T) {
	t.Parallel()
	sender, r := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = io.WriteString(w, "ok")
	})
	_, err := sender.Send(t.Context(), r)
	require.NoError(t, err)
}

func TestErrorsDoNotShowTheURL(t *testing.T) {
	t.Parallel()
	closed, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	sender, _ := serve(t, nil)
	for name, url := range map[string]string{
		"nobody listens":  "http://" + closed.Addr().String() + "/?token=hidden",
		"no such scheme":  "ftp://host/?token=hidden",
		"no scheme":       "host/?token=hidden",
		"broken url":      "http://host:port/?token=hidden",
		"password in url": "http://user:hidden@" + closed.Addr().String(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := sender.Send(t.Context(), request(url))
			require.ErrorContains(t, err, "webhook: send delivery d1: ")
			require.NotContains(t, err.Error(), "hidden")
		})
	}
}

func TestContextBoundsTheCall(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	sender, r := serve(t, func(_ http.ResponseWriter, req *http.Request) {
		_, _ = io.ReadAll(req.Body)
		cancel()
		<-req.Context().Done()
	})
	_, err := sender.Send(ctx, r)
	require.ErrorIs(t, err, context.Canceled)
}
