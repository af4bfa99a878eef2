package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"afluente/db"
	"afluente/db/embedded"
	"afluente/db/migrate"
	"afluente/jobs/sandbox"
	"afluente/jobs/webhook"
	"afluente/sql"
)

// demoOrganization and demoSubscription are rows of the demo tenant; the first
// is made by sql.Demo.
const (
	demoOrganization = "00000000-0000-4000-8000-000000000001"
	demoSubscription = "00000000-0000-4000-8000-000000000004"
	demoSecret       = "demo-secret-of-afluente-dev"
	demoAPIKey       = "demo-key-of-afluente-dev"
	demoJWTSecret    = "demo-secret-of-the-tokens-of-afluente-dev"
	demoWebhookKey   = "demo:ZGVtby1rZXktb2YtdGhlLXNlY3JldHMtb2YtZGV2ISE="
)

func newDev(load func() (Config, error)) *cobra.Command {
	var data string
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Show the whole product on this machine",
		Long: `Show the whole product on this machine: a database, its schema, a demo tenant,
stand-ins for WAHA and a webhook receiver, the bridge, the workers and River UI.

The database is the one in DATABASE_URL, else a private server from the
PostgreSQL programs on this machine, else one that is fetched. It keeps its data
in --data. Ctrl-C stops everything.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := load()
			if err != nil {
				return err
			}
			log := newLogger(config.LogLevel, zapcore.NewConsoleEncoder, zapcore.AddSync(cmd.ErrOrStderr()))
			return runDev(cmd.Context(), cmd.OutOrStdout(), devConfig{Config: config, data: data, log: log})
		},
	}
	cmd.Flags().StringVar(&data, "data", defaultData(), "folder of the private server")
	return cmd
}

// defaultData is where the private server lives. Under root the server runs as
// another user, who cannot enter root's home.
func defaultData() string {
	if cache, err := os.UserCacheDir(); err == nil && os.Geteuid() != 0 {
		return filepath.Join(cache, "afluente", "dev")
	}
	return "/var/lib/afluente-dev"
}

type devConfig struct {
	Config
	data string // folder of the private server
	log  *zap.Logger
}

// runDev sets everything up, prints where it is to stdout, and serves.
func runDev(ctx context.Context, stdout io.Writer, config devConfig) (err error) {
	log := config.log
	if config.DatabaseURL == "" {
		server, err := embedded.Start(ctx, embedded.Config{Dir: config.data, Logger: log.Named("postgres")})
		if err != nil {
			return fmt.Errorf("start private database: %w", err)
		}
		defer func() { err = errors.Join(err, server.Stop()) }()
		config.DatabaseURL = server.URL()
	}
	pool, err := openPool(ctx, config.Config)
	if err != nil {
		return err
	}
	defer pool.Close()
	applied, err := migrate.Up(ctx, pool)
	if err != nil {
		return err
	}
	log.Info("schema ready", zap.Int("applied", applied))

	waha, err := sandbox.StartWAHA(ctx, sandbox.Config{
		Addr: "127.0.0.1:0", Secret: demoAPIKey, Log: log.Named("waha"),
	})
	if err != nil {
		return fmt.Errorf("start stand-in for WAHA: %w", err)
	}
	defer waha.Close()
	receiver, err := sandbox.StartReceiver(ctx, sandbox.Config{
		Addr: "127.0.0.1:0", Secret: demoSecret, Log: log.Named("receiver"),
	})
	if err != nil {
		return fmt.Errorf("start stand-in for a webhook receiver: %w", err)
	}
	defer receiver.Close()
	config.WAHAURL, config.WAHAAPIKey = waha.URL(), demoAPIKey
	if config.JWTSecret == "" {
		config.JWTSecret = demoJWTSecret
	}
	if config.WebhookKeys == nil {
		if config.WebhookKeys, err = webhook.ParseKeys(demoWebhookKey); err != nil {
			return fmt.Errorf("read demo key: %w", err)
		}
	}
	config.WebhookAllowed = append(config.WebhookAllowed, netip.MustParsePrefix("127.0.0.0/8"))
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{
		"organization_id": demoOrganization, "exp": time.Now().AddDate(1, 0, 0).Unix(),
	}).SignedString([]byte(config.JWTSecret))
	if err != nil {
		return fmt.Errorf("sign demo token: %w", err)
	}
	data, err := filepath.Abs(config.data)
	if err != nil {
		return fmt.Errorf("find data folder: %w", err)
	}
	config.ArchiveURL = (&url.URL{Scheme: "file", Path: filepath.Join(data, "archive")}).String()

	if err := setUpDemo(ctx, pool, receiver.URL()); err != nil {
		return err
	}
	listener, err := listen(ctx, config.Config)
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, `
River UI          http://%[1]s%[2]s/
WAHA stand-in     %[3]s    (see /calls; POST and DELETE /faults)
webhook receiver  %[4]s    (the same)

Queue a first message, and watch it go out below:

  psql '%[5]s' -c "INSERT INTO demo_messages (body) VALUES ('hello')"

Without psql, emit an event that goes to the webhook alone:

  go run ./cmd/afluente emit lead.lost --payload '{"reason": "price", "lost_at": "2026-12-01T12:00:00Z"}' \
    --org %[6]s --database-url '%[5]s'

Watch the events of the demo tenant, as a browser would:

  curl -N 'http://%[1]s/api/events/stream?access_token=%[7]s'

See its webhook:

  curl -H 'Authorization: Bearer %[7]s' http://%[1]s/api/v1/webhooks

`, listener.Addr(), uiPath, waha.URL(), receiver.URL(), config.DatabaseURL, demoOrganization, token)
	return (&program{config: config.Config, roles: roles{bridge: true, crons: true}, pool: pool, listener: listener, log: log}).run(ctx)
}

// setUpDemo makes the demo tenant, whose webhook goes to receiverURL.
func setUpDemo(ctx context.Context, pool *pgxpool.Pool, receiverURL string) error {
	if _, err := pool.Exec(ctx, sql.Demo()); err != nil { //nolint:forbidigo // several statements, which sqlc does not do
		return fmt.Errorf("set up demo tenant: %w", err)
	}
	err := db.New(pool).PutWebhookSubscription(ctx, db.PutWebhookSubscriptionParams{
		ID:             uuid.MustParse(demoSubscription),
		OrganizationID: uuid.MustParse(demoOrganization),
		Url:            receiverURL,
		Secret:         new(demoSecret),
	})
	if err != nil {
		return fmt.Errorf("set up demo webhook: %w", err)
	}
	return nil
}
