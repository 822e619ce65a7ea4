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

// A limit as the contract has it: "5 per 15m by e-mail and client address".
type limit struct {
	text   string
	n      int
	period time.Duration
}

var limitForm = regexp.MustCompile(`(?s).*\b((\d+) per (\w+) by [a-z -]+)`)

// limitOf returns the limit of a route: its own, or if it has none, that by client address.
func limitOf(t *testing.T, route string) limit {
	t.Helper()
	method, path, _ := strings.Cut(route, " ")
	text := hubstest.Contract[string](t,
		"paths", path, strings.ToLower(method), "description")
	last := limitForm.FindStringSubmatch(text)
	n, err := strconv.Atoi(last[2])
	if err != nil {
		t.Fatal(err)
	}
	period, err := time.ParseDuration(last[3])
	if err != nil {
		t.Fatal(err)
	}
	return limit{
		text:   last[1],
		n:      n,
		period: period,
	}
}

// A limited is a request that a limit counts.
type limited struct {
	Request string
	Body    any
	IP      string
}

func (l limited) send(c *hubstest.Client) *hubstest.Response {
	client := *c
	client.IP = l.IP
	return client.Send(l.Request, l.Body)
}

// A limitCase says whether two requests share a bucket. limits.json says what the members mean.
type limitCase struct {
	Name   string
	Route  string
	First  limited
	Then   limited
	Shared bool
}

// Of many at once exactly N pass. The answer to the others names the limit and says how long to
// wait. (That this is true is a test of the limiter, by its clock.) Other requests are refused
// only if they share the bucket.
func TestLimits(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	for _, c := range hubstest.ReadCases[limitCase](t, "testdata/limits.json") {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			limit := limitOf(t, c.Route)
			client := s.Client(t)
			var passed atomic.Int64
			var all sync.WaitGroup
			for range 8 {
				all.Go(func() {
					for range limit.n/8 + 4 {
						if c.First.send(client).Status != 429 {
							passed.Add(1)
						}
					}
				})
			}
			all.Wait()
			got := int(passed.Load())
			if got != limit.n {
				t.Errorf("%d passed, want %d", got, limit.n)
			}
			wantLimited(t, c.First.send(client), limit)
			isRefused := c.Then.send(client).Status == 429
			if isRefused != c.Shared {
				t.Errorf("%s: refused too: got %v, want %v",
					c.Then.Request, isRefused, c.Shared)
			}
		})
	}
}

func wantLimited(t *testing.T, r *hubstest.Response, l limit) {
	t.Helper()
	hubstest.WantProblem(t, r, 429, "rate_limited")
	want := "The limit is " + l.text + "."
	got := r.Field(t, "detail")
	if got != want {
		t.Errorf("detail: got %q, want %q", got, want)
	}
	seconds, err := strconv.Atoi(r.Header.Get("Retry-After"))
	isTooLong := seconds > int(l.period.Seconds())
	if err != nil || seconds < 1 || isTooLong {
		t.Errorf("Retry-After: got %d, %v, want 1 to %v",
			seconds, err, l.period.Seconds())
	}
}
