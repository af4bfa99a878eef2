package sql_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
)

func TestIDsOfEventsGrowWithTime(t *testing.T) {
	t.Parallel()
	pool := dbtest.New(t)
	organization := newOrganization(t, pool)
	for name, emit := range map[string]string{
		"emit_event":  "SELECT emit_event('lead.won', 'lead', NULL, '{}', '{}', $1)",
		"emit_events": "SELECT emit_events(jsonb_build_array(jsonb_build_object('event_type', 'lead.won', 'organization_id', $1::uuid)))",
		"INSERT":      "INSERT INTO event_log (event_type, entity_kind, organization_id) VALUES ('lead.won', 'lead', $1) RETURNING id",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var last uuid.UUID
			for range 5 {
				id := one[uuid.UUID](t, pool, emit, organization)
				require.Equal(t, uuid.Version(7), id.Version())
				require.Equal(t, uuid.RFC4122, id.Variant())
				require.WithinDuration(t, time.Now(), time.Unix(id.Time().UnixTime()), time.Hour)
				require.Positive(t, bytes.Compare(id[:], last[:]))
				last = id
				exec(t, pool, "SELECT pg_sleep(0.002)") // the time in an id is in milliseconds
			}
		})
	}
}
