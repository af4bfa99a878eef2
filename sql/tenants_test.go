package sql_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
	"afluente/db/migrate"
)

func TestTenantReadsItsOwnEventsOnly(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	a, b := newOrganization(t, pool), newOrganization(t, pool)
	for _, organization := range []uuid.UUID{a, b, b} {
		exec(t, pool, "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)", organization)
	}
	readable := "SELECT count(*) FROM event_log"

	require.Equal(t, 1, one[int](t, tenant(t, pool, a), readable))
	require.Equal(t, 2, one[int](t, tenant(t, pool, b), readable))
	require.Equal(t, []uuid.UUID{b, b}, column[uuid.UUID](t, tenant(t, pool, b), "SELECT organization_id FROM event_log"))
	require.Equal(t, 1, one[int](t, as(t, pool, "authenticated", fmt.Sprintf(`{"app_metadata": {"organization_id": %q}}`, a)), readable))
	for name, claims := range map[string]string{"no claims": "", "no organization": `{"sub": "x"}`, "no UUID": `{"organization_id": "' OR true"}`} {
		require.Zero(t, one[int](t, as(t, pool, "authenticated", claims), readable), name)
	}
	require.Equal(t, 3, one[int](t, as(t, pool, "service_role", ""), readable))
	requireDenied(t, run(t, as(t, pool, "anon", `{"organization_id": "`+a.String()+`"}`), readable))
}

func TestTenantEmitsForItsOwnOrganizationOnly(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	a, b := newOrganization(t, pool), newOrganization(t, pool)
	user := tenant(t, pool, a)

	byDefault := one[uuid.UUID](t, user, "SELECT emit_event('lead.won', 'lead', NULL)")
	named := one[uuid.UUID](t, user, "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)", a)
	many := column[uuid.UUID](t, user, `SELECT emit_events('[{"event_type": "lead.won"}]')`)
	require.ElementsMatch(t, append(many, byDefault, named), column[uuid.UUID](t, user, "SELECT id FROM event_log"))

	for _, statement := range []string{
		"SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)",
		"SELECT emit_events(jsonb_build_array(jsonb_build_object('event_type', 'lead.won', 'organization_id', $1::uuid)))",
		"SELECT emit_events(jsonb_build_array('{\"event_type\": \"lead.won\"}'::jsonb, jsonb_build_object('event_type', 'lead.won', 'organization_id', $1::uuid)))",
	} {
		requireCode(t, run(t, user, statement, b), pgerrcode.InsufficientPrivilege, "its own organization only")
	}
	requireCode(t, run(t, as(t, pool, "authenticated", ""), "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)", b),
		pgerrcode.InsufficientPrivilege, "belongs to no organization")
	requireDenied(t, run(t, as(t, pool, "anon", ""), "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)", b))
	require.Equal(t, 3, one[int](t, pool, "SELECT count(*) FROM event_log"))
}

func TestBackEndEmitsForAnyOrganization(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	a, b := newOrganization(t, pool), newOrganization(t, pool)
	service := as(t, pool, "service_role", `{"role": "service_role"}`)
	for _, organization := range []uuid.UUID{a, b} {
		exec(t, service, "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)", organization)
	}
	requireCode(t, run(t, service, "SELECT emit_event('lead.won', 'lead', NULL)"),
		pgerrcode.NullValueNotAllowedDataException, "p_organization_id is required")

	// A role that only may execute the function is nobody's back end.
	name := "afluente_test_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	exec(t, pool, "CREATE ROLE "+name)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		for _, statement := range []string{"DROP OWNED BY ", "DROP ROLE "} {
			_, err := pool.Exec(ctx, statement+name)
			require.NoError(t, err)
		}
	})
	exec(t, pool, "GRANT EXECUTE ON FUNCTION emit_event TO "+name)
	emit := "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)"
	requireDenied(t, run(t, as(t, pool, name, ""), emit, a))
	exec(t, pool, "GRANT service_role TO "+name)
	exec(t, as(t, pool, name, ""), emit, a)
}

// The application's own function, which runs as its owner, does not lend the
// owner's rights to a tenant.
func TestFunctionOfTheOwnerDoesNotLendItsRights(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	a, b := newOrganization(t, pool), newOrganization(t, pool)
	exec(t, pool, `CREATE FUNCTION win(p_organization uuid) RETURNS uuid LANGUAGE sql SECURITY DEFINER
		SET search_path = pg_catalog, pg_temp AS $$ SELECT public.emit_event('lead.won', 'lead', NULL, '{}', '{}', p_organization) $$`)
	user := tenant(t, pool, a)
	exec(t, user, "SELECT win($1)", a)
	requireDenied(t, run(t, user, "SELECT win($1)", b))
}

// What a role may do is told here in full: whatever is new and not said here
// fails, also under Supabase's default privileges, which give each new table
// and function in public to all three roles.
func TestRolesMayDoThisAndNothingElse(t *testing.T) {
	t.Parallel()
	for name, defaults := range map[string]string{
		"plain database": "SELECT",
		"Supabase": `ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT ALL ON TABLES TO anon, authenticated, service_role;
			ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT ALL ON FUNCTIONS TO anon, authenticated, service_role;
			ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT ALL ON SEQUENCES TO anon, authenticated, service_role`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, err := pgxpool.New(t.Context(), dbtest.Empty(t))
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			dbtest.New(t) // the roles are there then
			_, err = pool.Exec(t.Context(), defaults)
			require.NoError(t, err)
			_, err = migrate.Up(t.Context(), pool)
			require.NoError(t, err)
			organization := newOrganization(t, pool)
			exec(t, pool, "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)", organization)

			const functions = `SELECT p.oid::regprocedure::text FROM pg_proc AS p
				WHERE pronamespace = 'public'::regnamespace AND has_function_privilege($1, oid, 'EXECUTE') ORDER BY 1`
			const tables = `SELECT c.relname || ' ' || privilege FROM pg_class AS c,
				unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS privilege
				WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v') AND has_table_privilege($1, oid, privilege) ORDER BY 1`
			require.Empty(t, column[string](t, pool, functions, "anon"))
			require.Empty(t, column[string](t, pool, tables, "anon"))
			require.Equal(t, []string{
				"emit_event(text,text,uuid,jsonb,jsonb,uuid,timestamp with time zone)",
				"emit_events(jsonb)",
			}, column[string](t, pool, functions, "authenticated"))
			require.Equal(t, []string{
				"ai_budget_daily SELECT", "audit_log SELECT", "contacts SELECT", "conversations SELECT", "event_log SELECT",
				"messages SELECT", "organizations SELECT",
			}, column[string](t, pool, tables, "authenticated"))
			require.Empty(t, column[string](t, pool, `SELECT relname::text FROM pg_class
				WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relrowsecurity`),
				"a table without row level security")
			for _, role := range []string{"anon", "authenticated", "service_role"} {
				require.False(t, one[bool](t, pool, "SELECT has_schema_privilege($1, 'river', 'USAGE')", role), role)
			}
			requireDenied(t, run(t, tenant(t, pool, organization), "SELECT "+one[string](t, pool,
				"SELECT string_agg(quote_ident(attname), ',') FROM pg_attribute WHERE attrelid = 'event_log'::regclass AND attnum > 0")+
				" FROM "+one[string](t, pool, "SELECT tableoid::regclass::text FROM event_log"))) // a partition is no way round
		})
	}
}

func TestTenantCannotWriteWhatItReads(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	user := tenant(t, pool, organization)
	id := one[uuid.UUID](t, user, "SELECT emit_event('lead.won', 'lead', NULL)")
	for _, statement := range []string{
		"INSERT INTO event_log (organization_id, event_type, entity_kind) SELECT organization_id, 'lead.won', 'lead' FROM event_log WHERE id = $1",
		"UPDATE event_log SET status = 'done' WHERE id = $1",
		"DELETE FROM event_log WHERE id = $1",
		"SELECT ack_event($1, 'x-worker')",
		"SELECT nack_event($1, 'x-worker', '')",
		"SELECT claim_events('x-worker') WHERE $1::uuid IS NOT NULL",
		"SELECT register_consumer('x-worker', '{*}') WHERE $1::uuid IS NOT NULL",
		"SELECT insert_event('lead.won', 'lead', NULL, '{}', '{}', $1, NULL)",
		"SELECT create_event_log_partitions() WHERE $1::uuid IS NOT NULL",
	} {
		requireDenied(t, run(t, user, statement, id))
	}
	// With TEMP a tenant may make a table, but no trigger that emits.
	exec(t, user, "CREATE TEMP TABLE leads (id uuid, organization_id uuid, stage_id uuid)")
	requireDenied(t, run(t, user, "CREATE TRIGGER x AFTER UPDATE ON leads FOR EACH ROW EXECUTE FUNCTION public.emit_row_events('lead')"))
}

// On Supabase auth.organization_id() is the application's own.
func TestOrganizationFunctionOfTheApplicationIsUsed(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), dbtest.Empty(t))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	dbtest.New(t)
	_, err = pool.Exec(t.Context(), `CREATE SCHEMA auth;
		GRANT USAGE ON SCHEMA auth TO PUBLIC;
		CREATE FUNCTION auth.organization_id() RETURNS uuid LANGUAGE sql STABLE
			RETURN nullif(current_setting('app.organization', true), '')::uuid`)
	require.NoError(t, err)
	_, err = migrate.Up(t.Context(), pool)
	require.NoError(t, err)
	organization := newOrganization(t, pool)
	conn := as(t, pool, "authenticated", "")
	exec(t, conn, "SELECT set_config('app.organization', $1, false)", organization.String())
	exec(t, conn, "SELECT emit_event('lead.won', 'lead', NULL)")
	require.Equal(t, 1, one[int](t, conn, "SELECT count(*) FROM event_log"))

	_, err = migrate.Down(t.Context(), pool, 0)
	require.NoError(t, err)
	require.NotNil(t, one[*string](t, pool, "SELECT to_regprocedure('auth.organization_id()')::text"))
}
