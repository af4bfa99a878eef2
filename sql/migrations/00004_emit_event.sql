-- +goose Up
-- event_log is partitioned by time, so no unique index on it can span the
-- partitions: the keys that were used stand here.
CREATE TABLE public.event_idempotency_keys (
    organization_id  uuid NOT NULL REFERENCES public.organizations (id) ON DELETE CASCADE,
    idempotency_key  text NOT NULL,
    event_id         uuid NOT NULL,
    event_created_at timestamptz NOT NULL,
    PRIMARY KEY (organization_id, idempotency_key)
);

COMMENT ON TABLE public.event_idempotency_keys IS
    'The first event of each (organization, metadata.idempotency_key); a second emit returns its id and writes nothing.';

-- +goose StatementBegin
CREATE FUNCTION public.emit_event(
    p_event_type      text,
    p_entity_kind     text,
    p_entity_id       uuid,
    p_payload         jsonb DEFAULT '{}'::jsonb,
    p_metadata        jsonb DEFAULT '{}'::jsonb,
    p_organization_id uuid DEFAULT NULL,
    p_at              timestamptz DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_id       uuid := gen_random_uuid();
    v_first_id uuid;
    v_metadata jsonb := coalesce(p_metadata, '{}'::jsonb);
    v_key      text;
BEGIN
    IF p_organization_id IS NULL THEN
        RAISE EXCEPTION 'emit_event: p_organization_id is required'
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    IF p_event_type IS NULL OR p_event_type !~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$' THEN
        RAISE EXCEPTION 'emit_event: event type "%" is not of the form entity.action in lower snake case', left(p_event_type, 100)
            USING ERRCODE = 'check_violation';
    END IF;
    IF coalesce(p_entity_kind, '') = '' THEN
        RAISE EXCEPTION 'emit_event: p_entity_kind is required'
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    IF jsonb_typeof(v_metadata) <> 'object' THEN
        RAISE EXCEPTION 'emit_event: p_metadata must be a JSON object, not %', jsonb_typeof(v_metadata)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF jsonb_typeof(coalesce(p_payload, '{}'::jsonb)) <> 'object' THEN
        RAISE EXCEPTION 'emit_event: p_payload must be a JSON object, not %', jsonb_typeof(p_payload)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    v_key := v_metadata ->> 'idempotency_key';
    IF v_key IS NOT NULL THEN
        -- Waits for a concurrent emit of the same key to commit or roll back.
        INSERT INTO public.event_idempotency_keys (organization_id, idempotency_key, event_id, event_created_at)
        VALUES (p_organization_id, v_key, v_id, now())
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            SELECT event_id INTO STRICT v_first_id
            FROM public.event_idempotency_keys
            WHERE organization_id = p_organization_id AND idempotency_key = v_key;
            RETURN v_first_id;
        END IF;
    END IF;

    INSERT INTO public.event_log
        (id, organization_id, event_type, entity_kind, entity_id, payload, metadata, next_attempt_at)
    VALUES
        (v_id, p_organization_id, p_event_type, p_entity_kind, p_entity_id,
         coalesce(p_payload, '{}'::jsonb),
         v_metadata || jsonb_build_object('emitted_at', extract(epoch FROM now())),
         p_at);
    RETURN v_id;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz) IS
    'Writes one event in the caller''s transaction and returns its id. With metadata.idempotency_key, the second emit of a key in an organization returns the first event''s id and writes nothing. p_at: not fanned out before.';
REVOKE ALL ON FUNCTION public.emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz) FROM PUBLIC;

-- +goose Down
DROP FUNCTION public.emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz);
DROP TABLE public.event_idempotency_keys;
