package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Fault is how calls fail. Fields may be combined; the zero Fault is none. The call waits first (Hang, else Delay), then is cut
// (Cut), else answered with Status.
type Fault struct {
	Status     int           `json:"status"`  // 200 to 599: answer this and do nothing; 0: do the work and answer properly
	RetryAfter time.Duration `json:"-"`       // header beside Status, rounded up to whole seconds; 0: none
	Delay      time.Duration `json:"-"`       // wait this long; 0: not at all
	Hang       bool          `json:"hang"`    // wait until the caller gives up, the fault is replaced or cleared, or the server closes
	Cut        bool          `json:"cut"`     // close the connection without an answer
	Garbage    bool          `json:"garbage"` // the answer's body is a NUL byte, invalid UTF-8 and some text

	// AfterDoing does the work before the call fails: the outside world has changed and the caller cannot know. With neither
	// Status, Delay, Hang nor Garbage it cuts the connection.
	AfterDoing bool `json:"after_doing"`

	// Times is how many calls fail, after which the coming ones succeed; 0: all until the fault is cleared.
	Times int `json:"times"`
}

// wait returns after the fault's delay, when the fault is cleared, or with the error of a ctx that ended first.
func (f Fault) wait(ctx context.Context, cleared <-chan struct{}) (wasCleared bool, err error) {
	if !f.Hang && f.Delay <= 0 {
		return false, nil
	}
	var elapsed <-chan time.Time // nil, so for ever, when the call hangs
	if !f.Hang {
		elapsed = time.After(f.Delay)
	}
	select {
	case <-elapsed:
		return false, nil
	case <-cleared:
		return true, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// faults holds the current fault and for how many calls it is good. Its owner's lock guards it.
type faults struct {
	current Fault
	left    int           // calls that will still fail; meaningless when current.Times is 0
	cleared chan struct{} // closed when current is replaced; still open when merely used up
}

func (f *faults) set(fault Fault) {
	if fault.AfterDoing && fault.Status == 0 && fault.Delay == 0 && !fault.Hang && !fault.Garbage {
		fault.Cut = true
	}
	close(f.cleared)
	*f = faults{current: fault, left: fault.Times, cleared: make(chan struct{})}
}

// take returns the fault for one call, and the channel that tells when it is cleared.
func (f *faults) take() (Fault, <-chan struct{}) {
	if f.current.Times > 0 {
		if f.left == 0 {
			return Fault{}, f.cleared
		}
		f.left--
	}
	return f.current, f.cleared
}

// decodeFault reads one fault from JSON and refuses what it does not know, since a misspelt fault would test nothing.
func decodeFault(r io.Reader) (Fault, error) {
	var in struct {
		Fault

		Delay      string `json:"delay"`
		RetryAfter string `json:"retry_after"`
	}
	decoder := json.NewDecoder(r)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&in); err != nil {
		return Fault{}, fmt.Errorf("decode fault: %w", err)
	}
	fault := in.Fault
	var errs []error
	duration := func(name, value string) time.Duration {
		if value == "" {
			return 0
		}
		d, err := time.ParseDuration(value)
		if err != nil || d < 0 {
			errs = append(errs, fmt.Errorf("%s: %q is not a duration such as 30s", name, value))
		}
		return d
	}
	fault.Delay = duration("delay", in.Delay)
	fault.RetryAfter = duration("retry_after", in.RetryAfter)
	if fault.Status != 0 && (fault.Status < 200 || fault.Status > 599) {
		errs = append(errs, fmt.Errorf("status: %d is not from 200 to 599", fault.Status))
	}
	if fault.Times < 0 {
		errs = append(errs, fmt.Errorf("times: %d is negative", fault.Times))
	}
	return fault, errors.Join(errs...)
}
