package webhook

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrSealed says that something cannot be opened: its key is unknown, or it is not what was sealed. [Keyring.Open] returns it.
	ErrSealed = errors.New("cannot be opened with any key")
	// ErrNoKey says that nothing can be sealed. [Keyring.Seal] returns it.
	ErrNoKey = errors.New("no key to seal secrets with: set AFLUENTE_WEBHOOK_KEYS")
)

// Keyring seals secrets for storage with AES-256-GCM. The zero Keyring has no key, opens nothing and seals nothing. It may be
// used by several goroutines.
type Keyring struct {
	current string
	keys    map[string]cipher.AEAD
}

// ParseKeys reads a comma-separated list of keys, each a name, a colon and 32 bytes in base64. The first one seals; all open. To
// rotate, put a new one in front, and take the old one away when nothing is sealed with it any more.
func ParseKeys(text string) (*Keyring, error) {
	ring := &Keyring{keys: make(map[string]cipher.AEAD)}
	for item := range strings.SplitSeq(text, ",") {
		name, encoded, _ := strings.Cut(strings.TrimSpace(item), ":")
		key, err := base64.StdEncoding.DecodeString(encoded)
		if name == "" || err != nil || len(key) != 32 {
			return nil, errors.New("is not a list of name:key with 32 bytes in base64 for a key, such as 'openssl rand -base64 32' makes")
		}
		if _, ok := ring.keys[name]; ok {
			return nil, fmt.Errorf("has two keys called %q", name)
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, err
		}
		if ring.keys[name], err = cipher.NewGCMWithRandomNonce(block); err != nil {
			return nil, err
		}
		if ring.current == "" {
			ring.current = name
		}
	}
	return ring, nil
}

// Current is the name of the key that seals, empty for none.
func (k *Keyring) Current() string {
	if k == nil {
		return ""
	}
	return k.current
}

// Seal returns plain sealed for owner, without whose name it cannot be opened, and the name of the key; or [ErrNoKey].
func (k *Keyring) Seal(plain []byte, owner string) (sealed []byte, key string, err error) {
	if k.Current() == "" {
		return nil, "", ErrNoKey
	}
	return k.keys[k.current].Seal(nil, nil, plain, []byte(owner)), k.current, nil
}

// Open returns what was sealed for owner with the key of this name, or [ErrSealed].
func (k *Keyring) Open(sealed []byte, key, owner string) ([]byte, error) {
	if k == nil || k.keys[key] == nil {
		return nil, fmt.Errorf("open with key %q: %w", key, ErrSealed)
	}
	plain, err := k.keys[key].Open(nil, nil, sealed, []byte(owner))
	if err != nil {
		return nil, fmt.Errorf("open with key %q: %w", key, ErrSealed)
	}
	return plain, nil
}
