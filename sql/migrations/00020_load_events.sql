-- Events that are loaded by a plan that is kept.
--
-- The planner takes an array that it does not see for ten elements, so it planned each
-- load of one or two events anew, which took several times as long as the load.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION public.load_events(p_ids uuid[], p_created_ats timestamptz[]) RETURNS SETOF public.event_log
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
-- A plan that was made when the month was a few pages old would read all of it.
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    RETURN QUERY
    SELECT e.*
    FROM unnest(p_ids, p_created_ats) AS k (id, created_at)
    JOIN public.event_log AS e ON e.id = k.id AND e.created_at = k.created_at;
END $$;
-- +goose StatementEnd
COMMENT ON FUNCTION public.load_events(uuid[], timestamptz[]) IS 'The events with the given keys, in no order; the arrays run in step.';
REVOKE ALL ON FUNCTION public.load_events(uuid[], timestamptz[]) FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.load_events(uuid[], timestamptz[]) TO service_role;

-- +goose Down
DROP FUNCTION public.load_events(uuid[], timestamptz[]);
