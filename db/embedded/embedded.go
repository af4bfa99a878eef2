//go:build unix

// Package embedded runs a private PostgreSQL server for `afluente dev` and for
// tests. It promises:
//
//   - The server listens on 127.0.0.1 alone, on a port that was free, and lets
//     nobody in without a random password. It has no Unix socket. Any number
//     of servers run side by side.
//   - One folder has one server. A second Start on it fails and names the
//     process that has it.
//   - A data folder survives restarts. Whatever a killed run left behind, a
//     half-made folder or a server without its program, is cleared away by the
//     next Start.
//   - The server does not outlive the program that started it: on Linux the
//     kernel stops it when the program is killed, elsewhere the next Start on
//     the same folder does.
//   - A temporary server leaves neither process nor file behind.
//
// PostgreSQL refuses to run as root. Under root the server runs as the owner
// of the data folder, which for a new one is the user postgres or, where there
// is none, nobody; that user must be able to enter every folder above it.
package embedded

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/zap"
)

const (
	role       = "afluente"
	tempPrefix = "afluente-postgres-"

	// Names inside the folder of a server.
	dataName     = "data"
	initPrefix   = "data.init-"
	lockName     = "lock"
	logName      = "postgres.log"
	passwordName = "password"

	startAttempts = 40 // ports taken, and memory of a killed server still in use
	attemptPause  = 250 * time.Millisecond
	pingInterval  = 20 * time.Millisecond
	pingTimeout   = 2 * time.Second
	tailLines     = 20

	// sweepAge keeps a sweep from a folder that another process has just made
	// and not locked yet.
	sweepAge = time.Minute
)

// Config says what server to start. Its zero value is a temporary server.
type Config struct {
	// Dir is the folder of the server: its data, log and password. It is made
	// where it is missing, and survives restarts. Empty: a new folder below
	// os.TempDir that Stop removes.
	Dir string

	// FastUnsafe turns off fsync, synchronous_commit and full_page_writes. The
	// data is lost when the machine stops: for throw-away servers of tests.
	FastUnsafe bool

	// Logger is told of start and stop. Nil: nobody is. The server's own log is
	// the file postgres.log in its folder, begun anew at each start.
	Logger *zap.Logger
}

// Server is a running PostgreSQL. Its methods may be called from several
// goroutines.
type Server struct {
	bin       binaries
	cfg       Config
	data      string // dir/data
	dir       string // absolute
	lock      *os.File
	logFile   string // dir/postgres.log
	owner     *owner // nil: the server runs as the user that we are
	password  string
	process   *process
	stop      func() error
	temporary bool
	url       string
}

// Start starts a server and returns when it answers. The caller calls Stop.
//
// The programs are those of an installed PostgreSQL: for a folder with data
// the version that made it, for a new one the newest, 15 or later. Where none
// is installed they are fetched, once per user. ctx bounds the start alone.
//
// On an error nothing runs, and a temporary folder is removed.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	return start(ctx, cfg, host{
		dirs:  binDirs(installGlobs()),
		fetch: fetchBinaries,
		port:  freePort,
	})
}

// URL returns the address of the database "postgres" for its superuser
// "afluente", as pgx and psql take it. It holds the password.
func (s *Server) URL() string { return s.url }

// Stop ends all sessions, stops the server and waits until its process is
// gone; for a temporary server it then removes the folder. It takes at most 20
// seconds. Further calls return what the first did.
func (s *Server) Stop() error { return s.stop() }

func start(ctx context.Context, cfg Config, h host) (_ *Server, err error) {
	began := time.Now()
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	s := &Server{cfg: cfg, temporary: cfg.Dir == ""}
	s.stop = sync.OnceValue(s.close)
	defer func() {
		if err != nil {
			err = fmt.Errorf("embedded: start postgres: %w", errors.Join(err, s.Stop()))
		}
	}()

	if err := s.openDir(ctx); err != nil {
		return nil, err
	}
	made, err := dataVersion(s.data)
	if err != nil {
		return nil, err
	}
	if s.owner, err = findOwner(s.data); err != nil {
		return nil, err
	}
	if s.bin, err = h.find(ctx, made); err != nil {
		return nil, err
	}
	if made != 0 && made != s.bin.major {
		return nil, fmt.Errorf("folder %s was made by PostgreSQL %d, but this machine has PostgreSQL %d: "+
			"install PostgreSQL %d, or remove the folder and its data", s.data, made, s.bin.major, made)
	}
	if err := stopOrphan(ctx, s.data); err != nil {
		return nil, err
	}
	if made == 0 {
		err = s.initData(ctx)
	} else {
		err = s.readPassword()
	}
	if err != nil {
		return nil, err
	}
	if err := s.launch(ctx, h.port); err != nil {
		return nil, err
	}
	s.cfg.Logger.Info("postgres started",
		zap.String("dir", s.dir), zap.String("log", s.logFile), zap.Int("version", s.bin.major),
		zap.Int("pid", s.process.pid()), zap.Duration("duration", time.Since(began)))
	return s, nil
}

// openDir makes the folder and locks it. From then on it is ours alone.
func (s *Server) openDir(ctx context.Context) error {
	var err error
	if s.temporary {
		sweep(ctx, os.TempDir())
		if s.dir, err = os.MkdirTemp("", tempPrefix); err != nil {
			return fmt.Errorf("make temporary folder: %w", err)
		}
		// Another user may have to enter. What is secret inside has its own mode.
		if err := os.Chmod(s.dir, 0o755); err != nil {
			return fmt.Errorf("open temporary folder: %w", err)
		}
	} else {
		if s.dir, err = filepath.Abs(s.cfg.Dir); err != nil {
			return fmt.Errorf("resolve folder: %w", err)
		}
		if err := os.MkdirAll(s.dir, 0o755); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
	}
	s.data = filepath.Join(s.dir, dataName)
	s.logFile = filepath.Join(s.dir, logName)
	s.lock, err = lockDir(s.dir)
	return err
}

// removeHalfMade removes the folder of an initdb that was killed. A child of
// that may live a moment longer and still write there.
func removeHalfMade(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for {
		err := os.RemoveAll(dir)
		if !errors.Is(err, syscall.ENOTEMPTY) {
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// initData makes the data folder under another name and renames it when it is
// whole, so that a run killed half way leaves no folder that looks like one.
func (s *Server) initData(ctx context.Context) error {
	leftovers, err := filepath.Glob(filepath.Join(s.dir, initPrefix+"*"))
	if err != nil {
		return fmt.Errorf("list half-made folders: %w", err)
	}
	for _, dir := range leftovers {
		if err := removeHalfMade(ctx, dir); err != nil {
			return fmt.Errorf("remove half-made folder: %w", err)
		}
	}

	s.password = rand.Text()
	passwordFile := filepath.Join(s.dir, passwordName)
	if err := s.writePrivate(passwordFile, s.password+"\n"); err != nil {
		return fmt.Errorf("write password: %w", err)
	}
	dir, err := os.MkdirTemp(s.dir, initPrefix)
	if err != nil {
		return fmt.Errorf("make data folder: %w", err)
	}
	if err := s.own(dir); err != nil {
		return fmt.Errorf("make data folder: %w", err)
	}
	// LC_CTYPE "C" would leave lower('Á') as it is.
	locale := "C.UTF-8"
	if runtime.GOOS == "darwin" {
		locale = "en_US.UTF-8" // macOS has no C.UTF-8
	}
	args := []string{
		"--auth=scram-sha-256", "--encoding=UTF8", "--locale=" + locale, "--lc-messages=C",
		"--pgdata=" + dir, "--pwfile=" + passwordFile, "--username=" + role,
	}
	if s.cfg.FastUnsafe {
		args = append(args, "--no-sync")
	}
	p, err := s.run(ctx, "initdb", args)
	if err != nil {
		return err
	}
	<-p.done
	if p.err != nil {
		return s.withLog(fmt.Errorf("run initdb: %w", errors.Join(p.err, ctx.Err())))
	}
	if err := os.Rename(dir, s.data); err != nil {
		return fmt.Errorf("put data folder in place (one without PG_VERSION has to go first): %w", err)
	}
	return nil
}

func (s *Server) readPassword() error {
	b, err := os.ReadFile(filepath.Join(s.dir, passwordName))
	if err != nil {
		return fmt.Errorf("read password of %s: %w", s.data, err)
	}
	s.password = strings.TrimSpace(string(b))
	return nil
}

// launch starts the server and waits until it answers. A free port may be
// taken by the time that the server binds it; then it tries another.
func (s *Server) launch(ctx context.Context, port func() (int, error)) error {
	for attempt := 1; ; attempt++ {
		n, err := port()
		if err != nil {
			return fmt.Errorf("find free port: %w", err)
		}
		s.url = fmt.Sprintf("postgres://%s:%s@127.0.0.1:%d/postgres?sslmode=disable", role, s.password, n)
		// Not bound by ctx: the server lives on after Start.
		s.process, err = s.run(context.WithoutCancel(ctx), "postgres", s.settings(n))
		if err != nil {
			return err
		}
		err = s.ready(ctx)
		if err == nil {
			return nil
		}
		s.process.stop()
		text, _ := os.ReadFile(s.logFile) // nothing read, nothing to try again for
		taken := strings.Contains(string(text), "Address already in use")
		// The sessions of a killed server end a moment after it.
		busy := strings.Contains(string(text), "shared memory block") && strings.Contains(string(text), "still in use")
		if ctx.Err() != nil || attempt == startAttempts || !taken && !busy {
			return s.withLog(fmt.Errorf("wait for server on port %d: %w", n, err))
		}
		if busy {
			pause(ctx, attemptPause)
		}
	}
}

func (s *Server) settings(port int) []string {
	settings := []string{
		"listen_addresses=127.0.0.1",
		"port=" + strconv.Itoa(port),
		"unix_socket_directories=",
		"log_destination=stderr", // into our file
		"logging_collector=off",
		"log_timezone=UTC",
		"max_connections=500", // many programs share it in tests, with up to 20 each
		"shared_buffers=128MB",
		"timezone=UTC",
	}
	if s.cfg.FastUnsafe {
		settings = append(settings, "fsync=off", "full_page_writes=off", "synchronous_commit=off")
	}
	args := []string{"-D", s.data}
	for _, setting := range settings {
		args = append(args, "-c", setting)
	}
	return args
}

// ready returns when the server lets us in, has ended, or never will let us in.
func (s *Server) ready(ctx context.Context) error {
	// So early a refusal may come from another server, which took our port.
	doubtful := time.Now().Add(pingTimeout)
	for {
		err := ping(ctx, s.url)
		if err == nil {
			return nil
		}
		refusal, refused := errors.AsType[*pgconn.PgError](err)
		if refused && refusal.Code != "57P03" /* cannot_connect_now */ && time.Now().After(doubtful) {
			return err
		}
		select {
		case <-s.process.done:
			return fmt.Errorf("server ended: %s", s.process.cmd.ProcessState)
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(pingInterval):
		}
	}
}

func ping(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// run starts one of PostgreSQL's programs with its output in the log file,
// which it empties. The program gets none of our environment: PGDATA, PGTZ and
// the like would change what it does. When ctx ends it is killed.
func (s *Server) run(ctx context.Context, name string, args []string) (*process, error) {
	if err := s.writePrivate(s.logFile, ""); err != nil {
		return nil, fmt.Errorf("make log: %w", err)
	}
	log, err := os.OpenFile(s.logFile, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	defer log.Close() // the program has its own
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin.dir, name), args...)
	cmd.Dir = s.dir
	cmd.Env = []string{"HOME=" + s.dir, "LC_ALL=C", "PATH=/usr/local/bin:/usr/bin:/bin"}
	cmd.Stdout, cmd.Stderr = log, log
	// Its own process group: Ctrl-C in a terminal is for us, and we stop the
	// server when nobody needs it any more.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	if s.owner != nil {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: s.owner.uid, Gid: s.owner.gid}
	}
	p, err := startProcess(cmd)
	if s.owner != nil && errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("run %s in %s: %w: PostgreSQL does not run as root, and the user %s must be able to enter "+
			"both folders and those above them: choose a folder that everybody may enter", cmd.Path, s.dir, err, s.owner.name)
	}
	if err != nil {
		return nil, fmt.Errorf("run %s in %s: %w", cmd.Path, s.dir, err)
	}
	return p, nil
}

// close is Stop, and the end of a Start that failed at any point.
func (s *Server) close() error {
	if s.process != nil {
		s.process.stop()
		s.cfg.Logger.Info("postgres stopped", zap.String("dir", s.dir))
	}
	var err error
	if s.temporary && s.dir != "" {
		if err = os.RemoveAll(s.dir); err != nil {
			err = fmt.Errorf("embedded: remove temporary folder: %w", err)
		}
	}
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close()) // unlocks
	}
	return err
}

// withLog adds the end of the server's log to err.
func (s *Server) withLog(err error) error {
	b, readErr := os.ReadFile(s.logFile)
	if readErr != nil {
		return errors.Join(err, readErr)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	tail := strings.Join(lines[max(0, len(lines)-tailLines):], "\n")
	if s.temporary { // the file is about to go
		return fmt.Errorf("%w; end of its log:\n%s", err, tail)
	}
	return fmt.Errorf("%w; end of its log %s:\n%s", err, s.logFile, tail)
}

// writePrivate writes a file that only the server's user can read.
func (s *Server) writePrivate(name, content string) error {
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		return err
	}
	return s.own(name)
}

// own hands a file or folder over to the server's user.
func (s *Server) own(name string) error {
	if s.owner == nil {
		return nil
	}
	return os.Lchown(name, int(s.owner.uid), int(s.owner.gid))
}

// dataVersion returns the major version that made the data folder, 0 when
// there is none yet.
func dataVersion(data string) (int, error) {
	b, err := os.ReadFile(filepath.Join(data, "PG_VERSION"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read version of data folder: %w", err)
	}
	major, _, _ := strings.Cut(strings.TrimSpace(string(b)), ".") // "9.6"
	n, err := strconv.Atoi(major)
	if err != nil {
		return 0, fmt.Errorf("read version of data folder %s: %w", data, err)
	}
	return n, nil
}

// lockDir locks a folder for as long as the file is open, however the process
// ends. PostgreSQL's own lock would not do: it is stale after a kill, and is
// not there yet during initdb.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		holder, _ := os.ReadFile(f.Name()) // then the message has no number
		return nil, fmt.Errorf("folder %s is in use by process %s: stop that one, or choose another folder", dir, holder)
	}
	if err := errors.Join(f.Truncate(0), writeAt0(f, strconv.Itoa(os.Getpid()))); err != nil {
		return nil, errors.Join(fmt.Errorf("write lock: %w", err), f.Close())
	}
	return f, nil
}

func writeAt0(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

// sweep removes what killed runs left of their temporary servers. It does what
// it can: a folder that stays is in nobody's way.
func sweep(ctx context.Context, tmp string) {
	dirs, _ := filepath.Glob(filepath.Join(tmp, tempPrefix+"*")) // the pattern is ours
	for _, dir := range dirs {
		info, err := os.Lstat(dir)
		if err != nil || !info.IsDir() || time.Since(info.ModTime()) < sweepAge {
			continue
		}
		// The folder is for all users: others' folders, and links planted in
		// them, are not ours to open.
		if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Getuid() {
			continue
		}
		lock, err := lockDir(dir)
		if err != nil {
			continue
		}
		if stopOrphan(ctx, filepath.Join(dir, dataName)) == nil {
			_ = os.RemoveAll(dir)
		}
		_ = lock.Close()
	}
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
