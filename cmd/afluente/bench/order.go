package bench

import (
	"context"
	"encoding/binary"

	"github.com/google/uuid"

	"afluente/eventlog"
	"afluente/eventlog/event"
)

const (
	// manyKeys is how many conversations the events are of, in turn.
	manyKeys = 1000
	// oneKeyShare is how many times fewer events there are of a single key, whose
	// jobs run one after the other.
	oneKeyShare = 1500
)

// order works off events of some keys that were emitted before.
func order(name string, keys int, declare func(eventlog.Declaration) eventlog.Declaration) func(context.Context, *bus) (figures, error) {
	return func(ctx context.Context, b *bus) (figures, error) {
		for i, c := range b.consumers {
			b.consumers[i].declaration = declare(c.declaration)
		}
		jobsPerSecond, err := b.workBacklog(ctx, func() error {
			return b.emitEach(ctx, b.events, func(i int) eventlog.Event[event.MessageQueued] {
				e := newEvent(organization(), uuid.NewString())
				e.Payload.ConversationID = key(i % keys).String()
				return e
			})
		})
		return figures{name: jobsPerSecond}, err
	}
}

// ofOneKey runs order with as many events as a single key gets done in seconds.
func ofOneKey(ctx context.Context, b *bus) (figures, error) {
	b.events = max(b.events/oneKeyShare, 2)
	return order("one", 1, ordered)(ctx, b)
}

func ordered(d eventlog.Declaration) eventlog.Declaration {
	return d.Ordered("conversation_id", eventlog.Skips)
}

func unordered(d eventlog.Declaration) eventlog.Declaration { return d }

// key is the n-th conversation.
func key(n int) uuid.UUID {
	var id uuid.UUID
	binary.BigEndian.PutUint64(id[8:], uint64(n))
	return id
}
