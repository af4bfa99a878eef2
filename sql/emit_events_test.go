package sql_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"afluente/db/dbtest"
)

func TestEmitEventsWritesWhatEachElementSays(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization, entity := newOrganization(t, pool), uuid.New()

	ids := column[uuid.UUID](t, pool, `SELECT emit_events(jsonb_build_array(
		jsonb_build_object('event_type', 'lead.won', 'organization_id', $1::uuid),
		jsonb_build_object('event_type', 'lead.lost', 'organization_id', $1::uuid, 'entity_kind', 'x', 'entity_id', $2::uuid,
			'payload', '{"n": 9007199254740993}'::jsonb, 'metadata', '{"request_id": "r"}'::jsonb, 'at', '2099-01-01T00:00:00Z')))`,
		organization, entity)

	require.Equal(t, []string{
		"lead.won lead - {} - -",
		fmt.Sprintf(`lead.lost x %s {"n": 9007199254740993} r 2099-01-01 00:00:00`, entity),
	}, column[string](t, pool, `SELECT concat_ws(' ', event_type, entity_kind, coalesce(entity_id::text, '-'), payload,
			coalesce(metadata ->> 'request_id', '-'), coalesce(next_attempt_at AT TIME ZONE 'UTC', NULL)::text,
			CASE WHEN next_attempt_at IS NULL THEN '-' END)
		FROM unnest($1::uuid[]) WITH ORDINALITY AS u (id, n) JOIN event_log USING (id) ORDER BY n`, ids))
	require.Empty(t, column[uuid.UUID](t, pool, "SELECT emit_events('[]')"))
}

func TestOneRefusedElementRefusesAllAndIsNamed(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	good := fmt.Sprintf(`{"event_type": "lead.won", "organization_id": %q}`, newOrganization(t, pool))
	with := func(field string) string { return strings.TrimSuffix(good, "}") + ", " + field + "}" }
	for bad, want := range map[string]string{
		`1`:                             "event 1: it is not an object",
		`{}`:                            "event 1: p_organization_id is required",
		with(`"event_type": "LeadWon"`): `event 1: event type "LeadWon" is not of the form`,
		with(`"typ": 1`):                `event 1: unknown field "typ"`,
		with(`"entity_id": "x"`):        "event 1: invalid input syntax for type uuid",
		with(`"at": "tomorrowish"`):     "event 1: invalid input syntax for type timestamp",
		with(`"payload": []`):           "event 1: p_payload must be a JSON object, not array",
		with(`"metadata": "x"`):         "event 1: p_metadata must be a JSON object, not string",
		with(`"organization_id": "x"`):  "event 1: invalid input syntax for type uuid",
		with(`"metadata": {"idempotency_key": 1}`): "event 1: metadata.idempotency_key must be a string",
	} {
		err := run(t, pool, "SELECT emit_events($1)", "["+good+", "+bad+", "+good+"]")
		require.ErrorContains(t, err, want, bad)
	}
	requireCode(t, run(t, pool, "SELECT emit_events('{}')"), pgerrcode.InvalidParameterValue, "must be a JSON array")
	requireCode(t, run(t, pool, "SELECT emit_events(NULL)"), pgerrcode.InvalidParameterValue, "must be a JSON array")
	requireCode(t, run(t, pool, `SELECT emit_events('[{"event_type": "lead.won", "organization_id": "00000000-0000-4000-8000-000000000009"}]')`),
		pgerrcode.ForeignKeyViolation, "organization_id")
	require.Zero(t, one[int](t, pool, "SELECT count(*) FROM event_log"))
	require.Zero(t, one[int](t, pool, "SELECT count(*) FROM event_idempotency_keys"))
}

func TestSizesAreLimitedWithAClearError(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	emit := func(payload, metadata string) error {
		return run(t, pool, "SELECT emit_event('lead.won', 'lead', NULL, $1, $2, $3)", payload, metadata, organization)
	}
	text := func(bytes int) string { return fmt.Sprintf(`{"a": "%s"}`, strings.Repeat("x", bytes-len(`{"a": ""}`))) }

	require.NoError(t, emit(text(1<<20), "{}"))
	requireCode(t, emit(text(1<<20+1), "{}"), pgerrcode.ProgramLimitExceeded, "the payload of lead.won has 1048577 bytes, the most is 1048576")
	require.NoError(t, emit("{}", text(16<<10)))
	requireCode(t, emit("{}", text(16<<10+1)), pgerrcode.ProgramLimitExceeded, "the metadata of lead.won has 16385 bytes, the most is 16384")
	requireCode(t, emit("{}", fmt.Sprintf(`{"idempotency_key": "%s"}`, strings.Repeat("é", 256))),
		pgerrcode.InvalidParameterValue, "1 to 255 characters")
	require.NoError(t, emit("{}", fmt.Sprintf(`{"idempotency_key": "%s"}`, strings.Repeat("é", 255))))
	require.Equal(t, 3, one[int](t, pool, "SELECT count(*) FROM event_log"))
}

func TestKeysOfABatchAreUsedOnce(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	batch := func(keys ...string) string {
		elements := make([]string, len(keys))
		for i, key := range keys {
			elements[i] = fmt.Sprintf(`{"event_type": "lead.won", "organization_id": %q, "metadata": {"idempotency_key": %q}}`, organization, key)
		}
		return "[" + strings.Join(elements, ",") + "]"
	}

	// The same keys in opposite orders at the same time: no deadlock, and each once.
	var emits errgroup.Group
	results := make([][]uuid.UUID, 8)
	for i := range results {
		keys := []string{"a", "b", "c", "a"}
		if i%2 == 1 {
			keys = []string{"c", "b", "a", "a"}
		}
		emits.Go(func() error {
			results[i] = column[uuid.UUID](t, pool, "SELECT emit_events($1)", batch(keys...))
			return nil
		})
	}
	require.NoError(t, emits.Wait())
	for i, ids := range results {
		require.Equal(t, results[0][3], ids[3], "a")
		require.Equal(t, results[0][1], ids[1], "b")
		require.Equal(t, results[0][2], ids[2-2*(i%2)], "c")
	}
	require.Equal(t, results[0][:3], column[uuid.UUID](t, pool, "SELECT emit_events($1)", batch("a", "b", "c")))
	require.Equal(t, 3, one[int](t, pool, "SELECT count(*) FROM event_log"))
}

// The setting gives each event of a transaction what its request carries.
func TestMetadataOfTheTransactionIsAdded(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	conn := as(t, pool, "service_role", "")
	organization := newOrganization(t, pool)
	exec(t, conn, `SET afluente.metadata = '{"request_id": "r", "source": "s", "idempotency_key": "never"}'`)
	exec(t, conn, `SELECT emit_event('lead.won', 'lead', NULL, '{}', '{"source": "own"}', $1)`, organization)
	exec(t, conn, `SELECT emit_events(jsonb_build_array(jsonb_build_object('event_type', 'lead.won', 'organization_id', $1::uuid)))`, organization)
	require.Equal(t, []string{`{"source": "own", "request_id": "r"}`, `{"source": "s", "request_id": "r"}`},
		column[string](t, conn, "SELECT (metadata - 'emitted_at')::text FROM event_log ORDER BY 1"))
	exec(t, conn, "SET afluente.metadata = ''")
	exec(t, conn, `SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)`, organization)
}

func TestCreationTimeIsTheTransactions(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	now := one[time.Time](t, pool, `WITH e AS (SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)) SELECT now() FROM e`, organization)
	require.Equal(t, now, one[time.Time](t, pool, "SELECT created_at FROM event_log"))
}
