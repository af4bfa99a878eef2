-- +goose Up
CREATE TABLE public.event_consumers (
    name          text PRIMARY KEY CHECK (char_length(name) BETWEEN 1 AND 127),
    event_types   text[] NOT NULL CHECK (event_types <> '{}'),
    queue         text NOT NULL,
    priority      smallint NOT NULL DEFAULT 1 CHECK (priority BETWEEN 1 AND 4),
    max_attempts  smallint NOT NULL CHECK (max_attempts > 0),
    registered_at timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE public.event_consumers IS
    'Who gets which events. Every process registers the consumers it knows at its start, so that the bridge of any process serves those of all. Delete a row to retire a consumer.';
COMMENT ON COLUMN public.event_consumers.name IS
    'The consumer, which is the kind of its River jobs.';
COMMENT ON COLUMN public.event_consumers.event_types IS
    'Exact types, or * for every event.';

-- +goose Down
DROP TABLE public.event_consumers;
