-- +goose Up
CREATE TABLE public.event_log (
    id              uuid NOT NULL DEFAULT gen_random_uuid(),
    organization_id uuid NOT NULL REFERENCES public.organizations (id) ON DELETE CASCADE,
    event_type      text NOT NULL,
    entity_kind     text NOT NULL,
    entity_id       uuid,
    payload         jsonb NOT NULL DEFAULT '{}'::jsonb,
    metadata        jsonb NOT NULL DEFAULT '{}'::jsonb,
    consumers       text[] NOT NULL DEFAULT '{}',
    consumed_by     text[] NOT NULL DEFAULT '{}',
    dead_consumers  text[] NOT NULL DEFAULT '{}',
    retries         jsonb,
    schema_fault    text,
    attempts        smallint NOT NULL DEFAULT 0,
    last_error      text,
    next_attempt_at timestamptz,
    status          text NOT NULL DEFAULT 'pending'
                    CHECK (status IN ('pending', 'processing', 'done', 'dead')),
    created_at      timestamptz NOT NULL DEFAULT now(),
    updated_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (id, created_at),
    CONSTRAINT event_type_format
        CHECK (event_type ~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$')
) PARTITION BY RANGE (created_at);

COMMENT ON TABLE public.event_log IS
    'The event bus. Application code and triggers insert here in their own transaction; the bridge turns each row into one River job per consumer.';
COMMENT ON COLUMN public.event_log.consumers IS
    'To whom the event was fanned out.';
COMMENT ON COLUMN public.event_log.consumed_by IS
    'The consumers whose job is completed.';
COMMENT ON COLUMN public.event_log.dead_consumers IS
    'The consumers whose job is discarded or cancelled and waits for an operator.';
COMMENT ON COLUMN public.event_log.retries IS
    'Consumer to the time of its coming retry; null when none waits. next_attempt_at is the earliest of them.';
COMMENT ON COLUMN public.event_log.schema_fault IS
    'In what the event departs from the catalogue in event_types; null when it does not.';
COMMENT ON COLUMN public.event_log.attempts IS
    'The highest attempt among the event''s jobs.';
COMMENT ON COLUMN public.event_log.last_error IS
    'The newest error, with the name of its consumer in front.';
COMMENT ON COLUMN public.event_log.next_attempt_at IS
    'Pending: not fanned out before this time. Processing: the earliest coming retry.';
COMMENT ON COLUMN public.event_log.status IS
    'pending: not fanned out yet; processing: a job is neither finished nor dead; done: every consumer has consumed it; dead: a job waits in the dead letters.';

-- Due rows in the order in which they became due. The predicate holds no
-- now(), which PostgreSQL refuses in an index; an event that waits for a later
-- day sorts behind the due ones and so costs the bridge nothing.
CREATE INDEX event_log_pending_idx ON public.event_log (coalesce(next_attempt_at, created_at))
    WHERE status = 'pending';
CREATE INDEX event_log_org_type_idx ON public.event_log (organization_id, event_type, created_at DESC);
CREATE INDEX event_log_dead_idx ON public.event_log (organization_id, created_at DESC)
    WHERE status = 'dead';
CREATE INDEX event_log_entity_idx ON public.event_log (entity_kind, entity_id, created_at DESC)
    WHERE entity_id IS NOT NULL;
CREATE INDEX event_log_consumed_by_gin ON public.event_log USING gin (consumed_by);

-- What happened to a request: `afluente events trace`.
CREATE INDEX event_log_request_idx ON public.event_log ((metadata ->> 'request_id'))
    WHERE metadata ? 'request_id';

-- Reads by time alone: the archive, and a stream that was cut off. It is a few
-- pages, as events come in the order of time.
CREATE INDEX event_log_created_idx ON public.event_log USING brin (created_at);

-- For doctor and the metric: what departs from the catalogue is rare.
CREATE INDEX event_log_fault_idx ON public.event_log (event_type, created_at)
    WHERE schema_fault IS NOT NULL;

-- A tenant reads the events of his own organization and writes none: he emits.
ALTER TABLE public.event_log ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.event_log FROM anon, authenticated;
GRANT SELECT ON public.event_log TO authenticated;
GRANT SELECT, INSERT, UPDATE, DELETE ON public.event_log TO service_role;
CREATE POLICY event_log_select_own_org ON public.event_log
    FOR SELECT USING (organization_id = (SELECT auth.organization_id()));
CREATE POLICY service ON public.event_log TO service_role USING (true) WITH CHECK (true);

CREATE TABLE public.event_log_default PARTITION OF public.event_log DEFAULT;
ALTER TABLE public.event_log_default ENABLE ROW LEVEL SECURITY; -- the parent's policies do not guard it
REVOKE ALL ON public.event_log_default FROM anon, authenticated, service_role;

-- +goose StatementBegin
CREATE FUNCTION public.create_event_log_partition(p_at timestamptz) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET lock_timeout = '1s'
AS $$
DECLARE
    v_month timestamptz := date_trunc('month', p_at);
    v_name  text := 'event_log_' || to_char(v_month, 'YYYYMM');
BEGIN
    -- One caller at a time, so that two do not both try to create a month.
    PERFORM pg_advisory_xact_lock(hashtextextended('afluente.event_log_partitions', 0));
    IF to_regclass('public.' || v_name) IS NOT NULL THEN
        RETURN false;
    END IF;
    -- Nobody may be writing: an insert that is on its way to the default
    -- partition would be refused there once the month has its own.
    LOCK TABLE public.event_log IN SHARE ROW EXCLUSIVE MODE;
    EXECUTE format('CREATE TABLE public.%I (LIKE public.event_log INCLUDING ALL)', v_name);
    EXECUTE format('ALTER TABLE public.%I ENABLE ROW LEVEL SECURITY', v_name);
    EXECUTE format('REVOKE ALL ON public.%I FROM anon, authenticated, service_role', v_name);
    EXECUTE format(
        'WITH moved AS (DELETE FROM public.event_log_default WHERE created_at >= $1 AND created_at < $2 RETURNING *)
         INSERT INTO public.%I SELECT * FROM moved', v_name)
        USING v_month, v_month + interval '1 month';
    EXECUTE format('ALTER TABLE public.event_log ATTACH PARTITION public.%I FOR VALUES FROM (%L) TO (%L)',
        v_name, v_month, v_month + interval '1 month');
    RETURN true;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.create_event_log_partition(timestamptz) IS
    'Creates the event_log partition of a month (UTC) and moves the month''s events from the default partition there; false when it exists. Waits at most 1 s for those who write.';
REVOKE ALL ON FUNCTION public.create_event_log_partition(timestamptz) FROM PUBLIC, anon, authenticated, service_role;

-- +goose StatementBegin
CREATE FUNCTION public.create_event_log_partitions(p_months integer DEFAULT 3, p_now timestamptz DEFAULT now()) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
AS $$
DECLARE
    v_created integer := 0;
BEGIN
    FOR i IN 0..p_months LOOP
        BEGIN
            IF public.create_event_log_partition(date_trunc('month', p_now) + make_interval(months => i)) THEN
                v_created := v_created + 1;
            END IF;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE WARNING 'create_event_log_partitions: the table is busy, month % is left for the next time', i;
        END;
    END LOOP;
    RETURN v_created;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.create_event_log_partitions(integer, timestamptz) IS
    'Creates the event_log partitions of the month of p_now and the next p_months; returns how many are new. A month that cannot be had now is left out with a warning: its events go to the default partition until the next call.';
REVOKE ALL ON FUNCTION public.create_event_log_partitions(integer, timestamptz) FROM PUBLIC, anon, authenticated, service_role;

-- The heap of a month that was emptied is as large as it ever was, and all of
-- event_log stands still while it is read under the lock. So it is read through
-- the primary key, once before the lock: that marks the dead entries, and the
-- second time there is next to nothing left to look at.
-- +goose StatementBegin
CREATE FUNCTION public.drop_event_log_partition(p_at timestamptz) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET lock_timeout = '1s'
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $$
DECLARE
    v_most  CONSTANT integer := 100000; -- so many move in a few seconds
    v_name  CONSTANT text := 'event_log_' || to_char(date_trunc('month', p_at), 'YYYYMM');
    v_count CONSTANT text := format(
        'SELECT count(*) FILTER (WHERE status = ''done''), count(*)
         FROM (SELECT status FROM public.%I ORDER BY id, created_at LIMIT %s) AS e', v_name, v_most + 1);
    v_done  bigint;
    v_rest  bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('afluente.event_log_partitions', 0));
    EXECUTE v_count INTO v_done, v_rest;
    IF v_done > 0 THEN
        RETURN false;
    ELSIF v_rest > v_most THEN
        RAISE WARNING 'drop_event_log_partition: % stays, as more than % of its events are not done', v_name, v_most;
        RETURN false;
    END IF;
    LOCK TABLE public.event_log IN ACCESS EXCLUSIVE MODE; -- a job of an event may be settled meanwhile
    EXECUTE v_count INTO v_done, v_rest;
    IF v_done > 0 OR v_rest > v_most THEN
        RETURN false;
    END IF;
    EXECUTE format('ALTER TABLE public.event_log DETACH PARTITION public.%I', v_name);
    EXECUTE format('INSERT INTO public.event_log SELECT * FROM public.%I ORDER BY id, created_at', v_name);
    EXECUTE format('DROP TABLE public.%I', v_name);
    RETURN true;
EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
    RAISE WARNING 'drop_event_log_partition: the table is busy, % stays for now', v_name;
    RETURN false;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.drop_event_log_partition(timestamptz) IS
    'Drops the event_log partition of a month; events that are not done go to the default partition. False, with nothing done, when it holds events that are done or more than 100,000 that are not, or cannot be had within 1 s.';
REVOKE ALL ON FUNCTION public.drop_event_log_partition(timestamptz) FROM PUBLIC, anon, authenticated, service_role;

SELECT public.create_event_log_partitions();

-- One NOTIFY a statement, never one a row: the commit of a NOTIFY takes a lock
-- on the whole database. It is a hint; the bridge also polls.
-- +goose StatementBegin
CREATE FUNCTION public.notify_high_priority_events() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (
        SELECT FROM inserted
        WHERE event_type IN ('message.received', 'message.queued', 'ai.handoff_triggered')
    ) THEN
        PERFORM pg_notify('event_log_high', '');
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION public.notify_high_priority_events() FROM PUBLIC, anon, authenticated, service_role;

CREATE TRIGGER event_log_notify_high_priority
    AFTER INSERT ON public.event_log
    REFERENCING NEW TABLE AS inserted
    FOR EACH STATEMENT EXECUTE FUNCTION public.notify_high_priority_events();

-- +goose Down
DROP TABLE public.event_log;
DROP FUNCTION public.notify_high_priority_events();
DROP FUNCTION public.drop_event_log_partition(timestamptz);
DROP FUNCTION public.create_event_log_partitions(integer, timestamptz);
DROP FUNCTION public.create_event_log_partition(timestamptz);
