package webhook

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"code.dny.dev/ssrf"
	"golang.org/x/net/idna"
)

// maxURL is in bytes.
const maxURL = 2048

var (
	// ErrURL says that a URL may not be that of a webhook, whatever it resolves to. [Guard.CheckURL] and [Sender.Send] return it.
	ErrURL = errors.New("not allowed as the URL of a webhook")
	// ErrAddress says that a host has an address that is not on the public internet. [Guard.CheckURL] and [Sender.Send] return it.
	ErrAddress = errors.New("the address is not public")
)

// Guard decides where webhooks may go: to public addresses, and to those that the operator allows besides. It looks at the very
// address that is dialled, so that a name which changes its mind between the check and the connection gains nothing. It may be
// used by several goroutines; its fields must not change meanwhile.
type Guard struct {
	// Allowed are networks beyond the public ones, for receivers beside us. Hosts all of whose addresses are in them may have
	// any name and port and use http. Addresses of cloud metadata stay refused.
	Allowed []netip.Prefix
	// Resolver looks names up; nil for the system's.
	Resolver *net.Resolver
	// Dial connects to an address that passed; nil for a [net.Dialer]. control must be called before the connection is used.
	Dial func(ctx context.Context, network, address string, control func(network, address string, _ syscall.RawConn) error) (net.Conn, error)
}

// metadata returns the addresses at which clouds tell a machine its secrets. Some lie in networks that an operator may allow.
func metadata() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("169.254.0.0/16"),     // AWS, GCP, Azure, ECS and most others
		netip.MustParsePrefix("100.100.100.200/32"), // Alibaba
		netip.MustParsePrefix("168.63.129.16/32"),   // Azure, in a public network
		netip.MustParsePrefix("192.0.0.192/32"),     // Oracle
		netip.MustParsePrefix("fd00:ec2::254/128"),  // AWS
		netip.MustParsePrefix("fd20:ce::254/128"),   // GCP
	}
}

// CheckURL returns nil if a webhook may have this URL now: https, without user and fragment, to a full host name or a public
// address, at port 443, 80 or 1024 to 65535. It looks the name up. Its errors, ErrURL and ErrAddress among them, do not show the
// URL.
func (g *Guard) CheckURL(ctx context.Context, text string) error {
	u, host, err := parseURL(text)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrURL, err)
	}
	if len(g.Allowed) > 0 {
		if addresses, err := g.lookUp(ctx, host); err == nil && !slices.ContainsFunc(addresses, func(a netip.Addr) bool { return !g.allowed(a) }) {
			return nil
		}
	}
	if u.Scheme != "https" {
		return fmt.Errorf("%w: its scheme is not https", ErrURL)
	}
	if err := checkPort(u.Port()); err != nil {
		return fmt.Errorf("%w: %w", ErrURL, err)
	}
	if _, err := netip.ParseAddr(host); err != nil {
		if err := checkName(host); err != nil {
			return fmt.Errorf("%w: %w", ErrURL, err)
		}
	}
	addresses, err := g.lookUp(ctx, host)
	if err != nil {
		return fmt.Errorf("look host up: %w", err)
	}
	return g.checkAll(addresses)
}

// parseURL returns a URL and its host as it is looked up: in ASCII, lower case, without a dot at its end.
func parseURL(text string) (*url.URL, string, error) {
	if len(text) > maxURL {
		return nil, "", fmt.Errorf("it has more than %d bytes", maxURL)
	}
	if strings.ContainsAny(text, "\\ \t\r\n\x00") {
		return nil, "", errors.New("it holds a space, a backslash or a control character")
	}
	u, err := url.Parse(text)
	if err != nil {
		return nil, "", errors.New("it does not parse")
	}
	switch {
	case u.Scheme != "https" && u.Scheme != "http":
		return nil, "", errors.New("its scheme is not https")
	case u.User != nil:
		return nil, "", errors.New("it holds a user")
	case u.Fragment != "" || strings.Contains(text, "#"):
		return nil, "", errors.New("it holds a fragment")
	case u.Hostname() == "":
		return nil, "", errors.New("it has no host")
	case strings.Contains(u.Hostname(), "%"):
		return nil, "", errors.New("its address has a zone")
	}
	host := u.Hostname()
	if strings.Contains(host, ":") {
		address, err := netip.ParseAddr(host)
		if err != nil {
			return nil, "", errors.New("its address does not parse")
		}
		return u, address.String(), nil
	}
	// As net/http does, which turns full-width digits and the like into ASCII.
	if host, err = idna.Lookup.ToASCII(host); err != nil {
		return nil, "", errors.New("its host is no name")
	}
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	if host == "" || len(host) > 253 {
		return nil, "", errors.New("its host is no name")
	}
	return u, host, nil
}

func checkPort(text string) error {
	if text == "" {
		return nil
	}
	port, err := strconv.Atoi(text)
	if err != nil || port > 65535 || (port < 1024 && port != 80 && port != 443) {
		return errors.New("its port is not 80, 443 or from 1024 to 65535")
	}
	return nil
}

// checkName refuses names that are of this machine or network, and numbers that some resolvers take for an address.
func checkName(host string) error {
	labels := strings.Split(host, ".")
	last := labels[len(labels)-1]
	if strings.HasPrefix(last, "0x") || strings.Trim(last, "0123456789") == "" {
		return errors.New("its host is a number that is no address")
	}
	if len(labels) < 2 || slices.Contains(labels, "") {
		return errors.New("its host is not a full name")
	}
	switch last {
	case "internal", "invalid", "local", "localdomain", "localhost", "onion", "test":
		return errors.New("its host is a name of a private network")
	}
	if strings.HasSuffix(host, ".home.arpa") {
		return errors.New("its host is a name of a private network")
	}
	return nil
}

func (g *Guard) lookUp(ctx context.Context, host string) ([]netip.Addr, error) {
	if address, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{address.Unmap()}, nil
	}
	resolver := g.Resolver
	if resolver == nil {
		resolver = net.DefaultResolver
	}
	addresses, err := resolver.LookupNetIP(ctx, "ip", host+".") // the dot keeps search domains out
	if failed, ok := errors.AsType[*net.DNSError](err); ok {
		failed.Server = "" // which is nothing for a customer to see
	}
	if err != nil {
		return nil, err
	}
	for i, address := range addresses {
		addresses[i] = address.Unmap()
	}
	return addresses, nil
}

// checkAll refuses a host of which one address is not public: what it is then is chance.
func (g *Guard) checkAll(addresses []netip.Addr) error {
	if len(addresses) == 0 {
		return ErrAddress
	}
	for _, address := range addresses {
		if err := g.check(address); err != nil {
			return err
		}
	}
	return nil
}

func (g *Guard) allowed(address netip.Addr) bool {
	contains := func(prefix netip.Prefix) bool { return prefix.Contains(address) }
	return slices.ContainsFunc(g.Allowed, contains) && !slices.ContainsFunc(metadata(), contains)
}

func (g *Guard) check(address netip.Addr) error {
	address = address.Unmap()
	if g.allowed(address) {
		return nil
	}
	if slices.ContainsFunc(metadata(), func(prefix netip.Prefix) bool { return prefix.Contains(address) }) || address.Zone() != "" {
		return ErrAddress
	}
	if err := ssrf.New(ssrf.WithAnyPort()).SafeAddrPort(netip.AddrPortFrom(address, 443)); err != nil {
		return ErrAddress
	}
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("list own addresses: %w", err)
	}
	for _, own := range interfaces {
		if prefix, err := netip.ParsePrefix(own.String()); err == nil && prefix.Addr().Unmap() == address {
			return ErrAddress
		}
	}
	return nil
}

// control refuses, at the socket itself, what [Guard.DialContext] may have let pass.
func (g *Guard) control(_, address string, _ syscall.RawConn) error {
	parsed, err := netip.ParseAddrPort(address)
	if err != nil {
		return ErrAddress
	}
	return g.check(parsed.Addr())
}

// DialContext connects to a host all of whose addresses pass, and to one of those.
func (g *Guard) DialContext(ctx context.Context, network, hostPort string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil {
		return nil, err
	}
	addresses, err := g.lookUp(ctx, strings.TrimSuffix(host, "."))
	if err != nil {
		return nil, err
	}
	if err := g.checkAll(addresses); err != nil {
		return nil, err
	}
	dial := g.Dial
	if dial == nil {
		dial = dialAddress
	}
	var errs []error
	for _, address := range addresses {
		conn, err := dial(ctx, network, net.JoinHostPort(address.String(), port), g.control)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

func dialAddress(ctx context.Context, network, address string, control func(string, string, syscall.RawConn) error) (net.Conn, error) {
	return (&net.Dialer{Timeout: connectTimeout, Control: control}).DialContext(ctx, network, address)
}
