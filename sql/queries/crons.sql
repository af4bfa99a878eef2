-- name: PutCron :exec
-- PutCron registers a cron. One that is there goes on where it is; with another
-- spec or zone it begins anew, at the next tick of that.
INSERT INTO public.crons AS c (name, spec, zone, missed, max_missed, jitter, disabled, next_tick)
VALUES (@name, @spec, @zone, @missed, @max_missed, @jitter, @disabled, @next_tick)
ON CONFLICT (name) DO UPDATE
SET spec = excluded.spec,
    zone = excluded.zone,
    missed = excluded.missed,
    max_missed = excluded.max_missed,
    jitter = excluded.jitter,
    disabled = excluded.disabled,
    next_tick = CASE WHEN (c.spec, c.zone) = (excluded.spec, excluded.zone) AND NOT c.disabled
                     THEN c.next_tick ELSE excluded.next_tick END,
    updated_at = now();

-- name: ListDueCrons :many
-- ListDueCrons returns those of some crons that have a tick to decide.
SELECT name FROM public.crons
WHERE name = ANY (@names::text[]) AND next_tick <= @now AND paused_at IS NULL AND NOT disabled
ORDER BY name;

-- name: LockDueCron :one
-- LockDueCron locks a cron that has a tick to decide; no row where another
-- process decides it.
SELECT * FROM public.crons
WHERE name = @name AND next_tick <= @now AND paused_at IS NULL AND NOT disabled
FOR UPDATE SKIP LOCKED;

-- name: LockCron :one
-- LockCron locks a cron.
SELECT * FROM public.crons WHERE name = @name FOR UPDATE;

-- name: CronWaits :one
-- CronWaits tells whether one of the last jobs of a cron has not begun.
SELECT EXISTS (
    SELECT FROM river.river_job AS j
    WHERE j.id IN (SELECT t.job_id FROM public.cron_ticks AS t WHERE t.cron = @cron ORDER BY t.tick DESC LIMIT 10)
        AND j.state IN ('available', 'pending', 'retryable', 'scheduled')
) AS waits;

-- name: PutCronTick :execrows
-- PutCronTick says that a tick became a job; 0 rows where it had become one.
INSERT INTO public.cron_ticks (cron, tick, job_id, late, by_hand)
VALUES (@cron, @tick, @job_id, @late, @by_hand)
ON CONFLICT DO NOTHING;

-- name: AdvanceCron :exec
-- AdvanceCron says how far a cron has come.
UPDATE public.crons
SET next_tick = @next_tick, skipped = skipped + @skipped, updated_at = now()
WHERE name = @name;

-- name: PauseCron :execrows
-- PauseCron stops a cron until it is resumed.
UPDATE public.crons SET paused_at = coalesce(paused_at, now()), paused_by = coalesce(paused_by, @paused_by), updated_at = now()
WHERE name = @name;

-- name: ResumeCron :exec
-- ResumeCron lets a cron go on with its next tick.
UPDATE public.crons
SET paused_at = NULL, paused_by = NULL, next_tick = @next_tick, updated_at = now()
WHERE name = @name;

-- name: ListCrons :many
-- ListCrons returns every cron with its last tick that became a job, 1970 for
-- none, and the state of that job, empty where it is gone.
SELECT c.*, coalesce(t.tick, 'epoch')::timestamptz AS last_tick, coalesce(t.late, false)::boolean AS last_late, coalesce(j.state::text, '')::text AS last_state
FROM public.crons AS c
LEFT JOIN LATERAL (
    SELECT n.tick, n.late, n.job_id FROM public.cron_ticks AS n WHERE n.cron = c.name ORDER BY n.tick DESC LIMIT 1
) AS t ON true
LEFT JOIN river.river_job AS j ON j.id = t.job_id
ORDER BY c.name;

-- name: BeginCronRun :one
-- BeginCronRun makes a job the one that runs for its cron, unless another one
-- does, and returns whether it may run.
WITH begun AS (
    UPDATE public.crons AS c
    SET running_job = @job_id
    WHERE c.name = @name
        AND (c.running_job IS NULL OR c.running_job = @job_id
            OR NOT EXISTS (SELECT FROM river.river_job AS j WHERE j.id = c.running_job AND j.state = 'running'))
    RETURNING c.name
)
SELECT (EXISTS (SELECT FROM begun) OR NOT EXISTS (SELECT FROM public.crons AS o WHERE o.name = @name))::boolean AS may;

-- name: DeleteOldCronTicks :exec
-- DeleteOldCronTicks forgets the ticks before a time.
DELETE FROM public.cron_ticks WHERE tick < @before;

-- name: MeasureCrons :many
-- MeasureCrons returns for how long crons that are on have had a tick to decide,
-- in seconds.
SELECT name, greatest(extract(epoch FROM now() - next_tick), 0)::float8 AS seconds
FROM public.crons
WHERE name = ANY (@names::text[]) AND paused_at IS NULL AND NOT disabled;
