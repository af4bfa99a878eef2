package archive

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"gocloud.dev/blob"
)

// A part is one object: the rows of a table and a day as gzipped NDJSON. Its
// metadata tell how many rows it has and the SHA-256 of the lines.
const (
	rowsKey   = "rows"
	sha256Key = "sha256"
)

// errNotWhole is the error for a part that is not what was to be written.
var errNotWhole = errors.New("the part is not whole")

// row is what is read of an archived row.
type row struct {
	ID json.RawMessage `json:"id"`

	encoded []byte
}

// jsonArray is the rows as one array of JSON.
func jsonArray(rows []row) []byte {
	encoded := make([][]byte, len(rows))
	for i, r := range rows {
		encoded[i] = r.encoded
	}
	return slices.Concat([]byte("["), bytes.Join(encoded, []byte(",")), []byte("]"))
}

// key is the id as text, whether it is a UUID or a number.
func (r row) key() string { return strings.Trim(string(r.ID), `"`) }

// parts returns the names of a day's parts, oldest first.
func (s *session) parts(ctx context.Context, table string, at time.Time) ([]string, error) {
	var keys []string
	list := s.bucket.List(&blob.ListOptions{Prefix: prefix(table, at)})
	for {
		object, err := list.Next(ctx)
		if errors.Is(err, io.EOF) {
			slices.Sort(keys)
			return keys, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list parts: %w", err)
		}
		if strings.HasSuffix(object.Key, ".ndjson.gz") {
			keys = append(keys, object.Key)
		}
	}
}

// write puts rows of a day that may leave into a new part and returns its name,
// or "" when there are none. They go through a file, so that neither memory has
// to hold them nor a transaction has to wait for the object store.
func (s *session) write(ctx context.Context, table string, at time.Time) (key string, err error) {
	file, err := os.CreateTemp("", "afluente-archive-")
	if err != nil {
		return "", fmt.Errorf("make temporary file: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close(), os.Remove(file.Name())) }()

	counted := newCounter()
	zipped := gzip.NewWriter(file)
	if err := s.copyOut(ctx, io.MultiWriter(zipped, counted), table, at); err != nil {
		return "", err
	}
	if err := zipped.Close(); err != nil {
		return "", fmt.Errorf("write temporary file: %w", err)
	}
	if counted.rows == 0 {
		return "", nil
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return "", fmt.Errorf("read temporary file: %w", err)
	}
	key = s.newKey(table, at)
	err = s.bucket.Upload(ctx, key, file, &blob.WriterOptions{
		ContentType: "application/gzip",
		Metadata:    map[string]string{rowsKey: strconv.Itoa(counted.rows), sha256Key: counted.sum()},
	})
	if err != nil {
		return "", fmt.Errorf("write part: %w", err)
	}
	return key, nil
}

// copyOut writes rows of a day that may leave, one line of JSON each, as many
// as a part takes.
//
// sqlc gathers the rows of a query in memory; COPY streams them. JSON text of
// PostgreSQL has no control characters, so with two of them as quote and
// delimiter CSV is the text itself.
func (s *session) copyOut(ctx context.Context, w io.Writer, table string, at time.Time) error {
	condition := ""
	if table == Events {
		condition = " AND status = 'done'"
	}
	statement := fmt.Sprintf(`COPY (
			SELECT to_jsonb(t) FROM public.%s AS t WHERE created_at >= '%s' AND created_at < '%s'%s LIMIT %d
		) TO STDOUT (FORMAT csv, QUOTE E'\x01', DELIMITER E'\x02')`,
		table, at.Format(time.RFC3339), at.Add(day).Format(time.RFC3339), condition, cmp.Or(s.partRows, maxPartRows))
	conn, err := s.Pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer conn.Release()
	if _, err := conn.Conn().PgConn().CopyTo(ctx, w, statement); err != nil {
		return fmt.Errorf("copy rows: %w", err)
	}
	return nil
}

// verify reads a part back and returns errNotWhole unless it is what its
// metadata say.
func (s *session) verify(ctx context.Context, key string) error {
	attributes, err := s.bucket.Attributes(ctx, key)
	if err != nil {
		return fmt.Errorf("read part: %w", err)
	}
	counted := newCounter()
	err = s.read(ctx, key, func(r io.Reader) error {
		_, err := io.Copy(counted, r)
		return err
	})
	if err != nil && ctx.Err() != nil {
		return err
	}
	if err != nil || attributes.Metadata[rowsKey] != strconv.Itoa(counted.rows) || attributes.Metadata[sha256Key] != counted.sum() {
		return fmt.Errorf("verify %s: %w", key, errNotWhole)
	}
	return nil
}

// read calls f with the lines of a part.
func (s *session) read(ctx context.Context, key string, f func(io.Reader) error) (err error) {
	object, err := s.bucket.NewReader(ctx, key, &blob.ReaderOptions{BeforeRead: func(as func(any) bool) error {
		var file *os.File
		if as(&file) {
			return syncToDisk(file.Name())
		}
		return nil
	}})
	if err != nil {
		return fmt.Errorf("read part: %w", err)
	}
	defer func() { err = errors.Join(err, object.Close()) }()
	unzipped, err := gzip.NewReader(object)
	if err != nil {
		return fmt.Errorf("read part: %w", err)
	}
	if err := f(unzipped); err != nil {
		return fmt.Errorf("read part: %w", err)
	}
	return nil
}

// syncToDisk makes a part that is on a disk of this machine outlive a power cut:
// the file, its metadata beside it, and the names of the folders down to them.
func syncToDisk(name string) error {
	paths := []string{name, name + ".attrs"}
	for range strings.Count(prefix("", time.Time{}), "/") + 1 {
		name = filepath.Dir(name)
		paths = append(paths, name)
	}
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		if err := errors.Join(file.Sync(), file.Close()); err != nil {
			return err
		}
	}
	return nil
}

// batches calls f with the rows of a part, deleteBatch or about batchBytes of
// them at a time.
func (s *session) batches(ctx context.Context, key string, f func([]row) error) error {
	return s.read(ctx, key, func(r io.Reader) error {
		lines := bufio.NewReader(r)
		var rows []row
		size := 0
		for {
			line, err := lines.ReadBytes('\n')
			if errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return err
			}
			next := row{encoded: bytes.TrimSuffix(line, []byte("\n"))}
			if err := json.Unmarshal(next.encoded, &next); err != nil {
				return fmt.Errorf("decode row: %w", err)
			}
			rows, size = append(rows, next), size+len(line)
			if len(rows) == deleteBatch || size > batchBytes {
				if err := f(rows); err != nil {
					return err
				}
				rows, size = nil, 0
			}
		}
		if len(rows) == 0 {
			return nil
		}
		return f(rows)
	})
}

// counter counts lines and hashes them.
type counter struct {
	hash hash.Hash
	rows int
}

func newCounter() *counter { return &counter{hash: sha256.New()} }

func (c *counter) Write(p []byte) (int, error) {
	c.rows += bytes.Count(p, []byte("\n"))
	return c.hash.Write(p)
}

func (c *counter) sum() string { return hex.EncodeToString(c.hash.Sum(nil)) }
