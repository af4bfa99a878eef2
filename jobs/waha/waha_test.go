package waha_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"afluente/jobs/waha"
)

var text = waha.Text{Session: "default", ChatID: "5511999999999@c.us", Body: "olá <b>", IdempotencyKey: "m1"}

// serve returns a client of a server that answers with handler.
func serve(t *testing.T, handler http.HandlerFunc) *waha.Client {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return &waha.Client{BaseURL: server.URL, APIKey: "secret-key", HTTP: server.Client()}
}

func TestSendTextSendsWhatWAHAExpects(t *testing.T) {
	t.Parallel()
	var got *http.Request
	var body map[string]string
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		_ = json.NewDecoder(r.Body).Decode(&body)
		_, _ = io.WriteString(w, `{"id":"abc"}`)
	})
	client.BaseURL += "/waha/"

	id, err := client.SendText(t.Context(), text)

	require.NoError(t, err)
	require.Equal(t, "abc", id)
	require.Equal(t, "POST /waha/api/sendText", got.Method+" "+got.URL.Path)
	require.Equal(t, "secret-key", got.Header.Get("X-Api-Key"))
	require.Equal(t, "m1", got.Header.Get("Idempotency-Key"))
	require.Equal(t, "application/json", got.Header.Get("Content-Type"))
	require.Equal(t, map[string]string{
		"session": "default", "chatId": "5511999999999@c.us", "text": "olá <b>", "idempotency_key": "m1",
	}, body)
}

func TestSendTextWithoutAKeySendsNoHeader(t *testing.T) {
	t.Parallel()
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, sent := r.Header["X-Api-Key"]
		_, _ = fmt.Fprintf(w, `{"id":"%t"}`, sent)
	})
	client.APIKey = ""
	id, err := client.SendText(t.Context(), text)
	require.NoError(t, err)
	require.Equal(t, "false", id)
}

func TestSendTextFindsTheID(t *testing.T) {
	t.Parallel()
	const none = "waha: send text: answer without a message id"
	for name, test := range map[string]struct{ body, id, err string }{
		"plain":                        {`{"id":"abc"}`, "abc", ""},
		"serialized":                   {`{"id":{"fromMe":true,"_serialized":"true_abc"},"ack":1}`, "true_abc", ""},
		"under key":                    {`{"key":{"id":"abc"},"message":{}}`, "abc", ""},
		"under key beside a null id":   {`{"id":null,"key":{"id":"abc"}}`, "abc", ""},
		"plain beside another key":     {`{"id":"abc","key":"x"}`, "abc", ""},
		"absent is an error":           {`{"ok":true}`, "", none},
		"empty is an error":            {`{"id":""}`, "", none},
		"a number is an error":         {`{"id":7}`, "", none},
		"a nul in the id is an error":  {`{"id":"a\u0000b"}`, "", none},
		"no body is an error":          {``, "", none},
		"garbage is an error":          {"\x00\xff", "", none},
		"a list is an error":           {`[{"id":"abc"}]`, "", none},
		"more than 64 KiB is an error": {`{"id":"abc","data":"` + strings.Repeat("a", 64<<10) + `"}`, "", none},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(http.StatusCreated)
				_, _ = io.WriteString(w, test.body)
			})
			id, err := client.SendText(t.Context(), text)
			require.Equal(t, test.id, id)
			if test.err == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, test.err)
			var status *waha.StatusError
			require.NotErrorAs(t, err, &status)
		})
	}
}

func TestStatusErrors(t *testing.T) {
	t.Parallel()
	for code, permanent := range map[int]bool{
		300: false, 304: false, 400: true, 401: true, 404: true, 408: false, 409: true, 422: true, 429: false, 500: false, 503: false,
	} {
		t.Run(fmt.Sprintf("%d permanent %t", code, permanent), func(t *testing.T) {
			t.Parallel()
			client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "30")
				w.WriteHeader(code)
				_, _ = io.WriteString(w, "\x005511999999999\xff "+strings.Repeat("ã", 1000))
			})
			_, err := client.SendText(t.Context(), text)

			require.EqualError(t, err, fmt.Sprintf("waha: send text: answer %d", code))
			var status *waha.StatusError
			require.ErrorAs(t, err, &status)
			require.Equal(t, code, status.Code)
			require.Equal(t, permanent, status.Permanent())
			require.Equal(t, 30*time.Second, status.RetryAfter)
			if code != http.StatusNotModified { // which has no body
				require.Regexp(t, `^5511999999999 ã+$`, status.Excerpt)
				require.LessOrEqual(t, len(status.Excerpt), 200)
			}
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
			client := serve(t, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, sink.URL, code) })

			_, err := client.SendText(t.Context(), text)

			var status *waha.StatusError
			require.ErrorAs(t, err, &status)
			require.Equal(t, code, status.Code)
			require.False(t, status.Permanent())
			require.Zero(t, hits.Load())
		})
	}
}

// http.Transport repeats a request with an Idempotency-Key when a kept connection breaks; the second call would be such a one.
func TestOneCallIsOneDelivery(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		if calls.Add(1) > 1 {
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, `{"id":"abc"}`)
	})
	_, err := client.SendText(t.Context(), text)
	require.NoError(t, err)
	_, err = client.SendText(t.Context(), text)
	require.ErrorIs(t, err, io.EOF)
	require.EqualValues(t, 2, calls.Load())
}

func TestSendTextFails(t *testing.T) {
	t.Parallel()

	t.Run("without an idempotency key", func(t *testing.T) {
		t.Parallel()
		_, err := (&waha.Client{}).SendText(t.Context(), waha.Text{})
		require.EqualError(t, err, "waha: send text: no idempotency key")
	})

	t.Run("when ctx ends, and says so", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		client := serve(t, func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.ReadAll(r.Body)
			cancel()
			<-r.Context().Done()
		})
		_, err := client.SendText(ctx, text)
		require.ErrorIs(t, err, context.Canceled)
		require.NotContains(t, err.Error(), client.BaseURL)
	})

	t.Run("when a 2xx answer breaks off", func(t *testing.T) {
		t.Parallel()
		client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, `{"id":"abc"}`)
		})
		_, err := client.SendText(t.Context(), text)
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	})

	t.Run("when BaseURL is none, without showing it", func(t *testing.T) {
		t.Parallel()
		for _, base := range []string{"", "waha:3000", "http://user:pass@waha:x", "http://user:pass@wa ha"} {
			_, err := (&waha.Client{BaseURL: base}).SendText(t.Context(), text)
			require.ErrorContains(t, err, "waha: send text: ")
			require.NotContains(t, err.Error(), "pass")
		}
	})
}
