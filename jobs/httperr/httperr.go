// Package httperr holds what the clients of outside systems share when an HTTP call fails: how to keep a piece of the answer, how
// to read Retry-After, and how to pass a transport's error on without the URL. Its functions keep no state and may be called from
// several goroutines.
package httperr

import (
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
)

const (
	maxExcerpt    = 200 // bytes
	maxRetryAfter = 24 * time.Hour
)

// Excerpt returns the beginning of an answer's body in a form that any log or text column takes: at most 200 bytes of valid UTF-8,
// every run of white space, control and other invisible characters turned into one space. It does not hide what the
// other side chose to repeat, which may be personal data: store it where such data may be, and keep it out of error texts.
func Excerpt(body []byte) string {
	text := strings.ToValidUTF8(string(body[:min(len(body), maxExcerpt)]), "")
	text = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
	return strings.Join(strings.Fields(text), " ")
}

// RetryAfter returns how long after now the Retry-After header asks to wait: whole seconds or one of the three HTTP dates. It is 0
// when the header is absent, malformed, negative or past, and never more than 24 h.
func RetryAfter(h http.Header, now time.Time) time.Duration {
	value := h.Get("Retry-After")
	if seconds, err := strconv.ParseInt(value, 10, 64); err == nil {
		// Bounded before it is multiplied, so that it cannot overflow.
		return time.Duration(min(max(seconds, 0), int64(maxRetryAfter/time.Second))) * time.Second
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return min(max(at.Sub(now), 0), maxRetryAfter)
}

// Cause returns the error inside a [*url.Error], whose text would show the URL and with it the tokens that people put into
// queries. A text of more than 200 bytes, such as a server's malformed status line, is replaced by an excerpt and loses its chain;
// errors of a context are short and keep theirs.
func Cause(err error) error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err
	}
	if text := err.Error(); len(text) > maxExcerpt {
		return errors.New(Excerpt([]byte(text)))
	}
	return err
}
