package bench

import (
	"context"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
)

const (
	// fillBatch is how many events are put behind a measurement at a time.
	fillBatch = 100_000
	// fillConns is how many connections do so.
	fillConns = 2
	// organizationsBehind is how many organizations they are of.
	organizationsBehind = 1000
)

// fillBehind inserts events that are done, the $1-th to the $2-th of $3, made from the
// beginning of the month until an hour ago, and for each tenth a completed job: River
// keeps those for a day, and event_log events for months. What is measured behind them
// is younger than an hour, by which it is found.
const fillBehind = `
WITH filled AS (
    INSERT INTO public.event_log
        (organization_id, event_type, entity_kind, entity_id, payload, metadata, consumers, consumed_by, attempts, status, created_at, updated_at)
    SELECT
        o.ids[1 + i % cardinality(o.ids)],
        (ARRAY['message.queued', 'message.received', 'message.sent', 'order.created'])[1 + i % 4],
        'message',
        gen_random_uuid(),
        jsonb_build_object('message_id', gen_random_uuid()),
        jsonb_build_object('request_id', gen_random_uuid(), 'source', 'bench', 'schema_version', 1, 'emitted_at', t.at),
        c.names, c.names, 1, 'done', t.at, t.at
    FROM generate_series($1::bigint, $2::bigint) AS i
    CROSS JOIN (SELECT array_agg(id) AS ids FROM public.organizations) AS o
    CROSS JOIN (SELECT array_agg(name ORDER BY name) AS names FROM public.event_consumers) AS c
    CROSS JOIN LATERAL (
        SELECT l.until - (l.until - date_trunc('month', l.until)) * (1 - i / $3::float8) AS at
        FROM (SELECT now() - interval '1 hour' AS until) AS l
    ) AS t
    RETURNING id, created_at, organization_id, consumers[1] AS consumer, seq
)
INSERT INTO river.river_job
    (args, attempt, attempted_at, attempted_by, created_at, finalized_at, kind, max_attempts, metadata, queue, scheduled_at, state, tags)
SELECT
    jsonb_build_object('message_id', gen_random_uuid()), 1, now(), '{bench}', now(), now(), consumer, 8,
    jsonb_build_object('event_id', id, 'event_created_at', created_at, 'consumer', consumer),
    'default', now(), 'completed', ARRAY['message-queued', organization_id::text, 'kind-message']
FROM filled
WHERE seq % 10 = 0`

// eventsOfNowDone asks whether all events are done that were not put behind.
const eventsOfNowDone = `SELECT NOT EXISTS (SELECT FROM public.event_log WHERE status <> 'done' AND created_at > now() - interval '50 min')`

// behind is emit to settle, with done events behind it.
func behind(name string, rows func(Config) int) func(context.Context, *bus) (figures, error) {
	return func(ctx context.Context, b *bus) (figures, error) {
		client, bridge, err := b.ours(ctx)
		if err != nil {
			return nil, err
		}
		if err := b.fill(ctx, rows(b.config)); err != nil {
			return nil, err
		}
		got := make(figures)
		err = working(ctx, client, func() error {
			return bridging(ctx, bridge, func() error {
				got[name], err = b.warmPass(ctx, eventsOfNowDone, func(events int) error { return b.emit(ctx, events) })
				return err
			})
		})
		return got, err
	}
}

// fill puts done events behind a measurement.
func (b *bus) fill(ctx context.Context, events int) error {
	const insertOrganizations = "INSERT INTO public.organizations (id) SELECT gen_random_uuid() FROM generate_series(1, $1)"
	if _, err := b.pool.Exec(ctx, insertOrganizations, organizationsBehind); err != nil {
		return fmt.Errorf("insert organizations: %w", err)
	}
	var filled atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range fillConns {
		g.Go(func() error {
			for {
				last := int(filled.Add(fillBatch))
				first := last - fillBatch + 1
				if first > events {
					return nil
				}
				if _, err := b.pool.Exec(ctx, fillBehind, first, min(last, events), events); err != nil {
					return fmt.Errorf("insert done events: %w", err)
				}
			}
		})
	}
	return g.Wait()
}
