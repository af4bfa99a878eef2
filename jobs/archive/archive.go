// Package archive moves rows that are past their time from the database to
// object storage, and brings them back.
//
// It promises that at every moment, wherever a run is killed, each row is in
// its table or in a part that was written, read back and found whole, and that
// an event which is not done never leaves its table. A run that goes through
// leaves nothing in both places.
package archive

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"gocloud.dev/blob"
	"gocloud.dev/blob/fileblob"
	"gocloud.dev/blob/s3blob"

	"afluente/db"
)

// Tables that have an archive.
const (
	Events = "event_log"
	Audit  = "audit_log"
)

const (
	// maxPartRows bounds a part and the temporary file that becomes it, and so
	// what a run that is killed must do again.
	maxPartRows = 100_000

	// deleteBatch is how many rows one transaction deletes, or restores.
	deleteBatch = 5000
	batchBytes  = 16 << 20
	day         = 24 * time.Hour
)

// Archive is the place for old rows. Its fields are required and must not
// change while it is used. Its methods may be called from several goroutines
// and processes.
type Archive struct {
	Pool *pgxpool.Pool
	// URL is a folder, file:///var/lib/afluente/archive, which is made where it
	// is missing, or a bucket, s3://name?region=sa-east-1, whose credentials
	// come from where the AWS SDK looks for them.
	URL string
	// Retention is how long rows stay in their tables: a day (UTC) leaves as a
	// whole once it ended that long ago.
	Retention time.Duration
	Now       func() time.Time

	partRows int // 0 means maxPartRows
}

// CheckURL returns an error unless the URL is one that an Archive can have. It
// asks neither disk nor network for the place itself.
func CheckURL(text string) error {
	location, err := url.Parse(text)
	switch {
	case err == nil && location.User != nil:
		return errors.New("must not hold credentials; they come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
	case err == nil && location.Scheme == fileblob.Scheme && location.Host == "" && path.IsAbs(location.Path) && location.RawQuery == "":
		return nil
	case err == nil && location.Scheme == s3blob.Scheme && location.Host != "" && strings.Trim(location.Path, "/") == "":
		bucket, err := blob.OpenBucket(context.Background(), text)
		if err != nil {
			return fmt.Errorf("cannot be used: %w", err)
		}
		return bucket.Close()
	}
	return errors.New("is not a URL such as file:///var/lib/afluente/archive or s3://bucket?region=sa-east-1")
}

// session is an archive with its bucket open.
type session struct {
	*Archive

	bucket *blob.Bucket
}

func (a *Archive) open(ctx context.Context) (*session, error) {
	location, err := url.Parse(a.URL)
	if err != nil {
		return nil, fmt.Errorf("parse archive URL: %w", err)
	}
	if location.Scheme == fileblob.Scheme {
		query := location.Query()
		query.Set("create_dir", "true")
		query.Set("dir_file_mode", "0o700")
		query.Set("no_tmp_dir", "true") // a part appears by a rename, which has to stay on one disk
		location.RawQuery = query.Encode()
	}
	bucket, err := blob.OpenBucket(ctx, location.String())
	if err != nil {
		return nil, fmt.Errorf("open archive: %w", err)
	}
	return &session{Archive: a, bucket: bucket}, nil
}

// Report tells what a run did.
type Report struct {
	// Skipped says that another run is under way.
	Skipped       bool  `json:"skipped,omitempty"`
	Rows          int64 `json:"rows"`
	Parts         int   `json:"parts"`
	DroppedMonths int   `json:"dropped_months"`
	PrunedKeys    int64 `json:"pruned_keys"`
}

// Run archives every day that is past its time, drops the months that are
// empty by then, and forgets the idempotency keys of that time. Two runs at
// once are harmless; the second returns at once.
func (a *Archive) Run(ctx context.Context) (report Report, err error) {
	// A session's lock would stay on some connection of a transaction pooler, and
	// no run would get it again.
	lock, err := a.Pool.Begin(ctx)
	if err != nil {
		return report, fmt.Errorf("begin archive run: %w", err)
	}
	defer lock.Rollback(context.WithoutCancel(ctx))
	locked, err := db.New(lock).TryArchiveLock(ctx)
	if err != nil {
		return report, fmt.Errorf("lock archive: %w", err)
	}
	if !locked {
		return Report{Skipped: true}, nil
	}
	if err := db.New(lock).StayIdle(ctx); err != nil {
		return report, fmt.Errorf("keep archive lock: %w", err)
	}

	s, err := a.open(ctx)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, s.bucket.Close()) }()
	queries := db.New(a.Pool)
	before := a.Now().Add(-a.Retention).UTC().Truncate(day)
	for _, t := range []struct {
		name string
		days func(context.Context, time.Time) ([]time.Time, error)
	}{{Events, queries.ListArchivableEventDays}, {Audit, queries.ListArchivableAuditDays}} {
		days, err := t.days(ctx, before)
		if err != nil {
			return report, fmt.Errorf("list days of %s: %w", t.name, err)
		}
		for _, at := range days {
			if err := s.archiveDay(ctx, t.name, at.UTC(), &report); err != nil {
				return report, fmt.Errorf("archive %s of %s: %w", t.name, at.UTC().Format(time.DateOnly), err)
			}
		}
	}
	return report, s.dropAndPrune(ctx, before, &report)
}

func (s *session) dropAndPrune(ctx context.Context, before time.Time, report *Report) error {
	queries := db.New(s.Pool)
	months, err := queries.ListEventMonths(ctx, before)
	if err != nil {
		return fmt.Errorf("list months: %w", err)
	}
	for _, month := range months {
		dropped, err := queries.DropEventMonth(ctx, month)
		if err != nil {
			return fmt.Errorf("drop month: %w", err)
		}
		if dropped {
			report.DroppedMonths++
		}
	}
	for {
		pruned, err := queries.DeleteOldIdempotencyKeys(ctx, before, deleteBatch)
		if err != nil {
			return fmt.Errorf("prune idempotency keys: %w", err)
		}
		report.PrunedKeys += pruned
		if pruned < deleteBatch {
			return nil
		}
	}
}

// archiveDay first takes out of the table what an earlier run has archived but
// not deleted any more, and then archives what is left.
func (s *session) archiveDay(ctx context.Context, table string, at time.Time, report *Report) error {
	parts, err := s.parts(ctx, table, at)
	if err != nil {
		return err
	}
	for _, key := range parts {
		switch err := s.verify(ctx, key); {
		case errors.Is(err, errNotWhole): // as if it were not there; an operator may look at it
			continue
		case err != nil:
			return err
		}
		if err := s.deleteRows(ctx, table, key, report); err != nil {
			return err
		}
	}
	for {
		key, err := s.write(ctx, table, at)
		if err != nil || key == "" {
			return err
		}
		if err := s.verify(ctx, key); err != nil {
			return err
		}
		report.Parts++
		before := report.Rows
		if err := s.deleteRows(ctx, table, key, report); err != nil {
			return err
		}
		if report.Rows == before {
			return nil // all of them changed meanwhile; the next run has them
		}
	}
}

// deleteRows deletes the rows that a part holds, where they are still the same.
func (s *session) deleteRows(ctx context.Context, table, key string, report *Report) error {
	queries := db.New(s.Pool)
	remove := queries.DeleteArchivedAuditRows
	if table == Events {
		remove = queries.DeleteArchivedEvents
	}
	return s.batches(ctx, key, func(rows []row) error {
		deleted, err := remove(ctx, jsonArray(rows))
		report.Rows += deleted
		if err != nil {
			return fmt.Errorf("delete archived rows: %w", err)
		}
		return nil
	})
}

// prefix is what the names of a day's parts begin with.
func prefix(table string, at time.Time) string {
	return fmt.Sprintf("%s/%s/%s-%s-", table, at.Format("2006/01"), table, at.Format(time.DateOnly))
}

// newKey is a name that no other run ever uses, so that no part is written over.
func (s *session) newKey(table string, at time.Time) string {
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails
	return fmt.Sprintf("%s%s-%s.ndjson.gz", prefix(table, at), s.Now().UTC().Format("20060102T150405.000000000Z"), hex.EncodeToString(random[:]))
}
