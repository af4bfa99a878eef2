package observe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/getsentry/sentry-go"
	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"afluente/eventlog"
)

// sentryFlush is how long an end of the program waits for what is on its way to
// Sentry.
const sentryFlush = 2 * time.Second

// NewSentry returns a hub that sends to a DSN, scrubbed. Flush it with
// [FlushSentry] at the end of the program.
func NewSentry(dsn string) (*sentry.Hub, error) {
	client, err := sentry.NewClient(sentry.ClientOptions{
		Dsn:        dsn,
		BeforeSend: func(event *sentry.Event, _ *sentry.EventHint) *sentry.Event { return scrubEvent(event) },
	})
	if err != nil {
		return nil, errors.New("make sentry client: the DSN is not one") // the error would show it
	}
	return sentry.NewHub(client, sentry.NewScope()), nil
}

// FlushSentry sends what is still on its way, for up to 2 s.
func FlushSentry(hub *sentry.Hub) { hub.Flush(sentryFlush) }

// Sentry is a River middleware that sends what goes wrong in jobs to Sentry: a
// failed attempt as a warning, a dead job as an error, with the event and the
// job as context.
type Sentry struct {
	river.MiddlewareDefaults

	Hub *sentry.Hub
}

// eventMetadata is what the observers read of a job's metadata.
type eventMetadata struct {
	EventID   uuid.UUID `json:"event_id"`
	RequestID string    `json:"request_id"`
	TraceID   string    `json:"trace_id"`
	SpanID    string    `json:"span_id"`
}

func readMetadata(job *rivertype.JobRow) (metadata eventMetadata) {
	_ = json.Unmarshal(job.Metadata, &metadata) // not an event's, then
	return metadata
}

// organizationOf is in the second tag of an event's job.
func organizationOf(job *rivertype.JobRow) string {
	if eventlog.EventType(job) == "" || len(job.Tags) < 2 {
		return ""
	}
	return job.Tags[1]
}

// Work implements River's WorkerMiddleware.
func (s *Sentry) Work(ctx context.Context, job *rivertype.JobRow, doInner func(context.Context) error) (err error) {
	hub := s.Hub.Clone()
	metadata, eventType := readMetadata(job), eventlog.EventType(job)
	hub.ConfigureScope(func(scope *sentry.Scope) {
		scope.SetTags(map[string]string{"worker": job.Kind, "queue": job.Queue})
		scope.SetContext("job", sentry.Context{"id": job.ID, "attempt": job.Attempt, "max_attempts": job.MaxAttempts})
		if eventType != "" {
			scope.SetTag("event_type", eventType)
			scope.SetContext("event", sentry.Context{"id": metadata.EventID.String(), "type": eventType})
			scope.AddBreadcrumb(&sentry.Breadcrumb{
				Category: "event_log",
				Message:  "consume " + eventType,
				Data: map[string]any{
					"event_id": metadata.EventID.String(), "attempts": job.Attempt, "org_id": organizationOf(job),
				},
				Level:     sentry.LevelInfo,
				Timestamp: time.Now(),
			}, maxBreadcrumbs)
		}
		if metadata.RequestID != "" {
			scope.SetTag("request_id", metadata.RequestID)
		}
		if metadata.TraceID != "" {
			scope.SetTag("trace_id", metadata.TraceID)
		}
	})
	defer func() {
		if value := recover(); value != nil {
			hub.ConfigureScope(func(scope *sentry.Scope) { scope.SetLevel(sentry.LevelError) })
			hub.CaptureException(fmt.Errorf("panic: %v", value))
			panic(value)
		}
		level := sentry.LevelWarning
		switch eventlog.OutcomeOf(ctx, job, err) {
		case eventlog.Done, eventlog.Snoozed:
			return
		case eventlog.Dead:
			level = sentry.LevelError
		case eventlog.Retried:
		}
		hub.ConfigureScope(func(scope *sentry.Scope) { scope.SetLevel(level) })
		hub.CaptureException(err)
	}()
	return doInner(sentry.SetHubOnContext(ctx, hub))
}

const maxBreadcrumbs = 100

// scrubEvent takes personal data out of every text of an event. The machine's
// name and addresses in requests are nobody's business either.
func scrubEvent(event *sentry.Event) *sentry.Event {
	event.Message = eventlog.Scrub(event.Message)
	event.User = sentry.User{}
	event.Request = nil
	for i := range event.Exception {
		event.Exception[i].Value = eventlog.Scrub(event.Exception[i].Value)
	}
	for _, breadcrumb := range event.Breadcrumbs {
		breadcrumb.Message = eventlog.Scrub(breadcrumb.Message)
		scrubMap(breadcrumb.Data)
	}
	for key, value := range event.Tags {
		event.Tags[key] = eventlog.Scrub(value)
	}
	for _, data := range event.Contexts {
		scrubMap(data)
	}
	return event
}

func scrubMap[M ~map[string]any](data M) {
	for key, value := range data {
		data[key] = scrubValue(value)
	}
}

func scrubValue(value any) any {
	switch value := value.(type) {
	case string:
		return eventlog.Scrub(value)
	case error:
		return eventlog.Scrub(value.Error())
	case map[string]any:
		scrubMap(value)
	case []any:
		for i := range value {
			value[i] = scrubValue(value[i])
		}
	case []string:
		for i := range value {
			value[i] = eventlog.Scrub(value[i])
		}
	case fmt.Stringer:
		return eventlog.Scrub(value.String())
	}
	return value
}
