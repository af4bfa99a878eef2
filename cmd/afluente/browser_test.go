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
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
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
