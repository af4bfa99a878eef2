-- What operators need: dead letters to query, counts to act on, and a place
-- from which alerts are sent that outlives the process that saw the failure.

-- +goose Up
-- The number of dead letters by type, without a look at the table.
CREATE INDEX event_log_dead_type_idx ON public.event_log (event_type) WHERE status = 'dead';

-- Dead jobs in the order of their deaths, and how many there are of a kind.
CREATE INDEX afluente_dead_jobs_idx ON river.river_job (finalized_at, id) INCLUDE (kind)
    WHERE state IN ('cancelled', 'discarded');

-- Before, only River's own retry was noticed; an UPDATE in psql is one as well.
-- What has no attempt to its name needs no refreshing.
DROP TRIGGER afluente_refresh_retried ON river.river_job;
CREATE TRIGGER afluente_refresh_retried
    AFTER UPDATE OF finalized_at, max_attempts ON river.river_job
    FOR EACH ROW WHEN (OLD.finalized_at IS NOT NULL AND NEW.state = 'available' AND NEW.attempt > 0)
    EXECUTE FUNCTION public.refresh_retried_job();

-- A River client of another program on the same tables, with River's defaults,
-- would clean dead jobs away after a day or a week once it leads.
-- +goose StatementBegin
CREATE FUNCTION public.keep_dead_job() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF position('-- name: JobDeleteBefore' IN current_query()) > 0 THEN
        RETURN NULL;
    END IF;
    RETURN OLD;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.keep_dead_job() IS
    'Keeps dead jobs from the cleaner of River, whatever retention its client is set to.';
REVOKE ALL ON FUNCTION public.keep_dead_job() FROM PUBLIC, anon, authenticated, service_role;

CREATE TRIGGER afluente_keep_dead
    BEFORE DELETE ON river.river_job
    FOR EACH ROW WHEN (OLD.state IN ('cancelled', 'discarded'))
    EXECUTE FUNCTION public.keep_dead_job();

-- The metadata of a job that is not ours may hold anything under our keys.
-- +goose StatementBegin
CREATE FUNCTION public.job_event_key(p_metadata jsonb, OUT id uuid, OUT created_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF p_metadata ?& '{event_id,event_created_at,consumer}' THEN
        id := (p_metadata ->> 'event_id')::uuid;
        created_at := (p_metadata ->> 'event_created_at')::timestamptz;
    END IF;
EXCEPTION WHEN data_exception THEN
    id := NULL;
    created_at := NULL;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.job_event_key(jsonb) IS
    'The primary key of the event that a River job with this metadata stems from; nulls for none.';
REVOKE ALL ON FUNCTION public.job_event_key(jsonb) FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.job_event_key(jsonb) TO service_role;

CREATE VIEW public.dead_letters AS
SELECT
    j.id AS job_id,
    j.kind AS consumer,
    j.queue,
    j.state::text AS state,
    j.finalized_at AS died_at,
    j.attempt,
    coalesce(j.errors[array_upper(j.errors, 1)] ->> 'error', '') AS last_error,
    e.id AS event_id,
    e.created_at AS event_created_at,
    e.event_type,
    e.organization_id,
    e.entity_kind,
    e.entity_id
FROM river.river_job AS j
CROSS JOIN LATERAL public.job_event_key(j.metadata) AS k
LEFT JOIN public.event_log AS e ON e.id = k.id AND e.created_at = k.created_at
WHERE j.state IN ('cancelled', 'discarded');

COMMENT ON VIEW public.dead_letters IS
    'Every job that was given up, with its event; of a job without an event, or whose event is gone, the event''s columns are null.';
REVOKE ALL ON public.dead_letters FROM PUBLIC, anon, authenticated, service_role;
GRANT SELECT ON public.dead_letters TO service_role;

-- One row for each job that died and that no alert has counted yet.
CREATE TABLE public.dead_letter_notices (
    job_id   bigint NOT NULL,
    consumer text NOT NULL,
    died_at  timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE public.dead_letter_notices IS
    'Jobs that died and are not in an alert yet. Written by a trigger, emptied by whoever sends the alerts.';
ALTER TABLE public.dead_letter_notices ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.dead_letter_notices FROM anon, authenticated, service_role;

-- By row and not by statement, so that statements that kill nothing pay nothing.
-- It must never raise, like settle_events.
-- +goose StatementBegin
CREATE FUNCTION public.notice_dead_job() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO public.dead_letter_notices (job_id, consumer) VALUES (NEW.id, NEW.kind);
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'notice_dead_job: job %: % (%)', NEW.id, SQLERRM, SQLSTATE;
    RETURN NULL;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.notice_dead_job() IS
    'Makes sure that somebody is told of a job that died. Never raises.';
REVOKE ALL ON FUNCTION public.notice_dead_job() FROM PUBLIC, anon, authenticated, service_role;

CREATE TRIGGER afluente_notice_dead
    AFTER UPDATE OF state ON river.river_job
    FOR EACH ROW WHEN (NEW.state IN ('cancelled', 'discarded') AND OLD.state NOT IN ('cancelled', 'discarded'))
    EXECUTE FUNCTION public.notice_dead_job();

CREATE TABLE public.alerts (
    rule         text NOT NULL,
    subject      text NOT NULL,
    channel      text NOT NULL,
    pending      bigint NOT NULL DEFAULT 0,
    value        float8 NOT NULL DEFAULT 0,
    firing_since timestamptz,
    told_at      timestamptz,
    failures     integer NOT NULL DEFAULT 0,
    next_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (rule, subject, channel)
);
COMMENT ON TABLE public.alerts IS
    'What people are told, once for each way to tell them, so that a way that is blocked holds up no other.';
COMMENT ON COLUMN public.alerts.subject IS
    'The consumer, event type or queue that the alert is about.';
COMMENT ON COLUMN public.alerts.pending IS
    'Dead letters that this channel has not been told of; for a threshold, 1 while it is to be told.';
COMMENT ON COLUMN public.alerts.value IS
    'What was measured last.';
COMMENT ON COLUMN public.alerts.firing_since IS
    'Since when a threshold is passed; null while it is not.';
COMMENT ON COLUMN public.alerts.next_at IS
    'Nothing is sent before.';
ALTER TABLE public.alerts ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.alerts FROM anon, authenticated, service_role;

CREATE TABLE public.worker_minutes (
    minute    timestamptz NOT NULL,
    worker    text NOT NULL,
    attempts  bigint NOT NULL,
    failed    bigint NOT NULL,
    durations bigint[] NOT NULL,
    PRIMARY KEY (minute, worker)
);
COMMENT ON TABLE public.worker_minutes IS
    'What the workers of all processes did in the last minutes. Rows of more than an hour ago are deleted.';
COMMENT ON COLUMN public.worker_minutes.durations IS
    'Attempts by how long they took, as the buckets of the metric worker.processing_duration_ms.';
ALTER TABLE public.worker_minutes ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.worker_minutes FROM anon, authenticated, service_role;

CREATE TABLE public.leases (
    name       text PRIMARY KEY,
    holder     uuid NOT NULL,
    expires_at timestamptz NOT NULL
);
COMMENT ON TABLE public.leases IS
    'Work that one process at a time does, until its lease ends.';
ALTER TABLE public.leases ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.leases FROM anon, authenticated, service_role;

-- +goose Down
DROP TABLE public.leases;
DROP TABLE public.worker_minutes;
DROP TABLE public.alerts;
DROP TRIGGER afluente_notice_dead ON river.river_job;
DROP FUNCTION public.notice_dead_job();
DROP TABLE public.dead_letter_notices;
DROP VIEW public.dead_letters;
DROP FUNCTION public.job_event_key(jsonb);
DROP TRIGGER afluente_keep_dead ON river.river_job;
DROP FUNCTION public.keep_dead_job();
DROP TRIGGER afluente_refresh_retried ON river.river_job;
CREATE TRIGGER afluente_refresh_retried
    AFTER UPDATE OF max_attempts ON river.river_job
    FOR EACH ROW WHEN (OLD.finalized_at IS NOT NULL AND NEW.state = 'available')
    EXECUTE FUNCTION public.refresh_retried_job();
DROP INDEX river.afluente_dead_jobs_idx;
DROP INDEX public.event_log_dead_type_idx;
