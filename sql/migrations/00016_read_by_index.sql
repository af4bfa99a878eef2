-- Plans that keep to the indexes, whatever the tables' statistics say.
--
-- A month's partition is nearly empty when its first plan is made, and the plan
-- outlives that by a minute or more. A plan that reads all of the month for each
-- of a thousand events is then the cheapest, and soon the most expensive.
--
-- In the same way, of the lanes that had a job waiting the planner made a join
-- with all waiting jobs of all lanes, which grew with the square of a backlog. And
-- lane_room read all of a lane, as an OR kept the state out of the index.

-- +goose Up
ALTER FUNCTION public.settle_events() SET enable_seqscan = off;

-- As before a single expression, which PostgreSQL puts in the place of the call.
CREATE OR REPLACE FUNCTION public.lane_room(p_consumer text, p_lane text, p_ordered_by text, p_most integer) RETURNS bigint
LANGUAGE sql STABLE
RETURN CASE WHEN p_ordered_by IS NULL THEN coalesce(p_most, 1) ELSE 1 END - (
    SELECT count(*)
    FROM (
        SELECT 1
        FROM river.river_job AS j
        WHERE j.kind = p_consumer AND j.metadata ? 'lane' AND j.metadata ->> 'lane' = p_lane
            AND j.state <> 'completed' AND j.state = ANY (CASE WHEN p_ordered_by IS NULL THEN '{available,running}'
                ELSE '{available,running,retryable,scheduled}' END::river.river_job_state[])
        LIMIT CASE WHEN p_ordered_by IS NULL THEN coalesce(p_most, 1) ELSE 1 END
    ) AS busy
);

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

-- +goose Down
CREATE OR REPLACE FUNCTION public.lane_room(p_consumer text, p_lane text, p_ordered_by text, p_most integer) RETURNS bigint
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

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION public.advance_lanes(p_consumers text[], p_lanes text[]) RETURNS integer
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

ALTER FUNCTION public.settle_events() RESET enable_seqscan;
