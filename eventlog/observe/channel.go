package observe

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/getsentry/sentry-go"
	"github.com/wneessen/go-mail"
	"go.uber.org/zap"
)

// Notice is what people are told.
type Notice struct {
	// Rule is one of the rules of [Monitor], or "database".
	Rule string `json:"rule"`
	// Subject is the consumer, event type or queue.
	Subject string `json:"subject"`
	// Count is how many dead letters there are to tell of; 0 for a threshold.
	Count int64 `json:"count,omitempty"`
	// Value is what was measured, and Threshold what it passed.
	Value     float64 `json:"value,omitempty"`
	Threshold float64 `json:"threshold,omitempty"`
	// Since is when it passed the threshold.
	Since time.Time `json:"since,omitzero"`
	// Text says all of it in a line, and URL is where to look.
	Text string `json:"text"`
	URL  string `json:"url"`
}

// Channel is a way to tell people.
type Channel struct {
	// Name is the same in every process and tells no secret: the database keeps
	// what each channel has still to tell by it.
	Name string
	// Send tells one notice. An error means that it is to be told again, so that
	// after a crash in between people may be told twice.
	Send func(context.Context, Notice) error
}

// LogChannel tells a log, which never fails.
func LogChannel(log *zap.Logger) Channel {
	return Channel{Name: "log", Send: func(_ context.Context, n Notice) error {
		log.Warn("alert", zap.String("rule", n.Rule), zap.String("subject", n.Subject),
			zap.Int64("count", n.Count), zap.Float64("value", n.Value), zap.String("text", n.Text))
		return nil
	}}
}

// WebhookChannel posts JSON with a "text", as the incoming webhooks of Slack and
// its likes take it, and the notice's other fields beside it. Any 2xx status is
// success.
func WebhookChannel(name, hookURL string, client *http.Client) Channel {
	return Channel{Name: name, Send: func(ctx context.Context, n Notice) error {
		n.Text += " " + n.URL
		body, err := json.Marshal(n)
		if err != nil {
			return fmt.Errorf("encode alert: %w", err)
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, hookURL, bytes.NewReader(body))
		if err != nil {
			return errors.New("post alert: the URL is not one")
		}
		request.Header.Set("Content-Type", "application/json")
		response, err := client.Do(request)
		if urlErr, ok := errors.AsType[*url.Error](err); ok {
			err = urlErr.Err // the URL is a secret
		}
		if err != nil {
			return fmt.Errorf("post alert: %w", err)
		}
		defer response.Body.Close()
		_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, 64<<10)) // so that the connection is used again
		if response.StatusCode/100 != 2 {
			return fmt.Errorf("post alert: status %d", response.StatusCode)
		}
		return nil
	}}
}

// SMTP is a server that takes mail.
type SMTP struct {
	// URL is smtp://user:password@host:port, which uses STARTTLS where the server
	// has it, or smtps:// for TLS from the start. Without credentials none are
	// sent; they never go over an open line, but to this machine.
	URL  string
	From string
}

// CheckSMTP returns an error for a URL that [SMTP] cannot be.
func CheckSMTP(text string) error {
	_, err := (&SMTP{URL: text}).client()
	return err
}

func (s *SMTP) client() (*mail.Client, error) {
	server, err := url.Parse(s.URL)
	if err != nil || server.Hostname() == "" || (server.Scheme != "smtp" && server.Scheme != "smtps") {
		return nil, errors.New("is not smtp://user:password@host:port or smtps://")
	}
	options := []mail.Option{mail.WithTLSPolicy(mail.TLSOpportunistic), mail.WithTimeout(sendTimeout)}
	if server.Scheme == "smtps" {
		options = append(options, mail.WithSSLPort(false))
	}
	if server.Port() != "" {
		port, err := strconv.Atoi(server.Port())
		if err != nil {
			return nil, errors.New("has a port that is not a number")
		}
		options = append(options, mail.WithPort(port))
	}
	if server.User != nil {
		password, _ := server.User.Password()
		options = append(options, mail.WithSMTPAuth(mail.SMTPAuthAutoDiscover),
			mail.WithUsername(server.User.Username()), mail.WithPassword(password))
	} else if ip := net.ParseIP(server.Hostname()); server.Hostname() == "localhost" || ip.IsLoopback() {
		options = append(options, mail.WithTLSPolicy(mail.NoTLS)) // nobody checks the certificate of a local relay
	}
	client, err := mail.NewClient(server.Hostname(), options...)
	if err != nil {
		return nil, fmt.Errorf("make mail client: %w", err)
	}
	return client, nil
}

// MailChannel sends mail to addresses.
func MailChannel(name string, server SMTP, to ...string) Channel {
	return Channel{Name: name, Send: func(ctx context.Context, n Notice) error {
		client, err := server.client()
		if err != nil {
			return fmt.Errorf("mail alert: the server %w", err)
		}
		message := mail.NewMsg()
		if err := errors.Join(message.From(server.From), message.To(to...)); err != nil {
			return fmt.Errorf("mail alert: %w", err)
		}
		message.Subject(strings.TrimSpace("[afluente] " + n.Rule + " " + n.Subject))
		message.SetBodyString(mail.TypeTextPlain, n.Text+"\n\n"+n.URL+"\n")
		if err := client.DialAndSendWithContext(ctx, message); err != nil {
			return fmt.Errorf("mail alert: %w", err)
		}
		return nil
	}}
}

// SentryChannel makes an issue of each rule and subject.
func SentryChannel(hub *sentry.Hub) Channel {
	return Channel{Name: "sentry", Send: func(_ context.Context, n Notice) error {
		event := sentry.NewEvent()
		event.Level = sentry.LevelError
		event.Message = n.Text
		event.Fingerprint = []string{scope, n.Rule, n.Subject}
		event.Tags = map[string]string{"rule": n.Rule, "subject": n.Subject}
		event.Contexts = map[string]sentry.Context{"alert": {"count": n.Count, "value": n.Value, "url": n.URL}}
		hub.Clone().CaptureEvent(event)
		if !hub.Flush(sendTimeout / 2) {
			return errors.New("send alert to sentry: no answer")
		}
		return nil
	}}
}
