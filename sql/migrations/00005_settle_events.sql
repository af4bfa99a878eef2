-- An event's state follows its jobs: this trigger carries every change of a
-- job's state to event_log in the very statement that makes it, whoever makes
-- it (worker, rescuer, scheduler, River UI, psql).
--
-- It works on whole statements, because River finishes thousands of jobs in
-- one. It reads only the new rows: what a job's state means for its event does
-- not depend on the state before, and joining the two transition tables is
-- what made a first version slow. Events are updated in the order of their
-- keys, so that two statements cannot deadlock; hash and merge joins are off
-- because either would lose that order.
--
-- A transaction that touches jobs one by one, as River UI's do, has an order of
-- its own and keeps its locks. So nobody waits long here: after lock_timeout a
-- statement lets go of the events it has locked, which lets the other one on,
-- and begins again.
--
-- It must never raise: an error here fails River's whole batch of completions.
-- After any other error the jobs are taken one by one, so that a job with
-- broken metadata costs only itself, with a warning in the server's log.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION public.settle_events() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_hashjoin = off
SET enable_mergejoin = off
SET lock_timeout = '200ms'
AS $$
DECLARE
    v_jobs  bigint[] := ARRAY[NULL]; -- null: all at once
    v_next  integer := 1;
    v_tries integer := 0;
BEGIN
    WHILE v_next <= cardinality(v_jobs) LOOP
        BEGIN
            WITH touched AS (
                SELECT
                    (metadata ->> 'event_id')::uuid AS id,
                    (metadata ->> 'event_created_at')::timestamptz AS created_at,
                    metadata ->> 'consumer' AS consumer,
                    attempt,
                    attempted_at,
                    scheduled_at,
                    CASE WHEN TG_OP = 'DELETE' THEN 'deleted'
                         WHEN state = 'completed' THEN 'completed'
                         WHEN state IN ('cancelled', 'discarded') THEN 'dead'
                         WHEN state = 'retryable' THEN 'retrying'
                         ELSE 'live' END AS outcome,
                    CASE WHEN TG_OP <> 'DELETE' AND state IN ('cancelled', 'discarded', 'retryable')
                         THEN coalesce(errors[array_upper(errors, 1)] ->> 'error', state::text) END AS error
                FROM changed
                WHERE state <> 'running'
                    AND (TG_OP <> 'DELETE' OR state <> 'completed')
                    AND metadata ?& '{event_id,event_created_at,consumer}'
                    AND (v_jobs[v_next] IS NULL OR id = v_jobs[v_next])
            ), changes AS (
                SELECT
                    id,
                    created_at,
                    array_agg(consumer) AS consumers,
                    coalesce(array_agg(consumer) FILTER (WHERE outcome = 'completed'), '{}') AS completed,
                    coalesce(array_agg(consumer) FILTER (WHERE outcome = 'dead'), '{}') AS dead,
                    coalesce(array_agg(consumer) FILTER (WHERE outcome = 'deleted'), '{}') AS deleted,
                    jsonb_object_agg(consumer, scheduled_at) FILTER (WHERE outcome = 'retrying') AS retries,
                    max(attempt) AS attempt,
                    (array_agg(consumer || ': ' || error ORDER BY attempted_at DESC NULLS LAST)
                        FILTER (WHERE error IS NOT NULL))[1] AS error
                FROM touched
                GROUP BY id, created_at
                ORDER BY id, created_at
            )
            UPDATE public.event_log AS e
            SET (consumers, consumed_by, dead_consumers, retries, next_attempt_at, status) = (
                    SELECT
                        s.consumers,
                        s.consumed_by,
                        s.dead_consumers,
                        s.retries,
                        CASE WHEN e.status = 'pending' THEN e.next_attempt_at
                             WHEN s.retries IS NOT NULL
                             THEN (SELECT min(r.value::timestamptz) FROM jsonb_each_text(s.retries) AS r) END,
                        CASE WHEN e.status = 'pending' THEN 'pending'
                             WHEN s.dead_consumers <> '{}' THEN 'dead'
                             WHEN s.consumers <@ s.consumed_by THEN 'done'
                             ELSE 'processing' END
                    FROM (SELECT
                        CASE WHEN c.deleted = '{}' THEN e.consumers
                             ELSE ARRAY(SELECT u FROM unnest(e.consumers) AS u WHERE u <> ALL (c.deleted)) END AS consumers,
                        CASE WHEN e.consumed_by = '{}' THEN c.completed
                             ELSE ARRAY(SELECT u FROM unnest(e.consumed_by) AS u WHERE u <> ALL (c.consumers)) || c.completed END AS consumed_by,
                        CASE WHEN e.dead_consumers = '{}' THEN c.dead
                             ELSE ARRAY(SELECT u FROM unnest(e.dead_consumers) AS u WHERE u <> ALL (c.consumers)) || c.dead END AS dead_consumers,
                        CASE WHEN e.retries IS NULL THEN c.retries
                             ELSE nullif((e.retries - c.consumers) || coalesce(c.retries, '{}'), '{}') END AS retries
                    ) AS s
                ),
                attempts = greatest(e.attempts, c.attempt),
                last_error = coalesce(c.error, e.last_error),
                updated_at = now()
            FROM changes AS c
            WHERE e.id = c.id AND e.created_at = c.created_at;
        EXCEPTION WHEN OTHERS THEN
            IF SQLSTATE IN ('55P03', '40P01') AND v_tries < 150 THEN -- lock timeout, deadlock
                v_tries := v_tries + 1;
                CONTINUE;
            ELSIF v_jobs[v_next] IS NULL THEN
                v_jobs := v_jobs || ARRAY(SELECT id FROM changed WHERE metadata ? 'event_id' ORDER BY id);
            ELSE
                RAISE WARNING 'settle_events: job %: % (%)', v_jobs[v_next], SQLERRM, SQLSTATE;
            END IF;
        END;
        v_next := v_next + 1;
    END LOOP;
    RETURN NULL;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.settle_events() IS
    'Carries the states of River jobs to the events they came from. Never raises.';
REVOKE ALL ON FUNCTION public.settle_events() FROM PUBLIC, anon, authenticated, service_role;

CREATE TRIGGER afluente_settle_updated
    AFTER UPDATE ON river.river_job
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION public.settle_events();

CREATE TRIGGER afluente_settle_deleted
    AFTER DELETE ON river.river_job
    REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION public.settle_events();

-- The metadata of our jobs is worth six entries in River's GIN index, and each
-- change of a job's state adds them again. A longer pending list merges more
-- of them at a time, which is what makes that affordable.
ALTER INDEX IF EXISTS river.river_job_metadata_index SET (gin_pending_list_limit = 16384);
ALTER INDEX IF EXISTS river.river_job_args_index SET (gin_pending_list_limit = 16384);

-- +goose Down
ALTER INDEX IF EXISTS river.river_job_args_index RESET (gin_pending_list_limit);
ALTER INDEX IF EXISTS river.river_job_metadata_index RESET (gin_pending_list_limit);
DROP TRIGGER afluente_settle_deleted ON river.river_job;
DROP TRIGGER afluente_settle_updated ON river.river_job;
DROP FUNCTION public.settle_events();
