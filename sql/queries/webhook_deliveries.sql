-- name: BeginDelivery :one
-- BeginDelivery counts one more attempt at delivering an event to a
-- subscription and returns the delivery.
INSERT INTO public.webhook_deliveries AS d (event_id, subscription_id, attempts)
VALUES (@event_id, @subscription_id, 1)
ON CONFLICT (event_id, subscription_id) DO UPDATE SET attempts = d.attempts + 1, updated_at = now()
RETURNING d.id, d.attempts;

-- name: FinishDelivery :exec
-- FinishDelivery records how an attempt ended; a null error means delivered.
UPDATE public.webhook_deliveries
SET last_error = sqlc.narg(last_error)::text,
    delivered_at = CASE WHEN sqlc.narg(last_error)::text IS NULL THEN now() END,
    updated_at = now()
WHERE id = @id;
