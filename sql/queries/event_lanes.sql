-- name: LockLanes :exec
-- LockLanes holds lanes until the end of the transaction, so that no job of
-- them advances meanwhile. The arrays run in step, each pair once. A row that the
-- WHERE leaves as it is gets locked all the same.
INSERT INTO public.event_lanes AS l (consumer, lane)
SELECT k.consumer, k.lane
FROM (SELECT unnest(@consumers::text[]) AS consumer, unnest(@lanes::text[]) AS lane) AS k
ORDER BY k.consumer, k.lane
ON CONFLICT (consumer, lane) DO UPDATE SET used_at = excluded.used_at WHERE l.used_at < excluded.used_at - interval '1 hour';

-- name: ListLaneRooms :many
-- ListLaneRooms returns how many new jobs of lanes need not wait. The lanes have
-- to be locked in a statement before.
SELECT
    k.consumer::text AS consumer,
    k.lane::text AS lane,
    (CASE
        WHEN EXISTS (
            SELECT FROM river.river_job AS j
            WHERE j.kind = k.consumer AND j.metadata ? 'lane' AND j.metadata ->> 'lane' = k.lane
                AND (j.state = 'pending' OR c.ordered_by IS NOT NULL AND NOT c.skips_dead AND j.state IN ('cancelled', 'discarded')))
        THEN 0
        ELSE r.room
    END)::bigint AS room
FROM (SELECT unnest(@consumers::text[]) AS consumer, unnest(@lanes::text[]) AS lane) AS k
JOIN public.event_consumers AS c ON c.name = k.consumer
CROSS JOIN LATERAL public.room_of_lane(k.consumer, k.lane, c.ordered_by, c.max_per_organization) AS r;

-- name: AdvanceWaitingLanes :one
-- AdvanceWaitingLanes lets whatever waits in a lane with room go on, and returns
-- how many jobs that were. The triggers leave nothing for it to do unless they
-- could not get a lock.
SELECT public.advance_lanes(coalesce(array_agg(w.kind), '{}'), coalesce(array_agg(w.lane), '{}'))::integer AS advanced
FROM (
    SELECT DISTINCT j.kind, j.metadata ->> 'lane' AS lane
    FROM river.river_job AS j
    WHERE j.metadata ? 'lane' AND j.state = 'pending'
) AS w;

-- name: DeleteIdleLanes :execrows
-- DeleteIdleLanes deletes lanes that were not used since a time and have no job
-- that is still to be done.
DELETE FROM public.event_lanes AS l
WHERE l.used_at < @before
    AND NOT EXISTS (
        SELECT FROM river.river_job AS j
        WHERE j.kind = l.consumer AND j.metadata ? 'lane' AND j.metadata ->> 'lane' = l.lane AND j.state <> 'completed');
