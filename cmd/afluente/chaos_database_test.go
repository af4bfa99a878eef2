package main

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/db"
	"afluente/db/embedded"
	"afluente/db/migrate"
	"afluente/jobs/sandbox"
)

// server is a PostgreSQL of a test's own, which writes to disk what it promises
// and is started again on the same port.
type server struct {
	program string
	args    []string
	env     []string
	attr    *syscall.SysProcAttr
	log     *lines
	url     string
	free    func() // gives back the slot that it took

	command *exec.Cmd
	done    chan struct{}
}

// startServer waits for a slot and starts a new server with some more in its
// environment.
func startServer(t *testing.T, env ...string) *server {
	t.Helper()
	free := takeSlot(t)
	dir := openDir(t)
	made, err := embedded.Start(t.Context(), embedded.Config{Dir: dir})
	require.NoError(t, err)
	var bin, data string
	conn, err := pgx.Connect(t.Context(), made.URL())
	require.NoError(t, err)
	require.NoError(t, conn.QueryRow(t.Context(),
		"SELECT (SELECT setting FROM pg_config WHERE name = 'BINDIR'), current_setting('data_directory')").Scan(&bin, &data))
	require.NoError(t, conn.Close(t.Context()))
	require.NoError(t, made.Stop())

	port := freePort(t)
	at, err := url.Parse(made.URL())
	require.NoError(t, err)
	at.Host = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	s := &server{
		program: filepath.Join(bin, "postgres"),
		args: []string{
			"-D", data, "-c", "listen_addresses=127.0.0.1", "-c", "port=" + strconv.Itoa(port), "-c", "unix_socket_directories=",
			"-c", "max_connections=200", "-c", "timezone=UTC",
		},
		env:  append([]string{"LC_ALL=C", "PATH=" + os.Getenv("PATH")}, env...),
		attr: &syscall.SysProcAttr{Setpgid: true},
		log:  newLines(),
		url:  at.String(),
		free: free,
	}
	if os.Getuid() == 0 { // which it refuses to run as
		info, err := os.Stat(data)
		require.NoError(t, err)
		owner, ok := info.Sys().(*syscall.Stat_t)
		require.True(t, ok)
		s.attr.Credential = &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}
	}
	s.start(t)
	t.Cleanup(func() {
		s.stop(t, syscall.SIGINT)
		if t.Failed() {
			t.Logf("postgres:\n%s", s.log)
		}
	})
	return s
}

// start returns when the server lets us in.
func (s *server) start(t *testing.T) {
	t.Helper()
	mark(t, "the server starts")
	s.command = exec.Command(s.program, s.args...) //nolint:noctx // stopped by its own signals
	s.command.Env, s.command.SysProcAttr, s.command.Dir = s.env, s.attr, os.TempDir()
	s.command.Stdout, s.command.Stderr = s.log, s.log
	require.NoError(t, s.command.Start())
	s.done = make(chan struct{})
	go func(command *exec.Cmd, done chan struct{}) {
		defer close(done)
		_ = command.Wait() // however it was stopped
	}(s.command, s.done)
	eventually(t, time.Minute, "server", func() bool {
		conn, err := pgx.Connect(t.Context(), s.url)
		if err == nil {
			err = conn.Close(t.Context())
		}
		return err == nil
	})
}

// stop stops the server: fast with SIGINT, without a good-bye with SIGQUIT.
func (s *server) stop(t *testing.T, signal syscall.Signal) {
	t.Helper()
	mark(t, "the server gets the signal %q", signal)
	require.NoError(t, s.command.Process.Signal(signal))
	select {
	case <-s.done:
	case <-time.After(30 * time.Second):
		_ = s.command.Process.Kill()
		<-s.done
		require.FailNow(t, "the server does not stop")
	}
}

// newWorld makes a world on the server.
func (s *server) newWorld(t *testing.T) *world {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), s.url)
	require.NoError(t, err)
	defer pool.Close()
	_, err = migrate.Up(t.Context(), pool)
	require.NoError(t, err)
	w := newWorldOn(t, s.url)
	w.beginChaos(t, s.free)
	return w
}

func TestChaosRestartedDatabaseLosesNothing(t *testing.T) {
	t.Parallel()
	testRestart(t, syscall.SIGINT)
}

// The server has to recover from its log, and the leader's table is empty then.
func TestChaosCrashedDatabaseLosesNothing(t *testing.T) {
	t.Parallel()
	testRestart(t, syscall.SIGQUIT)
}

func testRestart(t *testing.T, signal syscall.Signal) {
	t.Helper()
	s := startServer(t)
	w := s.newWorld(t)
	for range 2 {
		w.serve(t)
	}
	load := w.startLoad(t, chaosRate())
	for range long(2, 6) {
		load.await(t, 40)
		s.stop(t, signal)
		spend(t, long(2*time.Second, 15*time.Second))
		s.start(t)
	}
	load.await(t, 60)
	load.conclude(t, atLeastOnce)
}

func TestChaosFourConnectionsSuffice(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	for range 2 {
		w.serve(t, "--max-conns", "4")
	}
	load := w.startLoad(t, chaosRate())
	load.await(t, long(200, 3000))
	load.conclude(t, onceOnly)
}

// A report that reads for long keeps dead rows from being cleared away.
func TestChaosLongSnapshotHoldsNothingUp(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	w.serve(t)
	load := w.startLoad(t, chaosRate())
	tx, err := w.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), "SELECT count(*) FROM event_log")
	require.NoError(t, err)
	load.await(t, long(200, 10_000))
	load.stop(t)
	w.awaitRest(t)
	require.NoError(t, tx.Rollback(t.Context()))
	w.requireAudit(t, load.ledger, onceOnly)
}

// Somebody looks into a matter with SELECT FOR UPDATE and goes for a coffee. Not
// of a job that runs: River completes a process's jobs in batches, one after the
// other, and the next would wait for its row.
func TestChaosLockedRowsHoldUpNothingElse(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	w.waha.SetFault(sandbox.Fault{Delay: 50 * time.Millisecond})
	worker := w.worker(t)
	load := w.startLoad(t, chaosRate())
	load.await(t, 40) // no bridge runs yet, so they are pending
	events, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = events.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = events.Exec(t.Context(), "SELECT FROM event_log WHERE status = 'pending' ORDER BY created_at LIMIT 10 FOR UPDATE")
	require.NoError(t, err)

	thaw := worker.freeze(t) // so that there are jobs to lock
	w.bridge(t)
	eventually(t, time.Minute, "jobs", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE state = 'available'") >= 20
	})
	jobs, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = jobs.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = jobs.Exec(t.Context(), "SELECT FROM river.river_job WHERE state = 'available' ORDER BY id LIMIT 10 FOR UPDATE")
	require.NoError(t, err)
	thaw()
	before := w.done(t)
	spend(t, long(20*time.Second, time.Minute))
	require.Greater(t, w.done(t), before+40, "the others wait")
	require.NoError(t, events.Rollback(t.Context()))
	require.NoError(t, jobs.Rollback(t.Context()))
	load.await(t, 20)
	load.conclude(t, onceOnly)
}

// Under this setting of the database, transactions that meet fail where they
// would wait for each other otherwise.
func TestChaosSerializableDatabaseLosesNothing(t *testing.T) {
	t.Parallel()
	w := chaosWorld(t)
	_, err := w.pool.Exec(t.Context(), `DO $$ BEGIN
		EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = ''serializable''', current_database()); END $$`)
	require.NoError(t, err)
	w.pool.Reset()
	for range 2 {
		w.serve(t)
	}
	load := w.startLoad(t, chaosRate())
	load.await(t, long(150, 3000))
	load.conclude(t, onceOnly)
}

// The clocks of a program and its database are two. Jobs that take some seconds
// must not be taken for lost: River compares the time at which a job began, by the
// database's clock, with the program's own. So this ends where the database is
// behind by nearly as much as a job may take (rescueAfter in eventlog); 'afluente
// doctor' tells of much less. Go asks the kernel for the time, so it is the server
// whose clock is wrong.
func TestChaosDatabaseClockMayBeAheadOrBehind(t *testing.T) {
	t.Parallel()
	onDemand(t)
	compiler := find(t, "gcc", "/usr/bin/gcc")
	for name, offset := range map[string]int{"ahead": 90, "behind": -30} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t, "LD_PRELOAD="+buildClock(t, compiler, offset))
			w := s.newWorld(t)
			clock, err := db.New(w.pool).GetClock(t.Context())
			require.NoError(t, err)
			require.InDelta(t, offset, time.Until(clock).Seconds(), 5)
			w.waha.SetFault(sandbox.Fault{Delay: 5 * time.Second})
			w.serve(t)
			leader := w.leaderBut(t, "")
			load := w.startLoad(t, 5)
			spend(t, long(35*time.Second, 3*time.Minute)) // River looks for lost jobs twice a minute
			load.conclude(t, onceOnly)
			require.Equal(t, leader, w.leaderBut(t, ""), "nothing happened to the leader")
			require.Zero(t, number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE errors IS NOT NULL"), "jobs failed or were taken for lost")
		})
	}
}

// buildClock makes a library that sets the clock of the program that loads it some
// seconds ahead. Those that one can install change more than that, and less in
// handlers of signals, where PostgreSQL reads the clock too.
func buildClock(t *testing.T, compiler string, offset int) string {
	t.Helper()
	library := filepath.Join(openDir(t), "clock.so")
	command := exec.CommandContext(t.Context(), compiler, "-shared", "-fPIC", "-O2", "-x", "c", "-o", library, "-")
	command.Stdin = strings.NewReader(fmt.Sprintf(`
		#include <sys/syscall.h>
		#include <sys/time.h>
		#include <time.h>
		#include <unistd.h>

		int clock_gettime(clockid_t clock, struct timespec *at) {
			int result = syscall(SYS_clock_gettime, clock, at);
			if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += %d;
			return result;
		}

		int gettimeofday(struct timeval *at, void *zone) {
			struct timespec exact;
			clock_gettime(CLOCK_REALTIME, &exact);
			at->tv_sec = exact.tv_sec;
			at->tv_usec = exact.tv_nsec / 1000;
			return 0;
		}

		time_t time(time_t *at) {
			struct timespec exact;
			clock_gettime(CLOCK_REALTIME, &exact);
			if (at) *at = exact.tv_sec;
			return exact.tv_sec;
		}
	`, offset))
	output, err := command.CombinedOutput()
	require.NoError(t, err, string(output))
	require.NoError(t, os.Chmod(library, 0o755))
	return library
}
