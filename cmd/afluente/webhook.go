package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"afluente/eventlog"
	"afluente/jobs"
	"afluente/jobs/webhook"
)

// defaultGrace is how long an old secret goes on signing after a rotation.
const defaultGrace = 24 * time.Hour

// newWebhooks returns what organizations do with their webhooks.
func newWebhooks(config Config, pool *pgxpool.Pool, log *zap.Logger) (*jobs.Webhooks, error) {
	inserter, err := eventlog.NewInserter(pool, log)
	if err != nil {
		return nil, err
	}
	return &jobs.Webhooks{Pool: pool, Jobs: inserter, Sender: newSender(config), Keys: config.WebhookKeys}, nil
}

func newSender(config Config) *webhook.Sender {
	guard := &webhook.Guard{Allowed: config.WebhookAllowed}
	return &webhook.Sender{
		Guard: guard, Transport: jobs.Correlate(webhook.NewTransport(guard)), UserAgent: config.WebhookUserAgent,
	}
}

func newWebhook(load func() (Config, error)) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "webhook",
		Short: "Make and operate the webhooks of organizations",
		Long: `Make and operate the webhooks of organizations: URLs that get events, signed.

The same is done over HTTP with a token of the organization, below
/api/v1/webhooks; GET /api/v1/openapi.json describes it.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	w := &webhookCommand{load: load}
	cmd.AddCommand(
		w.newCreate(),
		w.newList(),
		w.newUpdate(),
		w.newEnable(),
		w.newDisable(),
		w.newDelete(),
		w.newTest(),
		w.newRotate(),
		w.newPromote(),
		w.newDeliveries(),
		w.newDelivery(),
		w.newResend(),
		w.newRecover(),
		w.newReplayMissing(),
	)
	return cmd
}

// webhookCommand is what the commands of 'afluente webhook' have in common.
type webhookCommand struct{ load func() (Config, error) }

// with calls f with the webhooks of all organizations.
func (c *webhookCommand) with(cmd *cobra.Command, f func(context.Context, *jobs.Webhooks, jobs.Scope) error) error {
	config, err := c.load()
	if err != nil {
		return err
	}
	pool, err := openPool(cmd.Context(), config)
	if err != nil {
		return err
	}
	defer pool.Close()
	webhooks, err := newWebhooks(config, pool, zap.NewNop())
	if err != nil {
		return err
	}
	return f(cmd.Context(), webhooks, jobs.Scope{Actor: shellActor()})
}

// onID returns a command for one webhook or delivery.
func (c *webhookCommand) onID(
	use, short, long string, f func(context.Context, *cobra.Command, *jobs.Webhooks, jobs.Scope, uuid.UUID) error,
) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := uuid.Parse(args[0])
			if err != nil {
				return &usageError{fmt.Errorf("%q is not a UUID", args[0])}
			}
			return c.with(cmd, func(ctx context.Context, webhooks *jobs.Webhooks, scope jobs.Scope) error {
				return f(ctx, cmd, webhooks, scope, id)
			})
		},
	}
}

// webhookFlags are the flags of settings.
type webhookFlags struct {
	url, description             string
	events, headers              []string
	maxConcurrent, ratePerSecond int
}

func (f *webhookFlags) add(flags *pflag.FlagSet) {
	flags.StringSliceVar(&f.events, "event", nil, "event type, such as lead.created, lead.* or *; may be repeated")
	flags.StringVar(&f.description, "description", "", "what its owner calls it")
	flags.StringArrayVar(&f.headers, "header", nil, "header to send along, such as 'X-Api-Key: …'; may be repeated")
	flags.IntVar(&f.maxConcurrent, "max-concurrent", 4, "deliveries under way at a time, 1 to 100")
	flags.IntVar(&f.ratePerSecond, "rate-per-second", 10, "deliveries a second, 1 to 1000")
}

// settings returns those whose flag was given.
func (f *webhookFlags) settings(flags *pflag.FlagSet) (jobs.WebhookSettings, error) {
	var settings jobs.WebhookSettings
	if flags.Changed("event") {
		settings.EventTypes = f.events
	}
	if flags.Changed("description") {
		settings.Description = &f.description
	}
	if flags.Changed("max-concurrent") {
		settings.MaxConcurrent = &f.maxConcurrent
	}
	if flags.Changed("rate-per-second") {
		settings.RatePerSecond = &f.ratePerSecond
	}
	if flags.Changed("header") {
		settings.Headers = make(map[string]string)
		for _, header := range f.headers {
			name, value, ok := strings.Cut(header, ":")
			if header != "" && !ok {
				return settings, errors.New("--header is not 'Name: value'")
			}
			if ok {
				settings.Headers[strings.TrimSpace(name)] = strings.TrimSpace(value)
			}
		}
	}
	return settings, nil
}

// asUsage makes what the settings lack a usage error.
func asUsage(err error) error {
	if errors.Is(err, jobs.ErrInvalid) {
		return &usageError{err}
	}
	return err
}

func (c *webhookCommand) newCreate() *cobra.Command {
	var flags webhookFlags
	var organization, secret string
	var disabled, asJSON bool
	cmd := &cobra.Command{
		Use:   "create URL",
		Short: "Make a webhook and print its secret, this once",
		Example: `  afluente webhook create https://example.com/hook --org 00000000-0000-4000-8000-000000000001 --event 'lead.*'
  afluente webhook create https://example.com/hook --org … --event '*' --secret @secret.txt`,
		Args: usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			var mistakes []error
			organizationID := parseUUID("--org", organization, &mistakes)
			settings, err := flags.settings(cmd.Flags())
			mistakes = append(mistakes, err)
			if settings.EventTypes == nil {
				mistakes = append(mistakes, errors.New("--event is required"))
			}
			secret, err := readText("--secret", secret, cmd.InOrStdin())
			if err := errors.Join(append(mistakes, err)...); err != nil {
				return &usageError{err}
			}
			settings.URL = &args[0]
			return c.with(cmd, func(ctx context.Context, webhooks *jobs.Webhooks, scope jobs.Scope) error {
				created, secret, err := webhooks.Create(ctx, scope, organizationID, jobs.NewWebhook{
					WebhookSettings: settings, Secret: secret, Disabled: disabled,
				})
				if err != nil {
					return asUsage(err)
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), createdWebhook{created, secret})
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "webhook  %s\nsecret   %s\n", created.ID, secret)
				return err
			})
		},
	}
	flags.add(cmd.Flags())
	cmd.Flags().StringVar(&organization, "org", "", "organization, a UUID (required)")
	cmd.Flags().StringVar(&secret, "secret", "", "secret that the customer brings, @file or @- to read it; a new one by default")
	cmd.Flags().BoolVar(&disabled, "disabled", false, "hold its events until it is enabled")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// createdWebhook is a new webhook, with the secret that is shown once.
type createdWebhook struct {
	jobs.Webhook

	Secret string `json:"secret"`
}

// readText returns the value of a flag, or the first line of the file that it names.
func readText(name, value string, stdin io.Reader) (string, error) {
	content, err := readValue(value, stdin)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	line, _, _ := strings.Cut(string(content), "\n")
	return strings.TrimSuffix(line, "\r"), nil
}

func (c *webhookCommand) newList() *cobra.Command {
	var organization string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List webhooks",
		Args:  usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var mistakes []error
			var of *uuid.UUID
			if organization != "" {
				of = new(parseUUID("--org", organization, &mistakes))
			}
			if len(mistakes) > 0 {
				return &usageError{errors.Join(mistakes...)}
			}
			return c.with(cmd, func(ctx context.Context, webhooks *jobs.Webhooks, scope jobs.Scope) error {
				scope.Organization = of
				list, err := webhooks.List(ctx, scope)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), list)
				}
				rows := make([][]string, len(list))
				for i, w := range list {
					rows[i] = []string{
						w.ID.String(), w.OrganizationID.String(), webhookState(w), strconv.Itoa(w.ConsecutiveFailures),
						strings.Join(w.EventTypes, ","), w.URL,
					}
				}
				return printTable(cmd.OutOrStdout(), []string{"WEBHOOK", "ORGANIZATION", "STATE", "FAILURES", "EVENTS", "URL"}, rows)
			})
		},
	}
	cmd.Flags().StringVar(&organization, "org", "", "of this organization only, a UUID")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func webhookState(w jobs.Webhook) string {
	switch {
	case !w.Enabled && w.DisabledReason != nil:
		return "disabled: " + oneLine(w.DisabledReason, 40)
	case !w.Enabled:
		return "disabled"
	case w.Fault != nil:
		return "fault: " + oneLine(w.Fault, 40)
	case w.OpenUntil != nil && w.OpenUntil.After(time.Now()):
		return "waits until " + w.OpenUntil.UTC().Format(time.RFC3339)
	default:
		return "enabled"
	}
}

func (c *webhookCommand) newUpdate() *cobra.Command {
	var flags webhookFlags
	cmd := c.onID("update WEBHOOK", "Change the settings of a webhook",
		`Change the settings of a webhook, those that are given. The next attempt at any
delivery uses them. --header takes the place of all headers; --header '' takes all away.`,
		func(ctx context.Context, cmd *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			settings, err := flags.settings(cmd.Flags())
			if err != nil {
				return &usageError{err}
			}
			if cmd.Flags().Changed("url") {
				settings.URL = &flags.url
			}
			_, err = webhooks.Update(ctx, scope, id, settings)
			return asUsage(err)
		})
	flags.add(cmd.Flags())
	cmd.Flags().StringVar(&flags.url, "url", "", "where events go")
	return cmd
}

func (c *webhookCommand) newEnable() *cobra.Command {
	return c.onID("enable WEBHOOK", "Let a webhook get events again",
		`Let a webhook get events again, the first ones one at a time. What was held
meanwhile is sent by 'afluente webhook recover'.`,
		func(ctx context.Context, _ *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			_, err := webhooks.Enable(ctx, scope, id)
			return err
		})
}

func (c *webhookCommand) newDisable() *cobra.Command {
	return c.onID("disable WEBHOOK", "Hold the events of a webhook until it is enabled", "",
		func(ctx context.Context, _ *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			_, err := webhooks.Disable(ctx, scope, id)
			return err
		})
}

func (c *webhookCommand) newDelete() *cobra.Command {
	return c.onID("delete WEBHOOK", "Delete a webhook and cancel its deliveries", "",
		func(ctx context.Context, _ *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			return webhooks.Delete(ctx, scope, id)
		})
}

func (c *webhookCommand) newTest() *cobra.Command {
	return c.onID("test WEBHOOK", "Send a signed webhook.test and tell what came of it",
		"Send a signed webhook.test and tell what came of it. It counts for nothing and\nis sent once. The exit code is 1 if the receiver did not take it.",
		func(ctx context.Context, cmd *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			result, err := webhooks.Test(ctx, scope, id)
			if err != nil {
				return err
			}
			if !result.OK {
				return errors.New(result.Error)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "answer %d %s after %d ms\n", result.StatusCode, http.StatusText(result.StatusCode), result.DurationMS)
			return err
		})
}

func (c *webhookCommand) newRotate() *cobra.Command {
	var grace time.Duration
	var secret string
	cmd := c.onID("rotate WEBHOOK", "Give a webhook a new secret and print it, this once",
		`Give a webhook a new secret and print it, this once.

Until --grace is over, webhook-signature has a signature of each secret, and the
headers that hold one stay with the old secret; 'afluente webhook promote' moves
them earlier. --grace 0 ends the old secrets at once, for one that has leaked.`,
		func(ctx context.Context, cmd *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			given, err := readText("--secret", secret, cmd.InOrStdin())
			if err != nil {
				return &usageError{err}
			}
			rotated, err := webhooks.Rotate(ctx, scope, id, grace, given)
			if err != nil {
				return asUsage(err)
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), rotated)
			return err
		})
	cmd.Flags().DurationVar(&grace, "grace", defaultGrace, "how long the old secret goes on signing, up to "+jobs.MaxGrace.String())
	cmd.Flags().StringVar(&secret, "secret", "", "secret that the customer brings, @file or @- to read it; a new one by default")
	return cmd
}

func (c *webhookCommand) newPromote() *cobra.Command {
	return c.onID("promote WEBHOOK", "Let the newest secret sign all headers", "",
		func(ctx context.Context, _ *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			_, err := webhooks.Promote(ctx, scope, id)
			return asUsage(err)
		})
}

func (c *webhookCommand) newDeliveries() *cobra.Command {
	var filter jobs.DeliveryFilter
	var asJSON bool
	cmd := c.onID("deliveries WEBHOOK", "List deliveries to a webhook, newest first", "",
		func(ctx context.Context, cmd *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			deliveries, err := webhooks.Deliveries(ctx, scope, id, filter)
			if err != nil {
				return asUsage(err)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), deliveries)
			}
			rows := make([][]string, len(deliveries))
			for i, d := range deliveries {
				next := "-"
				if d.NextAttemptAt != nil {
					next = d.NextAttemptAt.Format(time.RFC3339)
				}
				rows[i] = []string{
					d.CreatedAt.Format(time.RFC3339), d.ID.String(), d.State, strconv.Itoa(d.Attempts), next, d.EventType, d.EventID.String(),
					oneLine(d.LastError, 60),
				}
			}
			return printTable(cmd.OutOrStdout(), []string{"CREATED", "DELIVERY", "STATE", "ATTEMPTS", "NEXT", "TYPE", "EVENT", "LAST ERROR"}, rows)
		})
	cmd.Flags().StringVar(&filter.State, "state", "", strings.Join(jobs.DeliveryStates(), ", "))
	cmd.Flags().IntVar(&filter.Limit, "limit", 50, fmt.Sprintf("the most to list, 1 to %d", jobs.MaxDeliveries))
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// deliveryWithAttempts is a delivery and all its attempts.
type deliveryWithAttempts struct {
	jobs.Delivery

	AttemptLog []jobs.DeliveryAttempt `json:"attempt_log"`
}

func (c *webhookCommand) newDelivery() *cobra.Command {
	var asJSON bool
	cmd := c.onID("delivery DELIVERY", "Show a delivery with its attempts", "",
		func(ctx context.Context, cmd *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			webhookID, err := webhooks.WebhookOf(ctx, id)
			if err != nil {
				return err
			}
			delivery, attempts, err := webhooks.Delivery(ctx, scope, webhookID, id)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), deliveryWithAttempts{delivery, attempts})
			}
			fmt.Fprintf(cmd.OutOrStdout(), "delivery  %s\nwebhook   %s\nevent     %s %s\nstate     %s\n\n",
				delivery.ID, webhookID, delivery.EventType, delivery.EventID, delivery.State)
			rows := make([][]string, len(attempts))
			for i, a := range attempts {
				status, duration := "-", "-"
				if a.StatusCode != nil {
					status = strconv.Itoa(int(*a.StatusCode))
				}
				if a.DurationMS != nil {
					duration = fmt.Sprintf("%d ms", *a.DurationMS)
				}
				rows[i] = []string{
					strconv.Itoa(a.Number), a.StartedAt.Format(time.RFC3339), a.Trigger, a.Class, status, duration, oneLine(a.Remote, 50), oneLine(a.Error, 60),
				}
			}
			return printTable(cmd.OutOrStdout(), []string{"ATTEMPT", "STARTED", "TRIGGER", "OUTCOME", "STATUS", "DURATION", "ADDRESS", "ERROR"}, rows)
		})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (c *webhookCommand) newResend() *cobra.Command {
	return c.onID("resend DELIVERY", "Send a delivery once more",
		"Send a delivery that is over once more, with all attempts anew should it fail.",
		func(ctx context.Context, _ *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			webhookID, err := webhooks.WebhookOf(ctx, id)
			if err != nil {
				return err
			}
			_, err = webhooks.Resend(ctx, scope, webhookID, id, "")
			return err
		})
}

func (c *webhookCommand) newRecover() *cobra.Command {
	return c.newSince("recover WEBHOOK", "Send what was given up or held",
		"Send what was given up or held of the deliveries made since a time, the oldest events\nfirst, with all attempts anew.", "recovered",
		func(ctx context.Context, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID, since time.Time) (int, error) {
			return webhooks.Recover(ctx, scope, id, since)
		})
}

func (c *webhookCommand) newReplayMissing() *cobra.Command {
	return c.newSince("replay-missing WEBHOOK", "Send events that a webhook never had a delivery of",
		"Send the events since a time that a webhook wants and never had a delivery of, such as\nthose from before it was made.", "replayed",
		func(ctx context.Context, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID, since time.Time) (int, error) {
			return webhooks.ReplayMissing(ctx, scope, id, since)
		})
}

// newSince returns a command that sends much once more.
func (c *webhookCommand) newSince(
	use, short, long, done string, send func(context.Context, *jobs.Webhooks, jobs.Scope, uuid.UUID, time.Time) (int, error),
) *cobra.Command {
	var since string
	cmd := c.onID(use, short, long,
		func(ctx context.Context, cmd *cobra.Command, webhooks *jobs.Webhooks, scope jobs.Scope, id uuid.UUID) error {
			var mistakes []error
			from := parseTime("--since", since, time.Now(), &mistakes)
			if since == "" {
				mistakes = append(mistakes, errors.New("--since is required"))
			}
			if len(mistakes) > 0 {
				return &usageError{errors.Join(mistakes...)}
			}
			sent, err := send(ctx, webhooks, scope, id, from)
			if err != nil {
				return asUsage(err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d %s\n", sent, done)
			return err
		})
	cmd.Flags().StringVar(&since, "since", "", "RFC 3339, a day, or how long ago, such as 2h (required)")
	return cmd
}
