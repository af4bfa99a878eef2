-- name: RegisterConsumer :batchexec
-- RegisterConsumer makes a consumer known to every bridge. Types are only ever
-- added, so that an older process that starts again cannot take a type away
-- from a newer one.
INSERT INTO public.event_consumers AS c
    (name, event_types, queue, priority, max_attempts, ordered_by, skips_dead, max_per_organization)
VALUES
    (@name, @event_types, @queue, @priority, @max_attempts, sqlc.narg(ordered_by), @skips_dead, sqlc.narg(max_per_organization))
ON CONFLICT (name) DO UPDATE
SET event_types = ARRAY(SELECT DISTINCT t FROM unnest(c.event_types || excluded.event_types) AS t ORDER BY t),
    queue = excluded.queue,
    priority = excluded.priority,
    max_attempts = excluded.max_attempts,
    ordered_by = excluded.ordered_by,
    skips_dead = excluded.skips_dead,
    max_per_organization = excluded.max_per_organization,
    updated_at = now();

-- name: ListConsumers :many
-- ListConsumers returns every registered consumer by name.
SELECT * FROM public.event_consumers ORDER BY name;

-- name: ListQueueHeads :many
-- ListQueueHeads returns of each queue and priority of the consumers that has
-- work waiting for a worker since when it does.
SELECT q.queue, q.priority, h.scheduled_at
FROM (SELECT DISTINCT queue, priority FROM public.event_consumers) AS q
CROSS JOIN LATERAL (
    SELECT j.scheduled_at
    FROM river.river_job AS j
    WHERE j.state = 'available' AND j.queue = q.queue AND j.priority = q.priority
    ORDER BY j.scheduled_at, j.id
    LIMIT 1
) AS h
WHERE h.scheduled_at <= now();
