package event

// LeadActivityRecorded says that something was done about a lead. The
// application emits it.
type LeadActivityRecorded struct {
	ActivityType   string `json:"activity_type"`
	LeadID         string `json:"lead_id" jsonschema:"format=uuid"`
	ContentExcerpt string `json:"content_excerpt"`
}

func (LeadActivityRecorded) EventType() string { return "lead_activity.recorded" }
