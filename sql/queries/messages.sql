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
