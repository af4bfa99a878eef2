package batch_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"afluente/eventlog/batch"
)

var errBad = errors.New("bad")

// doubler answers each ask with its double, and keeps the batches that it was called
// with. A batch with a negative number fails; each takes a second.
type doubler struct {
	group   batch.Group[string, int, int]
	batches [][]int // each in order
}

func (d *doubler) double(_ context.Context, asks []int) ([]int, error) {
	d.batches = append(d.batches, slices.Sorted(slices.Values(asks)))
	<-time.After(time.Second)
	if slices.Min(asks) < 0 {
		return nil, errBad
	}
	answers := make([]int, len(asks))
	for i, ask := range asks {
		answers[i] = 2 * ask
	}
	return answers, nil
}

func (d *doubler) ask(ctx context.Context, n int) (int, error) {
	return d.group.Do(ctx, "key", n, d.double)
}

// askAll asks for each number, the first one before the others.
func (d *doubler) askAll(t *testing.T, numbers ...int) (answers []int, errs []error) {
	t.Helper()
	answers, errs = make([]int, len(numbers)), make([]error, len(numbers))
	var asking errgroup.Group
	for i, n := range numbers {
		asking.Go(func() error {
			answers[i], errs[i] = d.ask(t.Context(), n)
			return nil
		})
		if i == 0 {
			synctest.Wait()
		}
	}
	require.NoError(t, asking.Wait())
	return answers, errs
}

func TestThoseWhoComeWhileABatchIsUnderWayShareTheNext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d doubler
		start := time.Now()
		answers, errs := d.askAll(t, 1, 2, 3, 4)
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, []int{2, 4, 6, 8}, answers)
		require.Equal(t, [][]int{{1}, {2, 3, 4}}, d.batches)
		require.Equal(t, 2*time.Second, time.Since(start), "nobody waits for others to come")

		_, errs = d.askAll(t, 5)
		require.NoError(t, errors.Join(errs...))
		require.Len(t, d.batches, 3, "a key that was let go is taken up again")
	})
}

func TestBatchesAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d doubler
		_, errs := d.askAll(t, make([]int, 2*batch.Max)...)
		require.NoError(t, errors.Join(errs...))
		require.Len(t, d.batches, 3)
		require.Len(t, d.batches[1], batch.Max)
		require.Len(t, d.batches[2], batch.Max-1)
	})
}

func TestKeysDoNotWaitForEachOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d doubler
		var hanging errgroup.Group
		hanging.Go(func() error {
			_, err := d.ask(t.Context(), 1)
			return err
		})
		synctest.Wait()
		start := time.Now()
		_, err := d.group.Do(t.Context(), "another", 1, func(_ context.Context, asks []int) ([]int, error) { return asks, nil })
		require.NoError(t, err)
		require.Zero(t, time.Since(start))
		require.NoError(t, hanging.Wait())
	})
}

func TestOneThatCannotBeAnsweredHarmsNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d doubler
		answers, errs := d.askAll(t, 1, 2, -3, 4)
		require.Equal(t, []error{nil, nil, errBad, nil}, errs)
		require.Equal(t, []int{2, 4, 0, 8}, answers)
		require.Equal(t, [][]int{{1}, {-3, 2, 4}}, d.batches[:2])
		require.Len(t, d.batches, 5, "each of the three alone, once")
	})
}

// What ran out of time as a batch would take that much for each ask alone.
func TestBatchThatRunsOutOfTimeIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var group batch.Group[string, int, int]
		batches := 0
		var asking errgroup.Group
		for i := range 3 {
			asking.Go(func() error {
				_, err := group.Do(t.Context(), "key", i, func(ctx context.Context, _ []int) ([]int, error) {
					batches++
					ctx, cancel := context.WithTimeout(ctx, time.Second)
					defer cancel()
					<-ctx.Done()
					return nil, ctx.Err()
				})
				if !errors.Is(err, context.DeadlineExceeded) {
					return errBad
				}
				return nil
			})
			if i == 0 {
				synctest.Wait()
			}
		}
		require.NoError(t, asking.Wait())
		require.Equal(t, 2, batches)
	})
}

func TestCallerWhoGivesUpIsInNoBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d doubler
		go func() { _, _ = d.ask(t.Context(), 1) }()
		synctest.Wait()
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second/2, errBad)
		defer cancel()
		start := time.Now()
		_, err := d.ask(ctx, 2)
		require.ErrorIs(t, err, errBad, "the cause")
		require.Equal(t, time.Second/2, time.Since(start))
		_, err = d.ask(t.Context(), 3)
		require.NoError(t, err)
		_, err = d.ask(ctx, 4)
		require.ErrorIs(t, err, errBad)
		require.Equal(t, [][]int{{1}, {3}}, d.batches)
	})
}

// What was asked for may be done, and must not go unknown.
func TestCallerWhoseBatchIsUnderWayGetsItsAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d doubler
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		answer, err := d.ask(ctx, 1)
		require.NoError(t, err)
		require.Equal(t, 2, answer)
		require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
	})
}

func TestPanicIsAnErrorOfItsAsker(t *testing.T) {
	t.Parallel()
	var group batch.Group[string, int, int]
	_, err := group.Do(t.Context(), "key", 1, func(context.Context, []int) ([]int, error) { panic("oh") })
	require.EqualError(t, err, "panic: oh")
	_, err = group.Do(t.Context(), "key", 1, func(context.Context, []int) ([]int, error) { return nil, nil })
	require.EqualError(t, err, "got 0 answers for 1")
}
