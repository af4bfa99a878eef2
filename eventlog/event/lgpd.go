package event

import "time"

// LGPDConsentChanged says that a person has given or taken back a consent. The
// application emits it.
type LGPDConsentChanged struct {
	ContactID   string `json:"contact_id" jsonschema:"format=uuid"`
	ConsentType string `json:"consent_type"`
	Granted     bool   `json:"granted"`
	Source      string `json:"source"`
}

func (LGPDConsentChanged) EventType() string { return "lgpd.consent_changed" }

// LGPDDataRequestReceived says that a person wants to see the data on him, or
// to have it removed. The application emits it.
type LGPDDataRequestReceived struct {
	RequestID   string `json:"request_id" jsonschema:"format=uuid"`
	RequestType string `json:"request_type" jsonschema:"enum=access,enum=redact"`
	ContactID   string `json:"contact_id" jsonschema:"format=uuid"`
	Channel     string `json:"channel"`
}

func (LGPDDataRequestReceived) EventType() string { return "lgpd.data_request_received" }

// LGPDExportGenerated says where a person finds the data on him. The consumer
// lgpd-export-worker emits it.
type LGPDExportGenerated struct {
	RequestID       string    `json:"request_id" jsonschema:"format=uuid"`
	ExportURLSigned string    `json:"export_url_signed" jsonschema:"format=uri"`
	ExpiresAt       time.Time `json:"expires_at"`
}

func (LGPDExportGenerated) EventType() string { return "lgpd.export_generated" }

// LGPDRedactApplied says that a person's data was removed. The consumer
// lgpd-redact-worker emits it.
type LGPDRedactApplied struct {
	RequestID string `json:"request_id" jsonschema:"format=uuid"`
	ContactID string `json:"contact_id" jsonschema:"format=uuid"`
	Scope     string `json:"scope" jsonschema:"enum=crm_only,enum=crm_and_nuvemshop"`
}

func (LGPDRedactApplied) EventType() string { return "lgpd.redact_applied" }
