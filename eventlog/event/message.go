package event

import "time"

// MessageReceived says that somebody wrote to us. The application emits it.
type MessageReceived struct {
	Direction      string   `json:"direction" jsonschema:"enum=in"`
	ConversationID string   `json:"conversation_id" jsonschema:"format=uuid"`
	ContactID      string   `json:"contact_id" jsonschema:"format=uuid"`
	Body           string   `json:"body"`
	MediaURLs      []string `json:"media_urls,omitempty"`
	WAHAMessageID  string   `json:"waha_message_id"`
}

func (MessageReceived) EventType() string { return "message.received" }

// MessageQueued asks for one message to be sent. The application emits it in
// the transaction that writes the row in messages.
type MessageQueued struct {
	// MessageID is the id in messages.
	MessageID string `json:"message_id"`
	// ConversationID is that of the message. The messages of a conversation are
	// sent in the order of their events; without it, in any order.
	ConversationID string `json:"conversation_id,omitempty" jsonschema:"format=uuid"`
}

func (MessageQueued) EventType() string { return "message.queued" }

// SchemaVersion is that with the conversation.
func (MessageQueued) SchemaVersion() string { return "1.1.0" }

// MessageSent says that a message was handed to its channel. The consumer
// whatsapp-send-worker emits it.
type MessageSent struct {
	Direction      string `json:"direction" jsonschema:"enum=out"`
	ConversationID string `json:"conversation_id" jsonschema:"format=uuid"`
	ContactID      string `json:"contact_id" jsonschema:"format=uuid"`
	Channel        string `json:"channel" jsonschema:"enum=whatsapp"`
	Body           string `json:"body"`
	MessageID      string `json:"message_id"`
}

func (MessageSent) EventType() string { return "message.sent" }

// MessageDelivered says that a message reached the other side. The application
// emits it.
type MessageDelivered struct {
	MessageID   string    `json:"message_id"`
	DeliveredAt time.Time `json:"delivered_at"`
}

func (MessageDelivered) EventType() string { return "message.delivered" }

// MessageRead says that a message was read. The application emits it.
type MessageRead struct {
	MessageID string    `json:"message_id"`
	ReadAt    time.Time `json:"read_at"`
}

func (MessageRead) EventType() string { return "message.read" }

// MessageFailed says that a message was given up. The consumer
// whatsapp-send-worker emits it.
type MessageFailed struct {
	MessageID string `json:"message_id"`
	// ErrorCode is the HTTP status of the channel's answer, or "unreachable"
	// when it gave none, or "invalid" when the message could not be sent at all.
	ErrorCode    string `json:"error_code"`
	ErrorMessage string `json:"error_message"`
	// Retryable tells whether sending the same message again may succeed.
	Retryable bool `json:"retryable"`
}

func (MessageFailed) EventType() string { return "message.failed" }
