-- Statistics for months that begin.
--
-- PostgreSQL takes a partition for as good as empty while its statistics say so, as
-- they do of a month to come after an ANALYZE of the whole database. To read all of
-- it by its primary key then costs no more than to look for one row of it, and the
-- plans that the sessions keep may do the first for each event that a job settles,
-- until autovacuum comes by, a minute later or more. Of ten thousand events each
-- batch of jobs took ten seconds to be completed.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION public.analyze_begun_months() RETURNS integer
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_month    regclass;
    v_analyzed integer := 0;
BEGIN
    FOR v_month IN
        SELECT c.oid
        FROM pg_partition_tree('public.event_log') AS t
        JOIN pg_class AS c ON c.oid = t.relid
        WHERE t.isleaf AND c.reltuples = 0 AND pg_relation_size(c.oid) >= 8 * current_setting('block_size')::integer
    LOOP
        EXECUTE format('ANALYZE (SKIP_LOCKED) %s', v_month);
        v_analyzed := v_analyzed + 1;
    END LOOP;
    RETURN v_analyzed;
END $$;
-- +goose StatementEnd
COMMENT ON FUNCTION public.analyze_begun_months() IS
    'Analyzes the partitions of event_log that their statistics say are empty and that are not; returns how many. Does not wait for who has one locked.';
REVOKE ALL ON FUNCTION public.analyze_begun_months() FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.analyze_begun_months() TO service_role;

-- +goose Down
DROP FUNCTION public.analyze_begun_months();
