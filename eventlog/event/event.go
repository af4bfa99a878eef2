// Package event holds the payloads of the events on the bus, one file a
// subject. Each type is the one source of what is said of its event elsewhere:
// schema/ and README.md are written from it.
//
// A payload is what consumers outside this program read too. A field may be
// added if it is optional, with a new minor version; what an old reader cannot
// take is a new major version with an upcast:
//
//	func (LeadWon) SchemaVersion() string { return "2.0.0" }
//
//	// Upcasts turns the payload of each older major version into the next one.
//	func (LeadWon) Upcasts() []func(map[string]json.RawMessage) error {
//		return []func(map[string]json.RawMessage) error{
//			func(payload map[string]json.RawMessage) error { // from 1 to 2
//				payload["amount"] = payload["value"]
//				delete(payload, "value")
//				return nil
//			},
//		}
//	}
//
// A type without SchemaVersion has version 1.0.0. The tag jsonschema gives a
// field its format or the values that it may have.
//
// The package uses the standard library only: an emitter needs nothing else.
package event

import (
	"embed"
	"io/fs"
)

//go:embed schema/*.json
var schemas embed.FS

// Payload is implemented by every type of this package.
type Payload interface {
	// EventType is "entity.action" in lower snake case, whatever the value.
	EventType() string
}

// Any stands for the events of every type. A consumer of Any gets each event
// of the bus; the payload is not read for it.
type Any struct{}

func (Any) EventType() string { return "*" }

// Schemas returns the JSON Schemas of the payloads, the older major versions
// included: TYPE.vMAJOR.json at its root.
func Schemas() (fs.FS, error) { return fs.Sub(schemas, "schema") }

// All returns a zero value of every type but Any, sorted by event type.
func All() []Payload {
	return []Payload{
		AIBudgetSnapshot{},
		AIBudgetThrottled{},
		AIBudgetWarning{},
		AIHandoffTriggered{},
		AIResponded{},
		AISentimentAlert{},
		ContactAnonymized{},
		ContactBlocked{},
		ContactCreated{},
		ContactMerged{},
		ConversationAssigned{},
		ConversationOpened{},
		ConversationReopened{},
		ConversationResolved{},
		LeadAssigned{},
		LeadCreated{},
		LeadDeleted{},
		LeadLost{},
		LeadStageChanged{},
		LeadUpdated{},
		LeadWon{},
		LeadActivityRecorded{},
		LGPDConsentChanged{},
		LGPDDataRequestReceived{},
		LGPDExportGenerated{},
		LGPDRedactApplied{},
		MessageDelivered{},
		MessageFailed{},
		MessageQueued{},
		MessageRead{},
		MessageReceived{},
		MessageSent{},
		NuvemshopCartAbandoned{},
		NuvemshopCustomerRedactReceived{},
		NuvemshopFullResync{},
		NuvemshopOrderCancelled{},
		NuvemshopOrderCreated{},
		NuvemshopOrderFulfilled{},
		NuvemshopOrderPaid{},
		NuvemshopProductSynced{},
		SystemContactBlockedByStop{},
		SystemSendBlocked{},
		SystemSessionChanged{},
		SystemWindow24hExpired{},
		WebhookDeliveryFailed{},
		WebhookSubscriptionDisabled{},
	}
}
