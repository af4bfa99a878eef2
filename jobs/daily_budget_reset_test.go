package jobs

import (
	"fmt"
	"testing"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
)

// At midnight in São Paulo, which is 03:00 in UTC.
func TestDailyBudgetResetBeginsTheDayOnceAndTellsHowTheLastOneEnded(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	s.exec(t, `INSERT INTO organizations (id) SELECT gen_random_uuid() FROM generate_series(1, 1200)`)
	s.exec(t, `INSERT INTO ai_budget_daily (organization_id, day, daily_budget_cents, used_cents) SELECT id, '2026-12-01', 500, 123 FROM organizations`)
	s.exec(t, `UPDATE ai_budget_daily SET day = '2026-12-02', used_cents = 7 WHERE organization_id = $1`, s.org)
	run := func(tick string) string {
		inserted, err := s.client.Insert(t.Context(), DailyBudgetResetArgs{}, &river.InsertOpts{
			Metadata: fmt.Appendf(nil, `{"cron": "daily-budget-reset", "tick": %q}`, tick),
		})
		require.NoError(t, err)
		return string(s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted).Output())
	}
	require.JSONEq(t, `{"day": "2026-12-01", "organizations": 0}`, run("2026-12-02T02:59:59Z"))
	require.JSONEq(t, `{"day": "2026-12-02", "organizations": 1200}`, run("2026-12-02T03:00:00Z"))
	require.JSONEq(t, `{"day": "2026-12-02", "organizations": 0}`, run("2026-12-02T03:00:00Z"))
	require.Equal(t, 1200, one[int](t, s, `SELECT count(*) FROM event_log WHERE event_type = 'ai.budget_snapshot'
		AND payload = '{"day": "2026-12-01", "used_cents": 123, "daily_budget_cents": 500}'`))
	require.Equal(t, 1200, one[int](t, s, "SELECT count(*) FROM ai_budget_daily WHERE day = '2026-12-02' AND used_cents = 0"))
	require.Equal(t, 7, one[int](t, s, "SELECT used_cents FROM ai_budget_daily WHERE used_cents > 0"), "its day has begun already")
}
