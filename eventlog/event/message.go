package event

// MessageQueued asks for one message to be sent. It is emitted in the
// transaction that writes the row in messages.
type MessageQueued struct {
	// MessageID is messages.id.
	MessageID string `json:"message_id"`
}

func (MessageQueued) EventType() string { return "message.queued" }

// MessageSent says that a message was handed to its channel.
type MessageSent struct {
	Direction      string `json:"direction"` // always "out"
	ConversationID string `json:"conversation_id"`
	ContactID      string `json:"contact_id"`
	Channel        string `json:"channel"` // "whatsapp"
	Body           string `json:"body"`
	MessageID      string `json:"message_id"`
}

func (MessageSent) EventType() string { return "message.sent" }

// MessageFailed says that a message was given up.
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
