package archive_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"afluente/jobs/archive"
)

// store is a stand-in for S3. The request that left counts down to cancels, is
// done only if doLast says so, and gets no answer.
type store struct {
	http.Handler

	left   atomic.Int64
	doLast bool
	cancel context.CancelFunc
}

func (s *store) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.left.Add(-1) != 0 {
		s.Handler.ServeHTTP(w, r)
		return
	}
	if s.doLast {
		s.Handler.ServeHTTP(httptest.NewRecorder(), r)
	}
	s.cancel()
	panic(http.ErrAbortHandler)
}

// onStore gives a world's archive a bucket in a new stand-in.
func onStore(t *testing.T, w *world) *store {
	t.Helper()
	s := &store{Handler: gofakes3.New(s3mem.New(), gofakes3.WithAutoBucket(true)).Server()}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	w.URL = "s3://archive?anonymous=true&region=sa-east-1&use_path_style=true&endpoint=" + url.QueryEscape(server.URL)
	return s
}

// stored returns the rows in the whole parts of some days by their ids.
func (w *world) stored(t *testing.T, days ...string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for _, at := range days {
		for _, table := range []string{archive.Events, archive.Audit} {
			var lines bytes.Buffer
			require.NoError(t, w.Print(t.Context(), &lines, table, day(at)))
			for line := range strings.Lines(lines.String()) {
				var row struct {
					ID string `json:"id"`
				}
				require.NoError(t, json.Unmarshal([]byte(line), &row))
				all[row.ID] = strings.TrimSuffix(line, "\n")
			}
		}
	}
	return all
}

// TestKillAtEveryStepLosesNothing is about the database. This is about the
// store, whose last request may have been done although nobody heard of it.
func TestKillAtEveryRequestToTheStoreLosesNothing(t *testing.T) {
	t.Parallel()
	for _, doLast := range []bool{false, true} {
		t.Run(fmt.Sprint("last is done: ", doLast), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.SetPartRows(4)
			step := int64(1)
			for killAtRequest(t, w, step, doLast) {
				step++
			}
			require.Greater(t, step, int64(20))
		})
	}
}

// killAtRequest says whether a run came as far as its nth request.
func killAtRequest(t *testing.T, w *world, step int64, doLast bool) bool {
	t.Helper()
	s := onStore(t, w)
	days := []string{"2027-02-01", "2027-02-28", "2027-03-01"}
	w.exec(t, "TRUNCATE event_log, audit_log")
	w.events(t, 3, day(days[0]), "done")
	w.events(t, 10, day(days[1]), "done")
	w.events(t, 2, day(days[1]), "processing")
	w.audit(t, 5, day(days[2]))
	before := w.hot(t)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s.cancel, s.doLast = cancel, doLast
	s.left.Store(step)
	_, err := w.Run(ctx)
	killed := s.left.Load() <= 0
	require.Equal(t, killed, err != nil, "step %d: %v", step, err)
	hot, cold := w.hot(t), w.stored(t, days...)
	for id, row := range before {
		require.True(t, hot[id] == row || cold[id] == row, "step %d: in neither place: %s", step, row)
	}

	w.run(t)
	hot, cold = w.hot(t), w.stored(t, days...)
	require.Len(t, hot, 2)
	require.Len(t, cold, 18)
	for id := range hot {
		require.NotContains(t, cold, id)
	}
	for _, at := range days {
		for _, table := range []string{archive.Events, archive.Audit} {
			_, err := w.Restore(t.Context(), table, day(at))
			require.NoError(t, err)
		}
	}
	require.Equal(t, before, w.hot(t))
	return killed
}
