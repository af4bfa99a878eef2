-- The application's own tables, in the least shape that this program needs.
-- Each is created only where the application has not made it already, and only
-- what was created here (told by its comment) is dropped on the way down.

-- +goose Up
-- +goose StatementBegin
DO $$
DECLARE
    marker CONSTANT text := 'Created by afluente.';
BEGIN
    IF to_regclass('public.organizations') IS NULL THEN
        CREATE TABLE public.organizations (
            id         uuid PRIMARY KEY DEFAULT gen_random_uuid(),
            name       text NOT NULL DEFAULT '',
            created_at timestamptz NOT NULL DEFAULT now()
        );
        EXECUTE format('COMMENT ON TABLE public.organizations IS %L', marker);
    END IF;

    IF to_regclass('public.contacts') IS NULL THEN
        CREATE TABLE public.contacts (
            id              uuid PRIMARY KEY DEFAULT gen_random_uuid(),
            organization_id uuid NOT NULL REFERENCES public.organizations (id) ON DELETE CASCADE,
            name            text,
            phone           text,
            anonymized_at   timestamptz,
            created_at      timestamptz NOT NULL DEFAULT now()
        );
        CREATE INDEX contacts_organization_idx ON public.contacts (organization_id);
        EXECUTE format('COMMENT ON TABLE public.contacts IS %L', marker);
    END IF;

    IF to_regclass('public.conversations') IS NULL THEN
        CREATE TABLE public.conversations (
            id              uuid PRIMARY KEY DEFAULT gen_random_uuid(),
            organization_id uuid NOT NULL REFERENCES public.organizations (id) ON DELETE CASCADE,
            contact_id      uuid NOT NULL REFERENCES public.contacts (id) ON DELETE CASCADE,
            session         text NOT NULL DEFAULT 'default',
            created_at      timestamptz NOT NULL DEFAULT now()
        );
        CREATE INDEX conversations_organization_idx ON public.conversations (organization_id);
        CREATE INDEX conversations_contact_idx ON public.conversations (contact_id);
        EXECUTE format('COMMENT ON TABLE public.conversations IS %L', marker);
    END IF;

    IF to_regclass('public.messages') IS NULL THEN
        CREATE TABLE public.messages (
            id              uuid PRIMARY KEY DEFAULT gen_random_uuid(),
            organization_id uuid NOT NULL REFERENCES public.organizations (id) ON DELETE CASCADE,
            conversation_id uuid NOT NULL REFERENCES public.conversations (id) ON DELETE CASCADE,
            direction       text NOT NULL DEFAULT 'out' CHECK (direction IN ('in', 'out')),
            body            text NOT NULL DEFAULT '',
            status          text NOT NULL DEFAULT 'queued'
                            CHECK (status IN ('queued', 'sending', 'sent', 'delivered', 'read', 'failed', 'received')),
            waha_message_id text,
            created_at      timestamptz NOT NULL DEFAULT now(),
            updated_at      timestamptz NOT NULL DEFAULT now(),
            UNIQUE (organization_id, waha_message_id)
        );
        CREATE INDEX messages_conversation_idx ON public.messages (conversation_id);
        EXECUTE format('COMMENT ON TABLE public.messages IS %L', marker);
    END IF;

    IF to_regclass('public.webhook_subscriptions') IS NULL THEN
        CREATE TABLE public.webhook_subscriptions (
            id                   uuid PRIMARY KEY DEFAULT gen_random_uuid(),
            organization_id      uuid NOT NULL REFERENCES public.organizations (id) ON DELETE CASCADE,
            url                  text NOT NULL,
            secret               text NOT NULL CHECK (secret <> ''),
            event_types          text[] NOT NULL,
            enabled              boolean NOT NULL DEFAULT true,
            consecutive_failures integer NOT NULL DEFAULT 0,
            created_at           timestamptz NOT NULL DEFAULT now()
        );
        CREATE INDEX webhook_subscriptions_organization_idx ON public.webhook_subscriptions (organization_id);
        EXECUTE format('COMMENT ON TABLE public.webhook_subscriptions IS %L', marker);
    END IF;
END $$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
DO $$
DECLARE
    table_name text;
BEGIN
    FOREACH table_name IN ARRAY ARRAY[
        'webhook_subscriptions', 'messages', 'conversations', 'contacts', 'organizations'
    ] LOOP
        IF obj_description(to_regclass('public.' || table_name), 'pg_class') = 'Created by afluente.' THEN
            EXECUTE format('DROP TABLE public.%I', table_name);
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd
