-- name: TryArchiveLock :one
-- TryArchiveLock takes the lock that one archive run at a time holds, until the
-- transaction ends.
SELECT pg_try_advisory_xact_lock(hashtextextended('afluente.archive', 0)) AS locked;

-- name: StayIdle :exec
-- StayIdle lets the transaction be idle without end. As it is not a query, it
-- also lets go of the last one's snapshot, which would hold up every vacuum.
SET LOCAL idle_in_transaction_session_timeout = 0;

-- name: ListArchivableEventDays :many
-- ListArchivableEventDays returns the days (UTC) before a time that have events
-- which are done.
SELECT DISTINCT (date_trunc('day', created_at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC')::timestamptz AS day
FROM public.event_log
WHERE status = 'done' AND created_at < @before
ORDER BY 1;

-- name: ListArchivableAuditDays :many
-- ListArchivableAuditDays returns the days (UTC) before a time that have audit
-- rows.
SELECT DISTINCT (date_trunc('day', created_at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC')::timestamptz AS day
FROM public.audit_log
WHERE created_at < @before
ORDER BY 1;

-- name: DeleteArchivedEvents :execrows
-- DeleteArchivedEvents deletes the events that are still, in every column, as
-- they were when they were archived.
DELETE FROM public.event_log AS e
USING jsonb_array_elements(@rows::jsonb) AS k (archived)
WHERE e.id = (k.archived ->> 'id')::uuid AND e.created_at = (k.archived ->> 'created_at')::timestamptz
    AND e.status = 'done' AND to_jsonb(e) = k.archived;

-- name: DeleteArchivedAuditRows :execrows
-- DeleteArchivedAuditRows is DeleteArchivedEvents for audit rows.
DELETE FROM public.audit_log AS a
USING jsonb_array_elements(@rows::jsonb) AS k (archived)
WHERE a.created_at = (k.archived ->> 'created_at')::timestamptz AND a.id::text = k.archived ->> 'id'
    AND to_jsonb(a) = k.archived;

-- name: ListEventMonths :many
-- ListEventMonths returns the months (UTC) that have a partition and have ended
-- before a time.
SELECT m.month::timestamptz AS month
FROM (
    SELECT to_timestamp(substring(c.relname FROM '[0-9]{6}$'), 'YYYYMM')::timestamp AT TIME ZONE 'UTC' AS month
    FROM pg_catalog.pg_inherits AS i
    JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = to_regclass('public.event_log') AND c.relname ~ '^event_log_[0-9]{6}$'
) AS m
WHERE m.month + interval '1 month' <= @before::timestamptz
ORDER BY m.month;

-- name: DropEventMonth :one
-- DropEventMonth drops the partition of a month unless events that are done
-- are still in it.
SELECT public.drop_event_log_partition(@month::timestamptz) AS dropped;

-- name: DeleteOldIdempotencyKeys :execrows
-- DeleteOldIdempotencyKeys deletes some of the keys of events before a time.
DELETE FROM public.event_idempotency_keys
WHERE (organization_id, idempotency_key) IN (
    SELECT k.organization_id, k.idempotency_key FROM public.event_idempotency_keys AS k WHERE k.event_created_at < @before LIMIT @max_keys
);

-- name: CreateEventMonth :one
-- CreateEventMonth makes the partition of the month of a time, if it is missing.
SELECT public.create_event_log_partition(@at::timestamptz) AS created;

-- name: RestoreEvents :execrows
-- RestoreEvents inserts events as they were archived, but those that are there.
INSERT INTO public.event_log
SELECT (jsonb_populate_record(NULL::public.event_log, r.value)).*
FROM jsonb_array_elements(@rows::jsonb) AS r
ON CONFLICT DO NOTHING;

-- name: RestoreAuditRows :execrows
-- RestoreAuditRows inserts audit rows as they were archived, but those that are there.
INSERT INTO public.audit_log
SELECT (jsonb_populate_record(NULL::public.audit_log, r.value)).*
FROM jsonb_array_elements(@rows::jsonb) AS r
ON CONFLICT DO NOTHING;
