package eventlog_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"afluente/eventlog"
)

// metadata returns an event's metadata without the time of its emission and
// the version of its schema.
func (b *bus) metadata(t *testing.T, id uuid.UUID) map[string]any {
	t.Helper()
	var metadata map[string]any
	require.NoError(t, json.Unmarshal(b.event(t, id).Metadata, &metadata))
	delete(metadata, "emitted_at")
	delete(metadata, "schema_version")
	return metadata
}

// A request is followed from its event through the job to what the job emits,
// in the bridge's own process and in one that the bridge knows nothing of.
func TestRequestIsFollowedThroughJobsToEvents(t *testing.T) {
	t.Parallel()
	for name, foreign := range map[string]bool{"own consumer": false, "consumer of another process": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			emitted := make(chan uuid.UUID, 2)
			var b *bus
			work := func(ctx context.Context, _ *river.Job[alphaArgs]) error {
				return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
					typed, err := eventlog.Emit(ctx, tx, b.queued("next"))
					if err != nil {
						return err
					}
					raw, err := eventlog.EmitRaw(ctx, tx, eventlog.RawEvent{
						Type: "a.b", OrganizationID: b.organization, Payload: []byte(`{}`), Metadata: []byte(`{"trace_id": "own", "x": 1}`),
					})
					emitted <- typed
					emitted <- raw
					return err
				})
			}
			b = newBus(t, alpha(work))
			bridge := b.bridge
			if foreign {
				bridge = joinBus(t, b.pool, b.organization).bridge
			}
			first := b.queued("m")
			first.Metadata = eventlog.Metadata{RequestID: "r-1", TraceID: "4bf92f3577b34da6a3ce929d0e0e4736"}
			var id uuid.UUID
			b.inTx(t, func(tx pgx.Tx) (err error) {
				id, err = eventlog.Emit(t.Context(), tx, first)
				return err
			})
			_, err := bridge.Step(t.Context())
			require.NoError(t, err)
			b.start(t)
			typed, raw := <-emitted, <-emitted
			b.awaitStatus(t, id, "done")
			want := map[string]any{"request_id": "r-1", "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "causation_id": id.String()}
			require.Equal(t, want, b.metadata(t, typed))
			want["trace_id"], want["x"] = "own", 1.0
			require.Equal(t, want, b.metadata(t, raw))
		})
	}
}

func TestEventsOfARequestAreMarked(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	ctx := eventlog.WithCorrelation(t.Context(), eventlog.Correlation{RequestID: "r"})
	var id uuid.UUID
	b.inTx(t, func(tx pgx.Tx) (err error) {
		id, err = eventlog.Emit(ctx, tx, b.queued("m"))
		return err
	})
	require.Equal(t, map[string]any{"request_id": "r"}, b.metadata(t, id))
}

// Whatever somebody put under these keys, it costs no event its jobs.
func TestOddRequestIDsStayBehind(t *testing.T) {
	t.Parallel()
	b := newBus(t, alpha(nil))
	for _, odd := range []string{`1`, `null`, `{"a": 1}`, `"` + strings.Repeat("x", 256) + `"`} {
		var id uuid.UUID
		b.inTx(t, func(tx pgx.Tx) (err error) {
			id, err = eventlog.EmitRaw(t.Context(), tx, eventlog.RawEvent{
				Type: "message.queued", OrganizationID: b.organization, Payload: []byte(`{"message_id": "m"}`),
				Metadata: []byte(`{"request_id": ` + odd + `}`),
			})
			return err
		})
		drain(t, b.bridge)
		require.Len(t, b.jobs(t, id), 1, odd)
	}
	require.Zero(t, count(t, b.pool, "SELECT count(*) FROM river.river_job WHERE metadata ? 'request_id'"))
}

// A job that stems from no event may have anything in its metadata.
func TestJobWithMetadataOfItsOwnRuns(t *testing.T) {
	t.Parallel()
	ran := make(chan struct{}, 1)
	b := newBus(t, eventlog.Job(&worker[alphaArgs]{work: func(ctx context.Context, _ *river.Job[alphaArgs]) error {
		if eventlog.CorrelationFrom(ctx) == (eventlog.Correlation{}) {
			ran <- struct{}{}
		}
		return nil
	}}))
	_, err := b.client.Insert(t.Context(), alphaArgs{}, &river.InsertOpts{Metadata: []byte(`{"event_id": 7, "request_id": [], "consumer": null}`)})
	require.NoError(t, err)
	b.start(t)
	<-ran
}
