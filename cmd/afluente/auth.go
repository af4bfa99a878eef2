package main

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"net/netip"
	"sync"

	"golang.org/x/crypto/bcrypt"
)

// anonymous is who acts where nobody has to sign in, which is on this machine
// only.
const anonymous = "anonymous"

// auth lets operators in: those whom a trusted proxy names in a header, and the
// one with the user and password of the settings. Where neither is set it lets
// everybody in, and the settings then allow to listen on loopback only.
type auth struct {
	user     string
	password []byte // a bcrypt hash, or the password itself
	hashed   bool

	header  string
	proxies []netip.Prefix

	mu   sync.Mutex // one bcrypt at a time, so that guesses cannot take every core
	good *[sha256.Size]byte
}

func newAuth(config Config) *auth {
	_, err := bcrypt.Cost([]byte(config.UIPassword))
	return &auth{
		user:     config.UIUser,
		password: []byte(config.UIPassword),
		hashed:   err == nil,
		header:   config.UIUserHeader,
		proxies:  config.TrustedProxies,
	}
}

type actorKey struct{}

// actor is who makes a request that auth let in.
func actor(ctx context.Context) string {
	name, _ := ctx.Value(actorKey{}).(string)
	return name
}

// wrap returns a handler that answers only to those whom auth lets in.
func (a *auth) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, ok := a.identify(r)
		switch {
		case ok:
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), actorKey{}, name)))
		case a.user == "":
			http.Error(w, "sign in through the proxy", http.StatusForbidden)
		default:
			w.Header().Set("WWW-Authenticate", `Basic realm="afluente", charset="UTF-8"`)
			http.Error(w, "wrong user or password", http.StatusUnauthorized)
		}
	})
}

func (a *auth) identify(r *http.Request) (name string, ok bool) {
	if a.header != "" && a.fromProxy(r.RemoteAddr) {
		if name := r.Header.Get(a.header); name != "" {
			return name, true
		}
	}
	if a.user == "" {
		return anonymous, a.header == ""
	}
	user, password, ok := r.BasicAuth()
	return user, ok && a.verify(user, password)
}

func (a *auth) fromProxy(remote string) bool {
	address, err := netip.ParseAddrPort(remote)
	if err != nil {
		return false
	}
	ip := address.Addr().Unmap()
	for _, prefix := range a.proxies {
		if prefix.Contains(ip) {
			return true
		}
	}
	return false
}

// verify takes as long for every wrong guess. What was right once is known by
// its hash, since bcrypt would cost more than the page that is asked for.
func (a *auth) verify(user, password string) bool {
	guess := sha256.Sum256([]byte(user + ":" + password))
	if !a.hashed {
		want := sha256.Sum256([]byte(a.user + ":" + string(a.password)))
		return subtle.ConstantTimeCompare(guess[:], want[:]) == 1
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.good != nil && subtle.ConstantTimeCompare(guess[:], a.good[:]) == 1 {
		return true
	}
	err := bcrypt.CompareHashAndPassword(a.password, []byte(password))
	if err != nil || subtle.ConstantTimeCompare([]byte(user), []byte(a.user)) != 1 {
		return false
	}
	a.good = &guess
	return true
}
