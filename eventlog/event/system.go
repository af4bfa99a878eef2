package event

import "time"

// SystemContactBlockedByStop says that a person asked for no more messages.
// The application emits it.
type SystemContactBlockedByStop struct {
	ContactID string `json:"contact_id" jsonschema:"format=uuid"`
	Keyword   string `json:"keyword" jsonschema:"enum=STOP,enum=SAIR"`
}

func (SystemContactBlockedByStop) EventType() string { return "system.contact_blocked_by_stop" }

// SystemSendBlocked says that a message was not sent because it must not be.
// The application emits it.
type SystemSendBlocked struct {
	ContactID          string `json:"contact_id" jsonschema:"format=uuid"`
	Reason             string `json:"reason"`
	AttemptedMessageID string `json:"attempted_message_id,omitempty"`
}

func (SystemSendBlocked) EventType() string { return "system.send_blocked" }

// SystemWindow24hExpired says that WhatsApp takes templates only from now on,
// since the other side has been silent for a day. The application emits it.
type SystemWindow24hExpired struct {
	ConversationID string    `json:"conversation_id" jsonschema:"format=uuid"`
	ContactID      string    `json:"contact_id" jsonschema:"format=uuid"`
	ExpiredAt      time.Time `json:"expired_at"`
}

func (SystemWindow24hExpired) EventType() string { return "system.window_24h_expired" }

// SystemSessionChanged says that a session of WAHA has another status. The
// cron sync-sessions emits it.
type SystemSessionChanged struct {
	Session    string `json:"session"`
	FromStatus string `json:"from_status,omitempty"`
	// ToStatus is WAHA's word, such as WORKING, STOPPED or FAILED.
	ToStatus string `json:"to_status"`
}

func (SystemSessionChanged) EventType() string { return "system.session_changed" }
