package event

// ConversationOpened says that a conversation has begun. The application emits it.
type ConversationOpened struct {
	ConversationID string `json:"conversation_id" jsonschema:"format=uuid"`
	ContactID      string `json:"contact_id" jsonschema:"format=uuid"`
	Channel        string `json:"channel"`
}

func (ConversationOpened) EventType() string { return "conversation.opened" }

// ConversationAssigned says who answers from now on. The application emits it.
type ConversationAssigned struct {
	FromUserID string `json:"from_user_id,omitempty" jsonschema:"format=uuid"`
	ToUserID   string `json:"to_user_id" jsonschema:"format=uuid"`
	Mode       string `json:"mode" jsonschema:"enum=manual,enum=round_robin"`
}

func (ConversationAssigned) EventType() string { return "conversation.assigned" }

// ConversationResolved says that there is nothing more to answer. The
// application emits it.
type ConversationResolved struct {
	ResolvedBy     string `json:"resolved_by"`
	ResolutionNote string `json:"resolution_note,omitempty"`
	// DurationS is how long the conversation was open, in seconds.
	DurationS int64 `json:"duration_s"`
}

func (ConversationResolved) EventType() string { return "conversation.resolved" }

// ConversationReopened says that there is more to answer after all. The
// application emits it.
type ConversationReopened struct {
	ReopenedBy string `json:"reopened_by"`
	Reason     string `json:"reason,omitempty"`
}

func (ConversationReopened) EventType() string { return "conversation.reopened" }
