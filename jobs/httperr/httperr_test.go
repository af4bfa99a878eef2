package httperr_test

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"afluente/jobs/httperr"
)

func TestExcerpt(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ body, want string }{
		"empty stays empty":                   {"", ""},
		"text stays":                          {"sessão não iniciada", "sessão não iniciada"},
		"lines become one":                    {"\r\n<html>\n\t<body>\n", "<html> <body>"},
		"nul and other controls become space": {"a\x00b\x1b[31mc\x7fd\u0085e", "a b [31mc d e"},
		"bidi override becomes space":         {"abc\u202edef", "abc def"},
		"invalid utf-8 is dropped":            {"caf\xe9 \xff\xfeok", "caf ok"},
		"long is cut":                         {strings.Repeat("a", 201), strings.Repeat("a", 200)},
		"a cut inside a rune drops the rune":  {strings.Repeat("a", 199) + "ã", strings.Repeat("a", 199)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, test.want, httperr.Excerpt([]byte(test.body)))
		})
	}
}

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, test := range map[string]struct {
		value string
		want  time.Duration
	}{
		"absent is zero":             {"", 0},
		"seconds":                    {"90", 90 * time.Second},
		"zero":                       {"0", 0},
		"negative is zero":           {"-5", 0},
		"a fraction is malformed":    {"1.5", 0},
		"words are malformed":        {"soon", 0},
		"a year is cut to a day":     {"31536000", 24 * time.Hour},
		"no overflow":                {"9223372036854775807", 24 * time.Hour},
		"rfc 1123 date":              {"Fri, 02 Jan 2026 03:05:05 GMT", time.Minute},
		"rfc 850 date":               {"Friday, 02-Jan-26 03:05:05 GMT", time.Minute},
		"asctime date":               {"Fri Jan  2 03:05:05 2026", time.Minute},
		"a past date is zero":        {"Fri, 02 Jan 2026 03:04:00 GMT", 0},
		"a far date is cut to a day": {"Sat, 02 Jan 2027 03:04:05 GMT", 24 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := http.Header{}
			if test.value != "" {
				h.Set("Retry-After", test.value)
			}
			require.Equal(t, test.want, httperr.RetryAfter(h, now))
		})
	}
}

func TestCause(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err  error
		want string
	}{
		"the url is left out":       {&url.Error{Op: "Post", URL: "https://h/?token=x", Err: errors.New("refused")}, "refused"},
		"another error stays":       {errors.New("refused"), "refused"},
		"a long text is an excerpt": {errors.New(strings.Repeat("a", 60_000)), strings.Repeat("a", 200)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.EqualError(t, httperr.Cause(test.err), test.want)
		})
	}

	t.Run("an ended context can be told", func(t *testing.T) {
		t.Parallel()
		err := httperr.Cause(&url.Error{Op: "Post", URL: "https://h/", Err: context.DeadlineExceeded})
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}
