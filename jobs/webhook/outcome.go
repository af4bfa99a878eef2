package webhook

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"time"
)

// maxRetryAfter bounds what a receiver may ask for; it is the longest delay between two attempts.
const maxRetryAfter = 2 * time.Hour

// Action is what follows from an attempt.
type Action int

// What follows from an attempt.
const (
	Succeed Action = iota // done
	Retry                 // another attempt, while there are any left
	GiveUp                // no attempt can succeed
	Disable               // the subscription gets nothing any more
	Hold                  // nothing was sent and no attempt is spent
)

// Outcome is what an attempt means.
type Outcome struct {
	// Class names it for people and statistics, such as "timeout".
	Class  string
	Action Action
	// Counts says that it adds to the consecutive failures of the subscription.
	Counts bool
	// Wait is the least time to the next attempt at anything of the subscription, 0 for none, at most 2 h.
	Wait time.Duration
	// Throttle says that the receiver is overloaded, and is asked with one delivery at a time.
	Throttle bool
	// Unsafe says that the guard refused the address.
	Unsafe bool
}

// Classify tells what the error of [Sender.Send] means:
//
//	nil                                    succeeded
//	410                                    the subscription is disabled
//	413                                    given up, since it will not get smaller
//	429                                    retried; does not count as a failure
//	any other answer and no answer         retried
//	address not public                     retried
//	URL not allowed                        the subscription is disabled
//	cannot be signed                       held
//	the caller's context ended             retried; does not count as a failure
func Classify(ctx context.Context, err error) Outcome {
	status, answered := errors.AsType[*StatusError](err)
	switch {
	case err == nil:
		return Outcome{Class: "success", Action: Succeed}
	case answered:
		return classifyStatus(status)
	case errors.Is(err, ErrUnsigned):
		return Outcome{Class: "config_error", Action: Hold}
	case errors.Is(err, ErrURL):
		return Outcome{Class: "invalid_url", Action: Disable}
	case errors.Is(err, ErrAddress):
		return Outcome{Class: "unsafe_address", Action: Retry, Counts: true, Unsafe: true}
	case ctx.Err() != nil:
		return Outcome{Class: "interrupted", Action: Retry}
	default:
		return Outcome{Class: classifyNetwork(err), Action: Retry, Counts: true}
	}
}

func classifyStatus(status *StatusError) Outcome {
	outcome := Outcome{Class: "client_error", Action: Retry, Counts: true}
	switch {
	case status.Code == http.StatusGone:
		return Outcome{Class: "gone", Action: Disable}
	case status.Code == http.StatusRequestEntityTooLarge:
		return Outcome{Class: "too_large", Action: GiveUp}
	case status.Code == http.StatusTooManyRequests:
		outcome.Class, outcome.Counts, outcome.Throttle = "throttled", false, true
		outcome.Wait = min(status.RetryAfter, maxRetryAfter)
	case status.Code == http.StatusServiceUnavailable:
		outcome.Class, outcome.Wait = "server_error", min(status.RetryAfter, maxRetryAfter)
	case status.Code == http.StatusBadGateway || status.Code == http.StatusGatewayTimeout:
		outcome.Class, outcome.Throttle = "server_error", true
	case status.Code >= 500:
		outcome.Class = "server_error"
	case status.Code/100 == 3:
		outcome.Class = "redirect"
	}
	return outcome
}

func classifyNetwork(err error) string {
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return "dns"
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return "tls"
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return "tls"
	}
	if _, ok := errors.AsType[tls.AlertError](err); ok {
		return "tls"
	}
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		return "tls"
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return "timeout"
	}
	return "connection"
}
