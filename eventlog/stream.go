package eventlog

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/zap"

	"afluente/db"
)

const (
	// streamChannel is where a bridge names the events that it has just fanned
	// out. Notifications come in the order of the commits, the same one to all.
	streamChannel = "event_stream"

	// streamRecord is the size of one event in a notification: organization,
	// id, and time of creation in microseconds.
	streamRecord = 16 + 16 + 8
	// streamRecords is how many go into one: PostgreSQL takes less than 8000 bytes.
	streamRecords = 140

	// streamLoads bounds the events of one query, and so its memory.
	streamLoads = 100

	// streamMemory is how many events a process remembers, so that a reader who
	// comes back goes on exactly where he was.
	streamMemory = 10_000
	// streamBuffer is how many events a reader may be behind before he is dropped.
	streamBuffer = 256
	// streamReplay is how many events a reader who comes back may have missed
	// when this process does not remember him.
	streamReplay = 1000
	// streamOverlap is how far before a reader's last event it then looks:
	// an event's time is that of its transaction's begin, not of its commit.
	streamOverlap = time.Minute

	// streamSilence is how long the connection may be silent before it is tested.
	streamSilence = 30 * time.Second
)

// streamKey names an event.
type streamKey struct {
	organizationID uuid.UUID
	id             uuid.UUID
	createdAt      time.Time
}

// encodeStream returns the notifications for events.
func encodeStream(events []db.ClaimEventsRow) []string {
	var payloads []string
	var record []byte
	flush := func() {
		payloads = append(payloads, base64.RawURLEncoding.EncodeToString(record))
		record = record[:0]
	}
	for _, event := range events {
		record = append(record, event.OrganizationID[:]...)
		record = append(record, event.ID[:]...)
		record = binary.BigEndian.AppendUint64(record, uint64(event.CreatedAt.UnixMicro()))
		if len(record) == streamRecords*streamRecord {
			flush()
		}
	}
	if len(record) > 0 {
		flush()
	}
	return payloads
}

// decodeStream returns the events in a notification, none where it was made by
// somebody else.
func decodeStream(payload string) []streamKey {
	records, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil || len(records)%streamRecord != 0 {
		return nil
	}
	var keys []streamKey
	for ; len(records) > 0; records = records[streamRecord:] {
		keys = append(keys, streamKey{
			organizationID: uuid.UUID(records[:16]),
			id:             uuid.UUID(records[16:32]),
			createdAt:      time.UnixMicro(int64(binary.BigEndian.Uint64(records[32:]))).UTC(),
		})
	}
	return keys
}

// Stream shows events to readers as they are fanned out, for screens: it is no
// consumer, has no acknowledgement, and drops who does not keep up. One
// connection serves all readers of a process. Make it with [NewStream]; its
// methods may be called from several goroutines.
type Stream struct {
	pool    *pgxpool.Pool
	queries *db.Queries
	log     *zap.Logger

	mu        sync.Mutex
	listening bool
	readers   map[*Reader]struct{}
	memory    []streamKey // in the order of the commits
	forgotten int         // how many stood before the first of memory
	position  map[uuid.UUID]int
}

// NewStream returns a stream that shows nothing until it runs.
func NewStream(pool *pgxpool.Pool, log *zap.Logger) *Stream {
	return &Stream{
		pool:     pool,
		queries:  db.New(pool),
		log:      log.Named("stream"),
		readers:  make(map[*Reader]struct{}),
		position: make(map[uuid.UUID]int),
	}
}

// Interest is what a reader wants to see.
type Interest struct {
	// OrganizationID is whose events; uuid.Nil for all organizations'.
	OrganizationID uuid.UUID
	// Types are exact event types, or "entity.*"; none means all.
	Types []string
}

func (i Interest) wants(organizationID uuid.UUID) bool {
	return i.OrganizationID == uuid.Nil || i.OrganizationID == organizationID
}

func (i Interest) wantsType(eventType string) bool {
	entity, _, _ := strings.Cut(eventType, ".")
	for _, want := range i.Types {
		if want == eventType || want == entity+".*" {
			return true
		}
	}
	return len(i.Types) == 0
}

var interestRE = regexp.MustCompile(`^[a-z][a-z0-9_]*\.([a-z][a-z0-9_]*|\*)$`)

// ErrInterest is returned by [Stream.Subscribe] for a type that is neither an
// event type nor "entity.*".
var ErrInterest = errors.New("not an event type such as lead.won or lead.*")

// ErrStreamLost is returned by [Reader.Next] for a reader who did not keep up,
// or whose connection to the database was lost, and by [Stream.Subscribe] while
// it is. He may subscribe again with the last event that he has seen.
var ErrStreamLost = errors.New("stream lost")

// Reader gets the events of one subscription. It is for one goroutine.
type Reader struct {
	stream   *Stream
	interest Interest
	live     chan Loaded // closed when the reader is dropped
	replay   []streamKey // that came before the live ones and are still to be loaded
	ready    []Loaded    // loaded, to be given out before the live ones
	seen     map[uuid.UUID]bool
	reset    bool
}

// Subscribe returns a reader of the events from now on, to be closed. With the
// id of the last event that he has seen he gets those in between first: exactly
// them while this process remembers that event, else perhaps some of the minute
// before it again. Where that is impossible, because he has missed too much or
// the event is gone or another organization's, [Reader.Reset] says so.
func (s *Stream) Subscribe(ctx context.Context, interest Interest, last uuid.UUID) (*Reader, error) {
	for _, t := range interest.Types {
		if !interestRE.MatchString(t) {
			return nil, fmt.Errorf("subscribe to %q: %w", t, ErrInterest)
		}
	}
	r := &Reader{stream: s, interest: interest, live: make(chan Loaded, streamBuffer)}
	s.mu.Lock()
	if !s.listening {
		s.mu.Unlock()
		return nil, ErrStreamLost
	}
	s.readers[r] = struct{}{}
	at, remembered := s.position[last]
	remembered = remembered && interest.wants(s.memory[at-s.forgotten].organizationID)
	if remembered {
		for _, key := range s.memory[at-s.forgotten+1:] {
			if interest.wants(key.organizationID) {
				r.replay = append(r.replay, key)
			}
		}
	}
	s.mu.Unlock()
	if remembered || last == uuid.Nil {
		return r, nil
	}
	if err := r.readBack(ctx, last); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// readBack takes what the reader has missed from the database.
func (r *Reader) readBack(ctx context.Context, last uuid.UUID) error {
	var organizationID *uuid.UUID
	if r.interest.OrganizationID != uuid.Nil {
		organizationID = &r.interest.OrganizationID
	}
	at, err := r.stream.queries.GetStreamPosition(ctx, last, organizationID)
	if errors.Is(err, pgx.ErrNoRows) {
		r.reset = true
		return nil
	} else if err != nil {
		return fmt.Errorf("find event %s: %w", last, err)
	}
	rows, err := r.stream.queries.ListStreamEvents(ctx, db.ListStreamEventsParams{
		Since: at.Add(-streamOverlap), ButNot: last, OrganizationID: organizationID, MaxEvents: streamReplay + 1,
	})
	if err != nil {
		return fmt.Errorf("list events since %s: %w", last, err)
	}
	if len(rows) > streamReplay {
		r.reset = true
		return nil
	}
	r.seen = make(map[uuid.UUID]bool, len(rows))
	for _, row := range rows {
		r.seen[row.ID] = true
		r.ready = append(r.ready, loaded(db.LoadEventsRow(row)))
	}
	return nil
}

// Reset says that there is a gap between the last event the reader has seen
// and those that come: he should read anew what he shows.
func (r *Reader) Reset() bool { return r.reset }

// Next waits for the next event and returns it, [ErrStreamLost], or the error
// of ctx.
func (r *Reader) Next(ctx context.Context) (Loaded, error) {
	for {
		for len(r.ready) > 0 {
			next := r.ready[0]
			r.ready = r.ready[1:]
			if r.interest.wantsType(next.Type) {
				return next, nil
			}
		}
		if len(r.replay) > 0 {
			batch := r.replay[:min(len(r.replay), streamLoads)]
			found, err := r.stream.load(ctx, batch)
			if err != nil {
				return Loaded{}, err
			}
			r.replay = r.replay[len(batch):]
			r.ready = found
			continue
		}
		select {
		case next, ok := <-r.live:
			switch {
			case !ok:
				return Loaded{}, ErrStreamLost
			case !r.seen[next.ID]:
				return next, nil
			}
		case <-ctx.Done():
			return Loaded{}, ctx.Err()
		}
	}
}

// Close ends the subscription.
func (r *Reader) Close() {
	r.stream.mu.Lock()
	defer r.stream.mu.Unlock()
	delete(r.stream.readers, r)
}

// Run feeds the readers until ctx ends, then returns nil. When the connection
// is lost it drops all readers and connects again.
func (s *Stream) Run(ctx context.Context) error {
	errs := retryDelay{}
	for ctx.Err() == nil {
		err := s.listenOnce(ctx, func() { errs = retryDelay{} })
		s.dropAll()
		if ctx.Err() == nil {
			wait := errs.next()
			s.log.Warn("listening lost, readers dropped", zap.Error(err), zap.Duration("delay", wait))
			sleep(ctx, wait, nil)
		}
	}
	return nil
}

func (s *Stream) listenOnce(ctx context.Context, connected func()) (err error) {
	pooled, err := s.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	conn := pooled.Hijack()
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if _, err := conn.Exec(ctx, "LISTEN "+streamChannel); err != nil { //nolint:forbidigo // sqlc does not know LISTEN
		return fmt.Errorf("listen: %w", err)
	}
	connected()
	s.mu.Lock()
	s.listening = true
	s.mu.Unlock()
	for {
		waiting, cancel := context.WithTimeout(ctx, streamSilence)
		notification, err := conn.WaitForNotification(waiting)
		cancel()
		switch {
		case err == nil:
			if err := s.dispatch(ctx, notification.Payload); err != nil {
				return err
			}
		case ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded):
			if err := conn.Ping(ctx); err != nil {
				return fmt.Errorf("ping: %w", err)
			}
		default:
			return fmt.Errorf("wait for notification: %w", err)
		}
	}
}

// dispatch remembers the events of a notification and gives them to those who
// were reading when it came; others find them in the memory.
func (s *Stream) dispatch(ctx context.Context, payload string) error {
	keys := decodeStream(payload)
	s.mu.Lock()
	var wanted []streamKey
	readers := make(map[uuid.UUID][]*Reader)
	for _, key := range keys {
		s.remember(key)
		if _, ok := readers[key.organizationID]; !ok {
			readers[key.organizationID] = nil
			for r := range s.readers {
				if r.interest.wants(key.organizationID) {
					readers[key.organizationID] = append(readers[key.organizationID], r)
				}
			}
		}
		if len(readers[key.organizationID]) > 0 {
			wanted = append(wanted, key)
		}
	}
	s.mu.Unlock()

	for ; len(wanted) > 0; wanted = wanted[min(len(wanted), streamLoads):] {
		events, err := s.load(ctx, wanted[:min(len(wanted), streamLoads)])
		if err != nil {
			return err
		}
		s.mu.Lock()
		for _, event := range events {
			for _, r := range readers[event.OrganizationID] {
				s.give(r, event)
			}
		}
		s.mu.Unlock()
	}
	return nil
}

// remember keeps a key at the end of the memory. The caller holds the lock.
func (s *Stream) remember(key streamKey) {
	s.position[key.id] = s.forgotten + len(s.memory)
	s.memory = append(s.memory, key)
	if len(s.memory) < 2*streamMemory {
		return
	}
	for _, old := range s.memory[:streamMemory] {
		delete(s.position, old.id)
	}
	s.memory = append([]streamKey(nil), s.memory[streamMemory:]...)
	s.forgotten += streamMemory
}

// give hands an event to a reader who still reads, or drops him when he does
// not keep up. The caller holds the lock.
func (s *Stream) give(r *Reader, event Loaded) {
	if _, reads := s.readers[r]; !reads || !r.interest.wantsType(event.Type) {
		return
	}
	select {
	case r.live <- event:
	default:
		delete(s.readers, r)
		close(r.live)
	}
}

func (s *Stream) dropAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r := range s.readers {
		close(r.live)
	}
	clear(s.readers)
	clear(s.position)
	s.memory, s.forgotten, s.listening = nil, 0, false
}

// load returns the events with the keys, in their order, but those that are
// gone meanwhile.
func (s *Stream) load(ctx context.Context, keys []streamKey) ([]Loaded, error) {
	ids, createdAts := make([]uuid.UUID, len(keys)), make([]time.Time, len(keys))
	order := make(map[uuid.UUID]int, len(keys))
	for i, key := range keys {
		ids[i], createdAts[i], order[key.id] = key.id, key.createdAt, i
	}
	rows, err := s.queries.LoadEvents(ctx, ids, createdAts)
	if err != nil {
		return nil, fmt.Errorf("load events: %w", err)
	}
	events := make([]Loaded, len(rows))
	for i, row := range rows {
		events[i] = loaded(row)
	}
	slices.SortFunc(events, func(a, b Loaded) int { return cmp.Compare(order[a.ID], order[b.ID]) })
	return events, nil
}
