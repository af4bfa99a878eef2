package eventlog

import (
	"bytes"
	"regexp"
	"strings"

	"github.com/google/uuid"
	"github.com/riverqueue/river/rivertype"
)

// notTagRE is what River 0.51 refuses in a tag, which has at least three
// characters besides.
var notTagRE = regexp.MustCompile(`[^\w-]`)

// maxTag is the longest tag, in bytes.
const maxTag = 255

// Tags are what River UI finds the jobs of an event by:
//
//	message-queued                        the event type, with - for its dot
//	kind-message                          the entity's kind, with _ for what a tag cannot hold
//	3a5a7b26-1c7e-4a38-9a3c-5f0c2d9a1f11  the organization
func Tags(eventType, entityKind string, organization uuid.UUID) []string {
	tags := []string{strings.Replace(eventType, ".", "-", 1), organization.String()}
	if entityKind != "" {
		tags = append(tags, "kind-"+notTagRE.ReplaceAllString(entityKind, "_"))
	}
	for i, tag := range tags {
		tags[i] = strings.TrimRight(tag[:min(len(tag), maxTag)], "-")
	}
	return tags
}

// EventType returns the type of the event that a job stems from, empty for a
// job without one.
func EventType(job *rivertype.JobRow) string {
	if len(job.Tags) == 0 || !bytes.Contains(job.Metadata, []byte(`"event_id"`)) {
		return ""
	}
	eventType := strings.Replace(job.Tags[0], "-", ".", 1)
	if !eventTypeRE.MatchString(eventType) {
		return ""
	}
	return eventType
}
