package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// maxErrorText bounds what one attempt may add to a job's row, in bytes.
const maxErrorText = 8 << 10

// runAgainAfter is how long a cron's job waits before it looks again whether the
// one before it has ended.
const runAgainAfter = time.Second

// guard is the outermost middleware around every job. It makes the args of
// deferred jobs possible, completes those of lanes, counts and logs each attempt,
// and cleans what River stores of its error. Above all of NUL: River 0.51 finishes
// jobs in batches, jsonb refuses NUL, and one such text fails its whole batch for
// ever.
type guard struct {
	river.MiddlewareDefaults

	events    *Events
	log       *zap.Logger
	telemetry *Telemetry
	lanes     *laneCompleter
}

// Work implements River's WorkerMiddleware.
func (g *guard) Work(ctx context.Context, job *rivertype.JobRow, doInner func(context.Context) error) (err error) {
	start := time.Now()
	var metadata jobMetadata
	defer func() {
		// River stores a panic with its stack, so it goes on, cleaned.
		if value := recover(); value != nil {
			text := cleanText(fmt.Sprint(value))
			g.end(ctx, job, metadata, start, errors.New("panic: "+text))
			panic(text)
		}
		err = cleanError(err)
		g.end(ctx, job, metadata, start, err)
	}()

	// A job without an event may use the same keys for something else.
	if err := json.Unmarshal(job.Metadata, &metadata); err != nil && metadata.Deferred {
		return fmt.Errorf("read metadata of job %d: %w", job.ID, err)
	}
	if metadata.Cron != "" {
		tick, _ := TickOf(job)
		if err := g.beginRun(ctx, job); err != nil {
			return err
		}
		g.telemetry.started(ctx, job, tick)
	}
	correlation := Correlation{RequestID: metadata.RequestID, TraceID: metadata.TraceID, CausationID: metadata.EventID}
	if metadata.EventID == uuid.Nil {
		correlation.CausationID = metadata.CausationID
	}
	ctx = WithCorrelation(ctx, correlation)
	if metadata.Deferred {
		r, err := g.events.load(ctx, job)
		if errors.Is(err, ErrNoEvent) {
			return river.JobCancel(err)
		} else if err != nil {
			return err
		}
		ctx = context.WithValue(ctx, deferredKey{}, r)
	}
	if err := doInner(ctx); err != nil {
		return err
	}
	if metadata.Lane != "" {
		if err := g.lanes.complete(ctx, job); err != nil {
			g.log.Debug("job of a lane is left to River", zap.Error(err))
		}
	}
	return nil
}

// beginRun makes a job the one that runs for its cron, or puts it off while
// another one does.
func (g *guard) beginRun(ctx context.Context, job *rivertype.JobRow) error {
	may, err := g.events.queries.BeginCronRun(ctx, job.Kind, &job.ID)
	if err != nil {
		return fmt.Errorf("begin run of cron %s: %w", job.Kind, err)
	}
	if !may {
		return river.JobSnooze(runAgainAfter)
	}
	return nil
}

// Outcome is how an attempt at a job ended.
type Outcome int

// The outcomes of an attempt.
const (
	Done    Outcome = iota
	Snoozed         // put off, by the worker itself or by a stop
	Retried         // failed, and is tried again
	Dead            // failed for good
)

// OutcomeOf returns how an attempt ended with err, which may be nil.
func OutcomeOf(ctx context.Context, job *rivertype.JobRow, err error) Outcome {
	var snooze *rivertype.JobSnoozeError
	switch {
	case err == nil:
		return Done
	case errors.As(err, &snooze):
		return Snoozed
	case errors.Is(err, &rivertype.JobCancelError{}), errors.Is(context.Cause(ctx), rivertype.ErrJobCancelledRemotely):
		return Dead
	case errors.Is(err, context.Canceled) && errors.Is(ctx.Err(), context.Canceled): // River hands it back, uncounted
		return Snoozed
	case job.Attempt >= job.MaxAttempts:
		return Dead
	default:
		return Retried
	}
}

// end counts and logs an attempt.
func (g *guard) end(ctx context.Context, job *rivertype.JobRow, metadata jobMetadata, start time.Time, err error) {
	level, message := zapcore.InfoLevel, "job done"
	outcome := OutcomeOf(ctx, job, err)
	switch outcome {
	case Done:
	case Snoozed:
		message = "job snoozed"
	case Retried:
		level, message = zapcore.WarnLevel, "job failed, will be retried"
	case Dead:
		level, message = zapcore.ErrorLevel, "job dead"
	}
	if outcome != Snoozed {
		g.telemetry.worked(ctx, job, time.Since(start), outcome != Done)
	}
	if entry := g.log.Check(level, message); entry != nil {
		fields := []zap.Field{
			zap.Int64("job_id", job.ID),
			zap.String("job_kind", job.Kind),
			zap.String("queue", job.Queue),
			zap.Int("attempt", job.Attempt),
			zap.Duration("duration", time.Since(start)),
		}
		if metadata.EventID != uuid.Nil {
			fields = append(fields, zap.Stringer("event_id", metadata.EventID))
		}
		if metadata.RequestID != "" {
			fields = append(fields, zap.String("request_id", metadata.RequestID))
		}
		if err != nil {
			fields = append(fields, zap.Error(err))
		}
		entry.Write(fields...)
	}
}

// cleanError returns err itself, or, where its text cannot be stored as it is,
// an error with clean text that still unwraps to err, so that a snooze or a
// cancel stays one.
func cleanError(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	clean := cleanText(text)
	if clean == text {
		return err
	}
	return &cleanedError{text: clean, err: err}
}

type cleanedError struct {
	text string
	err  error
}

func (e *cleanedError) Error() string { return e.text }
func (e *cleanedError) Unwrap() error { return e.err }

// cleanText makes NUL visible, cuts what is too long and takes personal data
// out: dead letters are kept for ever, and nobody would look for it there.
func cleanText(text string) string {
	if len(text) > maxErrorText {
		text = text[:maxErrorText] + "… (cut)"
	}
	return Scrub(strings.ReplaceAll(text, "\x00", `\0`))
}
