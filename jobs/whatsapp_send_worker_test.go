package jobs

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"afluente/eventlog"
	"afluente/jobs/sandbox"
)

const messageBody = "Olá, \"João\" <b>&</b> 👋\nsegunda linha"

// message is a row of messages with what belongs to it.
type message struct {
	id, conversation, contact uuid.UUID
}

func (s *system) newMessage(t *testing.T, phone *string) message {
	t.Helper()
	var m message
	m.contact = one[uuid.UUID](t, s,
		"INSERT INTO contacts (organization_id, phone) VALUES ($1, $2) RETURNING id", s.org, phone)
	m.conversation = one[uuid.UUID](t, s,
		"INSERT INTO conversations (organization_id, contact_id, session) VALUES ($1, $2, 'loja') RETURNING id", s.org, m.contact)
	m.id = one[uuid.UUID](t, s,
		"INSERT INTO messages (organization_id, conversation_id, body) VALUES ($1, $2, $3) RETURNING id",
		s.org, m.conversation, messageBody)
	return m
}

// newQueuedMessage also emits message.queued and fans it out.
func (s *system) newQueuedMessage(t *testing.T) (m message, eventID uuid.UUID) {
	t.Helper()
	phone := "+55 (11) 99999-9999"
	m = s.newMessage(t, &phone)
	return m, s.queue(t, s.org, m.id.String())
}

func (s *system) queue(t *testing.T, org uuid.UUID, messageID string) uuid.UUID {
	t.Helper()
	return s.emit(t, eventlog.RawEvent{
		Type: "message.queued", OrganizationID: org, Payload: fmt.Appendf(nil, `{"message_id": %q}`, messageID),
	})
}

func (s *system) status(t *testing.T, m message) string {
	t.Helper()
	return one[string](t, s, "SELECT status FROM messages WHERE id = $1", m.id)
}

// requireSentOnce also checks everything that a sent message leaves behind.
func (s *system) requireSentOnce(t *testing.T, m message) {
	t.Helper()
	sent := s.waha.Sent()
	require.Len(t, sent, 1)
	require.Equal(t, sandbox.Message{
		ID: sent[0].ID, IdempotencyKey: m.id.String(), Session: "loja", ChatID: "5511999999999@c.us", Text: messageBody, Time: sent[0].Time,
	}, sent[0])
	require.Equal(t, "sent", s.status(t, m))
	require.Equal(t, sent[0].ID, one[string](t, s, "SELECT waha_message_id FROM messages WHERE id = $1", m.id))
	s.requireOneMessageSent(t, m)
}

func (s *system) requireOneMessageSent(t *testing.T, m message) {
	t.Helper()
	require.Equal(t, []map[string]any{{
		"direction": "out", "conversation_id": m.conversation.String(), "contact_id": m.contact.String(), "channel": "whatsapp",
		"body": messageBody, "message_id": m.id.String(),
	}}, s.payloads(t, "message.sent", m.id))
}

// requireFailed checks the message and its one message.failed.
func (s *system) requireFailed(t *testing.T, m message, code string, retryable bool) {
	t.Helper()
	require.Equal(t, "failed", s.status(t, m))
	require.Empty(t, s.payloads(t, "message.sent", m.id))
	failed := s.payloads(t, "message.failed", m.id)
	require.Len(t, failed, 1)
	require.NotEmpty(t, failed[0]["error_message"])
	delete(failed[0], "error_message")
	require.Equal(t, map[string]any{"message_id": m.id.String(), "error_code": code, "retryable": retryable}, failed[0])
}

// requireUntouched checks a message that no job may touch.
func (s *system) requireUntouched(t *testing.T, m message) {
	t.Helper()
	require.Equal(t, "queued", s.status(t, m))
	require.Empty(t, s.payloads(t, "message.sent", m.id))
	require.Empty(t, s.payloads(t, "message.failed", m.id))
	require.Zero(t, s.waha.Total())
}

func TestMessageQueuedBecomesASendJob(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	m, eventID := s.newQueuedMessage(t)

	got := s.job(t, eventID, sendKind)

	require.JSONEq(t, fmt.Sprintf(`{"organization_id": %q, "message_id": %q}`, s.org, m.id), got.Args)
	require.Equal(t, "available", got.State)
	require.Equal(t, "whatsapp", got.Queue)
	require.EqualValues(t, 8, got.MaxAttempts)
}

func TestMessageIsSentOnce(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	m, eventID := s.newQueuedMessage(t)

	s.awaitDone(t, eventID)

	require.Equal(t, 1, s.waha.Total())
	s.requireSentOnce(t, m)
	require.Empty(t, s.payloads(t, "message.failed", m.id))
	require.ElementsMatch(t, []string{dispatchKind, sendKind},
		one[[]string](t, s, "SELECT consumed_by FROM event_log WHERE id = $1", eventID))
	require.Equal(t, sendKind, one[string](t, s, "SELECT metadata ->> 'source' FROM event_log WHERE event_type = 'message.sent'"))

	// Status, event and completion bear the number of one transaction.
	require.Equal(t, 1, one[int](t, s, `
		SELECT count(DISTINCT x) FROM (
			SELECT xmin::text AS x FROM messages WHERE id = $1
			UNION ALL SELECT xmin::text FROM event_log WHERE event_type = 'message.sent'
			UNION ALL SELECT xmin::text FROM river.river_job WHERE id = $2
		) AS xs`, m.id, s.job(t, eventID, sendKind).ID))
}

func TestSendThatFailsForATimeIsRetriedUntilItIsSentOnce(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fault      sandbox.Fault
		failures   int
		duplicates int
	}{
		"500 twice":                       {fault: sandbox.Fault{Status: 500, Times: 2}, failures: 2},
		"302":                             {fault: sandbox.Fault{Status: 302, Times: 1}, failures: 1},
		"408":                             {fault: sandbox.Fault{Status: 408, Times: 1}, failures: 1},
		"429":                             {fault: sandbox.Fault{Status: 429, RetryAfter: time.Hour, Times: 1}, failures: 1},
		"500 with garbage":                {fault: sandbox.Fault{Status: 500, Garbage: true, Times: 2}, failures: 2},
		"cut":                             {fault: sandbox.Fault{Cut: true, Times: 2}, failures: 2},
		"cut after sending":               {fault: sandbox.Fault{AfterDoing: true, Times: 2}, failures: 2, duplicates: 2},
		"502 after sending":               {fault: sandbox.Fault{AfterDoing: true, Status: 502, Times: 1}, failures: 1, duplicates: 1},
		"garbage after sending":           {fault: sandbox.Fault{AfterDoing: true, Garbage: true, Times: 1}, failures: 1, duplicates: 1},
		"200 without a message id":        {fault: sandbox.Fault{Status: 200, Times: 1}, failures: 1},
		"hang":                            {fault: sandbox.Fault{Hang: true, Times: 1}, failures: 1},
		"hang after sending":              {fault: sandbox.Fault{AfterDoing: true, Hang: true, Times: 1}, failures: 1, duplicates: 1},
		"seven times, so the last is it":  {fault: sandbox.Fault{Status: 503, Times: 7}, failures: 7},
		"seven sent, and still only once": {fault: sandbox.Fault{AfterDoing: true, Times: 7}, failures: 7, duplicates: 7},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSystem(t)
			if test.fault.Hang {
				s.deps.WAHA.HTTP.Timeout = 200 * time.Millisecond
			}
			s.start(t)
			s.waha.SetFault(test.fault)
			m, eventID := s.newQueuedMessage(t)

			s.awaitDone(t, eventID)

			s.requireSentOnce(t, m)
			require.Empty(t, s.payloads(t, "message.failed", m.id))
			require.Equal(t, test.failures+1, s.waha.Total())
			require.Equal(t, test.duplicates, s.waha.Duplicates())
			got := s.job(t, eventID, sendKind)
			require.EqualValues(t, test.failures+1, got.Attempt)
			require.Len(t, got.Errors, test.failures)
			for _, text := range got.Errors {
				for _, secret := range []string{"99999", "Olá", wahaKey, "\x00"} {
					require.NotContains(t, text, secret)
				}
			}
		})
	}
}

func TestSendThatCannotSucceedIsGivenUpAtOnce(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"400", "401", "404", "422"} {
		t.Run(code+" fails the message", func(t *testing.T) {
			t.Parallel()
			s := startSystem(t)
			var status int
			_, err := fmt.Sscan(code, &status)
			require.NoError(t, err)
			s.waha.SetFault(sandbox.Fault{Status: status, Garbage: true})
			m, eventID := s.newQueuedMessage(t)

			event := s.awaitDead(t, eventID)

			require.Equal(t, []string{dispatchKind}, event.ConsumedBy)
			require.Contains(t, *event.LastError, "answer "+code)
			require.Equal(t, 1, s.waha.Total())
			s.requireFailed(t, m, code, false)
			got := s.job(t, eventID, sendKind)
			require.Equal(t, "cancelled", got.State)
			require.EqualValues(t, 1, got.Attempt)
		})
	}

	none, empty, words := (*string)(nil), "", "a confirmar"
	for name, phone := range map[string]*string{
		"no phone fails the message":               none,
		"an empty phone fails the message":         &empty,
		"a phone without digits fails the message": &words,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startSystem(t)
			m := s.newMessage(t, phone)
			eventID := s.queue(t, s.org, m.id.String())

			s.awaitDead(t, eventID)

			require.Zero(t, s.waha.Total())
			s.requireFailed(t, m, "invalid", false)
			require.Equal(t, "cancelled", s.job(t, eventID, sendKind).State)
		})
	}
}

func TestGivenUpMessageIsSentWhenAnOperatorRetriesTheJob(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fault     sandbox.Fault
		state     string
		code      string
		calls     int
		retryable bool
	}{
		"discarded after eight attempts":  {sandbox.Fault{Status: 500}, "discarded", "500", 8, true},
		"discarded without any answer":    {sandbox.Fault{Cut: true}, "discarded", "unreachable", 8, true},
		"cancelled after the first":       {sandbox.Fault{Status: 401}, "cancelled", "401", 1, false},
		"discarded, though WAHA had sent": {sandbox.Fault{AfterDoing: true}, "discarded", "unreachable", 8, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startSystem(t)
			s.waha.SetFault(test.fault)
			m, eventID := s.newQueuedMessage(t)
			event := s.awaitDead(t, eventID)
			require.EqualValues(t, test.calls, event.Attempts)
			require.Equal(t, test.calls, s.waha.Total())
			s.requireFailed(t, m, test.code, test.retryable)
			dead := s.job(t, eventID, sendKind)
			require.Equal(t, test.state, dead.State)
			require.Len(t, dead.Errors, test.calls)

			s.waha.ClearFault()
			s.retry(t, dead.ID)
			s.awaitDone(t, eventID)

			s.requireSentOnce(t, m)
			require.Equal(t, test.calls+1, s.waha.Total())
			require.Len(t, s.payloads(t, "message.failed", m.id), 1)
		})
	}
}

func TestSecondRetryThatFailsTellsOfItAgain(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	s.waha.SetFault(sandbox.Fault{Status: 404})
	m, eventID := s.newQueuedMessage(t)
	s.awaitDead(t, eventID)

	s.retry(t, s.job(t, eventID, sendKind).ID)
	s.awaitDead(t, eventID)

	require.Equal(t, 2, s.waha.Total())
	require.Equal(t, "failed", s.status(t, m))
	require.Len(t, s.payloads(t, "message.failed", m.id), 2)
}

func TestMessageThatWentOutBeforeIsOnlyToldOf(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	m := s.newMessage(t, nil)
	s.exec(t, "UPDATE messages SET waha_message_id = 'true_1@c.us_A', status = 'delivered' WHERE id = $1", m.id)

	s.awaitDone(t, s.queue(t, s.org, m.id.String()))

	require.Zero(t, s.waha.Total())
	s.requireOneMessageSent(t, m)
	require.Equal(t, "delivered", s.status(t, m), "what came after sent stays")
}

func TestMessageThatIsNotTheOrganizationsIsNotSent(t *testing.T) {
	t.Parallel()
	t.Run("of another organization", func(t *testing.T) {
		t.Parallel()
		s := startSystem(t)
		phone := "5511999999999"
		m := s.newMessage(t, &phone)

		eventID := s.queue(t, s.newOrganization(t), m.id.String())

		s.awaitDead(t, eventID)
		require.Equal(t, "cancelled", s.job(t, eventID, sendKind).State)
		s.requireUntouched(t, m)
	})
	t.Run("in a conversation of another organization", func(t *testing.T) {
		t.Parallel()
		s := startSystem(t)
		phone := "5511999999999"
		m := s.newMessage(t, &phone)
		s.exec(t, "UPDATE conversations SET organization_id = $1 WHERE id = $2", s.newOrganization(t), m.conversation)

		eventID := s.queue(t, s.org, m.id.String())

		s.awaitDead(t, eventID)
		require.Equal(t, "cancelled", s.job(t, eventID, sendKind).State)
		s.requireUntouched(t, m)
	})
	t.Run("to a contact of another organization", func(t *testing.T) {
		t.Parallel()
		s := startSystem(t)
		phone := "5511999999999"
		m := s.newMessage(t, &phone)
		s.exec(t, "UPDATE contacts SET organization_id = $1 WHERE id = $2", s.newOrganization(t), m.contact)

		eventID := s.queue(t, s.org, m.id.String())

		s.awaitDead(t, eventID)
		s.requireUntouched(t, m)
	})
}

func TestEventThatNamesNoMessageIsCancelled(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	for name, payload := range map[string]string{
		"not a UUID":     `{"message_id": "42"}`,
		"empty":          `{"message_id": ""}`,
		"missing":        `{}`,
		"a number":       `{"message_id": 42}`,
		"an unknown one": fmt.Sprintf(`{"message_id": %q}`, uuid.NewString()),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eventID := s.emit(t, eventlog.RawEvent{Type: "message.queued", OrganizationID: s.org, Payload: []byte(payload)})

			event := s.awaitDead(t, eventID)

			require.Equal(t, []string{dispatchKind}, event.ConsumedBy)
			got := s.job(t, eventID, sendKind)
			require.Equal(t, "cancelled", got.State)
			require.EqualValues(t, 1, got.Attempt)
			require.Zero(t, s.waha.Total())
		})
	}
}

func TestManyJobsForOneMessageSendItOnce(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	m, first := s.newQueuedMessage(t)
	events := []uuid.UUID{first}
	for range 3 {
		events = append(events, s.queue(t, s.org, m.id.String()))
	}
	for range 2 { // and two without an event
		_, err := s.client.Insert(t.Context(), WhatsAppSendArgs{OrganizationID: s.org, MessageID: m.id.String()}, nil)
		require.NoError(t, err)
	}
	s.start(t)

	for _, id := range events {
		s.awaitDone(t, id)
	}
	s.await(t, "six finished jobs", func() bool {
		return one[int](t, s, "SELECT count(*) FROM river.river_job WHERE kind = $1 AND state = 'completed'", sendKind) == 6
	})

	s.requireSentOnce(t, m)
	require.Equal(t, s.waha.Total()-1, s.waha.Duplicates())
}

func TestJobThatIsRescuedWhileItHangsSendsOnce(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	s.waha.SetFault(sandbox.Fault{Hang: true})
	m, eventID := s.newQueuedMessage(t)
	require.NoError(t, s.waha.AwaitCalls(t.Context(), 1))

	s.exec(t, "UPDATE river.river_job SET state = 'available' WHERE id = $1", s.job(t, eventID, sendKind).ID)
	s.await(t, "the second call", func() bool { return s.waha.Total() == 2 })
	s.waha.ClearFault()

	s.awaitDone(t, eventID)
	s.await(t, "both attempts", func() bool { return s.waha.Duplicates() == 1 })
	s.requireSentOnce(t, m)
}

func TestJobThatIsCancelledWhileItHangsTellsNothing(t *testing.T) {
	t.Parallel()
	s := startSystem(t)
	s.waha.SetFault(sandbox.Fault{Hang: true})
	m, eventID := s.newQueuedMessage(t)
	require.NoError(t, s.waha.AwaitCalls(t.Context(), 1))
	id := s.job(t, eventID, sendKind).ID

	s.exec(t, "UPDATE river.river_job SET state = 'cancelled', finalized_at = now() WHERE id = $1", id)
	s.waha.ClearFault()
	s.await(t, "the end of the attempt", func() bool { return s.logs.FilterMessage("job failed, will be retried").Len() == 1 })

	require.Len(t, s.waha.Sent(), 1)
	require.Equal(t, "sending", s.status(t, m), "what belongs to the completion went with it")
	require.Empty(t, s.payloads(t, "message.sent", m.id))
	s.awaitDead(t, eventID)

	s.retry(t, id)
	s.awaitDone(t, eventID)
	s.requireSentOnce(t, m)
	// River does not tell attempts apart: where the first one's failure is only
	// written while the second runs, there is a third.
	require.Positive(t, s.waha.Duplicates())
}

func TestSendEndsWithItsTime(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		attempt int
		check   func(*testing.T, *system, message)
	}{
		"an early attempt is retried": {1, func(t *testing.T, s *system, m message) {
			t.Helper()
			require.Equal(t, "sending", s.status(t, m))
			require.Empty(t, s.payloads(t, "message.failed", m.id))
		}},
		"the last attempt fails the message": {8, func(t *testing.T, s *system, m message) {
			t.Helper()
			s.requireFailed(t, m, "unreachable", true)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSystem(t)
			phone := "5511999999999"
			m := s.newMessage(t, &phone)
			s.waha.SetFault(sandbox.Fault{Hang: true})
			worker := &whatsAppSendWorker{pool: s.pool, waha: s.deps.WAHA}
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()

			err := worker.Work(ctx, &river.Job[WhatsAppSendArgs]{
				JobRow: &rivertype.JobRow{ID: 1, Kind: sendKind, Attempt: test.attempt, MaxAttempts: 8},
				Args:   WhatsAppSendArgs{OrganizationID: s.org, MessageID: m.id.String()},
			})

			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotErrorIs(t, err, &rivertype.JobCancelError{})
			test.check(t, s, m)
			require.Empty(t, s.payloads(t, "message.sent", m.id))
		})
	}
}

// River hands the job of a process that stops back without counting the
// attempt, be it the last one.
func TestStoppedProcessGivesNoMessageUp(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	phone := "5511999999999"
	m := s.newMessage(t, &phone)
	s.waha.SetFault(sandbox.Fault{Hang: true})
	worker := &whatsAppSendWorker{pool: s.pool, waha: s.deps.WAHA}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		failed <- worker.Work(ctx, &river.Job[WhatsAppSendArgs]{
			JobRow: &rivertype.JobRow{ID: 1, Kind: sendKind, Attempt: 8, MaxAttempts: 8},
			Args:   WhatsAppSendArgs{OrganizationID: s.org, MessageID: m.id.String()},
		})
	}()
	require.NoError(t, s.waha.AwaitCalls(t.Context(), 1))
	cancel()

	require.ErrorIs(t, <-failed, context.Canceled)
	require.Equal(t, "sending", s.status(t, m))
	require.Empty(t, s.payloads(t, "message.failed", m.id))
}

// A failure that cannot be written down is one more reason to try again, not
// a reason to give up without a word.
func TestFailureThatCannotBeStoredIsAnError(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	m := s.newMessage(t, nil)
	s.exec(t, "ALTER TABLE event_log ADD CONSTRAINT refuse CHECK (event_type <> 'message.failed')")
	worker := &whatsAppSendWorker{pool: s.pool, waha: s.deps.WAHA}

	err := worker.Work(t.Context(), &river.Job[WhatsAppSendArgs]{
		JobRow: &rivertype.JobRow{ID: 1, Kind: sendKind, Attempt: 1, MaxAttempts: 8},
		Args:   WhatsAppSendArgs{OrganizationID: s.org, MessageID: m.id.String()},
	})

	require.ErrorContains(t, err, "refuse")
	require.ErrorContains(t, err, "no phone number")
	require.NotErrorIs(t, err, &rivertype.JobCancelError{})
	require.Equal(t, "queued", s.status(t, m))
}

func TestChatIDIsTheDigits(t *testing.T) {
	t.Parallel()
	for phone, want := range map[string]string{
		"+55 (11) 99999-9999":       "5511999999999",
		"5511999999999@c.us":        "5511999999999",
		"\u00a055\t11\u200b9":       "55119",
		strings.Repeat("1", 40):     strings.Repeat("1", 40),
		"٥٥ are digits elsewhere 7": "7",
	} {
		require.Equal(t, want+"@c.us", chatID(phone))
	}
}

// A conversation reads as it was written: while its first message waits for a
// retry, the second one does not go out before it. Without the conversation in
// the event there is no order.
func TestMessagesOfAConversationGoOutInTheirOrder(t *testing.T) {
	t.Parallel()
	s := newSystem(t)
	phone := "+55 11 99999-9999"
	first := s.newMessage(t, &phone)
	second := one[uuid.UUID](t, s,
		"INSERT INTO messages (organization_id, conversation_id, body) VALUES ($1, $2, 'second') RETURNING id", s.org, first.conversation)
	for _, id := range []uuid.UUID{first.id, second} {
		s.emit(t, eventlog.RawEvent{
			Type: "message.queued", OrganizationID: s.org,
			Payload: fmt.Appendf(nil, `{"message_id": %q, "conversation_id": %q}`, id, first.conversation),
		})
	}
	require.Equal(t, "available pending", one[string](t, s,
		"SELECT string_agg(state::text, ' ' ORDER BY id) FROM river.river_job WHERE kind = 'whatsapp-send-worker'"))
}
