package eventlog_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"afluente/db/dbtest"
	"afluente/eventlog"
)

// newStream runs a stream on the bus's database until the test ends.
func newStream(t *testing.T, b *bus) *eventlog.Stream {
	t.Helper()
	stream := eventlog.NewStream(b.pool, zap.NewNop())
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running errgroup.Group
	running.Go(func() error { return stream.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		require.NoError(t, running.Wait())
	})
	return stream
}

// subscribe retries while the stream is not connected.
func subscribe(t *testing.T, stream *eventlog.Stream, interest eventlog.Interest, last uuid.UUID) (reader *eventlog.Reader) {
	t.Helper()
	eventually(t, "stream connected", func() bool {
		var err error
		reader, err = stream.Subscribe(t.Context(), interest, last)
		if !errors.Is(err, eventlog.ErrStreamLost) {
			require.NoError(t, err)
		}
		return err == nil
	})
	t.Cleanup(reader.Close)
	return reader
}

// read returns the ids of the next n events.
func read(t *testing.T, reader *eventlog.Reader, n int) []uuid.UUID {
	t.Helper()
	ids := make([]uuid.UUID, n)
	for i := range ids {
		event, err := reader.Next(t.Context())
		require.NoError(t, err)
		ids[i] = event.ID
	}
	return ids
}

// show emits n events of a type and fans them out.
func (b *bus) show(t *testing.T, eventType string, n int) []uuid.UUID {
	t.Helper()
	ids := make([]uuid.UUID, n)
	for i := range ids {
		ids[i] = b.emitRaw(t, eventType, fmt.Sprintf(`{"n": %d}`, i))
	}
	drain(t, b.bridge)
	return ids
}

func TestReaderSeesItsOrganizationsEventsOnly(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	other := joinBus(t, b.pool, newOrganization(t, b.pool))
	stream := newStream(t, b)
	mine := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, uuid.Nil)
	theirs := subscribe(t, stream, eventlog.Interest{OrganizationID: other.organization}, uuid.Nil)
	everybodys := subscribe(t, stream, eventlog.Interest{}, uuid.Nil)

	first := b.show(t, "lead.won", 2)
	second := other.show(t, "lead.won", 2)
	third := b.show(t, "lead.won", 1)
	require.Equal(t, slices.Concat(first, third), read(t, mine, 3))
	require.Equal(t, second, read(t, theirs, 2))
	require.Equal(t, slices.Concat(first, second, third), read(t, everybodys, 5))

	// Nor does an id of another organization's event lead to its events.
	stranger := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, second[0])
	require.True(t, stranger.Reset())
	last := b.show(t, "lead.won", 1)
	require.Equal(t, last, read(t, stranger, 1))
}

func TestReaderSeesTheTypesItAsksFor(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	stream := newStream(t, b)
	reader := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization, Types: []string{"lead.*", "message.sent"}}, uuid.Nil)
	lead := b.show(t, "lead.won", 1)
	b.show(t, "lead_activity.recorded", 1)
	b.show(t, "message.queued", 1)
	sent := b.show(t, "message.sent", 1)
	require.Equal(t, slices.Concat(lead, sent), read(t, reader, 2))

	for _, bad := range []string{"", "*", "lead", "lead.", "lead.w*", "Lead.won", "*.won", "lead.*.x"} {
		_, err := stream.Subscribe(t.Context(), eventlog.Interest{Types: []string{bad}}, uuid.Nil)
		require.ErrorIs(t, err, eventlog.ErrInterest, bad)
	}
}

// In the process that he read from, a reader goes on exactly where he was.
func TestReaderGoesOnWhereItWas(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	stream := newStream(t, b)
	first := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, uuid.Nil)
	before := b.show(t, "lead.won", 300) // more than one notification, and than one load
	require.Equal(t, before[:250], read(t, first, 250))
	first.Close()
	missed := b.show(t, "lead.won", 5)

	again := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, before[249])
	require.False(t, again.Reset())
	live := b.show(t, "lead.won", 3)
	require.Equal(t, slices.Concat(before[250:], missed, live), read(t, again, 58))
}

// Another process reads from the database what it cannot remember: nothing is
// missing, and nothing comes twice where the replay meets what is live.
func TestReaderGoesOnInAnotherProcess(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	old := b.show(t, "lead.won", 3)
	exec(t, b.pool, "UPDATE event_log SET created_at = created_at - interval '2 minutes'")
	seen := b.show(t, "lead.won", 1)
	missed := b.show(t, "lead.won", 4)
	pending := b.emitRaw(t, "lead.won", `{}`)

	stream := newStream(t, b)
	reader := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, seen[0])
	require.False(t, reader.Reset())
	drain(t, b.bridge)
	live := b.show(t, "lead.won", 2)
	require.Equal(t, slices.Concat(missed, []uuid.UUID{pending}, live), read(t, reader, 7))
	require.NotContains(t, missed, old[0])
}

// beforeQuery calls f when a query that holds a text begins.
type beforeQuery struct {
	text string
	f    func()
}

func (q *beforeQuery) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, q.text) {
		q.f()
	}
	return ctx
}

func (*beforeQuery) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// An event that is fanned out while the reader's past is read comes both ways,
// and is shown once.
func TestReplayMeetsWhatIsLiveWithoutADouble(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	seen := b.show(t, "lead.won", 1)
	between := b.emitRaw(t, "lead.won", `{}`)
	config := b.pool.Config()
	config.ConnConfig.Tracer = &beforeQuery{text: "name: ListStreamEvents", f: func() { drain(t, b.bridge) }}
	traced := *b
	traced.pool = dbtest.Pool(t, config)
	reader := subscribe(t, newStream(t, &traced), eventlog.Interest{OrganizationID: b.organization}, seen[0])
	after := b.show(t, "lead.won", 1)
	require.Equal(t, append([]uuid.UUID{between}, after...), read(t, reader, 2))
}

func TestReaderWhoMissedTooMuchIsTold(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	seen := b.show(t, "lead.won", 1)
	exec(t, b.pool, "INSERT INTO event_log (organization_id, event_type, entity_kind, status) SELECT $1, 'lead.won', 'lead', 'done' FROM generate_series(1, 1001)", b.organization)
	stream := newStream(t, b)
	for name, last := range map[string]uuid.UUID{"too much": seen[0], "unknown": uuid.New()} {
		reader := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, last)
		require.True(t, reader.Reset(), name)
		require.Equal(t, b.show(t, "lead.won", 1), read(t, reader, 1), name)
	}
}

// Who does not read is dropped, and costs the others nothing.
func TestSlowReaderIsDropped(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	stream := newStream(t, b)
	slow := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, uuid.Nil)
	fast := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, uuid.Nil)
	var all, got []uuid.UUID
	for range 4 {
		batch := b.show(t, "lead.won", 100)
		all = append(all, batch...)
		got = append(got, read(t, fast, 100)...)
	}
	require.Equal(t, all, got)
	kept := 0
	for {
		event, err := slow.Next(t.Context())
		if err != nil {
			require.ErrorIs(t, err, eventlog.ErrStreamLost)
			break
		}
		require.Equal(t, all[kept], event.ID)
		kept++
	}
	require.Less(t, kept, 400)
	again := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, all[kept-1])
	require.Equal(t, all[kept:], read(t, again, 400-kept))
}

// When the connection is lost the readers are told, and miss nothing.
func TestLostConnectionLosesNoEvent(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	stream := newStream(t, b)
	reader := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, uuid.Nil)
	seen := b.show(t, "lead.won", 1)
	require.Equal(t, seen, read(t, reader, 1))
	exec(t, b.pool, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'LISTEN event_stream' AND datname = current_database()")
	_, err := reader.Next(t.Context())
	require.ErrorIs(t, err, eventlog.ErrStreamLost)
	missed := b.show(t, "lead.won", 2)

	again := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, seen[0])
	require.Equal(t, missed, read(t, again, 2))
}

func TestOneConnectionServesAllReaders(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	stream := newStream(t, b)
	readers := make([]*eventlog.Reader, 200)
	for i := range readers {
		readers[i] = subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, uuid.Nil)
	}
	ids := b.show(t, "lead.won", 3)
	for _, reader := range readers {
		require.Equal(t, ids, read(t, reader, 3))
	}
	require.Equal(t, 1, count(t, b.pool, "SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN event_stream' AND datname = current_database()"))
}

// Anybody may send a notification.
func TestStrangeNotificationIsPassedOver(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	stream := newStream(t, b)
	reader := subscribe(t, stream, eventlog.Interest{OrganizationID: b.organization}, uuid.Nil)
	for _, payload := range []string{"", "x", "????", "AAAA"} {
		exec(t, b.pool, "SELECT pg_notify('event_stream', $1)", payload)
	}
	require.Equal(t, b.show(t, "lead.won", 1), read(t, reader, 1))
}
