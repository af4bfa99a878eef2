-- Consumers that are not written in Go. Their jobs are River's like all others,
-- so that retries, dead letters and River UI serve them too, but no River
-- client works on them: claim_events hands them out.
--
-- A claimed job is leased, not running: its state is "scheduled", for the end
-- of its lease. When nobody says by then what became of it, River's scheduler
-- makes it available again, as it does with every job whose time has come.
-- River's rescuer, which would discard a running job of a kind it does not
-- know, never sees it.

-- +goose Up
-- An external consumer's queue has its own name.
CREATE INDEX afluente_external_jobs_idx ON river.river_job (kind, (metadata ->> 'event_id'))
    WHERE queue = kind;

-- +goose StatementBegin
CREATE FUNCTION public.register_consumer(p_name text, p_types text[], p_max_attempts integer DEFAULT 8) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_type text;
BEGIN
    IF p_name IS NULL OR p_name !~ '^[a-z][a-z0-9]*([_-][a-z0-9]+)*$' OR char_length(p_name) > 64 THEN
        RAISE EXCEPTION 'consumer name "%" is not lower case words joined by - or _, at most 64 characters', left(p_name, 100)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF coalesce(cardinality(p_types), 0) = 0 THEN
        RAISE EXCEPTION 'consumer % names no event type', p_name USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOREACH v_type IN ARRAY p_types LOOP
        IF v_type IS NULL OR v_type <> '*' AND v_type !~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$' THEN
            RAISE EXCEPTION 'event type "%" is neither entity.action in lower snake case nor *', left(v_type, 100)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END LOOP;
    IF p_max_attempts IS NULL OR p_max_attempts NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'p_max_attempts must be from 1 to 1000' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    INSERT INTO public.event_consumers AS c (name, event_types, queue, max_attempts, external)
    VALUES (p_name, p_types, p_name, p_max_attempts, true)
    ON CONFLICT (name) DO UPDATE
    SET event_types = ARRAY(SELECT DISTINCT t FROM unnest(c.event_types || excluded.event_types) AS t ORDER BY t),
        max_attempts = excluded.max_attempts,
        updated_at = now()
    WHERE c.external;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'consumer % is one of the program''s own', p_name
            USING ERRCODE = 'unique_violation',
                  HINT = 'Choose another name, or retire the other consumer: DELETE FROM event_consumers.';
    END IF;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.register_consumer(text, text[], integer) IS
    'Makes a consumer outside Go known: from now on it gets each event of the types, * for all. Again with more types adds them; a type is given up by DELETE FROM event_consumers and registering anew.';
REVOKE ALL ON FUNCTION public.register_consumer(text, text[], integer) FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.register_consumer(text, text[], integer) TO service_role;

-- +goose StatementBegin
CREATE FUNCTION public.claim_events(
    p_worker      text,
    p_event_types text[] DEFAULT NULL,
    p_limit       integer DEFAULT 25,
    p_lease       interval DEFAULT '5 minutes'
) RETURNS SETOF public.event_log
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_jobs  bigint[];
    v_taken record;
    v_event public.event_log;
BEGIN
    IF NOT EXISTS (SELECT FROM public.event_consumers WHERE name = p_worker AND external) THEN
        RAISE EXCEPTION 'consumer "%" is not registered', left(p_worker, 100)
            USING ERRCODE = 'undefined_object', HINT = 'Call register_consumer first.';
    END IF;
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'p_limit must be from 1 to 1000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_lease IS NULL OR p_lease < interval '1 second' OR p_lease > interval '1 day' THEN
        RAISE EXCEPTION 'p_lease must be from 1 second to 1 day' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- Only jobs that are available: the scheduler locks those whose time has
    -- come and waits for the locks, so one held here would hold up all others.
    WITH picked AS (
        SELECT j.id
        FROM river.river_job AS j
        WHERE j.state = 'available' AND j.queue = p_worker AND j.kind = p_worker AND j.scheduled_at <= now()
            AND (p_event_types IS NULL OR EXISTS (
                SELECT FROM public.event_log AS e
                WHERE e.id = (j.metadata ->> 'event_id')::uuid
                    AND e.created_at = (j.metadata ->> 'event_created_at')::timestamptz
                    AND e.event_type = ANY (p_event_types)))
        ORDER BY j.priority, j.scheduled_at, j.id
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED
    ), leased AS (
        UPDATE river.river_job AS j
        SET (state, attempt, attempted_at, attempted_by, scheduled_at, finalized_at, errors) = (
            SELECT
                CASE WHEN spent THEN 'discarded' ELSE 'scheduled' END::river.river_job_state,
                j.attempt + (NOT spent)::integer,
                CASE WHEN spent THEN j.attempted_at ELSE now() END,
                CASE WHEN spent THEN j.attempted_by ELSE coalesce(j.attempted_by, '{}') || ('sql ' || session_user) END,
                CASE WHEN spent THEN j.scheduled_at ELSE now() + p_lease END,
                CASE WHEN spent THEN now() END,
                -- An attempt that left no error behind ended with its lease.
                CASE WHEN j.attempt > 0 AND (j.errors[cardinality(j.errors)] ->> 'attempt')::integer IS DISTINCT FROM j.attempt
                     THEN coalesce(j.errors, '{}') || jsonb_build_object(
                         'at', j.scheduled_at, 'attempt', j.attempt, 'error', 'the lease ended without ack_event or nack_event', 'trace', '')
                     ELSE j.errors END
            FROM (SELECT j.attempt >= j.max_attempts AS spent) AS s
        )
        FROM picked
        WHERE j.id = picked.id
        RETURNING j.id, j.state
    )
    SELECT array_agg(id) INTO v_jobs FROM leased WHERE state = 'scheduled';

    FOR v_taken IN
        SELECT e AS event, j.attempt
        FROM river.river_job AS j
        JOIN public.event_log AS e ON e.id = (j.metadata ->> 'event_id')::uuid
            AND e.created_at = (j.metadata ->> 'event_created_at')::timestamptz
        WHERE j.id = ANY (v_jobs)
        ORDER BY j.priority, j.id
    LOOP
        v_event := v_taken.event;
        v_event.attempts := v_taken.attempt;
        RETURN NEXT v_event;
    END LOOP;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.claim_events(text, text[], integer, interval) IS
    'Takes up to p_limit (1 to 1000) events for a registered consumer, oldest first, of p_event_types or of all its types. No two callers get the same one. Commit, do the work, then call ack_event or nack_event for each within p_lease; what is not answered by then is handed out again, as one more attempt. The column attempts is the attempt of this consumer.';
REVOKE ALL ON FUNCTION public.claim_events(text, text[], integer, interval) FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.claim_events(text, text[], integer, interval) TO service_role;

-- +goose StatementBegin
CREATE FUNCTION public.ack_event(p_event_id uuid, p_worker text, p_attempt integer DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE river.river_job
    SET state = 'completed', finalized_at = now()
    WHERE queue = kind AND kind = p_worker AND metadata ->> 'event_id' = p_event_id::text
        AND state IN ('scheduled', 'available') AND attempt > 0
        AND (p_attempt IS NULL OR attempt = p_attempt);
    RETURN FOUND;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.ack_event(uuid, text, integer) IS
    'The consumer is done with an event that it claimed. False when there was nothing to answer: never claimed, answered already or dead, or, with p_attempt (the claimed row''s attempts), claimed again by another meanwhile.';
REVOKE ALL ON FUNCTION public.ack_event(uuid, text, integer) FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.ack_event(uuid, text, integer) TO service_role;

-- +goose StatementBegin
CREATE FUNCTION public.nack_event(
    p_event_id  uuid,
    p_worker    text,
    p_error     text,
    p_permanent boolean DEFAULT false,
    p_attempt   integer DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_backoff CONSTANT interval[] := '{30s,1m,2m,5m,10m,30m,1h,2h}'; -- eventlog.Backoff
BEGIN
    UPDATE river.river_job AS j
    SET (state, scheduled_at, finalized_at) = (
            SELECT
                CASE WHEN p_permanent THEN 'cancelled' WHEN last THEN 'discarded' ELSE 'retryable' END::river.river_job_state,
                CASE WHEN p_permanent OR last THEN j.scheduled_at
                     ELSE now() + v_backoff[least(j.attempt, cardinality(v_backoff))] * (1 + 0.3 * random()) END,
                CASE WHEN p_permanent OR last THEN now() END
            FROM (SELECT j.attempt >= j.max_attempts AS last) AS l
        ),
        errors = coalesce(j.errors, '{}') || jsonb_build_object(
            'at', now(), 'attempt', j.attempt, 'error', left(coalesce(nullif(p_error, ''), 'no reason given'), 8192), 'trace', '')
    WHERE j.queue = j.kind AND j.kind = p_worker AND j.metadata ->> 'event_id' = p_event_id::text
        AND j.state = 'scheduled' AND j.attempt > 0
        AND (p_attempt IS NULL OR j.attempt = p_attempt);
    RETURN FOUND;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.nack_event(uuid, text, text, boolean, integer) IS
    'The consumer could not do its work. It gets the event again after 30 s, 1 m, 2 m, 5 m, 10 m, 30 m, 1 h, then each 2 h, with up to 30 % more by chance; after the last attempt, or at once with p_permanent, the event is dead. False as for ack_event, and when the lease has ended.';
REVOKE ALL ON FUNCTION public.nack_event(uuid, text, text, boolean, integer) FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.nack_event(uuid, text, text, boolean, integer) TO service_role;

-- +goose Down
DROP FUNCTION public.nack_event(uuid, text, text, boolean, integer);
DROP FUNCTION public.ack_event(uuid, text, integer);
DROP FUNCTION public.claim_events(text, text[], integer, interval);
DROP FUNCTION public.register_consumer(text, text[], integer);
DROP INDEX river.afluente_external_jobs_idx;
