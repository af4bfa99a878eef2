-- name: ListEventJobs :many
-- ListEventJobs returns the River jobs of one event that River still keeps.
SELECT
    id, kind, queue, state, attempt, max_attempts, scheduled_at, finalized_at,
    coalesce(errors[array_upper(errors, 1)] ->> 'error', '')::text AS last_error
FROM river.river_job
WHERE metadata @> jsonb_build_object('event_id', @event_id::text)
ORDER BY id;
