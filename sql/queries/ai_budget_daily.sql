-- name: BeginBudgetDay :many
-- BeginBudgetDay begins a day, such as 2026-12-01, for some organizations that
-- are still at an earlier one, and returns how those days ended.
WITH ended AS (
    SELECT b.organization_id, b.day, b.daily_budget_cents, b.used_cents
    FROM public.ai_budget_daily AS b
    WHERE b.day < (@day::text)::date
    ORDER BY b.organization_id
    LIMIT @max_organizations
    FOR UPDATE
), begun AS (
    UPDATE public.ai_budget_daily AS b
    SET day = (@day::text)::date, used_cents = 0, updated_at = now()
    FROM ended
    WHERE b.organization_id = ended.organization_id
)
SELECT organization_id, day::text AS day, daily_budget_cents, used_cents FROM ended ORDER BY organization_id;
