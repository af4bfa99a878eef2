-- What crons need of the application's own tables: one more of them, created
-- only where it is absent, and an index on one that was created here.

-- +goose Up
-- +goose StatementBegin
DO $$
BEGIN
    IF to_regclass('public.ai_budget_daily') IS NULL THEN
        CREATE TABLE public.ai_budget_daily (
            organization_id    uuid PRIMARY KEY REFERENCES public.organizations (id) ON DELETE CASCADE,
            day                date NOT NULL,
            daily_budget_cents bigint NOT NULL DEFAULT 0 CHECK (daily_budget_cents >= 0),
            used_cents         bigint NOT NULL DEFAULT 0 CHECK (used_cents >= 0),
            updated_at         timestamptz NOT NULL DEFAULT now()
        );
        COMMENT ON TABLE public.ai_budget_daily IS 'Created by afluente.';
        COMMENT ON COLUMN public.ai_budget_daily.day IS 'The day in America/Sao_Paulo that used_cents counts.';
        ALTER TABLE public.ai_budget_daily ENABLE ROW LEVEL SECURITY;
        REVOKE ALL ON public.ai_budget_daily FROM anon, authenticated;
        GRANT SELECT, INSERT, UPDATE, DELETE ON public.ai_budget_daily TO service_role;
        GRANT SELECT ON public.ai_budget_daily TO authenticated;
        CREATE POLICY service ON public.ai_budget_daily TO service_role USING (true) WITH CHECK (true);
        CREATE POLICY select_own_org ON public.ai_budget_daily FOR SELECT USING (organization_id = (SELECT auth.organization_id()));
    END IF;

    IF obj_description(to_regclass('public.messages'), 'pg_class') = 'Created by afluente.' THEN
        CREATE INDEX messages_sending_idx ON public.messages (updated_at) WHERE status = 'sending';
    END IF;
END $$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
DO $$
BEGIN
    IF obj_description(to_regclass('public.messages'), 'pg_class') = 'Created by afluente.' THEN
        DROP INDEX public.messages_sending_idx;
    END IF;
    IF obj_description(to_regclass('public.ai_budget_daily'), 'pg_class') = 'Created by afluente.' THEN
        DROP TABLE public.ai_budget_daily;
    END IF;
END $$;
-- +goose StatementEnd
