-- +goose Up
CREATE TABLE public.event_types (
    event_type     text NOT NULL,
    major          integer NOT NULL CHECK (major > 0),
    schema_version text NOT NULL CHECK (schema_version ~ '^[0-9]+\.[0-9]+\.[0-9]+$'),
    schema         jsonb NOT NULL,
    predicate      jsonpath NOT NULL,
    checks         jsonb NOT NULL,
    PRIMARY KEY (event_type, major)
);

COMMENT ON TABLE public.event_types IS
    'The catalogue of events, one row for each major version of a type. The program writes it when it migrates and when it starts.';
COMMENT ON COLUMN public.event_types.schema IS
    'JSON Schema of the payload.';
COMMENT ON COLUMN public.event_types.predicate IS
    'True for the payloads that fit the schema.';
COMMENT ON COLUMN public.event_types.checks IS
    'Field to the part of the predicate that is about it, which tells the field at fault.';

ALTER TABLE public.event_types ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.event_types FROM anon, authenticated;
GRANT SELECT ON public.event_types TO service_role;
CREATE POLICY service ON public.event_types TO service_role USING (true);

-- +goose StatementBegin
CREATE FUNCTION public.event_schema_fault(p_event_type text, p_payload jsonb, p_metadata jsonb) RETURNS text
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    v_version text := coalesce(p_metadata ->> 'schema_version', '1.0.0');
    v_major   integer := 1;
    v_fits    boolean;
    v_field   text;
BEGIN
    -- What nearly every event says costs no regular expression.
    IF v_version <> '1.0.0' THEN
        IF v_version !~ '^[1-9][0-9]{0,3}(\.(0|[1-9][0-9]{0,3})){2}$' THEN
            RETURN 'metadata.schema_version is not of the form MAJOR.MINOR.PATCH';
        END IF;
        v_major := split_part(v_version, '.', 1)::integer;
    END IF;
    SELECT jsonb_path_match(p_payload, predicate, '{}', true) INTO v_fits
    FROM public.event_types
    WHERE event_type = p_event_type AND major = v_major;
    IF NOT FOUND THEN
        RETURN CASE WHEN EXISTS (SELECT FROM public.event_types WHERE event_type = p_event_type)
                    THEN 'unknown schema version' ELSE 'unknown event type' END;
    ELSIF v_fits THEN
        RETURN NULL;
    ELSIF jsonb_typeof(p_payload) IS DISTINCT FROM 'object' THEN
        RETURN 'the payload is not an object';
    END IF;

    SELECT c.key INTO v_field
    FROM public.event_types AS t
    CROSS JOIN jsonb_each_text(t.checks) AS c
    WHERE t.event_type = p_event_type AND t.major = v_major
        AND jsonb_path_match(p_payload, c.value::jsonpath, '{}', true) IS NOT TRUE
    ORDER BY c.key
    LIMIT 1;
    RETURN CASE
        WHEN NOT p_payload ? v_field THEN format('field "%s" is missing', v_field)
        ELSE format('field "%s" is not of the type, the format or the values in its schema', v_field)
    END;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.event_schema_fault(text, jsonb, jsonb) IS
    'In what an event departs from the catalogue, without any of its values; null when it fits.';
REVOKE ALL ON FUNCTION public.event_schema_fault(text, jsonb, jsonb) FROM PUBLIC, anon, authenticated, service_role;

-- +goose Down
DROP FUNCTION public.event_schema_fault(text, jsonb, jsonb);
DROP TABLE public.event_types;
