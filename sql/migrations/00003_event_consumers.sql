-- +goose Up
CREATE TABLE public.event_consumers (
    name          text PRIMARY KEY CHECK (char_length(name) BETWEEN 1 AND 127),
    event_types   text[] NOT NULL CHECK (event_types <> '{}'),
    queue         text NOT NULL,
    priority      smallint NOT NULL DEFAULT 1 CHECK (priority BETWEEN 1 AND 4),
    max_attempts  smallint NOT NULL CHECK (max_attempts > 0),
    external      boolean NOT NULL DEFAULT false,
    registered_at timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE public.event_consumers IS
    'Who gets which events. Every process registers the consumers it knows at its start, so that the bridge of any process serves those of all. Delete a row to retire a consumer.';
COMMENT ON COLUMN public.event_consumers.name IS
    'The consumer, which is the kind of its River jobs.';
COMMENT ON COLUMN public.event_consumers.event_types IS
    'Exact types, or * for every event.';
COMMENT ON COLUMN public.event_consumers.external IS
    'Its jobs are not worked by River but taken with claim_events.';

ALTER TABLE public.event_consumers ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.event_consumers FROM anon, authenticated;
GRANT SELECT, INSERT, UPDATE, DELETE ON public.event_consumers TO service_role;
CREATE POLICY service ON public.event_consumers TO service_role USING (true) WITH CHECK (true);

-- +goose Down
DROP TABLE public.event_consumers;
