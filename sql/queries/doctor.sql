-- name: CheckServer :one
-- CheckServer returns what the server says of itself.
SELECT
    current_setting('server_version_num')::integer AS version,
    pg_is_in_recovery()::boolean AS read_only,
    clock_timestamp()::timestamptz AS clock,
    row_security_active('public.event_log')::boolean AS restricted,
    coalesce(current_setting('afluente.strict_events', true), '')::text AS strict_events;

-- name: ListEnabledTriggers :many
-- ListEnabledTriggers returns the triggers on event_log and river_job that fire.
SELECT tgname::text
FROM pg_catalog.pg_trigger
WHERE tgrelid IN (to_regclass('public.event_log'), to_regclass('river.river_job'))
    AND NOT tgisinternal AND tgenabled IN ('O', 'A');

-- name: ListMissingPartitions :many
-- ListMissingPartitions returns the months, such as 202612, of the next
-- `months` and this one that have no partition of event_log.
SELECT to_char(m.month, 'YYYYMM')::text AS month
FROM (
    SELECT date_trunc('month', now() AT TIME ZONE 'UTC') + make_interval(months => n) AS month
    FROM generate_series(0, @months::integer) AS n
) AS m
WHERE to_regclass('public.event_log_' || to_char(m.month, 'YYYYMM')) IS NULL
ORDER BY 1;

-- name: CountStrayEvents :one
-- CountStrayEvents returns how many events stand in the default partition.
SELECT count(*) FROM public.event_log_default;

-- name: GetLag :one
-- GetLag returns how long the oldest event that is due has waited for a
-- bridge, 0 when none waits.
SELECT coalesce(extract(epoch FROM now() - min(coalesce(next_attempt_at, created_at))), 0)::float8 AS seconds
FROM public.event_log
WHERE status = 'pending' AND coalesce(next_attempt_at, '-infinity') <= now();

-- name: CountDeadEvents :many
-- CountDeadEvents returns how many events are dead for each consumer.
SELECT d.consumer::text AS consumer, count(*) AS events
FROM public.event_log AS e, unnest(e.dead_consumers) AS d (consumer)
WHERE e.status = 'dead'
GROUP BY d.consumer
ORDER BY d.consumer;

-- name: ListSchemaFaults :many
-- ListSchemaFaults returns how often events since a time departed from the
-- catalogue, most often first.
SELECT event_type, schema_fault::text AS fault, count(*) AS events, max(created_at)::timestamptz AS last_at
FROM public.event_log
WHERE schema_fault IS NOT NULL AND created_at >= @since
GROUP BY event_type, schema_fault
ORDER BY count(*) DESC, event_type, schema_fault
LIMIT @max_faults;

-- name: CountLeaders :one
-- CountLeaders returns 1 when a River client leads, else 0: then nothing is
-- scheduled, retried or rescued.
SELECT count(*) FROM river.river_leader WHERE expires_at > now();

-- name: ListPausedQueues :many
-- ListPausedQueues returns the queues that somebody paused.
SELECT name FROM river.river_queue WHERE paused_at IS NOT NULL ORDER BY name;

-- name: CountListeners :one
-- CountListeners returns how many connections listen for urgent events, as far
-- as this role may see.
SELECT count(*) FROM pg_catalog.pg_stat_activity
WHERE datname = current_database() AND query = 'LISTEN event_log_high';

-- name: ListUnknownKinds :many
-- ListUnknownKinds returns the kinds of jobs that are to be worked and are not
-- among the known ones. It steps from kind to kind through an index.
WITH RECURSIVE kinds AS (
    (SELECT j.kind FROM river.river_job AS j ORDER BY j.kind LIMIT 1)
    UNION ALL
    SELECT (SELECT j.kind FROM river.river_job AS j WHERE j.kind > k.kind ORDER BY j.kind LIMIT 1)
    FROM kinds AS k
    WHERE k.kind IS NOT NULL
)
SELECT k.kind::text AS kind
FROM kinds AS k
WHERE k.kind IS NOT NULL AND k.kind <> ALL (@known::text[])
    AND EXISTS (
        SELECT FROM river.river_job AS j
        WHERE j.kind = k.kind AND j.state IN ('available', 'pending', 'retryable', 'running', 'scheduled')
    )
ORDER BY 1;

-- name: HasEventsBefore :one
-- HasEventsBefore tells whether events that are done are older than a time.
SELECT EXISTS (SELECT FROM public.event_log WHERE created_at < @before AND status = 'done') AS found;
