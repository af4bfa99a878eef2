package main

import (
	"encoding/json"
	"flag"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"afluente/eventlog/event"
)

var update = flag.Bool("update", false, "write eventlog/event/README.md and the pictures anew")

func TestCatalogPageIsFresh(t *testing.T) {
	t.Parallel()
	const page = "../../eventlog/event/README.md"
	code, stdout, stderr := runCommand(t, "", "catalog")
	require.Zero(t, code, stderr)
	if *update {
		require.NoError(t, os.WriteFile(page, []byte(stdout), 0o644))
	}
	committed, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Equal(t, string(committed), stdout, "stale: go test ./cmd/afluente -run CatalogPage -update")
}

func TestCatalogAsJSONHasEverySchema(t *testing.T) {
	t.Parallel()
	code, stdout, stderr := runCommand(t, "", "catalog", "--json")
	require.Zero(t, code, stderr)
	var schemas map[string]struct {
		Title   string `json:"title"`
		Version string `json:"version"`
	}
	require.NoError(t, json.Unmarshal([]byte(stdout), &schemas))
	require.Len(t, schemas, len(event.All()))
	for name, schema := range schemas {
		require.Equal(t, name, schema.Title)
		require.NotEmpty(t, schema.Version)
	}
}
