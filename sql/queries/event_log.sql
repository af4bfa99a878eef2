-- name: EmitEvent :one
-- EmitEvent writes one event and returns its id, or the first event's id when
-- the idempotency key in the metadata was used before.
SELECT public.emit_event(
    @event_type::text, @entity_kind::text, sqlc.narg(entity_id)::uuid, @payload::jsonb,
    @metadata::jsonb, @organization_id::uuid, sqlc.narg(at)::timestamptz
)::uuid AS id;

-- name: EmitEvents :many
-- EmitEvents is EmitEvent for a JSON array of events. The ids are in its order.
SELECT public.emit_events(@events::jsonb)::uuid AS id;

-- name: PickDueEvents :many
-- PickDueEvents locks pending events that are due, in the order in which they
-- were emitted, passing over those that another bridge holds, and returns their
-- keys, and for which consumers they are dead, where an operator set a dead event
-- to pending. What bar_ordered_types bars is left out.
SELECT e.id, e.created_at, e.organization_id, e.event_type, e.dead_consumers
FROM public.event_log AS e
WHERE e.status = 'pending' AND coalesce(e.next_attempt_at, '-infinity') <= now()
    AND NOT ARRAY[e.event_type, '*'] && (SELECT public.bar_ordered_types())
ORDER BY coalesce(e.next_attempt_at, '-infinity'), e.seq NULLS FIRST
LIMIT @max_events
FOR UPDATE OF e SKIP LOCKED;

-- name: PickDueEventsInTurn :many
-- PickDueEventsInTurn is PickDueEvents for the next max_organizations that have
-- pending events, after one and but for some: at most max_each of each, and only
-- those made min_age ago. Without ordered, all that some consumer wants in order
-- is left out, and the lock on it is let alone. Order and range are such that only
-- event_log_pending_org_idx serves both: the planner takes a few organizations for
-- a third of all rows each, and would read every pending event for those of one.
WITH RECURSIVE turns AS (
    SELECT @after::uuid AS organization_id, 0 AS n
    UNION ALL
    SELECT (
        SELECT e.organization_id
        FROM public.event_log AS e
        WHERE e.status = 'pending' AND e.organization_id > t.organization_id
        ORDER BY e.organization_id, coalesce(e.next_attempt_at, '-infinity'), e.seq NULLS FIRST
        LIMIT 1
    ) AS organization_id, t.n + CASE WHEN t.organization_id = ANY (@but_not::uuid[]) THEN 0 ELSE 1 END AS n
    FROM turns AS t
    WHERE t.organization_id IS NOT NULL AND t.n < @max_organizations::integer
)
SELECT p.id, p.created_at, t.organization_id::uuid AS organization_id, p.event_type, p.dead_consumers
FROM turns AS t
CROSS JOIN LATERAL (
    SELECT e.id, e.created_at, e.event_type, e.dead_consumers
    FROM public.event_log AS e
    WHERE e.status = 'pending' AND e.organization_id >= t.organization_id AND e.organization_id <= t.organization_id
        AND coalesce(e.next_attempt_at, '-infinity') <= now() AND e.created_at <= now() - @min_age::interval
        AND NOT ARRAY[e.event_type, '*'] && CASE WHEN @ordered::boolean THEN (SELECT public.bar_ordered_types()) ELSE (
            SELECT coalesce(array_agg(u), '{}') FROM public.event_consumers AS c, unnest(c.event_types) AS u WHERE c.ordered_by IS NOT NULL
        ) END
    ORDER BY e.organization_id, coalesce(e.next_attempt_at, '-infinity'), e.seq NULLS FIRST
    LIMIT @max_each
    FOR UPDATE OF e SKIP LOCKED
) AS p
WHERE t.organization_id > @after::uuid AND t.organization_id <> ALL (@but_not::uuid[])
ORDER BY t.n, t.organization_id;

-- name: ClaimEvents :many
-- ClaimEvents marks picked events as fanned out to the consumers registered for
-- their types less those that consumed them already: the returned consumers are
-- the ones that still need a job. A payload comes along only for the types in
-- payload_types and up to max_payload bytes as stored; order_values are the values
-- of order_fields, in step, empty where there is none. The arrays of the events run
-- in step. The consumers of a type are looked up once, not for each event.
WITH subscribed AS MATERIALIZED (
    SELECT t.event_type, coalesce(array_agg(c.name ORDER BY c.name) FILTER (WHERE c.name IS NOT NULL), '{}') AS names
    FROM (SELECT DISTINCT unnest(@event_types::text[]) AS event_type) AS t
    LEFT JOIN public.event_consumers AS c ON c.event_types && ARRAY[t.event_type, '*']
    GROUP BY t.event_type
), due AS MATERIALIZED (
    SELECT k.id, k.created_at, s.names
    FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@created_ats::timestamptz[]) AS created_at, unnest(@event_types::text[]) AS event_type) AS k
    JOIN subscribed AS s ON s.event_type = k.event_type
), fanned AS (
    UPDATE public.event_log AS e
    SET consumers = due.names,
        status = CASE WHEN due.names <@ e.consumed_by THEN 'done' ELSE 'processing' END,
        dead_consumers = '{}',
        retries = NULL,
        next_attempt_at = NULL,
        updated_at = now()
    FROM due
    WHERE e.id = due.id AND e.created_at = due.created_at
    RETURNING e.*
)
SELECT
    id,
    created_at,
    organization_id,
    event_type,
    entity_kind,
    entity_id,
    metadata,
    (CASE WHEN consumed_by = '{}' THEN consumers
          ELSE ARRAY(SELECT u FROM unnest(consumers) AS u WHERE u <> ALL (consumed_by)) END)::text[] AS consumers,
    (CASE WHEN event_type = ANY (@payload_types::text[]) AND pg_column_size(payload) <= @max_payload::integer
          THEN payload END)::jsonb AS payload,
    (CASE WHEN @order_fields::text[] = '{}' THEN '{}'
          ELSE ARRAY(SELECT coalesce(CASE WHEN f = 'entity_id' THEN entity_id::text ELSE payload ->> f END, '')
                     FROM unnest(@order_fields::text[]) AS f) END)::text[] AS order_values,
    now()::timestamptz AS claimed_at
FROM fanned
ORDER BY seq NULLS FIRST, created_at, id;

-- name: GetOldestMonth :one
-- GetOldestMonth returns a time before which there are no events.
SELECT coalesce(least(
    (SELECT min(to_date(right(c.relname, 6), 'YYYYMM')::timestamp AT TIME ZONE 'UTC')
     FROM pg_catalog.pg_inherits AS i
     JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
     WHERE i.inhparent = 'public.event_log'::regclass AND c.relname ~ '^event_log_[0-9]{6}$'),
    (SELECT min(created_at) FROM public.event_log_default)
), now())::timestamptz AS month;

-- name: ListEventsToReplay :many
-- ListEventsToReplay returns the keys of the events of a span of time, of some
-- types, that a consumer never had, oldest first.
SELECT id, created_at
FROM public.event_log
WHERE created_at >= @since AND created_at < @until
    AND (event_type = ANY (@event_types::text[]) OR '*' = ANY (@event_types::text[]))
    AND (sqlc.narg(organization_id)::uuid IS NULL OR organization_id = sqlc.narg(organization_id))
    AND status <> 'pending'
    AND NOT @consumer::text = ANY (consumers) AND NOT @consumer::text = ANY (consumed_by)
ORDER BY created_at, id;

-- name: ClaimEventsToReplay :many
-- ClaimEventsToReplay marks events as fanned out to one consumer as well, those
-- that it still never had, and returns them like ClaimDueEvents. The arrays run
-- in step.
WITH picked AS MATERIALIZED (
    SELECT l.id, l.created_at
    FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@created_ats::timestamptz[]) AS created_at) AS k
    JOIN public.event_log AS l ON l.id = k.id AND l.created_at = k.created_at
    WHERE l.status <> 'pending'
        AND NOT @consumer::text = ANY (l.consumers) AND NOT @consumer::text = ANY (l.consumed_by)
    ORDER BY l.id, l.created_at
    FOR UPDATE OF l
), fanned AS (
    UPDATE public.event_log AS e
    SET consumers = e.consumers || @consumer::text,
        status = CASE WHEN e.status = 'dead' THEN 'dead' ELSE 'processing' END,
        updated_at = now()
    FROM picked
    WHERE e.id = picked.id AND e.created_at = picked.created_at
    RETURNING e.*
)
SELECT
    id,
    created_at,
    organization_id,
    event_type,
    entity_kind,
    entity_id,
    metadata,
    ARRAY[@consumer::text]::text[] AS consumers,
    (CASE WHEN event_type = ANY (@payload_types::text[]) AND pg_column_size(payload) <= @max_payload::integer
          THEN payload END)::jsonb AS payload,
    ARRAY(SELECT coalesce(CASE WHEN f = 'entity_id' THEN entity_id::text ELSE payload ->> f END, '')
          FROM unnest(@order_fields::text[]) AS f)::text[] AS order_values,
    now()::timestamptz AS claimed_at
FROM fanned
ORDER BY seq NULLS FIRST, created_at, id;

-- name: LoadEvents :many
-- LoadEvents returns the events with the given keys, in no order; both arrays
-- run in step.
SELECT id, created_at, organization_id, event_type, entity_kind, entity_id, payload, metadata
FROM public.load_events(@ids::uuid[], @created_ats::timestamptz[]);

-- name: ListEvents :many
-- ListEvents returns the newest events first; an empty filter matches all.
SELECT
    id, created_at, organization_id, event_type, entity_kind, entity_id, status, consumers, consumed_by,
    dead_consumers, attempts, last_error, next_attempt_at
FROM public.event_log
WHERE (sqlc.narg(status)::text IS NULL OR status = sqlc.narg(status))
    AND (sqlc.narg(event_type)::text IS NULL OR event_type = sqlc.narg(event_type))
    AND (sqlc.narg(organization_id)::uuid IS NULL OR organization_id = sqlc.narg(organization_id))
ORDER BY created_at DESC, id
LIMIT @max_events;

-- name: GetEvent :one
-- GetEvent returns one event by its id alone, whatever its partition.
SELECT * FROM public.event_log WHERE id = @id;

-- name: CreateEventLogPartitions :one
-- CreateEventLogPartitions makes this month's partition and those of the next
-- three, and returns how many were new.
SELECT public.create_event_log_partitions();

-- name: ListRequest :many
-- ListRequest returns the events and the audit rows that carry a request id,
-- oldest first.
SELECT
    r.kind::text AS kind, r.id::text AS id, r.created_at::timestamptz AS created_at, r.name::text AS name,
    r.state::text AS state, r.causation_id::text AS causation_id, r.who::text AS who
FROM (
    SELECT
        'event' AS kind, id::text, created_at, event_type AS name, status AS state,
        coalesce(metadata ->> 'causation_id', '') AS causation_id, coalesce(metadata ->> 'source', '') AS who
    FROM public.event_log AS e
    WHERE e.metadata ? 'request_id' AND e.metadata ->> 'request_id' = @request_id::text
    UNION ALL
    SELECT 'audit', id::text, created_at, action, '', '', coalesce(actor_id, '')
    FROM public.audit_log AS a
    WHERE a.metadata ? 'request_id' AND a.metadata ->> 'request_id' = @request_id::text
) AS r
ORDER BY r.created_at, r.kind, r.id;

-- name: NotifyStep :exec
-- NotifyStep tells those who stream events of the ones that were just fanned out,
-- and River's clients of the queues that have their jobs.
SELECT pg_notify(n.channel, n.payload)
FROM (
    SELECT 'event_stream' AS channel, unnest(@stream::text[]) AS payload
    UNION ALL
    SELECT 'river.river_insert', jsonb_build_object('queue', q.name)::text FROM unnest(@queues::text[]) AS q (name)
) AS n;

-- name: GetStreamPosition :one
-- GetStreamPosition returns when an event was made; with an organization, only
-- an event of its own.
SELECT created_at FROM public.event_log
WHERE id = @id AND (sqlc.narg(organization_id)::uuid IS NULL OR organization_id = sqlc.narg(organization_id));

-- name: ListStreamEvents :many
-- ListStreamEvents returns the events since a time that were fanned out, oldest
-- first, those of one organization or of all.
SELECT id, created_at, organization_id, event_type, entity_kind, entity_id, payload, metadata
FROM public.event_log
WHERE created_at >= @since AND status <> 'pending' AND id <> @but_not
    AND (sqlc.narg(organization_id)::uuid IS NULL OR organization_id = sqlc.narg(organization_id))
ORDER BY created_at, id
LIMIT @max_events;

-- name: ListStuckConsumers :many
-- ListStuckConsumers returns, for some events made since a time that have been
-- processing without a change since before another, the consumers that they wait for and no living job does: with
-- the newest job, 0 where there is none. The events come in the order of their
-- last change, from a key on, each also where nothing of it is stuck, then
-- without a consumer. With LIMIT in place of array_agg the planner would look for
-- the newest job by reading all of them backwards.
WITH page AS MATERIALIZED (
    SELECT l.id, l.created_at, l.updated_at, l.consumers, l.consumed_by
    FROM public.event_log AS l
    WHERE l.status = 'processing' AND l.created_at >= @since AND l.updated_at < @before AND (l.updated_at, l.id) > (@after_updated_at::timestamptz, @after_id::uuid)
    ORDER BY l.updated_at, l.id
    LIMIT @max_events
)
SELECT e.id, e.created_at, e.updated_at, coalesce(s.consumer, '')::text AS consumer, coalesce(s.job_id, 0)::bigint AS job_id
FROM page AS e
LEFT JOIN LATERAL (
    SELECT u.consumer, j.id AS job_id
    FROM unnest(e.consumers) AS u (consumer)
    CROSS JOIN LATERAL (
        SELECT (array_agg(r.id ORDER BY r.id DESC))[1] AS id, (array_agg(r.state ORDER BY r.id DESC))[1] AS state
        FROM river.river_job AS r
        WHERE r.metadata @> jsonb_build_object('event_id', e.id::text, 'consumer', u.consumer) AND r.metadata ? 'event_id' AND r.metadata ->> 'event_id' = e.id::text
    ) AS j
    WHERE u.consumer <> ALL (e.consumed_by) AND (j.state IS NULL OR j.state IN ('cancelled', 'completed', 'discarded'))
) AS s ON true
ORDER BY e.updated_at, e.id;

-- name: TakeLostConsumer :many
-- TakeLostConsumer takes a consumer from those of the events that wait for it
-- and have no job of it, and returns their keys.
UPDATE public.event_log AS e
SET consumers = array_remove(e.consumers, @consumer::text),
    status = CASE WHEN array_remove(e.consumers, @consumer::text) <@ e.consumed_by THEN 'done' ELSE 'processing' END,
    updated_at = now()
FROM (
    SELECT l.id, l.created_at
    FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@created_ats::timestamptz[]) AS created_at) AS k
    JOIN public.event_log AS l ON l.id = k.id AND l.created_at = k.created_at
    WHERE l.status = 'processing' AND @consumer::text = ANY (l.consumers) AND NOT @consumer::text = ANY (l.consumed_by)
        AND NOT EXISTS (
            SELECT FROM river.river_job AS j WHERE j.metadata @> jsonb_build_object('event_id', l.id::text, 'consumer', @consumer::text)
                AND j.metadata ? 'event_id' AND j.metadata ->> 'event_id' = l.id::text
        )
    ORDER BY l.id, l.created_at
    FOR UPDATE OF l
) AS t
WHERE e.id = t.id AND e.created_at = t.created_at
RETURNING e.id, e.created_at;

-- name: AnalyzeBegunMonths :one
SELECT public.analyze_begun_months();
