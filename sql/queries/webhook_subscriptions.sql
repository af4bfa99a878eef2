-- name: ListWantingSubscriptions :many
-- ListWantingSubscriptions returns the subscriptions that want events, of the
-- organization of each, disabled ones too. The patterns * and lead.* match what they
-- seem to, but * never the events about webhooks themselves, or one dead endpoint
-- would feed itself for ever. The arrays run in step.
SELECT DISTINCT e.id::uuid AS event_id, s.id AS subscription_id
FROM (
    SELECT unnest(@event_ids::uuid[]) AS id, unnest(@organization_ids::uuid[]) AS organization_id, unnest(@event_types::text[]) AS event_type
) AS e
JOIN public.webhook_subscriptions AS s ON s.organization_id = e.organization_id
WHERE e.event_type = ANY (s.event_types)
    OR split_part(e.event_type, '.', 1) || '.*' = ANY (s.event_types)
    OR ('*' = ANY (s.event_types) AND e.event_type NOT LIKE 'webhook.%')
ORDER BY event_id, subscription_id;

-- name: PutWebhookSubscription :exec
-- PutWebhookSubscription makes an enabled subscription to every event, or
-- points the one with this id to another URL.
INSERT INTO public.webhook_subscriptions (id, organization_id, url, secret, event_types)
VALUES (@id, @organization_id, @url, @secret, '{*}')
ON CONFLICT (id) DO UPDATE SET url = excluded.url, enabled = true;

-- name: InsertSubscription :exec
INSERT INTO public.webhook_subscriptions (
    id, organization_id, url, event_types, enabled, description, sealed_headers, headers_key, max_concurrent, rate_per_second
) VALUES (
    @id, @organization_id, @url, @event_types, @enabled, @description, @sealed_headers, @headers_key, @max_concurrent, @rate_per_second
);

-- name: UpdateSubscription :exec
UPDATE public.webhook_subscriptions
SET url = @url, event_types = @event_types, description = @description, sealed_headers = @sealed_headers,
    headers_key = @headers_key, max_concurrent = @max_concurrent, rate_per_second = @rate_per_second
WHERE id = @id;

-- name: ListSubscriptions :many
-- ListSubscriptions returns the subscriptions of an organization, or all.
SELECT s.*
FROM public.webhook_subscriptions AS s
WHERE (sqlc.narg(organization_id)::uuid IS NULL OR s.organization_id = sqlc.narg(organization_id))
ORDER BY s.created_at, s.id;

-- name: LockSubscription :one
-- LockSubscription returns a subscription, of one organization if that is not
-- null, and keeps others from changing it until the transaction ends.
SELECT s.*
FROM public.webhook_subscriptions AS s
WHERE s.id = @id AND (sqlc.narg(organization_id)::uuid IS NULL OR s.organization_id = sqlc.narg(organization_id))
FOR UPDATE;

-- name: DeleteSubscription :exec
DELETE FROM public.webhook_subscriptions WHERE id = @id;

-- name: EnableSubscription :exec
-- EnableSubscription changes nothing of one that is enabled.
UPDATE public.webhook_subscriptions SET enabled = true WHERE id = @id AND NOT enabled;

-- name: DisableSubscription :execrows
-- DisableSubscription returns 1 if the subscription was enabled.
UPDATE public.webhook_subscriptions SET enabled = false, disabled_reason = @reason WHERE id = @id AND enabled;

-- name: SetBreaker :exec
-- SetBreaker records what an attempt says about the receiver.
UPDATE public.webhook_subscriptions
SET consecutive_failures = @consecutive_failures, unsafe_failures = @unsafe_failures, probing = @probing,
    open_until = @open_until, opened_at = @opened_at
WHERE id = @id;

-- name: SetSecretFault :exec
UPDATE public.webhook_subscriptions SET secret_fault = @fault WHERE id = @id AND secret_fault IS DISTINCT FROM @fault;

-- name: SealHeaders :exec
UPDATE public.webhook_subscriptions SET sealed_headers = @sealed, headers_key = @key_id WHERE id = @id;

-- name: ListPlainSecrets :many
-- ListPlainSecrets returns the subscriptions whose secret came by SQL and is not
-- sealed yet.
SELECT s.id FROM public.webhook_subscriptions AS s WHERE s.secret IS NOT NULL ORDER BY s.id LIMIT @max_rows;

-- name: ListHeadersOfOtherKeys :many
SELECT s.id FROM public.webhook_subscriptions AS s
WHERE s.sealed_headers IS NOT NULL AND s.headers_key <> @key_id
ORDER BY s.id LIMIT @max_rows;

-- name: ClearPlainSecret :exec
UPDATE public.webhook_subscriptions SET secret = NULL WHERE id = @id;

-- name: CountSubscriptions :one
-- CountSubscriptions returns how many an organization has, and keeps others from
-- adding one meanwhile; no row without the organization.
SELECT (SELECT count(*) FROM public.webhook_subscriptions AS s WHERE s.organization_id = o.id)::bigint AS subscriptions
FROM public.organizations AS o
WHERE o.id = @organization_id
FOR NO KEY UPDATE;

-- name: MeasureWebhooks :many
-- MeasureWebhooks returns for each organization how many of its subscriptions were
-- disabled in the last hour, other than by a user, and how many cannot sign.
SELECT s.organization_id,
    count(*) FILTER (WHERE NOT s.enabled AND s.disabled_reason <> 'by_user' AND s.disabled_at > now() - interval '1 hour') AS disabled,
    count(*) FILTER (WHERE s.enabled AND s.secret_fault IS NOT NULL) AS faulty
FROM public.webhook_subscriptions AS s
GROUP BY s.organization_id;

-- name: CountSecrets :one
-- CountSecrets returns how many subscriptions have a secret in plain, and how many
-- cannot sign.
SELECT count(*) FILTER (WHERE s.secret IS NOT NULL) AS plain, count(*) FILTER (WHERE s.enabled AND s.secret_fault IS NOT NULL) AS faulty
FROM public.webhook_subscriptions AS s;
