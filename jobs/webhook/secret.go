package webhook

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"
)

const (
	// newKeyBytes is a multiple of three, so that the base64 ends without a "=", over which some libraries stumble.
	newKeyBytes = 33
	minKeyBytes = 24
	maxSecret   = 512 // bytes

	maxHeaders     = 20
	maxHeaderValue = 4 << 10 // bytes
)

// NewSecret returns a secret for a subscription: whsec_ and base64 of 33 random bytes.
func NewSecret() string {
	key := make([]byte, newKeyBytes)
	_, _ = rand.Read(key) // never fails, says its documentation
	return secretPrefix + base64.StdEncoding.EncodeToString(key)
}

// CheckSecret returns why a secret that a customer brings may not sign: it must have a key of 24 bytes or more.
func CheckSecret(secret string) error {
	_, key, err := keys(secret)
	switch {
	case err != nil:
		return err
	case len(key) < minKeyBytes:
		return fmt.Errorf("the secret has a key of less than %d bytes", minKeyBytes)
	case len(secret) > maxSecret || strings.ContainsFunc(secret, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return fmt.Errorf("the secret has more than %d bytes or a control character", maxSecret)
	}
	return nil
}

// keys returns what a secret signs with: the legacy headers, and webhook-signature.
func keys(secret string) (legacy, standard []byte, err error) {
	legacy = []byte(secret)
	standard = legacy
	if encoded, ok := strings.CutPrefix(secret, secretPrefix); ok {
		if standard, err = base64.StdEncoding.DecodeString(encoded); err != nil {
			return nil, nil, errors.New("decode secret: not whsec_ and base64")
		}
	}
	if len(standard) == 0 {
		return nil, nil, errors.New("empty secret")
	}
	return legacy, standard, nil
}

// CheckHeaders returns why these may not be the custom headers of a subscription. They must not stand in for what the transport
// or the sender sets.
func CheckHeaders(headers map[string]string) error {
	if len(headers) > maxHeaders {
		return fmt.Errorf("there are more than %d headers", maxHeaders)
	}
	seen := make(map[string]bool)
	for name, value := range headers {
		lower := strings.ToLower(name)
		switch {
		case !httpguts.ValidHeaderFieldName(name) || len(name) > 100:
			return fmt.Errorf("header %.50q is not a header's name", name)
		case len(value) > maxHeaderValue || !httpguts.ValidHeaderFieldValue(value):
			return fmt.Errorf("the value of header %s has more than %d bytes or a control character", name, maxHeaderValue)
		case seen[lower]:
			return fmt.Errorf("header %s is there twice", name)
		case reserved(lower):
			return fmt.Errorf("header %s is not for a subscription to set", name)
		}
		seen[lower] = true
	}
	return nil
}

func reserved(name string) bool {
	names := []string{
		"accept-encoding", "connection", "cookie", "expect", "forwarded", "host", "keep-alive", "te", "trailer",
		"transfer-encoding", "upgrade", "user-agent", "traceparent", "tracestate", "x-request-id",
	}
	prefixes := []string{"content-", "proxy-", "webhook-", "x-deskcomm-", "x-forwarded-", "x-webhook-"}
	return slices.Contains(names, name) ||
		slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

func setHeaders(h http.Header, headers map[string]string) {
	for name, value := range headers {
		h.Set(name, value)
	}
}
