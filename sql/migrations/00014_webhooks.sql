-- Webhooks: a delivery is a row with a state of its own, for which a River job
-- is only the timer; what it sends is frozen, and its secrets are sealed.

-- +goose Up
-- The application may have brought the table along; what it lacks is added, and
-- told by the comment for the way down.
-- +goose StatementBegin
DO $$
DECLARE
    added record;
BEGIN
    FOR added IN
        SELECT * FROM (VALUES
            ('consecutive_failures', 'integer NOT NULL DEFAULT 0', 'Failures since the last success.'),
            ('created_at', 'timestamptz NOT NULL DEFAULT now()', 'When it was made.'),
            ('description', 'text NOT NULL DEFAULT ''''', 'What its owner calls it.'),
            ('sealed_headers', 'bytea', 'Its custom headers as JSON, sealed.'),
            ('headers_key', 'text', 'The key that sealed_headers was sealed with.'),
            ('max_concurrent', 'integer NOT NULL DEFAULT 4 CHECK (max_concurrent BETWEEN 1 AND 100)', 'Deliveries under way at a time.'),
            ('rate_per_second', 'integer NOT NULL DEFAULT 10 CHECK (rate_per_second BETWEEN 1 AND 1000)', 'Deliveries a second.'),
            ('next_slot_at', 'timestamptz', 'The first time of the rate that nobody has taken.'),
            ('open_until', 'timestamptz', 'Nothing is sent before: the breaker is open.'),
            ('opened_at', 'timestamptz', 'When the breaker opened; failures of earlier attempts do not count.'),
            ('probing', 'boolean NOT NULL DEFAULT false', 'One delivery at a time until one succeeds.'),
            ('unsafe_failures', 'integer NOT NULL DEFAULT 0', 'Refused addresses since the last one that was not.'),
            ('disabled_at', 'timestamptz', 'Since when it is disabled.'),
            ('disabled_reason', 'text', 'Why it is disabled, such as 10_consecutive_failures.'),
            ('secret_fault', 'text', 'Why its secrets cannot sign; null while they can.')
        ) AS c (name, definition, meaning)
    LOOP
        IF NOT EXISTS (
            SELECT FROM pg_attribute
            WHERE attrelid = 'public.webhook_subscriptions'::regclass AND attname = added.name AND NOT attisdropped
        ) THEN
            EXECUTE format('ALTER TABLE public.webhook_subscriptions ADD COLUMN %I %s', added.name, added.definition);
            EXECUTE format('COMMENT ON COLUMN public.webhook_subscriptions.%I IS %L', added.name, 'Added by afluente. ' || added.meaning);
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd

ALTER TABLE public.webhook_subscriptions ALTER COLUMN secret DROP NOT NULL;

CREATE TABLE public.webhook_secrets (
    id              uuid PRIMARY KEY,
    subscription_id uuid NOT NULL REFERENCES public.webhook_subscriptions (id) ON DELETE CASCADE,
    sealed          bytea NOT NULL,
    key_id          text NOT NULL,
    legacy          boolean NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at      timestamptz
);
CREATE INDEX webhook_secrets_subscription_idx ON public.webhook_secrets (subscription_id);
CREATE UNIQUE INDEX webhook_secrets_legacy_key ON public.webhook_secrets (subscription_id) WHERE legacy;
CREATE INDEX webhook_secrets_expires_idx ON public.webhook_secrets (expires_at) WHERE expires_at IS NOT NULL;
COMMENT ON TABLE public.webhook_secrets IS
    'The secrets that sign for a subscription, sealed with AES-256-GCM by a key that the database does not have.';
COMMENT ON COLUMN public.webhook_secrets.legacy IS
    'Signs the headers that hold one signature; the others sign webhook-signature alone.';

CREATE TABLE public.webhook_bodies (
    event_id        uuid PRIMARY KEY,
    organization_id uuid NOT NULL REFERENCES public.organizations (id) ON DELETE CASCADE,
    body            bytea NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX webhook_bodies_created_idx ON public.webhook_bodies (created_at);
CREATE INDEX webhook_bodies_organization_idx ON public.webhook_bodies (organization_id);
COMMENT ON TABLE public.webhook_bodies IS
    'What the deliveries of an event send, frozen byte for byte, so that every attempt is the same.';

-- Rows that are not delivered yet wait for the job of their event, which gives
-- them jobs of their own.
ALTER TABLE public.webhook_deliveries
    DROP CONSTRAINT webhook_deliveries_subscription_id_fkey,
    ADD COLUMN organization_id uuid REFERENCES public.organizations (id) ON DELETE CASCADE,
    ADD COLUMN event_type text NOT NULL DEFAULT '',
    ADD COLUMN event_created_at timestamptz,
    ADD COLUMN state text NOT NULL DEFAULT 'pending'
        CHECK (state IN ('pending', 'sending', 'succeeded', 'dead', 'held', 'cancelled')),
    ADD COLUMN trigger text NOT NULL DEFAULT 'auto' CHECK (trigger IN ('auto', 'manual', 'recover')),
    ADD COLUMN max_attempts integer NOT NULL DEFAULT 8,
    ADD COLUMN next_attempt_at timestamptz NOT NULL DEFAULT now(),
    ADD COLUMN has_slot boolean NOT NULL DEFAULT false,
    ADD COLUMN lease_until timestamptz,
    ADD COLUMN status_code integer,
    ADD COLUMN error_class text,
    ADD COLUMN job_id bigint,
    ADD COLUMN resend_key text;
UPDATE public.webhook_deliveries AS d
SET organization_id = s.organization_id,
    state = CASE WHEN d.delivered_at IS NULL THEN 'pending' ELSE 'succeeded' END
FROM public.webhook_subscriptions AS s
WHERE s.id = d.subscription_id;
ALTER TABLE public.webhook_deliveries ALTER COLUMN organization_id SET NOT NULL;
CREATE INDEX webhook_deliveries_subscription_idx ON public.webhook_deliveries (subscription_id, created_at, id);
CREATE INDEX webhook_deliveries_open_idx ON public.webhook_deliveries (subscription_id, state)
    WHERE state IN ('pending', 'sending', 'dead', 'held');
CREATE INDEX webhook_deliveries_organization_idx ON public.webhook_deliveries (organization_id);
CREATE INDEX webhook_deliveries_created_idx ON public.webhook_deliveries (created_at);
COMMENT ON TABLE public.webhook_deliveries IS
    'One row per (event, subscription): the truth about a delivery. The job of job_id is its timer.';
COMMENT ON COLUMN public.webhook_deliveries.max_attempts IS
    'The number of the last attempt before it is given up. A re-send moves it.';
COMMENT ON COLUMN public.webhook_deliveries.has_slot IS
    'next_attempt_at is a time that the rate of the subscription has given to this delivery.';
COMMENT ON COLUMN public.webhook_deliveries.resend_key IS
    'The idempotency key of the last re-send.';
COMMENT ON COLUMN public.webhook_deliveries.lease_until IS
    'Until when an attempt that is under way may last; after it the attempt is lost.';

CREATE TABLE public.webhook_attempts (
    delivery_id uuid NOT NULL REFERENCES public.webhook_deliveries (id) ON DELETE CASCADE,
    number      integer NOT NULL,
    trigger     text NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    duration_ms integer,
    class       text NOT NULL DEFAULT 'started',
    status_code integer,
    error       text,
    remote      text,
    answer      text,
    PRIMARY KEY (delivery_id, number)
);
COMMENT ON TABLE public.webhook_attempts IS
    'Every POST of a delivery, written before it is made: one that stays ''started'' was cut off, and its outcome is unknown.';

-- +goose StatementBegin
DO $$
DECLARE
    table_name text;
BEGIN
    FOREACH table_name IN ARRAY ARRAY['webhook_secrets', 'webhook_bodies', 'webhook_attempts'] LOOP
        EXECUTE format('ALTER TABLE public.%I ENABLE ROW LEVEL SECURITY', table_name);
        EXECUTE format('REVOKE ALL ON public.%I FROM anon, authenticated', table_name);
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON public.%I TO service_role', table_name);
        EXECUTE format('CREATE POLICY service ON public.%I TO service_role USING (true) WITH CHECK (true)', table_name);
    END LOOP;
END $$;
-- +goose StatementEnd

-- Whoever changes a subscription, by the API or by SQL: one that is enabled
-- begins without failures and proves itself with one delivery; of one that is
-- deleted nothing waits any more.
-- +goose StatementBegin
CREATE FUNCTION public.webhook_subscription_changed() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        UPDATE public.webhook_deliveries
        SET state = 'cancelled', updated_at = now()
        WHERE subscription_id = OLD.id AND state IN ('pending', 'sending', 'dead', 'held');
        RETURN OLD;
    END IF;
    IF NEW.enabled THEN
        NEW.consecutive_failures := 0;
        NEW.unsafe_failures := 0;
        NEW.open_until := NULL;
        NEW.next_slot_at := NULL;
        NEW.opened_at := now();
        NEW.probing := true;
        NEW.disabled_at := NULL;
        NEW.disabled_reason := NULL;
    ELSE
        NEW.disabled_at := now();
        NEW.disabled_reason := coalesce(NEW.disabled_reason, 'by_user');
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION public.webhook_subscription_changed() FROM PUBLIC, anon, authenticated, service_role;

CREATE TRIGGER afluente_enabled
    BEFORE UPDATE OF enabled ON public.webhook_subscriptions
    FOR EACH ROW WHEN (NEW.enabled IS DISTINCT FROM OLD.enabled)
    EXECUTE FUNCTION public.webhook_subscription_changed();
CREATE TRIGGER afluente_deleted
    BEFORE DELETE ON public.webhook_subscriptions
    FOR EACH ROW EXECUTE FUNCTION public.webhook_subscription_changed();

-- +goose Down
DROP TRIGGER afluente_deleted ON public.webhook_subscriptions;
DROP TRIGGER afluente_enabled ON public.webhook_subscriptions;
DROP FUNCTION public.webhook_subscription_changed();
DROP TABLE public.webhook_attempts;
DELETE FROM public.webhook_deliveries AS d
WHERE NOT EXISTS (SELECT FROM public.webhook_subscriptions AS s WHERE s.id = d.subscription_id);
DROP INDEX public.webhook_deliveries_subscription_idx, public.webhook_deliveries_open_idx,
    public.webhook_deliveries_organization_idx, public.webhook_deliveries_created_idx;
ALTER TABLE public.webhook_deliveries
    ADD FOREIGN KEY (subscription_id) REFERENCES public.webhook_subscriptions (id) ON DELETE CASCADE,
    DROP COLUMN organization_id,
    DROP COLUMN event_type,
    DROP COLUMN event_created_at,
    DROP COLUMN state,
    DROP COLUMN trigger,
    DROP COLUMN max_attempts,
    DROP COLUMN next_attempt_at,
    DROP COLUMN has_slot,
    DROP COLUMN lease_until,
    DROP COLUMN status_code,
    DROP COLUMN error_class,
    DROP COLUMN job_id,
    DROP COLUMN resend_key;
COMMENT ON TABLE public.webhook_deliveries IS
    'One row per (event, subscription), so that a retry of the event does not deliver again to those who have it.';
DROP TABLE public.webhook_bodies;
DROP TABLE public.webhook_secrets;

-- SQL cannot open a sealed secret. What has no other is disabled, with a secret
-- that signs nothing.
UPDATE public.webhook_subscriptions SET secret = 'whsec_', enabled = false WHERE secret IS NULL;
ALTER TABLE public.webhook_subscriptions ALTER COLUMN secret SET NOT NULL;
-- +goose StatementBegin
DO $$
DECLARE
    column_name text;
BEGIN
    FOR column_name IN
        SELECT attname FROM pg_attribute
        WHERE attrelid = 'public.webhook_subscriptions'::regclass AND attnum > 0 AND NOT attisdropped
            AND col_description(attrelid, attnum) LIKE 'Added by afluente. %'
    LOOP
        EXECUTE format('ALTER TABLE public.webhook_subscriptions DROP COLUMN %I', column_name);
    END LOOP;
END $$;
-- +goose StatementEnd
