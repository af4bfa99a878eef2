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

CREATE INDEX event_idempotency_keys_created_idx ON public.event_idempotency_keys USING brin (event_created_at);

COMMENT ON TABLE public.event_idempotency_keys IS
    'The first event of each (organization, metadata.idempotency_key); a second emit returns its id and writes nothing. A key lives as long as events stay before they are archived.';

ALTER TABLE public.event_idempotency_keys ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.event_idempotency_keys FROM anon, authenticated;
GRANT SELECT, INSERT, UPDATE, DELETE ON public.event_idempotency_keys TO service_role;
CREATE POLICY service ON public.event_idempotency_keys TO service_role USING (true) WITH CHECK (true);

-- emit_event and emit_events run as their owner, with a fixed search_path. The
-- functions below them are for these alone, inherit both, and set neither:
-- each SET would cost a quarter of the price of an event.

-- The caller is the role that was set, else the one that logged in: a function
-- with SECURITY DEFINER, in which this runs, changes neither.
-- +goose StatementBegin
CREATE FUNCTION public.emitting_organization(p_organization_id uuid) RETURNS uuid
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    v_caller  name := coalesce(nullif(current_setting('role'), 'none'), session_user);
    v_trusted boolean := pg_has_role(v_caller, 'service_role', 'MEMBER')
        OR pg_has_role(v_caller, (SELECT relowner FROM pg_class WHERE oid = 'public.event_log'::regclass), 'MEMBER');
    v_own     uuid;
BEGIN
    IF v_trusted AND p_organization_id IS NOT NULL THEN
        RETURN p_organization_id;
    END IF;
    v_own := auth.organization_id();
    IF v_own IS NULL AND v_trusted THEN
        RAISE EXCEPTION 'p_organization_id is required'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF v_own IS NULL THEN
        RAISE EXCEPTION 'the caller belongs to no organization'
            USING ERRCODE = 'insufficient_privilege',
                  HINT = 'The token needs the claim organization_id; a back end needs the role service_role.';
    ELSIF p_organization_id <> v_own THEN
        RAISE EXCEPTION 'the caller may emit for its own organization only'
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN v_own;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.emitting_organization(uuid) IS
    'The organization that the caller emits for. Members of service_role and the owner of event_log: any, by default their token''s. All others: their token''s own.';
REVOKE ALL ON FUNCTION public.emitting_organization(uuid) FROM PUBLIC, anon, authenticated, service_role;

-- +goose StatementBegin
CREATE FUNCTION public.check_event(
    p_event_type  text,
    p_entity_kind text,
    p_payload     jsonb,
    p_metadata    jsonb,
    OUT metadata  jsonb,
    OUT fault     text
)
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    v_max_payload  CONSTANT integer := 1048576;
    v_max_metadata CONSTANT integer := 16384;
    v_size         integer;
BEGIN
    IF p_event_type IS NULL OR p_event_type !~ '^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$' THEN
        RAISE EXCEPTION 'event type "%" is not of the form entity.action in lower snake case', left(p_event_type, 100)
            USING ERRCODE = 'check_violation';
    END IF;
    IF p_entity_kind = '' THEN
        RAISE EXCEPTION 'p_entity_kind is empty' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF jsonb_typeof(p_payload) <> 'object' THEN
        RAISE EXCEPTION 'p_payload must be a JSON object, not %', jsonb_typeof(p_payload)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF jsonb_typeof(p_metadata) <> 'object' THEN
        RAISE EXCEPTION 'p_metadata must be a JSON object, not %', jsonb_typeof(p_metadata)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_size := octet_length(p_payload::text);
    IF v_size > v_max_payload THEN
        RAISE EXCEPTION 'the payload of % has % bytes, the most is %', p_event_type, v_size, v_max_payload
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Keep what is large elsewhere and put its id into the event.';
    END IF;
    v_size := octet_length(p_metadata::text);
    IF v_size > v_max_metadata THEN
        RAISE EXCEPTION 'the metadata of % has % bytes, the most is %', p_event_type, v_size, v_max_metadata
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    IF p_metadata ? 'idempotency_key' AND (
        jsonb_typeof(p_metadata -> 'idempotency_key') <> 'string'
        OR char_length(p_metadata ->> 'idempotency_key') NOT BETWEEN 1 AND 255
    ) THEN
        RAISE EXCEPTION 'metadata.idempotency_key must be a string of 1 to 255 characters'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    metadata := (coalesce(nullif(current_setting('afluente.metadata', true), '')::jsonb, '{}') - 'idempotency_key')
        || p_metadata || jsonb_build_object('emitted_at', extract(epoch FROM now()));
    fault := public.event_schema_fault(p_event_type, p_payload, metadata);
    IF fault IS NOT NULL AND coalesce(nullif(current_setting('afluente.strict_events', true), '')::boolean, false) THEN
        RAISE EXCEPTION '%: %', p_event_type, fault
            USING ERRCODE = 'check_violation',
                  HINT = 'The schema is in event_types; afluente.strict_events is on here.';
    END IF;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.check_event(text, text, jsonb, jsonb) IS
    'Refuses an event that event_log must not hold; else its whole metadata, and in what it departs from the catalogue.';
REVOKE ALL ON FUNCTION public.check_event(text, text, jsonb, jsonb) FROM PUBLIC, anon, authenticated, service_role;

-- +goose StatementBegin
CREATE FUNCTION public.insert_event(
    p_event_type      text,
    p_entity_kind     text,
    p_entity_id       uuid,
    p_payload         jsonb,
    p_metadata        jsonb,
    p_organization_id uuid,
    p_at              timestamptz
) RETURNS uuid
LANGUAGE plpgsql
AS $$
DECLARE
    v_id       uuid := gen_random_uuid();
    v_first_id uuid;
    v_payload  jsonb := coalesce(p_payload, '{}');
    v_metadata jsonb;
    v_fault    text;
BEGIN
    SELECT c.metadata, c.fault INTO v_metadata, v_fault
    FROM public.check_event(p_event_type, p_entity_kind, v_payload, coalesce(p_metadata, '{}')) AS c;

    IF v_metadata ? 'idempotency_key' THEN
        -- Waits for a concurrent emit of the same key to commit or roll back.
        INSERT INTO public.event_idempotency_keys (organization_id, idempotency_key, event_id, event_created_at)
        VALUES (p_organization_id, v_metadata ->> 'idempotency_key', v_id, now())
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            SELECT event_id INTO STRICT v_first_id
            FROM public.event_idempotency_keys
            WHERE organization_id = p_organization_id AND idempotency_key = v_metadata ->> 'idempotency_key';
            RETURN v_first_id;
        END IF;
    END IF;

    INSERT INTO public.event_log
        (id, organization_id, event_type, entity_kind, entity_id, payload, metadata, schema_fault, next_attempt_at)
    VALUES
        (v_id, p_organization_id, p_event_type, coalesce(p_entity_kind, split_part(p_event_type, '.', 1)), p_entity_id,
         v_payload, v_metadata, v_fault, p_at);
    RETURN v_id;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.insert_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz) IS
    'emit_event without the question who may: for functions that run as their owner and answer it themselves.';
REVOKE ALL ON FUNCTION public.insert_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz)
    FROM PUBLIC, anon, authenticated, service_role;

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
BEGIN
    RETURN public.insert_event(p_event_type, p_entity_kind, p_entity_id, p_payload, p_metadata,
        public.emitting_organization(p_organization_id), p_at);
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz) IS
    'Writes one event in the caller''s transaction and returns its id. p_entity_kind: by default the type up to its dot. p_payload: at most 1 MiB as text, p_metadata: 16 KiB. With metadata.idempotency_key, the second emit of a key in an organization returns the first event''s id and writes nothing. p_organization_id: by default the one of the caller''s token; only service_role may name another. p_at: not fanned out before. The setting afluente.metadata (JSON) is added to the metadata; with afluente.strict_events on, an event that departs from the catalogue is refused.';
REVOKE ALL ON FUNCTION public.emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz) FROM PUBLIC, anon;
GRANT EXECUTE ON FUNCTION public.emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz) TO authenticated, service_role;

-- +goose StatementBegin
CREATE FUNCTION public.check_element(p_event jsonb, OUT organization_id uuid, OUT metadata jsonb, OUT fault text)
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    v_rest jsonb;
BEGIN
    IF jsonb_typeof(p_event) <> 'object' THEN
        RAISE EXCEPTION 'it is not an object' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_rest := p_event - '{event_type,entity_kind,entity_id,payload,metadata,organization_id,at}'::text[];
    IF v_rest <> '{}' THEN
        RAISE EXCEPTION 'unknown field "%"', left((SELECT min(k) FROM jsonb_object_keys(v_rest) AS k), 100)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    organization_id := public.emitting_organization((p_event ->> 'organization_id')::uuid);
    SELECT c.metadata, c.fault INTO check_element.metadata, check_element.fault
    FROM public.check_event(p_event ->> 'event_type', p_event ->> 'entity_kind',
        coalesce(p_event -> 'payload', '{}'), coalesce(p_event -> 'metadata', '{}')) AS c;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.check_element(jsonb) IS
    'check_event and emitting_organization for one element of the array of emit_events.';
REVOKE ALL ON FUNCTION public.check_element(jsonb) FROM PUBLIC, anon, authenticated, service_role;

-- +goose StatementBegin
CREATE FUNCTION public.emit_events(p_events jsonb) RETURNS SETOF uuid
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_ids     uuid[];
    v_event   jsonb;
    v_index   bigint;
    v_state   text;
    v_message text;
    v_hint    text;
BEGIN
    IF jsonb_typeof(p_events) IS DISTINCT FROM 'array' THEN
        RAISE EXCEPTION 'p_events must be a JSON array' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    BEGIN
        -- A key that is used in several events of the array counts for the first.
        -- Keys are taken in their order, so that two callers cannot deadlock.
        WITH input AS MATERIALIZED (
            SELECT
                a.n,
                gen_random_uuid() AS id,
                c.organization_id,
                a.value ->> 'event_type' AS event_type,
                coalesce(a.value ->> 'entity_kind', split_part(a.value ->> 'event_type', '.', 1)) AS entity_kind,
                (a.value ->> 'entity_id')::uuid AS entity_id,
                coalesce(a.value -> 'payload', '{}') AS payload,
                c.metadata,
                c.fault,
                (a.value ->> 'at')::timestamptz AS at,
                c.metadata ->> 'idempotency_key' AS idempotency_key
            FROM jsonb_array_elements(p_events) WITH ORDINALITY AS a (value, n),
                LATERAL public.check_element(a.value) AS c
        ), keys AS (
            INSERT INTO public.event_idempotency_keys (organization_id, idempotency_key, event_id, event_created_at)
            SELECT organization_id, idempotency_key, id, now()
            FROM input
            WHERE idempotency_key IS NOT NULL
            ORDER BY organization_id, idempotency_key, n
            ON CONFLICT DO NOTHING
            RETURNING event_id
        ), inserted AS (
            INSERT INTO public.event_log
                (id, organization_id, event_type, entity_kind, entity_id, payload, metadata, schema_fault, next_attempt_at)
            SELECT id, organization_id, event_type, entity_kind, entity_id, payload, metadata, fault, at
            FROM input
            WHERE idempotency_key IS NULL OR id IN (SELECT event_id FROM keys)
            ORDER BY n
        )
        SELECT array_agg(CASE WHEN i.idempotency_key IS NULL OR k.event_id IS NOT NULL THEN i.id END ORDER BY i.n) INTO v_ids
        FROM input AS i
        LEFT JOIN keys AS k ON k.event_id = i.id;

        RETURN QUERY
        SELECT coalesce(u.id, (
            SELECT k.event_id
            FROM public.event_idempotency_keys AS k
            WHERE k.organization_id = public.emitting_organization((p_events -> (u.n::integer - 1) ->> 'organization_id')::uuid)
                AND k.idempotency_key = p_events -> (u.n::integer - 1) #>> '{metadata,idempotency_key}'
        ))
        FROM unnest(v_ids) WITH ORDINALITY AS u (id, n)
        ORDER BY u.n;
    EXCEPTION WHEN OTHERS THEN
        -- Find out which of them it was.
        FOR v_event, v_index IN SELECT value, ordinality - 1 FROM jsonb_array_elements(p_events) WITH ORDINALITY LOOP
            BEGIN
                PERFORM public.check_element(v_event), (v_event ->> 'entity_id')::uuid, (v_event ->> 'at')::timestamptz;
            EXCEPTION WHEN OTHERS THEN
                GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE, v_message = MESSAGE_TEXT, v_hint = PG_EXCEPTION_HINT;
                RAISE EXCEPTION 'event %: %', v_index, v_message USING ERRCODE = v_state, HINT = v_hint;
            END;
        END LOOP;
        RAISE;
    END;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.emit_events(jsonb) IS
    'emit_event for many: an array of objects with event_type (required), entity_kind, entity_id, payload, metadata, organization_id and at. Returns the ids in the order of the array. One event that is refused refuses them all; the error names it, counted from 0.';
REVOKE ALL ON FUNCTION public.emit_events(jsonb) FROM PUBLIC, anon;
GRANT EXECUTE ON FUNCTION public.emit_events(jsonb) TO authenticated, service_role;

-- +goose Down
DROP FUNCTION public.emit_events(jsonb);
DROP FUNCTION public.check_element(jsonb);
DROP FUNCTION public.emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz);
DROP FUNCTION public.insert_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz);
DROP FUNCTION public.check_event(text, text, jsonb, jsonb);
DROP FUNCTION public.emitting_organization(uuid);
DROP TABLE public.event_idempotency_keys;
