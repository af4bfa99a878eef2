package webhook_test

import (
	"encoding/base64"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"afluente/jobs/webhook"
)

func TestNewSecretsAreStrongAndTakenByEveryLibrary(t *testing.T) {
	t.Parallel()
	seen := make(map[string]bool)
	for range 100 {
		secret := webhook.NewSecret()
		require.Regexp(t, `^whsec_[A-Za-z0-9+/]{44}$`, secret, "33 bytes, so without =")
		require.NoError(t, webhook.CheckSecret(secret))
		require.False(t, seen[secret])
		seen[secret] = true
	}
}

func TestWeakSecretsAreRefused(t *testing.T) {
	t.Parallel()
	for _, secret := range []string{
		"", "whsec_", "short", strings.Repeat("a", 23), "whsec_" + base64.StdEncoding.EncodeToString(make([]byte, 23)), "whsec_***",
		"whsec_" + strings.Repeat("_", 44), strings.Repeat("a", 513), strings.Repeat("a", 30) + "\n", strings.Repeat("a", 30) + "\x00",
	} {
		require.Error(t, webhook.CheckSecret(secret), secret)
	}
	require.NoError(t, webhook.CheckSecret(strings.Repeat("a", 24)))
}

func TestHeadersThatStandInForOursAreRefused(t *testing.T) {
	t.Parallel()
	good := map[string]string{"Authorization": "Bearer x", "X-Api-Key": "k", "X-Empty": ""}
	require.NoError(t, webhook.CheckHeaders(good))
	for _, name := range []string{
		"Host", "content-type", "Content-Length", "Transfer-Encoding", "Connection", "Keep-Alive", "TE", "Trailer", "Upgrade", "Expect",
		"User-Agent", "Cookie", "Forwarded", "X-Forwarded-For", "Proxy-Authorization", "webhook-id", "Webhook-Signature", "X-Webhook-Attempt",
		"X-DESKCOMM-Signature", "Accept-Encoding", "traceparent", "", "a b", "a:b", "é", "a\r\nb", strings.Repeat("a", 101),
	} {
		require.Error(t, webhook.CheckHeaders(map[string]string{name: "x"}), name)
	}
	for _, value := range []string{"a\r\nX-Evil: 1", "a\x00", strings.Repeat("a", 4097)} {
		require.Error(t, webhook.CheckHeaders(map[string]string{"X-Api-Key": value}))
	}
	require.Error(t, webhook.CheckHeaders(map[string]string{"X-Api-Key": "a", "x-api-key": "b"}))
	many := make(map[string]string)
	for i := range 21 {
		many["X-"+strings.Repeat("a", i+1)] = ""
	}
	require.Error(t, webhook.CheckHeaders(many))
}
