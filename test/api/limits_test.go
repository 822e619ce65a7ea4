package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A limited is a request that a limit counts.
type limited struct {
	Request string
	Body    any
	IP      string // if not the case's own
}

func (l limited) send(c *hubstest.Client) *hubstest.Response {
	client := *c
	client.IP = cmp.Or(l.IP, c.IP)
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
	for i, raw := range hubstest.ReadCases[json.RawMessage](t, "testdata/limits.json") {
		client := s.Client(t)
		email := hubstest.NewEmail()
		text := hubstest.FillIn(string(raw),
			"<email>", email,
			"<EMAIL>", strings.ToUpper(email),
			"<network>", strings.TrimSuffix(client.IP, "1"),
			"<other>", hubstest.NewIP(),
			"<ipv4>", fmt.Sprintf("192.0.%d.", i))
		var c limitCase
		hubstest.Decode(t, "limits.json", text, &c)
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			limit := hubstest.LimitOf(t, c.Route)
			var passed atomic.Int64
			var all sync.WaitGroup
			for range 8 {
				all.Go(func() {
					for range limit.Requests/8 + 4 {
						if c.First.send(client).Status != 429 {
							passed.Add(1)
						}
					}
				})
			}
			all.Wait()
			got := int(passed.Load())
			if got != limit.Requests {
				t.Errorf("%d passed, want %d", got, limit.Requests)
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

func wantLimited(t *testing.T, r *hubstest.Response, l hubstest.Limit) {
	t.Helper()
	hubstest.WantProblem(t, r, 429, "rate_limited")
	period := strings.Replace(l.Period.String(), "m0s", "m", 1)
	want := fmt.Sprintf("The limit is %d per %s by %s.", l.Requests, period, l.By)
	got := r.Field(t, "detail")
	if got != want {
		t.Errorf("detail: got %q, want %q", got, want)
	}
	wait, _ := time.ParseDuration(r.Header.Get("Retry-After") + "s") // WantProblem checks its form
	if wait > l.Period {
		t.Errorf("Retry-After: got %v, want at most %v", wait, l.Period)
	}
}
