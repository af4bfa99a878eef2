package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"afluente/db"
	"afluente/db/migrate"
)

const (
	// cronFault is how long a tick may wait to become a job.
	cronFault = 5 * time.Minute
	// lagFault is how long an event may wait for a bridge.
	lagFault = time.Minute
	// maxClockSkew is how far this machine's clock may be from the server's.
	// River compares its own with times that the server has written.
	maxClockSkew = 5 * time.Second
	// faultWindow is how far back events that depart from the catalogue count.
	faultWindow = 7 * 24 * time.Hour

	// archiveGrace is how much longer than the retention events may stay: the
	// archive runs once a day.
	archiveGrace = 48 * time.Hour

	monthsAhead = 3
)

func newDoctor(load func() (Config, error)) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check a database and what runs on it",
		Long: `Check a database and what runs on it: version and privileges, migrations,
triggers, partitions, retention, lag, listeners, dead letters, events that depart
from the catalogue, consumers, kinds of jobs, crons, River's leader and queues,
secrets of webhooks.

A fault keeps the bus from working; a warning is for somebody to look at. The
exit code is 1 when there is a fault.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := load()
			if err != nil {
				return err
			}
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				findings, err := examine(cmd.Context(), pool, config.Retention)
				if err != nil {
					return err
				}
				if err := printFindings(cmd.OutOrStdout(), findings, asJSON); err != nil {
					return err
				}
				faults := 0
				for _, f := range findings {
					if f.State == stateFault {
						faults++
					}
				}
				if faults > 0 {
					return fmt.Errorf("%d of %d checks found a fault", faults, len(findings))
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

const (
	stateOK    = "ok"
	stateWarn  = "warn"
	stateFault = "fault"
)

// finding is what one check found.
type finding struct {
	Check  string `json:"check"`
	State  string `json:"state"`
	Detail string `json:"detail"`
}

// examine runs the checks in order. Those after the migrations need the
// tables, so they are left out where these are missing.
func examine(ctx context.Context, pool *pgxpool.Pool, retention time.Duration) ([]finding, error) {
	var findings []finding
	migrations, err := migrate.List(ctx, pool)
	if err != nil {
		return nil, err
	}
	pending := slices.DeleteFunc(migrations, func(m migrate.Status) bool { return m.Applied })
	if len(pending) > 0 {
		return append(findings, finding{"migrations", stateFault, fmt.Sprintf("%d are missing: run 'afluente migrate up'", len(pending))}), nil
	}
	findings = append(findings, finding{"migrations", stateOK, "all applied"})

	known, err := knownKinds()
	if err != nil {
		return nil, err
	}
	queries := db.New(pool)
	for _, check := range []struct {
		name string
		run  func(context.Context, *db.Queries) (state, detail string, err error)
	}{
		{"server", checkServer},
		{"clock", checkClock},
		{"triggers", checkTriggers},
		{"partitions", checkPartitions},
		{"retention", checkRetention(retention)},
		{"lag", checkLag},
		{"listeners", checkListeners},
		{"dead letters", checkDeadLetters},
		{"catalogue", checkCatalogue},
		{"consumers", checkConsumers(known)},
		{"kinds", checkKinds(known)},
		{"crons", checkCrons(known)},
		{"leader", checkLeader},
		{"queues", checkQueues},
		{"webhooks", checkWebhooks},
	} {
		state, detail, err := check.run(ctx, queries)
		if err != nil {
			return nil, fmt.Errorf("check %s: %w", check.name, err)
		}
		findings = append(findings, finding{check.name, state, detail})
	}
	return findings, nil
}

func printFindings(w io.Writer, findings []finding, asJSON bool) error {
	if asJSON {
		return printJSON(w, findings)
	}
	rows := make([][]string, len(findings))
	for i, f := range findings {
		rows[i] = []string{f.Check, f.State, f.Detail}
	}
	return printTable(w, []string{"CHECK", "STATE", "DETAIL"}, rows)
}

func checkServer(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	server, err := queries.CheckServer(ctx)
	version := fmt.Sprintf("PostgreSQL %d", server.Version/10_000)
	switch {
	case err != nil:
		return "", "", err
	case server.Version < 150_000:
		return stateFault, version + " is older than 15", nil
	case server.ReadOnly:
		return stateFault, "the server is a read-only replica", nil
	case server.Restricted:
		return stateFault, "row level security hides rows from this role: connect as the owner of the tables or with BYPASSRLS", nil
	}
	return stateOK, version, nil
}

func checkClock(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	before := time.Now()
	server, err := queries.CheckServer(ctx)
	if err != nil {
		return "", "", err
	}
	// The server read its clock between before and now.
	skew := max(before.Sub(server.Clock), time.Until(server.Clock), 0)
	if skew > maxClockSkew {
		return stateWarn, fmt.Sprintf("this machine and the server are %s apart", skew.Round(time.Second)), nil
	}
	return stateOK, "this machine's and the server's agree", nil
}

func checkTriggers(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	enabled, err := queries.ListEnabledTriggers(ctx)
	if err != nil {
		return "", "", err
	}
	var missing []string
	for _, name := range []string{
		"afluente_keep_dead", "afluente_notice_dead", "afluente_record_discarded", "afluente_refresh_retried",
		"afluente_settle_deleted", "afluente_settle_updated", "afluente_wait_for_lane", "afluente_yield_deleted",
		"afluente_yield_updated", "event_log_notify_high_priority",
	} {
		if !slices.Contains(enabled, name) {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return stateFault, "missing or disabled: " + strings.Join(missing, ", "), nil
	}
	return stateOK, "all enabled", nil
}

func checkPartitions(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	missing, err := queries.ListMissingPartitions(ctx, monthsAhead)
	if err != nil {
		return "", "", err
	}
	stray, err := queries.CountStrayEvents(ctx)
	if err != nil {
		return "", "", err
	}
	var mistakes []string
	if len(missing) > 0 {
		mistakes = append(mistakes, "no partition yet for "+strings.Join(missing, ", "))
	}
	if stray > 0 {
		mistakes = append(mistakes, fmt.Sprintf("%d events in the default partition", stray))
	}
	if len(mistakes) > 0 {
		return stateWarn, strings.Join(mistakes, "; "), nil
	}
	return stateOK, fmt.Sprintf("this month and the next %d", monthsAhead), nil
}

// checkRetention looks for events that the archive should have taken.
func checkRetention(retention time.Duration) func(context.Context, *db.Queries) (state, detail string, err error) {
	return func(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
		found, err := queries.HasEventsBefore(ctx, time.Now().Add(-retention-archiveGrace))
		if err != nil {
			return "", "", err
		}
		if found {
			return stateWarn, fmt.Sprintf("events are older than the %s that they are to stay: does audit-archive-worker run, with this AFLUENTE_RETENTION?",
				retention), nil
		}
		return stateOK, fmt.Sprintf("no event that is done is much older than %s", retention), nil
	}
}

func checkListeners(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	listeners, err := queries.CountListeners(ctx)
	if err != nil {
		return "", "", err
	}
	if listeners == 0 {
		return stateWarn, "no bridge listens for urgent events, so they wait for up to half a second; with AFLUENTE_POLL_ONLY that is as it should be", nil
	}
	return stateOK, fmt.Sprintf("%d connections hear of urgent events at once", listeners), nil
}

func checkLag(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	seconds, err := queries.GetLag(ctx)
	if err != nil {
		return "", "", err
	}
	lag := time.Duration(seconds * float64(time.Second)).Round(time.Millisecond)
	detail = fmt.Sprintf("the oldest event that is due has waited %s", lag)
	if lag > lagFault {
		return stateFault, detail + ": does a process with the bridge run?", nil
	}
	return stateOK, detail, nil
}

func checkDeadLetters(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	dead, err := queries.CountDeadEvents(ctx)
	if err != nil {
		return "", "", err
	}
	if len(dead) == 0 {
		return stateOK, "none", nil
	}
	counts := make([]string, len(dead))
	for i, d := range dead {
		counts[i] = fmt.Sprintf("%s %d", d.Consumer, d.Events)
	}
	return stateWarn, strings.Join(counts, ", "), nil
}

func checkCatalogue(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	faults, err := queries.ListSchemaFaults(ctx, time.Now().Add(-faultWindow), 10)
	if err != nil {
		return "", "", err
	}
	if len(faults) == 0 {
		return stateOK, "no event of the last 7 days departs from it", nil
	}
	texts := make([]string, len(faults))
	for i, f := range faults {
		texts[i] = fmt.Sprintf("%s: %s (%d, last %s)", f.EventType, f.Fault, f.Events, f.LastAt.UTC().Format(time.RFC3339))
	}
	return stateWarn, strings.Join(texts, "; "), nil
}

// checkConsumers looks for consumers whose jobs no process of this version works.
func checkConsumers(known []string) func(context.Context, *db.Queries) (state, detail string, err error) {
	return func(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
		registered, err := queries.ListConsumers(ctx)
		if err != nil {
			return "", "", err
		}
		var unknown []string
		for _, consumer := range registered {
			if !consumer.External && !slices.Contains(known, consumer.Name) {
				unknown = append(unknown, consumer.Name)
			}
		}
		if len(unknown) > 0 {
			return stateWarn, "registered, but unknown to this version: " + strings.Join(unknown, ", "), nil
		}
		return stateOK, fmt.Sprintf("%d registered", len(registered)), nil
	}
}

// checkKinds looks for jobs that wait for a worker that this version lacks.
func checkKinds(known []string) func(context.Context, *db.Queries) (state, detail string, err error) {
	return func(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
		registered, err := queries.ListConsumers(ctx)
		if err != nil {
			return "", "", err
		}
		known := slices.Clone(known)
		for _, consumer := range registered {
			if consumer.External {
				known = append(known, consumer.Name)
			}
		}
		unknown, err := queries.ListUnknownKinds(ctx, known)
		if err != nil {
			return "", "", err
		}
		if len(unknown) > 0 {
			return stateWarn, "jobs wait for workers that this version lacks: " + strings.Join(unknown, ", "), nil
		}
		return stateOK, "every job that waits has a worker", nil
	}
}

// knownKinds returns the kinds of jobs of this version.
func knownKinds() ([]string, error) {
	plan, err := compilePlan()
	if err != nil {
		return nil, err
	}
	var kinds []string
	for _, entry := range plan.Entries() {
		kinds = append(kinds, entry.Job)
	}
	return kinds, nil
}

// checkCrons looks for crons of this version that nobody fires.
func checkCrons(known []string) func(context.Context, *db.Queries) (state, detail string, err error) {
	return func(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
		overdue, err := queries.MeasureCrons(ctx, known)
		if err != nil {
			return "", "", err
		}
		var late []string
		for _, row := range overdue {
			if row.Seconds > cronFault.Seconds() {
				late = append(late, row.Name)
			}
		}
		if len(late) > 0 {
			return stateFault, "due and not fired: " + strings.Join(late, ", ") + ": does a process with the crons run?", nil
		}
		return stateOK, fmt.Sprintf("%d are on, and none is overdue", len(overdue)), nil
	}
}

func checkLeader(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	leaders, err := queries.CountLeaders(ctx)
	if err != nil {
		return "", "", err
	}
	if leaders == 0 {
		return stateFault, "no River client leads, so nothing is retried or rescued: does a process of 'afluente serve' work on queues?", nil
	}
	return stateOK, "a River client leads", nil
}

func checkQueues(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	paused, err := queries.ListPausedQueues(ctx)
	if err != nil {
		return "", "", err
	}
	if len(paused) > 0 {
		return stateWarn, "paused: " + strings.Join(paused, ", "), nil
	}
	return stateOK, "none is paused", nil
}

// checkWebhooks looks for secrets that are not as they should be.
func checkWebhooks(ctx context.Context, queries *db.Queries) (state, detail string, err error) {
	count, err := queries.CountSecrets(ctx)
	switch {
	case err != nil:
		return "", "", err
	case count.Faulty > 0:
		return stateWarn, fmt.Sprintf("%d send nothing, since no key opens their secrets: put the key back into AFLUENTE_WEBHOOK_KEYS, or rotate them", count.Faulty), nil
	case count.Plain > 0:
		return stateWarn, fmt.Sprintf("%d have their secret in plain, which is sealed within a minute once AFLUENTE_WEBHOOK_KEYS is set", count.Plain), nil
	default:
		return stateOK, "all secrets are sealed and open", nil
	}
}
