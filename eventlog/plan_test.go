package eventlog_test

import (
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/eventlog/event"
)

func TestPlanShowsEachJobOnALine(t *testing.T) {
	t.Parallel()
	plan, err := eventlog.Compile(beta(nil), eventlog.Job(&worker[anyArgs]{}), alpha(nil),
		eventlog.Cron("17 3 * * *", tickArgs{}, &worker[tickArgs]{}, eventlog.Policy{Zone: "America/Sao_Paulo"}))
	require.NoError(t, err)
	require.Equal(t, `JOB           TRIGGER                            QUEUE    ATTEMPTS  TIMEOUT  FIRST RUNS OF 2026 (UTC)
alpha-worker  event message.queued               default  8         20s
any-worker    go code                            default  8         20s
beta-worker   event message.queued               beta     3         20s
tick-worker   cron 17 3 * * * America/Sao_Paulo  default  8         20s      Jan 01 06:17, Jan 02 06:17, Jan 03 06:17
`, plan.String())
	require.Equal(t, []string{"beta", "default"}, plan.Queues())
	require.Equal(t, eventlog.Entry{
		Job: "beta-worker", Trigger: "event message.queued", Queue: "beta", MaxAttempts: 3, Timeout: 20 * time.Second,
	}, plan.Entries()[2])
}

// brokenArgs has everything wrong that can be wrong.
type brokenArgs struct{}

func (brokenArgs) Kind() string { return "Broken Kind" }

func (brokenArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{
		MaxAttempts: 5000, Priority: 9, Queue: "no queue", UniqueOpts: river.UniqueOpts{ByArgs: true},
	}
}

type brokenEvent struct{}

func (brokenEvent) EventType() string { return "BrokenEvent" }

func TestCompileReportsEveryMistakeAtOnce(t *testing.T) {
	t.Parallel()
	_, err := eventlog.Compile(
		alpha(nil), alpha(nil), eventlog.Declaration{},
		eventlog.Cron("0 0 30 2 *", tickArgs{}, &worker[tickArgs]{}, eventlog.Policy{}),
		eventlog.Cron("@sometimes", anyArgs{}, &worker[anyArgs]{}, eventlog.Policy{}),
		eventlog.Cron("@daily", betaArgs{}, &worker[betaArgs]{}, eventlog.Policy{Zone: "Mars/Olympus"}),
		eventlog.On(func(eventlog.Event[brokenEvent]) brokenArgs { return brokenArgs{} }, &timeless[brokenArgs]{}),
	)
	for _, want := range []string{
		`declare "alpha-worker": the kind is declared twice`,
		`declare: empty declaration`,
		`declare "Broken Kind": the kind is not`,
		`the event type "BrokenEvent" is not`,
		`the queue "no queue" is not`,
		`the priority 9 is not`,
		`the number of attempts 5000 is not`,
		`MaxAttempts, Priority and Queue and nothing else`,
		`the worker's Timeout must be positive`,
		`declare "tick-worker": the spec "0 0 30 2 *" never fires`,
		`the spec "@sometimes"`,
		`declare "beta-worker": the time zone "Mars/Olympus" is unknown`,
	} {
		require.ErrorContains(t, err, want)
	}
}

// timeless forgot its Timeout.
type timeless[A river.JobArgs] struct{ worker[A] }

func (*timeless[A]) Timeout(*river.Job[A]) time.Duration { return 0 }

func TestClientRefusesAQueueThatNoJobRunsOn(t *testing.T) {
	t.Parallel()
	plan, err := eventlog.Compile(alpha(nil))
	require.NoError(t, err)
	_, err = eventlog.NewClient(eventlog.ClientConfig{
		Pool: dbtest.New(t), Plan: plan, Log: zap.NewNop(), Queues: []string{"default", "typo"},
	})
	require.ErrorContains(t, err, `no job runs on queue "typo"; the queues are ["default"]`)
}

func TestJobFromGoCodeRuns(t *testing.T) {
	t.Parallel()
	b := newBus(t, eventlog.Job(&worker[anyArgs]{}))
	b.start(t)
	inserted, err := b.client.Insert(t.Context(), anyArgs{}, nil)
	require.NoError(t, err)
	require.Equal(t, 8, inserted.Job.MaxAttempts)
	eventually(t, "job done", func() bool {
		return count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE state = 'completed'") == 1
	})
	_, err = b.client.Insert(t.Context(), alphaArgs{}, nil)
	require.ErrorContains(t, err, "alpha-worker", "a kind that has no worker is refused")
}

func ExampleOn() {
	greet := eventlog.On(func(e eventlog.Event[event.MessageQueued]) alphaArgs {
		return alphaArgs{MessageID: e.Payload.MessageID}
	}, &worker[alphaArgs]{})
	plan, err := eventlog.Compile(greet)
	_, _ = plan, err
}

func ExampleCron() {
	report := eventlog.Cron("0 8 * * 1-5", alphaArgs{}, &worker[alphaArgs]{}, eventlog.Policy{
		Zone: "America/Sao_Paulo", Missed: eventlog.MissedSkip,
	})
	plan, err := eventlog.Compile(report)
	_, _ = plan, err
}
