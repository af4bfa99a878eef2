package sql_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
)

// newLeads returns a database with a table of leads, whose changes are told,
// and one lead in it.
func newLeads(t *testing.T) (pool *pgxpool.Pool, organization, lead uuid.UUID) {
	t.Helper()
	pool = dbtest.New(t)
	organization = newOrganization(t, pool)
	exec(t, pool, `CREATE TABLE leads (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), organization_id uuid NOT NULL, name text,
		stage_id uuid, owner_id uuid, deleted_at timestamptz, updated_at timestamptz)`)
	exec(t, pool, `CREATE TRIGGER lead_events AFTER UPDATE OR DELETE ON leads
		FOR EACH ROW EXECUTE FUNCTION emit_row_events('lead', 'stage_id=stage_changed', 'owner_id=assigned')`)
	exec(t, pool, "GRANT SELECT, UPDATE, DELETE ON leads TO authenticated")
	lead = one[uuid.UUID](t, pool, "INSERT INTO leads (organization_id, name) VALUES ($1, 'Ada') RETURNING id", organization)
	return pool, organization, lead
}

const told = "SELECT event_type || ' ' || payload::text FROM event_log ORDER BY event_type, payload"

func TestChangesOfARowAreTold(t *testing.T) {
	t.Parallel()
	pool, organization, lead := newLeads(t)
	require.Empty(t, column[string](t, pool, told), "an insert is the application's to tell")
	a, b := uuid.New(), uuid.New()

	exec(t, pool, "UPDATE leads SET name = 'Ada', updated_at = now()")
	require.Empty(t, column[string](t, pool, told), "nothing has changed")

	exec(t, pool, "UPDATE leads SET stage_id = $1, owner_id = $2", a, b)
	exec(t, pool, "UPDATE leads SET stage_id = $1, owner_id = NULL, name = 'Bea'", b)
	require.Equal(t, []string{
		fmt.Sprintf(`lead.assigned {"to_owner_id": %q}`, b),
		fmt.Sprintf(`lead.stage_changed {"to_stage_id": %q}`, a),
		fmt.Sprintf(`lead.stage_changed {"to_stage_id": %q, "from_stage_id": %q}`, b, a),
		fmt.Sprintf(`lead.updated {"changes": {"owner_id": {"to": %q, "from": null}, "stage_id": {"to": %q, "from": null}}}`, b, a),
		fmt.Sprintf(`lead.updated {"changes": {"name": {"to": "Bea", "from": "Ada"}, "owner_id": {"to": null, "from": %q}, "stage_id": {"to": %[1]q, "from": %q}}}`, b, a),
	}, column[string](t, pool, told))
	require.Equal(t, []string{fmt.Sprintf("%s lead %s leads", organization, lead)},
		column[string](t, pool, "SELECT DISTINCT concat_ws(' ', organization_id, entity_kind, entity_id, metadata ->> 'source') FROM event_log"))
}

func TestDeletedRowIsTold(t *testing.T) {
	t.Parallel()
	pool, organization, _ := newLeads(t)
	exec(t, tenant(t, pool, organization), "UPDATE leads SET deleted_at = now(), name = ''")
	exec(t, as(t, pool, "authenticated", ""), "DELETE FROM leads")
	require.Equal(t, []string{
		`lead.deleted {"soft": true, "deleted_by": "user-1"}`,
		`lead.deleted {"soft": false, "deleted_by": "authenticated"}`,
	}, column[string](t, pool, "SELECT event_type || ' ' || payload::text FROM event_log ORDER BY created_at"))
}

func TestRowEventsVanishWithTheirTransaction(t *testing.T) {
	t.Parallel()
	pool, _, _ := newLeads(t)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	exec(t, tx, "UPDATE leads SET name = 'never'")
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, column[string](t, pool, told))
}

// However large a value is, the application's own statement must go through.
func TestLargeValuesAreToldToHaveChanged(t *testing.T) {
	t.Parallel()
	pool, _, _ := newLeads(t)
	exec(t, pool, "UPDATE leads SET name = $1", strings.Repeat("x", 5<<20))
	require.Equal(t, []string{`lead.updated {"changes": {"name": {"truncated": true}}}`}, column[string](t, pool, told))

	var wide, set []string
	for i := range 200 {
		wide = append(wide, fmt.Sprintf("ADD c%d text", i))
		set = append(set, fmt.Sprintf("c%d = repeat('x', 8000)", i))
	}
	exec(t, pool, "ALTER TABLE leads "+strings.Join(wide, ", "))
	exec(t, pool, "UPDATE leads SET "+strings.Join(set, ", "))
	require.Equal(t, 2, one[int](t, pool, "SELECT count(*) FROM event_log"))
	require.Equal(t, 200, one[int](t, pool, `SELECT count(*) FROM event_log, jsonb_each(payload -> 'changes') AS c
		WHERE c.key <> 'name' AND c.value = '{"truncated": true}'`))
}

func TestTriggerThatIsSetUpWronglySaysHow(t *testing.T) {
	t.Parallel()
	pool, _, _ := newLeads(t)
	for definition, want := range map[string]string{
		"AFTER UPDATE ON leads FOR EACH ROW EXECUTE FUNCTION emit_row_events()":                        "takes the entity's name",
		"BEFORE UPDATE ON leads FOR EACH ROW EXECUTE FUNCTION emit_row_events('lead')":                 "AFTER UPDATE OR DELETE FOR EACH ROW",
		"AFTER UPDATE ON leads EXECUTE FUNCTION emit_row_events('lead')":                               "AFTER UPDATE OR DELETE FOR EACH ROW",
		"AFTER UPDATE ON leads FOR EACH ROW EXECUTE FUNCTION emit_row_events('lead', 'color=painted')": `"color=painted"`,
		"AFTER UPDATE ON leads FOR EACH ROW EXECUTE FUNCTION emit_row_events('lead', 'stage_id')":      `"stage_id"`,
	} {
		exec(t, pool, "CREATE TRIGGER wrong "+definition)
		require.ErrorContains(t, run(t, pool, "UPDATE leads SET name = name || 'x'"), want, definition)
		exec(t, pool, "DROP TRIGGER wrong ON leads")
	}
}
