package bench

import (
	"context"
	"fmt"
	"syscall"
	"time"
)

// readFootprint reads what the server and this process have used up to now.
// pg_partition_tree has event_log itself too, whose size is 0.
const readFootprint = `
SELECT
    (SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('public.event_log'))::float8,
    pg_total_relation_size('river.river_job')::float8,
    (pg_current_wal_insert_lsn() - '0/0')::float8,
    (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database())::float8`

// footprint is what has been used up to some time.
type footprint struct {
	events, jobs float64 // bytes of the table with its indexes
	wal          float64 // bytes, of the whole server
	conns        float64 // open in the database
	cpu          time.Duration
}

// size is what events cost that are done. A run's connections stay open, and
// are made only when none of those before is free, so those at its end are the
// most that were in use.
func size(ctx context.Context, b *bus) (figures, error) {
	client, bridge, err := b.ours(ctx)
	if err != nil {
		return nil, err
	}
	before, err := b.footprint(ctx)
	if err != nil {
		return nil, err
	}
	var after footprint
	err = working(ctx, client, func() error {
		return bridging(ctx, bridge, func() error {
			if err := b.pass(ctx, b.events, eventsDone, func(events int) error { return b.emit(ctx, events) }); err != nil {
				return err
			}
			after, err = b.footprint(ctx)
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	events, jobs := float64(b.events), float64(b.jobs())
	return figures{
		// A megabyte per million is a byte per one.
		"events": (after.events - before.events) / events,
		"jobs":   (after.jobs - before.jobs) / jobs,
		"wal":    (after.wal - before.wal) / events,
		"conns":  after.conns,
		"cpu":    float64(after.cpu-before.cpu) / float64(time.Millisecond) / events * 1000,
	}, nil
}

func (b *bus) footprint(ctx context.Context) (footprint, error) {
	var f footprint
	if err := b.pool.QueryRow(ctx, readFootprint).Scan(&f.events, &f.jobs, &f.wal, &f.conns); err != nil {
		return f, fmt.Errorf("read sizes: %w", err)
	}
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return f, fmt.Errorf("read CPU time: %w", err)
	}
	f.cpu = time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	return f, nil
}
