-- name: ListDeadLetters :many
-- ListDeadLetters returns the newest dead letters first; an empty filter
-- matches all.
SELECT
    d.job_id, d.consumer, d.queue, d.state, d.died_at::timestamptz AS died_at, d.attempt, d.last_error::text AS last_error,
    d.event_id, d.event_type, d.organization_id, d.entity_kind, d.entity_id
FROM public.dead_letters AS d
WHERE (sqlc.narg(consumer)::text IS NULL OR d.consumer = sqlc.narg(consumer))
    AND (sqlc.narg(event_type)::text IS NULL OR d.event_type = sqlc.narg(event_type))
    AND (sqlc.narg(organization_id)::uuid IS NULL OR d.organization_id = sqlc.narg(organization_id))
    AND (sqlc.narg(entity_kind)::text IS NULL OR d.entity_kind = sqlc.narg(entity_kind))
    AND (sqlc.narg(since)::timestamptz IS NULL OR d.died_at >= sqlc.narg(since))
    AND (sqlc.narg(until)::timestamptz IS NULL OR d.died_at < sqlc.narg(until))
ORDER BY d.died_at DESC, d.job_id DESC
LIMIT @max_letters;

-- name: ListDeadLetterIDs :many
-- ListDeadLetterIDs returns the jobs of ListDeadLetters, oldest first.
SELECT d.job_id
FROM public.dead_letters AS d
WHERE (sqlc.narg(consumer)::text IS NULL OR d.consumer = sqlc.narg(consumer))
    AND (sqlc.narg(event_type)::text IS NULL OR d.event_type = sqlc.narg(event_type))
    AND (sqlc.narg(organization_id)::uuid IS NULL OR d.organization_id = sqlc.narg(organization_id))
    AND (sqlc.narg(entity_kind)::text IS NULL OR d.entity_kind = sqlc.narg(entity_kind))
    AND (sqlc.narg(since)::timestamptz IS NULL OR d.died_at >= sqlc.narg(since))
    AND (sqlc.narg(until)::timestamptz IS NULL OR d.died_at < sqlc.narg(until))
ORDER BY d.died_at, d.job_id;

-- name: RetryDeadJobs :many
-- RetryDeadJobs gives dead jobs all their attempts anew, with their errors
-- kept and behind all other work of their queue, and returns those that were
-- still dead. What a job that is alive blocks with its unique key fails them all.
UPDATE river.river_job
SET state = 'available', attempt = 0, finalized_at = NULL, scheduled_at = now(), priority = 4,
    metadata = metadata - 'cancel_attempted_at'
WHERE id IN (
    SELECT j.id FROM river.river_job AS j
    WHERE j.id = ANY (@ids::bigint[]) AND j.state IN ('cancelled', 'discarded')
    ORDER BY j.id
    FOR UPDATE
)
RETURNING id, queue;

-- name: RetryDeadJobsOfEvents :many
-- RetryDeadJobsOfEvents is RetryDeadJobs for all dead jobs of some events; it
-- returns whose they are. It reads all dead jobs once, by an index of their own.
UPDATE river.river_job
SET state = 'available', attempt = 0, finalized_at = NULL, scheduled_at = now(), metadata = metadata - 'cancel_attempted_at'
WHERE id IN (
    SELECT j.id
    FROM unnest(@event_ids::text[]) AS e (id)
    JOIN river.river_job AS j ON j.metadata ->> 'event_id' = e.id
    WHERE j.state IN ('cancelled', 'discarded') AND j.metadata ->> 'consumer' = j.kind
    ORDER BY j.id
    FOR UPDATE OF j
)
RETURNING (metadata ->> 'event_id')::text AS event_id, kind AS consumer, queue;

-- name: DeleteDeadJobs :execrows
-- DeleteDeadJobs deletes the jobs that are still dead.
DELETE FROM river.river_job
WHERE id IN (
    SELECT j.id FROM river.river_job AS j
    WHERE j.id = ANY (@ids::bigint[]) AND j.state IN ('cancelled', 'discarded')
    ORDER BY j.id
    FOR UPDATE
);
