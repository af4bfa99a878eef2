-- What an operator does to a finished job, in River UI, by the program or by
-- SQL, means the same everywhere.

-- +goose Up
-- River's retry grants one more attempt. Here a job that is retried begins
-- anew: all its attempts, from the first delay on, with its errors kept. Nor
-- does River tell the workers of the queue, which would find it by polling.
-- +goose StatementBegin
CREATE FUNCTION public.refresh_retried_job() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE river.river_job SET attempt = 0, max_attempts = OLD.max_attempts WHERE id = NEW.id;
    PERFORM pg_notify('river.river_insert', jsonb_build_object('queue', NEW.queue)::text);
    RETURN NULL;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.refresh_retried_job() IS
    'Gives a finished job that is retried a full set of attempts and wakes its queue.';
REVOKE ALL ON FUNCTION public.refresh_retried_job() FROM PUBLIC, anon, authenticated, service_role;

-- Of River's statements only the retry sets max_attempts, so that no other
-- pays for this trigger.
CREATE TRIGGER afluente_refresh_retried
    AFTER UPDATE OF max_attempts ON river.river_job
    FOR EACH ROW WHEN (OLD.finalized_at IS NOT NULL AND NEW.state = 'available')
    EXECUTE FUNCTION public.refresh_retried_job();

-- +goose StatementBegin
CREATE FUNCTION public.record_discarded_job() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_event public.event_log;
BEGIN
    IF OLD.metadata ?& '{event_id,event_created_at,consumer}' THEN
        BEGIN
            SELECT * INTO v_event
            FROM public.event_log
            WHERE id = (OLD.metadata ->> 'event_id')::uuid
                AND created_at = (OLD.metadata ->> 'event_created_at')::timestamptz;
        EXCEPTION WHEN data_exception THEN
            NULL; -- these keys mean something else there, so the job has no event
        END;
    END IF;
    INSERT INTO public.audit_log (organization_id, actor_id, action, entity_kind, entity_id, reason, metadata)
    VALUES (
        v_event.organization_id,
        coalesce(nullif(current_setting('afluente.actor', true), ''), coalesce(nullif(current_setting('role'), 'none'), session_user)),
        'dead_letter.discarded',
        v_event.entity_kind,
        v_event.entity_id,
        nullif(current_setting('afluente.reason', true), ''),
        jsonb_strip_nulls(jsonb_build_object(
            'job_id', OLD.id,
            'consumer', OLD.kind,
            'event_id', OLD.metadata -> 'event_id',
            'event_type', v_event.event_type,
            'request_id', OLD.metadata -> 'request_id',
            'error', OLD.errors[cardinality(OLD.errors)] -> 'error')));
    RETURN NULL;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.record_discarded_job() IS
    'Records in audit_log who deleted a dead job, and why where afluente.reason says it.';
REVOKE ALL ON FUNCTION public.record_discarded_job() FROM PUBLIC, anon, authenticated, service_role;

CREATE TRIGGER afluente_record_discarded
    AFTER DELETE ON river.river_job
    FOR EACH ROW WHEN (OLD.state IN ('cancelled', 'discarded'))
    EXECUTE FUNCTION public.record_discarded_job();

-- +goose Down
DROP TRIGGER afluente_record_discarded ON river.river_job;
DROP FUNCTION public.record_discarded_job();
DROP TRIGGER afluente_refresh_retried ON river.river_job;
DROP FUNCTION public.refresh_retried_job();
