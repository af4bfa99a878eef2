-- name: ListEventJobs :many
-- ListEventJobs returns the River jobs of one event that River still keeps. The
-- condition stands there twice, here and elsewhere, for River's index or the one
-- that may be in its place.
SELECT
    id, kind, queue, state, attempt, max_attempts, scheduled_at, finalized_at,
    coalesce(errors[array_upper(errors, 1)] ->> 'error', '')::text AS last_error
FROM river.river_job
WHERE metadata @> jsonb_build_object('event_id', @event_id::text) AND metadata ? 'event_id' AND metadata ->> 'event_id' = @event_id::text
ORDER BY id;

-- name: ReleaseOverdueRetries :execrows
-- ReleaseOverdueRetries makes some jobs of some kinds available whose next
-- attempt has been due since before a time, which River's leader does where there
-- is one.
UPDATE river.river_job
SET state = 'available'
WHERE id IN (
    SELECT j.id FROM river.river_job AS j
    WHERE j.state IN ('retryable', 'scheduled') AND j.queue = ANY (@queues::text[]) AND j.kind = ANY (@kinds::text[]) AND j.scheduled_at < @before
    ORDER BY j.id
    LIMIT @max_jobs
    FOR UPDATE SKIP LOCKED
);

-- name: TouchJobs :exec
-- TouchJobs lets the settle trigger look at jobs again.
UPDATE river.river_job SET metadata = metadata WHERE id = ANY (@ids::bigint[]);

-- name: WakeQueues :exec
-- WakeQueues tells River's clients that queues have work.
SELECT pg_notify('river.river_insert', jsonb_build_object('queue', q.name)::text) FROM unnest(@queues::text[]) AS q (name);

-- name: FlushJobIndexes :one
SELECT public.flush_job_indexes();
