-- name: ListUndeliveredSubscriptions :many
-- ListUndeliveredSubscriptions returns the enabled subscriptions of an
-- organization that want events of a type and do not have this event yet. The
-- pattern * never matches the events about webhooks themselves, or one dead
-- endpoint would feed itself for ever.
SELECT s.id, s.url, s.secret
FROM public.webhook_subscriptions AS s
WHERE s.organization_id = @organization_id
    AND s.enabled
    AND (@event_type::text = ANY (s.event_types)
        OR ('*' = ANY (s.event_types) AND @event_type::text NOT LIKE 'webhook.%'))
    AND NOT EXISTS (
        SELECT FROM public.webhook_deliveries AS d
        WHERE d.event_id = @event_id AND d.subscription_id = s.id AND d.delivered_at IS NOT NULL
    )
ORDER BY s.id;

-- name: PutWebhookSubscription :exec
-- PutWebhookSubscription makes an enabled subscription to every event, or
-- points the one with this id to another URL.
INSERT INTO public.webhook_subscriptions (id, organization_id, url, secret, event_types)
VALUES (@id, @organization_id, @url, @secret, '{*}')
ON CONFLICT (id) DO UPDATE SET url = excluded.url, secret = excluded.secret, enabled = true;
