package eventlog

import (
	"testing"
	"time"

	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
)

func TestBackoffFollowsTheSchedule(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	policy := &retryPolicy{delays: Backoff(), rescueAfter: time.Minute, now: func() time.Time { return now }}
	for attempt, want := range []time.Duration{
		30 * time.Second, // attempt 0 does not occur
		30 * time.Second, time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute,
		30 * time.Minute, time.Hour, 2 * time.Hour, 2 * time.Hour, 2 * time.Hour,
	} {
		least, most := time.Duration(1<<62), time.Duration(0)
		for range 1000 {
			delay := policy.NextRetry(&rivertype.JobRow{Attempt: attempt, AttemptedAt: &now}).Sub(now)
			least, most = min(least, delay), max(most, delay)
		}
		require.GreaterOrEqual(t, least, want, attempt)
		require.LessOrEqual(t, most, want+want*3/10, attempt)
		require.Greater(t, most-least, want/5, "attempt %d has jitter", attempt)
	}
}

func TestJobOfAKilledProcessIsRetriedAtOnce(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	policy := &retryPolicy{delays: Backoff(), rescueAfter: time.Minute, now: func() time.Time { return now }}
	for running, rescued := range map[time.Duration]bool{59 * time.Second: false, time.Minute: true, time.Hour: true} {
		attemptedAt := now.Add(-running)
		next := policy.NextRetry(&rivertype.JobRow{Attempt: 1, AttemptedAt: &attemptedAt})
		require.Equal(t, rescued, next.Equal(now), running)
	}
}
