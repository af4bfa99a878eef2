package webhook_test

import (
	"encoding/base64"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"afluente/jobs/webhook"
)

func key(name string, fill byte) string {
	return name + ":" + base64.StdEncoding.EncodeToString([]byte(strings.Repeat(string(fill), 32)))
}

func TestKeysRotate(t *testing.T) {
	t.Parallel()
	before, err := webhook.ParseKeys(key("2025", 'a'))
	require.NoError(t, err)
	sealed, name, err := before.Seal([]byte("the secret"), "owner")
	require.NoError(t, err)
	require.Equal(t, "2025", name)
	require.NotContains(t, string(sealed), "secret")

	during, err := webhook.ParseKeys(key("2026", 'b') + ", " + key("2025", 'a'))
	require.NoError(t, err)
	require.Equal(t, "2026", during.Current())
	plain, err := during.Open(sealed, "2025", "owner")
	require.NoError(t, err)
	require.Equal(t, "the secret", string(plain))

	after, err := webhook.ParseKeys(key("2026", 'b'))
	require.NoError(t, err)
	_, err = after.Open(sealed, "2025", "owner")
	require.ErrorIs(t, err, webhook.ErrSealed)
}

func TestSealedIsBoundToItsOwner(t *testing.T) {
	t.Parallel()
	ring, err := webhook.ParseKeys(key("k", 'a'))
	require.NoError(t, err)
	sealed, _, err := ring.Seal([]byte("x"), "one")
	require.NoError(t, err)
	again, _, err := ring.Seal([]byte("x"), "one")
	require.NoError(t, err)
	require.NotEqual(t, sealed, again, "a nonce of its own")
	for _, owner := range []string{"", "two"} {
		_, err := ring.Open(sealed, "k", owner)
		require.ErrorIs(t, err, webhook.ErrSealed)
	}
	for i := range sealed {
		spoiled := append([]byte{}, sealed...)
		spoiled[i] ^= 1
		_, err := ring.Open(spoiled, "k", "one")
		require.ErrorIs(t, err, webhook.ErrSealed)
		_, err = ring.Open(sealed[:i], "k", "one")
		require.ErrorIs(t, err, webhook.ErrSealed)
	}
}

func TestWithoutAKeyNothingIsSealed(t *testing.T) {
	t.Parallel()
	var ring *webhook.Keyring
	require.Empty(t, ring.Current())
	_, _, err := ring.Seal([]byte("x"), "one")
	require.ErrorIs(t, err, webhook.ErrNoKey)
	_, err = ring.Open([]byte("x"), "k", "one")
	require.ErrorIs(t, err, webhook.ErrSealed)
}

func TestWrongKeysAreRefused(t *testing.T) {
	t.Parallel()
	good := key("k", 'a')
	for _, text := range []string{"", "k", "k:", ":" + strings.TrimPrefix(good, "k:"), "k:YWJj", "k:***", good + "," + good, good + ","} {
		_, err := webhook.ParseKeys(text)
		require.Error(t, err, text)
		require.NotContains(t, err.Error(), "YWFh", "no key in an error")
	}
}
