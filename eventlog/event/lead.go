package event

import "time"

// LeadCreated says that somebody may want to buy. The application emits it.
type LeadCreated struct {
	Name       string `json:"name"`
	Source     string `json:"source"`
	OwnerID    string `json:"owner_id,omitempty" jsonschema:"format=uuid"`
	PipelineID string `json:"pipeline_id" jsonschema:"format=uuid"`
	StageID    string `json:"stage_id" jsonschema:"format=uuid"`
}

func (LeadCreated) EventType() string { return "lead.created" }

// LeadUpdated says which fields of a lead have changed. The trigger on the
// table emits it.
type LeadUpdated struct {
	// Changes is what was changed, by the name of its column.
	Changes map[string]Change `json:"changes"`
}

// Change is a field's value before and after.
type Change struct {
	From any `json:"from,omitempty"`
	To   any `json:"to,omitempty"`
	// Truncated says that the values are too large to be told.
	Truncated bool `json:"truncated,omitempty"`
}

func (LeadUpdated) EventType() string { return "lead.updated" }

// LeadStageChanged says that a lead has moved in its pipeline. The trigger on
// the table emits it.
type LeadStageChanged struct {
	// FromStageID is left out for the first stage.
	FromStageID string `json:"from_stage_id,omitempty" jsonschema:"format=uuid"`
	ToStageID   string `json:"to_stage_id" jsonschema:"format=uuid"`
	// AutomationRun is the run of an automation that moved the lead.
	AutomationRun string `json:"automation_run,omitempty"`
}

func (LeadStageChanged) EventType() string { return "lead.stage_changed" }

// LeadWon says that a lead has bought. The application emits it.
type LeadWon struct {
	Value  float64   `json:"value"`
	WonAt  time.Time `json:"won_at"`
	Reason string    `json:"reason,omitempty"`
}

func (LeadWon) EventType() string { return "lead.won" }

// LeadLost says that a lead will not buy. The application emits it.
type LeadLost struct {
	Reason string    `json:"reason"`
	LostAt time.Time `json:"lost_at"`
}

func (LeadLost) EventType() string { return "lead.lost" }

// LeadAssigned says who takes care of a lead from now on. The trigger on the
// table emits it.
type LeadAssigned struct {
	FromOwnerID string `json:"from_owner_id,omitempty" jsonschema:"format=uuid"`
	ToOwnerID   string `json:"to_owner_id" jsonschema:"format=uuid"`
}

func (LeadAssigned) EventType() string { return "lead.assigned" }

// LeadDeleted says that a lead is gone. The trigger on the table emits it.
type LeadDeleted struct {
	// Soft says that the row is still there, marked as deleted.
	Soft bool `json:"soft"`
	// DeletedBy is a user's id, or a role of the database.
	DeletedBy string `json:"deleted_by"`
}

func (LeadDeleted) EventType() string { return "lead.deleted" }
