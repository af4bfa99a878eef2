-- +goose Up
CREATE FUNCTION public.event_schema_fault(p_event_type text, p_payload jsonb, p_metadata jsonb) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN NULL;
REVOKE ALL ON FUNCTION public.event_schema_fault(text, jsonb, jsonb) FROM PUBLIC, anon, authenticated, service_role;
-- +goose Down
DROP FUNCTION public.event_schema_fault(text, jsonb, jsonb);
