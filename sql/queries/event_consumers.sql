-- name: RegisterConsumer :batchexec
-- RegisterConsumer makes a consumer known to every bridge. Types are only ever
-- added, so that an older process that starts again cannot take a type away
-- from a newer one.
INSERT INTO public.event_consumers AS c (name, event_types, queue, priority, max_attempts)
VALUES (@name, @event_types, @queue, @priority, @max_attempts)
ON CONFLICT (name) DO UPDATE
SET event_types = ARRAY(SELECT DISTINCT t FROM unnest(c.event_types || excluded.event_types) AS t ORDER BY t),
    queue = excluded.queue,
    priority = excluded.priority,
    max_attempts = excluded.max_attempts,
    updated_at = now();

-- name: ListConsumers :many
-- ListConsumers returns every registered consumer by name.
SELECT * FROM public.event_consumers ORDER BY name;
