-- name: InsertDeliveries :many
-- InsertDeliveries makes the deliveries of events that are not there yet: pending
-- for the subscriptions that are enabled, held for the others. It returns those
-- that need a job. The arrays run in step; a subscription that is gone has none.
WITH wanted AS (
    SELECT unnest(@event_ids::uuid[]) AS event_id, unnest(@subscription_ids::uuid[]) AS subscription_id,
        unnest(@event_types::text[]) AS event_type, unnest(@event_created_ats::timestamptz[]) AS event_created_at
), made AS (
    INSERT INTO public.webhook_deliveries AS d (
        event_id, subscription_id, organization_id, event_type, event_created_at, state, max_attempts
    )
    SELECT w.event_id, s.id, s.organization_id, w.event_type, w.event_created_at,
        CASE WHEN s.enabled THEN 'pending' ELSE 'held' END, @max_attempts::integer
    FROM wanted AS w
    JOIN public.webhook_subscriptions AS s ON s.id = w.subscription_id
    ORDER BY w.event_id, s.id -- as everybody, so that no two can wait for each other
    ON CONFLICT (event_id, subscription_id) DO UPDATE
    SET event_type = excluded.event_type, event_created_at = excluded.event_created_at
    WHERE d.job_id IS NULL AND d.state = 'pending'
    RETURNING d.id, d.event_id, d.subscription_id, d.state
)
SELECT m.id, m.event_id, m.subscription_id FROM made AS m WHERE m.state = 'pending' ORDER BY m.id;

-- name: SetDeliveryJobs :exec
-- SetDeliveryJobs makes jobs the timers of deliveries. The arrays run in step.
UPDATE public.webhook_deliveries AS d
SET job_id = j.job_id
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@job_ids::bigint[]) AS job_id) AS j
WHERE d.id = j.id;

-- name: LockDeliveries :many
-- LockDeliveries returns those deliveries to a subscription that are there, by the
-- database's clock, and how many are under way, and keeps others from changing
-- them. Who calls it has locked the subscription, so that no two can wait for each
-- other, and none begins meanwhile.
SELECT sqlc.embed(d), clock_timestamp()::timestamptz AS now, (
    SELECT count(*) FROM public.webhook_deliveries AS o
    WHERE o.subscription_id = @subscription_id AND o.state = 'sending' AND o.lease_until > clock_timestamp()
) AS sending
FROM public.webhook_deliveries AS d
WHERE d.id = ANY (@ids::uuid[]) AND d.subscription_id = @subscription_id
ORDER BY d.id
FOR UPDATE OF d;

-- name: StartAttempts :many
-- StartAttempts takes the next number for an attempt at each delivery, before it is
-- made, and returns what to send. It does not start those, nor return them, whose
-- body was deleted. next_slot_at is the subscription's from then on.
WITH started AS (
    UPDATE public.webhook_deliveries AS d
    SET state = 'sending', attempts = d.attempts + 1, has_slot = false, updated_at = now(),
        lease_until = clock_timestamp() + @lease::interval
    FROM public.webhook_bodies AS b
    WHERE d.id = ANY (@ids::uuid[]) AND b.event_id = d.event_id
    RETURNING d.id, d.attempts, d.trigger, b.body
), slot AS (
    UPDATE public.webhook_subscriptions AS s SET next_slot_at = sqlc.narg(next_slot_at)
    WHERE s.id = @subscription_id AND s.next_slot_at IS DISTINCT FROM sqlc.narg(next_slot_at)
), attempt AS (
    INSERT INTO public.webhook_attempts (delivery_id, number, trigger)
    SELECT started.id, started.attempts, started.trigger FROM started
)
SELECT started.id, started.body FROM started;

-- name: PostponeDeliveries :exec
-- PostponeDeliveries lets deliveries wait, each until a time that the subscription's
-- rate has given it. The arrays run in step; next_slot_at is as in StartAttempts.
WITH slot AS (
    UPDATE public.webhook_subscriptions AS s SET next_slot_at = sqlc.narg(next_slot_at) WHERE s.id = @subscription_id
)
UPDATE public.webhook_deliveries AS d
SET state = 'pending', lease_until = NULL, next_attempt_at = p.next_attempt_at, has_slot = true
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@next_attempt_ats::timestamptz[]) AS next_attempt_at) AS p
WHERE d.id = p.id;

-- name: HurryDeliveries :exec
-- HurryDeliveries ends the waiting of those that the breaker or the rate put off,
-- since the receiver takes events again.
WITH hurried AS (
    UPDATE public.webhook_deliveries AS d
    SET next_attempt_at = now(), has_slot = false
    WHERE d.subscription_id = @subscription_id AND d.state = 'pending' AND d.has_slot
    RETURNING d.job_id
), freed AS (
    UPDATE public.webhook_subscriptions SET next_slot_at = NULL WHERE webhook_subscriptions.id = @subscription_id
)
UPDATE river.river_job SET state = 'available', scheduled_at = now()
WHERE state = 'scheduled' AND id IN (SELECT job_id FROM hurried);

-- name: FinishDelivery :exec
-- FinishDelivery records where an attempt left a delivery.
UPDATE public.webhook_deliveries
SET state = @state, max_attempts = @max_attempts, next_attempt_at = @next_attempt_at, lease_until = NULL, last_error = @last_error,
    error_class = @error_class, status_code = @status_code, updated_at = now(),
    delivered_at = CASE WHEN @state::text = 'succeeded' THEN now() ELSE delivered_at END
WHERE id = @id;

-- name: HoldDelivery :exec
UPDATE public.webhook_deliveries SET state = 'held', lease_until = NULL, updated_at = now() WHERE id = @id;

-- name: CancelDelivery :exec
-- CancelDelivery ends a delivery whose subscription is gone.
UPDATE public.webhook_deliveries SET state = 'cancelled', lease_until = NULL, updated_at = now()
WHERE id = @id AND state <> 'succeeded';

-- name: HoldDeliveries :execrows
-- HoldDeliveries keeps what waits for a subscription that was disabled.
UPDATE public.webhook_deliveries SET state = 'held', updated_at = now()
WHERE subscription_id = @subscription_id AND state = 'pending';

-- name: ResetDeliveries :exec
-- ResetDeliveries gives deliveries all their attempts anew, at once.
UPDATE public.webhook_deliveries
SET state = 'pending', trigger = @trigger, max_attempts = attempts + @more_attempts::integer, next_attempt_at = clock_timestamp(),
    has_slot = false, resend_key = coalesce(sqlc.narg(resend_key), resend_key), lease_until = NULL, updated_at = now()
WHERE id = ANY (@ids::uuid[]);

-- name: ListRecoverable :many
-- ListRecoverable returns deliveries to a subscription that were given up or
-- held, of those made since a time, oldest first, and keeps others from changing
-- them.
SELECT d.* FROM public.webhook_deliveries AS d
WHERE d.subscription_id = @subscription_id AND d.state IN ('dead', 'held') AND d.created_at >= @since
ORDER BY d.event_created_at, d.id
LIMIT @max_rows
FOR UPDATE;

-- name: ListMissingEvents :many
-- ListMissingEvents returns events that a subscription wants and has no
-- delivery of, oldest first.
SELECT e.id, e.created_at, e.event_type, e.payload
FROM public.event_log AS e
JOIN public.webhook_subscriptions AS s ON s.organization_id = e.organization_id
WHERE s.id = @subscription_id AND e.created_at >= @since
    AND e.event_type <> 'webhook.delivery_failed'
    AND (e.event_type = ANY (s.event_types)
        OR split_part(e.event_type, '.', 1) || '.*' = ANY (s.event_types)
        OR ('*' = ANY (s.event_types) AND e.event_type NOT LIKE 'webhook.%'))
    AND (e.status = 'done' OR @consumer::text = ANY (e.consumed_by))
    AND NOT EXISTS (SELECT FROM public.webhook_deliveries AS d WHERE d.event_id = e.id AND d.subscription_id = s.id)
ORDER BY e.created_at, e.id
LIMIT @max_rows;

-- name: GetDelivery :one
-- GetDelivery returns a delivery to a subscription and keeps others from
-- changing it.
SELECT d.* FROM public.webhook_deliveries AS d WHERE d.id = @id AND d.subscription_id = @subscription_id FOR UPDATE;

-- name: GetSubscriptionOfDelivery :one
SELECT d.subscription_id FROM public.webhook_deliveries AS d WHERE d.id = @id;

-- name: ListDeliveries :many
-- ListDeliveries returns the deliveries to a subscription, newest first, those
-- that come after one of them if that is not null.
SELECT d.* FROM public.webhook_deliveries AS d
WHERE d.subscription_id = @subscription_id
    AND (sqlc.narg(state)::text IS NULL OR d.state = sqlc.narg(state))
    AND (sqlc.narg(after)::uuid IS NULL OR (d.created_at, d.id) < (
        SELECT a.created_at, a.id FROM public.webhook_deliveries AS a
        WHERE a.id = sqlc.narg(after) AND a.subscription_id = @subscription_id
    ))
ORDER BY d.created_at DESC, d.id DESC
LIMIT @max_rows;

-- name: ListLostDeliveries :many
-- ListLostDeliveries returns pending deliveries that are long due and whose job
-- is gone.
SELECT d.id, d.subscription_id, d.event_type, d.organization_id
FROM public.webhook_deliveries AS d
WHERE d.state IN ('pending', 'sending') AND d.job_id IS NOT NULL AND d.next_attempt_at < @before
    AND coalesce(d.lease_until, d.next_attempt_at) < @before
    AND NOT EXISTS (
        SELECT FROM river.river_job AS j
        WHERE j.id = d.job_id AND j.state IN ('available', 'pending', 'retryable', 'running', 'scheduled')
    )
ORDER BY d.next_attempt_at, d.id
LIMIT @max_rows
FOR UPDATE SKIP LOCKED;

-- name: DeleteOldDeliveries :execrows
-- DeleteOldDeliveries forgets deliveries and their attempts that are over.
DELETE FROM public.webhook_deliveries
WHERE id IN (
    SELECT d.id FROM public.webhook_deliveries AS d
    WHERE d.created_at < @before AND d.state IN ('succeeded', 'cancelled', 'held')
    LIMIT @max_rows
);
