package sandbox_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"afluente/jobs/sandbox"
)

// answer is what a caller gets to see.
type answer struct {
	status int
	header http.Header
	body   string
}

// caller makes calls over connections of its own, which end with the test.
type caller struct{ http *http.Client }

func newCaller(t *testing.T) caller {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return caller{http: &http.Client{Transport: transport}}
}

// do sends "METHOD URL" with a body.
func (c caller) do(ctx context.Context, target, body string) (answer, error) {
	method, url, _ := strings.Cut(target, " ")
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: string(got)}, err
}

func startReceiver(t *testing.T, c sandbox.Config) *sandbox.Receiver {
	t.Helper()
	c.Addr = "127.0.0.1:0"
	r, err := sandbox.StartReceiver(t.Context(), c)
	require.NoError(t, err)
	t.Cleanup(r.Close)
	return r
}

func accepted(r *sandbox.Receiver) int {
	n := 0
	for _, times := range r.Accepted() {
		n += times
	}
	return n
}

func TestFaultsThatAnswer(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fault      sandbox.Fault
		status     int
		retryAfter string
		body       string
		accepted   int
	}{
		"none accepts":                               {sandbox.Fault{}, 200, "", `{"ok":true}`, 1},
		"status does nothing":                        {sandbox.Fault{Status: 404}, 404, "", `{"message":"sandbox fault"}`, 0},
		"retry-after is rounded up":                  {sandbox.Fault{Status: 429, RetryAfter: 1500 * time.Millisecond}, 429, "2", `{"message":"sandbox fault"}`, 0},
		"status after doing accepts":                 {sandbox.Fault{Status: 500, AfterDoing: true}, 500, "", `{"message":"sandbox fault"}`, 1},
		"garbage accepts":                            {sandbox.Fault{Garbage: true}, 200, "", "\x00\xff\xfe garbage", 1},
		"garbage with a status does nothing":         {sandbox.Fault{Garbage: true, Status: 500}, 500, "", "\x00\xff\xfe garbage", 0},
		"delay accepts in the end":                   {sandbox.Fault{Delay: time.Millisecond}, 200, "", `{"ok":true}`, 1},
		"delay after doing answers and accepts once": {sandbox.Fault{Delay: time.Millisecond, AfterDoing: true}, 200, "", `{"ok":true}`, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startReceiver(t, sandbox.Config{})
			r.SetFault(test.fault)

			got, err := newCaller(t).do(t.Context(), "POST "+r.URL()+"/hook", "{}")

			require.NoError(t, err)
			require.Equal(t, test.status, got.status)
			require.Equal(t, test.retryAfter, got.header.Get("Retry-After"))
			require.Equal(t, test.body, got.body)
			require.Equal(t, test.accepted, accepted(r))
			require.Equal(t, 1, r.Total())
		})
	}
}

func TestFaultsThatCut(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fault    sandbox.Fault
		accepted int
	}{
		"cut does nothing":         {sandbox.Fault{Cut: true}, 0},
		"delayed cut does nothing": {sandbox.Fault{Cut: true, Delay: time.Millisecond}, 0},
		"after doing alone cuts":   {sandbox.Fault{AfterDoing: true}, 1},
		"cut after doing accepts":  {sandbox.Fault{AfterDoing: true, Cut: true, Delay: time.Millisecond}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startReceiver(t, sandbox.Config{})
			r.SetFault(test.fault)

			_, err := newCaller(t).do(t.Context(), "POST "+r.URL()+"/hook", "{}")

			require.ErrorIs(t, err, io.EOF)
			require.Equal(t, test.accepted, accepted(r))
			require.Equal(t, 1, r.Total())
		})
	}
}

func TestFaultHoldsForTimesCalls(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, sandbox.Config{})
	c := newCaller(t)
	r.SetFault(sandbox.Fault{Status: 503, Times: 2})

	var statuses []int
	for range 4 {
		got, err := c.do(t.Context(), "POST "+r.URL(), "{}")
		require.NoError(t, err)
		statuses = append(statuses, got.status)
	}

	require.Equal(t, []int{503, 503, 200, 200}, statuses)
}

// hang starts a call that hangs and returns once it does; the channel gives its end.
func hang(ctx context.Context, t *testing.T, r *sandbox.Receiver) <-chan error {
	t.Helper()
	c := newCaller(t)
	ended := make(chan error, 1)
	go func() {
		got, err := c.do(ctx, "POST "+r.URL(), "{}")
		if err == nil && got.status != http.StatusOK {
			err = fmt.Errorf("status %d", got.status)
		}
		ended <- err
	}()
	require.NoError(t, r.AwaitCalls(ctx, 1))
	return ended
}

func TestHangEnds(t *testing.T) {
	t.Parallel()

	t.Run("properly when the fault is cleared", func(t *testing.T) {
		t.Parallel()
		r := startReceiver(t, sandbox.Config{})
		r.SetFault(sandbox.Fault{Hang: true, Times: 1})
		ended := hang(t.Context(), t, r)
		require.Zero(t, accepted(r))
		r.ClearFault()
		require.NoError(t, <-ended)
		require.Equal(t, 1, accepted(r))
	})

	t.Run("with the work done once when it was done before", func(t *testing.T) {
		t.Parallel()
		r := startReceiver(t, sandbox.Config{})
		r.SetFault(sandbox.Fault{Hang: true, AfterDoing: true})
		ended := hang(t.Context(), t, r)
		r.ClearFault()
		require.NoError(t, <-ended)
		require.Equal(t, 1, accepted(r))
	})

	t.Run("without work when the caller gives up", func(t *testing.T) {
		t.Parallel()
		core, logs := observer.New(zap.InfoLevel)
		r := startReceiver(t, sandbox.Config{Log: zap.New(core)})
		r.SetFault(sandbox.Fault{Hang: true})
		ctx, cancel := context.WithCancel(t.Context())
		ended := hang(ctx, t, r)
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled)
		r.Close()
		require.Zero(t, accepted(r))
		require.Equal(t, 1, logs.FilterMessage("call given up").Len())
	})

	t.Run("without an answer when the server closes", func(t *testing.T) {
		t.Parallel()
		r := startReceiver(t, sandbox.Config{})
		r.SetFault(sandbox.Fault{Hang: true})
		ended := hang(t.Context(), t, r)
		r.Close()
		require.Error(t, <-ended)
		require.Zero(t, accepted(r))
	})
}

func TestCloseDoesNotWaitForIdleConnections(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, sandbox.Config{})
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(r.URL(), "http://"))
	require.NoError(t, err)
	defer conn.Close()

	r.Close()
	r.Close() // again

	_, err = conn.Read(make([]byte, 1))
	require.Error(t, err)
}

func TestFaultsOverHTTP(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, sandbox.Config{})
	c := newCaller(t)

	got, err := c.do(t.Context(), "POST "+r.URL()+"/faults", `{"status":503,"retry_after":"30s","delay":"1ms","times":3}`)
	require.NoError(t, err)
	require.Equal(t, http.StatusNoContent, got.status)

	got, err = c.do(t.Context(), "POST "+r.URL()+"/hook", "{}")
	require.NoError(t, err)
	require.Equal(t, 503, got.status)
	require.Equal(t, "30", got.header.Get("Retry-After"))

	got, err = c.do(t.Context(), "DELETE "+r.URL()+"/faults", "")
	require.NoError(t, err)
	require.Equal(t, http.StatusNoContent, got.status)

	got, err = c.do(t.Context(), "POST "+r.URL()+"/hook", "{}")
	require.NoError(t, err)
	require.Equal(t, 200, got.status)
	require.Equal(t, 2, r.Total(), "control calls are not counted")
}

func TestWrongFaultsAreRefused(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, sandbox.Config{})
	for name, test := range map[string]struct{ body, want string }{
		"no json":          {`status=503`, "decode fault"},
		"unknown field":    {`{"stauts":503}`, "unknown field"},
		"status too small": {`{"status":99}`, "99 is not from 200 to 599"},
		"negative times":   {`{"times":-1}`, "-1 is negative"},
		"bare number":      {`{"delay":"30"}`, "is not a duration"},
		"negative delay":   {`{"delay":"-1s"}`, "is not a duration"},
		"all at once":      {`{"status":99,"times":-1}`, "-1 is negative"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := newCaller(t).do(t.Context(), "POST "+r.URL()+"/faults", test.body)
			require.NoError(t, err)
			require.Equal(t, http.StatusBadRequest, got.status)
			require.Contains(t, got.body, test.want)
		})
	}
}

func TestCallsAreRecorded(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, sandbox.Config{})
	c := newCaller(t)
	for n := range 3 {
		_, err := c.do(t.Context(), fmt.Sprintf("POST %s/hook/%d?q=1", r.URL(), n), "a\x00\xff")
		require.NoError(t, err)
	}

	require.Len(t, r.Calls(), 3)
	first := r.Calls()[0]
	require.Equal(t, "/hook/0", first.Path)
	require.Equal(t, http.MethodPost, first.Method)
	require.Equal(t, "a\x00\xff", first.Body)
	require.WithinDuration(t, time.Now(), first.Time, time.Minute)
	require.Len(t, r.CallsWith("User-Agent", first.Header.Get("User-Agent")), 3)
	require.Empty(t, r.CallsWith("User-Agent", "other"))

	got, err := c.do(t.Context(), "GET "+r.URL()+"/calls?last=2", "")
	require.NoError(t, err)
	var list struct {
		Total int            `json:"total"`
		Calls []sandbox.Call `json:"calls"`
	}
	require.NoError(t, json.Unmarshal([]byte(got.body), &list))
	require.Equal(t, 3, list.Total)
	require.Len(t, list.Calls, 2)
	require.Equal(t, "/hook/2", list.Calls[1].Path)

	got, err = c.do(t.Context(), "GET "+r.URL()+"/calls?last=x", "")
	require.NoError(t, err)
	require.Equal(t, http.StatusBadRequest, got.status)
}

func TestOldCallsMakeRoomWithinTheByteBound(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, sandbox.Config{})
	c := newCaller(t)
	body := strings.Repeat("a", 1<<20)
	for range 18 {
		_, err := c.do(t.Context(), "POST "+r.URL(), body)
		require.NoError(t, err)
	}
	require.Len(t, r.Calls(), 16)
	require.Equal(t, 18, r.Total())

	got, err := c.do(t.Context(), "POST "+r.URL(), body+"a")
	require.NoError(t, err)
	require.Equal(t, http.StatusRequestEntityTooLarge, got.status)
	require.Equal(t, 18, r.Total())
}

func TestAwaitCallsEndsWithItsContext(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, sandbox.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, r.AwaitCalls(ctx, 0))
	require.ErrorIs(t, r.AwaitCalls(ctx, 1), context.Canceled)
}

func TestTakenAddressIsAnError(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, sandbox.Config{})
	taken := sandbox.Config{Addr: strings.TrimPrefix(r.URL(), "http://")}

	_, err := sandbox.StartReceiver(t.Context(), taken)
	require.ErrorContains(t, err, "sandbox: start receiver: ")
	_, err = sandbox.StartWAHA(t.Context(), taken)
	require.ErrorContains(t, err, "sandbox: start waha: ")
}
