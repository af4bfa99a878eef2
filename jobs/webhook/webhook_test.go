package webhook_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

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
		URL: url, EventID: eventID, EventType: "lead.created", DeliveryID: "d1", Attempt: 3, Secret: oldSecret, Body: []byte(body),
		At: time.Unix(1700000000, 999_999_999),
	}
}

// The values come from the Standard Webhooks library for Go and from plain Node, not from this package.
func TestSignGivesTheTestVector(t *testing.T) {
	t.Parallel()
	require.Len(t, body, 170)
	for name, test := range map[string]struct{ secret, standard, legacy, timestamped string }{
		"new secret": {
			newSecret, "v1,ueQMP7JCFKtZcfeWY/5VJQ/BeHEN0e6KQK4fN/GVCyc=",
			"d0a873e00a44effe55b868c1827702f212177285c886c93dbb168df02085ad4e", "",
		},
		"old secret": {
			oldSecret, "v1,X5B2O480oplvtJgKtNp1B0WlVZ8lMgjlJNY5Vp8DBxg=",
			"edfc2f2189d1ddbf29f5cfc3c7bb8a77e7fe46ccc57108abc7febcf137a9c64e",
			"sha256=80cb8885cfd9f7ac094d705e0fd2eceeb52ea18d06c510776fbeeeb5dd12a3be",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := request("")
			r.Secret = test.secret
			h, err := webhook.Sign(r)
			require.NoError(t, err)
			require.Equal(t, eventID, h.Get("webhook-id"))
			require.Equal(t, eventID, h.Get("X-Deskcomm-Idempotency-Key"))
			require.Equal(t, "1700000000", h.Get("webhook-timestamp"))
			require.Equal(t, "1700000000", h.Get("X-Webhook-Timestamp"))
			require.Equal(t, test.standard, h.Get("webhook-signature"))
			require.Equal(t, test.legacy, h.Get("X-Deskcomm-Signature"))
			require.Regexp(t, `^sha256=[0-9a-f]{64}$`, h.Get("X-Webhook-Signature"))
			if test.timestamped != "" {
				require.Equal(t, test.timestamped, h.Get("X-Webhook-Signature"))
			}
			require.Len(t, h, 7)
		})
	}
}

// An imported secret is shown to users of a library as whsec_ and its base64, so both must sign alike.
func TestImportedSecretIsItsOwnKey(t *testing.T) {
	t.Parallel()
	imported, shown := request(""), request("")
	imported.Secret, shown.Secret = "segredo", "whsec_c2VncmVkbw=="

	a, err := webhook.Sign(imported)
	require.NoError(t, err)
	b, err := webhook.Sign(shown)
	require.NoError(t, err)

	require.Equal(t, b.Get("webhook-signature"), a.Get("webhook-signature"))
	require.NotEqual(t, b.Get("X-Deskcomm-Signature"), a.Get("X-Deskcomm-Signature"))
}

func TestNothingGoesOutUnsigned(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*webhook.Request){
		"empty secret":       func(r *webhook.Request) { r.Secret = "" },
		"prefix alone":       func(r *webhook.Request) { r.Secret = "whsec_" },
		"line break alone":   func(r *webhook.Request) { r.Secret = "whsec_\n" },
		"url-safe alphabet":  func(r *webhook.Request) { r.Secret = "whsec_a-_b" },
		"unpadded base64":    func(r *webhook.Request) { r.Secret = "whsec_c2VncmVkbw" },
		"no event id":        func(r *webhook.Request) { r.EventID = "" },
		"no time":            func(r *webhook.Request) { r.At = time.Time{} },
		"line break in type": func(r *webhook.Request) { r.EventType = "a\r\nX-Deskcomm-Signature: b" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var hits atomic.Int32
			sender, r := serve(t, func(http.ResponseWriter, *http.Request) { hits.Add(1) })
			spoil(&r)

			err := sender.Send(t.Context(), r)

			require.ErrorContains(t, err, "webhook: send delivery d1: ")
			require.NotContains(t, err.Error(), "c2VncmVkbw")
			require.Zero(t, hits.Load())
		})
	}
}

// serve returns a sender and a request to a server that answers with handler.
func serve(t *testing.T, handler http.HandlerFunc) (*webhook.Sender, webhook.Request) {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	client := webhook.NewHTTPClient()
	t.Cleanup(client.CloseIdleConnections)
	return &webhook.Sender{HTTP: client}, request(server.URL + "/hook?token=hidden")
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

	require.NoError(t, sender.Send(t.Context(), r))

	require.Equal(t, r.Body, gotBody)
	require.Equal(t, "POST /hook?token=hidden", got.Method+" "+got.RequestURI)
	for name, want := range map[string]string{
		"Accept-Encoding":     "identity",
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
	require.NoError(t, sender.Send(t.Context(), r))
	require.Equal(t, "Acme/2", got.UserAgent())
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	for code, want := range map[int]struct{ ok, permanent bool }{
		200: {ok: true}, 204: {ok: true}, 299: {ok: true},
		300: {}, 304: {}, 400: {}, 401: {}, 404: {}, 408: {}, 410: {permanent: true}, 429: {}, 500: {}, 503: {},
	} {
		t.Run(fmt.Sprintf("%d ok %t permanent %t", code, want.ok, want.permanent), func(t *testing.T) {
			t.Parallel()
			sender, r := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "120")
				w.WriteHeader(code)
				_, _ = io.WriteString(w, "\x00cl\xe9 "+strings.Repeat("é", 1000))
			})
			err := sender.Send(t.Context(), r)
			if want.ok {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, fmt.Sprintf("webhook: send delivery d1: answer %d", code))
			var status *webhook.StatusError
			require.ErrorAs(t, err, &status)
			require.Equal(t, code, status.Code)
			require.Equal(t, want.permanent, status.Permanent())
			require.Equal(t, 2*time.Minute, status.RetryAfter)
			if code != http.StatusNotModified { // which has no body
				require.Regexp(t, `^cl é+$`, status.Excerpt)
				require.LessOrEqual(t, len(status.Excerpt), 200)
			}
		})
	}
}

func TestRedirectIsNotFollowed(t *testing.T) {
	t.Parallel()
	for name, client := range map[string]*http.Client{
		"with our client":    webhook.NewHTTPClient(),
		"with any other":     {Transport: &http.Transport{}},
		"with a willing one": {Transport: &http.Transport{}, CheckRedirect: func(*http.Request, []*http.Request) error { return nil }},
	} {
		for _, code := range []int{301, 302, 303, 307, 308} {
			t.Run(fmt.Sprintf("%d %s", code, name), func(t *testing.T) {
				t.Parallel()
				var hits atomic.Int32
				sink := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hits.Add(1) }))
				t.Cleanup(sink.Close)
				sender, r := serve(t, func(w http.ResponseWriter, req *http.Request) { http.Redirect(w, req, sink.URL, code) })
				sender.HTTP = client
				t.Cleanup(client.CloseIdleConnections)

				var status *webhook.StatusError
				require.ErrorAs(t, sender.Send(t.Context(), r), &status)
				require.Equal(t, code, status.Code)
				require.Zero(t, hits.Load())
			})
		}
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
		var status *webhook.StatusError
		require.ErrorAs(t, sender.Send(t.Context(), r), &status)
		require.Equal(t, strings.Repeat("a", 200), status.Excerpt)
		require.Less(t, <-written, 64<<20, "what socket buffers take, then the connection is closed")
	})

	t.Run("2 MB of header", func(t *testing.T) {
		t.Parallel()
		sender, r := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X-Big", strings.Repeat("a", 2<<20)) })
		err := sender.Send(t.Context(), r)
		require.ErrorContains(t, err, "header")
		require.Less(t, len(err.Error()), 300)
	})

	t.Run("a gzip bomb stays packed", func(t *testing.T) {
		t.Parallel()
		for name, client := range map[string]*http.Client{"ours": webhook.NewHTTPClient(), "any other": {Transport: &http.Transport{}}} {
			sender, r := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Encoding", "gzip")
				w.WriteHeader(http.StatusBadGateway)
				z := gzip.NewWriter(w)
				_, _ = z.Write(make([]byte, 2<<20))
				_ = z.Close()
			})
			sender.HTTP = client
			t.Cleanup(client.CloseIdleConnections)
			var status *webhook.StatusError
			require.ErrorAs(t, sender.Send(t.Context(), r), &status, name)
			require.NotEmpty(t, status.Excerpt, name) // unpacked it would be NULs only, so nothing
		}
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
		err := sender.Send(t.Context(), r)
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
	require.NoError(t, sender.Send(t.Context(), r))
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
			err := sender.Send(t.Context(), request(url))
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
	require.ErrorIs(t, sender.Send(ctx, r), context.Canceled)
}
