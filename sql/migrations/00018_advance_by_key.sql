-- Waiting jobs that are looked up by their keys.
--
-- When a table of jobs was analyzed while none of them waited for its lane, the plan
-- that advanced lanes read all jobs that did and compared each with each that was to
-- go, which grew with the square of a backlog.

-- +goose Up
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION public.advance_lanes(p_consumers text[], p_lanes text[]) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
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

    WITH lanes AS MATERIALIZED (
        SELECT k.consumer, k.lane, c.ordered_by, c.max_per_organization, c.ordered_by IS NOT NULL AND NOT c.skips_dead AS blocked_by_dead
        FROM (SELECT DISTINCT consumer, lane FROM unnest(p_consumers, p_lanes) AS u (consumer, lane)) AS k
        LEFT JOIN public.event_consumers AS c ON c.name = k.consumer
    ), next AS MATERIALIZED (
        SELECT n.id
        FROM lanes AS w
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
        -- Not by equality and the state as it is: there are few pending jobs until there
        -- are very many, and all of those are read where the plan begins with them.
        WHERE j.id = ANY (ARRAY[next.id]) AND j.state::text = 'pending'
        RETURNING j.queue
    )
    SELECT array_agg(DISTINCT queue), count(*) INTO v_queues, v_advanced FROM advanced;
    PERFORM pg_notify('river.river_insert', jsonb_build_object('queue', q)::text) FROM unnest(v_queues) AS q;
    RETURN v_advanced;
END $$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION public.advance_lanes(p_consumers text[], p_lanes text[]) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
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

    WITH lanes AS MATERIALIZED (
        SELECT k.consumer, k.lane, c.ordered_by, c.max_per_organization, c.ordered_by IS NOT NULL AND NOT c.skips_dead AS blocked_by_dead
        FROM (SELECT DISTINCT consumer, lane FROM unnest(p_consumers, p_lanes) AS u (consumer, lane)) AS k
        LEFT JOIN public.event_consumers AS c ON c.name = k.consumer
    ), next AS MATERIALIZED (
        SELECT n.id
        FROM lanes AS w
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
