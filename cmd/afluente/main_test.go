package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
	"afluente/jobs/sandbox"
)

// asProgram makes the test binary be the program itself, so that tests can
// start, stop and kill real processes.
const asProgram = "AFLUENTE_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(mainExit())
	}
	os.Exit(dbtest.Main(m))
}

// process is a running program.
type process struct {
	command *exec.Cmd
	stdout  *lines
	stderr  *lines
	done    chan struct{}
	err     error // once done
}

// start runs the program with nothing in its environment but env.
func start(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	executable, err := os.Executable()
	require.NoError(t, err)
	p := &process{
		command: exec.CommandContext(context.WithoutCancel(t.Context()), executable, args...),
		stdout:  newLines(),
		stderr:  newLines(),
		done:    make(chan struct{}),
	}
	p.command.Env = append([]string{
		asProgram + "=1", "PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "TMPDIR=" + os.Getenv("TMPDIR"),
	}, env...)
	p.command.Stdout, p.command.Stderr = p.stdout, p.stderr
	require.NoError(t, p.command.Start())
	go func() {
		defer close(p.done)
		p.err = p.command.Wait()
	}()
	t.Cleanup(func() {
		_ = p.command.Process.Kill()
		<-p.done
		if t.Failed() {
			t.Logf("process %d, %s:\n%s%s", p.command.Process.Pid, strings.Join(args, " "), p.stdout, p.stderr)
		}
	})
	return p
}

// stop interrupts the program and wants it to end well.
func (p *process) stop(t *testing.T) {
	t.Helper()
	require.NoError(t, p.command.Process.Signal(os.Interrupt))
	p.wait(t)
	require.NoError(t, p.err)
}

func (p *process) wait(t *testing.T) {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(time.Minute):
		require.FailNow(t, "the program does not end")
	}
}

// lines is output that one can wait for.
type lines struct {
	mu      sync.Mutex
	text    bytes.Buffer
	written chan struct{} // closed and replaced by each write
}

func newLines() *lines { return &lines{written: make(chan struct{})} }

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.written)
	l.written = make(chan struct{})
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// await returns the first line with the given text.
func (l *lines) await(t *testing.T, text string) string {
	t.Helper()
	timeout := time.After(2 * time.Minute)
	for {
		l.mu.Lock()
		scanner, written := bufio.NewScanner(bytes.NewReader(l.text.Bytes())), l.written
		l.mu.Unlock()
		for scanner.Scan() {
			if strings.Contains(scanner.Text(), text) {
				return scanner.Text()
			}
		}
		select {
		case <-written:
		case <-timeout:
			require.FailNow(t, "no line with "+text)
		}
	}
}

// runCommand runs a command in this process and returns what it printed.
func runCommand(t *testing.T, databaseURL string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errOut bytes.Buffer
	code = execute(t.Context(), args, environment{
		getenv: func(name string) string {
			if name == "DATABASE_URL" {
				return databaseURL
			}
			return ""
		},
		stdin:  strings.NewReader(""),
		stdout: &out,
		stderr: &errOut,
	})
	return code, out.String(), errOut.String()
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	return response.StatusCode, string(body)
}

// eventually asks until ok says yes.
func eventually(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	timeout := time.After(within)
	for !ok() {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-timeout:
			require.FailNow(t, "not within "+within.String()+": "+what)
		}
	}
}

func number(t *testing.T, pool *pgxpool.Pool, query string) int {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(t.Context(), query).Scan(&n))
	return n
}

// address returns the host:port in a "serving" log line, JSON or not.
func address(t *testing.T, line string) string {
	t.Helper()
	var fields struct {
		Address string `json:"address"`
	}
	_, object, found := strings.Cut(line, "{")
	require.True(t, found, line)
	require.NoError(t, json.Unmarshal([]byte("{"+object), &fields))
	return fields.Address
}

// world is a database with the demo tenant and the systems outside.
type world struct {
	url      string
	pool     *pgxpool.Pool
	waha     *sandbox.WAHA
	receiver *sandbox.Receiver
	settings []string // more of each process's environment
	free     func()   // gives back the slot of a test of chaos
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldOn(t, dbtest.URL(t))
}

// newWorldOn makes a world in a migrated database.
func newWorldOn(t *testing.T, url string) *world {
	t.Helper()
	w := &world{url: url}
	config, err := pgxpool.ParseConfig(w.url)
	require.NoError(t, err)
	w.pool = dbtest.Pool(t, config)
	w.waha, err = sandbox.StartWAHA(t.Context(), sandbox.Config{Addr: "127.0.0.1:0", Secret: demoAPIKey})
	require.NoError(t, err)
	t.Cleanup(w.waha.Close)
	w.receiver, err = sandbox.StartReceiver(t.Context(), sandbox.Config{Addr: "127.0.0.1:0", Secret: demoSecret})
	require.NoError(t, err)
	t.Cleanup(w.receiver.Close)
	require.NoError(t, setUpDemo(t.Context(), w.pool, w.receiver.URL()))
	_, err = w.pool.Exec(t.Context(), "UPDATE webhook_subscriptions SET rate_per_second = 1000, max_concurrent = 100")
	require.NoError(t, err)
	return w
}

// environ is the environment of a process in this world, whose webhooks go to this
// machine.
func (w *world) environ(more ...string) []string {
	return append([]string{
		"DATABASE_URL=" + w.url, "AFLUENTE_WEBHOOK_KEYS=" + demoWebhookKey, "AFLUENTE_WEBHOOK_ALLOWED_CIDRS=127.0.0.0/8",
		"AFLUENTE_JWT_SECRET=" + testSecret,
	}, slices.Concat(w.settings, more)...)
}

// serve starts a process that works on the world's database, and waits for it.
func (w *world) serve(t *testing.T, args ...string) (p *process, at string) {
	t.Helper()
	p = start(t, w.environ("WAHA_URL="+w.waha.URL(), "WAHA_API_KEY="+demoAPIKey), append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)...)
	return p, address(t, p.stderr.await(t, `"serving"`))
}

// queueMessages inserts n demo messages, whose trigger emits message.queued,
// in one transaction.
func (w *world) queueMessages(t *testing.T, n int) {
	t.Helper()
	_, err := w.pool.Exec(t.Context(), "INSERT INTO demo_messages (body) SELECT 'hello ' || i FROM generate_series(1, $1) AS i", n)
	require.NoError(t, err)
}

// requireAllOnce checks that n queued messages had every side effect exactly
// once: two events each, one job for each pair of event and consumer, one
// message at WAHA, and each of the two events once at the receiver.
func (w *world) requireAllOnce(t *testing.T, n int) {
	t.Helper()
	require.Equal(t, 2*n, number(t, w.pool, "SELECT count(*) FROM event_log"))
	require.Equal(t, 2*n, number(t, w.pool, "SELECT count(*) FROM event_log WHERE status = 'done'"))
	require.Equal(t, n, number(t, w.pool, `SELECT count(*) FROM event_log WHERE event_type = 'message.queued'
		AND cardinality(consumed_by) = 2 AND consumed_by @> '{webhook-dispatch-worker,whatsapp-send-worker}'`))
	require.Equal(t, n, number(t, w.pool, `SELECT count(*) FROM event_log WHERE event_type = 'message.sent'
		AND consumed_by = '{webhook-dispatch-worker}'`))
	require.Equal(t, 3*n, number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE metadata ? 'event_id'"))
	require.Equal(t, 3*n, number(t, w.pool, `SELECT count(*) FROM (
		SELECT DISTINCT metadata ->> 'event_id', kind FROM river.river_job WHERE metadata ? 'event_id') AS jobs`))
	require.Len(t, w.waha.Sent(), n)
	require.Len(t, w.receiver.Accepted(), 2*n)
}

func (w *world) awaitDone(t *testing.T, n int, within time.Duration) {
	t.Helper()
	eventually(t, within, fmt.Sprintf("%d messages done", n), func() bool {
		return number(t, w.pool, "SELECT count(*) FROM event_log WHERE status = 'done'") == 2*n &&
			number(t, w.pool, "SELECT count(*) FROM webhook_deliveries WHERE state = 'succeeded'") == 2*n
	})
}

func TestRolledBackTransactionLeavesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, _ := w.serve(t)

	tx, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "INSERT INTO demo_messages (body) VALUES ('never')")
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	w.queueMessages(t, 1)

	w.awaitDone(t, 1, time.Minute)
	w.requireAllOnce(t, 1)
	require.Equal(t, "hello 1", w.waha.Sent()[0].Text)
	p.stop(t)
}

func TestThreeProcessesDoEachThingOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 3 {
		w.serve(t, "--batch", "50")
	}
	w.queueMessages(t, 1000)
	w.awaitDone(t, 1000, 2*time.Minute)
	w.requireAllOnce(t, 1000)
	require.Zero(t, w.waha.Duplicates())
	for delivery, times := range w.receiver.Accepted() {
		require.Equal(t, 1, times, delivery)
	}
}

// A killed process may have sent a message without having said so. It is sent
// again then, which the idempotency keys make harmless.
func TestKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.waha.SetFault(sandbox.Fault{Delay: 20 * time.Millisecond})
	victim, _ := w.serve(t, "--batch", "50")
	w.queueMessages(t, 1000)
	require.NoError(t, w.waha.AwaitCalls(t.Context(), 100))
	require.NoError(t, victim.command.Process.Kill())
	victim.wait(t)
	require.Less(t, number(t, w.pool, "SELECT count(*) FROM event_log WHERE status = 'done'"), 2000, "killed too late")
	w.waha.ClearFault()

	for range 2 {
		w.serve(t, "--batch", "50")
	}
	w.awaitDone(t, 1000, 3*time.Minute)
	w.requireAllOnce(t, 1000)
}

func TestLateCommitIsNotLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(t)
	late, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = late.Exec(t.Context(), "INSERT INTO demo_messages (body) VALUES ('late')")
	require.NoError(t, err)
	w.queueMessages(t, 100)
	w.awaitDone(t, 100, time.Minute)
	require.NoError(t, late.Commit(t.Context()))
	w.awaitDone(t, 101, time.Minute)
	w.requireAllOnce(t, 101)
}

func TestSplitRolesWorkTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.serve(t, "--no-bridge", "--queues", "whatsapp")
	w.serve(t, "--no-bridge", "--queues", "webhooks,webhook-deliveries")
	w.queueMessages(t, 10)
	require.Zero(t, number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE metadata ? 'event_id'"))
	w.serve(t, "--queues", "")
	w.awaitDone(t, 10, time.Minute)
	w.requireAllOnce(t, 10)
}

func TestRiverUIRetryMakesTheEventDone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.waha.SetFault(sandbox.Fault{Status: http.StatusBadRequest})
	_, address := w.serve(t)
	w.queueMessages(t, 1)
	eventually(t, time.Minute, "dead event", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM event_log WHERE status = 'dead' AND 'webhook-dispatch-worker' = ANY (consumed_by)") == 1
	})
	var job int64
	var lastError string
	require.NoError(t, w.pool.QueryRow(t.Context(),
		"SELECT id FROM river.river_job WHERE state = 'cancelled'").Scan(&job))
	require.NoError(t, w.pool.QueryRow(t.Context(), "SELECT last_error FROM event_log WHERE status = 'dead'").Scan(&lastError))
	require.Contains(t, lastError, "whatsapp-send-worker: ")
	require.Contains(t, lastError, "400")

	w.waha.ClearFault()
	retry := func(headers ...string) int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
			"http://"+address+"/riverui/api/jobs/retry", strings.NewReader(fmt.Sprintf(`{"ids":["%d"]}`, job)))
		require.NoError(t, err)
		for i := 0; i < len(headers); i += 2 {
			request.Header.Set(headers[i], headers[i+1])
		}
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode
	}
	require.Equal(t, http.StatusForbidden, retry("Sec-Fetch-Site", "cross-site", "Content-Type", "text/plain"))
	require.Equal(t, http.StatusOK, retry("Content-Type", "application/json"))
	eventually(t, time.Minute, "event done", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM event_log WHERE event_type = 'message.queued' AND status = 'done'") == 1
	})
	require.Len(t, w.waha.Sent(), 1)
}

func TestHTTPAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, address := w.serve(t, "--ui-user", "ada", "--ui-password", "hush-hush")

	code, _ := get(t, "http://"+address+"/riverui/")
	require.Equal(t, http.StatusUnauthorized, code)
	code, _ = get(t, "http://ada:wrong@"+address+"/riverui/api/states")
	require.Equal(t, http.StatusUnauthorized, code)
	code, page := get(t, "http://ada:hush-hush@"+address+"/riverui/")
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, page, "<title>River</title>")
	code, _ = get(t, "http://ada:hush-hush@"+address+"/riverui/api/states")
	require.Equal(t, http.StatusOK, code)
	code, _ = get(t, "http://"+address+"/healthz")
	require.Equal(t, http.StatusOK, code)
	eventually(t, time.Minute, "a leader", func() bool {
		code, _ = get(t, "http://"+address+"/readyz")
		return code == http.StatusOK
	})
	p.stop(t)
	require.NotContains(t, p.stderr.String(), "hush-hush")
}

func TestDevShowsTheProduct(t *testing.T) {
	t.Parallel()
	p := start(t, []string{"DATABASE_URL=" + dbtest.Empty(t)}, "dev", "--listen", "127.0.0.1:0")
	psql := p.stdout.await(t, "psql '")
	address := address(t, p.stderr.await(t, "\tserving\t"))

	conn, err := pgx.Connect(t.Context(), strings.Split(psql, "'")[1])
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), strings.Split(psql, `"`)[1])
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
	p.stderr.await(t, "message sent")
	p.stderr.await(t, `"event_type": "message.sent"`)
	code, _ := get(t, "http://"+address+"/riverui/")
	require.Equal(t, http.StatusOK, code)
	p.stop(t)
}

func TestUnmigratedDatabaseIsRefused(t *testing.T) {
	t.Parallel()
	url := dbtest.Empty(t)
	code, _, stderr := runCommand(t, url, "serve")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "afluente migrate up")

	code, stdout, _ := runCommand(t, url, "migrate", "up")
	require.Zero(t, code)
	require.Regexp(t, `^applied [1-9]\d* migrations`, stdout)
	code, stdout, _ = runCommand(t, url, "migrate", "status", "--json")
	require.Zero(t, code)
	require.NotContains(t, stdout, `"applied": false`)
	code, stdout, _ = runCommand(t, url, "migrate", "down", "0")
	require.Zero(t, code)
	require.Regexp(t, `^rolled back [1-9]\d* migrations`, stdout)
}

func TestEmitAndShow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	code, stdout, stderr := runCommand(t, w.url, "emit", "lead.created", "--org", demoOrganization,
		"--id", demoSubscription, "--payload", `{"big": 9007199254740993, "huge": 1e400}`,
		"--metadata", `{"idempotency_key": "once"}`)
	require.Zero(t, code, stderr)
	id := strings.TrimSpace(stdout)
	code, again, _ := runCommand(t, w.url, "emit", "lead.created", "--org", demoOrganization,
		"--metadata", `{"idempotency_key": "once"}`)
	require.Zero(t, code)
	require.Equal(t, stdout, again)

	code, stdout, _ = runCommand(t, w.url, "events", "show", id)
	require.Zero(t, code)
	require.Contains(t, stdout, "9007199254740993")
	require.Contains(t, stdout, "1"+strings.Repeat("0", 400))
	require.Contains(t, stdout, "pending")
	w.serve(t)
	eventually(t, time.Minute, "event done", func() bool {
		code, stdout, _ = runCommand(t, w.url, "events", "list", "--type", "lead.created", "--status", "done", "--json")
		return code == 0 && strings.Contains(stdout, id)
	})
	code, stdout, _ = runCommand(t, w.url, "events", "show", id, "--json")
	require.Zero(t, code)
	var shown eventView
	require.NoError(t, json.Unmarshal([]byte(stdout), &shown))
	require.Equal(t, []string{"webhook-dispatch-worker"}, shown.ConsumedBy)
	require.Len(t, shown.Jobs, 1)
	require.Equal(t, "completed", shown.Jobs[0].State)
}

func TestWrongUsageExitsWith2(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		args []string
		want string // in the message
	}{
		{"unknown command", []string{"nonsense"}, `unknown command "nonsense"`},
		{"unknown flag", []string{"serve", "--nonsense"}, "--nonsense"},
		{"emit without type", []string{"emit"}, "accepts 1 arg"},
		{"emit with every mistake", []string{"emit", "a.b", "--org", "x", "--payload", "{", "--at", "noon"}, "--at"},
		{"events show without UUID", []string{"events", "show", "7"}, "UUID"},
		{"events list with unknown status", []string{"events", "list", "--status", "gone"}, "--status"},
		{"migrate down without target", []string{"migrate", "down"}, "accepts 1 arg"},
		{"migrate down with word", []string{"migrate", "down", "all"}, "version number"},
		{"no database", []string{"serve"}, "DATABASE_URL"},
		{"queue that no job runs on", []string{"serve", "--queues", "nope"}, "nope"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			url := ""
			if strings.HasPrefix(tt.name, "queue") {
				url = dbtest.URL(t)
			}
			code, _, stderr := runCommand(t, url, append(tt.args, "--listen", "127.0.0.1:0")...)
			require.Equal(t, 2, code, stderr)
			require.Contains(t, stderr, tt.want)
		})
	}
}

func TestBadEventExitsWith1AndWritesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, args := range map[string][]string{
		"camel case":     {"LeadCreated"},
		"no action":      {"lead"},
		"NUL":            {"lead.created", "--payload", `{"a":"\u0000"}`},
		"invalid UTF-8":  {"lead.created", "--payload", "{\"a\":\"\xff\"}"},
		"not an object":  {"lead.created", "--payload", `[1]`},
		"other's tenant": {"lead.created", "--org", "00000000-0000-4000-8000-00000000dead"},
	} {
		code, stdout, stderr := runCommand(t, w.url, append([]string{"emit", "--org", demoOrganization}, args...)...)
		require.Equal(t, 1, code, name)
		require.Empty(t, stdout, name)
		require.Contains(t, stderr, "emit", name)
	}
	require.Zero(t, number(t, w.pool, "SELECT count(*) FROM event_log"))
}
