//go:build unix

package embedded

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// helperDir makes the test binary a program that starts a server on this
// folder, prints its URL and process, and waits to be killed.
const helperDir = "AFLUENTE_EMBEDDED_HELPER_DIR"

func TestMain(m *testing.M) {
	if dir, ok := os.LookupEnv(helperDir); ok {
		s, err := Start(context.Background(), Config{Dir: dir, FastUnsafe: true})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(s.URL(), s.process.pid())
		select {}
	}
	os.Exit(m.Run())
}

// testDir returns a folder, not made yet, that the server's user can enter when we are root.
func testDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o755))
	require.NoError(t, os.Chmod(dir, 0o755))
	return filepath.Join(dir, "server")
}

func startServer(t *testing.T, cfg Config) *Server {
	t.Helper()
	cfg.FastUnsafe = true
	s, err := Start(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Stop()) })
	return s
}

func query[T any](t *testing.T, s *Server, sql string) T {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL())
	require.NoError(t, err)
	defer conn.Close(t.Context())
	var v T
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&v))
	return v
}

func exec1(t *testing.T, s *Server, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL())
	require.NoError(t, err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), sql)
	require.NoError(t, err)
}

// gone tells whether a process has ended, noticed by its parent or not.
func gone(pid int, data string) func() bool {
	return func() bool { return !serves(pid, data) }
}

func (h host) withDefaults() host {
	if h.dirs == nil {
		h.dirs = binDirs(installGlobs())
	}
	if h.fetch == nil {
		h.fetch = func(context.Context) (string, error) { return "", errors.New("no network") }
	}
	if h.port == nil {
		h.port = freePort
	}
	return h
}

func TestTemporaryServerLeavesNothing(t *testing.T) {
	t.Parallel()

	s := startServer(t, Config{})
	require.Equal(t, "afluente", query[string](t, s, "SELECT current_user"))
	require.True(t, query[bool](t, s, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"))
	require.Equal(t, "á", query[string](t, s, "SELECT lower('Á')"))
	for name, want := range map[string]string{
		"TimeZone": "UTC", "fsync": "off", "full_page_writes": "off", "listen_addresses": "127.0.0.1",
		"max_connections": "500", "shared_buffers": "128MB", "synchronous_commit": "off", "unix_socket_directories": "",
	} {
		require.Equal(t, want, query[string](t, s, fmt.Sprintf("SELECT current_setting('%s')", name)), name)
	}

	// A session that is open does not hold it up.
	conn, err := pgx.Connect(t.Context(), s.URL())
	require.NoError(t, err)
	defer conn.Close(t.Context())
	began := time.Now()
	require.NoError(t, s.Stop())
	require.Less(t, time.Since(began), 9*time.Second)
	require.NoError(t, s.Stop())
	require.ErrorIs(t, syscall.Kill(s.process.pid(), 0), syscall.ESRCH)
	require.NoDirExists(t, s.dir)
}

func TestPasswordIsNeeded(t *testing.T) {
	t.Parallel()

	s := startServer(t, Config{Dir: testDir(t)})
	u, err := url.Parse(s.URL())
	require.NoError(t, err)
	for _, user := range []*url.Userinfo{url.User("afluente"), url.UserPassword("afluente", "guess")} {
		u.User = user
		_, err = pgx.Connect(t.Context(), u.String())
		require.Error(t, err)
	}
	for name, want := range map[string]os.FileMode{dataName: 0o700, passwordName: 0o600, logName: 0o600} {
		info, err := os.Stat(filepath.Join(s.dir, name))
		require.NoError(t, err)
		require.Equal(t, want, info.Mode().Perm(), name)
	}
}

func TestTwoServersAtOnce(t *testing.T) {
	t.Parallel()

	a, b := startServer(t, Config{}), startServer(t, Config{})
	require.NotEqual(t, a.URL(), b.URL())
	exec1(t, a, "CREATE TABLE only_in_a ()")
	require.False(t, query[bool](t, b, "SELECT to_regclass('only_in_a') IS NOT NULL"))
	require.NoError(t, a.Stop())
	require.Equal(t, 1, query[int](t, b, "SELECT 1"))
}

func TestDataSurvivesRestart(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	s := startServer(t, Config{Dir: dir})
	exec1(t, s, "CREATE TABLE kept AS SELECT 42 AS n")
	require.NoError(t, s.Stop())
	s = startServer(t, Config{Dir: dir})
	require.Equal(t, 42, query[int](t, s, "SELECT n FROM kept"))
	require.FileExists(t, s.logFile)
}

func TestSecondStartOnFolderNamesTheFirst(t *testing.T) {
	t.Parallel()

	s := startServer(t, Config{Dir: testDir(t)})
	_, err := Start(t.Context(), Config{Dir: s.dir})
	require.ErrorContains(t, err, fmt.Sprintf("folder %s is in use by process %d", s.dir, os.Getpid()))
	require.Equal(t, 1, query[int](t, s, "SELECT 1"))
}

func TestHalfMadeDataFolderIsReplaced(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	half := filepath.Join(dir, initPrefix+"1")
	require.NoError(t, os.Mkdir(dir, 0o755))
	require.NoError(t, os.MkdirAll(filepath.Join(half, "base"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(half, "PG_VERSION"), []byte("15\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, passwordName), []byte("old"), 0o600))
	s := startServer(t, Config{Dir: dir})
	require.Equal(t, 1, query[int](t, s, "SELECT 1"))
	require.NoDirExists(t, half)
}

func TestStartEndsWithContext(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // in the middle of initdb
	defer cancel()
	_, err := Start(ctx, Config{Dir: dir, FastUnsafe: true})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	startServer(t, Config{Dir: dir})
}

func TestKilledProgramTakesItsServerAlong(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	data := filepath.Join(dir, dataName)
	helper, pid := startHelper(t, dir)
	require.False(t, gone(pid, data)())

	_, err := Start(t.Context(), Config{Dir: dir})
	require.ErrorContains(t, err, fmt.Sprintf("in use by process %d:", helper.Process.Pid))

	require.NoError(t, helper.Process.Kill())
	_ = helper.Wait()
	if runtime.GOOS == "linux" {
		require.Eventually(t, gone(pid, data), 10*time.Second, 10*time.Millisecond)
	}
	s := startServer(t, Config{Dir: dir})
	require.Equal(t, 7, query[int](t, s, "SELECT 7"))
	require.True(t, gone(pid, data)())
}

// The next start need not wait for the server of the killed program to be gone
// by itself, and finds a way where that server was killed too.
func TestKilledServerDoesNotBlockTheNext(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	helper, pid := startHelper(t, dir)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	require.NoError(t, helper.Process.Kill())
	_ = helper.Wait()
	s := startServer(t, Config{Dir: dir})
	require.Equal(t, 7, query[int](t, s, "SELECT 7"))
}

func TestKillDuringInitdbDoesNotBlockTheNext(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	helper := exec.CommandContext(t.Context(), os.Args[0])
	helper.Env = append(os.Environ(), helperDir+"="+dir)
	require.NoError(t, helper.Start())
	require.Eventually(t, func() bool {
		made, err := filepath.Glob(filepath.Join(dir, initPrefix+"*", "PG_VERSION"))
		return err == nil && len(made) == 1
	}, 30*time.Second, 5*time.Millisecond)
	require.NoError(t, helper.Process.Kill())
	_ = helper.Wait()
	require.NoDirExists(t, filepath.Join(dir, dataName))
	s := startServer(t, Config{Dir: dir})
	require.Equal(t, 7, query[int](t, s, "SELECT 7"))
}

func startHelper(t *testing.T, dir string) (*exec.Cmd, int) {
	t.Helper()
	helper := exec.CommandContext(t.Context(), os.Args[0])
	helper.Env = append(os.Environ(), helperDir+"="+dir)
	out, err := helper.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, helper.Start())
	var address string
	var pid int
	_, err = fmt.Fscan(out, &address, &pid)
	require.NoError(t, err)
	return helper, pid
}

func TestOrphanIsStopped(t *testing.T) {
	t.Parallel()

	s := startServer(t, Config{Dir: testDir(t)})
	require.NoError(t, stopOrphan(t.Context(), s.data)) // as where the system does not stop it
	require.Eventually(t, gone(s.process.pid(), s.data), time.Second, time.Millisecond)
	require.NoError(t, s.Stop())
}

func TestNumberOfDeadServerTakenByAnotherProcess(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	s := startServer(t, Config{Dir: dir})
	require.NoError(t, s.Stop())
	// A process of the server's user, as for one of another PostgreSQL sees no danger.
	other := exec.CommandContext(t.Context(), "sleep", "600")
	if s.owner != nil {
		other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: s.owner.uid, Gid: s.owner.gid}}
	}
	other.Dir = "/"
	require.NoError(t, other.Start())
	stale := fmt.Sprintf("%d\n%s\n1700000000\n5432\n\n127.0.0.1\n         1         1\nready   \n", other.Process.Pid, s.data)
	require.NoError(t, s.writePrivate(filepath.Join(s.data, "postmaster.pid"), stale))
	startServer(t, Config{Dir: dir})
	require.NoError(t, other.Process.Kill()) // it was left alone
	require.Error(t, other.Wait())
}

func TestPortTakenMeanwhileIsReplaced(t *testing.T) {
	t.Parallel()

	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	asked := 0
	h := host{port: func() (int, error) {
		asked++
		if asked == 1 {
			return l.Addr().(*net.TCPAddr).Port, nil
		}
		return freePort()
	}}
	s, err := start(t.Context(), Config{FastUnsafe: true}, h.withDefaults())
	require.NoError(t, err)
	require.Equal(t, 2, asked)
	require.NoError(t, s.Stop())
}

func TestNoPostgresAnywhereNamesTheWaysOut(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	_, err := start(t.Context(), Config{Dir: dir}, host{dirs: []string{t.TempDir()}}.withDefaults())
	require.ErrorContains(t, err, "no network")
	require.ErrorContains(t, err, "set DATABASE_URL")
	require.ErrorContains(t, err, "install PostgreSQL 15 or newer")
	require.ErrorContains(t, err, "network access to Maven Central")
}

func TestDataOfAnotherVersionIsRefused(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	data := filepath.Join(dir, dataName)
	require.NoError(t, os.Mkdir(dir, 0o755))
	require.NoError(t, os.Mkdir(data, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte("9.6\n"), 0o600))
	h := host{}.withDefaults()
	bin, err := h.find(t.Context(), 0)
	require.NoError(t, err)
	_, err = start(t.Context(), Config{Dir: dir}, h)
	require.ErrorContains(t, err, fmt.Sprintf("folder %s was made by PostgreSQL 9, but this machine has PostgreSQL %d", data, bin.major))
}

func TestServerThatCannotStartShowsItsLog(t *testing.T) {
	t.Parallel()

	dir := testDir(t)
	s := startServer(t, Config{Dir: dir})
	require.NoError(t, s.Stop())
	require.NoError(t, s.writePrivate(filepath.Join(s.data, "postgresql.conf"), "no_such_setting = 1\n"))
	_, err := Start(t.Context(), Config{Dir: dir})
	require.ErrorContains(t, err, "no_such_setting")
	require.ErrorContains(t, err, s.logFile)
}

func TestFolderBelowPrivateOneIsExplainedToRoot(t *testing.T) {
	t.Parallel()

	if os.Getuid() != 0 {
		t.Skip("only root changes the user")
	}
	dir := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o700))
	_, err := Start(t.Context(), Config{Dir: dir})
	require.ErrorContains(t, err, "must be able to enter")
	require.ErrorContains(t, err, dir)
}

func TestSweepRemovesWhatKilledRunsLeft(t *testing.T) {
	t.Parallel()

	tmp := t.TempDir()
	dir := func(name string, age time.Duration) string {
		dir := filepath.Join(tmp, name)
		require.NoError(t, os.Mkdir(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, lockName), nil, 0o600))
		then := time.Now().Add(-age)
		require.NoError(t, os.Chtimes(dir, then, then))
		return dir
	}
	left, young := dir(tempPrefix+"left", time.Hour), dir(tempPrefix+"young", 0)
	used, foreign := dir(tempPrefix+"used", time.Hour), dir("other", time.Hour)
	lock, err := lockDir(used)
	require.NoError(t, err)
	defer lock.Close()
	sweep(t.Context(), tmp)
	require.NoDirExists(t, left)
	require.DirExists(t, young)
	require.DirExists(t, used)
	require.DirExists(t, foreign)
}

func TestFind(t *testing.T) {
	t.Parallel()

	root := t.TempDir()
	install := func(version string) string {
		bin := filepath.Join(root, version, "bin")
		require.NoError(t, os.MkdirAll(bin, 0o755))
		script := "#!/bin/sh\necho 'postgres (PostgreSQL) " + version + "'\n"
		for _, name := range []string{"initdb", "postgres"} {
			require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755))
		}
		return bin
	}
	v9, v14, v15, v16 := install("9.6.24"), install("14.18"), install("15.13 (Debian)"), install("16beta1")
	noInitdb := install("17.1")
	require.NoError(t, os.Remove(filepath.Join(noInitdb, "initdb")))
	found := binDirs([]string{filepath.Join(root, "*", "bin")})
	require.Subset(t, found, []string{v9, v14, v15, v16, noInitdb})

	for name, tc := range map[string]struct {
		dirs  []string
		fetch string // "" fails
		want  int
		dir   string // "" finds nothing
		major int
	}{
		"new folder takes the newest":             {dirs: []string{v15, v16, v9, noInitdb}, dir: v16, major: 16},
		"old folder takes its version":            {dirs: []string{v16, v15}, want: 15, dir: v15, major: 15},
		"old folder without its version":          {dirs: []string{v15, v16}, want: 17, dir: v16, major: 16},
		"folder of the fetched version":           {dirs: []string{v15}, fetch: "f", want: fetchedMajor, dir: "f", major: fetchedMajor},
		"folder of the fetched, which is lost":    {dirs: []string{v15}, want: fetchedMajor, dir: v15, major: 15},
		"too old is fetched":                      {dirs: []string{v9, v14}, fetch: "f", dir: "f", major: fetchedMajor},
		"too old without network":                 {dirs: []string{v9, v14}},
		"installed is taken though one is cached": {dirs: []string{v15}, fetch: "f", dir: v15, major: 15},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			h := host{dirs: tc.dirs, fetch: func(context.Context) (string, error) {
				if tc.fetch == "" {
					return "", errors.New("no network")
				}
				return tc.fetch, nil
			}}
			bin, err := h.find(t.Context(), tc.want)
			if tc.dir == "" {
				require.ErrorContains(t, err, "no network")
				return
			}
			require.NoError(t, err)
			require.Equal(t, binaries{dir: tc.dir, major: tc.major}, bin)
		})
	}
}

// binArchive is a .txz with bin/initdb, bin/pg_ctl and bin/postgres, scripts
// that exit with 1.
const binArchive = "/Td6WFoAAAFpIt42AgAhARwAAAAQz1jM4Cf/AJFdADEaShsFkZA3OlG9V3Gz1uEhGuz1CE62mZbJgDd14tBBcXt1F7T9QGo1/ahYeFAFZ+4sSithzwt4RqJcf8mj5tDaqWdEBHPW7gelqi/GapphzHIvWd+xe5Ub8A2HrjmzzKQVqbWZ0h0zAr7dqy+rCPMtfMjLIItkJSxJxDVEd8kXu1JSMxyRBs9cpMDsxYCleQAAAAAA6X7rsAABqQGAUAAAwCXDQT4wDYsCAAAAAAFZWg=="

func TestFetchUnpacksWholeAndOnce(t *testing.T) {
	t.Parallel()

	asked := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, ".sha256") {
			http.NotFound(w, r)
			return
		}
		asked++
		archive, err := base64.StdEncoding.DecodeString(binArchive)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		var jar bytes.Buffer
		z := zip.NewWriter(&jar)
		f, err := z.Create("postgres.txz")
		if err == nil {
			_, err = io.Copy(f, bytes.NewReader(archive))
		}
		if err := errors.Join(err, z.Close()); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Length", strconv.Itoa(jar.Len()))
		_, _ = w.Write(jar.Bytes())
	}))
	defer srv.Close()
	cache := t.TempDir()
	for range 2 {
		bin, err := fetchInto(t.Context(), cache, embeddedpostgres.DefaultConfig().BinaryRepositoryURL(srv.URL))
		require.NoError(t, err)
		require.True(t, complete(bin))
	}
	require.Equal(t, 1, asked)
	left, err := os.ReadDir(cache)
	require.NoError(t, err)
	require.Len(t, left, 1)
}

func TestFetchWithoutNetwork(t *testing.T) {
	t.Parallel()

	cache := t.TempDir()
	_, err := fetchInto(t.Context(), cache, embeddedpostgres.DefaultConfig().BinaryRepositoryURL("http://127.0.0.1:1"))
	require.ErrorContains(t, err, "http://127.0.0.1:1")
	left, err := os.ReadDir(cache)
	require.NoError(t, err)
	require.Empty(t, left)
}
