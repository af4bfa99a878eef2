package event

// ContactCreated says that a person is new. The application emits it.
type ContactCreated struct {
	Phone  string `json:"phone"`
	Name   string `json:"name,omitempty"`
	Source string `json:"source"`
}

func (ContactCreated) EventType() string { return "contact.created" }

// ContactMerged says that two contacts were the same person. The application
// emits it.
type ContactMerged struct {
	FromContactID string `json:"from_contact_id" jsonschema:"format=uuid"`
	IntoContactID string `json:"into_contact_id" jsonschema:"format=uuid"`
	// MergedFields is the names of the fields that were taken over.
	MergedFields []string `json:"merged_fields"`
}

func (ContactMerged) EventType() string { return "contact.merged" }

// ContactBlocked says that a person gets no more messages. The application
// emits it.
type ContactBlocked struct {
	// Reason is "stop" when the person asked for it, "manual" when somebody else did.
	Reason  string `json:"reason" jsonschema:"enum=stop,enum=manual"`
	ActorID string `json:"actor_id,omitempty"`
}

func (ContactBlocked) EventType() string { return "contact.blocked" }

// ContactAnonymized says that a person's data is gone, as the LGPD gives the
// right to. The consumer lgpd-redact-worker emits it.
type ContactAnonymized struct {
	LGPDRequestID string `json:"lgpd_request_id" jsonschema:"format=uuid"`
	// AnonymizedFields is the names of the fields that were emptied.
	AnonymizedFields []string `json:"anonymized_fields"`
}

func (ContactAnonymized) EventType() string { return "contact.anonymized" }
