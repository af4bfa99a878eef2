package eventlog

import "time"

// SetPollInterval is for tests that must tell a hint from the poll. Call it
// before Run.
func (b *Bridge) SetPollInterval(interval time.Duration) { b.poll = interval }

// CheckTags is the check that Emit makes of a payload, for tests that go
// through all types.
func CheckTags(payload Payload) error { return checkTags(payload) }
