-- What an application brings along, in the least shape that this program
-- needs: the roles of its users, auth.organization_id() and its own tables.
-- Each is created only where it is absent, and only what was created here
-- (told by its comment) is dropped on the way down. Roles stay: they belong to
-- the whole server, and another database may use them.

-- +goose Up
-- +goose StatementBegin
DO $$
DECLARE
    role_name text;
BEGIN
    FOREACH role_name IN ARRAY ARRAY['anon', 'authenticated', 'service_role'] LOOP
        BEGIN
            IF to_regrole(role_name) IS NULL THEN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role_name);
            END IF;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL; -- another database was faster
            WHEN insufficient_privilege THEN
                RAISE insufficient_privilege USING
                    MESSAGE = format('the role %s is missing and may not be created by %s', role_name, current_user),
                    HINT = 'Ask an administrator for: CREATE ROLE anon NOLOGIN; CREATE ROLE authenticated NOLOGIN; CREATE ROLE service_role NOLOGIN;';
        END;
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
DO $$
BEGIN
    IF to_regnamespace('auth') IS NULL THEN
        CREATE SCHEMA auth;
        COMMENT ON SCHEMA auth IS 'Created by afluente.';
        GRANT USAGE ON SCHEMA auth TO anon, authenticated, service_role;
    END IF;

    IF to_regprocedure('auth.organization_id()') IS NULL THEN
        CREATE FUNCTION auth.organization_id() RETURNS uuid
        LANGUAGE sql STABLE
        SET search_path = pg_catalog, pg_temp
        RETURN (
            SELECT CASE WHEN c.id ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN c.id::uuid END
            FROM (
                SELECT coalesce(claims ->> 'organization_id', claims #>> '{app_metadata,organization_id}') AS id
                FROM (SELECT nullif(current_setting('request.jwt.claims', true), '')::jsonb AS claims) AS j
            ) AS c
        );
        COMMENT ON FUNCTION auth.organization_id() IS 'Created by afluente. The organization in the claims of the request''s token; null for none.';
        REVOKE ALL ON FUNCTION auth.organization_id() FROM PUBLIC;
        GRANT EXECUTE ON FUNCTION auth.organization_id() TO anon, authenticated, service_role;
    END IF;
END $$;
-- +goose StatementEnd

-- The table that goose keeps its own account in.
ALTER TABLE public.afluente_migrations ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.afluente_migrations FROM anon, authenticated;
CREATE POLICY readable ON public.afluente_migrations FOR SELECT USING (true);

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

    IF to_regclass('public.audit_log') IS NULL THEN
        CREATE TABLE public.audit_log (
            id              uuid PRIMARY KEY DEFAULT gen_random_uuid(),
            organization_id uuid REFERENCES public.organizations (id) ON DELETE CASCADE,
            actor_id        text,
            action          text NOT NULL,
            entity_kind     text,
            entity_id       uuid,
            reason          text,
            metadata        jsonb NOT NULL DEFAULT '{}'::jsonb,
            created_at      timestamptz NOT NULL DEFAULT now()
        );
        CREATE INDEX audit_log_created_idx ON public.audit_log (created_at);
        CREATE INDEX audit_log_organization_idx ON public.audit_log (organization_id, created_at);
        CREATE INDEX audit_log_request_idx ON public.audit_log ((metadata ->> 'request_id')) WHERE metadata ? 'request_id';
        EXECUTE format('COMMENT ON TABLE public.audit_log IS %L', marker);
    END IF;
END $$;
-- +goose StatementEnd

-- A tenant reads his own rows, but for webhook_subscriptions, which hold secrets.
-- +goose StatementBegin
DO $$
DECLARE
    own        CONSTANT jsonb := '{"organizations": "id", "contacts": "organization_id", "conversations": "organization_id",
                                   "messages": "organization_id", "audit_log": "organization_id", "webhook_subscriptions": null}';
    table_name text;
    own_column text;
BEGIN
    FOR table_name, own_column IN SELECT key, value FROM jsonb_each_text(own) LOOP
        IF obj_description(to_regclass('public.' || table_name), 'pg_class') = 'Created by afluente.' THEN
            EXECUTE format('ALTER TABLE public.%I ENABLE ROW LEVEL SECURITY', table_name);
            EXECUTE format('REVOKE ALL ON public.%I FROM anon, authenticated', table_name);
            EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON public.%I TO service_role', table_name);
            EXECUTE format('CREATE POLICY service ON public.%I TO service_role USING (true) WITH CHECK (true)', table_name);
            IF own_column IS NOT NULL THEN
                EXECUTE format('GRANT SELECT ON public.%I TO authenticated', table_name);
                EXECUTE format('CREATE POLICY select_own_org ON public.%I FOR SELECT USING (%I = (SELECT auth.organization_id()))',
                    table_name, own_column);
            END IF;
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose Down
DROP POLICY readable ON public.afluente_migrations;

-- +goose StatementBegin
DO $$
DECLARE
    table_name text;
BEGIN
    FOREACH table_name IN ARRAY ARRAY[
        'audit_log', 'webhook_subscriptions', 'messages', 'conversations', 'contacts', 'organizations'
    ] LOOP
        IF obj_description(to_regclass('public.' || table_name), 'pg_class') = 'Created by afluente.' THEN
            EXECUTE format('DROP TABLE public.%I', table_name);
        END IF;
    END LOOP;

    IF obj_description(to_regprocedure('auth.organization_id()'), 'pg_proc') LIKE 'Created by afluente.%' THEN
        DROP FUNCTION auth.organization_id();
    END IF;
    IF obj_description(to_regnamespace('auth'), 'pg_namespace') = 'Created by afluente.' THEN
        DROP SCHEMA auth; -- refused, with all else left as it was, where the application put something there
    END IF;
END $$;
-- +goose StatementEnd
