-- name: FreezeBody :exec
-- FreezeBody keeps what is sent of an event, unless that was done before.
INSERT INTO public.webhook_bodies (event_id, organization_id, body) VALUES (@event_id, @organization_id, @body)
ON CONFLICT DO NOTHING;

-- name: DeleteOldBodies :execrows
-- DeleteOldBodies forgets bodies that no delivery needs any more.
DELETE FROM public.webhook_bodies
WHERE event_id IN (
    SELECT b.event_id FROM public.webhook_bodies AS b
    WHERE b.created_at < @before
        AND NOT EXISTS (SELECT FROM public.webhook_deliveries AS d WHERE d.event_id = b.event_id)
    LIMIT @max_rows
);
