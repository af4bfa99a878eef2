package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"afluente/jobs/webhook"
)

// Each Go block of README names its file in the first line. All of them
// together, laid over this module, must compile.
func TestReadmeExamplesCompile(t *testing.T) {
	t.Parallel()
	readme, root := readReadme(t)
	blocks := regexp.MustCompile("(?s)```go\n// ([a-z0-9_/]+)\\.go\n(.*?)```").FindAllStringSubmatch(readme, -1)
	require.Len(t, blocks, 5)
	files := make(map[string]string)
	for _, block := range blocks {
		files[block[1]+".go"] = block[2]
	}
	path := overlay(t, root, files)

	build := exec.CommandContext(t.Context(), "go", "build", "-overlay", path, "./eventlog/event", "./jobs", "./leads", "./receiver")
	build.Dir = root
	output, err := build.CombinedOutput()
	require.NoError(t, err, string(output))
}

func readReadme(t *testing.T) (text, root string) {
	t.Helper()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	root, err = filepath.Abs("../..")
	require.NoError(t, err)
	return string(readme), root
}

// overlay returns the file that lays others, by their paths in the module, over it.
func overlay(t *testing.T, root string, files map[string]string) string {
	t.Helper()
	overlay := struct{ Replace map[string]string }{make(map[string]string)}
	folder := t.TempDir()
	for name, content := range files {
		path := filepath.Join(folder, strings.ReplaceAll(name, "/", "_"))
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		overlay.Replace[filepath.Join(root, name)] = path
	}
	encoded, err := json.Marshal(overlay)
	require.NoError(t, err)
	path := filepath.Join(folder, "overlay.json")
	require.NoError(t, os.WriteFile(path, encoded, 0o600))
	return path
}

// What README tells receivers to do takes what is signed and nothing else, in each
// language that is there to run it.
func TestReadmeReceiversVerify(t *testing.T) {
	t.Parallel()
	readme, root := readReadme(t)
	block := func(language string) string {
		found := regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(readme, -1)
		for _, match := range found {
			if strings.Contains(strings.ToLower(match[1]), "verify(secret") {
				return match[1]
			}
		}
		require.FailNow(t, "no example in "+language)
		return ""
	}
	// Each reads {"secret", "headers", "body"} lines and prints true or false for each.
	folder := t.TempDir()
	node, python := filepath.Join(folder, "verify.mjs"), filepath.Join(folder, "verify.py")
	require.NoError(t, os.WriteFile(node, []byte(block("js")+`
import { readFileSync } from 'node:fs';
for (const line of readFileSync(0, 'utf8').split('\n').filter(Boolean)) {
  const { secret, headers, body } = JSON.parse(line);
  console.log(verify(secret, headers, Buffer.from(body)));
}`), 0o600))
	require.NoError(t, os.WriteFile(python, []byte(block("python")+`
import json, sys
for line in sys.stdin:
    call = json.loads(line)
    print(str(bool(verify(call["secret"], call["headers"], call["body"].encode()))).lower())
`), 0o600))
	golang := overlay(t, root, map[string]string{
		"receiver/verify.go": block("go"),
		"receiver/main/main.go": `package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"

	"afluente/receiver"
)

func main() {
	for decoder := json.NewDecoder(os.Stdin); decoder.More(); {
		var call struct {
			Secret  string
			Headers map[string]string
			Body    string
		}
		if err := decoder.Decode(&call); err != nil {
			panic(err)
		}
		header := make(http.Header)
		for name, value := range call.Headers {
			header.Set(name, value)
		}
		fmt.Println(receiver.Verify(call.Secret, header, []byte(call.Body)))
	}
}`,
	})

	for _, receiver := range [][]string{{"go", "run", "-overlay", golang, "./receiver/main"}, {"node", node}, {"python3", python}} {
		t.Run(receiver[0], func(t *testing.T) {
			t.Parallel()
			if _, err := exec.LookPath(receiver[0]); err != nil {
				t.Skip(err)
			}
			input, want := receiverCalls(t)
			command := exec.CommandContext(t.Context(), receiver[0], receiver[1:]...)
			command.Dir, command.Stdin = root, input
			output, err := command.CombinedOutput()
			require.NoError(t, err, string(output))
			require.Equal(t, want, string(output))
		})
	}
}

// receiverCalls returns calls, signed now, and what a receiver says of each.
func receiverCalls(t *testing.T) (input *bytes.Buffer, want string) {
	t.Helper()
	secret, old := webhook.NewSecret(), webhook.NewSecret()
	const body = `{"id":"x","data":{"name":"João <b>&</b>"}}`
	signed := func(at time.Time, secrets ...string) map[string]string {
		header, err := webhook.Sign(webhook.Request{EventID: "e", At: at, Secrets: secrets, Legacy: secrets[0], Body: []byte(body)})
		require.NoError(t, err)
		headers := make(map[string]string)
		for name, values := range header {
			headers[strings.ToLower(name)] = values[0]
		}
		return headers
	}
	with := func(name, value string) map[string]string {
		headers := signed(time.Now(), secret)
		headers[name] = value
		return headers
	}
	signature := signed(time.Now(), secret)["webhook-signature"]
	type call struct {
		Secret  string            `json:"secret"`
		Headers map[string]string `json:"headers"`
		Body    string            `json:"body"`
	}
	calls := []call{
		{secret, signed(time.Now(), secret), body},
		{secret, signed(time.Now(), secret, old), body},
		{secret, signed(time.Now(), old, secret), body},
		{old, signed(time.Now(), secret), body},
		{secret, signed(time.Now(), secret), body + " "},
		{secret, signed(time.Now().Add(-time.Hour), secret), body},
		{secret, signed(time.Now().Add(time.Hour), secret), body},
		{secret, with("webhook-id", "f"), body},
		{secret, with("webhook-timestamp", "soon"), body},
		{secret, with("webhook-timestamp", ""), body},
		{secret, with("webhook-signature", ""), body},
		{secret, with("webhook-signature", "v1,"), body},
		{secret, with("webhook-signature", signature[:len(signature)-4]), body},
		{secret, with("webhook-signature", strings.ToUpper(signature)), body},
		{secret, with("webhook-signature", strings.Replace(signature, "v1,", "v2,", 1)), body},
		{secret, with("webhook-signature", "v1,é"), body},
	}
	want = strings.Repeat("true\n", 3) + strings.Repeat("false\n", len(calls)-3)
	input = &bytes.Buffer{}
	for _, c := range calls {
		require.NoError(t, json.NewEncoder(input).Encode(c))
	}
	return input, want
}
