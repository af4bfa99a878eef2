-- name: ListSecrets :many
-- ListSecrets returns the secrets that sign for a subscription, newest first.
SELECT w.id, w.sealed, w.key_id, w.legacy, w.created_at, w.expires_at
FROM public.webhook_secrets AS w
WHERE w.subscription_id = @subscription_id AND (w.expires_at IS NULL OR w.expires_at > clock_timestamp())
ORDER BY w.created_at DESC, w.id;

-- name: InsertSecret :exec
INSERT INTO public.webhook_secrets (id, subscription_id, sealed, key_id, legacy)
VALUES (@id, @subscription_id, @sealed, @key_id, @legacy);

-- name: ClearLegacySecret :exec
UPDATE public.webhook_secrets SET legacy = false WHERE subscription_id = @subscription_id AND legacy;

-- name: SetLegacySecret :exec
UPDATE public.webhook_secrets SET legacy = true WHERE id = @id;

-- name: DeleteExpiredSecrets :execrows
DELETE FROM public.webhook_secrets WHERE expires_at <= clock_timestamp();

-- name: ListSecretsOfOtherKeys :many
SELECT w.id, w.subscription_id, w.sealed, w.key_id FROM public.webhook_secrets AS w WHERE w.key_id <> @key_id ORDER BY w.id LIMIT @max_rows;

-- name: ResealSecret :exec
UPDATE public.webhook_secrets SET sealed = @sealed, key_id = @key_id WHERE id = @id;

-- name: DeleteSecrets :exec
DELETE FROM public.webhook_secrets WHERE subscription_id = @subscription_id;

-- name: ExpireSecrets :exec
-- ExpireSecrets ends all secrets of a subscription after a time, unless they end
-- earlier.
UPDATE public.webhook_secrets
SET expires_at = least(expires_at, clock_timestamp() + @grace::interval)
WHERE subscription_id = @subscription_id;
