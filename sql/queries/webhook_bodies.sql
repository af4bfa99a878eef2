-- name: FreezeBodies :exec
-- FreezeBodies keeps what is sent of events, where that was not done before. The
-- arrays run in step.
INSERT INTO public.webhook_bodies (event_id, organization_id, body)
SELECT e.event_id, e.organization_id, e.body
FROM (
    SELECT unnest(@event_ids::uuid[]) AS event_id, unnest(@organization_ids::uuid[]) AS organization_id, unnest(@bodies::bytea[]) AS body
) AS e
ORDER BY e.event_id
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
