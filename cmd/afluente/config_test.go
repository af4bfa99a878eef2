package main

import (
	"net/netip"
	"net/url"
	"os"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zapcore"

	"afluente/jobs/webhook"
)

func loadConfig(t *testing.T, env map[string]string, args ...string) (Config, error) {
	t.Helper()
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	all := addSettings(flags)
	require.NoError(t, flags.Parse(args))
	return all.load(func(name string) string { return env[name] })
}

func TestConfigDefaults(t *testing.T) {
	t.Parallel()
	config, err := loadConfig(t, nil)
	require.NoError(t, err)
	require.Equal(t, Config{
		MaxConns:    20,
		Listen:      "127.0.0.1:8080",
		Batch:       1000,
		MaxWorkers:  100,
		StopTimeout: 10 * time.Second,
		ArchiveURL:  "file:///var/lib/afluente/archive",
		Retention:   90 * 24 * time.Hour,
		WAHAURL:     "http://127.0.0.1:3000",

		WebhookUserAgent: "Webhooks/1.0",
	}, config)
}

func TestConfigTakesEveryVariable(t *testing.T) {
	t.Parallel()
	config, err := loadConfig(t, map[string]string{
		"DATABASE_URL":          "postgres://db/x",
		"AFLUENTE_MAX_CONNS":    "50",
		"AFLUENTE_LISTEN":       "0.0.0.0:80",
		"AFLUENTE_UI_USER":      "ada",
		"AFLUENTE_UI_PASSWORD":  "secret",
		"AFLUENTE_LOG_LEVEL":    "warn",
		"AFLUENTE_BATCH":        "7",
		"AFLUENTE_MAX_WORKERS":  "8",
		"AFLUENTE_STOP_TIMEOUT": "1m",
		"AFLUENTE_POLL_ONLY":    "true",
		"AFLUENTE_JWT_SECRET":   "0123456789abcdef0123456789abcdef",
		"AFLUENTE_JWKS_URL":     "https://auth.example/jwks.json",
		"AFLUENTE_ARCHIVE_URL":  "s3://bucket",
		"AFLUENTE_RETENTION":    "48h",
		"WAHA_URL":              "https://waha.example",
		"WAHA_API_KEY":          "key",

		"AFLUENTE_WEBHOOK_KEYS":          demoWebhookKey,
		"AFLUENTE_WEBHOOK_ALLOWED_CIDRS": "10.0.0.0/8,fd00::/8",
		"AFLUENTE_WEBHOOK_USER_AGENT":    "Acme/1",
		"AFLUENTE_WEBHOOK_ROLES":         "owner, admin",

		"AFLUENTE_CRONS_FILE":         "/etc/crons.yaml",
		"INTERNAL_CRON_SECRET":        "0123456789abcdef",
		"INTERNAL_SECRET":             "fedcba9876543210",
		"AFLUENTE_UI_USER_HEADER":     "X-Forwarded-User",
		"AFLUENTE_TRUSTED_PROXIES":    "10.0.0.0/8, ::1",
		"AFLUENTE_PUBLIC_URL":         "https://example.com/bus/",
		"AFLUENTE_ALERT_WEBHOOK_URL":  "https://hooks.example/x",
		"AFLUENTE_ALERT_EMAIL":        "ops@example.com, Ada <ada@example.com>",
		"AFLUENTE_ALERT_FROM":         "bus@example.com",
		"AFLUENTE_SMTP_URL":           "smtp://u:p@mail.example:2525",
		"AFLUENTE_ALERT_ROUTES":       "lgpd-redact-worker=mailto:dpo@example.com,x-worker=https://hooks.example/y",
		"SENTRY_DSN":                  "https://key@sentry.example/1",
		"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/",
	})
	require.NoError(t, err)
	keys, err := webhook.ParseKeys(demoWebhookKey)
	require.NoError(t, err)
	require.Equal(t, Config{
		DatabaseURL: "postgres://db/x",
		MaxConns:    50,
		Listen:      "0.0.0.0:80",
		UIUser:      "ada",
		UIPassword:  "secret",
		LogLevel:    zapcore.WarnLevel,
		Batch:       7,
		MaxWorkers:  8,
		StopTimeout: time.Minute,
		PollOnly:    true,
		JWTSecret:   "0123456789abcdef0123456789abcdef",
		JWKSURL:     "https://auth.example/jwks.json",
		ArchiveURL:  "s3://bucket",
		Retention:   48 * time.Hour,
		WAHAURL:     "https://waha.example",
		WAHAAPIKey:  "key",

		WebhookKeys:      keys,
		WebhookAllowed:   []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")},
		WebhookUserAgent: "Acme/1",
		WebhookRoles:     []string{"owner", "admin"},

		CronsFile:       "/etc/crons.yaml",
		CronSecrets:     []string{"0123456789abcdef", "fedcba9876543210"},
		UIUserHeader:    "X-Forwarded-User",
		TrustedProxies:  []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("::1/128")},
		PublicURL:       &url.URL{Scheme: "https", Host: "example.com", Path: "/bus/"},
		AlertWebhookURL: "https://hooks.example/x",
		AlertEmail:      []string{"ops@example.com", "ada@example.com"},
		AlertFrom:       "bus@example.com",
		SMTPURL:         "smtp://u:p@mail.example:2525",
		AlertRoutes: map[string]*url.URL{
			"lgpd-redact-worker": {Scheme: "mailto", Opaque: "dpo@example.com"},
			"x-worker":           {Scheme: "https", Host: "hooks.example", Path: "/y"},
		},
		SentryDSN:    "https://key@sentry.example/1",
		OTLPEndpoint: "http://collector:4318",
	}, config)
	require.Equal(t, "https://example.com/bus/riverui", config.consoleURL())
}

func TestConfigFlagWins(t *testing.T) {
	t.Parallel()
	config, err := loadConfig(t, map[string]string{"AFLUENTE_BATCH": "7"}, "--batch", "8", "--poll-only")
	require.NoError(t, err)
	require.Equal(t, 8, config.Batch)
	require.True(t, config.PollOnly)
}

func TestConfigReportsEveryMistakeAtOnceAndNoSecret(t *testing.T) {
	t.Parallel()
	env := map[string]string{
		"DATABASE_URL":          "postgres://u:hush@%zz",
		"AFLUENTE_MAX_CONNS":    "0",
		"AFLUENTE_LISTEN":       "nowhere",
		"AFLUENTE_UI_USER":      "ada",
		"AFLUENTE_LOG_LEVEL":    "loud",
		"AFLUENTE_BATCH":        "-1",
		"AFLUENTE_MAX_WORKERS":  "many",
		"AFLUENTE_STOP_TIMEOUT": "30",
		"AFLUENTE_ARCHIVE_URL":  "s3://key:hush@bucket",
		"AFLUENTE_RETENTION":    "1h",
		"AFLUENTE_POLL_ONLY":    "perhaps",
		"WAHA_URL":              "waha",

		"AFLUENTE_WEBHOOK_KEYS":          "k:hush",
		"AFLUENTE_WEBHOOK_ALLOWED_CIDRS": "everywhere",
		"AFLUENTE_WEBHOOK_USER_AGENT":    "a\r\nb",

		"INTERNAL_CRON_SECRET":        "hush",
		"INTERNAL_SECRET":             "hush",
		"AFLUENTE_UI_PASSWORD":        "$2a$hush",
		"AFLUENTE_UI_USER_HEADER":     "X-User",
		"AFLUENTE_PUBLIC_URL":         "http://x/riverui",
		"AFLUENTE_ALERT_WEBHOOK_URL":  "hush",
		"AFLUENTE_ALERT_EMAIL":        "nobody",
		"AFLUENTE_ALERT_FROM":         "nobody",
		"AFLUENTE_SMTP_URL":           "http://hush",
		"AFLUENTE_ALERT_ROUTES":       "x-worker=hush",
		"SENTRY_DSN":                  "hush",
		"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318",
	}
	_, err := loadConfig(t, env)
	require.Error(t, err)
	for name := range env {
		require.ErrorContains(t, err, name)
	}
	require.NotContains(t, err.Error(), "hush")
}

func TestAlertsByMailNeedAServer(t *testing.T) {
	t.Parallel()
	for _, env := range []map[string]string{
		{"AFLUENTE_ALERT_EMAIL": "ops@example.com", "AFLUENTE_ALERT_FROM": "bus@example.com"},
		{"AFLUENTE_ALERT_ROUTES": "x-worker=mailto:dpo@example.com", "AFLUENTE_SMTP_URL": "smtp://mail.example"},
	} {
		_, err := loadConfig(t, env)
		require.ErrorContains(t, err, "alerts by mail need AFLUENTE_SMTP_URL and AFLUENTE_ALERT_FROM")
	}
}

func TestListeningBeyondLoopbackNeedsCredentials(t *testing.T) {
	t.Parallel()
	for address, open := range map[string]bool{
		"127.0.0.1:8080": false, "localhost:8080": false, "[::1]:8080": false,
		"0.0.0.0:8080": true, ":8080": true, "192.0.2.1:8080": true, "db.example:8080": true,
	} {
		_, err := loadConfig(t, map[string]string{"AFLUENTE_LISTEN": address})
		if open {
			require.ErrorContains(t, err, "AFLUENTE_UI_USER", address)
		} else {
			require.NoError(t, err, address)
		}
		_, err = loadConfig(t, map[string]string{
			"AFLUENTE_LISTEN": address, "AFLUENTE_UI_USER_HEADER": "X-User", "AFLUENTE_TRUSTED_PROXIES": "10.0.0.1",
		})
		require.NoError(t, err, address)
	}
}

func TestReadmeAndEnvExampleNameEverySetting(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	example, err := os.ReadFile("../../.env.example")
	require.NoError(t, err)
	for _, s := range configSettings() {
		require.Contains(t, string(example), s.env+"=")
		row := "| `" + s.env + "` | " + s.usage + " |"
		if s.fallback != "" {
			row += " `" + s.fallback + "` |"
		}
		require.Contains(t, string(readme), row)
	}
}
