// Package sandbox holds stand-ins for the outside systems that jobs talk to: real HTTP servers with few manners and many faults,
// for `afluente dev` and for tests.
//
// They promise that every call is recorded before it is answered, that what was done because of a call is counted exactly (so an
// audit can tell "once" from "twice"), and that Close leaves no goroutine behind, hanging calls included.
//
// Both servers take three control calls, which are neither recorded nor subject to faults:
//
//	GET /calls?last=N    {"total":…,"calls":[…]}, newest last; N is 100 by default
//	POST /faults         a Fault as JSON, durations as strings: {"status":503,"retry_after":"30s","times":3}
//	DELETE /faults       answers are proper again, hanging calls go on
//
// All methods may be called from several goroutines.
package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"
)

const (
	maxBody        = 1 << 20  // bytes of one call; more is answered 413
	maxCalls       = 10_000   // calls kept
	maxCallsBodies = 16 << 20 // bytes of their bodies
	lastCalls      = 100      // calls that GET /calls shows by default
)

// Config is what a stand-in is started with.
type Config struct {
	Addr   string      // host:port to listen on; port 0 takes a free one
	Secret string      // what callers must prove to know: WAHA's API key, the receiver's signing secret; empty checks nothing
	Log    *zap.Logger // one line per call, without numbers of people and bodies; nil logs nothing
}

// Call is one recorded call.
type Call struct {
	Time   time.Time   `json:"time"`
	Method string      `json:"method"`
	Path   string      `json:"path"` // without the query
	Header http.Header `json:"header"`
	Body   string      `json:"body"` // byte for byte; at most 1 MiB
}

// reply is how a stand-in answers a call, and what the log says of it.
type reply struct {
	status int
	body   string
	log    string
	fields []zap.Field
}

// server is what the stand-ins share: recording, faults and the control calls. What a call does is do's matter.
type server struct {
	do    func(Call) reply
	log   *zap.Logger
	http  *http.Server
	url   string
	stop  context.CancelFunc // ends the context of every call
	alive sync.WaitGroup     // the accept loop and every connection

	mu      sync.Mutex
	arrived chan struct{} // closed and replaced with each call
	bodies  int           // bytes in calls
	calls   []Call
	faults  faults
	total   int
}

// start listens on c.Addr and serves until Close.
func start(ctx context.Context, c Config, do func(Call) reply) (*server, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", c.Addr)
	if err != nil {
		return nil, err
	}
	log := c.Log
	if log == nil {
		log = zap.NewNop()
	}
	calls, stop := context.WithCancel(context.WithoutCancel(ctx))
	s := &server{
		do: do, log: log, url: "http://" + listener.Addr().String(), stop: stop,
		arrived: make(chan struct{}), faults: faults{cleared: make(chan struct{})},
	}
	s.http = &http.Server{
		BaseContext:       func(net.Listener) context.Context { return calls },
		ConnState:         func(conn net.Conn, state http.ConnState) { s.countConn(calls, conn, state) },
		ErrorLog:          zap.NewStdLog(log),
		Handler:           http.HandlerFunc(s.route),
		MaxHeaderBytes:    64 << 10,
		ReadHeaderTimeout: 10 * time.Second,
	}
	s.alive.Go(func() {
		if err := s.http.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error("stand-in stopped", zap.Error(err))
		}
	})
	return s, nil
}

// countConn lets Close wait for connections. A new one is reported by the accept loop, which is in alive itself, so the count
// cannot rise from zero while Close waits; one that came too late for http.Server.Close to see is closed here.
func (s *server) countConn(ctx context.Context, conn net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		s.alive.Add(1)
		if ctx.Err() != nil {
			_ = conn.Close() // nobody is left to tell
		}
	case http.StateClosed:
		s.alive.Done()
	case http.StateActive, http.StateIdle, http.StateHijacked: // still open; nothing here hijacks
	}
}

// URL returns the server's address, such as http://127.0.0.1:40123, without a slash at the end.
func (s *server) URL() string { return s.url }

// Close ends the server and every call in it, and returns when all have ended. What was recorded can still be read. It may be
// called again.
func (s *server) Close() {
	s.stop()
	_ = s.http.Close() // an error could only be the listener's, which is gone either way
	s.alive.Wait()
}

// Total returns how many calls have come in, those no longer kept included.
func (s *server) Total() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}

// Calls returns the last calls, oldest first: at most 10,000, and fewer when their bodies exceed 16 MiB.
func (s *server) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Call(nil), s.calls...)
}

// CallsWith returns those of Calls that have the header with this value.
func (s *server) CallsWith(header, value string) []Call {
	var found []Call
	for _, call := range s.Calls() {
		if call.Header.Get(header) == value {
			found = append(found, call)
		}
	}
	return found
}

// AwaitCalls returns when at least n calls have come in since the start, answered or not, or with ctx's error.
func (s *server) AwaitCalls(ctx context.Context, n int) error {
	for {
		s.mu.Lock()
		total, arrived := s.total, s.arrived
		s.mu.Unlock()
		if total >= n {
			return nil
		}
		select {
		case <-arrived:
		case <-ctx.Done():
			return fmt.Errorf("await call %d, have %d: %w", n, total, ctx.Err())
		}
	}
}

// SetFault lets the coming calls fail as f says, instead of as an earlier fault said; calls that hang in that one go on.
func (s *server) SetFault(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults.set(f)
}

// ClearFault lets the coming calls succeed; calls that wait in the fault go on and are answered properly.
func (s *server) ClearFault() { s.SetFault(Fault{}) }

// route tells control calls from those that are recorded.
func (s *server) route(w http.ResponseWriter, r *http.Request) {
	switch r.Method + " " + r.URL.Path {
	case "GET /calls":
		s.listCalls(w, r)
	case "POST /faults":
		s.postFault(w, r)
	case "DELETE /faults":
		s.ClearFault()
		w.WriteHeader(http.StatusNoContent)
	default:
		s.serve(w, r)
	}
}

// serve records a call, lets the current fault strike, and does the call's work before, after or not at all.
func (s *server) serve(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		// Too long, or the caller is gone and sees nothing of this.
		http.Error(w, "body over 1 MiB", http.StatusRequestEntityTooLarge)
		return
	}
	call := Call{Time: time.Now(), Method: r.Method, Path: r.URL.Path, Header: r.Header.Clone(), Body: string(body)}
	fault, cleared := s.record(call)

	var answer reply
	if fault.AfterDoing {
		answer = s.do(call)
	}
	wasCleared, err := fault.wait(r.Context(), cleared)
	if wasCleared {
		fault = Fault{AfterDoing: fault.AfterDoing} // what is left of it: whether the work is done
	}
	switch {
	case err != nil:
		s.log.Info("call given up", zap.Bool("done", fault.AfterDoing))
		panic(http.ErrAbortHandler)
	case fault.Cut:
		s.log.Info("connection cut", zap.Bool("done", fault.AfterDoing))
		panic(http.ErrAbortHandler) // net/http's own way to close a connection without an answer
	case fault.Status != 0:
		answer = reply{status: fault.Status, body: `{"message":"sandbox fault"}`, log: "call refused"}
		if fault.RetryAfter > 0 {
			w.Header().Set("Retry-After", strconv.FormatInt(int64((fault.RetryAfter+time.Second-1)/time.Second), 10))
		}
	case !fault.AfterDoing:
		answer = s.do(call)
	}
	if fault.Garbage {
		answer.body = "\x00\xff\xfe garbage"
	}
	s.log.Info(answer.log, append(answer.fields, zap.Int("status", answer.status))...)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(answer.status)
	_, _ = io.WriteString(w, answer.body) // fails only when the caller is gone
}

// record keeps the call and returns the fault that it meets, in one step, so that "the next N calls" are the next N recorded.
func (s *server) record(call Call) (f Fault, cleared <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total++
	s.calls = append(s.calls, call)
	s.bodies += len(call.Body)
	for len(s.calls) > maxCalls || s.bodies > maxCallsBodies {
		s.bodies -= len(s.calls[0].Body)
		s.calls[0] = Call{} // the array outlives the slice: let go of the body
		s.calls = s.calls[1:]
	}
	close(s.arrived)
	s.arrived = make(chan struct{})
	return s.faults.take()
}

// listCalls answers GET /calls.
func (s *server) listCalls(w http.ResponseWriter, r *http.Request) {
	last := lastCalls
	if value := r.URL.Query().Get("last"); value != "" {
		var err error
		if last, err = strconv.Atoi(value); err != nil || last < 0 {
			http.Error(w, "last: not a count", http.StatusBadRequest)
			return
		}
	}
	s.mu.Lock()
	total, calls := s.total, append([]Call{}, s.calls[max(len(s.calls)-last, 0):]...)
	s.mu.Unlock()

	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"calls": calls, "total": total}) // fails only when the caller is gone
}

// postFault answers POST /faults.
func (s *server) postFault(w http.ResponseWriter, r *http.Request) {
	fault, err := decodeFault(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.SetFault(fault)
	w.WriteHeader(http.StatusNoContent)
}
