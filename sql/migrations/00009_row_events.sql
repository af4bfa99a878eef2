-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION public.emit_row_events() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_max_value CONSTANT integer := 8192;
    v_ignored   CONSTANT text[] := '{updated_at}';
    v_old       jsonb := to_jsonb(OLD);
    v_new       jsonb := CASE TG_OP WHEN 'UPDATE' THEN to_jsonb(NEW) END;
    v_row       jsonb := coalesce(v_new, v_old);
    v_entity    text := TG_ARGV[0];
    v_metadata  jsonb := jsonb_build_object('source', TG_TABLE_NAME);
    v_changes   jsonb;
    v_column    text;
    v_action    text;
BEGIN
    IF TG_LEVEL <> 'ROW' OR TG_WHEN <> 'AFTER' OR TG_OP NOT IN ('UPDATE', 'DELETE') OR v_entity IS NULL THEN
        RAISE EXCEPTION 'emit_row_events goes into a trigger AFTER UPDATE OR DELETE FOR EACH ROW and takes the entity''s name'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    IF TG_OP = 'DELETE' OR v_old ->> 'deleted_at' IS NULL AND v_new ->> 'deleted_at' IS NOT NULL THEN
        PERFORM public.insert_event(v_entity || '.deleted', v_entity, (v_row ->> 'id')::uuid,
            jsonb_build_object(
                'soft', TG_OP = 'UPDATE',
                'deleted_by', coalesce(
                    v_new ->> 'deleted_by',
                    nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub',
                    coalesce(nullif(current_setting('role'), 'none'), session_user))),
            v_metadata, (v_row ->> 'organization_id')::uuid, NULL);
        RETURN NULL;
    END IF;

    -- A large value is told to have changed, not what it was and is: an event
    -- over the limit would fail the application's own statement.
    SELECT jsonb_object_agg(n.key, CASE
        WHEN octet_length(o.value::text) <= v_max_value AND octet_length(n.value::text) <= v_max_value
        THEN jsonb_build_object('from', o.value, 'to', n.value)
        ELSE '{"truncated": true}' END)
    INTO v_changes
    FROM jsonb_each(v_new) AS n
    JOIN jsonb_each(v_old) AS o ON o.key = n.key AND o.value <> n.value
    WHERE n.key <> ALL (v_ignored);
    IF v_changes IS NULL THEN
        RETURN NULL;
    ELSIF octet_length(v_changes::text) > 64 * v_max_value THEN
        SELECT jsonb_object_agg(k, '{"truncated": true}'::jsonb) INTO v_changes FROM jsonb_object_keys(v_changes) AS k;
    END IF;
    PERFORM public.insert_event(v_entity || '.updated', v_entity, (v_row ->> 'id')::uuid,
        jsonb_build_object('changes', v_changes), v_metadata, (v_row ->> 'organization_id')::uuid, NULL);

    FOR i IN 1..TG_NARGS - 1 LOOP
        v_column := split_part(TG_ARGV[i], '=', 1);
        v_action := split_part(TG_ARGV[i], '=', 2);
        IF NOT v_new ? v_column OR v_action = '' THEN
            RAISE EXCEPTION 'argument "%" of trigger % is not column=action with a column of %', TG_ARGV[i], TG_NAME, TG_TABLE_NAME
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF v_changes ? v_column AND v_new ->> v_column IS NOT NULL THEN
            PERFORM public.insert_event(v_entity || '.' || v_action, v_entity, (v_row ->> 'id')::uuid,
                jsonb_strip_nulls(jsonb_build_object('from_' || v_column, v_old -> v_column, 'to_' || v_column, v_new -> v_column)),
                v_metadata, (v_row ->> 'organization_id')::uuid, NULL);
        END IF;
    END LOOP;
    RETURN NULL;
END $$;
-- +goose StatementEnd

COMMENT ON FUNCTION public.emit_row_events() IS
    'Emits what happens to the rows of a table with the columns id and organization_id: ENTITY.updated with the changes, ENTITY.ACTION with from_COLUMN and to_COLUMN for each argument COLUMN=ACTION whose column gets a new value other than null, ENTITY.deleted when a row is deleted or its deleted_at is set. Attach it with: CREATE TRIGGER lead_events AFTER UPDATE OR DELETE ON leads FOR EACH ROW EXECUTE FUNCTION emit_row_events(''lead'', ''stage_id=stage_changed'', ''owner_id=assigned''). Whoever may change the row emits; a change of updated_at alone is none.';
REVOKE ALL ON FUNCTION public.emit_row_events() FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.emit_row_events() TO service_role;

-- +goose Down
DROP FUNCTION public.emit_row_events();
