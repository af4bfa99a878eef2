package sandbox_test

import (
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
		URL: r.URL() + "/hook", EventID: "e1", EventType: "message.sent", DeliveryID: "d1", Attempt: 1, Secret: "whsec_c2VjcmV0",
		Body: []byte(`{"id":"e1"}`), At: time.Now(),
	}
}

func TestReceiverAcceptsWhatIsSigned(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zap.InfoLevel)
	r := startReceiver(t, sandbox.Config{Secret: "whsec_c2VjcmV0", Log: zap.New(core)})
	sender := &webhook.Sender{HTTP: newCaller(t).http}

	require.NoError(t, sender.Send(t.Context(), request(r)))
	require.NoError(t, sender.Send(t.Context(), request(r)))
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

	var status *webhook.StatusError
	require.ErrorAs(t, (&webhook.Sender{HTTP: c.http}).Send(t.Context(), request(r)), &status)
	require.Equal(t, 401, status.Code)

	got, err := c.do(t.Context(), "POST "+r.URL(), "{}")
	require.NoError(t, err)
	require.Equal(t, 401, got.status, "no signature at all")
	require.Empty(t, r.Accepted())
}
