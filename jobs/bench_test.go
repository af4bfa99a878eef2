package jobs

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"afluente/eventlog"
)

// How long an event takes to its receiver, with 20 receivers that get 2 events a
// second each, and the same beside one that never answers and gets 10: healthy-p95-ms
// and beside-p95-ms, and their ratio. A run takes a minute, so -benchtime=1x.
func BenchmarkDeliveriesBesideABlackHole(b *testing.B) {
	for b.Loop() {
		healthy := deliveryP95(b, false)
		beside := deliveryP95(b, true)
		b.ReportMetric(float64(healthy.Milliseconds()), "healthy-p95-ms")
		b.ReportMetric(float64(beside.Milliseconds()), "beside-p95-ms")
		b.ReportMetric(float64(beside)/float64(healthy), "beside/healthy")
	}
}

// deliveryP95 is the 95th percentile from the commit of an event to its POST.
func deliveryP95(b *testing.B, blackHole bool) time.Duration {
	b.Helper()
	const duration, every = 30 * time.Second, 25 * time.Millisecond
	s := newSystem(b)
	s.deps.Webhooks.Backoff = nil
	var mu sync.Mutex
	emitted := make(map[string]time.Time)
	var took []time.Duration
	good := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		now := time.Now()
		_, _ = io.Copy(io.Discard, r.Body)
		mu.Lock()
		defer mu.Unlock()
		took = append(took, now.Sub(emitted[r.Header.Get("webhook-id")]))
	}))
	b.Cleanup(good.Close)
	hole := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}))
	b.Cleanup(hole.Close)
	organizations := make([]uuid.UUID, 20)
	for i := range organizations {
		organizations[i] = s.newOrganization(b)
		s.subscribe(b, organizations[i], good.URL, "*")
	}
	s.subscribe(b, s.org, hole.URL, "*")
	emit := func(organization uuid.UUID) {
		var id uuid.UUID
		require.NoError(b, pgx.BeginFunc(b.Context(), s.pool, func(tx pgx.Tx) (err error) {
			id, err = eventlog.EmitRaw(b.Context(), tx, eventlog.RawEvent{Type: "lead.won", OrganizationID: organization, Payload: []byte(`{}`)})
			return err
		}))
		mu.Lock()
		defer mu.Unlock()
		emitted[id.String()] = time.Now()
	}

	ctx, cancel := context.WithCancel(b.Context())
	var bridge sync.WaitGroup
	bridge.Go(func() { _ = s.bridge.Run(ctx) })
	defer bridge.Wait()
	defer cancel()
	s.start(b)
	tick := time.NewTicker(every)
	defer tick.Stop()
	events := int(duration / every)
	for i := range events {
		<-tick.C
		emit(organizations[i%len(organizations)])
		if blackHole && i%4 == 0 {
			emit(s.org)
		}
	}
	s.await(b, "all deliveries", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(took) == events
	})
	slices.Sort(took)
	return took[len(took)*95/100]
}
