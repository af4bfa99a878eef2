-- Ids of events that grow with time.
--
-- A random id goes to any page of the primary key, and so do its three values in
-- River's index on metadata. Of a month with ten million events those pages are in
-- nobody's memory: each emit read one more, and after each checkpoint wrote a third more
-- of WAL. Ids that grow (version 7 of RFC 9562) go to the pages of the moment, where
-- whoever works off the event finds them.

-- +goose Up
-- A body in standard SQL needs no search_path of its own, with which it would not be
-- inlined and cost several times as much: its names are looked up here.
CREATE FUNCTION public.new_event_id() RETURNS uuid
LANGUAGE sql
RETURN encode(
    overlay(
        overlay(uuid_send(gen_random_uuid()) PLACING substring(int8send((date_part('epoch', clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1)
        PLACING '\x70' FROM 7),
    'hex')::uuid;
COMMENT ON FUNCTION public.new_event_id() IS
    'A UUID of version 7: 48 bits of milliseconds since 1970, then 70 random bits.';
REVOKE ALL ON FUNCTION public.new_event_id() FROM PUBLIC, anon, authenticated;
GRANT EXECUTE ON FUNCTION public.new_event_id() TO service_role;

ALTER TABLE public.event_log ALTER COLUMN id SET DEFAULT public.new_event_id();
-- +goose StatementBegin
DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOREACH v_function IN ARRAY '{"public.insert_event(text,text,uuid,jsonb,jsonb,uuid,timestamptz)",public.emit_events(jsonb)}'::regprocedure[] LOOP
        EXECUTE replace(pg_get_functiondef(v_function), 'gen_random_uuid()', 'public.new_event_id()');
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOREACH v_function IN ARRAY '{"public.insert_event(text,text,uuid,jsonb,jsonb,uuid,timestamptz)",public.emit_events(jsonb)}'::regprocedure[] LOOP
        EXECUTE replace(pg_get_functiondef(v_function), 'public.new_event_id()', 'gen_random_uuid()');
    END LOOP;
END $$;
-- +goose StatementEnd
ALTER TABLE public.event_log ALTER COLUMN id SET DEFAULT gen_random_uuid();
DROP FUNCTION public.new_event_id();
