package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each Go block of README names its file in the first line. All of them
// together, laid over this module, must compile.
func TestReadmeExamplesCompile(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```go\n// ([a-z0-9_/]+)\\.go\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	require.Len(t, blocks, 5)

	overlay := struct{ Replace map[string]string }{make(map[string]string)}
	folder := t.TempDir()
	for _, block := range blocks {
		path := filepath.Join(folder, filepath.Base(block[1])+".go")
		require.NoError(t, os.WriteFile(path, []byte(block[2]), 0o600))
		overlay.Replace[filepath.Join(root, block[1]+".go")] = path
	}
	encoded, err := json.Marshal(overlay)
	require.NoError(t, err)
	path := filepath.Join(folder, "overlay.json")
	require.NoError(t, os.WriteFile(path, encoded, 0o600))

	build := exec.CommandContext(t.Context(), "go", "build", "-overlay", path, "./eventlog/event", "./jobs", "./leads", "./receiver")
	build.Dir = root
	output, err := build.CombinedOutput()
	require.NoError(t, err, string(output))
}
