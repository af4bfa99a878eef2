package webhook_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"

	"afluente/jobs/webhook"
)

// records are what names resolve to, by look-up: the last answer stays.
type records map[string][][]string

// startDNS serves records over UDP and returns a resolver that asks it.
func startDNS(t *testing.T, names records) *net.Resolver {
	t.Helper()
	conn, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	server := &dnsServer{names: names, asked: make(map[string]int)}
	go server.serve(conn)
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
}

type dnsServer struct {
	names records

	mu    sync.Mutex
	asked map[string]int
}

func (s *dnsServer) serve(conn net.PacketConn) {
	buffer := make([]byte, 1500)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if err != nil {
			return
		}
		var query dnsmessage.Message
		if query.Unpack(buffer[:n]) != nil {
			continue
		}
		answer := s.answer(query)
		if packed, err := answer.Pack(); err == nil {
			_, _ = conn.WriteTo(packed, from)
		}
	}
}

func (s *dnsServer) answer(query dnsmessage.Message) dnsmessage.Message {
	question := query.Questions[0]
	answer := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: query.ID, Response: true, RecursionAvailable: true},
		Questions: query.Questions,
	}
	name := strings.ToLower(strings.TrimSuffix(question.Name.String(), "."))
	answers, ok := s.names[name]
	if !ok {
		answer.RCode = dnsmessage.RCodeNameError
		return answer
	}
	key := name + " " + question.Type.String()
	s.mu.Lock()
	turn := min(s.asked[key], len(answers)-1)
	s.asked[key]++
	s.mu.Unlock()
	for _, text := range answers[turn] {
		address := netip.MustParseAddr(text)
		header := dnsmessage.ResourceHeader{Name: question.Name, Type: question.Type, Class: dnsmessage.ClassINET}
		switch {
		case address.Is4() && question.Type == dnsmessage.TypeA:
			answer.Answers = append(answer.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.AResource{A: address.As4()}})
		case address.Is6() && question.Type == dnsmessage.TypeAAAA:
			answer.Answers = append(answer.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.AAAAResource{AAAA: address.As16()}})
		}
	}
	return answer
}

// dialled records where connections would go, and makes none.
type dialled struct {
	mu        sync.Mutex
	addresses []string
}

var errDialled = errors.New("recorded, not dialled")

func (d *dialled) dial(
	_ context.Context, network, address string, control func(string, string, syscall.RawConn) error,
) (net.Conn, error) {
	if err := control(network, address, nil); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.addresses = append(d.addresses, address)
	return nil, errDialled
}

const public, private = "93.184.216.34", "127.0.0.1"

func TestGuardLetsPublicAddressesPass(t *testing.T) {
	t.Parallel()
	resolver := startDNS(t, records{"hooks.example.com": {{public}}, "both.example.com": {{public, "2606:4700:4700::1111"}}})
	for name, test := range map[string]struct{ url, dials string }{
		"a name":                    {"https://hooks.example.com/crm", public + ":443"},
		"a port of n8n":             {"https://hooks.example.com:5678/x", public + ":5678"},
		"port 80":                   {"https://hooks.example.com:80/x", public + ":80"},
		"an address":                {"https://93.184.216.34/x", public + ":443"},
		"an address of version 6":   {"https://[2606:4700:4700::1111]/x", "[2606:4700:4700::1111]:443"},
		"capitals and a dot":        {"https://HOOKS.Example.COM./x", public + ":443"},
		"above 172.16/12":           {"https://172.32.0.1/", "172.32.0.1:443"},
		"below 172.16/12":           {"https://172.15.255.255/", "172.15.255.255:443"},
		"the first of two":          {"https://both.example.com/", public + ":443"},
		"a query with a token":      {"https://hooks.example.com/?token=x%20y&a=b", public + ":443"},
		"a long path within bounds": {"https://hooks.example.com/" + strings.Repeat("a", 2000), public + ":443"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			recorder := &dialled{}
			guard := &webhook.Guard{Resolver: resolver, Dial: recorder.dial}
			require.NoError(t, guard.CheckURL(t.Context(), test.url))

			_, err := newSender(t, guard).Send(t.Context(), request(test.url))
			require.ErrorIs(t, err, errDialled)
			require.Equal(t, test.dials, recorder.addresses[0])
		})
	}
}

// refused are URLs that no webhook may have, whatever the network is like.
func refused() []string {
	return []string{
		"http://hooks.example.com/", "ftp://hooks.example.com/", "file:///etc/passwd", "gopher://hooks.example.com/", "//hooks.example.com/",
		"https:///x", "https://", "", "hooks.example.com", "https://user:pw@hooks.example.com/", "https://hooks.example.com@127.0.0.1/",
		"https://127.0.0.1:443@hooks.example.com/", "https://hooks.example.com:22/", "https://hooks.example.com:25/",
		"https://hooks.example.com:99999/", "https://hooks.example.com:0/", `https://example.com\@127.0.0.1/`, "https://hooks.example.com/a b",
		"https://hooks.example.com/\r\nX: y", "https://hooks.example.com/\x00", "https://[::1", "https://hooks.example.com/#fragment",
		"https://localhost/", "https://localhost./", "https://app.localhost/", "https://redis/", "https://postgres.internal/",
		"https://metadata.google.internal/", "https://printer.local/", "https://nas.home.arpa/", "https://x.onion/", "https://x.test/",
		"https://x.invalid/", "https://x.localdomain/", "https://127.1/", "https://0/", "https://2130706433/", "https://017700000001/",
		"https://0177.0.0.1/", "https://0x7f000001/", "https://0x7f.0.0.1/", "https://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/", "https://[fe80::1%25eth0]/",
		"https://[fe80::1%25lo]/", "https://" + strings.Repeat("a", 2100) + ".example.com/", "https://" + strings.Repeat("a.", 200) + "com/",
		"https://hooks.example.com/" + strings.Repeat("a", 2048), "https://-/", "https://a..b/",
	}
}

// unsafe are URLs whose address is not on the public internet.
func unsafe() []string {
	return []string{
		"https://127.0.0.1/", "https://127.0.0.1./", "https://127.99.88.77/", "https://①②⑦.⓪.⓪.①/", "https://127。0。0。1/", "https://0.0.0.0/",
		"https://0.1.2.3/", "https://10.0.0.5/", "https://172.17.0.1/", "https://192.168.0.10/", "https://100.64.1.1/",
		"https://100.100.100.200/", "https://169.254.169.254/latest/meta-data/", "https://169.254.170.2/", "https://192.0.0.192/",
		"https://168.63.129.16/", "https://198.18.0.1/", "https://192.0.2.1/", "https://203.0.113.9/", "https://224.0.0.1/",
		"https://240.0.0.1/", "https://255.255.255.255/", "https://[::]/", "https://[::1]/", "https://[::ffff:127.0.0.1]/",
		"https://[::ffff:7f00:1]/", "https://[0:0:0:0:0:ffff:a9fe:a9fe]/", "https://[::127.0.0.1]/", "https://[::169.254.169.254]/",
		"https://[64:ff9b::a9fe:a9fe]/", "https://[64:ff9b:1::a9fe:a9fe]/", "https://[2002:7f00:1::1]/", "https://[2001:0:a9fe:a9fe::1]/",
		"https://[fd00:ec2::254]/", "https://[fd20:ce::254]/", "https://[fc00::1]/", "https://[fe80::1]/", "https://[febf::1]/",
		"https://[fec0::1]/", "https://[ff02::1]/", "https://[3fff::1]/", "https://[5f00::1]/", "https://[100::1]/", "https://[2001:db8::1]/",
	}
}

func TestGuardRefuses(t *testing.T) {
	t.Parallel()
	resolver := startDNS(t, records{
		"hooks.example.com":      {{public}},
		"private.example.com":    {{"10.0.0.1"}},
		"mixed.example.com":      {{public, private}},
		"metadata.example.com":   {{"169.254.169.254"}},
		"mapped.example.com":     {{"::ffff:10.0.0.5"}},
		"translated.example.com": {{"64:ff9b::7f00:1"}},
		"both.example.com":       {{public, "fc00::1"}},
		"nothing.example.com":    {{}},
	})
	recorder := &dialled{}
	guard := &webhook.Guard{Resolver: resolver, Dial: recorder.dial}
	sender := newSender(t, guard)
	check := func(url string, want error) {
		err := guard.CheckURL(t.Context(), url)
		require.ErrorIs(t, err, want, url)
		require.NotContains(t, err.Error(), "example", "the URL, which may hold a token")
		_, err = sender.Send(t.Context(), request(url))
		require.ErrorIs(t, err, want, url)
	}
	for _, url := range refused() {
		check(url, webhook.ErrURL)
	}
	for _, url := range unsafe() {
		check(url, webhook.ErrAddress)
	}
	for _, host := range []string{"private", "mixed", "metadata", "mapped", "translated", "both"} {
		check("https://"+host+".example.com/", webhook.ErrAddress)
	}
	for _, host := range []string{"nothing", "unknown"} {
		err := guard.CheckURL(t.Context(), "https://"+host+".example.com/")
		require.ErrorAs(t, err, new(*net.DNSError))
		require.Equal(t, "dns", webhook.Classify(t.Context(), err).Class)
	}
	require.Empty(t, recorder.addresses, "nothing was dialled")
}

// A check that looks a name up before the connection does, and no other, is beaten
// by a name that answers differently the second time.
func TestGuardLooksAtTheAddressThatIsDialled(t *testing.T) {
	t.Parallel()
	recorder := &dialled{}
	guard := &webhook.Guard{Dial: recorder.dial, Resolver: startDNS(t, records{
		"rebinding.example.com": {{public}, {private}}, "mixed.example.com": {{public}, {public, private}},
	})}
	for _, url := range []string{"https://rebinding.example.com/", "https://mixed.example.com/"} {
		_, err := newSender(t, guard).Send(t.Context(), request(url))
		require.ErrorIs(t, err, webhook.ErrAddress)
		require.Empty(t, recorder.addresses)
	}

	// Nor does it help to get past our own look-up: the socket is asked last.
	var hits atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hits.Add(1) }))
	t.Cleanup(server.Close)
	guard = &webhook.Guard{
		Resolver: startDNS(t, records{"hooks.example.com": {{public}}}),
		Dial: func(ctx context.Context, network, _ string, control func(string, string, syscall.RawConn) error) (net.Conn, error) {
			return (&net.Dialer{Control: control}).DialContext(ctx, network, server.Listener.Addr().String())
		},
	}
	_, err := newSender(t, guard).Send(t.Context(), request("https://hooks.example.com/"))
	require.ErrorIs(t, err, webhook.ErrAddress)
	require.Zero(t, hits.Load())
}

func TestGuardRefusesOwnAddresses(t *testing.T) {
	t.Parallel()
	own, err := net.InterfaceAddrs()
	require.NoError(t, err)
	require.NotEmpty(t, own)
	for _, address := range own {
		prefix := netip.MustParsePrefix(address.String())
		url := "https://" + net.JoinHostPort(prefix.Addr().WithZone("").String(), "443") + "/"
		require.ErrorIs(t, (&webhook.Guard{}).CheckURL(t.Context(), url), webhook.ErrAddress, url)
	}
}

func TestOperatorMayAllowPrivateNetworks(t *testing.T) {
	t.Parallel()
	guard := &webhook.Guard{
		Allowed: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fd00::/8")},
		Resolver: startDNS(t, records{
			"n8n": {{"10.0.0.5"}}, "mixed.example.com": {{"10.0.0.5", "192.168.0.1"}}, "hooks.example.com": {{public}},
		}),
	}
	for _, url := range []string{"http://10.0.0.5:22/", "https://10.255.255.255/", "http://n8n:5678/", "http://[fd00::1]/"} {
		require.NoError(t, guard.CheckURL(t.Context(), url), url)
	}
	for _, url := range []string{
		"http://hooks.example.com/", "https://192.168.0.1/", "https://mixed.example.com/", "https://169.254.169.254/", "http://[fd00:ec2::254]/",
		"http://user@10.0.0.5/", "gopher://10.0.0.5/",
	} {
		require.Error(t, guard.CheckURL(t.Context(), url), url)
	}
}

func TestProxyOfTheEnvironmentIsIgnored(t *testing.T) { //nolint:paralleltest // it changes the environment
	var hits atomic.Int32
	proxy := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hits.Add(1) }))
	t.Cleanup(proxy.Close)
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"} {
		t.Setenv(name, proxy.URL)
	}
	recorder := &dialled{}
	guard := &webhook.Guard{Dial: recorder.dial}
	_, err := newSender(t, guard).Send(t.Context(), request("https://93.184.216.34/"))
	require.ErrorIs(t, err, errDialled)
	require.Equal(t, []string{public + ":443"}, recorder.addresses)
	require.Zero(t, hits.Load())
}
