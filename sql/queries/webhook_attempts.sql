-- name: FinishAttempt :one
-- FinishAttempt records the outcome of an attempt. A success of which a subscription
-- in good health learns nothing is also the end of the delivery, for which nobody
-- waits for the subscription's row; it returns whether this was one.
WITH attempt AS (
    UPDATE public.webhook_attempts
    SET duration_ms = @duration_ms, class = @class, status_code = @status_code, error = @error, remote = @remote, answer = @answer
    WHERE delivery_id = @delivery_id AND number = @number
), delivered AS (
    UPDATE public.webhook_deliveries AS d
    SET state = 'succeeded', next_attempt_at = now(), lease_until = NULL, last_error = NULL, error_class = NULL, status_code = NULL,
        updated_at = now(), delivered_at = now()
    FROM public.webhook_subscriptions AS s
    WHERE @succeeded::boolean AND d.id = @delivery_id AND d.state = 'sending' AND d.attempts = @number AND s.id = d.subscription_id
        AND s.consecutive_failures = 0 AND s.unsafe_failures = 0 AND NOT s.probing AND s.open_until IS NULL
    RETURNING d.id
)
SELECT EXISTS (SELECT FROM delivered) AS delivered;

-- name: ListAttempts :many
SELECT a.number, a.trigger, a.started_at, a.duration_ms, a.class, a.status_code, a.error, a.remote, a.answer
FROM public.webhook_attempts AS a
WHERE a.delivery_id = @delivery_id
ORDER BY a.number;
