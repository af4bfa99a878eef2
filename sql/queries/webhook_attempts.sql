-- name: FinishAttempt :exec
UPDATE public.webhook_attempts
SET duration_ms = @duration_ms, class = @class, status_code = @status_code, error = @error, remote = @remote, answer = @answer
WHERE delivery_id = @delivery_id AND number = @number;

-- name: ListAttempts :many
SELECT a.number, a.trigger, a.started_at, a.duration_ms, a.class, a.status_code, a.error, a.remote, a.answer
FROM public.webhook_attempts AS a
WHERE a.delivery_id = @delivery_id
ORDER BY a.number;
