-- Lanes of which no more is read than what counts.
--
-- An array of states did not get into the index either: lane_room read every job that
-- waited in a lane, so that each of ten thousand messages of a conversation took as long
-- as all of them. And whether a lane is blocked was looked up among all dead jobs there
-- are. Now each state is looked up by itself.

-- +goose Up
-- A function that returns a table is put in the place of its call; one that returns
-- a value is not where it has a query in it.
-- +goose StatementBegin
CREATE FUNCTION public.room_of_lane(p_consumer text, p_lane text, p_ordered_by text, p_most integer) RETURNS TABLE (room bigint)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT m.most - (
        SELECT count(*)
        FROM (
            SELECT 1
            FROM unnest(CASE WHEN p_ordered_by IS NULL THEN '{available,running}'
                ELSE '{available,running,retryable,scheduled}' END::river.river_job_state[]) AS s (state)
            CROSS JOIN LATERAL (
                SELECT 1
                FROM river.river_job AS j
                WHERE j.kind = p_consumer AND j.metadata ? 'lane' AND j.metadata ->> 'lane' = p_lane
                    AND j.state = s.state AND j.state <> 'completed'
                LIMIT m.most
            ) AS j
            LIMIT m.most
        ) AS busy
    )
    FROM (SELECT CASE WHEN p_ordered_by IS NULL THEN coalesce(p_most, 1) ELSE 1 END AS most) AS m;
END;
-- +goose StatementEnd
COMMENT ON FUNCTION public.room_of_lane(text, text, text, integer) IS
    'How many more jobs of a lane may go on, by the consumer''s ordered_by and max_per_organization. In an order, one that waits for its retry keeps the others back.';
REVOKE ALL ON FUNCTION public.room_of_lane(text, text, text, integer) FROM PUBLIC, anon, authenticated, service_role;

-- Kept for processes of the version before.
CREATE OR REPLACE FUNCTION public.lane_room(p_consumer text, p_lane text, p_ordered_by text, p_most integer) RETURNS bigint
LANGUAGE sql STABLE
RETURN (SELECT room FROM public.room_of_lane(p_consumer, p_lane, p_ordered_by, p_most));

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
        CROSS JOIN LATERAL public.room_of_lane(w.consumer, w.lane, w.ordered_by, w.max_per_organization) AS r
        CROSS JOIN LATERAL (
            SELECT j.id
            FROM river.river_job AS j
            WHERE j.kind = w.consumer AND j.metadata ? 'lane' AND j.metadata ->> 'lane' = w.lane AND j.state = 'pending'
            ORDER BY j.id
            LIMIT r.room
        ) AS n
        WHERE NOT w.blocked_by_dead OR NOT EXISTS (
            SELECT
            FROM unnest('{cancelled,discarded}'::river.river_job_state[]) AS s (state)
            CROSS JOIN LATERAL (
                SELECT 1
                FROM river.river_job AS d
                WHERE d.kind = w.consumer AND d.metadata ? 'lane' AND d.metadata ->> 'lane' = w.lane
                    AND d.state = s.state AND d.state <> 'completed' AND d.id < n.id
                LIMIT 1
            ) AS d)
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

DROP FUNCTION public.room_of_lane(text, text, text, integer);
