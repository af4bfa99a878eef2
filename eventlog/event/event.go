// Package event holds the payloads of the events on the bus, one file a
// subject. A payload is what consumers outside this program read too, so a
// field may be added, but a change that an old reader cannot take is a new
// major schema version.
//
// The package uses the standard library only: an emitter needs nothing else.
package event

// Any stands for the events of every type. A consumer of Any gets each event
// of the bus; the payload is not read for it.
type Any struct{}

func (Any) EventType() string { return "*" }
