-- name: InsertAudit :exec
-- InsertAudit records what somebody did to a row of an organization.
INSERT INTO public.audit_log (id, organization_id, actor_id, action, entity_kind, entity_id, reason, metadata, created_at)
VALUES (gen_random_uuid(), @organization_id, @actor_id, @action, @entity_kind, @entity_id, @reason, @metadata, now());
