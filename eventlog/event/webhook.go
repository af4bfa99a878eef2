package event

// WebhookDeliveryFailed says that a receiver did not take an event. The
// job webhook-delivery-worker emits it.
type WebhookDeliveryFailed struct {
	SubscriptionID string `json:"subscription_id" jsonschema:"format=uuid"`
	EventID        string `json:"event_id" jsonschema:"format=uuid"`
	Attempt        int64  `json:"attempt"`
	Error          string `json:"error"`
	// StatusCode is left out when there was no answer.
	StatusCode int64 `json:"status_code,omitempty"`
}

func (WebhookDeliveryFailed) EventType() string { return "webhook.delivery_failed" }

// WebhookSubscriptionDisabled says that a receiver gets no more events until
// somebody enables it. The job webhook-delivery-worker emits it.
type WebhookSubscriptionDisabled struct {
	SubscriptionID string `json:"subscription_id" jsonschema:"format=uuid"`
	// Reason is such as "10_consecutive_failures".
	Reason    string `json:"reason"`
	LastError string `json:"last_error"`
}

func (WebhookSubscriptionDisabled) EventType() string { return "webhook.subscription_disabled" }
