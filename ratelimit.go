package main

// The rate limiter, a token bucket for each key, in bounded memory; slots, which
// bound what happens at once; the client addresses that are counted; and the
// settings of addresses and origins.

import (
	"fmt"
	"hash/maphash"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const maxKeys = 65_536

// A limiter keeps a bucket of burst tokens for each key. Each token comes back
// one period after it was spent, so at most burst requests pass in any interval of
// one period (L1), unless dropAnyKey has dropped the key. A bucket that refills
// continuously would let twice as many pass. The price is memory: about 100 bytes
// for each key, and up to 16 for each request of the last period.
//
// It keeps only the hash of a key, so that long keys cost no more. Two keys
// share one with a probability of 2^-64.
type limiter struct {
	burst  int
	period time.Duration
	by     string // description of the key
	seed   maphash.Seed
	start  time.Time // origin of all times below

	mu      sync.Mutex
	spent   map[uint64][]time.Duration // by key: when its tokens were spent, oldest first
	sweptAt time.Duration
}

func newLimiter(burst int, period time.Duration, by string) *limiter {
	return &limiter{
		burst:  burst,
		period: period,
		by:     by,
		seed:   maphash.MakeSeed(),
		start:  time.Now(),
		spent:  map[uint64][]time.Duration{},
	}
}

// String describes the limit: "5 in 15 minutes by e-mail and client address".
func (l *limiter) String() string {
	period := fmt.Sprintf("%.0f minutes", l.period.Minutes())
	if l.period < time.Minute {
		period = fmt.Sprintf("%.0f s", l.period.Seconds())
	}
	return fmt.Sprintf("%d in %s by %s", l.burst, period, l.by)
}

// spend spends a token, or returns a 429 with the exact time until the next one
// comes back. An empty key is not counted.
func (l *limiter) spend(key string) error {
	if key == "" {
		return nil
	}
	hash := maphash.String(l.seed, key)
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Since(l.start) // monotonic
	l.sweep(now)
	spent := l.stillSpent(hash, now)
	if len(spent) == l.burst {
		tokenBack := spent[0] + l.period
		return rateLimited(l.String(), tokenBack-now)
	}
	if l.spent[hash] == nil && len(l.spent) >= maxKeys {
		l.dropAnyKey()
	}
	l.spent[hash] = append(spent, now)
	return nil
}

func (l *limiter) stillSpent(hash uint64, now time.Duration) []time.Duration {
	spent := l.spent[hash]
	for len(spent) > 0 && now-spent[0] >= l.period {
		spent = spent[1:]
	}
	return spent
}

// sweep removes the keys whose tokens have all come back, once a period.
func (l *limiter) sweep(now time.Duration) {
	if now-l.sweptAt < l.period {
		return
	}
	for hash := range l.spent {
		if len(l.stillSpent(hash, now)) == 0 {
			delete(l.spent, hash)
		}
	}
	l.sweptAt = now
}

// dropAnyKey makes room, so that nobody is refused because of other clients'
// keys (L3). So a flood can bring more guesses at a code, which counts them, too
// (find, in otp.go).
func (l *limiter) dropAnyKey() {
	for hash := range l.spent {
		delete(l.spent, hash)
		return
	}
}

// slots is a semaphore, with one element for each piece of work under way.
type slots chan struct{}

// take waits for a slot, and reports whether it got one.
func (s slots) take(timeout time.Duration) bool {
	select {
	case s <- struct{}{}: // without a timer, which costs 2 % of a request's processor time
		return true
	default:
	}
	select {
	case s <- struct{}{}:
		return true
	case <-time.After(timeout):
		return false
	}
}

func (s slots) free() { <-s }

// Who is counted.

// healthAddress is the client address that health checks send. It can belong to
// no client (RFC 6666), so they share no limit with one, if their sender is within
// TRUSTED_PROXIES (H9).
const healthAddress = "100::1"

func (s *server) identifyClient(r *request) {
	r.client = clientAddress(r.Request, s.cfg.trustedProxies)
	peer := parseAddress(r.RemoteAddr)
	sent := r.Header.Get("X-Forwarded-For")
	if sent != "" && sent != healthAddress && !isWithin(peer, s.cfg.trustedProxies) {
		s.proxyWarning.Do(func() {
			r.log().Warn("X-Forwarded-For is ignored, because TRUSTED_PROXIES does not name its " +
				"sender; if that is a proxy, all of its clients share one limit")
		})
	}
}

// clientAddress reads X-Forwarded-For from the right, because each proxy
// appends its client's address. All to the left of the first untrusted address
// can be forged (L2).
func clientAddress(r *http.Request, trusted []netip.Prefix) netip.Addr {
	client := parseAddress(r.RemoteAddr)
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	for _, text := range slices.Backward(hops) {
		hop := parseAddress(strings.TrimSpace(text))
		if !hop.IsValid() || !isWithin(client, trusted) {
			break
		}
		client = hop
	}
	return client
}

func isWithin(addr netip.Addr, networks []netip.Prefix) bool {
	return slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(addr) })
}

// parseAddress parses an address with or without a port. It returns the zero
// Addr for other text.
func parseAddress(text string) netip.Addr {
	addr, err := netip.ParseAddr(text)
	if err != nil {
		withPort, _ := netip.ParseAddrPort(text)
		addr = withPort.Addr()
	}
	return addr.Unmap().WithZone("")
}

// clientKey returns an IPv4 address, or the /64 of an IPv6 address, which one
// customer usually has.
func (r *request) clientKey() string {
	bits := 64
	if r.client.Is4() {
		bits = 32
	}
	network, _ := r.client.Prefix(bits)
	return network.String()
}

// limitClient counts the request, unless it is a preflight of an allowed
// origin. A browser sends one before each new URL. If it were refused, the page
// could not see why.
func (s *server) limitClient(r *request) error {
	if r.isPreflight() && r.originAllowed {
		return nil
	}
	return s.clientLimit(r.Method, r.URL.Path).spend(r.clientKey())
}

func (s *server) clientLimit(method, path string) *limiter {
	if isRead(method) && strings.HasPrefix(path, "/files/") {
		return s.fileLimit
	}
	return s.requestLimit
}

// The settings of clients and origins.

const localOrigins = "http://localhost:3000 http://localhost:4200 http://localhost:5173 " +
	"http://localhost:8081 http://127.0.0.1:3000 http://127.0.0.1:4200 http://127.0.0.1:5173 " +
	"http://127.0.0.1:8081"

var originPattern = regexp.MustCompile(
	`^https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?$`)

func (cfg *config) readOrigins(settings *settingReader) {
	fallback := ""
	if cfg.env == envLocal {
		fallback = localOrigins
	}
	cfg.allowedOrigins = settings.list("ALLOWED_ORIGINS", fallback)
	cfg.originDomain = strings.ToLower(settings.get("ALLOWED_ORIGIN_DOMAIN", ""))
	if cfg.env == envProduction {
		settings.require(len(cfg.allowedOrigins) == 0, "ALLOWED_ORIGINS: must be unset in production")
		settings.require(isParentDomain(cfg.originDomain),
			"ALLOWED_ORIGIN_DOMAIN: must be a domain such as example.com, not one label, an origin or an "+
				"IP address")
		return
	}
	settings.require(cfg.originDomain == "",
		"ALLOWED_ORIGIN_DOMAIN: must be unset outside production")
	for _, origin := range cfg.allowedOrigins {
		settings.require(isOrigin(origin), "ALLOWED_ORIGINS: must be origins as browsers send them, such "+
			"as https://app.example.com or http://localhost:3000, in lower case, without a path, a "+
			"default port or a dot at the end")
	}
}

// isOrigin reports whether a browser sends an origin in this form (RFC 6454 6.2).
// Other forms would never match, but for a host with an underscore.
func isOrigin(text string) bool {
	u, err := url.Parse(text)
	if err != nil || !originPattern.MatchString(text) {
		return false
	}
	host, port := u.Hostname(), u.Port()
	isDefault := u.Scheme+port == "http80" || u.Scheme+port == "https443"
	addr, err := netip.ParseAddr(host)
	isAddress := err == nil && addr.String() == host
	isName := domainPattern.MatchString(host) && !endsInDigits(host)
	return (isAddress || isName) && !isDefault && isPortOrEmpty(port)
}

func isPortOrEmpty(text string) bool {
	port, err := strconv.ParseUint(text, 10, 16) // at most 65535
	return text == "" || err == nil && port > 0
}

func (settings *settingReader) trustedProxies() (networks []netip.Prefix) {
	for _, text := range settings.list("TRUSTED_PROXIES", "") {
		network, err := netip.ParsePrefix(text)
		settings.require(err == nil && network.Bits() > 0 && !network.Addr().Is4In6(),
			"TRUSTED_PROXIES: must be CIDRs such as 127.0.0.1/32, and not /0")
		networks = append(networks, network)
	}
	return networks
}
