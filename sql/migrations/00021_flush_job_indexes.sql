-- Inserts that do not wait for an index.
--
-- River's two GIN indexes keep what is new in a list, and whoever makes it longer than
-- gin_pending_list_limit puts all of it into the index first. With the 16 MB of them that
-- are best for the rate, that is a step of the bridge, a fetch or a batch of results that
-- takes a second or more, each quarter of a minute at ten thousand events a minute.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION public.flush_job_indexes() RETURNS bigint
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(sum(gin_clean_pending_list(i.indexrelid)), 0)
    FROM pg_index AS i
    JOIN pg_class AS c ON c.oid = i.indexrelid
    JOIN pg_am AS a ON a.oid = c.relam
    WHERE i.indrelid = 'river.river_job'::regclass AND a.amname = 'gin' AND i.indisready
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION public.flush_job_indexes() IS
    'Puts what waits in the lists of the GIN indexes of jobs into them, while others go on to write to the lists; returns how many pages that were.';
REVOKE ALL ON FUNCTION public.flush_job_indexes() FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.flush_job_indexes() TO service_role;

-- +goose Down
DROP FUNCTION public.flush_job_indexes();
