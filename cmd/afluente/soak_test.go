package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

var (
	soakDuration = flag.Duration("soak.duration", 20*time.Second, "how long TestChaosSoak emits events")
	soakRate     = flag.Int("soak.rate", 10_000, "events that TestChaosSoak emits in a minute")
)

// longSoak is from when on a soak is long enough to tell memory that is warm from
// memory that leaks.
const longSoak = 5 * time.Minute

// eventsPerTransaction is how many events a transaction of the load commits, on
// average; see emitSome.
const eventsPerTransaction = 2

// TestChaosSoak tells what a long time of much work does to the program and to its
// tables. It fails for what is lost or doubled and for memory that does not stop
// growing, but never for a time, which is the machine's.
func TestChaosSoak(t *testing.T) {
	t.Parallel()
	takeSlot(t)
	w := newWorld(t)
	var processes []*process
	for range 3 {
		p, _ := w.serve(t)
		processes = append(processes, p)
	}
	began := time.Now()
	samples := []soakSample{w.sample(t, processes)}
	load := w.startLoad(t, *soakRate/60/eventsPerTransaction)
	interval := *soakDuration / 20
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for time.Since(began) < *soakDuration {
		<-ticker.C
		samples = append(samples, w.sample(t, processes))
	}
	load.stop(t)
	emitting := time.Since(began)
	w.awaitRest(t)
	took := time.Since(began)
	samples = append(samples, w.sample(t, processes))

	report := &strings.Builder{}
	fmt.Fprintf(report, "%s of %d events a minute: %.0f events/s emitted, %.0f events/s done, the last one %s after the last emit\n",
		emitting.Round(time.Second), *soakRate, float64(load.count(committed))/emitting.Seconds(),
		float64(w.done(t))/took.Seconds(), (took - emitting).Round(10*time.Millisecond))
	fannedOut, done := w.lags(t, load.ledger)
	fmt.Fprintf(report, "commit to fan-out: %s\ncommit to done:    %s\n", percentiles(fannedOut), percentiles(done))
	for i, at := range []int{0, len(samples) / 2, len(samples) - 1} {
		fmt.Fprintf(report, "%-6s %s\n", []string{"start", "middle", "end"}[i], samples[at])
	}
	t.Logf("soak:\n%s", report)
	w.auditNow(t, load.ledger, onceOnly)
	if *soakDuration >= longSoak {
		requireFlat(t, samples)
	}
}

// soakSample is what processes and tables take up at one moment.
type soakSample struct {
	resident []int // of each process, in bytes; 0 where the system does not tell
	tables   []tableSize
}

type tableSize struct {
	Name    string
	Rows    int // as PostgreSQL counts them
	Heap    int // bytes
	Indexes int // bytes
	Dead    int // rows
}

func (s soakSample) String() string {
	var text strings.Builder
	text.WriteString("resident")
	for _, bytes := range s.resident {
		fmt.Fprintf(&text, " %d", bytes>>20)
	}
	text.WriteString(" MB")
	for _, table := range s.tables {
		fmt.Fprintf(&text, "; %s %d rows, %.1f MB, indexes %.1f MB, %d dead",
			table.Name, table.Rows, float64(table.Heap)/(1<<20), float64(table.Indexes)/(1<<20), table.Dead)
	}
	return text.String()
}

func (w *world) sample(t *testing.T, processes []*process) soakSample {
	t.Helper()
	s := soakSample{}
	for _, p := range processes {
		s.resident = append(s.resident, residentMemory(p.command.Process.Pid))
	}
	tx, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(t.Context())
	s.tables, err = rowsOf[tableSize](t.Context(), tx, `
		SELECT
			t.name, coalesce(sum(s.n_live_tup), 0)::bigint AS rows, sum(pg_table_size(p.relid))::bigint AS heap,
			sum(pg_indexes_size(p.relid))::bigint AS indexes, coalesce(sum(s.n_dead_tup), 0)::bigint AS dead
		FROM (VALUES ('event_log', 'public.event_log'), ('river_job', 'river.river_job'), ('webhook_deliveries', 'public.webhook_deliveries'))
			AS t (name, relation)
		CROSS JOIN LATERAL (
			SELECT relid FROM pg_partition_tree(t.relation::regclass) WHERE isleaf
			UNION SELECT t.relation::regclass
		) AS p
		LEFT JOIN pg_stat_all_tables AS s ON s.relid = p.relid
		GROUP BY t.name ORDER BY t.name`)
	require.NoError(t, err)
	return s
}

// residentMemory returns what a process takes up of the machine's memory.
func residentMemory(pid int) int {
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	fields := strings.Fields(string(statm))
	if err != nil || len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.Atoi(fields[1]) // the kernel writes numbers
	return pages * os.Getpagesize()
}

// requireFlat requires that no process takes up more in the last quarter than in
// the one before, but for what the garbage collector may owe.
func requireFlat(t *testing.T, samples []soakSample) {
	t.Helper()
	samples = samples[:len(samples)-1] // that one is after the load
	for i := range samples[0].resident {
		most := func(of []soakSample) (bytes int) {
			for _, s := range of {
				bytes = max(bytes, s.resident[i])
			}
			return bytes
		}
		half, quarter := len(samples)/2, len(samples)*3/4
		before, after := most(samples[half:quarter]), most(samples[quarter:])
		require.LessOrEqual(t, after, before+before/10+(4<<20), "process %d grows: %d MB, then %d MB", i, before>>20, after>>20)
	}
}

// lags returns how long after its commit each event was fanned out and done, by
// the database's clock but for the commit, which is when the emitter heard of it.
func (w *world) lags(t *testing.T, l *ledger) (fannedOut, done []time.Duration) {
	t.Helper()
	emissions := l.snapshot()
	rows, err := w.pool.Query(t.Context(), `
		SELECT e.id, j.at, e.updated_at
		FROM event_log AS e
		JOIN (SELECT metadata ->> 'event_id' AS id, min(created_at) AS at FROM river.river_job WHERE metadata ? 'event_id' GROUP BY 1) AS j
			ON j.id = e.id::text
		WHERE e.status = 'done'`)
	require.NoError(t, err)
	var id uuid.UUID
	var fannedOutAt, doneAt time.Time
	_, err = pgx.ForEachRow(rows, []any{&id, &fannedOutAt, &doneAt}, func() error {
		if e := emissions[id]; e.fate == committed {
			fannedOut = append(fannedOut, max(0, fannedOutAt.Sub(e.at)))
			done = append(done, max(0, doneAt.Sub(e.at)))
		}
		return nil
	})
	require.NoError(t, err)
	return fannedOut, done
}

func percentiles(lags []time.Duration) string {
	if len(lags) == 0 {
		return "none"
	}
	slices.Sort(lags)
	at := func(share float64) time.Duration {
		return lags[int(share*float64(len(lags)-1))].Round(time.Millisecond)
	}
	return fmt.Sprintf("p50 %s, p95 %s, max %s", at(0.5), at(0.95), at(1))
}
