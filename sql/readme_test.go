package sql_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
)

// The statements of the README run as they stand there, one after the other.
func TestStatementsOfTheREADMEWork(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	require.Len(t, blocks, 7)
	statements := regexp.MustCompile(`;\n`)

	pool := dbtest.New(t)
	bridge := newBridge(t, pool)
	exec(t, pool, "INSERT INTO organizations (id) VALUES ('00000000-0000-4000-8000-000000000001')")
	service := as(t, pool, "service_role", "")
	exec(t, pool, "GRANT CREATE ON SCHEMA public TO service_role")
	run := func(block int) {
		for _, statement := range statements.Split(blocks[block][1], -1) {
			exec(t, service, statement)
		}
	}

	run(0)
	require.Equal(t, 1, one[int](t, pool, "SELECT count(*) FROM event_log WHERE event_type = 'lead.won'"))
	run(0)
	run(1)
	require.Equal(t, 3, one[int](t, pool, "SELECT count(*) FROM event_log"), "the first one's key was used before")
	run(2)
	run(3)
	exec(t, service, "INSERT INTO leads (organization_id, name) VALUES ('00000000-0000-4000-8000-000000000001', 'Ada')")
	exec(t, service, "UPDATE leads SET stage_id = gen_random_uuid(), owner_id = gen_random_uuid()")
	exec(t, service, "DELETE FROM leads")
	require.Equal(t, []string{"lead.assigned", "lead.deleted", "lead.stage_changed", "lead.updated"}, column[string](t, pool,
		"SELECT event_type FROM event_log WHERE metadata ->> 'source' = 'leads' ORDER BY 1"))

	run(4)
	step(t, bridge) // also the three from before, as events are fanned out when a bridge gets to them
	run(5)
	claimed := column[uuid.UUID](t, pool, "SELECT (metadata ->> 'event_id')::uuid FROM river.river_job WHERE state = 'scheduled'")
	require.Len(t, claimed, 2)
	run(6)
	require.True(t, one[bool](t, service, "SELECT ack_event($1, 'invoice-worker', 1)", claimed[0]))
	require.True(t, one[bool](t, service, "SELECT nack_event($1, 'invoice-worker', 'x', false, 1)", claimed[1]))
}
