-- +goose Up
CREATE TABLE public.webhook_deliveries (
    id              uuid NOT NULL DEFAULT gen_random_uuid() UNIQUE,
    event_id        uuid NOT NULL,
    subscription_id uuid NOT NULL REFERENCES public.webhook_subscriptions (id) ON DELETE CASCADE,
    attempts        integer NOT NULL DEFAULT 0,
    last_error      text,
    delivered_at    timestamptz,
    created_at      timestamptz NOT NULL DEFAULT now(),
    updated_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (event_id, subscription_id)
);

COMMENT ON TABLE public.webhook_deliveries IS
    'One row per (event, subscription), so that a retry of the event does not deliver again to those who have it.';

ALTER TABLE public.webhook_deliveries ENABLE ROW LEVEL SECURITY;
REVOKE ALL ON public.webhook_deliveries FROM anon, authenticated;
GRANT SELECT, INSERT, UPDATE, DELETE ON public.webhook_deliveries TO service_role;
CREATE POLICY service ON public.webhook_deliveries TO service_role USING (true) WITH CHECK (true);

-- +goose Down
DROP TABLE public.webhook_deliveries;
