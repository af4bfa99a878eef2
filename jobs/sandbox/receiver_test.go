package sandbox_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"afluente/jobs/sandbox"
	"afluente/jobs/webhook"
)

func request(r *sandbox.Receiver) webhook.Request {
	return webhook.Request{
		URL: r.URL() + "/hook", EventID: "e1", EventType: "message.sent", DeliveryID: "d1", Attempt: 1,
		Secrets: []string{"whsec_c2VjcmV0"}, Legacy: "whsec_c2VjcmV0", Body: []byte(`{"id":"e1"}`), At: time.Now(),
	}
}

func newSender(t *testing.T) *webhook.Sender {
	t.Helper()
	guard := &webhook.Guard{Allowed: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
	transport := webhook.NewTransport(guard)
	t.Cleanup(transport.CloseIdleConnections)
	return &webhook.Sender{Guard: guard, Transport: transport, UserAgent: "test"}
}

func TestReceiverAcceptsWhatIsSigned(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zap.InfoLevel)
	r := startReceiver(t, sandbox.Config{Secret: "whsec_c2VjcmV0", Log: zap.New(core)})
	sender := newSender(t)

	for range 2 {
		_, err := sender.Send(t.Context(), request(r))
		require.NoError(t, err)
	}
	r.Close()

	require.Equal(t, map[string]int{"d1": 2}, r.Accepted())
	require.Len(t, r.CallsWith("X-Deskcomm-Event", "message.sent"), 2)
	require.Equal(t, 2, logs.Len())
	require.Equal(t, "event received", logs.All()[0].Message)
	require.Equal(t, map[string]any{"attempt": "1", "event_id": "e1", "event_type": "message.sent", "status": int64(200)},
		logs.All()[0].ContextMap())
}

func TestReceiverRefusesAnotherSecret(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, sandbox.Config{Secret: "whsec_b3RoZXI="})
	c := newCaller(t)

	answer, err := newSender(t).Send(t.Context(), request(r))
	require.Error(t, err)
	require.Equal(t, 401, answer.Status)

	got, err := c.do(t.Context(), "POST "+r.URL(), "{}")
	require.NoError(t, err)
	require.Equal(t, 401, got.status, "no signature at all")
	require.Empty(t, r.Accepted())
}
