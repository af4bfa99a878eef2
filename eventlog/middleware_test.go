package eventlog_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"afluente/eventlog"
)

// River finishes jobs in batches, and jsonb takes no NUL: without the guard
// one such text leaves its whole batch running for ever.
func TestNULInAnErrorStopsNobodyElse(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(func(_ context.Context, job *river.Job[alphaArgs]) error {
		switch job.Args.MessageID {
		case "error":
			return river.JobCancel(errors.New("bad\x00body"))
		case "panic":
			panic("bad\x00panic")
		case "long":
			return river.JobCancel(errors.New(strings.Repeat("x", 5<<20)))
		case "utf-8":
			return river.JobCancel(errors.New("bad\xffbody"))
		case "snooze":
			return fmt.Errorf("not\x00now: %w", river.JobSnooze(time.Hour))
		}
		return nil
	}))
	for _, message := range []string{"error", "panic", "long", "utf-8", "snooze"} {
		b.emit(t, message)
	}
	for range 35 {
		b.emit(t, "good")
	}
	exec(t, b.pool, "UPDATE event_consumers SET max_attempts = 1")
	drain(t, b.bridge)
	b.start(t)
	eventually(t, "all 40 ended", func() bool {
		return count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE state IN ('available', 'running')") == 0
	})
	state := func(message string) (state, text string) {
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT state, coalesce(errors[1] ->> 'error', '') FROM river.river_job
			WHERE args ->> 'message_id' = $1 LIMIT 1`, message).Scan(&state, &text))
		return state, text
	}
	require.Equal(t, 35, count(t, b.pool, "SELECT count(*) FROM event_log WHERE status = 'done'"))
	got, text := state("error")
	require.Equal(t, "cancelled", got)
	require.Equal(t, `JobCancelError: bad\0body`, text)
	got, text = state("panic")
	require.Equal(t, "discarded", got)
	require.Equal(t, `bad\0panic`, text)
	require.Equal(t, 1, count(t, b.pool, `SELECT count(*) FROM river.river_job WHERE errors[1] ->> 'trace' LIKE '%TestNULInAnError%'`))
	got, text = state("long")
	require.Equal(t, "cancelled", got)
	require.Less(t, len(text), 9000)
	got, _ = state("utf-8")
	require.Equal(t, "cancelled", got)
	got, _ = state("snooze")
	require.Equal(t, "scheduled", got)
}

func TestEachAttemptIsOneLogLine(t *testing.T) {
	t.Parallel()
	broken := &fault{err: errBroken}
	b := newBus(t, alpha(func(context.Context, *river.Job[alphaArgs]) error { return broken.get() }))
	core, logs := observer.New(zapcore.InfoLevel)
	var err error
	b.client, err = eventlog.NewClient(eventlog.ClientConfig{
		Pool: b.pool, Plan: b.plan, Log: zap.New(core), Backoff: []time.Duration{time.Millisecond},
	})
	require.NoError(t, err)
	exec(t, b.pool, "UPDATE event_consumers SET max_attempts = 2")
	id := b.emit(t, "m")
	drain(t, b.bridge)
	b.start(t)
	b.awaitStatus(t, id, "dead")
	broken.mend()
	_, err = b.client.JobRetry(t.Context(), b.jobs(t, id)[0].ID)
	require.NoError(t, err)
	b.awaitStatus(t, id, "done")

	lines := logs.FilterLoggerName("jobs").All()
	require.Len(t, lines, 3)
	for i, want := range []struct {
		level   zapcore.Level
		message string
		attempt int
	}{
		{zapcore.WarnLevel, "job failed, will be retried", 1},
		{zapcore.ErrorLevel, "job dead", 2},
		{zapcore.InfoLevel, "job done", 1}, // a retry begins anew
	} {
		require.Equal(t, want.level, lines[i].Level)
		require.Equal(t, want.message, lines[i].Message)
		fields := lines[i].ContextMap()
		require.Equal(t, "alpha-worker", fields["job_kind"])
		require.Equal(t, id.String(), fields["event_id"])
		require.EqualValues(t, want.attempt, fields["attempt"])
		require.Equal(t, "default", fields["queue"])
		require.Contains(t, fields, "job_id")
		require.Contains(t, fields, "duration")
		require.Equal(t, i < 2, fields["error"] == errBroken.Error())
	}
}

func TestLogTellsSnoozesPanicsAndCancelsApart(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(func(_ context.Context, job *river.Job[alphaArgs]) error {
		switch job.Args.MessageID {
		case "panic":
			panic("bad\x00panic")
		case "cancel":
			return fmt.Errorf("not\x00now: %w", river.JobCancel(errBroken))
		}
		return river.JobSnooze(time.Hour)
	}))
	core, logs := observer.New(zapcore.InfoLevel)
	var err error
	b.client, err = eventlog.NewClient(eventlog.ClientConfig{
		Pool: b.pool, Plan: b.plan, Log: zap.New(core), Backoff: []time.Duration{time.Hour},
	})
	require.NoError(t, err)
	want := map[string]struct {
		level          zapcore.Level
		message, state string
	}{
		"snooze": {zapcore.InfoLevel, "job snoozed", "scheduled"},
		"panic":  {zapcore.WarnLevel, "job failed, will be retried", "retryable"},
		"cancel": {zapcore.ErrorLevel, "job dead", "cancelled"},
	}
	ids := make(map[string]string)
	for name := range want {
		ids[b.emit(t, name).String()] = name
	}
	drain(t, b.bridge)
	b.start(t)
	eventually(t, "all three ended", func() bool {
		return count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE state IN ('available', 'running')") == 0
	})
	lines := logs.FilterLoggerName("jobs").All()
	require.Len(t, lines, len(want))
	for _, line := range lines {
		id, _ := line.ContextMap()["event_id"].(string)
		require.Equal(t, want[ids[id]].level, line.Level, ids[id])
		require.Equal(t, want[ids[id]].message, line.Message, ids[id])
		require.Equal(t, want[ids[id]].state, string(b.job(t, uuid.MustParse(id), "alpha-worker").State), ids[id])
		require.NotContains(t, line.ContextMap()["error"], "\x00")
	}
}

// Dead letters are kept for ever, and logs go wherever logs go.
func TestPersonalDataStaysOutOfErrorsAndLogs(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(func(_ context.Context, job *river.Job[alphaArgs]) error {
		err := fmt.Errorf("send to ada@example.com, +55 11 99999-0000, cpf 123.456.789-09: %w", errBroken)
		if job.Args.MessageID == "panic" {
			panic(err)
		}
		return err
	}))
	core, logs := observer.New(zapcore.InfoLevel)
	var err error
	b.client, err = eventlog.NewClient(eventlog.ClientConfig{Pool: b.pool, Plan: b.plan, Log: zap.New(core)})
	require.NoError(t, err)
	exec(t, b.pool, "UPDATE event_consumers SET max_attempts = 1")
	for _, message := range []string{"error", "panic"} {
		id := b.emit(t, message)
		drain(t, b.bridge)
		if message == "error" {
			b.start(t)
		}
		e := b.awaitStatus(t, id, "dead")
		require.Equal(t, "alpha-worker: send to [email], [phone], cpf [cpf]: the other side is broken", *e.LastError)
	}
	require.Equal(t, 2, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE state = 'discarded' AND errors[1]::text LIKE '%[cpf]%'"))
	require.Zero(t, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE errors[1]::text ~ 'ada@|99999|456'"))
	for _, line := range logs.All() {
		require.NotRegexp(t, `ada@|99999|456\.`, fmt.Sprint(line.ContextMap()))
	}
}
