package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"afluente/jobs/sandbox"
)

func loadOpenAPI(t *testing.T) *openapi3.T {
	t.Helper()
	document, err := openapi3.NewLoader().LoadFromData(openAPI)
	require.NoError(t, err)
	require.NoError(t, document.Validate(t.Context()))
	return document
}

func TestOpenAPIDescribesEveryRoute(t *testing.T) {
	t.Parallel()
	var described, served []string
	for path, item := range loadOpenAPI(t).Paths.Map() {
		for method := range item.Operations() {
			described = append(described, method+" "+path)
		}
	}
	for _, route := range webhookRoutes() {
		served = append(served, route.pattern)
	}
	require.ElementsMatch(t, served, described)
}

// apiClient calls the API and holds each answer against its description.
type apiClient struct {
	base   string
	token  string
	router routers.Router
}

func newAPIClient(t *testing.T, address, token string) *apiClient {
	t.Helper()
	document := loadOpenAPI(t)
	document.Servers = openapi3.Servers{{URL: "http://" + address}}
	router, err := gorillamux.NewRouter(document)
	require.NoError(t, err)
	return &apiClient{base: "http://" + address, token: token, router: router}
}

// call returns the status and the answer's fields.
func (c *apiClient) call(t *testing.T, method, path, body string, headers ...string) (int, map[string]any) {
	t.Helper()
	status, text := c.raw(t, method, path, body, headers...)
	var answer map[string]any
	if len(text) > 0 && text[0] == '{' {
		require.NoError(t, json.Unmarshal(text, &answer))
	}
	return status, answer
}

func (c *apiClient) raw(t *testing.T, method, path, body string, headers ...string) (int, []byte) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, c.base+"/api/v1/webhooks"+path, strings.NewReader(body))
	require.NoError(t, err)
	if c.token != "" {
		request.Header.Set("Authorization", "Bearer "+c.token)
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)

	route, params, err := c.router.FindRoute(request)
	require.NoError(t, err)
	err = openapi3filter.ValidateResponse(t.Context(), &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: request, PathParams: params, Route: route},
		Status:                 response.StatusCode, Header: response.Header, Body: io.NopCloser(bytes.NewReader(text)),
		Options: &openapi3filter.Options{IncludeResponseStatus: true},
	})
	require.NoError(t, err, "%s %s", method, path)
	return response.StatusCode, text
}

func tokenOf(t *testing.T, claims jwt.MapClaims) string {
	t.Helper()
	return sign(t, jwt.SigningMethodHS256, []byte(testSecret), claims)
}

// An organization makes a webhook, breaks it, mends it and gets all it has missed,
// over HTTP alone.
func TestWebhookAPI(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	mustExec(t, w.pool, "DELETE FROM webhook_subscriptions; INSERT INTO organizations (id) VALUES ('"+otherOrganization+"')")
	receiver, err := sandbox.StartReceiver(t.Context(), sandbox.Config{Addr: "127.0.0.1:0"})
	require.NoError(t, err)
	t.Cleanup(receiver.Close)
	process, at := w.serve(t)
	client := newAPIClient(t, at, tokenOf(t, jwt.MapClaims{"organization_id": demoOrganization, "sub": "ada"}))

	code, created := client.call(t, "POST", "", `{"url": "`+receiver.URL()+`", "event_types": ["lead.*"], "headers": {"X-Api-Key": "hidden"}}`)
	require.Equal(t, http.StatusCreated, code, created)
	require.Contains(t, created["secret"], "whsec_")
	id := "/" + created["id"].(string)
	code, text := client.raw(t, "GET", "", "")
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, string(text), created["id"])
	require.NotContains(t, string(text), "hidden")
	require.NotContains(t, string(text), "whsec_")
	code, answer := client.call(t, "POST", id+"/test", "")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, true, answer["ok"], answer)
	require.Equal(t, "hidden", receiver.Calls()[0].Header.Get("X-Api-Key"))

	receiver.SetFault(sandbox.Fault{Status: http.StatusGone})
	eventID := w.emit(t, demoOrganization, "lead.won", `{"value": 1}`)
	eventually(t, time.Minute, "a disabled webhook", func() bool {
		_, answer = client.call(t, "GET", id, "")
		return answer["enabled"] == false
	})
	require.Equal(t, "gone", answer["disabled_reason"])
	receiver.ClearFault()
	code, _ = client.call(t, "POST", id+"/recover", `{"since": "2020-01-01T00:00:00Z"}`)
	require.Equal(t, http.StatusConflict, code)
	code, answer = client.call(t, "POST", id+"/enable", "")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, true, answer["enabled"])
	code, answer = client.call(t, "POST", id+"/recover", `{"since": "2020-01-01T00:00:00Z"}`)
	require.Equal(t, http.StatusAccepted, code)
	require.InDelta(t, 1, answer["recovered"], 0)
	succeeded := func(n int) string {
		var deliveries []map[string]any
		eventually(t, time.Minute, "deliveries", func() bool {
			code, text := client.raw(t, "GET", id+"/deliveries?state=succeeded&limit=10", "")
			require.Equal(t, http.StatusOK, code)
			require.NoError(t, json.Unmarshal(text, &deliveries))
			return len(deliveries) == n
		})
		return deliveries[0]["id"].(string)
	}
	delivery := succeeded(1)
	code, answer = client.call(t, "GET", id+"/deliveries/"+delivery, "")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, eventID, answer["event_id"])
	require.Len(t, answer["attempt_log"], 2)
	for range 2 {
		code, _ = client.call(t, "POST", id+"/deliveries/"+delivery+"/resend", "", "Idempotency-Key", "k")
		require.Equal(t, http.StatusAccepted, code)
	}
	require.NoError(t, receiver.AwaitCalls(t.Context(), 4))
	succeeded(1)

	code, answer = client.call(t, "POST", id+"/rotate", `{"grace": "1h"}`)
	require.Equal(t, http.StatusOK, code)
	require.NotEqual(t, created["secret"], answer["secret"])
	code, _ = client.call(t, "POST", id+"/promote", "")
	require.Equal(t, http.StatusOK, code)
	code, answer = client.call(t, "PATCH", id, `{"event_types": ["*"], "description": "all"}`)
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, "all", answer["description"])
	code, answer = client.call(t, "POST", id+"/replay-missing", `{"since": "`+time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)+`"}`)
	require.Equal(t, http.StatusAccepted, code)
	require.InDelta(t, 0, answer["replayed"], 1)
	code, _ = client.call(t, "POST", id+"/disable", "")
	require.Equal(t, http.StatusOK, code)

	other := newAPIClient(t, at, tokenOf(t, jwt.MapClaims{"organization_id": otherOrganization}))
	code, text = other.raw(t, "GET", "", "")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, "[]\n", string(text))
	for _, route := range webhookRoutes() {
		method, path, _ := strings.Cut(route.pattern, " ")
		path = strings.NewReplacer(webhooksPath, "", "{id}", created["id"].(string), "{delivery}", delivery).Replace(path)
		if path == "" {
			continue
		}
		body := ""
		if strings.HasSuffix(path, "/recover") || strings.HasSuffix(path, "/replay-missing") {
			body = `{"since": "` + time.Now().UTC().Format(time.RFC3339) + `"}`
		}
		code, _ := other.call(t, method, path, body)
		require.Equal(t, http.StatusNotFound, code, route.pattern)
	}
	require.Equal(t, 4, receiver.Total(), "nothing came of that")
	code, _ = client.raw(t, "DELETE", id, "")
	require.Equal(t, http.StatusNoContent, code)
	code, _ = client.call(t, "GET", id, "")
	require.Equal(t, http.StatusNotFound, code)
	require.Equal(t, 1, number(t, w.pool, "SELECT count(*) FROM audit_log WHERE action = 'webhook.deleted' AND actor_id = 'user:ada'"))
	process.stop(t)
	require.NotContains(t, process.stderr.String(), created["secret"])
}

func TestWebhookAPIRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, at := w.serve(t, "--webhook-roles", "owner,admin")
	admin := tokenOf(t, jwt.MapClaims{"organization_id": demoOrganization, "role": "authenticated", "app_metadata": map[string]any{"role": "admin"}})
	client := newAPIClient(t, at, admin)
	code, _ := client.call(t, "GET", "", "")
	require.Equal(t, http.StatusOK, code)
	for name, test := range map[string]struct {
		token string
		code  int
	}{
		"no token":         {"", http.StatusUnauthorized},
		"a forged token":   {sign(t, jwt.SigningMethodHS256, []byte("another secret of 32 bytes or so"), jwt.MapClaims{"organization_id": demoOrganization}), http.StatusUnauthorized},
		"no organization":  {tokenOf(t, jwt.MapClaims{"app_metadata": map[string]any{"role": "admin"}}), http.StatusForbidden},
		"no role":          {tokenOf(t, jwt.MapClaims{"organization_id": demoOrganization}), http.StatusForbidden},
		"another role":     {tokenOf(t, jwt.MapClaims{"organization_id": demoOrganization, "role": "agent"}), http.StatusForbidden},
		"a role of no use": {tokenOf(t, jwt.MapClaims{"organization_id": demoOrganization, "role": "admin", "app_metadata": map[string]any{"role": "agent"}}), http.StatusForbidden},
	} {
		code, _ := newAPIClient(t, at, test.token).call(t, "GET", "", "")
		require.Equal(t, test.code, code, name)
	}
	code, _ = client.call(t, "POST", "", `{"url": "`+w.receiver.URL()+`", "event_types": ["*"]}`)
	require.Equal(t, http.StatusCreated, code)
	made := "/" + demoSubscription
	for name, test := range map[string]struct {
		method, path, body string
		code               int
	}{
		"no JSON":              {"POST", "", `{`, http.StatusBadRequest},
		"another kind of JSON": {"POST", "", `{"url": 5}`, http.StatusBadRequest},
		"two values":           {"POST", "", `{} {}`, http.StatusBadRequest},
		"an unknown field":     {"PATCH", made, `{"secret": "x"}`, http.StatusBadRequest},
		"a huge body":          {"POST", "", `{"description": "` + strings.Repeat("a", maxWebhookBody) + `"}`, http.StatusRequestEntityTooLarge},
		"nothing required":     {"POST", "", "", http.StatusUnprocessableEntity},
		"a private address":    {"POST", "", `{"url": "https://169.254.169.254/", "event_types": ["*"]}`, http.StatusUnprocessableEntity},
		"an address inside":    {"PATCH", made, `{"url": "http://10.0.0.1/"}`, http.StatusUnprocessableEntity},
		"NUL":                  {"PATCH", made, `{"description": "\u0000"}`, http.StatusUnprocessableEntity},
		"a weak secret":        {"POST", made + "/rotate", `{"secret": "x"}`, http.StatusUnprocessableEntity},
		"no duration":          {"POST", made + "/rotate", `{"grace": "a day"}`, http.StatusUnprocessableEntity},
		"a long grace":         {"POST", made + "/rotate", `{"grace": "169h"}`, http.StatusUnprocessableEntity},
		"no since":             {"POST", made + "/recover", "", http.StatusUnprocessableEntity},
		"no time":              {"POST", made + "/recover", `{"since": "yesterday"}`, http.StatusBadRequest},
		"long ago":             {"POST", made + "/replay-missing", `{"since": "0001-01-01T00:00:00Z"}`, http.StatusUnprocessableEntity},
		"an unknown state":     {"GET", made + "/deliveries?state=lost", "", http.StatusUnprocessableEntity},
		"a limit of none":      {"GET", made + "/deliveries?limit=0", "", http.StatusUnprocessableEntity},
		"no page":              {"GET", made + "/deliveries?after=x", "", http.StatusUnprocessableEntity},
		"no id":                {"GET", "/x", "", http.StatusNotFound},
		"no delivery's id":     {"GET", made + "/deliveries/x", "", http.StatusNotFound},
		"an unknown delivery":  {"POST", made + "/deliveries/" + uuid.NewString() + "/resend", "", http.StatusNotFound},
	} {
		code, answer := client.call(t, test.method, test.path, test.body)
		require.Equal(t, test.code, code, "%s: %v", name, answer)
		require.NotEmpty(t, answer["message"], name)
	}

	request, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, "http://"+at+"/api/v1/webhooks/x/enable", http.NoBody)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, "*", response.Header.Get("Access-Control-Allow-Origin"))
	code, text := get(t, "http://"+at+"/api/v1/openapi.json")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, string(openAPI), text)

	_, at = w.serve(t, "--jwt-secret", "")
	code, _ = newAPIClient(t, at, admin).call(t, "GET", "", "")
	require.Equal(t, http.StatusNotFound, code, "without keys of tokens there is no API")
}

func TestWebhookCommands(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	mustExec(t, w.pool, "DELETE FROM webhook_subscriptions")
	receiver, err := sandbox.StartReceiver(t.Context(), sandbox.Config{Addr: "127.0.0.1:0"})
	require.NoError(t, err)
	t.Cleanup(receiver.Close)
	w.serve(t)
	run := func(args ...string) (code int, stdout, stderr string) {
		return runCommand(t, w.url, append([]string{
			"webhook", "--webhook-allowed-cidrs", "127.0.0.0/8", "--webhook-keys", demoWebhookKey,
		}, args...)...)
	}
	good := func(args ...string) string {
		t.Helper()
		code, stdout, stderr := run(args...)
		require.Zero(t, code, "%v: %s", args, stderr)
		return stdout
	}
	secret := t.TempDir() + "/secret"
	require.NoError(t, os.WriteFile(secret, []byte("a secret of the customer's own\n"), 0o600))
	created := strings.Fields(good("create", receiver.URL(), "--org", demoOrganization, "--event", "lead.won,lead.lost", "--event", "contact.*",
		"--header", "X-Api-Key: k:1", "--secret", "@"+secret))
	require.Equal(t, "a secret of the customer's own", strings.Join(created[3:], " "))
	id := created[1]
	list := good("list", "--org", demoOrganization)
	require.Regexp(t, id+` +`+demoOrganization+` +enabled +0 +lead.won,lead.lost,contact.\* +http`, list)
	require.NotContains(t, good("list", "--org", uuid.NewString()), id)
	require.Contains(t, good("list", "--json"), `"X-Api-Key": "***"`)
	require.Contains(t, good("test", id), "answer 200 OK")
	require.Equal(t, "k:1", receiver.Calls()[0].Header.Get("X-Api-Key"))

	receiver.SetFault(sandbox.Fault{Status: http.StatusRequestEntityTooLarge})
	code, _, stderr := run("test", id)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "answer 413")
	w.emit(t, demoOrganization, "lead.won", `{"value": 1}`)
	state := func(want string) string {
		var line []string
		eventually(t, time.Minute, "a delivery that is "+want, func() bool {
			lines := strings.Split(good("deliveries", id, "--state", want), "\n")
			line = strings.Fields(lines[1])
			return len(line) > 0
		})
		return line[1]
	}
	delivery := state("dead")
	require.Contains(t, good("deliveries", id, "--json"), `"error_class": "too_large"`)
	receiver.ClearFault()
	require.Equal(t, "1 recovered\n", good("recover", id, "--since", "1h"))
	require.Equal(t, delivery, state("succeeded"))
	good("resend", delivery)
	require.NoError(t, receiver.AwaitCalls(t.Context(), 5))
	eventually(t, time.Minute, "three attempts", func() bool {
		return strings.Count(good("delivery", delivery), " success ") == 2
	})
	require.Contains(t, good("delivery", delivery, "--json"), `"class": "too_large"`)

	good("disable", id)
	require.Contains(t, good("list"), "disabled: by_user")
	good("enable", id)
	good("update", id, "--event", "*", "--header", "")
	require.Contains(t, good("list", "--json"), `"headers": {}`)
	require.Contains(t, good("replay-missing", id, "--since", "1h"), "0 replayed")
	require.Contains(t, good("rotate", id), "whsec_")
	good("promote", id)

	for _, args := range [][]string{
		{"create", "http://10.0.0.1/", "--org", demoOrganization, "--event", "*"},
		{"create", receiver.URL(), "--org", demoOrganization},
		{"create", receiver.URL(), "--event", "*"},
		{"create", receiver.URL(), "--org", demoOrganization, "--event", "*", "--secret", "short"},
		{"create", receiver.URL(), "--org", demoOrganization, "--event", "*", "--header", "no colon"},
		{"update", id, "--max-concurrent", "0"},
		{"update", "x"},
		{"deliveries", id, "--limit", "0"},
		{"deliveries", id, "--state", "lost"},
		{"recover", id},
		{"recover", id, "--since", "soon"},
		{"rotate", id, "--grace", "1000h"},
		{"list", "--org", "x"},
		{"enable"},
	} {
		code, _, stderr := run(args...)
		require.Equal(t, 2, code, "%v: %s", args, stderr)
	}
	code, _, stderr = run("enable", uuid.NewString())
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "no such webhook")
	code, _, stderr = runCommand(t, w.url, "webhook", "create", receiver.URL(), "--org", demoOrganization, "--event", "*",
		"--webhook-allowed-cidrs", "127.0.0.0/8")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "AFLUENTE_WEBHOOK_KEYS")
	good("delete", id)
	require.NotContains(t, good("list"), id)
}
