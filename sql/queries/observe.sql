-- name: AcquireLease :one
-- AcquireLease makes the holder the only one for a while, if nobody else is, and
-- returns whether it is.
WITH taken AS (
    INSERT INTO public.leases AS l (name, holder, expires_at)
    VALUES (@name, @holder, now() + @duration::interval)
    ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, expires_at = excluded.expires_at
    WHERE l.holder = excluded.holder OR l.expires_at < now()
    RETURNING l.name
)
SELECT EXISTS (SELECT FROM taken) AS acquired;

-- name: ReleaseLease :exec
-- ReleaseLease lets the next one have it at once.
DELETE FROM public.leases WHERE name = @name AND holder = @holder;

-- name: AddWorkerMinutes :batchexec
-- AddWorkerMinutes adds what a process's workers did since the last time.
INSERT INTO public.worker_minutes AS m (minute, worker, attempts, failed, durations)
VALUES (date_trunc('minute', now()), @worker, @attempts, @failed, @durations)
ON CONFLICT (minute, worker) DO UPDATE
SET attempts = m.attempts + excluded.attempts,
    failed = m.failed + excluded.failed,
    durations = ARRAY(
        SELECT a.jobs + b.jobs
        FROM unnest(m.durations) WITH ORDINALITY AS a (jobs, bucket)
        JOIN unnest(excluded.durations) WITH ORDINALITY AS b (jobs, bucket) ON b.bucket = a.bucket
        ORDER BY a.bucket
    );

-- name: DeleteOldWorkerMinutes :exec
-- DeleteOldWorkerMinutes deletes what nobody asks for any more.
DELETE FROM public.worker_minutes WHERE minute < now() - interval '1 hour';

-- name: ListWorkerMinutes :many
-- ListWorkerMinutes returns what the workers of all processes did in the last
-- five minutes.
SELECT worker, attempts, failed, durations FROM public.worker_minutes WHERE minute > now() - interval '5 minutes';

-- name: MeasureQueues :many
-- MeasureQueues returns how many jobs wait in each queue, and for how long the
-- oldest one has. It reads an index only.
SELECT queue, count(*) AS jobs, coalesce(extract(epoch FROM now() - min(greatest(scheduled_at, created_at))), 0)::float8 AS oldest_seconds
FROM river.river_job
WHERE state = 'available'
GROUP BY queue;

-- name: MeasureOverdue :many
-- MeasureOverdue returns how many jobs of each kind run longer than theirs may.
-- The arrays run in step; the limits are in seconds.
SELECT j.kind, count(*) AS jobs
FROM river.river_job AS j
JOIN (SELECT unnest(@kinds::text[]) AS kind, unnest(@limits::float8[]) AS seconds) AS k ON k.kind = j.kind
WHERE j.state = 'running' AND j.attempted_at < now() - make_interval(secs => k.seconds)
GROUP BY j.kind;

-- name: MeasureLag :many
-- MeasureLag returns for each event type how long the oldest event that is due
-- has waited for a bridge.
SELECT event_type, extract(epoch FROM now() - min(coalesce(next_attempt_at, created_at)))::float8 AS seconds
FROM public.event_log
WHERE status = 'pending' AND coalesce(next_attempt_at, '-infinity') <= now()
GROUP BY event_type;

-- name: MeasureDeadEvents :many
-- MeasureDeadEvents returns how many events of each type are dead.
SELECT event_type, count(*) AS events FROM public.event_log WHERE status = 'dead' GROUP BY event_type;

-- name: MeasureDeadJobs :many
-- MeasureDeadJobs returns how many jobs of each kind are dead.
SELECT kind, count(*) AS jobs FROM river.river_job WHERE state IN ('cancelled', 'discarded') GROUP BY kind;

-- name: TakeDeadLetterNotices :many
-- TakeDeadLetterNotices takes note of the jobs that died since the last time,
-- and returns how many they are for each consumer.
WITH taken AS (
    DELETE FROM public.dead_letter_notices RETURNING consumer
)
SELECT consumer, count(*) AS jobs FROM taken GROUP BY consumer ORDER BY consumer;

-- name: AddAlerts :exec
-- AddAlerts adds to what channels have to tell. The arrays run in step.
INSERT INTO public.alerts AS a (rule, subject, channel, pending, value)
SELECT n.rule, n.subject, n.channel, n.pending, n.pending
FROM (
    SELECT @rule::text AS rule, unnest(@subjects::text[]) AS subject, unnest(@channels::text[]) AS channel, unnest(@pending::bigint[]) AS pending
) AS n
ORDER BY n.subject, n.channel
ON CONFLICT (rule, subject, channel) DO UPDATE SET pending = a.pending + excluded.pending, value = excluded.value;

-- name: SetThresholdAlerts :exec
-- SetThresholdAlerts lets channels tell of thresholds that are passed. The
-- arrays run in step.
INSERT INTO public.alerts AS a (rule, subject, channel, pending, value, firing_since)
SELECT n.rule, n.subject, n.channel, 1, n.value, now()
FROM (
    SELECT unnest(@rules::text[]) AS rule, unnest(@subjects::text[]) AS subject, unnest(@channels::text[]) AS channel, unnest(@alert_values::float8[]) AS value
) AS n
ORDER BY n.rule, n.subject, n.channel
ON CONFLICT (rule, subject, channel) DO UPDATE
SET pending = 1, value = excluded.value, firing_since = coalesce(a.firing_since, excluded.firing_since);

-- name: ClearThresholdAlerts :exec
-- ClearThresholdAlerts ends the alerts of thresholds that are no longer passed,
-- so that the next time is told soon again.
UPDATE public.alerts AS a
SET pending = 0, firing_since = NULL, failures = 0, next_at = least(a.next_at, now() + @pause::interval)
WHERE a.firing_since IS NOT NULL
    AND NOT EXISTS (
        SELECT FROM (SELECT unnest(@rules::text[]) AS rule, unnest(@subjects::text[]) AS subject) AS n
        WHERE n.rule = a.rule AND n.subject = a.subject
    );

-- name: ListDueAlerts :many
-- ListDueAlerts returns what is to be told now.
SELECT rule, subject, channel, pending, value, firing_since, failures
FROM public.alerts
WHERE pending > 0 AND next_at <= now() AND channel = ANY (@channels::text[])
ORDER BY channel, rule, subject;

-- name: MarkAlertTold :exec
-- MarkAlertTold says that a channel told of so many, and rests for a while.
UPDATE public.alerts
SET pending = greatest(pending - @told::bigint, 0), told_at = now(), failures = 0, next_at = now() + @pause::interval
WHERE rule = @rule AND subject = @subject AND channel = @channel;

-- name: MarkAlertFailed :exec
-- MarkAlertFailed says that a channel could not tell, and when it tries again.
UPDATE public.alerts SET failures = failures + 1, next_at = now() + @delay::interval
WHERE rule = @rule AND subject = @subject AND channel = @channel;
