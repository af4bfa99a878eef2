//go:build unix

package embedded

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// stopStep is a signal and how long the server has to act on it.
type stopStep struct {
	signal  syscall.Signal
	timeout time.Duration
}

// gentleStops are the ways of stopping a server before SIGKILL, in order.
func gentleStops() []stopStep {
	return []stopStep{
		{syscall.SIGINT, 10 * time.Second}, // fast: ends the sessions, writes a checkpoint
		{syscall.SIGQUIT, 8 * time.Second}, // immediate: the next start recovers; after 5 s the server kills its sessions
	}
}

// process is a program of PostgreSQL that we started.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the process is gone
	err  error         // how it ended; to be read after done
}

// startProcess starts cmd so that it ends when we do, where the system can do
// that. Linux sends the signal when the thread that started the process ends,
// not the program (https://go.dev/issue/27505), so one thread starts it and
// does nothing else until it is gone.
func startProcess(cmd *exec.Cmd) (*process, error) {
	endWithParent(cmd.SysProcAttr)
	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// stop returns when the process is gone.
func (p *process) stop() {
	for _, step := range gentleStops() {
		_ = p.cmd.Process.Signal(step.signal) // gone already: done is closed
		select {
		case <-p.done:
			return
		case <-time.After(step.timeout):
		}
	}
	_ = p.cmd.Process.Kill()
	<-p.done
}

// owner is the user as whom the server runs when we are root.
type owner struct {
	name     string
	uid, gid uint32
}

// findOwner returns nil when we are not root.
func findOwner(data string) (*owner, error) {
	if os.Getuid() != 0 {
		return nil, nil //nolint:nilnil // nobody to change to
	}
	info, err := os.Stat(data)
	if err == nil {
		if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 {
			return &owner{name: "number " + strconv.Itoa(int(st.Uid)), uid: st.Uid, gid: st.Gid}, nil
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("find owner of data folder: %w", err)
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		u, err = user.Lookup("nobody")
	}
	if err != nil {
		return nil, fmt.Errorf("find a user for the server, which does not run as root: %w", err)
	}
	uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
	gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(uidErr, gidErr); err != nil {
		return nil, fmt.Errorf("read user %s: %w", u.Username, err)
	}
	return &owner{name: u.Username, uid: uint32(uid), gid: uint32(gid)}, nil
}

// stopOrphan stops the server that a killed run left in a data folder, and
// sees to it that a stale postmaster.pid does not keep the next one from
// starting. The caller holds the folder's lock, so the server is nobody's.
func stopOrphan(ctx context.Context, data string) error {
	pid := readPID(data)
	if pid == 0 || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return nil // PostgreSQL clears a dead server's file away
	}
	for _, step := range gentleStops() {
		deadline := time.Now().Add(step.timeout)
		if serves(pid, data) {
			_ = syscall.Kill(pid, step.signal) // where it may not be stopped: told below
		}
		for serves(pid, data) && time.Now().Before(deadline) && ctx.Err() == nil {
			pause(ctx, pingInterval)
		}
	}
	if serves(pid, data) {
		return errors.Join(ctx.Err(), fmt.Errorf("folder %s is in use by the server of an earlier run, process %d: stop that one",
			data, pid))
	}
	return adoptPIDFile(data, pid)
}

// adoptPIDFile puts our own number into a postmaster.pid whose number now
// belongs to an unrelated process, as is common after the restart of a
// container. PostgreSQL would take that process for a server, but passes over
// the number of its parent (CreateLockFile in miscinit.c). Removing the file
// would also remove PostgreSQL's check that the dead server's sessions are gone.
func adoptPIDFile(data string, pid int) error {
	if readPID(data) != pid {
		return nil
	}
	name := filepath.Join(data, "postmaster.pid")
	b, err := os.ReadFile(name)
	if err != nil {
		return fmt.Errorf("read lock of earlier server: %w", err)
	}
	_, rest, _ := strings.Cut(string(b), "\n")
	if err := os.WriteFile(name, []byte(strconv.Itoa(os.Getpid())+"\n"+rest), 0o600); err != nil {
		return fmt.Errorf("mend lock of earlier server: %w", err)
	}
	return nil
}

// readPID returns the process that serves a data folder according to its
// postmaster.pid, 0 when there is none.
func readPID(data string) int {
	b, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil || pid <= 0 {
		return 0
	}
	return pid
}

// serves tells whether a process is the server of a data folder. It asks for
// the command line: the number alone may be another process's by now, or that
// of a dead one whose parent has not noticed.
func serves(pid int, data string) bool {
	if pid == 0 {
		return false
	}
	if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
		args := strings.Split(string(b), "\x00")
		return filepath.Base(args[0]) == "postgres" && slices.Contains(args, data)
	}
	b, err := exec.Command("ps", "-o", "args=", "-p", strconv.Itoa(pid)).Output() //nolint:noctx // returns at once
	return err == nil && bytes.Contains(b, []byte("postgres -D "+data+" "))
}
