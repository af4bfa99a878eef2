package sandbox_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"afluente/jobs/sandbox"
	"afluente/jobs/waha"
)

const chatID = "5511999999999@c.us"

func startWAHA(t *testing.T, c sandbox.Config) (*sandbox.WAHA, *waha.Client) {
	t.Helper()
	c.Addr = "127.0.0.1:0"
	w, err := sandbox.StartWAHA(t.Context(), c)
	require.NoError(t, err)
	t.Cleanup(w.Close)
	return w, &waha.Client{BaseURL: w.URL(), APIKey: c.Secret, HTTP: newCaller(t).http}
}

func TestWAHASendsOncePerIdempotencyKey(t *testing.T) {
	t.Parallel()
	w, client := startWAHA(t, sandbox.Config{Secret: "key"})
	text := waha.Text{Session: "default", ChatID: chatID, Body: "olá", IdempotencyKey: "m1"}

	first, err := client.SendText(t.Context(), text)
	require.NoError(t, err)
	again, err := client.SendText(t.Context(), text)
	require.NoError(t, err)
	text.IdempotencyKey = "m2"
	other, err := client.SendText(t.Context(), text)
	require.NoError(t, err)

	require.Equal(t, first, again)
	require.NotEqual(t, first, other)
	require.Equal(t, 1, w.Duplicates())
	sent := w.Sent()
	require.Len(t, sent, 2)
	require.Equal(t, sandbox.Message{
		ID: first, IdempotencyKey: "m1", Session: "default", ChatID: chatID, Text: "olá", Time: sent[0].Time,
	}, sent[0])
}

func TestWAHASendsOnceWhenTheAnswerIsLost(t *testing.T) {
	t.Parallel()
	w, client := startWAHA(t, sandbox.Config{})
	w.SetFault(sandbox.Fault{AfterDoing: true, Times: 1})
	text := waha.Text{Session: "default", ChatID: chatID, Body: "olá", IdempotencyKey: "m1"}

	_, err := client.SendText(t.Context(), text)
	require.Error(t, err)
	id, err := client.SendText(t.Context(), text)
	require.NoError(t, err)

	require.Len(t, w.Sent(), 1)
	require.Equal(t, id, w.Sent()[0].ID)
	require.Equal(t, 1, w.Duplicates())
}

func TestWAHACountsUnderConcurrency(t *testing.T) {
	t.Parallel()
	w, client := startWAHA(t, sandbox.Config{})
	var calls sync.WaitGroup
	errs := make([]error, 40)
	for n := range errs {
		calls.Go(func() {
			_, errs[n] = client.SendText(t.Context(), waha.Text{
				Session: "default", ChatID: chatID, Body: "olá", IdempotencyKey: fmt.Sprint(n % 10),
			})
		})
	}
	calls.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.Len(t, w.Sent(), 10)
	require.Equal(t, 30, w.Duplicates())
	require.Equal(t, 40, w.Total())
}

func TestWAHARefuses(t *testing.T) {
	t.Parallel()
	const text = `{"session":"default","chatId":"1@c.us","text":"a"}`
	for name, test := range map[string]struct {
		secret, target, body string
		status               int
	}{
		"a wrong key":           {"key", "/api/sendText", text, 401},
		"an unknown path":       {"", "/api/sendImage", text, 404},
		"what is not json":      {"", "/api/sendText", "text", 400},
		"a text without a chat": {"", "/api/sendText", `{"session":"default","text":"a"}`, 422},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, _ := startWAHA(t, sandbox.Config{Secret: test.secret})
			got, err := newCaller(t).do(t.Context(), "POST "+w.URL()+test.target, test.body)
			require.NoError(t, err)
			require.Equal(t, test.status, got.status)
			require.Empty(t, w.Sent())
			require.Equal(t, 1, w.Total())
		})
	}
}

func TestWAHALogsOneLinePerCallWithoutNumbersOfPeople(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zap.InfoLevel)
	w, client := startWAHA(t, sandbox.Config{Log: zap.New(core)})

	id, err := client.SendText(t.Context(), waha.Text{Session: "default", ChatID: chatID, Body: "olá", IdempotencyKey: "m1"})
	require.NoError(t, err)
	w.Close()

	require.Equal(t, 1, logs.Len())
	line := logs.All()[0]
	require.Equal(t, "message sent", line.Message)
	require.Equal(t, map[string]any{"message_id": id, "status": int64(201)}, line.ContextMap())
	require.NotContains(t, id, "5511999999999")
}
