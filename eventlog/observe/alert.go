package observe

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/zap"

	"afluente/db"
)

const (
	// alertPause is between two notices of the same consumer's dead letters to
	// one channel, and thresholdPause between two of the same threshold while it
	// stays passed.
	alertPause     = 10 * time.Minute
	thresholdPause = time.Hour

	sendTimeout = 10 * time.Second

	// minAttempts is how many attempts of five minutes say something.
	minAttempts = 20
)

// deadLetterRule is the rule for each job that enters the dead letters.
const deadLetterRule = "dead_letter"

// threshold is a rule for what is measured.
type threshold struct {
	name      string
	limit     float64
	values    func(measurement) map[string]float64
	text      string // with the subject, the value and the limit
	needsWork bool   // counts only where minAttempts were made
}

// thresholds are the rules, from the specification of the bus.
func thresholds() []threshold {
	return []threshold{
		{
			name: "lag", limit: 60, values: func(m measurement) map[string]float64 { return m.lag },
			text: "Events of type %s wait for a bridge for %.0f s, more than %.0f s.",
		},
		{
			name: "fail_rate", limit: 0.05, values: func(m measurement) map[string]float64 { return m.failRate },
			text: "Of the attempts of %s a share of %.2f failed in the last five minutes, more than %.2f.", needsWork: true,
		},
		{
			name: "dlq_size", limit: 100, values: func(m measurement) map[string]float64 { return m.dead },
			text: "Of the events of type %s %.0f are dead, more than %.0f.",
		},
		{
			name: "slow", limit: 5000, values: func(m measurement) map[string]float64 { return m.p95 },
			text: "Attempts of %s take up to %.0f ms (95 %%), more than %.0f ms.", needsWork: true,
		},
		{
			name: "queue_size", limit: 1000, values: func(m measurement) map[string]float64 { return m.queues },
			text: "In the queue %s %.0f jobs wait for a worker, more than %.0f.",
		},
		{
			name: "cron_overdue", limit: 300, values: func(m measurement) map[string]float64 { return m.crons },
			text: "The cron %s has not fired for %.0f s after its time, more than %.0f s.",
		},
		{
			name: "overdue", limit: 0, values: func(m measurement) map[string]float64 { return m.overdue },
			text: "Of the jobs of %s %.0f run for longer than they may, more than %.0f.",
		},
		{
			name: "webhook_disabled", limit: 0, values: func(m measurement) map[string]float64 { return m.webhooksDisabled },
			text: "Of the webhooks of organization %s %.0f were disabled in the last hour, more than %.0f.",
		},
		{
			name: "webhook_fault", limit: 0, values: func(m measurement) map[string]float64 { return m.webhooksFaulty },
			text: "Of the webhooks of organization %s %.0f wait since no key opens their secrets, more than %.0f.",
		},
	}
}

// alert notes what there is to tell and tells it.
func (m *Monitor) alert(ctx context.Context) error {
	if err := m.noteDeadLetters(ctx); err != nil {
		return fmt.Errorf("note dead letters: %w", err)
	}
	if measured := m.last.Load(); measured != nil {
		if err := m.noteThresholds(ctx, *measured); err != nil {
			return fmt.Errorf("note thresholds: %w", err)
		}
	}
	return m.tell(ctx)
}

// channelsFor returns those who are told of a subject.
func (m *Monitor) channelsFor(subject string) []Channel {
	if route, ok := m.routes[subject]; ok {
		return append(slices.Clip(m.channels), route)
	}
	return m.channels
}

// noteDeadLetters counts the jobs that died into what each channel has to tell.
func (m *Monitor) noteDeadLetters(ctx context.Context) error {
	return pgx.BeginFunc(ctx, m.pool, func(tx pgx.Tx) error {
		queries := db.New(tx)
		dead, err := queries.TakeDeadLetterNotices(ctx)
		if err != nil {
			return err
		}
		params := db.AddAlertsParams{Rule: deadLetterRule}
		for _, row := range dead {
			for _, channel := range m.channelsFor(row.Consumer) {
				params.Subjects = append(params.Subjects, row.Consumer)
				params.Channels = append(params.Channels, channel.Name)
				params.Pending = append(params.Pending, row.Jobs)
			}
		}
		if len(params.Subjects) == 0 {
			return nil
		}
		return queries.AddAlerts(ctx, params)
	})
}

// noteThresholds begins and ends the alerts of thresholds.
func (m *Monitor) noteThresholds(ctx context.Context, measured measurement) error {
	var rules, subjects []string
	params := db.SetThresholdAlertsParams{}
	for _, rule := range thresholds() {
		for subject, value := range rule.values(measured) {
			if value <= rule.limit || rule.needsWork && measured.attempts[subject] < minAttempts {
				continue
			}
			rules, subjects = append(rules, rule.name), append(subjects, subject)
			for _, channel := range m.channelsFor(subject) {
				params.Rules = append(params.Rules, rule.name)
				params.Subjects = append(params.Subjects, subject)
				params.Channels = append(params.Channels, channel.Name)
				params.AlertValues = append(params.AlertValues, value)
			}
		}
	}
	queries := db.New(m.pool)
	if err := queries.ClearThresholdAlerts(ctx, m.pause, rules, subjects); err != nil {
		return err
	}
	if len(params.Rules) == 0 {
		return nil
	}
	return queries.SetThresholdAlerts(ctx, params)
}

// tell sends what is due, all channels at a time, each its own notices one after
// the other. A channel that fails is left alone until its next turn.
func (m *Monitor) tell(ctx context.Context) error {
	channels := make(map[string]Channel)
	names := []string{}
	for _, channel := range m.channels {
		channels[channel.Name] = channel
		names = append(names, channel.Name)
	}
	for _, channel := range m.routes {
		channels[channel.Name] = channel
		names = append(names, channel.Name)
	}
	due, err := db.New(m.pool).ListDueAlerts(ctx, names)
	if err != nil {
		return fmt.Errorf("list due alerts: %w", err)
	}
	byChannel := make(map[string][]db.ListDueAlertsRow)
	for _, row := range due {
		byChannel[row.Channel] = append(byChannel[row.Channel], row)
	}
	var all sync.WaitGroup
	for name, rows := range byChannel {
		all.Go(func() { m.tellChannel(ctx, channels[name], rows) })
	}
	all.Wait()
	return nil
}

func (m *Monitor) tellChannel(ctx context.Context, channel Channel, rows []db.ListDueAlertsRow) {
	queries := db.New(m.pool)
	for i, row := range rows {
		pause := thresholdPause
		if row.Rule == deadLetterRule {
			pause = m.pause
		}
		err := m.send(ctx, channel, m.notice(row))
		if err == nil {
			err := queries.MarkAlertTold(ctx, db.MarkAlertToldParams{
				Rule: row.Rule, Subject: row.Subject, Channel: row.Channel, Told: row.Pending, Pause: pause,
			})
			if err != nil {
				m.log.Error("alert may be told twice", zap.String("channel", channel.Name), zap.Error(err))
			}
			continue
		}
		m.log.Error("alert not told, will be retried", zap.String("channel", channel.Name),
			zap.String("rule", row.Rule), zap.String("subject", row.Subject), zap.Error(err))
		for _, row := range rows[i:] {
			err := queries.MarkAlertFailed(ctx, db.MarkAlertFailedParams{
				Rule: row.Rule, Subject: row.Subject, Channel: row.Channel, Delay: retryAfter(row.Failures),
			})
			if err != nil {
				m.log.Error("failure of an alert not noted", zap.String("channel", channel.Name), zap.Error(err))
			}
		}
		return
	}
}

// retryAfter is how long a channel is left alone after some failures: 20 s, then
// twice as long each time up to the pause of an alert.
func retryAfter(failures int32) time.Duration {
	return min(20*time.Second<<min(failures, 10), alertPause)
}

func (m *Monitor) send(ctx context.Context, channel Channel, notice Notice) error {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	return channel.Send(ctx, notice)
}

// notice says what there is to tell.
func (m *Monitor) notice(row db.ListDueAlertsRow) Notice {
	n := Notice{Rule: row.Rule, Subject: row.Subject, URL: m.consoleURL + "/jobs"}
	if row.Rule == deadLetterRule {
		n.Count = row.Pending
		n.URL += "?" + url.Values{"state": {"discarded"}, "kind": {row.Subject}}.Encode()
		n.Text = fmt.Sprintf("%d jobs of %s entered the dead letters.", row.Pending, row.Subject)
		if row.Pending == 1 {
			n.Text = fmt.Sprintf("A job of %s entered the dead letters.", row.Subject)
		}
		return n
	}
	n.Value = row.Value
	if row.FiringSince != nil {
		n.Since = row.FiringSince.UTC()
	}
	for _, rule := range thresholds() {
		if rule.name == row.Rule {
			n.Threshold = rule.limit
			n.Text = fmt.Sprintf(rule.text, row.Subject, row.Value, rule.limit)
		}
	}
	return n
}

// outage is what a process knows of a database that does not answer, which
// cannot keep it.
type outage struct {
	since  time.Time // zero while it answers
	toldAt time.Time
}

// watchDatabase tells people that the database is gone. Each process tells it
// for itself.
func (m *Monitor) watchDatabase(ctx context.Context, err error) {
	now := m.now()
	if err == nil {
		m.down.since = time.Time{}
		return
	}
	if m.down.since.IsZero() {
		m.down.since = now
	}
	if now.Sub(m.down.since) < databaseGrace || now.Sub(m.down.toldAt) < m.pause {
		return
	}
	m.down.toldAt = now
	notice := Notice{
		Rule:  "database",
		Since: m.down.since.UTC(),
		URL:   strings.TrimSuffix(m.consoleURL, "/"),
		Text:  fmt.Sprintf("The database has not answered a process for %.0f s. Nothing is lost, and nothing is worked.", now.Sub(m.down.since).Seconds()),
	}
	ctx = context.WithoutCancel(ctx) // it may be over, of waiting for the database
	var all sync.WaitGroup
	for _, channel := range m.channels {
		all.Go(func() {
			if err := m.send(ctx, channel, notice); err != nil {
				m.log.Error("alert not told", zap.String("channel", channel.Name), zap.String("rule", notice.Rule), zap.Error(err))
			}
		})
	}
	all.Wait()
}
