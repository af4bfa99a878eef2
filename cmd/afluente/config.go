package main

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/mail"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/crypto/bcrypt"
	"golang.org/x/net/http/httpguts"

	"afluente/eventlog/observe"
	"afluente/jobs/archive"
	"afluente/jobs/webhook"
)

// Config is every setting of the program. Its names, defaults and bounds are
// in the table of configSettings and nowhere else.
type Config struct {
	DatabaseURL string
	MaxConns    int
	Listen      string
	UIUser      string
	UIPassword  string
	// UIUserHeader and TrustedProxies are set both or neither.
	UIUserHeader   string
	TrustedProxies []netip.Prefix
	PublicURL      *url.URL // nil for none
	LogLevel       zapcore.Level
	Batch          int
	MaxWorkers     int
	StopTimeout    time.Duration
	PollOnly       bool
	JWTSecret      string
	JWKSURL        string
	ArchiveURL     string
	Retention      time.Duration
	WAHAURL        string
	WAHAAPIKey     string

	WebhookKeys      *webhook.Keyring // nil for none
	WebhookAllowed   []netip.Prefix
	WebhookUserAgent string
	WebhookRoles     []string // nil for all

	CronsFile   string
	CronSecrets []string // INTERNAL_CRON_SECRET and INTERNAL_SECRET, those that are set

	AlertWebhookURL string
	AlertEmail      []string
	AlertFrom       string
	SMTPURL         string
	AlertRoutes     map[string]*url.URL // consumer to mailto:, http: or https:
	SentryDSN       string
	OTLPEndpoint    string
}

// setting is one line of the configuration: an environment variable and a
// flag, which wins.
type setting struct {
	env      string
	fallback string
	usage    string
	secret   bool
	parse    func(*Config, string) error

	flag *pflag.Flag
}

// flagName is the variable's name in the manner of flags: AFLUENTE_LOG_LEVEL
// is --log-level.
func (s *setting) flagName() string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(s.env, "AFLUENTE_"), "_", "-"))
}

func configSettings() []*setting {
	return []*setting{
		{
			env: "DATABASE_URL", secret: true,
			usage: "PostgreSQL 15 or newer; the other PG* variables fill in what it lacks",
			parse: func(c *Config, v string) error {
				c.DatabaseURL = v
				_, err := pgxpool.ParseConfig(v)
				if err != nil {
					return errors.New("is not a PostgreSQL URL, such as postgres://user@host:5432/database")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_MAX_CONNS", fallback: "20", usage: "database connections of the process, 4 to 1000",
			parse: intBetween(4, 1000, func(c *Config) *int { return &c.MaxConns }),
		},
		{
			env: "AFLUENTE_LISTEN", fallback: "127.0.0.1:8080", usage: "address of the web server, host:port",
			parse: func(c *Config, v string) error {
				c.Listen = v
				if _, port, err := net.SplitHostPort(v); err != nil || port == "" {
					return errors.New("is not host:port")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_UI_USER", usage: "user of River UI and /api/dlq; this or a trusted proxy is needed to listen beyond this machine",
			parse: func(c *Config, v string) error {
				if c.UIUser = v; strings.Contains(v, ":") {
					return errors.New("holds a colon, which basic authentication cannot carry")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_UI_PASSWORD", secret: true, usage: "the user's password, or its bcrypt hash",
			parse: func(c *Config, v string) error {
				c.UIPassword = v
				if _, err := bcrypt.Cost([]byte(v)); err != nil && strings.HasPrefix(v, "$2") {
					return errors.New("looks like a bcrypt hash and is none")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_UI_USER_HEADER", usage: "header in which a trusted proxy names the user who signed in there, such as X-Forwarded-User",
			parse: func(c *Config, v string) error { c.UIUserHeader = v; return nil },
		},
		{
			env: "AFLUENTE_TRUSTED_PROXIES", usage: "addresses of the proxies whose header counts, such as 10.0.0.0/8,127.0.0.1",
			parse: func(c *Config, v string) error {
				return parsePrefixes(v, &c.TrustedProxies)
			},
		},
		{
			env: "AFLUENTE_PUBLIC_URL", usage: "URL by which users reach this server through a proxy, with its path, such as https://example.com/bus",
			parse: func(c *Config, v string) error {
				if err := checkHTTP(v); err != nil {
					return err
				}
				c.PublicURL, _ = url.Parse(v) // checked
				if path := c.publicPath(); path == uiPath || strings.HasPrefix(path, uiPath+"/") {
					return errors.New("has the path of River UI itself")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_LOG_LEVEL", fallback: "info", usage: "debug, info, warn or error",
			parse: func(c *Config, v string) (err error) {
				if c.LogLevel, err = zapcore.ParseLevel(v); err != nil || c.LogLevel > zapcore.ErrorLevel {
					return errors.New("is not debug, info, warn or error")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_BATCH", fallback: "1000", usage: "events that the bridge takes at a time, 1 to 10000",
			parse: intBetween(1, 10_000, func(c *Config) *int { return &c.Batch }),
		},
		{
			env: "AFLUENTE_MAX_WORKERS", fallback: "100", usage: "jobs of one queue that run at a time, 1 to 10000",
			parse: intBetween(1, 10_000, func(c *Config) *int { return &c.MaxWorkers }),
		},
		{
			env: "AFLUENTE_STOP_TIMEOUT", fallback: "10s", usage: "how long a stop waits for running jobs before it cancels them, up to 1h",
			parse: func(c *Config, v string) (err error) {
				c.StopTimeout, err = time.ParseDuration(v)
				if err != nil || c.StopTimeout <= 0 || c.StopTimeout > time.Hour {
					return errors.New("is not a duration up to 1h, such as 30s")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_POLL_ONLY", fallback: "false", usage: "do without LISTEN, for a transaction pooler in front of the database",
			parse: func(c *Config, v string) (err error) {
				if c.PollOnly, err = strconv.ParseBool(v); err != nil {
					return errors.New("is not true or false")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_JWT_SECRET", secret: true, usage: "secret of the users' tokens (HS256), at least 32 bytes; opens the event stream and the API of webhooks",
			parse: func(c *Config, v string) error {
				if c.JWTSecret = v; len(v) < 32 {
					return errors.New("has less than 32 bytes")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_JWKS_URL", usage: "key set of the users' tokens (ES256, RS256); opens the event stream and the API of webhooks",
			parse: func(c *Config, v string) error { c.JWKSURL = v; return checkHTTP(v) },
		},
		{
			env: "AFLUENTE_ARCHIVE_URL", fallback: "file:///var/lib/afluente/archive",
			secret: true, // none if it is right
			usage:  "where old rows go, a file:// or s3:// URL",
			parse: func(c *Config, v string) error {
				c.ArchiveURL = v
				return archive.CheckURL(v)
			},
		},
		{
			env: "AFLUENTE_RETENTION", fallback: "2160h", usage: "how long events and audit rows stay in the database, at least 24h",
			parse: func(c *Config, v string) (err error) {
				if c.Retention, err = time.ParseDuration(v); err != nil || c.Retention < 24*time.Hour {
					return errors.New("is not a duration of 24h or more, such as 2160h")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_WEBHOOK_KEYS", secret: true,
			usage: "keys that seal the secrets of webhooks, name:base64 of 32 bytes, comma separated; the first one seals, all open",
			parse: func(c *Config, v string) (err error) { c.WebhookKeys, err = webhook.ParseKeys(v); return err },
		},
		{
			env: "AFLUENTE_WEBHOOK_ALLOWED_CIDRS", usage: "private networks that webhooks may go to all the same, over http too, such as 10.0.0.0/8",
			parse: func(c *Config, v string) error { return parsePrefixes(v, &c.WebhookAllowed) },
		},
		{
			env: "AFLUENTE_WEBHOOK_USER_AGENT", fallback: "Webhooks/1.0", usage: "User-Agent that the receivers of webhooks see",
			parse: func(c *Config, v string) error {
				if c.WebhookUserAgent = v; !httpguts.ValidHeaderFieldValue(v) {
					return errors.New("holds a control character")
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_WEBHOOK_ROLES", usage: "roles whose tokens may manage webhooks, such as owner,admin; all if unset",
			parse: func(c *Config, v string) error {
				for role := range strings.SplitSeq(v, ",") {
					c.WebhookRoles = append(c.WebhookRoles, strings.TrimSpace(role))
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_CRONS_FILE", usage: "YAML file that changes or pauses crons",
			parse: func(c *Config, v string) error { c.CronsFile = v; return nil },
		},
		{
			env: "INTERNAL_CRON_SECRET", secret: true, usage: "secret of POST /api/cron/{name}, at least 16 bytes",
			parse: addCronSecret,
		},
		{
			env: "INTERNAL_SECRET", secret: true, usage: "another secret of POST /api/cron/{name}",
			parse: addCronSecret,
		},
		{
			env: "AFLUENTE_ALERT_WEBHOOK_URL", secret: true, usage: "where alerts are posted as JSON, such as an incoming webhook of Slack",
			parse: func(c *Config, v string) error { c.AlertWebhookURL = v; return checkHTTP(v) },
		},
		{
			env: "AFLUENTE_ALERT_EMAIL", usage: "addresses that get alerts by mail, comma separated",
			parse: func(c *Config, v string) error {
				for text := range strings.SplitSeq(v, ",") {
					address, err := mail.ParseAddress(strings.TrimSpace(text))
					if err != nil {
						return errors.New("is not a list of mail addresses")
					}
					c.AlertEmail = append(c.AlertEmail, address.Address)
				}
				return nil
			},
		},
		{
			env: "AFLUENTE_ALERT_FROM", usage: "address that alerts are mailed from",
			parse: func(c *Config, v string) error {
				address, err := mail.ParseAddress(v)
				if err != nil {
					return errors.New("is not a mail address")
				}
				c.AlertFrom = address.Address
				return nil
			},
		},
		{
			env: "AFLUENTE_SMTP_URL", secret: true, usage: "server that takes the mail, smtp://user:password@host:port or smtps://",
			parse: func(c *Config, v string) error { c.SMTPURL = v; return observe.CheckSMTP(v) },
		},
		{
			env: "AFLUENTE_ALERT_ROUTES", secret: true,
			usage: "whom else to tell of one consumer, such as lgpd-redact-worker=mailto:dpo@example.com, comma separated; also https: for a webhook",
			parse: func(c *Config, v string) error {
				c.AlertRoutes = make(map[string]*url.URL)
				for text := range strings.SplitSeq(v, ",") {
					consumer, address, _ := strings.Cut(strings.TrimSpace(text), "=")
					to, err := parseRoute(address)
					if consumer == "" || err != nil {
						return errors.New("is not a list of consumer=mailto:address or consumer=https://…")
					}
					c.AlertRoutes[consumer] = to
				}
				return nil
			},
		},
		{
			env: "SENTRY_DSN", secret: true, usage: "Sentry, for errors of jobs and alerts",
			parse: func(c *Config, v string) error { c.SentryDSN = v; return checkHTTP(v) },
		},
		{
			env: "OTEL_EXPORTER_OTLP_ENDPOINT", usage: "collector of traces and metrics over HTTP, such as http://127.0.0.1:4318",
			parse: func(c *Config, v string) error { c.OTLPEndpoint = strings.TrimRight(v, "/"); return checkHTTP(v) },
		},
		{
			env: "WAHA_URL", fallback: "http://127.0.0.1:3000", usage: "base URL of WAHA",
			parse: func(c *Config, v string) error { c.WAHAURL = v; return checkHTTP(v) },
		},
		{
			env: "WAHA_API_KEY", secret: true, usage: "API key of WAHA",
			parse: func(c *Config, v string) error { c.WAHAAPIKey = v; return nil },
		},
	}
}

func addCronSecret(c *Config, v string) error {
	if len(v) < minCronSecret {
		return fmt.Errorf("has less than %d bytes", minCronSecret)
	}
	c.CronSecrets = append(c.CronSecrets, v)
	return nil
}

// minCronSecret is in bytes.
const minCronSecret = 16

// parseRoute reads the address of an alert.
func parseRoute(text string) (*url.URL, error) {
	to, err := url.Parse(text)
	if err != nil {
		return nil, err
	}
	if to.Scheme == "mailto" {
		_, err := mail.ParseAddress(to.Opaque)
		return to, err
	}
	return to, checkHTTP(text)
}

// publicPath is the path of PublicURL without a slash at its end, empty for none.
func (c Config) publicPath() string {
	if c.PublicURL == nil {
		return ""
	}
	return strings.TrimRight(c.PublicURL.Path, "/")
}

// publicOrigin is the scheme and host of PublicURL, empty for none.
func (c Config) publicOrigin() string {
	if c.PublicURL == nil {
		return ""
	}
	return c.PublicURL.Scheme + "://" + c.PublicURL.Host
}

// consoleURL is where River UI is, as users see it.
func (c Config) consoleURL() string {
	if c.PublicURL == nil {
		return "http://" + c.Listen + uiPath
	}
	return c.publicOrigin() + c.publicPath() + uiPath
}

func parsePrefixes(list string, prefixes *[]netip.Prefix) error {
	for text := range strings.SplitSeq(list, ",") {
		prefix, err := parsePrefix(strings.TrimSpace(text))
		if err != nil {
			return errors.New("is not a list of addresses and networks, such as 10.0.0.0/8,127.0.0.1")
		}
		*prefixes = append(*prefixes, prefix)
	}
	return nil
}

// parsePrefix reads a network, or an address as the network of itself.
func parsePrefix(text string) (netip.Prefix, error) {
	if strings.Contains(text, "/") {
		return netip.ParsePrefix(text)
	}
	address, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Prefix{}, err
	}
	return address.Prefix(address.BitLen())
}

func checkHTTP(text string) error {
	if u, err := url.Parse(text); err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return errors.New("is not an http or https URL")
	}
	return nil
}

func intBetween(low, high int, field func(*Config) *int) func(*Config, string) error {
	return func(c *Config, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < low || n > high {
			return fmt.Errorf("is not a whole number from %d to %d", low, high)
		}
		*field(c) = n
		return nil
	}
}

type settings []*setting

// addSettings makes a flag for each setting.
func addSettings(flags *pflag.FlagSet) settings {
	all := configSettings()
	for _, s := range all {
		flags.String(s.flagName(), s.fallback, s.usage+" ($"+s.env+")")
		s.flag = flags.Lookup(s.flagName())
		if s.fallback == "false" {
			s.flag.NoOptDefVal = "true" // so that the flag alone will do
		}
	}
	return all
}

// load takes each setting from its flag, else from the environment, else the
// default, and returns all mistakes at once.
func (all settings) load(getenv func(string) string) (Config, error) {
	var config Config
	var mistakes []error
	for _, s := range all {
		name, value := s.env, getenv(s.env)
		if s.flag.Changed {
			name, value = "--"+s.flag.Name, s.flag.Value.String()
		} else if value == "" {
			value = s.fallback
		}
		if value == "" {
			continue
		}
		if err := s.parse(&config, value); err != nil {
			shown := fmt.Sprintf(" %q", value)
			if s.secret {
				shown = ""
			}
			mistakes = append(mistakes, fmt.Errorf("%s%s %w", name, shown, err))
		}
	}
	if (config.UIUser == "") != (config.UIPassword == "") {
		mistakes = append(mistakes, errors.New("AFLUENTE_UI_USER and AFLUENTE_UI_PASSWORD go together; one of them is unset"))
	}
	if (config.UIUserHeader == "") != (len(config.TrustedProxies) == 0) {
		mistakes = append(mistakes, errors.New("AFLUENTE_UI_USER_HEADER and AFLUENTE_TRUSTED_PROXIES go together; one of them is unset"))
	}
	if config.UIUser == "" && config.UIUserHeader == "" && config.Listen != "" && !loopback(config.Listen) {
		mistakes = append(mistakes, fmt.Errorf("AFLUENTE_LISTEN %q is open to other machines, and River UI can retry and delete jobs: "+
			"set AFLUENTE_UI_USER and AFLUENTE_UI_PASSWORD, or AFLUENTE_UI_USER_HEADER and AFLUENTE_TRUSTED_PROXIES, or listen on 127.0.0.1",
			config.Listen))
	}
	if config.mails() && (config.SMTPURL == "" || config.AlertFrom == "") {
		mistakes = append(mistakes, errors.New("alerts by mail need AFLUENTE_SMTP_URL and AFLUENTE_ALERT_FROM"))
	}
	if err := errors.Join(mistakes...); err != nil {
		return Config{}, &usageError{err}
	}
	return config, nil
}

// mails tells whether alerts go out by mail.
func (c Config) mails() bool {
	for _, to := range c.AlertRoutes {
		if to.Scheme == "mailto" {
			return true
		}
	}
	return len(c.AlertEmail) > 0
}

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

// fields are the settings as they are in force, secrets as set or unset.
func (c Config) fields() []zap.Field {
	set := func(secret string) string {
		if secret == "" {
			return "unset"
		}
		return "set"
	}
	return []zap.Field{
		zap.String("database_url", set(c.DatabaseURL)),
		zap.Int("max_conns", c.MaxConns),
		zap.String("listen", c.Listen),
		zap.String("ui_user", c.UIUser),
		zap.String("ui_password", set(c.UIPassword)),
		zap.String("ui_user_header", c.UIUserHeader),
		zap.Stringers("trusted_proxies", c.TrustedProxies),
		zap.String("public_url", c.publicOrigin()+c.publicPath()),
		zap.Stringer("log_level", c.LogLevel),
		zap.Int("batch", c.Batch),
		zap.Int("max_workers", c.MaxWorkers),
		zap.Duration("stop_timeout", c.StopTimeout),
		zap.Bool("poll_only", c.PollOnly),
		zap.String("jwt_secret", set(c.JWTSecret)),
		zap.String("jwks_url", c.JWKSURL),
		zap.String("archive_url", c.ArchiveURL),
		zap.Duration("retention", c.Retention),
		zap.Bool("webhook_keys", c.WebhookKeys != nil),
		zap.Stringers("webhook_allowed_cidrs", c.WebhookAllowed),
		zap.String("webhook_user_agent", c.WebhookUserAgent),
		zap.Strings("webhook_roles", c.WebhookRoles),
		zap.String("crons_file", c.CronsFile),
		zap.Int("cron_secrets", len(c.CronSecrets)),
		zap.String("alert_webhook_url", set(c.AlertWebhookURL)),
		zap.Int("alert_emails", len(c.AlertEmail)),
		zap.String("smtp_url", set(c.SMTPURL)),
		zap.Strings("alert_routes", slices.Sorted(maps.Keys(c.AlertRoutes))),
		zap.String("sentry_dsn", set(c.SentryDSN)),
		zap.String("otlp_endpoint", c.OTLPEndpoint),
		zap.String("waha_url", c.WAHAURL),
		zap.String("waha_api_key", set(c.WAHAAPIKey)),
	}
}

// errNoDatabase is returned by openPool.
var errNoDatabase = errors.New("no database: set DATABASE_URL to a PostgreSQL URL, or try 'afluente dev', which brings its own")
