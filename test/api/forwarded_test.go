package api

import (
	"testing"

	"hubs/internal/hubstest"
)

// A forwardedCase is a request whose client the server takes from its headers. Every connection
// comes from 127.0.0.1.
//
// The cases of a server are sent within seconds, and all requests of a client count toward one
// limit. So a case has a client of its own where it can, such as 10.0.0.31.
type forwardedCase struct {
	Name, Rule  string
	Server      string
	Headers     []string
	Client      string   // in the line of the log
	SharesWith  []string // values of X-Forwarded-For that have the limit of this client
	DiffersFrom []string // and of others
	Want        answer
}

// via returns an X-Forwarded-For header for each chain.
func via(chains ...string) (headers []string) {
	for _, chain := range chains {
		headers = append(headers, "X-Forwarded-For", chain)
	}
	return headers
}

// L2: The client's address is the first one that is not a trusted proxy's, beginning with the peer
// of the connection and going on with X-Forwarded-For from the right. The test sees it in the log
// line and in the limit that it shares with other addresses.
func TestForwardedAddressesNeedTrust(t *testing.T) {
	t.Parallel()
	trusting := func(proxies string) map[string]string {
		return map[string]string{
			"APP_ENV":         "staging",
			"COOKIE_DOMAIN":   "staging.example.com",
			"TRUSTED_PROXIES": proxies,
		}
	}
	servers := startEnvironments(t, map[string]map[string]string{
		"trusting":  trusting("127.0.0.0/8,10.0.0.0/8,fd00::/8"),
		"none":      trusting(""),
		"elsewhere": trusting("10.0.0.0/8"),
	})
	limit := hubstest.LimitOf(t, askRoute)

	runCases(t, forwardedCases, func(t *testing.T, c forwardedCase) {
		t.Parallel()
		s := named(t, servers, c.Server)
		email := hubstest.NewEmail()
		for range limit.Requests {
			r := askOnTheWire(t, s, email, c.Headers...)
			wantAnswer(t, r, c.Want)
			waitLogged(t, s, r, `"msg":"request"`, `"client":"`+c.Client+`"`)
		}

		for _, chain := range append(c.SharesWith, c.Client) {
			wantLimited(t, askOnTheWire(t, s, email, "X-Forwarded-For", chain), limit)
		}
		for _, chain := range c.DiffersFrom {
			askOnTheWire(t, s, email, "X-Forwarded-For", chain).Want(t, 200)
		}
	})
}

var forwardedCases = []group[forwardedCase]{
	// Trusted proxies: the client is the last address that is not a trusted proxy's.
	{Each: forwardedCase{Rule: "L2", Server: "trusting", DiffersFrom: []string{"198.51.100.99"}, Want: ok},
		Cases: []forwardedCase{
			{Name: "one address", Headers: via("203.0.113.1"), Client: "203.0.113.1",
				DiffersFrom: []string{"203.0.113.101", "127.0.0.1"}},
			{Name: "no chain", Client: "127.0.0.1"},
			{Name: "forged on the left", Headers: via("198.51.100.1, 203.0.113.2"),
				Client: "203.0.113.2", DiffersFrom: []string{"198.51.100.1"}},
			{Name: "forged on the left, twice", Headers: via("198.51.100.1, 198.51.100.2, 203.0.113.3"),
				Client: "203.0.113.3", DiffersFrom: []string{"198.51.100.1", "198.51.100.2"}},
			{Name: "past a trusted proxy", Headers: via("203.0.113.4, 10.0.0.1"), Client: "203.0.113.4",
				DiffersFrom: []string{"10.0.0.1"}},
			{Name: "past two trusted proxies", Headers: via("203.0.113.5, 10.0.0.2, 10.0.0.1"),
				Client: "203.0.113.5"},
			{Name: "past a trusted proxy with a zone", Headers: via("203.0.113.77, fd00::1%eth0"),
				Client: "203.0.113.77"},
			{Name: "past trusted proxies of both families",
				Headers: via("203.0.113.6, fd00::1, 10.0.0.1"), Client: "203.0.113.6"},
			{Name: "a trusted address forged on the left",
				Headers: via("10.0.0.9, 203.0.113.7, 10.0.0.1"), Client: "203.0.113.7",
				DiffersFrom: []string{"10.0.0.9"}},
			{Name: "the peer's own address forged on the left", Headers: via("127.0.0.1, 203.0.113.8"),
				Client: "203.0.113.8", DiffersFrom: []string{"127.0.0.1"}},
			{Name: "trusted addresses only: the leftmost", Headers: via("10.0.0.11, 10.0.0.1"),
				Client: "10.0.0.11", DiffersFrom: []string{"10.0.0.1"}},
			{Name: "several headers are one chain",
				Headers: via("198.51.100.1", "203.0.113.10, 10.0.0.1"), Client: "203.0.113.10",
				DiffersFrom: []string{"198.51.100.1"}},
			{Name: "several headers, the last one trusted", Headers: via("203.0.113.11", "10.0.0.1"),
				Client: "203.0.113.11"},
			{Name: "several headers, the last one is the client",
				Headers: via("198.51.100.1", "203.0.113.31"), Client: "203.0.113.31",
				DiffersFrom: []string{"198.51.100.1"}},
			{Name: "name in lower case", Headers: []string{"x-forwarded-for", "203.0.113.12"},
				Client: "203.0.113.12"},
			{Name: "no spaces", Headers: via("198.51.100.1,203.0.113.13,10.0.0.1"),
				Client: "203.0.113.13"},
			{Name: "many spaces and tabs", Headers: via("198.51.100.1 ,\t 203.0.113.14\t,  10.0.0.1"),
				Client: "203.0.113.14"},
			{Name: "v4-mapped is IPv4", Headers: via("::ffff:203.0.113.15"), Client: "203.0.113.15"},
			{Name: "v4-mapped in hexadecimal is IPv4", Headers: via("::ffff:cb00:7110"),
				Client: "203.0.113.16"},
			{Name: "v4-mapped trusted proxy", Headers: via("203.0.113.17, ::ffff:10.0.0.1"),
				Client: "203.0.113.17"},
			{Name: "IPv6, by its /64", Headers: via("2001:db8:0:1::1"), Client: "2001:db8:0:1::1",
				SharesWith: []string{"2001:db8:0:1::1", "2001:db8:0:1:ffff:ffff:ffff:ffff",
					"2001:db8:0:1::2, 10.0.0.1"},
				DiffersFrom: []string{"2001:db8:0:2::1", "2001:db8::1"}},
			{Name: "IPv6 written in full and in capitals",
				Headers: via("2001:0DB8:0000:0003:0000:0000:0000:0001"), Client: "2001:db8:0:3::1"},
			{Name: "IPv6 with a zone", Headers: via("2001:db8:0:4::1%eth0"), Client: "2001:db8:0:4::1",
				SharesWith: []string{"2001:db8:0:4::1", "2001:db8:0:4::1%eth1"}},
			{Name: "IPv4 neighbours are two clients", Headers: via("203.0.113.20"),
				Client: "203.0.113.20", DiffersFrom: []string{"203.0.113.21", "203.0.113.19"}},
			{Name: "a word", Headers: via("unknown"), Client: "127.0.0.1"},
			{Name: "a word between client and trusted proxy",
				Headers: via("198.51.100.1, unknown, 10.0.0.21"), Client: "10.0.0.21",
				DiffersFrom: []string{"198.51.100.1"}},
			{Name: "a word right of the client", Headers: via("203.0.113.32, unknown, 10.0.0.22"),
				Client: "10.0.0.22", DiffersFrom: []string{"203.0.113.32"}},
			{Name: "a word on the right", Headers: via("203.0.113.37, unknown"), Client: "127.0.0.1",
				DiffersFrom: []string{"203.0.113.37"}},
			{Name: "a word left of the client", Headers: via("unknown, 203.0.113.22, 10.0.0.1"),
				Client: "203.0.113.22"},
			{Name: "empty", Headers: via(""), Client: "127.0.0.1"},
			{Name: "a comma behind", Headers: via("203.0.113.23,"), Client: "127.0.0.1",
				DiffersFrom: []string{"203.0.113.23"}},
			{Name: "an address with a port", Headers: via("203.0.113.24:443"), Client: "203.0.113.24",
				SharesWith:  []string{"203.0.113.24", "203.0.113.24:80"},
				DiffersFrom: []string{"203.0.113.27:443", "127.0.0.1"}},
			{Name: "IPv6 with a port", Headers: via("[2001:db8:0:5::1]:443"), Client: "2001:db8:0:5::1",
				SharesWith:  []string{"2001:db8:0:5::1", "[2001:db8:0:5::9]:80"},
				DiffersFrom: []string{"[2001:db8:0:6::1]:443"}},
			{Name: "IPv6 with a zone and a port", Headers: via("[2001:db8:0:8::1%eth0]:80"),
				Client: "2001:db8:0:8::1"},
			{Name: "v4-mapped with a port", Headers: via("[::ffff:203.0.113.33]:80"),
				Client: "203.0.113.33"},
			{Name: "past a trusted proxy with a port",
				Headers: via("198.51.100.1, 203.0.113.28:5000, 10.0.0.1:443, [fd00::1]:443"),
				Client:  "203.0.113.28", DiffersFrom: []string{"198.51.100.1"}},
			{Name: "forged on the left of an address with a port",
				Headers: via("203.0.113.35, 203.0.113.34:4711"), Client: "203.0.113.34",
				DiffersFrom: []string{"203.0.113.35"}},
			{Name: "an address in brackets without a port is none",
				Headers: via("[2001:db8:0:7::1], 10.0.0.31"), Client: "10.0.0.31",
				DiffersFrom: []string{"2001:db8:0:7::1"}},
			{Name: "a bracket that is not closed", Headers: via("[2001:db8:0:9::1:80, 10.0.0.23"),
				Client: "10.0.0.23", DiffersFrom: []string{"2001:db8:0:9::1"}},
			{Name: "a port over 65535", Headers: via("203.0.113.29:65536, 10.0.0.32"),
				Client: "10.0.0.32", DiffersFrom: []string{"203.0.113.29"}},
			{Name: "a port that is a word", Headers: via("203.0.113.30:https, 10.0.0.33"),
				Client: "10.0.0.33", DiffersFrom: []string{"203.0.113.30"}},
			{Name: "a colon without a port", Headers: via("203.0.113.36:, 10.0.0.24"),
				Client: "10.0.0.24", DiffersFrom: []string{"203.0.113.36"}},
			{Name: "a port without an address", Headers: via(":443, 10.0.0.34"), Client: "10.0.0.34"},
			{Name: "brackets without an address", Headers: via("[]:80, 10.0.0.25"), Client: "10.0.0.25"},
			{Name: "a leading zero", Headers: via("203.0.113.025, 10.0.0.35"), Client: "10.0.0.35",
				DiffersFrom: []string{"203.0.113.25", "203.0.113.21"}},
			{Name: "a leading zero in the first number", Headers: via("010.0.0.1, 10.0.0.26"),
				Client: "10.0.0.26", DiffersFrom: []string{"10.0.0.1", "8.0.0.1"}},
			{Name: "a network is no address", Headers: via("203.0.113.0/24, 10.0.0.36"),
				Client: "10.0.0.36"},
			{Name: "other headers count for nothing",
				Headers: []string{"X-Forwarded-For", "203.0.113.26", "Forwarded", "for=198.51.100.1",
					"X-Real-IP", "198.51.100.1", "X-Client-IP", "198.51.100.1",
					"True-Client-IP", "198.51.100.1", "CF-Connecting-IP", "198.51.100.1"},
				Client: "203.0.113.26", DiffersFrom: []string{"198.51.100.1"}},
			{Name: "other headers alone",
				Headers: []string{"Forwarded", "for=198.51.100.1", "X-Real-IP", "198.51.100.1"},
				Client:  "127.0.0.1", DiffersFrom: []string{"198.51.100.1"}},
		}},
	// No trusted proxies: the client is the peer.
	{Each: forwardedCase{Rule: "L2", Server: "none", Client: "127.0.0.1", Want: ok},
		Cases: []forwardedCase{
			{Name: "none trusted: one address", Headers: via("203.0.113.1"),
				SharesWith: []string{"127.0.0.1", "203.0.113.1", "10.0.0.1"}},
			{Name: "none trusted: a chain", Headers: via("203.0.113.1, 127.0.0.1"),
				SharesWith: []string{"198.51.100.1"}},
		}},
	// A peer that is not a trusted proxy: the client is the peer.
	{Each: forwardedCase{Rule: "L2", Server: "elsewhere", Client: "127.0.0.1", Want: ok},
		Cases: []forwardedCase{
			{Name: "peer not trusted: one address", Headers: via("203.0.113.1"),
				SharesWith: []string{"198.51.100.1"}},
			{Name: "peer not trusted: a trusted address in the chain",
				Headers: via("203.0.113.1, 10.0.0.1"), SharesWith: []string{"203.0.113.1, 10.0.0.1"}},
		}},
}
