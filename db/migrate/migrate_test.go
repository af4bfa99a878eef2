package migrate_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
	"afluente/db/migrate"
)

func TestMain(m *testing.M) { os.Exit(dbtest.Main(m)) }

// newPool returns a pool on a database without any migration. Its search_path
// is pg_catalog, so that what dump prints is qualified.
func newPool(t *testing.T, databaseURL string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(databaseURL)
	require.NoError(t, err)
	config.MaxConns = 2
	config.ConnConfig.RuntimeParams["search_path"] = "pg_catalog"
	return dbtest.Pool(t, config)
}

func exec(t *testing.T, pool *pgxpool.Pool, statement string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), statement, args...)
	require.NoError(t, err, statement)
}

func column[T any](t *testing.T, pool *pgxpool.Pool, query string, args ...any) []T {
	t.Helper()
	rows, err := pool.Query(t.Context(), query, args...)
	require.NoError(t, err, query)
	values, err := pgx.CollectRows(rows, pgx.RowTo[T])
	require.NoError(t, err, query)
	return values
}

func one[T any](t *testing.T, pool *pgxpool.Pool, query string, args ...any) T {
	t.Helper()
	values := column[T](t, pool, query, args...)
	require.Len(t, values, 1, query)
	return values[0]
}

func up(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	applied, err := migrate.Up(t.Context(), pool)
	require.NoError(t, err)
	return applied
}

func down(t *testing.T, pool *pgxpool.Pool, target int64) int {
	t.Helper()
	rolledBack, err := migrate.Down(t.Context(), pool, target)
	require.NoError(t, err)
	return rolledBack
}

func list(t *testing.T, pool *pgxpool.Pool) []migrate.Status {
	t.Helper()
	all, err := migrate.List(t.Context(), pool)
	require.NoError(t, err)
	return all
}

// dump describes all that the catalogue holds of some schemas, a line a thing.
func dump(t *testing.T, pool *pgxpool.Pool, schemas ...string) string {
	t.Helper()
	lines := column[string](t, pool, `
		WITH ns AS (SELECT oid, nspname, nspacl FROM pg_namespace WHERE nspname = ANY ($1)),
		rel AS (SELECT c.* FROM pg_class AS c JOIN ns ON ns.oid = c.relnamespace)
		SELECT line FROM (
			SELECT concat_ws(' ', 'schema', nspname, nspacl) FROM ns WHERE nspname <> 'public'
			UNION ALL
			SELECT concat_ws(' ', 'relation', oid::regclass, relkind, relpersistence, relrowsecurity, reloptions, relacl,
				pg_get_expr(relpartbound, oid), pg_get_partkeydef(oid), 'comment', obj_description(oid, 'pg_class'))
			FROM rel
			UNION ALL
			SELECT concat_ws(' ', 'column', rel.oid::regclass,
				row_number() OVER (PARTITION BY rel.oid ORDER BY a.attnum), a.attname, format_type(a.atttypid, a.atttypmod),
				a.attnotnull, a.attidentity, a.attgenerated, 'default', pg_get_expr(d.adbin, d.adrelid),
				'comment', col_description(rel.oid, a.attnum))
			FROM rel
			JOIN pg_attribute AS a ON a.attrelid = rel.oid AND a.attnum > 0 AND NOT a.attisdropped
			LEFT JOIN pg_attrdef AS d ON d.adrelid = rel.oid AND d.adnum = a.attnum
			UNION ALL
			SELECT concat_ws(' ', 'constraint', c.conname, c.conrelid::regclass, pg_get_constraintdef(c.oid), c.convalidated)
			FROM pg_constraint AS c JOIN ns ON ns.oid = c.connamespace
			UNION ALL
			SELECT concat_ws(' ', 'index', pg_get_indexdef(oid)) FROM rel WHERE relkind IN ('i', 'I')
			UNION ALL
			SELECT concat_ws(' ', 'function', pg_get_functiondef(p.oid), p.proacl, 'comment', obj_description(p.oid, 'pg_proc'))
			FROM pg_proc AS p JOIN ns ON ns.oid = p.pronamespace
			UNION ALL
			SELECT concat_ws(' ', 'trigger', pg_get_triggerdef(g.oid), g.tgenabled, obj_description(g.oid, 'pg_trigger'))
			FROM pg_trigger AS g JOIN rel ON rel.oid = g.tgrelid WHERE NOT g.tgisinternal
			UNION ALL
			SELECT concat_ws(' ', 'type', y.oid::regtype, y.typtype,
				(SELECT array_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum AS e WHERE e.enumtypid = y.oid))
			FROM pg_type AS y JOIN ns ON ns.oid = y.typnamespace
			UNION ALL
			SELECT concat_ws(' ', 'policy', l.polrelid::regclass, l.polname, l.polcmd, l.polpermissive, l.polroles::regrole[],
				pg_get_expr(l.polqual, l.polrelid), pg_get_expr(l.polwithcheck, l.polrelid))
			FROM pg_policy AS l JOIN rel ON rel.oid = l.polrelid
			UNION ALL
			SELECT concat_ws(' ', 'sequence', schemaname, sequencename, data_type, start_value, min_value, max_value, increment_by, cycle)
			FROM pg_sequences AS s WHERE s.schemaname = ANY ($1)
		) AS lines (line)
		ORDER BY line COLLATE "C"`, schemas)
	return strings.Join(lines, "\n")
}

func TestUpDownUpGivesTheSameSchema(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))
	before := dump(t, pool, "public", "river", "auth")
	require.Empty(t, before)

	all := up(t, pool)
	require.Equal(t, len(list(t, pool)), all)
	migrated := dump(t, pool, "public", "river", "auth")
	for _, part := range []string{
		"relation public.event_log p", "CREATE TRIGGER afluente_settle_updated", "FUNCTION public.emit_event(", "type river.river_job_state e",
		"index CREATE INDEX event_log_pending_idx ON ONLY public.event_log", "constraint event_type_format public.event_log CHECK",
	} {
		require.Contains(t, migrated, part)
	}

	require.Zero(t, up(t, pool), "nothing is applied twice")
	require.Equal(t, migrated, dump(t, pool, "public", "river", "auth"))

	require.Equal(t, all, down(t, pool, 0))
	require.Empty(t, dump(t, pool, "public", "river", "auth"))
	require.Empty(t, column[string](t, pool, "SELECT nspname::text FROM pg_namespace WHERE nspname = 'river'"))

	require.Equal(t, all, up(t, pool))
	require.Equal(t, migrated, dump(t, pool, "public", "river", "auth"))
}

func TestDownToEachVersionAndUpGivesTheSameSchema(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))
	up(t, pool)
	migrated := dump(t, pool, "public", "river", "auth")
	var versions []int64
	for _, status := range list(t, pool) {
		if status.Component == "afluente" {
			versions = append(versions, status.Version)
		}
	}
	require.NotEmpty(t, versions)

	schemas := make(map[string]int64)
	for i, version := range versions {
		require.Equal(t, len(versions)-1-i, down(t, pool, version))
		for _, status := range list(t, pool) {
			require.Equal(t, status.Component == "river" || status.Version <= version, status.Applied, "%v", status)
		}
		schemas[dump(t, pool, "public", "river", "auth")] = version

		require.Equal(t, len(versions)-1-i, up(t, pool))
		require.Equal(t, migrated, dump(t, pool, "public", "river", "auth"), "after going down to %d", version)
	}
	require.Len(t, schemas, len(versions), "each migration changes something")
}

func TestDownWithNothingToUndoChangesNothing(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))

	require.Zero(t, down(t, pool, 0), "on an empty database")
	require.Empty(t, dump(t, pool, "public", "river", "auth"))

	up(t, pool)
	down(t, pool, 0)
	require.Zero(t, down(t, pool, 0), "the second time")
	require.Empty(t, dump(t, pool, "public", "river", "auth"))
}

func TestDownWithWorkInTheTablesTakesItAlong(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))
	up(t, pool)
	organization := one[uuid.UUID](t, pool, "INSERT INTO public.organizations DEFAULT VALUES RETURNING id")
	exec(t, pool, "SELECT public.emit_event('lead.created', 'lead', NULL, '{}', '{}', $1)", organization)
	exec(t, pool, "INSERT INTO river.river_job (kind, max_attempts, args) VALUES ('k', 8, '{}')")

	down(t, pool, 0)

	require.Empty(t, dump(t, pool, "public", "river", "auth"))
}

func TestListTellsWhatIsPendingAndWhatIsApplied(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))

	pending := list(t, pool)
	up(t, pool)
	applied := list(t, pool)

	require.Len(t, applied, len(pending))
	components := make(map[string]int64)
	for i, status := range pending {
		require.False(t, status.Applied, "%v", status)
		require.NotEmpty(t, status.Name)
		require.Equal(t, components[status.Component]+1, status.Version, "oldest first, none left out")
		components[status.Component] = status.Version
		status.Applied = true
		require.Equal(t, status, applied[i])
	}
	require.Len(t, components, 2)
	require.GreaterOrEqual(t, components["river"], int64(8))
	require.GreaterOrEqual(t, components["afluente"], int64(6))
	require.Equal(t, "afluente", applied[len(applied)-1].Component, "River's come first")
}

func TestTablesOfTheApplicationAreLeftAlone(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))
	exec(t, pool, `
		CREATE TABLE public.organizations (id uuid PRIMARY KEY, slug text NOT NULL UNIQUE);
		COMMENT ON TABLE public.organizations IS 'The application''s.';
		CREATE TABLE public.contacts (
			id uuid PRIMARY KEY, organization_id uuid NOT NULL REFERENCES public.organizations, phone text, vip boolean
		);
		CREATE FUNCTION public.own() RETURNS integer LANGUAGE sql RETURN 1;
		INSERT INTO public.organizations VALUES ('11111111-1111-1111-1111-111111111111', 'one');
		INSERT INTO public.contacts VALUES ('22222222-2222-2222-2222-222222222222', '11111111-1111-1111-1111-111111111111', '55', true)`)
	before := dump(t, pool, "public")
	rows := `SELECT o::text || c::text FROM public.organizations AS o JOIN public.contacts AS c ON c.organization_id = o.id`
	content := column[string](t, pool, rows)

	up(t, pool)
	migrated := dump(t, pool, "public")
	for line := range strings.SplitSeq(before, "\n") {
		require.Contains(t, migrated, line)
	}
	require.Equal(t, content, column[string](t, pool, rows))
	exec(t, pool, `SELECT public.emit_event('lead.created', 'lead', NULL, '{}', '{}', id) FROM public.organizations`)

	down(t, pool, 0)
	require.Equal(t, before, dump(t, pool, "public"))
	require.Equal(t, content, column[string](t, pool, rows))

	up(t, pool)
	require.Equal(t, migrated, dump(t, pool, "public"))
	require.Equal(t, content, column[string](t, pool, rows))
}

func TestAnotherRiverInTheDatabaseStaysAsItWas(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"other_river", "public"} {
		t.Run("in "+schema, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t, dbtest.Empty(t))
			exec(t, pool, "CREATE SCHEMA IF NOT EXISTS "+schema)
			other, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: schema})
			require.NoError(t, err)
			_, err = other.Migrate(t.Context(), rivermigrate.DirectionUp, nil)
			require.NoError(t, err)
			exec(t, pool, "INSERT INTO "+schema+".river_job (kind, max_attempts, args) VALUES ('k', 8, '{}')")
			before := dump(t, pool, schema)
			rows := fmt.Sprintf("SELECT m::text FROM %s.river_migration AS m UNION SELECT j::text FROM %[1]s.river_job AS j ORDER BY 1", schema)
			content := column[string](t, pool, rows)

			all := up(t, pool)
			require.Len(t, list(t, pool), all)
			require.Equal(t, content, column[string](t, pool, rows))
			migrated := dump(t, pool, schema)
			for line := range strings.SplitSeq(before, "\n") {
				require.Contains(t, migrated, line)
			}
			require.Empty(t, column[string](t, pool,
				"SELECT tgname::text FROM pg_trigger WHERE NOT tgisinternal AND tgrelid = $1::text::regclass", schema+".river_job"))

			require.Equal(t, all, down(t, pool, 0))
			require.Equal(t, before, dump(t, pool, schema))
			require.Equal(t, content, column[string](t, pool, rows))
			require.Empty(t, dump(t, pool, "river"))
		})
	}
}

func TestHostileSearchPathChangesNothing(t *testing.T) {
	t.Parallel()
	plain := newPool(t, dbtest.Empty(t))
	up(t, plain)
	want := dump(t, plain, "public", "river", "auth")

	for name, who := range map[string]string{
		"of the database": "DATABASE %s",
		"of the role":     "ROLE CURRENT_USER IN DATABASE %s",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			databaseURL := dbtest.Empty(t)
			pool := newPool(t, databaseURL)
			exec(t, pool, `
				CREATE SCHEMA evil;
				CREATE TABLE evil.event_log (id integer);
				CREATE TABLE evil.organizations (id uuid PRIMARY KEY);
				CREATE TABLE evil.messages (id integer);
				CREATE TABLE evil.river_job (id integer);
				CREATE TABLE evil.river_migration (line text, version bigint, created_at timestamptz);
				INSERT INTO evil.river_migration SELECT 'main', n, now() FROM generate_series(1, 99) AS n;
				CREATE TABLE evil.afluente_migrations (id integer, version_id bigint, is_applied boolean, tstamp timestamptz);
				CREATE TYPE evil.river_job_state AS ENUM ('evil');
				CREATE FUNCTION evil.emit_event(text, text, uuid, jsonb, jsonb, uuid, timestamptz) RETURNS uuid LANGUAGE sql RETURN NULL::uuid;
				CREATE FUNCTION evil.settle_events() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''evil''; END';
				CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql RETURN '1999-01-01'::timestamptz;
				CREATE FUNCTION evil.gen_random_uuid() RETURNS uuid LANGUAGE sql RETURN NULL::uuid;
				CREATE FUNCTION evil.date_trunc(text, timestamptz) RETURNS timestamptz LANGUAGE sql RETURN '1999-01-01'::timestamptz;
				CREATE FUNCTION evil.to_regclass(text) RETURNS regclass LANGUAGE sql RETURN 0::regclass`)
			exec(t, pool, fmt.Sprintf("ALTER "+who+" SET search_path = evil, pg_catalog, public",
				one[string](t, pool, "SELECT current_database()::text")))
			evil := dump(t, pool, "evil")
			victim, err := pgxpool.New(t.Context(), databaseURL)
			require.NoError(t, err)
			t.Cleanup(victim.Close)
			require.Equal(t, 1999, one[time.Time](t, victim, "SELECT now()").UTC().Year(), "the path works")

			all := up(t, victim)
			require.Equal(t, want, dump(t, pool, "public", "river", "auth"))
			require.Equal(t, evil, dump(t, pool, "evil"))
			require.Len(t, list(t, victim), all)

			// What was made works under the hostile path too.
			organization := one[uuid.UUID](t, victim, "INSERT INTO public.organizations DEFAULT VALUES RETURNING id")
			event := one[uuid.UUID](t, victim, `
				SELECT public.emit_event('lead.created', 'lead', NULL, '{}', '{"idempotency_key": "k"}', $1)`, organization)
			require.Equal(t, event, one[uuid.UUID](t, victim, `
				SELECT public.emit_event('lead.created', 'lead', NULL, '{}', '{"idempotency_key": "k"}', $1)`, organization))
			require.Equal(t, "pending true", one[string](t, victim, `
				SELECT status || ' ' || (created_at > '2000-01-01')::text FROM public.event_log WHERE id = $1`, event))
			require.Zero(t, one[int](t, victim, "SELECT public.create_event_log_partitions()"))
			require.Zero(t, one[int](t, pool, "SELECT count(*) FROM evil.event_log"))

			require.Equal(t, all, down(t, victim, 0))
			require.Empty(t, dump(t, pool, "public", "river", "auth"))
			require.Equal(t, evil, dump(t, pool, "evil"))
		})
	}
}

func TestTwoProcessesThatMigrateAtOnceBothSucceed(t *testing.T) {
	t.Parallel()
	databaseURL := dbtest.Empty(t)
	pools := []*pgxpool.Pool{newPool(t, databaseURL), newPool(t, databaseURL)}
	var migrations sync.WaitGroup
	applied, errs := make([]int, len(pools)), make([]error, len(pools))
	for i, pool := range pools {
		migrations.Go(func() { applied[i], errs[i] = migrate.Up(t.Context(), pool) })
	}
	migrations.Wait()

	for _, err := range errs {
		require.NoError(t, err)
	}
	all := len(list(t, pools[0]))
	require.ElementsMatch(t, []int{0, all}, applied, "one did it all")
}

func TestWaitForTheLockEndsWithTheContext(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	// goose's own number, which every process of this program must share.
	_, err = conn.Exec(t.Context(), "SELECT pg_advisory_lock(4097083626)")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()

	_, err = migrate.Up(ctx, pool)

	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Empty(t, dump(t, pool, "public", "river", "auth"))
}

func TestMigrationThatFailsLeavesWholeEarlierOnes(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))
	exec(t, pool, "CREATE TABLE public.webhook_deliveries (id integer)")

	_, err := migrate.Up(t.Context(), pool)

	require.ErrorContains(t, err, "webhook_deliveries")
	var pending []string
	for _, status := range list(t, pool) {
		if !status.Applied {
			pending = append(pending, status.Name)
		}
	}
	require.NotEmpty(t, pending)
	require.Contains(t, pending[0], "webhook_deliveries")

	exec(t, pool, "DROP TABLE public.webhook_deliveries")
	require.Equal(t, len(pending), up(t, pool))
	require.Zero(t, up(t, pool))
}

func TestMonthsHaveTheirPartitionsInUTC(t *testing.T) {
	t.Parallel()
	databaseURL := dbtest.Empty(t)
	pool := newPool(t, databaseURL)
	exec(t, pool, fmt.Sprintf("ALTER DATABASE %s SET timezone = 'America/Sao_Paulo'",
		one[string](t, pool, "SELECT current_database()::text")))
	pool.Reset()
	up(t, pool)
	now := one[time.Time](t, pool, "SELECT now()").UTC()
	month := func(n int) time.Time {
		return time.Date(now.Year(), now.Month()+time.Month(n), 1, 0, 0, 0, 0, time.UTC)
	}
	name := func(n int) string { return month(n).Format("public.event_log_200601") }

	partitions := column[string](t, pool,
		"SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'public.event_log'::regclass")
	require.ElementsMatch(t, []string{name(0), name(1), name(2), name(3), "public.event_log_default"}, partitions)
	require.Zero(t, one[int](t, pool, "SELECT public.create_event_log_partitions()"), "they are all there")

	organization := one[uuid.UUID](t, pool, "INSERT INTO public.organizations DEFAULT VALUES RETURNING id")
	for want, instants := range map[string][]time.Time{
		name(0):                    {now, month(0), month(1).Add(-time.Microsecond)},
		name(1):                    {month(1), month(2).Add(-time.Microsecond)},
		name(3):                    {month(3), month(4).Add(-time.Microsecond)},
		"public.event_log_default": {month(0).Add(-time.Microsecond), month(4), month(-600), month(600)},
	} {
		for _, at := range instants {
			require.Equal(t, want, one[string](t, pool, `
				INSERT INTO public.event_log (organization_id, event_type, entity_kind, created_at)
				VALUES ($1, 'lead.created', 'lead', $2) RETURNING tableoid::regclass::text`, organization, at), "%s", at)
		}
	}
	require.Equal(t, 11, one[int](t, pool, "SELECT count(*) FROM public.event_log"))
}

func TestFunctionsFixTheirSearchPathAndAreNotForEveryone(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))
	up(t, pool)

	// The names in a body of standard SQL are looked up when the function is made.
	require.Empty(t, column[string](t, pool, `
		SELECT proname::text FROM pg_proc
		WHERE pronamespace IN ('public'::regnamespace, 'auth'::regnamespace) AND prosqlbody IS NULL
			AND (prosecdef OR EXISTS (SELECT FROM aclexplode(proacl) WHERE grantee <> proowner))
			AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (proconfig), false)`))
	require.Empty(t, column[string](t, pool, `
		SELECT proname::text FROM pg_proc
		WHERE pronamespace = 'public'::regnamespace AND (prosecdef OR prorettype <> 'trigger'::regtype)
			AND has_function_privilege('public', oid, 'EXECUTE')`))
}

func TestWebhooksKeepTheirRowsUpAndDown(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))
	up(t, pool)
	down(t, pool, 13)
	exec(t, pool, "INSERT INTO public.organizations (id) VALUES ('00000000-0000-4000-8000-000000000001')")
	const subscription = "00000000-0000-4000-8000-000000000002"
	exec(t, pool, `INSERT INTO public.webhook_subscriptions (id, organization_id, url, secret, event_types)
		VALUES ($1, '00000000-0000-4000-8000-000000000001', 'https://example.com/', 'plain', '{*}')`, subscription)
	exec(t, pool, `INSERT INTO public.webhook_deliveries (event_id, subscription_id, attempts, delivered_at)
		VALUES (gen_random_uuid(), $1, 1, now()), (gen_random_uuid(), $1, 2, NULL)`, subscription)

	up(t, pool)
	require.Equal(t, []string{"1 succeeded", "2 pending"}, column[string](t, pool, `
		SELECT attempts || ' ' || state FROM public.webhook_deliveries WHERE organization_id = '00000000-0000-4000-8000-000000000001' ORDER BY 1`))
	require.Equal(t, "plain 4 10", one[string](t, pool, "SELECT concat_ws(' ', secret, max_concurrent, rate_per_second) FROM public.webhook_subscriptions"))
	exec(t, pool, "UPDATE public.webhook_subscriptions SET secret = NULL") // it is sealed
	exec(t, pool, `INSERT INTO public.webhook_deliveries (event_id, subscription_id, organization_id)
		VALUES (gen_random_uuid(), gen_random_uuid(), '00000000-0000-4000-8000-000000000001')`) // of a deleted one

	down(t, pool, 13)
	require.Equal(t, 2, one[int](t, pool, "SELECT count(*) FROM public.webhook_deliveries"))
	require.Equal(t, "whsec_ false", one[string](t, pool, "SELECT secret || ' ' || enabled FROM public.webhook_subscriptions"),
		"SQL cannot open it, so it signs nothing")
	up(t, pool)
}

func TestWebhookColumnsOfTheApplicationStay(t *testing.T) {
	t.Parallel()
	pool := newPool(t, dbtest.Empty(t))
	exec(t, pool, "CREATE TABLE public.organizations (id uuid PRIMARY KEY DEFAULT gen_random_uuid())")
	exec(t, pool, `CREATE TABLE public.webhook_subscriptions (
		id uuid PRIMARY KEY DEFAULT gen_random_uuid(), organization_id uuid NOT NULL REFERENCES public.organizations (id), url text NOT NULL,
		secret text NOT NULL, event_types text[] NOT NULL, enabled boolean NOT NULL DEFAULT true, consecutive_failures integer NOT NULL DEFAULT 3)`)
	up(t, pool)
	require.Equal(t, "3", one[string](t, pool, `SELECT column_default FROM information_schema.columns
		WHERE table_name = 'webhook_subscriptions' AND column_name = 'consecutive_failures'`))
	down(t, pool, 0)
	require.Equal(t, []string{"consecutive_failures", "enabled", "event_types", "id", "organization_id", "secret", "url"}, column[string](t, pool, `
		SELECT column_name::text FROM information_schema.columns WHERE table_name = 'webhook_subscriptions' ORDER BY 1`))
}
