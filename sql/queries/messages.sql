-- name: GetOutgoingMessage :one
-- GetOutgoingMessage returns a message of the organization with what a send needs.
SELECT
    m.id, m.organization_id, m.conversation_id, m.body, m.status, m.waha_message_id,
    v.session, v.contact_id, c.phone
FROM public.messages AS m
JOIN public.conversations AS v ON v.id = m.conversation_id AND v.organization_id = m.organization_id
JOIN public.contacts AS c ON c.id = v.contact_id AND c.organization_id = m.organization_id
WHERE m.id = @id AND m.organization_id = @organization_id AND m.direction = 'out';

-- name: MarkMessageSending :exec
-- MarkMessageSending notes that a send has begun.
UPDATE public.messages SET status = 'sending', updated_at = now()
WHERE id = @id AND organization_id = @organization_id AND status IN ('queued', 'failed');

-- name: MarkMessageSent :exec
-- MarkMessageSent stores WAHA's id of a message that went out.
UPDATE public.messages SET status = 'sent', waha_message_id = @waha_message_id, updated_at = now()
WHERE id = @id AND organization_id = @organization_id AND waha_message_id IS NULL;

-- name: MarkMessageFailed :exec
-- MarkMessageFailed gives a message up, unless it went out.
UPDATE public.messages SET status = 'failed', updated_at = now()
WHERE id = @id AND organization_id = @organization_id AND waha_message_id IS NULL;

-- name: TakeStuckMessages :many
-- TakeStuckMessages locks some messages that have been on their way out since
-- before a time and have neither a job nor an event that goes on with them, and
-- returns whether one was given up on. A job of theirs is found by its args.
SELECT m.id, m.organization_id, m.conversation_id, m.updated_at,
    EXISTS (
        SELECT FROM river.river_job AS j
        WHERE j.args @> jsonb_build_object('message_id', m.id::text) AND j.args ? 'message_id' AND j.args ->> 'message_id' = m.id::text AND j.kind = @kind AND j.state IN ('cancelled', 'discarded')
    )::boolean AS gave_up
FROM public.messages AS m
WHERE m.status = 'sending' AND m.direction = 'out' AND m.updated_at < @before
    AND NOT EXISTS (
        SELECT FROM river.river_job AS j
        WHERE j.args @> jsonb_build_object('message_id', m.id::text) AND j.args ? 'message_id' AND j.args ->> 'message_id' = m.id::text AND j.kind = @kind
            AND j.state NOT IN ('cancelled', 'completed', 'discarded')
    )
    AND NOT EXISTS (
        SELECT FROM public.event_log AS e
        WHERE e.entity_kind = 'message' AND e.entity_id = m.id AND e.event_type = 'message.queued' AND e.status IN ('pending', 'processing')
    )
ORDER BY m.updated_at
LIMIT @max_messages
FOR UPDATE OF m SKIP LOCKED;
