package api

import (
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A limit is one that "hubs routes" prints: "5 per 15m by e-mail and client address".
type limit struct {
	text   string
	n      int
	period time.Duration
}

var limitForm = regexp.MustCompile(`(\d+) per (\w+) by [a-z -]+`)

// limitsOf returns the limits of a route: by client address, and its own if it has one.
func limitsOf(t *testing.T, method, path string) []limit {
	t.Helper()
	var limits []limit
	for line := range strings.Lines(run(t, nil, 0, "routes")) {
		words := strings.Fields(line)
		if words[0] != method || words[1] != path {
			continue
		}
		for _, match := range limitForm.FindAllStringSubmatch(line, -1) {
			n, err := strconv.Atoi(match[1])
			if err != nil {
				t.Fatal(err)
			}
			period, err := time.ParseDuration(match[2])
			if err != nil {
				t.Fatal(err)
			}
			limits = append(limits, limit{text: match[0], n: n, period: period})
		}
	}
	return limits
}

// The limits are the specification's.
func TestLimitsAreThoseOfTheSpecification(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ method, path, want string }{
		{"GET", "/hubs", "100 per 10s by client address"},
		{"POST", "/files/upload", "100 per 10s by client address"},
		{"GET", "/files/{fileId}/{name}", "500 per 1s by client address"},
		{"POST", "/auth/otp/request", "100 per 10s by client address 5 per 15m by e-mail and client address"},
		{"POST", "/auth/otp/validate", "100 per 10s by client address 10 per 15m by e-mail"},
	} {
		var texts []string
		for _, l := range limitsOf(t, c.method, c.path) {
			texts = append(texts, l.text)
		}
		if got := strings.Join(texts, " "); got != c.want {
			t.Errorf("%s %s: got %q, want %q", c.method, c.path, got, c.want)
		}
	}
}

// A limited is a request that a limit counts.
type limited struct {
	method, path string
	body         map[string]string
	ip           string // by X-Forwarded-For; "": the client's own
}

// send sends the request once more, by a client whose addresses count as its own.
func (l limited) send(s *hubstest.Server, c *hubstest.Client) *hubstest.Response {
	client := *c
	if l.ip != "" {
		client.IP = l.ip
	}
	var body any
	if l.body != nil {
		body = l.body
	}
	return client.Do(l.method, l.path, body)
}

func codeRequest(email string) limited {
	return limited{method: "POST", path: "/auth/otp/request", body: map[string]string{"email": email}}
}

func validation(email string) limited {
	body := map[string]string{"email": email, "code": "012345"}
	return limited{method: "POST", path: "/auth/otp/validate", body: body}
}

func (l limited) from(ip string) limited {
	l.ip = ip
	return l
}

func get(path string) limited { return limited{method: "GET", path: path} }

// Of many at once exactly N pass. The answer to the others names the limit and says how long to
// wait. (That this is true is a test of the limiter, by its clock.)
func TestLimitsAnswer(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	for name, c := range map[string]struct {
		request limited
		limit   limit
	}{
		"global":                {get("/hubs"), limitsOf(t, "GET", "/hubs")[0]},
		"global, no such route": {get("/none"), limitsOf(t, "GET", "/hubs")[0]},
		"global, preflight":     {limited{method: "OPTIONS", path: "/hubs"}, limitsOf(t, "GET", "/hubs")[0]},
		"upload":                {limited{method: "POST", path: "/files/upload"}, limitsOf(t, "POST", "/files/upload")[0]},
		"code request":          {codeRequest(hubstest.NewEmail()), limitsOf(t, "POST", "/auth/otp/request")[1]},
		"validation":            {validation(hubstest.NewEmail()), limitsOf(t, "POST", "/auth/otp/validate")[1]},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := s.Client(t)
			var passed atomic.Int64
			var all sync.WaitGroup
			for range 8 {
				all.Go(func() {
					for range c.limit.n/8 + 4 {
						if c.request.send(s, client).Status != 429 {
							passed.Add(1)
						}
					}
				})
			}
			all.Wait()
			if got := int(passed.Load()); got != c.limit.n {
				t.Errorf("%d passed, want %d", got, c.limit.n)
			}
			refused := c.request.send(s, client)
			hubstest.WantProblem(t, refused, 429, "rate_limited")
			if detail := refused.Field(t, "detail"); detail != "The limit is "+c.limit.text+"." {
				t.Errorf("detail %q, want the limit %q", detail, c.limit.text)
			}
			seconds, err := strconv.Atoi(refused.Header.Get("Retry-After"))
			if err != nil || seconds < 1 || seconds > int(c.limit.period.Seconds()) {
				t.Errorf("Retry-After %d, want 1 to %v", seconds, c.limit.period.Seconds())
			}
		})
	}
}

// Which requests share a bucket, and which do not. Each case spends all tokens of the first
// request, then tries the second.
func TestLimitKeys(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	const ada, bob = "ada@example.com", "bob@example.com"
	for name, c := range map[string]struct {
		first, then limited
		shared      bool
	}{
		"two addresses":               {get("/a").from("192.0.2.1"), get("/a").from("192.0.2.2"), false},
		"v4-mapped":                   {get("/a").from("192.0.2.3"), get("/a").from("::ffff:192.0.2.3"), true},
		"one /64":                     {get("/a").from("2001:db9::1"), get("/a").from("2001:db9::9"), true},
		"two /64":                     {get("/a").from("2001:db9:1::1"), get("/a").from("2001:db9:1:1::1"), false},
		"the rest and files":          {get("/a").from("192.0.2.4"), get("/files/a/b").from("192.0.2.4"), false},
		"upload and the rest":         {get("/a").from("192.0.2.5"), limited{method: "POST", path: "/files/upload", ip: "192.0.2.5"}, true},
		"another address, one e-mail": {codeRequest("1" + ada).from("192.0.2.6"), codeRequest("1" + ada).from("192.0.2.7"), false},
		"another e-mail":              {codeRequest("2" + ada).from("192.0.2.8"), codeRequest("2" + bob).from("192.0.2.8"), false},
		"e-mail in another case":      {codeRequest("3" + ada).from("192.0.2.9"), codeRequest(" 3ADA@Example.COM ").from("192.0.2.9"), true},
		"one /64, one e-mail":         {codeRequest("4" + ada).from("2001:db9:2::1"), codeRequest("4" + ada).from("2001:db9:2::2"), true},
		"validation, elsewhere":       {validation("5" + ada).from("192.0.2.10"), validation("5ADA@example.com").from("192.0.2.11"), true},
		"validation, another e-mail":  {validation("6" + ada).from("192.0.2.12"), validation("6" + bob).from("192.0.2.12"), false},
		"requests and validations":    {codeRequest("7" + ada).from("192.0.2.13"), validation("7" + ada).from("192.0.2.13"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := s.Client(t)
			hubstest.WaitUntil(t, "refused", func() bool { return c.first.send(s, client).Status == 429 })
			if got := c.then.send(s, client).Status == 429; got != c.shared {
				t.Errorf("shared %v, want %v", got, c.shared)
			}
		})
	}
}

// Files have a bucket of their own: 500 a second, in place of 100 in 10 s.
func TestFilesHaveTheirOwnLimit(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	client := s.Client(t)
	global := limitsOf(t, "GET", "/hubs")[0]
	for i := range global.n {
		for _, method := range []string{"GET", "HEAD"} {
			file := limited{method: method, path: "/files/a/b"}
			if got := file.send(s, client).Status; got != 401 {
				t.Fatalf("%s number %d: status %d, want 401", method, i, got)
			}
		}
	}
	if got := get("/hubs").send(s, client).Status; got != 401 {
		t.Errorf("hubs after files: status %d, want 401", got)
	}
}
