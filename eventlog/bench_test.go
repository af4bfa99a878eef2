package eventlog_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"afluente/db/dbtest"
	"afluente/eventlog"
	"afluente/eventlog/event"
)

// BenchmarkSettle compares the rates at which River works no-op jobs: those of
// plain River, on its own schema and without an event behind them; those of
// 20,000 events for 3 consumers each with the settle trigger switched off; and
// the same with it on. It prints the medians of the rounds and the two ratios.
//
//	go test -run '^$' -bench Settle -benchtime 3x ./eventlog
func BenchmarkSettle(b *testing.B) {
	const events = 20_000
	var plain, unsettled, settled []float64
	for b.Loop() {
		plain = append(plain, workRate(b, events, insertPlain))
		unsettled = append(unsettled, workRate(b, events, func(b *testing.B, pool *pgxpool.Pool, plan *eventlog.Plan, events int) {
			b.Helper()
			emitAndFanOut(b, pool, plan, events)
			exec(b, pool, "ALTER TABLE river.river_job DISABLE TRIGGER afluente_settle_updated")
		}))
		settled = append(settled, workRate(b, events, emitAndFanOut))
	}
	b.ReportMetric(median(plain), "plain-jobs/s")
	b.ReportMetric(median(unsettled), "unsettled-jobs/s")
	b.ReportMetric(median(settled), "settled-jobs/s")
	b.ReportMetric(median(settled)/median(unsettled), "settled/unsettled")
	b.ReportMetric(median(settled)/median(plain), "settled/plain")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkCheckTags is what Emit's check of a payload costs: of one without
// tags, and of those with the most.
//
//	go test -run '^$' -bench CheckTags ./eventlog
func BenchmarkCheckTags(b *testing.B) {
	id := uuid.NewString()
	for _, payload := range []eventlog.Payload{
		event.MessageQueued{MessageID: id},
		event.LeadCreated{Name: "Ada", Source: "web", OwnerID: id, PipelineID: id, StageID: id},
		event.MessageSent{Direction: "out", ConversationID: id, ContactID: id, Channel: "whatsapp", MessageID: id},
	} {
		b.Run(payload.EventType(), func(b *testing.B) {
			for b.Loop() {
				if err := eventlog.CheckTags(payload); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// workRate returns the jobs per second at which a client works off what insert
// put into a new database, which is three jobs an event.
func workRate(b *testing.B, events int, insert func(*testing.B, *pgxpool.Pool, *eventlog.Plan, int)) float64 {
	b.Helper()
	config, err := pgxpool.ParseConfig(dbtest.URL(b))
	require.NoError(b, err)
	config.MaxConns = 20
	pool := dbtest.Pool(b, config)
	var worked atomic.Int64
	plan, err := eventlog.Compile(noop[noopA](&worked), noop[noopB](&worked), noop[noopC](&worked))
	require.NoError(b, err)
	require.NoError(b, eventlog.Register(b.Context(), pool, plan))
	insert(b, pool, plan, events)
	exec(b, pool, "VACUUM ANALYZE")
	exec(b, pool, "CHECKPOINT")

	client, err := eventlog.NewClient(eventlog.ClientConfig{Pool: pool, Plan: plan, Log: zap.NewNop(), MaxWorkers: 500})
	require.NoError(b, err)
	start := time.Now()
	require.NoError(b, client.Start(context.WithoutCancel(b.Context())))
	for worked.Load() < int64(3*events) {
		waitABit(b)
	}
	for done := 0; done < 3*events; {
		require.NoError(b, pool.QueryRow(b.Context(),
			"SELECT count(*) FROM river.river_job WHERE state = 'completed'").Scan(&done))
	}
	took := time.Since(start)
	require.NoError(b, client.Stop(context.WithoutCancel(b.Context())))
	return float64(3*events) / took.Seconds()
}

func insertPlain(b *testing.B, pool *pgxpool.Pool, plan *eventlog.Plan, events int) {
	b.Helper()
	for _, undo := range []string{
		"ALTER TABLE river.river_job DISABLE TRIGGER USER",
		"ALTER INDEX river.river_job_args_index RESET (gin_pending_list_limit)",
		"ALTER INDEX river.river_job_metadata_index RESET (gin_pending_list_limit)",
	} {
		exec(b, pool, undo)
	}
	client, err := eventlog.NewClient(eventlog.ClientConfig{Pool: pool, Plan: plan, Log: zap.NewNop()})
	require.NoError(b, err)
	for inserted := 0; inserted < events; inserted += 1000 {
		var params []river.InsertManyParams
		for range 1000 {
			id := uuid.NewString()
			params = append(params,
				river.InsertManyParams{Args: noopA{ID: id}},
				river.InsertManyParams{Args: noopB{ID: id}},
				river.InsertManyParams{Args: noopC{ID: id}})
		}
		_, err := client.InsertManyFast(b.Context(), params)
		require.NoError(b, err)
	}
}

func emitAndFanOut(b *testing.B, pool *pgxpool.Pool, plan *eventlog.Plan, events int) {
	b.Helper()
	organization := newOrganization(b, pool)
	for emitted := 0; emitted < events; emitted += 1000 {
		batch := make([]eventlog.Event[event.MessageQueued], 1000)
		for i := range batch {
			batch[i] = eventlog.Event[event.MessageQueued]{
				OrganizationID: organization,
				Payload:        event.MessageQueued{MessageID: uuid.NewString()},
			}
		}
		require.NoError(b, pgx.BeginFunc(b.Context(), pool, func(tx pgx.Tx) error {
			_, err := eventlog.EmitMany(b.Context(), tx, batch)
			return err
		}))
	}
	bridge, err := eventlog.NewBridge(eventlog.BridgeConfig{Pool: pool, Plan: plan, Log: zap.NewNop()})
	require.NoError(b, err)
	start := time.Now()
	drain(b, bridge)
	b.Logf("fan-out: %.0f jobs/s", float64(3*events)/time.Since(start).Seconds())
}

type noopArgs interface {
	river.JobArgs
	noopA | noopB | noopC
}

type (
	noopA struct {
		ID string `json:"id"`
	}
	noopB struct {
		ID string `json:"id"`
	}
	noopC struct {
		ID string `json:"id"`
	}
)

func (noopA) Kind() string { return "noop-a-worker" }
func (noopB) Kind() string { return "noop-b-worker" }
func (noopC) Kind() string { return "noop-c-worker" }

type noopWorker[A noopArgs] struct {
	river.WorkerDefaults[A]

	worked *atomic.Int64
}

func (noopWorker[A]) Timeout(*river.Job[A]) time.Duration { return time.Minute }

func (w noopWorker[A]) Work(context.Context, *river.Job[A]) error {
	w.worked.Add(1)
	return nil
}

func noop[A noopArgs](worked *atomic.Int64) eventlog.Declaration {
	return eventlog.On(func(e eventlog.Event[event.MessageQueued]) A {
		return A{ID: e.Payload.MessageID}
	}, noopWorker[A]{worked: worked})
}
