-- name: FinishAttempts :many
-- FinishAttempts records the outcomes of attempts, whose status code is 0 where nobody
-- answered. A success of which a subscription in good health learns nothing is also
-- the end of the delivery, for which nobody waits for the subscription's row, nor for
-- a delivery's, or it could wait for one who has that and waits for another one of
-- these; it returns those that ended. The arrays run in step.
WITH ended AS (
    SELECT unnest(@delivery_ids::uuid[]) AS delivery_id, unnest(@numbers::integer[]) AS number,
        unnest(@durations_ms::integer[]) AS duration_ms, unnest(@classes::text[]) AS class,
        unnest(@status_codes::integer[]) AS status_code, unnest(@errors::text[]) AS error,
        unnest(@remotes::text[]) AS remote, unnest(@answers::text[]) AS answer, unnest(@successes::boolean[]) AS succeeded
), attempt AS (
    UPDATE public.webhook_attempts AS a
    SET duration_ms = e.duration_ms, class = e.class, status_code = nullif(e.status_code, 0), error = nullif(e.error, ''),
        remote = nullif(e.remote, ''), answer = CASE WHEN e.status_code <> 0 THEN e.answer END
    FROM ended AS e
    WHERE a.delivery_id = e.delivery_id AND a.number = e.number
), last AS (
    SELECT d.id
    FROM ended AS e
    JOIN public.webhook_deliveries AS d ON d.id = e.delivery_id
    JOIN public.webhook_subscriptions AS s ON s.id = d.subscription_id
    WHERE e.succeeded AND d.state = 'sending' AND d.attempts = e.number
        AND s.consecutive_failures = 0 AND s.unsafe_failures = 0 AND NOT s.probing AND s.open_until IS NULL
    FOR NO KEY UPDATE OF d SKIP LOCKED
), delivered AS (
    UPDATE public.webhook_deliveries AS d
    SET state = 'succeeded', next_attempt_at = now(), lease_until = NULL, last_error = NULL, error_class = NULL, status_code = NULL,
        updated_at = now(), delivered_at = now()
    FROM last
    WHERE d.id = last.id
    RETURNING d.id
)
SELECT delivered.id FROM delivered;

-- name: ListAttempts :many
SELECT a.number, a.trigger, a.started_at, a.duration_ms, a.class, a.status_code, a.error, a.remote, a.answer
FROM public.webhook_attempts AS a
WHERE a.delivery_id = @delivery_id
ORDER BY a.number;
