package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// proxy is the network between a program and its database.
type proxy struct {
	listener net.Listener
	target   string
	running  sync.WaitGroup

	mu     sync.Mutex
	closed bool
	down   bool          // every connection is closed at once
	passes chan struct{} // closed while data passes
	delay  time.Duration // of each piece of data in each direction
	jitter time.Duration // that chance adds to it
	conns  map[net.Conn]bool
}

// startProxy starts a network to a host:port on which all is well.
func startProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{listener: listener, target: target, passes: make(chan struct{}), conns: make(map[net.Conn]bool)}
	close(p.passes)
	p.running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			p.running.Go(func() { p.join(client) })
		}
	})
	t.Cleanup(func() {
		p.mu.Lock()
		p.closed = true
		p.mu.Unlock()
		_ = listener.Close()
		p.heal(t)
		p.closeAll()
		p.running.Wait()
	})
	return p
}

// keep remembers a connection until it is forgotten, or closes it when there is
// no network for it.
func (p *proxy) keep(conn net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down || p.closed {
		_ = conn.Close()
		return false
	}
	p.conns[conn] = true
	return true
}

func (p *proxy) forget(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, conn)
	_ = conn.Close()
}

func (p *proxy) join(client net.Conn) {
	if !p.keep(client) {
		return
	}
	defer p.forget(client)
	<-p.gate()
	server, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", p.target)
	if err != nil || !p.keep(server) {
		return
	}
	defer p.forget(server)
	var both sync.WaitGroup
	both.Go(func() { p.pump(server, client) })
	both.Go(func() { p.pump(client, server) })
	both.Wait()
}

// parcel is data on its way.
type parcel struct {
	due  time.Time
	data []byte
}

// pump carries data from src to dst, in order, and the end of src as well: so
// whatever a black hole swallowed, a close included, arrives when it is healed.
func (p *proxy) pump(dst, src net.Conn) {
	parcels := make(chan parcel, 1024)
	var writing sync.WaitGroup
	writing.Go(func() {
		defer p.forget(dst)
		for parcel := range parcels {
			time.Sleep(time.Until(parcel.due)) //nolint:forbidigo // the delay itself
			<-p.gate()
			if _, err := dst.Write(parcel.data); err != nil {
				break
			}
		}
		<-p.gate()
	})
	buffer := make([]byte, 32<<10)
	for {
		n, err := src.Read(buffer)
		if n > 0 {
			p.mu.Lock()
			due := time.Now().Add(p.delay)
			if p.jitter > 0 {
				due = due.Add(rand.N(p.jitter))
			}
			p.mu.Unlock()
			select {
			case parcels <- parcel{due, append([]byte(nil), buffer[:n]...)}:
			case <-time.After(time.Minute): // the other side is gone
				err = io.EOF
			}
		}
		if err != nil {
			break
		}
	}
	close(parcels)
	writing.Wait()
}

// gate is closed while data passes.
func (p *proxy) gate() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.passes
}

// cut closes every connection, those to come included, until heal.
func (p *proxy) cut(t *testing.T) {
	t.Helper()
	mark(t, "the network is cut")
	p.mu.Lock()
	p.down = true
	p.mu.Unlock()
	p.closeAll()
}

func (p *proxy) closeAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for conn := range p.conns {
		_ = conn.Close()
	}
}

// swallow lets all data vanish, without a word to either side, until heal.
func (p *proxy) swallow(t *testing.T) {
	t.Helper()
	mark(t, "the network swallows everything")
	p.mu.Lock()
	defer p.mu.Unlock()
	p.passes = make(chan struct{})
}

func (p *proxy) slow(t *testing.T, delay, jitter time.Duration) {
	t.Helper()
	mark(t, "the network takes from %s to %s", delay, delay+jitter)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay, p.jitter = delay, jitter
}

func (p *proxy) heal(t *testing.T) {
	t.Helper()
	mark(t, "the network is well")
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down, p.delay, p.jitter = false, 0, 0
	select {
	case <-p.passes:
	default:
		close(p.passes)
	}
}

// through is the world as a program sees it whose database is at another address.
func (w *world) through(t *testing.T, address string) *world {
	t.Helper()
	to, err := url.Parse(w.url)
	require.NoError(t, err)
	to.Host = address
	seen := *w
	seen.url = to.String()
	return &seen
}

// network is a proxy to the world's database, and the world as seen through it.
func (w *world) network(t *testing.T) (*proxy, *world) {
	t.Helper()
	config, err := pgx.ParseConfig(w.url)
	require.NoError(t, err)
	p := startProxy(t, net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port))))
	return p, w.through(t, p.listener.Addr().String())
}

func TestChaosCutNetworkLosesNothing(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	network, far := w.network(t)
	far.serve(t)
	far.serve(t)
	load := w.startLoad(t, chaosRate())
	for range long(1, 3) {
		load.await(t, 60)
		network.cut(t)
		spend(t, long(5*time.Second, 30*time.Second))
		network.heal(t)
	}
	load.await(t, 60)
	load.conclude(t, atLeastOnce)
}

// To either side the other one is silent, and what was sent arrives late.
func TestChaosBlackHoleInTheNetworkLosesNothing(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	network, far := w.network(t)
	far.serve(t)
	w.serve(t)
	load := w.startLoad(t, chaosRate())
	for range long(1, 3) {
		load.await(t, 60)
		network.swallow(t)
		before := w.done(t)
		spend(t, long(20*time.Second, time.Minute))
		require.Greater(t, w.done(t), before, "nothing was done on the other side")
		network.heal(t)
	}
	load.await(t, 60)
	load.conclude(t, atLeastOnce)
}

// A delivery takes six round trips, and in three of them others to the same webhook
// wait, so not much is done meanwhile; but each outcome is recorded within its lease.
func TestChaosSlowNetworkLosesNothing(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	network, far := w.network(t)
	far.serve(t)
	load := w.startLoad(t, 5)
	load.await(t, 20)
	network.slow(t, 100*time.Millisecond, 50*time.Millisecond) // in each direction
	spend(t, long(15*time.Second, time.Minute))
	load.stop(t)
	network.heal(t)
	w.requireAudit(t, load.ledger, atLeastOnce)
}

// A machine that vanishes says no good-bye, and what its sessions had locked stays
// so until the server ends them.
func TestChaosVanishedBridgeHoldsNoEventsForLong(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	network, far := w.network(t)
	w.worker(t)
	network.slow(t, 100*time.Millisecond, 0) // so that it is in the middle of a transaction
	vanished := far.bridge(t)
	load := w.startLoad(t, chaosRate())
	holding := func() int {
		return number(t, w.pool, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'afluente' AND state = 'idle in transaction'
				AND backend_xid IS NOT NULL`) // it has changed something
	}
	eventually(t, time.Minute, "a bridge that holds events", func() bool {
		if holding() == 0 {
			return false
		}
		network.swallow(t)
		// What was on its way may have ended it.
		spend(t, 500*time.Millisecond)
		if holding() == 0 {
			network.heal(t)
			network.slow(t, 100*time.Millisecond, 0)
			return false
		}
		return true
	})
	vanished.kill(t)
	w.bridge(t)
	load.await(t, 60)
	load.conclude(t, onceOnly)
}

// A transaction pooler keeps neither LISTEN nor prepared statements.
func TestChaosTransactionPoolerLosesAndRepeatsNothing(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	program := find(t, "pgbouncer", "/usr/sbin/pgbouncer")
	pooled := w.through(t, startPooler(t, program, w.url))
	for range 2 {
		pooled.serve(t, "--poll-only")
	}
	load := w.startLoad(t, chaosRate())
	load.await(t, long(200, 3000))
	load.conclude(t, onceOnly)
}

// startPooler starts pgbouncer in front of a database and returns its address.
func startPooler(t *testing.T, program, databaseURL string) string {
	t.Helper()
	config, err := pgx.ParseConfig(databaseURL)
	require.NoError(t, err)
	dir := openDir(t)
	port := freePort(t)
	settings := filepath.Join(dir, "pgbouncer.ini")
	password := ""
	if config.Password != "" {
		password = "password=" + config.Password
	}
	require.NoError(t, os.WriteFile(settings, fmt.Appendf(nil, `[databases]
* = host=%s port=%d user=%s %s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 10
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
`, config.Host, config.Port, config.User, password, port), 0o644))
	args := []string{settings}
	if os.Getuid() == 0 { // which it refuses to run as
		args = append([]string{"-u", "nobody"}, args...)
	}
	output := newLines()
	command := exec.CommandContext(t.Context(), program, args...)
	command.Stdout, command.Stderr = output, output
	command.Cancel = func() error { return command.Process.Kill() }
	require.NoError(t, command.Start())
	t.Cleanup(func() {
		_ = command.Wait() // its end is wanted
		if t.Failed() {
			t.Logf("pgbouncer:\n%s", output)
		}
	})
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	eventually(t, time.Minute, "pgbouncer", func() bool {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		if err == nil {
			err = conn.Close()
		}
		return err == nil
	})
	return address
}

// find returns where a program is, on the path or elsewhere, and skips the test
// where it is missing.
func find(t *testing.T, name, elsewhere string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	if _, err := os.Stat(elsewhere); err != nil {
		cannotRun(t, name+" is not installed (the Debian package "+name+")")
	}
	return elsewhere
}

// openDir makes a folder that servers may enter which run as another user.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "afluente-chaos-") //nolint:usetesting // nobody else may enter those of a test
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	return dir
}

// freePort returns a port that is free and below those that the system gives to
// outgoing connections, so that it is still free when a server comes back to it.
func freePort(t *testing.T) int {
	t.Helper()
	for range 100 {
		port := 20_000 + rand.IntN(12_000)
		listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			require.NoError(t, listener.Close())
			return port
		}
	}
	require.NoError(t, errors.New("no port is free"))
	return 0
}
