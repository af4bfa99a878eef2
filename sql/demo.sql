-- The demo tenant of `afluente dev`: an organization with one contact, and a
-- table whose trigger does what an application does, namely write its own row
-- and emit an event in one transaction.

INSERT INTO public.organizations (id, name)
VALUES ('00000000-0000-4000-8000-000000000001', 'Demo')
ON CONFLICT DO NOTHING;

INSERT INTO public.contacts (id, organization_id, name, phone)
VALUES ('00000000-0000-4000-8000-000000000002', '00000000-0000-4000-8000-000000000001', 'Ada', '+55 11 5550 0100')
ON CONFLICT DO NOTHING;

INSERT INTO public.conversations (id, organization_id, contact_id)
VALUES ('00000000-0000-4000-8000-000000000003', '00000000-0000-4000-8000-000000000001',
        '00000000-0000-4000-8000-000000000002')
ON CONFLICT DO NOTHING;

CREATE TABLE IF NOT EXISTS public.demo_messages (
    id         uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    body       text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE OR REPLACE FUNCTION public.demo_message_queued() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO public.messages (id, organization_id, conversation_id, body)
    VALUES (NEW.id, '00000000-0000-4000-8000-000000000001', '00000000-0000-4000-8000-000000000003', NEW.body);
    PERFORM public.emit_event(
        'message.queued', 'message', NEW.id,
        jsonb_build_object('message_id', NEW.id),
        jsonb_build_object('source', 'demo_messages'),
        '00000000-0000-4000-8000-000000000001');
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER demo_message_queued
    AFTER INSERT ON public.demo_messages
    FOR EACH ROW EXECUTE FUNCTION public.demo_message_queued();

-- Leads, whose changes are told by the trigger that comes with the bus.
CREATE TABLE IF NOT EXISTS public.demo_leads (
    id              uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    organization_id uuid NOT NULL DEFAULT '00000000-0000-4000-8000-000000000001',
    name            text NOT NULL,
    stage_id        uuid,
    owner_id        uuid,
    deleted_at      timestamptz,
    updated_at      timestamptz NOT NULL DEFAULT now()
);

CREATE OR REPLACE TRIGGER lead_events
    AFTER UPDATE OR DELETE ON public.demo_leads
    FOR EACH ROW EXECUTE FUNCTION public.emit_row_events('lead', 'stage_id=stage_changed', 'owner_id=assigned');
