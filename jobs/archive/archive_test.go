package archive_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"afluente/db/dbtest"
	"afluente/jobs/archive"
)

func TestMain(m *testing.M) { os.Exit(dbtest.Main(m)) }

// today is the day of all tests. With a retention of 90 days what is older than
// 2027-03-12 leaves.
func today() time.Time { return time.Date(2027, 6, 10, 3, 17, 0, 0, time.UTC) }

func day(text string) time.Time {
	at, err := time.Parse(time.DateOnly, text)
	if err != nil {
		panic(err)
	}
	return at
}

// world is a database with rows and a folder for what leaves it.
type world struct {
	*archive.Archive

	folder       string
	organization uuid.UUID
}

func newWorld(t *testing.T) *world {
	t.Helper()
	pool := dbtest.New(t)
	folder := filepath.Join(t.TempDir(), "archive")
	w := &world{folder: folder, Archive: &archive.Archive{
		Pool: pool, URL: "file://" + folder, Retention: 90 * 24 * time.Hour,
	}}
	var asked atomic.Int64 // each look at the clock is a moment later
	w.Now = func() time.Time { return today().Add(time.Duration(asked.Add(1)) * time.Millisecond) }
	require.NoError(t, pool.QueryRow(t.Context(), "INSERT INTO organizations DEFAULT VALUES RETURNING id").Scan(&w.organization))
	w.exec(t, `DO $$ DECLARE month regclass; BEGIN
		FOR month IN SELECT inhrelid FROM pg_inherits WHERE inhparent = 'event_log'::regclass AND inhrelid <> 'event_log_default'::regclass LOOP
			EXECUTE format('DROP TABLE %s', month);
		END LOOP;
	END $$`)
	w.exec(t, "SELECT create_event_log_partitions(4, '2027-02-01')")
	return w
}

func (w *world) exec(t *testing.T, statement string, args ...any) {
	t.Helper()
	_, err := w.Pool.Exec(t.Context(), statement, args...)
	require.NoError(t, err)
}

func (w *world) events(t *testing.T, n int, at time.Time, status string) {
	t.Helper()
	w.exec(t, `INSERT INTO event_log (organization_id, event_type, entity_kind, status, consumers, consumed_by, payload, created_at, updated_at)
		SELECT $1, 'lead.won', 'lead', $4, '{a,b}', '{b,a}', jsonb_build_object('n', i, 'big', 9007199254740993, 'text', E'é \\ "\n' || i),
			$3::timestamptz + i * interval '1 microsecond', $3::timestamptz + interval '1 minute' FROM generate_series(1, $2) AS i`, w.organization, n, at, status)
}

func (w *world) audit(t *testing.T, n int, at time.Time) {
	t.Helper()
	w.exec(t, "INSERT INTO audit_log (organization_id, action, created_at) SELECT $1, 'x', $3 FROM generate_series(1, $2)", w.organization, n, at)
}

func (w *world) run(t *testing.T) archive.Report {
	t.Helper()
	report, err := w.Run(t.Context())
	require.NoError(t, err)
	return report
}

func one[T any](t *testing.T, pool *pgxpool.Pool, query string, args ...any) (value T) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), query, args...).Scan(&value))
	return value
}

// hot returns the rows of the tables by their ids.
func (w *world) hot(t *testing.T) map[string]string {
	t.Helper()
	rows, err := w.Pool.Query(t.Context(), "SELECT id::text, to_jsonb(e)::text FROM event_log AS e UNION ALL SELECT id::text, to_jsonb(a)::text FROM audit_log AS a")
	require.NoError(t, err)
	all := make(map[string]string)
	var id, encoded string
	_, err = pgx.ForEachRow(rows, []any{&id, &encoded}, func() error {
		all[id] = encoded
		return nil
	})
	require.NoError(t, err)
	return all
}

// cold returns the rows in the folder's parts by their ids.
func (w *world) cold(t *testing.T) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for _, name := range w.files(t) {
		file, err := os.ReadFile(name)
		require.NoError(t, err)
		unzipped, err := gzip.NewReader(bytes.NewReader(file))
		require.NoError(t, err)
		content, err := io.ReadAll(unzipped)
		require.NoError(t, err)
		for line := range strings.Lines(string(content)) {
			_, id, ok := strings.Cut(line, `"id": "`)
			require.True(t, ok)
			all[id[:36]] = strings.TrimSuffix(line, "\n")
		}
	}
	return all
}

func (w *world) files(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(w.folder, "*", "*", "*", "*.ndjson.gz"))
	require.NoError(t, err)
	return names
}

// tripwire cancels a context when a query begins, after so many others.
type tripwire struct {
	left   atomic.Int64
	cancel context.CancelFunc
}

func (w *tripwire) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	if w.left.Add(-1) == 0 {
		w.cancel()
	}
	return ctx
}

func (*tripwire) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// However far a run came before it was killed, every row is in its table or in
// the archive, and the next run leaves none in both or in neither.
func TestKillAtEveryStepLosesNothing(t *testing.T) {
	t.Parallel()
	const never = 1 << 32
	steps := never - killAtStep(t, never)
	require.Greater(t, steps, int64(10))
	for step := range steps {
		t.Run(fmt.Sprint("step ", step+1), func(t *testing.T) {
			t.Parallel()
			require.LessOrEqual(t, killAtStep(t, step+1), int64(0))
		})
	}
}

// killAtStep cuts a run off when it begins its nth query, and returns by how
// many it fell short of that.
func killAtStep(t *testing.T, step int64) int64 {
	t.Helper()
	w := newWorld(t)
	w.events(t, 3, day("2027-02-01"), "done")
	w.events(t, 5001, day("2027-02-28"), "done") // more than are deleted at a time
	w.events(t, 2, day("2027-02-28"), "dead")
	w.events(t, 4, day("2027-03-11"), "done")
	w.events(t, 4, day("2027-03-12"), "done") // stays
	w.audit(t, 5, day("2027-03-01"))
	w.audit(t, 5, today())
	before := w.hot(t)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	wire := &tripwire{cancel: cancel}
	wire.left.Store(step)
	config := w.Pool.Config()
	config.ConnConfig.Tracer = wire
	fragile := *w.Archive
	fragile.Pool = dbtest.Pool(t, config)
	_, _ = fragile.Run(ctx) // the error is the test's own doing
	hot, cold := w.hot(t), w.cold(t)
	for id, row := range before {
		require.True(t, hot[id] == row || cold[id] == row, "in neither place: %s", row)
	}

	w.run(t)
	hot, cold = w.hot(t), w.cold(t)
	require.Len(t, hot, 2+4+5)
	require.Len(t, cold, 3+5001+4+5)
	for id := range hot {
		require.NotContains(t, cold, id)
	}
	for _, at := range []string{"2027-02-01", "2027-02-28", "2027-03-01", "2027-03-11"} {
		for _, table := range []string{archive.Events, archive.Audit} {
			_, err := w.Restore(t.Context(), table, day(at))
			require.NoError(t, err)
		}
	}
	require.Equal(t, before, w.hot(t))
	return wire.left.Load()
}

func TestEventsThatAreNotDoneNeverLeave(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, status := range []string{"pending", "processing", "dead"} {
		w.events(t, 1, day("2027-02-03"), status)
	}
	w.events(t, 1, day("2027-02-03"), "done")
	require.Equal(t, archive.Report{Rows: 1, Parts: 1, DroppedMonths: 1}, w.run(t))
	require.Len(t, w.hot(t), 3)
	require.Equal(t, 3, one[int](t, w.Pool, "SELECT count(*) FROM event_log_default"), "their month is gone")
	require.Nil(t, one[*string](t, w.Pool, "SELECT to_regclass('event_log_202702')::text"))
	require.NotNil(t, one[*string](t, w.Pool, "SELECT to_regclass('event_log_202703')::text"), "March has not passed its time")

	// They are settled where they are, and leave with the next run.
	w.exec(t, "UPDATE event_log SET status = 'done', updated_at = now()")
	require.Equal(t, archive.Report{Rows: 3, Parts: 1}, w.run(t))
	require.Equal(t, archive.Report{}, w.run(t))
	require.Len(t, w.cold(t), 4)
}

// A row that changes after it was archived stays, and leaves again later. The
// archive gives its newest version back.
func TestRowThatChangedMeanwhileIsArchivedAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := day("2027-02-03")
	w.events(t, 2, at, "done")
	w.run(t)
	restored, err := w.Restore(t.Context(), archive.Events, at)
	require.NoError(t, err)
	require.Equal(t, archive.Restored{Parts: 1, Read: 2, Inserted: 2}, restored)
	w.exec(t, "UPDATE event_log SET attempts = 7, updated_at = '2027-06-01' WHERE payload ->> 'n' = '1'")
	changed := w.hot(t)

	require.Equal(t, archive.Report{Rows: 2, Parts: 1, DroppedMonths: 1}, w.run(t))
	restored, err = w.Restore(t.Context(), archive.Events, at)
	require.NoError(t, err)
	require.Equal(t, archive.Restored{Parts: 2, Read: 3, Inserted: 2}, restored)
	require.Equal(t, changed, w.hot(t))

	var printed bytes.Buffer
	require.NoError(t, w.Print(t.Context(), &printed, archive.Events, at))
	require.Equal(t, 2, strings.Count(printed.String(), "\n"))
	require.Equal(t, 1, strings.Count(printed.String(), `"attempts": 7`))
}

// Whatever is in the store, only what was read back whole is deleted.
func TestPartThatIsNotWholeDeletesNothing(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func([]byte) []byte{
		"cut":       func(part []byte) []byte { return part[:len(part)/2] },
		"empty":     func([]byte) []byte { return nil },
		"garbage":   func(part []byte) []byte { return bytes.Repeat([]byte("x"), len(part)) },
		"one short": oneLineLess,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			at := day("2027-02-03")
			w.events(t, 100, at, "done")
			before := w.hot(t)
			w.run(t)
			_, err := w.Restore(t.Context(), archive.Events, at)
			require.NoError(t, err)
			part := w.files(t)[0]
			content, err := os.ReadFile(part)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(part, spoil(content), 0o600))

			require.Equal(t, archive.Report{Rows: 100, Parts: 1, DroppedMonths: 1}, w.run(t))
			require.Len(t, w.files(t), 2, "it was archived anew")
			_, err = w.Restore(t.Context(), archive.Events, at)
			require.ErrorContains(t, err, "the part is not whole")
			require.ErrorContains(t, err, filepath.Base(part))
			require.Equal(t, before, w.hot(t), "the whole part comes back all the same")
		})
	}
}

// oneLineLess is a part without its last row.
func oneLineLess(part []byte) []byte {
	unzipped, err := gzip.NewReader(bytes.NewReader(part))
	if err != nil {
		panic(err)
	}
	content, err := io.ReadAll(unzipped)
	if err != nil {
		panic(err)
	}
	content = content[:bytes.LastIndexByte(content[:len(content)-1], '\n')+1]
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	_, _ = w.Write(content)
	_ = w.Close()
	return zipped.Bytes()
}

// A hand may change a row without a word about it in updated_at, such as to
// erase a person from an event that was restored.
func TestChangeThatUpdatedAtDoesNotTellIsNotLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := day("2027-02-03")
	w.events(t, 3, at, "done")
	w.audit(t, 3, at)
	w.run(t)
	for _, table := range []string{archive.Events, archive.Audit} {
		_, err := w.Restore(t.Context(), table, at)
		require.NoError(t, err)
	}
	w.exec(t, `UPDATE event_log SET payload = '{"erased": true}' WHERE (payload ->> 'n')::int = 2`)
	w.exec(t, "UPDATE audit_log SET reason = 'erased' WHERE id = (SELECT min(id::text)::uuid FROM audit_log)")
	changed := w.hot(t)

	require.Equal(t, archive.Report{Rows: 6, Parts: 2, DroppedMonths: 1}, w.run(t))
	require.Empty(t, w.hot(t))
	for _, table := range []string{archive.Events, archive.Audit} {
		_, err := w.Restore(t.Context(), table, at)
		require.NoError(t, err)
	}
	require.Equal(t, changed, w.hot(t))
}

func TestRestoreLeavesOutOrganizationsThatAreGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := day("2027-02-03")
	w.events(t, 300, at, "done")
	w.audit(t, 3, at)
	gone := w.organization
	require.NoError(t, w.Pool.QueryRow(t.Context(), "INSERT INTO organizations DEFAULT VALUES RETURNING id").Scan(&w.organization))
	w.events(t, 5, at, "done")
	w.audit(t, 2, at)
	w.run(t)
	w.exec(t, "DELETE FROM organizations WHERE id = $1", gone)

	restored, err := w.Restore(t.Context(), archive.Events, at)
	require.NoError(t, err)
	require.Equal(t, archive.Restored{Parts: 1, Read: 305, Inserted: 5}, restored)
	restored, err = w.Restore(t.Context(), archive.Audit, at)
	require.NoError(t, err)
	require.Equal(t, archive.Restored{Parts: 1, Read: 5, Inserted: 2}, restored)
	require.Len(t, w.hot(t), 7)
}

func TestLargeDayHasSeveralParts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.SetPartRows(10)
	at := day("2027-02-03")
	w.events(t, 25, at, "done")
	w.audit(t, 20, at)
	before := w.hot(t)
	require.Equal(t, archive.Report{Rows: 45, Parts: 5, DroppedMonths: 1}, w.run(t))
	require.Empty(t, w.hot(t))
	restored, err := w.Restore(t.Context(), archive.Events, at)
	require.NoError(t, err)
	require.Equal(t, archive.Restored{Parts: 3, Read: 25, Inserted: 25}, restored)
	_, err = w.Restore(t.Context(), archive.Audit, at)
	require.NoError(t, err)
	require.Equal(t, before, w.hot(t))
	require.Equal(t, archive.Report{Rows: 45, DroppedMonths: 1}, w.run(t), "no part is written for rows that are in one")
}

func TestSecondRunAtOnceReturns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.events(t, 1, day("2027-02-03"), "done")
	const holder = `SELECT pid FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`
	first := *w.Archive
	var during archive.Report
	var idle string
	first.Now = func() time.Time { // asked for while the lock is held
		during = w.run(t)
		idle = one[string](t, w.Pool,
			"SELECT concat_ws(' ', state, backend_xid, backend_xmin) FROM pg_stat_activity WHERE pid = ("+holder+")")
		return today()
	}
	report, err := first.Run(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(1), report.Rows)
	require.Equal(t, archive.Report{Skipped: true}, during)
	require.Equal(t, "idle in transaction", idle, "with no snapshot that a vacuum must heed")
	require.Zero(t, one[int](t, w.Pool, "SELECT count(*) FROM ("+holder+") AS h"))
	require.Zero(t, w.run(t).Rows)
}

func TestOldIdempotencyKeysAreForgotten(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(t, `INSERT INTO event_idempotency_keys (organization_id, idempotency_key, event_id, event_created_at)
		SELECT $1, 'old' || i, gen_random_uuid(), '2027-03-11' FROM generate_series(1, 5001) AS i`, w.organization)
	w.exec(t, "INSERT INTO event_idempotency_keys VALUES ($1, 'new', gen_random_uuid(), '2027-03-12')", w.organization)
	require.Equal(t, int64(5001), w.run(t).PrunedKeys)
	require.Equal(t, "new", one[string](t, w.Pool, "SELECT idempotency_key FROM event_idempotency_keys"))
}

func TestBusyTableKeepsItsMonth(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.events(t, 1, day("2027-02-03"), "done")
	tx, err := w.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE event_log IN ROW EXCLUSIVE MODE")
	require.NoError(t, err)
	require.Equal(t, archive.Report{Rows: 1, Parts: 1}, w.run(t))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, archive.Report{DroppedMonths: 1}, w.run(t))
}

// The application's own audit_log may have keys of another type.
func TestAuditTableOfTheApplication(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(t, "DROP TABLE audit_log; CREATE TABLE audit_log (id bigint PRIMARY KEY, created_at timestamptz NOT NULL, what text)")
	w.exec(t, "INSERT INTO audit_log VALUES (1, '2027-02-03', 'old'), (2, '2027-06-03', 'new')")
	require.Equal(t, int64(1), w.run(t).Rows)
	restored, err := w.Restore(t.Context(), archive.Audit, day("2027-02-03"))
	require.NoError(t, err)
	require.Equal(t, archive.Restored{Parts: 1, Read: 1, Inserted: 1}, restored)
	require.Equal(t, "old", one[string](t, w.Pool, "SELECT what FROM audit_log WHERE id = 1"))
}

// A store may take a part and give back less: then nothing is deleted.
//
// Not parallel: the AWS SDK takes its credentials from the environment.
func TestStoreThatLosesBytesDeletesNothing(t *testing.T) {
	store := gofakes3.New(s3mem.New(), gofakes3.WithAutoBucket(true)).Server()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, ".ndjson.gz") {
			store.ServeHTTP(w, r)
			return
		}
		whole := httptest.NewRecorder()
		store.ServeHTTP(whole, r)
		for name, values := range whole.Header() {
			if !strings.HasPrefix(strings.ToLower(name), "x-amz-checksum") {
				w.Header()[name] = values
			}
		}
		w.Header().Set("Content-Length", strconv.Itoa(whole.Body.Len()-100))
		_, _ = w.Write(whole.Body.Bytes()[:whole.Body.Len()-100])
	}))
	defer server.Close()
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	w := newWorld(t)
	w.URL = fmt.Sprintf("s3://archive?region=sa-east-1&use_path_style=true&endpoint=%s", url.QueryEscape(server.URL))
	w.events(t, 6000, day("2027-02-03"), "done")
	_, err := w.Run(t.Context())
	require.ErrorContains(t, err, "the part is not whole")
	require.Len(t, w.hot(t), 6000)
}

// Not parallel: the AWS SDK takes its credentials from the environment.
func TestS3(t *testing.T) {
	server := httptest.NewServer(gofakes3.New(s3mem.New(), gofakes3.WithAutoBucket(true)).Server())
	defer server.Close()
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	w := newWorld(t)
	w.URL = fmt.Sprintf("s3://archive?region=sa-east-1&use_path_style=true&endpoint=%s", url.QueryEscape(server.URL))
	w.events(t, 6000, day("2027-02-03"), "done")
	before := w.hot(t)
	require.Equal(t, archive.Report{Rows: 6000, Parts: 1, DroppedMonths: 1}, w.run(t))
	require.Empty(t, w.hot(t))
	_, err := w.Restore(t.Context(), archive.Events, day("2027-02-03"))
	require.NoError(t, err)
	require.Equal(t, before, w.hot(t))
}

func TestURLs(t *testing.T) {
	t.Parallel()
	for _, good := range []string{
		"file:///var/lib/x", "s3://bucket", "s3://bucket?region=sa-east-1",
		"s3://bucket/?region=x&use_path_style=true&endpoint=https://PROJECT.supabase.co/storage/v1/s3",
	} {
		require.NoError(t, archive.CheckURL(good), good)
	}
	for _, bad := range []string{
		"", "/var/lib/x", "file://", "s3://", "ftp://x/y", "mem://", "file:///x%zz",
		"file://folder/x", "file:///x?y=z", "s3://bucket/folder", "s3://bucket?regoin=x", "s3://key:hush@bucket",
	} {
		err := archive.CheckURL(bad)
		require.Error(t, err, bad)
		require.NotContains(t, err.Error(), "hush")
	}
}
