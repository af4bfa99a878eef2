package archive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"
	"gocloud.dev/blob"

	"afluente/db"
)

// Restored tells what [Archive.Restore] did.
type Restored struct {
	Parts int   `json:"parts"`
	Read  int64 `json:"read"` // rows
	// Inserted is less than Read by the rows that were in the table already and
	// by those of organizations that are gone.
	Inserted int64 `json:"inserted"`
}

// Restore puts the archived rows of a day (UTC) back into their table, but
// those that are there and those that refer to what is gone, such as an
// organization. Events come back as they were, which is done, so
// nothing is fanned out again. The next run takes them away again. Each batch
// commits by itself; restoring twice is harmless.
func (a *Archive) Restore(ctx context.Context, table string, at time.Time) (restored Restored, err error) {
	s, err := a.open(ctx)
	if err != nil {
		return restored, err
	}
	defer func() { err = errors.Join(err, s.bucket.Close()) }()
	queries := db.New(a.Pool)
	insert := queries.RestoreAuditRows
	if table == Events {
		insert = queries.RestoreEvents
	}
	restored.Parts, err = s.newestFirst(ctx, table, at, func(rows []row) error {
		if table == Events && restored.Read == 0 { // only now is it sure that there is something to put there
			if _, err := queries.CreateEventMonth(ctx, at); err != nil {
				return fmt.Errorf("make month: %w", err)
			}
		}
		restored.Read += int64(len(rows))
		inserted, err := insertEach(ctx, rows, insert)
		restored.Inserted += inserted
		if err != nil {
			return fmt.Errorf("insert rows: %w", err)
		}
		return nil
	})
	return restored, err
}

// Days returns the days (UTC) of which the archive has rows of a table, oldest
// first.
func (a *Archive) Days(ctx context.Context, table string) (days []time.Time, err error) {
	s, err := a.open(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.bucket.Close()) }()
	list := s.bucket.List(&blob.ListOptions{Prefix: table + "/"})
	for {
		object, err := list.Next(ctx)
		if errors.Is(err, io.EOF) {
			slices.SortFunc(days, time.Time.Compare)
			return slices.Compact(days), nil
		} else if err != nil {
			return nil, fmt.Errorf("list parts: %w", err)
		}
		name := strings.TrimPrefix(path.Base(object.Key), table+"-")
		if len(name) < len(time.DateOnly) {
			continue
		}
		if at, err := time.Parse(time.DateOnly, name[:len(time.DateOnly)]); err == nil && strings.HasPrefix(object.Key, prefix(table, at)) {
			days = append(days, at)
		}
	}
}

// insertEach inserts the rows but those that refer to what is gone. It halves a
// batch with such rows until they are alone.
func insertEach(ctx context.Context, rows []row, insert func(context.Context, json.RawMessage) (int64, error)) (int64, error) {
	inserted, err := insert(ctx, jsonArray(rows))
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != pgerrcode.ForeignKeyViolation {
		return inserted, err
	}
	if len(rows) == 1 {
		return 0, nil
	}
	first, err := insertEach(ctx, rows[:len(rows)/2], insert)
	if err != nil {
		return first, err
	}
	second, err := insertEach(ctx, rows[len(rows)/2:], insert)
	return first + second, err
}

// Print writes the archived rows of a day to w, a line of JSON each, and
// changes nothing.
func (a *Archive) Print(ctx context.Context, w io.Writer, table string, at time.Time) (err error) {
	s, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.bucket.Close()) }()
	seen := make(map[string]bool)
	_, err = s.newestFirst(ctx, table, at, func(rows []row) error {
		for _, r := range rows {
			if seen[r.key()] {
				continue
			}
			seen[r.key()] = true
			if _, err := fmt.Fprintf(w, "%s\n", r.encoded); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

// newestFirst calls f with the rows of a day's parts, those of the newest part
// first: a row that was archived twice, since it changed in between, comes in
// its newest version first. It returns how many parts there are.
func (s *session) newestFirst(ctx context.Context, table string, at time.Time, f func([]row) error) (int, error) {
	keys, err := s.parts(ctx, table, at)
	if err != nil {
		return 0, err
	}
	slices.Reverse(keys)
	var broken []error
	for _, key := range keys {
		if err := s.verify(ctx, key); errors.Is(err, errNotWhole) {
			broken = append(broken, err) // what else there is comes back all the same
			continue
		} else if err != nil {
			return 0, err
		}
		if err := s.batches(ctx, key, f); err != nil {
			return 0, err
		}
	}
	return len(keys) - len(broken), errors.Join(broken...)
}
