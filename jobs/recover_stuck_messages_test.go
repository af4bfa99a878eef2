package jobs

import (
	"testing"

	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
)

func TestRecoverStuckMessages(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		job    string // state of its job, empty for none
		age    string
		status string // of the message, after
		events []string
	}{
		"no job":          {"", "3 minutes", "sending", []string{"message.queued"}},
		"job given up":    {"discarded", "3 minutes", "failed", []string{"message.failed"}},
		"job cancelled":   {"cancelled", "3 minutes", "failed", []string{"message.failed"}},
		"job lives":       {"retryable", "3 minutes", "sending", nil},
		"job runs":        {"running", "3 minutes", "sending", nil},
		"only just begun": {"", "1 minute", "sending", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSystem(t)
			phone := "+5511999999999"
			message := s.newMessage(t, &phone).id
			s.exec(t, "UPDATE messages SET status = 'sending', updated_at = now() - $2::text::interval WHERE id = $1", message, tt.age)
			if tt.job != "" {
				s.exec(t, `INSERT INTO river.river_job (kind, queue, args, state, attempt, max_attempts, attempted_at, scheduled_at, finalized_at)
					SELECT 'whatsapp-send-worker', 'elsewhere', jsonb_build_object('message_id', $1::text), $2::text::river.river_job_state, 1, 8, now(),
						now() + interval '1 hour', CASE WHEN $2 IN ('discarded', 'cancelled') THEN now() END`, message.String(), tt.job)
			}
			s.start(t)
			for range 2 { // the second run finds nothing new
				inserted, err := s.client.Insert(t.Context(), RecoverStuckMessagesArgs{}, nil)
				require.NoError(t, err)
				s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted)
			}
			require.Equal(t, tt.status, one[string](t, s, "SELECT status FROM messages"))
			require.ElementsMatch(t, tt.events, one[[]string](t, s, "SELECT coalesce(array_agg(event_type), '{}') FROM event_log"))
		})
	}
}

// A message that nobody sends any more goes out, once.
func TestRecoveredMessageIsSentOnce(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	phone := "+55 (11) 99999-9999"
	m := s.newMessage(t, &phone)
	s.exec(t, "UPDATE messages SET status = 'sending', updated_at = now() - interval '3 minutes' WHERE id = $1", m.id)
	for range 2 {
		inserted, err := s.client.Insert(t.Context(), RecoverStuckMessagesArgs{}, nil)
		require.NoError(t, err)
		s.awaitState(t, inserted.Job.ID, rivertype.JobStateCompleted)
		s.step(t)
	}
	s.await(t, "the message sent", func() bool { return s.status(t, m) == "sent" })
	s.requireSentOnce(t, m)
}
