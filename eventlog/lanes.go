package eventlog

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"golang.org/x/sync/semaphore"

	"afluente/db"
)

// A Death says what becomes of the events behind a dead one of the same key.
type Death string

const (
	// Blocks holds them up until an operator retries or discards the dead one.
	Blocks Death = "block"
	// Skips lets them go on.
	Skips Death = "skip"
)

// fieldEntityID is what a consumer is ordered by that goes by the event's entity.
const fieldEntityID = "entity_id"

// Ordered returns the consumer with its events of one key done one at a time, in
// the order in which they were emitted. The key is the value of a field of the
// payload, by its JSON name, or the event's entity with "entity_id". Keys of different
// organizations are different; events without one, or with an empty one, are in no order.
//
// The order is that in which the transactions emitted, where these did not run
// at the same time, and within a transaction that of its statements. A job that waits for its
// retry keeps those behind it back; dead says what a dead one does. One that is
// retried later goes before all that still wait. Keys are independent of each other, so the
// rate is that of many keys; of one key it is that of one job after the other.
//
// A consumer has either an order or a [Declaration.LimitedPerOrganization].
func (d Declaration) Ordered(field string, dead Death) Declaration {
	d.orderedBy, d.death = field, dead
	return d
}

// LimitedPerOrganization returns the consumer with at most limit jobs of an
// organization running at a time, over all processes. The others wait and keep
// nobody else's back.
func (d Declaration) LimitedPerOrganization(limit int) Declaration {
	d.limit = &limit
	return d
}

// checkLane returns what is wrong with the order or the limit.
func (d Declaration) checkLane() []error {
	var mistakes []error
	if d.orderedBy == "" && d.death == "" && d.limit == nil {
		return nil
	}
	if d.project == nil {
		mistakes = append(mistakes, errors.New("only a consumer has an order or a limit"))
	}
	if d.limit != nil && (*d.limit < 1 || *d.limit > 10_000) {
		mistakes = append(mistakes, fmt.Errorf("the limit %d for an organization is not from 1 to 10000", *d.limit))
	}
	if d.orderedBy == "" && d.death == "" {
		return mistakes
	}
	if d.limit != nil {
		mistakes = append(mistakes, errors.New("it has an order and a limit, of which it may have one"))
	}
	if d.orderedBy != fieldEntityID && !slices.Contains(d.fields, d.orderedBy) {
		mistakes = append(mistakes, fmt.Errorf("the events of %s have no field %q to be ordered by", d.eventType, d.orderedBy))
	}
	if d.death != Blocks && d.death != Skips {
		mistakes = append(mistakes, fmt.Errorf("what a dead job does is %q, neither %q nor %q", d.death, Blocks, Skips))
	}
	return mistakes
}

// lane says in a plan how a consumer's jobs wait for each other; empty where they do not.
func (d Declaration) lane() string {
	switch {
	case d.orderedBy != "":
		return fmt.Sprintf(", in order of %s (%s dead)", d.orderedBy, d.death)
	case d.limit != nil:
		return fmt.Sprintf(", %d of an organization", *d.limit)
	default:
		return ""
	}
}

// orderFields returns the fields by which some consumer is ordered, sorted.
func orderFields(registered []db.EventConsumer) []string {
	fields := []string{}
	for _, consumer := range registered {
		if consumer.OrderedBy != nil {
			fields = append(fields, *consumer.OrderedBy)
		}
	}
	slices.Sort(fields)
	return slices.Compact(fields)
}

// maxLane is the longest key, in bytes, that is a lane's name as it is.
const maxLane = 200

// laneOf returns the lane of an event's job, empty for none: the organization, and
// with it the key. fields are those of the event's order values.
func laneOf(consumer db.EventConsumer, event db.ClaimEventsRow, fields []string) string {
	if consumer.OrderedBy == nil {
		if consumer.MaxPerOrganization == nil {
			return ""
		}
		return event.OrganizationID.String()
	}
	i := slices.Index(fields, *consumer.OrderedBy)
	if i < 0 || event.OrderValues[i] == "" {
		return ""
	}
	key := event.OrderValues[i]
	if len(key) > maxLane {
		sum := sha256.Sum256([]byte(key))
		key = hex.EncodeToString(sum[:])
	}
	return event.OrganizationID.String() + "/" + key
}

// enterLanes locks the lanes of new jobs and makes those wait for which there is
// no room.
func enterLanes(ctx context.Context, queries *db.Queries, jobs []jobOfEvent) error {
	type lane struct{ consumer, name string }
	of := func(job jobOfEvent) lane { return lane{job.params.Args.Kind(), job.lane} }
	room := make(map[lane]int64)
	var consumers, lanes []string
	for _, job := range jobs {
		if job.lane == "" {
			continue
		}
		if _, ok := room[of(job)]; !ok {
			room[of(job)] = 0
			consumers, lanes = append(consumers, of(job).consumer), append(lanes, job.lane)
		}
	}
	if len(lanes) == 0 {
		return nil
	}
	if err := queries.UseJobIndexes(ctx); err != nil {
		return err
	}
	if err := queries.LockLanes(ctx, consumers, lanes); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	rooms, err := queries.ListLaneRooms(ctx, consumers, lanes)
	if err != nil {
		return fmt.Errorf("list room: %w", err)
	}
	for _, row := range rooms {
		room[lane{row.Consumer, row.Lane}] = row.Room
	}
	for _, job := range jobs {
		if job.lane == "" {
			continue
		}
		room[of(job)]--
		job.params.InsertOpts.Pending = room[of(job)] < 0
	}
	return nil
}

const (
	// completeConns is how many connections a process uses at a time to complete
	// jobs of lanes by itself.
	completeConns = 2
	// maxCompleting is how many jobs may be at it, or wait. When more end at a time,
	// River's next batch is large, and so it is near.
	maxCompleting = 8
	// completeRest is for how long they then are all left to River. A quarter of a
	// second, after which many keys soon are at it again, cost a seventh of their rate.
	completeRest = 2 * time.Second
	// completeTimeout bounds how long a job that has ended keeps its place for it.
	completeTimeout = time.Second
	// beginCompletion makes the server let go of the event and the lane when this
	// process freezes: all other jobs of the event would wait to be settled.
	beginCompletion = `BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '1s'`
)

// laneCompleter completes jobs of lanes as soon as they have ended, so that the
// next of their lane can go on. River keeps fewer than 100 results back for up
// to 250 ms (0.51), which a lane would wait each time.
type laneCompleter struct {
	pool       *pgxpool.Pool
	conns      *semaphore.Weighted
	completing atomic.Int32
	restUntil  atomic.Int64 // nanoseconds since 1970
}

func newLaneCompleter(pool *pgxpool.Pool) *laneCompleter {
	return &laneCompleter{pool: pool, conns: semaphore.NewWeighted(completeConns)}
}

// complete commits that a job, which runs in ctx, is completed. It leaves that to
// River where many jobs end at a time, and after an error, which it returns.
func (c *laneCompleter) complete(ctx context.Context, job *rivertype.JobRow) error {
	now := time.Now()
	if now.UnixNano() < c.restUntil.Load() {
		return nil
	}
	defer c.completing.Add(-1)
	if c.completing.Add(1) > maxCompleting {
		c.restUntil.Store(now.Add(completeRest).UnixNano())
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), completeTimeout)
	defer cancel()
	if err := c.conns.Acquire(ctx, 1); err != nil {
		return fmt.Errorf("complete job %d: %w", job.ID, err)
	}
	defer c.conns.Release(1)
	err := pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{BeginQuery: beginCompletion}, func(tx pgx.Tx) error {
		_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, &river.Job[encodedArgs]{JobRow: job})
		return err
	})
	if err != nil {
		return fmt.Errorf("complete job %d: %w", job.ID, err)
	}
	return nil
}
