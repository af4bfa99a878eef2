package eventlog_test

import (
	"testing"

	"github.com/google/uuid"

	"afluente/eventlog"
	"afluente/eventlog/event"
)

// BenchmarkCheckTags is what Emit's check of a payload costs: of one without
// tags, and of those with the most.
//
//	go test -run '^$' -bench CheckTags ./eventlog
func BenchmarkCheckTags(b *testing.B) {
	id := uuid.NewString()
	for _, payload := range []eventlog.Payload{
		event.MessageQueued{MessageID: id},
		event.LeadCreated{Name: "Ada", Source: "web", OwnerID: id, PipelineID: id, StageID: id},
		event.MessageSent{Direction: "out", ConversationID: id, ContactID: id, Channel: "whatsapp", MessageID: id},
	} {
		b.Run(payload.EventType(), func(b *testing.B) {
			for b.Loop() {
				if err := eventlog.CheckTags(payload); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
