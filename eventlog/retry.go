package eventlog

import (
	"math/rand/v2"
	"time"

	"github.com/riverqueue/river/rivertype"
)

// maxJitter is the greatest share of a delay that chance adds to it.
const maxJitter = 0.3

// Backoff is how long a job waits after a failed attempt, with up to 30 % more
// by chance. Eight attempts wait seven times, 1 h 48 min 30 s at least in all;
// the last delay serves kinds that declare more attempts.
//
//	failed attempt  1     2    3    4    5     6     7    8 and later
//	delay           30 s  1 m  2 m  5 m  10 m  30 m  1 h  2 h
func Backoff() []time.Duration {
	return []time.Duration{
		30 * time.Second, time.Minute, 2 * time.Minute, 5 * time.Minute,
		10 * time.Minute, 30 * time.Minute, time.Hour, 2 * time.Hour,
	}
}

// retryPolicy schedules the next attempt of a failed job.
type retryPolicy struct {
	delays []time.Duration
	// rescueAfter is the client's RescueStuckJobsAfter.
	rescueAfter time.Duration
	now         func() time.Time
}

// NextRetry implements River's ClientRetryPolicy.
func (p *retryPolicy) NextRetry(job *rivertype.JobRow) time.Time {
	now := p.now()
	// The rescuer asks too, for a job whose process died. Nothing says that
	// the job is at fault, and it has waited long enough.
	if job.AttemptedAt != nil && now.Sub(*job.AttemptedAt) >= p.rescueAfter {
		return now
	}
	delay := p.delays[min(max(job.Attempt, 1), len(p.delays))-1]
	return now.Add(Jitter(delay))
}

// Jitter returns a delay with up to 30 % more by chance.
func Jitter(delay time.Duration) time.Duration {
	return delay + time.Duration(rand.Float64()*maxJitter*float64(delay))
}
