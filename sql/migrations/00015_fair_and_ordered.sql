-- Fairness and order.
--
-- Events are claimed in the order in which they were emitted, which the start
-- of a transaction does not tell: of two that wait for each other's lock, the
-- first to begin may be the last to emit. So each event has a number.
--
-- A consumer may have its events of one key done one at a time, in that order,
-- or limit how many of an organization's run at a time. Either way a job
-- belongs to a lane, which is in its metadata, and waits in the state pending,
-- which nobody fetches, until the lane has room. Jobs alone say how full a lane
-- is, so nothing can come apart. The row of a lane is only the lock under which
-- the bridge adds jobs to it and a trigger makes waiting ones available, so that
-- neither misses what the other is doing.

-- +goose Up
CREATE SEQUENCE public.event_log_seq;
REVOKE ALL ON SEQUENCE public.event_log_seq FROM PUBLIC, anon, authenticated;
GRANT USAGE ON SEQUENCE public.event_log_seq TO service_role;
ALTER TABLE public.event_log ADD COLUMN seq bigint; -- without a default, which would rewrite the table
ALTER TABLE public.event_log ALTER COLUMN seq SET DEFAULT nextval('public.event_log_seq');
COMMENT ON COLUMN public.event_log.seq IS
    'Grows in the order in which events were emitted; null for events from before it was there.';

-- Those that are due at once come in the order of their numbers, then those
-- that were put off, as they become due. The second index is for taking turns
-- among organizations.
DROP INDEX public.event_log_pending_idx;
CREATE INDEX event_log_pending_idx
    ON public.event_log (coalesce(next_attempt_at, '-infinity'), seq NULLS FIRST)
    WHERE status = 'pending';
CREATE INDEX event_log_pending_org_idx
    ON public.event_log (organization_id, coalesce(next_attempt_at, '-infinity'), seq NULLS FIRST)
    WHERE status = 'pending';

-- Nothing looks for events by who consumed them; each change of an event paid for it.
DROP INDEX public.event_log_consumed_by_gin;

ALTER TABLE public.event_consumers
    ADD COLUMN ordered_by           text CHECK (ordered_by <> ''),
    ADD COLUMN skips_dead           boolean NOT NULL DEFAULT false,
    ADD COLUMN max_per_organization integer CHECK (max_per_organization > 0);
COMMENT ON COLUMN public.event_consumers.ordered_by IS
    'The field of the payload, or entity_id, whose events are done one at a time in their order; null for any order.';
COMMENT ON COLUMN public.event_consumers.skips_dead IS
    'With ordered_by: a dead job lets the next of its key go on. Else it holds them up until somebody retries or discards it.';
COMMENT ON COLUMN public.event_consumers.max_per_organization IS
    'How many of an organization''s jobs run at a time; null for any number.';

-- +goose StatementBegin
CREATE FUNCTION public.bar_ordered_types() RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_types text[] := coalesce((
        SELECT array_agg(t) FROM public.event_consumers AS c, unnest(c.event_types) AS t WHERE c.ordered_by IS NOT NULL), '{}');
BEGIN
    IF v_types = '{}' OR pg_try_advisory_xact_lock(hashtextextended('afluente.event_order', 0)) THEN
        RETURN '{}';
    END IF;
    RETURN v_types;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.bar_ordered_types() IS
    'The types of events that the caller must not claim: those that some consumer wants in order are one transaction''s at a time. None to whoever comes first, until its transaction ends.';
REVOKE ALL ON FUNCTION public.bar_ordered_types() FROM PUBLIC, anon, authenticated, service_role;

CREATE TABLE public.event_lanes (
    consumer text NOT NULL,
    lane     text NOT NULL,
    used_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, lane)
) WITH (fillfactor = 50);
COMMENT ON TABLE public.event_lanes IS
    'The locks of lanes: the organization, and with it the key of an ordered consumer. Rows that were not used for a day are deleted.';
ALTER TABLE public.event_lanes ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.event_lanes FROM anon, authenticated, service_role;

CREATE INDEX afluente_lanes_idx ON river.river_job (kind, (metadata ->> 'lane'), state, id)
    WHERE metadata ? 'lane' AND state <> 'completed';

-- A single expression, which PostgreSQL puts in the place of the call.
CREATE FUNCTION public.lane_room(p_consumer text, p_lane text, p_ordered_by text, p_most integer) RETURNS bigint
LANGUAGE sql STABLE
RETURN CASE WHEN p_ordered_by IS NULL THEN coalesce(p_most, 1) ELSE 1 END - (
    SELECT count(*)
    FROM (
        SELECT 1
        FROM river.river_job AS j
        WHERE j.kind = p_consumer AND j.metadata ? 'lane' AND j.metadata ->> 'lane' = p_lane
            AND (j.state IN ('available', 'running') OR p_ordered_by IS NOT NULL AND j.state IN ('retryable', 'scheduled'))
        LIMIT CASE WHEN p_ordered_by IS NULL THEN coalesce(p_most, 1) ELSE 1 END
    ) AS busy
);

COMMENT ON FUNCTION public.lane_room(text, text, text, integer) IS
    'How many more jobs of a lane may go on, by the consumer''s ordered_by and max_per_organization. In an order, one that waits for its retry keeps the others back.';
REVOKE ALL ON FUNCTION public.lane_room(text, text, text, integer) FROM PUBLIC, anon, authenticated, service_role;

-- +goose StatementBegin
CREATE FUNCTION public.advance_lanes(p_consumers text[], p_lanes text[]) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
SET afluente.advancing = 'on'
AS $$
DECLARE
    v_queues   text[];
    v_advanced integer;
BEGIN
    -- A statement of its own: what was committed before is what the next one sees.
    PERFORM FROM public.event_lanes AS l
    JOIN (SELECT DISTINCT consumer, lane FROM unnest(p_consumers, p_lanes) AS u (consumer, lane)) AS k USING (consumer, lane)
    ORDER BY l.consumer, l.lane
    FOR UPDATE OF l;

    WITH waiting AS MATERIALIZED (
        SELECT k.consumer, k.lane, c.ordered_by, c.max_per_organization, c.ordered_by IS NOT NULL AND NOT c.skips_dead AS blocked_by_dead
        FROM (SELECT DISTINCT consumer, lane FROM unnest(p_consumers, p_lanes) AS u (consumer, lane)) AS k
        LEFT JOIN public.event_consumers AS c ON c.name = k.consumer
        WHERE EXISTS (
            SELECT FROM river.river_job AS j
            WHERE j.kind = k.consumer AND j.metadata ? 'lane' AND j.metadata ->> 'lane' = k.lane AND j.state = 'pending')
    ), next AS MATERIALIZED (
        SELECT n.id
        FROM waiting AS w
        CROSS JOIN LATERAL (
            SELECT j.id
            FROM river.river_job AS j
            WHERE j.kind = w.consumer AND j.metadata ? 'lane' AND j.metadata ->> 'lane' = w.lane AND j.state = 'pending'
            ORDER BY j.id
            LIMIT public.lane_room(w.consumer, w.lane, w.ordered_by, w.max_per_organization)
        ) AS n
        WHERE NOT w.blocked_by_dead OR NOT EXISTS (
            SELECT FROM river.river_job AS d
            WHERE d.kind = w.consumer AND d.metadata ? 'lane' AND d.metadata ->> 'lane' = w.lane
                AND d.state IN ('cancelled', 'discarded') AND d.id < n.id)
    ), advanced AS (
        UPDATE river.river_job AS j
        SET state = 'available'
        FROM next
        WHERE j.id = next.id AND j.state = 'pending'
        RETURNING j.queue
    )
    SELECT array_agg(DISTINCT queue), count(*) INTO v_queues, v_advanced FROM advanced;
    PERFORM pg_notify('river.river_insert', jsonb_build_object('queue', q)::text) FROM unnest(v_queues) AS q;
    RETURN v_advanced;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.advance_lanes(text[], text[]) IS
    'Makes as many of the lanes'' waiting jobs available as there is room for, oldest first; returns how many.';
REVOKE ALL ON FUNCTION public.advance_lanes(text[], text[]) FROM PUBLIC, anon, authenticated, service_role;

-- Like settle_events it must never raise, nor wait long for a lock. What it
-- could not do, the next job of the lane or the cron reconcile-events does.
-- +goose StatementBegin
CREATE FUNCTION public.advance_changed_lanes() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '200ms'
AS $$
DECLARE
    v_consumers text[];
    v_lanes     text[];
    v_tries     integer := 0;
BEGIN
    SELECT array_agg(kind), array_agg(metadata ->> 'lane') INTO v_consumers, v_lanes
    FROM changed
    WHERE metadata ? 'lane'
        AND CASE WHEN TG_OP = 'DELETE' THEN state <> 'completed' ELSE state NOT IN ('available', 'running') END;
    IF v_lanes IS NULL THEN
        RETURN NULL;
    END IF;
    LOOP
        BEGIN
            PERFORM public.advance_lanes(v_consumers, v_lanes);
            EXIT;
        EXCEPTION WHEN OTHERS THEN
            v_tries := v_tries + 1;
            IF SQLSTATE NOT IN ('55P03', '40P01') OR v_tries = 150 THEN -- lock timeout, deadlock
                RAISE WARNING 'advance_changed_lanes: % (%)', SQLERRM, SQLSTATE;
                EXIT;
            END IF;
        END;
    END LOOP;
    RETURN NULL;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.advance_changed_lanes() IS
    'Lets the next job of a lane go on when one has ended. Never raises.';
REVOKE ALL ON FUNCTION public.advance_changed_lanes() FROM PUBLIC, anon, authenticated, service_role;

-- After afluente_settle_*, by their names: whoever locks events and lanes locks
-- the events first.
CREATE TRIGGER afluente_yield_updated
    AFTER UPDATE ON river.river_job
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT WHEN (current_setting('afluente.advancing', true) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION public.advance_changed_lanes();
CREATE TRIGGER afluente_yield_deleted
    AFTER DELETE ON river.river_job
    REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION public.advance_changed_lanes();

-- A job that advances is no news for its event.
DROP TRIGGER afluente_settle_updated ON river.river_job;
CREATE TRIGGER afluente_settle_updated
    AFTER UPDATE ON river.river_job
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT WHEN (current_setting('afluente.advancing', true) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION public.settle_events();

-- Planned once in a session, not for each statement that changes a job.
ALTER FUNCTION public.settle_events() SET plan_cache_mode = force_generic_plan;

-- Whoever else makes a job of a lane available (River's scheduler, a retry, an
-- operator) only puts it back in line.
-- +goose StatementBegin
CREATE FUNCTION public.wait_for_lane() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.state := 'pending';
    RETURN NEW;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.wait_for_lane() IS
    'Keeps jobs of a lane from being made available but by advance_lanes.';
REVOKE ALL ON FUNCTION public.wait_for_lane() FROM PUBLIC, anon, authenticated, service_role;

CREATE TRIGGER afluente_wait_for_lane
    BEFORE UPDATE OF state ON river.river_job
    FOR EACH ROW WHEN (NEW.state = 'available' AND OLD.state NOT IN ('available', 'running') AND NEW.metadata ? 'lane'
        AND current_setting('afluente.advancing', true) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION public.wait_for_lane();

DROP TRIGGER afluente_refresh_retried ON river.river_job;
CREATE TRIGGER afluente_refresh_retried
    AFTER UPDATE OF finalized_at, max_attempts ON river.river_job
    FOR EACH ROW WHEN (OLD.finalized_at IS NOT NULL AND NEW.state IN ('available', 'pending') AND NEW.attempt > 0)
    EXECUTE FUNCTION public.refresh_retried_job();

-- +goose Down
DROP TRIGGER afluente_refresh_retried ON river.river_job;
CREATE TRIGGER afluente_refresh_retried
    AFTER UPDATE OF finalized_at, max_attempts ON river.river_job
    FOR EACH ROW WHEN (OLD.finalized_at IS NOT NULL AND NEW.state = 'available' AND NEW.attempt > 0)
    EXECUTE FUNCTION public.refresh_retried_job();
DROP TRIGGER afluente_wait_for_lane ON river.river_job;
ALTER FUNCTION public.settle_events() RESET plan_cache_mode;
DROP TRIGGER afluente_settle_updated ON river.river_job;
CREATE TRIGGER afluente_settle_updated
    AFTER UPDATE ON river.river_job
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION public.settle_events();
DROP TRIGGER afluente_yield_deleted ON river.river_job;
DROP TRIGGER afluente_yield_updated ON river.river_job;
DROP FUNCTION public.wait_for_lane();
DROP FUNCTION public.advance_changed_lanes();
DROP FUNCTION public.advance_lanes(text[], text[]);
DROP FUNCTION public.lane_room(text, text, text, integer);
DROP INDEX river.afluente_lanes_idx;
UPDATE river.river_job SET state = 'available' WHERE state = 'pending' AND metadata ? 'lane'; -- nobody would advance them
DROP TABLE public.event_lanes;
DROP FUNCTION public.bar_ordered_types();
ALTER TABLE public.event_consumers
    DROP COLUMN max_per_organization,
    DROP COLUMN skips_dead,
    DROP COLUMN ordered_by;
CREATE INDEX event_log_consumed_by_gin ON public.event_log USING gin (consumed_by);
DROP INDEX public.event_log_pending_org_idx;
DROP INDEX public.event_log_pending_idx;
CREATE INDEX event_log_pending_idx ON public.event_log (coalesce(next_attempt_at, created_at))
    WHERE status = 'pending';
ALTER TABLE public.event_log DROP COLUMN seq;
DROP SEQUENCE public.event_log_seq;
