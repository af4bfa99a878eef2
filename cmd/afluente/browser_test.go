package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	neturl "net/url"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"afluente/jobs/sandbox"
)

// newBrowser starts a real browser and returns the context of its tab. Without
// one on this machine the test is skipped, but in CI it fails.
func newBrowser(t *testing.T) context.Context {
	t.Helper()
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if found, err := exec.LookPath(name); err == nil {
			path = found
			break
		}
	}
	if path == "" {
		if os.Getenv("CI") != "" {
			t.Fatal("no browser: install chromium")
		}
		t.Skip("no browser on this machine")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir()),
		chromedp.Flag("disable-gpu", true), chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	ctx, stop := chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(stop)
	ctx, closeTab := chromedp.NewContext(ctx)
	t.Cleanup(closeTab)
	return ctx
}

// A page with an EventSource shows events as they come, and, when the
// connection breaks, exactly those that it has missed: the browser comes back
// by itself and says which it has seen.
func TestBrowserShowsTheStream(t *testing.T) {
	t.Parallel()
	tab := newBrowser(t)
	w := newWorld(t)
	mustExec(t, w.pool, "INSERT INTO organizations (id) VALUES ('"+otherOrganization+"')")
	_, stream := w.serveStream(t)

	// The page comes from another origin than the stream, which is reached
	// through a proxy that can cut the connection.
	target, err := neturl.Parse(stream)
	require.NoError(t, err)
	proxy := httptest.NewServer(&httputil.ReverseProxy{FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", target.Host, target.Host
	}})
	defer proxy.Close()
	defer proxy.CloseClientConnections()
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = fmt.Fprintf(w, `<!doctype html><title>stream</title><pre id="log"></pre><script>
			const log = document.getElementById('log');
			const events = new EventSource(%q);
			events.onopen = () => { log.append('open\n'); };
			events.addEventListener('lead.won', (e) => { log.append(JSON.parse(e.data).payload.name + '\n'); });
			events.addEventListener('reset', () => { log.append('reset\n'); });
		</script>`, proxy.URL+target.Path+"?type=lead.won&access_token="+demoToken(t))
	}))
	defer page.Close()

	shown := func(want ...string) {
		t.Helper()
		eventually(t, time.Minute, fmt.Sprintf("the page shows %q", want), func() bool {
			got, err := chromedp.Run(tab, chromedp.TextContent("#log"))
			require.NoError(t, err)
			return strings.Join(strings.Fields(got), " ") == strings.Join(want, " ")
		})
	}
	win := func(organization, name string) {
		t.Helper()
		w.emit(t, organization, "lead.won", `{"name": "`+name+`"}`)
	}
	_, err = chromedp.Run(tab, chromedp.Navigate(page.URL))
	require.NoError(t, err)
	shown("open")
	win(demoOrganization, "ada")
	win(otherOrganization, "never")
	win(demoOrganization, "bea")
	shown("open", "ada", "bea")

	proxy.CloseClientConnections()
	win(demoOrganization, "cleo")
	win(otherOrganization, "never")
	win(demoOrganization, "dora")
	shown("open", "ada", "bea", "open", "cleo", "dora")
	win(demoOrganization, "eva")
	shown("open", "ada", "bea", "open", "cleo", "dora", "eva")
}

// An operator finds the dead job of an event type by its tag in River UI, behind
// its password and a proxy's path, and presses Retry: the event is done. A page
// of another site, in the same signed-in browser, cannot press anything.
//
// With -update the picture in README is taken anew.
func TestBrowserRetriesADeadJob(t *testing.T) {
	t.Parallel()
	tab := newBrowser(t)
	w := newWorld(t)
	proxy := newRefusalProxy(t)
	public := proxy.URL + "/ops/bus"
	w.waha.SetFault(sandbox.Fault{Status: http.StatusBadRequest})
	_, at := w.serve(t, "--ui-user", "ada", "--ui-password", "hush-hush", "--public-url", public)
	proxy.target.Store(&at)
	w.queueMessages(t, 3)
	eventually(t, time.Minute, "dead events", func() bool {
		return number(t, w.pool, "SELECT count(*) FROM event_log WHERE status = 'dead' AND 'webhook-dispatch-worker' = ANY (consumed_by)") == 3
	})
	w.waha.ClearFault()

	show := func(actions ...chromedp.Action[chromedp.Void]) {
		t.Helper()
		for _, action := range actions {
			_, err := chromedp.Run(tab, action)
			require.NoError(t, err)
		}
	}
	dead := func() int { return number(t, w.pool, "SELECT count(*) FROM event_log WHERE status = 'dead'") }
	list := public + "/riverui/jobs?state=cancelled&tags=message-queued"
	show(
		chromedp.EmulateViewport(1280, 600),
		chromedp.Navigate(strings.Replace(public, "//", "//ada:hush-hush@", 1)+"/riverui/"), // signs in
		chromedp.Navigate(list),
		chromedp.WaitVisible(`//*[text()="whatsapp-send-worker"]`),
	)
	if *update {
		picture, err := chromedp.Run(tab, chromedp.CaptureScreenshot())
		require.NoError(t, err)
		require.NoError(t, os.WriteFile("testdata/console.png", picture, 0o644)) //nolint:gosec // everybody may see it
	}
	show(
		chromedp.Click(`//*[text()="whatsapp-send-worker"]`),
		chromedp.Click(`//button[normalize-space()="Retry"]`),
	)
	eventually(t, time.Minute, "one event done", func() bool { return dead() == 2 && len(w.waha.Sent()) == 1 })

	// Another program asks nobody for a password.
	open, openProxy := newWebServer(t, Config{}), newRefusalProxy(t)
	open.die(t, "x-worker")
	openAt := strings.TrimPrefix(open.URL, "http://")
	openProxy.target.Store(&openAt)
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = fmt.Fprintf(w, `<!doctype html><title>other</title><pre id="log"></pre><script>
			const ids = Array.from({length: 100}, (_, i) => String(i));
			for (const program of [%q, %q]) {
				for (const path of ['/riverui/api/jobs/retry', '/riverui/api/jobs/delete', '/api/dlq/retry']) {
					const body = path.startsWith('/api') ? '{}' : JSON.stringify({ids});
					fetch(program + path, {method: 'POST', mode: 'no-cors', credentials: 'include', body})
						.finally(() => document.getElementById('log').append('sent '));
				}
			}
		</script>`, public, openProxy.URL)
	}))
	defer page.Close()
	show(chromedp.Navigate(strings.Replace(page.URL, "127.0.0.1", "localhost", 1)))
	eventually(t, time.Minute, "the page has sent all", func() bool {
		got, err := chromedp.Run(tab, chromedp.TextContent("#log"))
		require.NoError(t, err)
		return len(strings.Fields(got)) == 6
	})
	require.Equal(t, int64(3), proxy.refused.Load())
	require.Equal(t, int64(3), openProxy.refused.Load())
	require.Equal(t, 2, dead())
	require.Equal(t, 2, number(t, w.pool, "SELECT count(*) FROM river.river_job WHERE state = 'cancelled'"))
	require.Equal(t, 1, number(t, open.pool, "SELECT count(*) FROM river.river_job WHERE state = 'discarded'"))
}

// refusalProxy stands in front of a program, keeps the path, and counts the
// POSTs that are refused.
type refusalProxy struct {
	*httptest.Server

	target  atomic.Pointer[string] // host:port
	refused atomic.Int64
}

func newRefusalProxy(t *testing.T) *refusalProxy {
	t.Helper()
	p := &refusalProxy{}
	p.Server = httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = "http", *p.target.Load() },
		ModifyResponse: func(response *http.Response) error {
			refused := response.StatusCode == http.StatusForbidden || response.StatusCode == http.StatusUnauthorized
			if response.Request.Method == http.MethodPost && refused {
				p.refused.Add(1)
			}
			return nil
		},
	})
	t.Cleanup(p.Close)
	return p
}
