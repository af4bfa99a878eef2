package jobs

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"afluente/db"
	"afluente/jobs/sandbox"
)

// A job that cannot begin is put off: it has not failed, and keeps neither a worker nor
// a connection.
func TestJobThatWaitsForItsTurnIsPutOff(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	deliveries := make([]db.WebhookDelivery, beginsAtOnce+1)
	for i := range deliveries {
		deliveries[i] = s.dispatchLead(t, subscription)
	}
	results := make(chan error, len(deliveries))
	err := pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		if _, err := db.New(tx).LockSubscription(t.Context(), subscription, nil); err != nil {
			return err
		}
		s.attemptAll(t, deliveries, results)
		select {
		case err := <-results:
			requireSnoozed(t, err)
		case <-time.After(4 * turnWait):
			t.Error("no job was put off")
		}
		require.Zero(t, receiver.Total())
		return nil
	})
	require.NoError(t, err)
	for range beginsAtOnce {
		require.NoError(t, <-results)
	}
	require.Equal(t, beginsAtOnce, receiver.Total())
}

// The outcome of a POST must be recorded before its lease ends.
func TestDeliveryWhoseOutcomeIsRecordedGoesBeforeThoseThatBegin(t *testing.T) {
	t.Parallel()
	s, receiver := newSystem(t), startReceiver(t)
	receiver.SetFault(sandbox.Fault{Hang: true})
	subscription := s.subscribe(t, s.org, receiver.URL(), "*")
	s.exec(t, "UPDATE webhook_subscriptions SET probing = true") // so that a success has something to record
	underWay, waiting := s.dispatchLead(t, subscription), s.dispatchLead(t, subscription)
	var running errgroup.Group
	running.Go(func() error { return s.attempt(t, underWay.ID) })
	require.NoError(t, receiver.AwaitCalls(t.Context(), 1))
	args, job := s.timer(t, waiting.ID)
	err := pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
		if _, err := db.New(tx).LockSubscription(t.Context(), subscription, nil); err != nil {
			return err
		}
		receiver.ClearFault()
		s.await(t, "the row", func() bool {
			return one[bool](t, s, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')")
		})
		ctx, cancel := context.WithTimeout(t.Context(), 4*turnWait)
		defer cancel()
		next, err := s.deps.Webhooks.attempt(ctx, args, job)
		if err != nil {
			return err
		}
		requireSnoozed(t, next.result())
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, running.Wait())
	require.Equal(t, 1, receiver.Total())
}

func TestWaitForATurnEndsWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l line
		end := l.end()
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := l.begin(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Second, time.Since(start))
		_, err = l.begin(t.Context())
		require.ErrorIs(t, err, errNoTurn)

		end()
		end, err = l.begin(t.Context())
		require.NoError(t, err, "those that went are not called")
		end()
		require.Zero(t, l.beginning)
	})
}

func TestThoseThatEndGoBeforeThoseThatWaitToBegin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l line
		var end func()
		for range beginsAtOnce {
			var err error
			end, err = l.begin(t.Context())
			require.NoError(t, err)
		}
		began := make(chan int, 2)
		for i := range 2 {
			go func() {
				end, err := l.begin(t.Context())
				if err == nil {
					began <- i
					end()
				}
			}()
			synctest.Wait()
		}
		ended := l.end()
		end()
		synctest.Wait()
		require.Empty(t, began)
		ended()
		synctest.Wait()
		require.Len(t, began, 2)
		require.Zero(t, <-began, "first come, first served")
	})
}
