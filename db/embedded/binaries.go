//go:build unix

package embedded

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

const (
	minMajor = 15

	fetchedMajor   = 18
	fetchedVersion = embeddedpostgres.V18
)

// host is what a start takes from the machine.
type host struct {
	dirs  []string // folders that may hold initdb and postgres; the first wins among equal versions
	fetch func(ctx context.Context) (string, error)
	port  func() (int, error)
}

// binaries is a folder with initdb and postgres.
type binaries struct {
	dir   string
	major int
}

func installGlobs() []string {
	return []string{
		"/usr/lib/postgresql/*/bin", // Debian
		"/usr/pgsql-*/bin",          // Red Hat
		"/usr/local/pgsql/bin",      // built from source
		"/opt/homebrew/opt/postgresql*/bin",
		"/usr/local/opt/postgresql*/bin", // Homebrew on Intel
		"/Applications/Postgres.app/Contents/Versions/*/bin",
	}
}

// binDirs returns the folders that match the patterns, then the one on PATH.
func binDirs(globs []string) []string {
	var dirs []string
	for _, glob := range globs {
		found, _ := filepath.Glob(glob) // the patterns are ours
		dirs = append(dirs, found...)
	}
	if name, err := exec.LookPath("postgres"); err == nil {
		dirs = append(dirs, filepath.Dir(name))
	}
	return dirs
}

// find returns the programs of the major version that made a data folder, or
// of the newest where there is no such version; want is 0 for a new folder.
// With none installed it fetches them.
func (h host) find(ctx context.Context, want int) (binaries, error) {
	var best binaries
	var broken []error
	for _, dir := range h.dirs {
		if !complete(dir) {
			continue
		}
		major, err := majorOf(ctx, dir)
		if err != nil {
			broken = append(broken, err)
			continue
		}
		if major >= minMajor && major == want {
			return binaries{dir: dir, major: major}, nil
		}
		if major >= minMajor && major > best.major {
			best = binaries{dir: dir, major: major}
		}
	}
	if best.major != 0 && want != fetchedMajor {
		return best, nil
	}
	dir, err := h.fetch(ctx)
	if err == nil {
		return binaries{dir: dir, major: fetchedMajor}, nil
	}
	if best.major != 0 {
		return best, nil
	}
	if ctx.Err() != nil {
		return binaries{}, fmt.Errorf("fetch PostgreSQL: %w", err)
	}
	return binaries{}, fmt.Errorf("find PostgreSQL: none of version %d or newer is installed, and fetching one did not work (%w): "+
		"set DATABASE_URL to a server that runs already; or install PostgreSQL %d or newer; "+
		"or give this machine network access to Maven Central, so that embedded-postgres can fetch it",
		minMajor, errors.Join(append(broken, err)...), minMajor)
}

func complete(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return false
		}
	}
	return true
}

func majorOf(ctx context.Context, dir string) (int, error) {
	name := filepath.Join(dir, "postgres")
	out, err := exec.CommandContext(ctx, name, "--version").Output()
	if err != nil {
		return 0, fmt.Errorf("run %s --version: %w", name, err)
	}
	// "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)", "postgres (PostgreSQL) 19beta1"
	_, version, _ := strings.Cut(string(out), "(PostgreSQL) ")
	digits := len(version) - len(strings.TrimLeft(version, "0123456789"))
	major, err := strconv.Atoi(version[:digits])
	if err != nil {
		return 0, fmt.Errorf("read version of %s from %q: %w", name, out, err)
	}
	return major, nil
}

// fetchBinaries returns the folder of the fetched programs, which it keeps in
// the user's cache. The user that the server runs as when we are root could
// not enter root's.
func fetchBinaries(ctx context.Context) (string, error) {
	cache := "/var/cache"
	if os.Getuid() != 0 {
		var err error
		if cache, err = os.UserCacheDir(); err != nil {
			return "", fmt.Errorf("find cache: %w", err)
		}
	}
	return fetchInto(ctx, filepath.Join(cache, "afluente"), embeddedpostgres.DefaultConfig())
}

// fetchInto returns early when ctx ends; the fetch itself cannot be broken off
// and goes on, harmlessly, until it is done or the program ends.
func fetchInto(ctx context.Context, cache string, from embeddedpostgres.Config) (string, error) {
	home := filepath.Join(cache, "postgresql-"+string(fetchedVersion))
	bin := filepath.Join(home, "bin")
	if complete(bin) {
		return bin, nil
	}
	done := make(chan error, 1)
	go func() { done <- fetch(cache, home, from) }()
	select {
	case err := <-done:
		return bin, err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// fetch puts the programs into the folder home, whole or not at all.
//
// embedded-postgres fetches and unpacks only as part of a start. The start it
// is given here cannot succeed, as its data folder holds nothing but a version
// (and as root none can); what counts is what it has unpacked until then. It
// leaves an empty embedded_postgres_log file in os.TempDir each time.
func fetch(cache, home string, from embeddedpostgres.Config) (err error) {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return fmt.Errorf("make cache: %w", err)
	}
	tmp, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return fmt.Errorf("make cache: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	data, unpacked := filepath.Join(tmp, "data"), filepath.Join(tmp, "unpacked")
	if err := os.Mkdir(data, 0o700); err != nil {
		return fmt.Errorf("make cache: %w", err)
	}
	if err := os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte(strconv.Itoa(fetchedMajor)), 0o600); err != nil {
		return fmt.Errorf("make cache: %w", err)
	}
	pg := embeddedpostgres.NewDatabase(from.
		BinariesPath(unpacked).
		CachePath(filepath.Join(tmp, "archive")).
		DataPath(data).
		Logger(io.Discard).
		Port(0). // it first tries to listen on it, which this always lets it
		RuntimePath(filepath.Join(tmp, "runtime")).
		Version(fetchedVersion))
	startErr := pg.Start()
	if startErr == nil {
		startErr = pg.Stop()
	}
	if !complete(filepath.Join(unpacked, "bin")) {
		return fmt.Errorf("fetch PostgreSQL %s: %w", fetchedVersion, startErr)
	}
	if err := os.Rename(unpacked, home); err != nil && !complete(filepath.Join(home, "bin")) {
		return fmt.Errorf("keep fetched PostgreSQL: %w", err)
	}
	return nil
}
