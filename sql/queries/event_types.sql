-- name: PutEventTypes :exec
-- PutEventTypes adds types to the catalogue, and newer schemas to those it has.
-- The arrays run in step.
INSERT INTO public.event_types AS t (event_type, major, schema_version, schema, predicate, checks)
SELECT n.event_type, n.major, n.schema_version, n.schema::jsonb, n.predicate::jsonpath, n.checks::jsonb
FROM (
    SELECT
        unnest(@event_types::text[]) AS event_type,
        unnest(@majors::integer[]) AS major,
        unnest(@schema_versions::text[]) AS schema_version,
        unnest(@schemas::text[]) AS schema,
        unnest(@predicates::text[]) AS predicate,
        unnest(@checks::text[]) AS checks
) AS n
ORDER BY n.event_type, n.major
ON CONFLICT (event_type, major) DO UPDATE
SET schema_version = excluded.schema_version,
    schema = excluded.schema,
    predicate = excluded.predicate,
    checks = excluded.checks
WHERE string_to_array(excluded.schema_version, '.')::integer[] > string_to_array(t.schema_version, '.')::integer[]
    OR (excluded.schema_version = t.schema_version AND excluded.schema <> t.schema);
