package bench

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// timingBound bounds what the time of a request may reveal about an address. Take one request about
// a known address and one about an unknown address. The probability that the first takes longer
// (the area under the ROC curve, AUC) must be 0.50 ± timingBound. The same holds for a suspended
// address. The test asserts no time in seconds.
//
// The AUC of 8,000 samples of each kind has a standard error of 0.0046. So chance alone exceeds the
// bound once in 70,000 comparisons. The test notices a true AUC of 0.53 in 98 of 100 runs, but one
// of 0.52 in only half of them.
const (
	timingSamples = 8000 // requests about each kind of address
	timingBound   = 0.02
)

// A timer measures requests to one server. Each request comes from a new client address. The two
// clients have one connection each.
type timer struct {
	t          *testing.T
	base       string
	one, other *http.Client
}

func (m timer) askCode(email string) time.Duration {
	return m.send(m.one, "POST", "/auth/otp/request", `{"email":"`+email+`"}`, 200)
}

// checkAfterCode asks for a code, then sends another request through the client.
func (m timer) checkAfterCode(client *http.Client, email string) time.Duration {
	m.askCode(email)
	return m.send(client, "GET", "/auth/session", "", 401)
}

func (m timer) validate(email string) time.Duration {
	body := `{"email":"` + email + `","code":"000000"}`
	return m.send(m.one, "POST", "/auth/otp/validate", body, 401)
}

// send sends a request and returns how long it took. A 503 means that too many requests for a code
// are unfinished, which does not depend on the address. Then send waits and sends the request
// again.
func (m timer) send(client *http.Client, method, path, body string, want int) time.Duration {
	for {
		request, err := http.NewRequest(method, m.base+path, strings.NewReader(body))
		hubstest.Must(m.t, err)
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("X-Forwarded-For", hubstest.NewIP())
		start := time.Now()
		answer, err := client.Do(request)
		hubstest.Must(m.t, err)
		io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
		took := time.Since(start)
		if answer.StatusCode == want {
			return took
		}
		if answer.StatusCode != 503 {
			m.t.Fatalf("%s %s: got status %d, want %d", method, path, answer.StatusCode, want)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// A measurement sends requests about an address, and returns how long the last of them took.
type measurement func(m timer, email string) time.Duration

// O6, O10: The time of an answer does not reveal whether an address is known. This holds for a
// request for a code, for the next request on the same or on another connection, and for a
// validation. The test measures thousands of requests in random order, each about a new address
// that is known, suspended or unknown. A mail server receives the codes.
func TestTimeTellsNothingOfAnAddress(t *testing.T) {
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{NoStartTLS: true})
	s := hubstest.Start(t, mail.Env(), hubstest.Quiet)
	s.AllowErrorsWithAnyOf("too many unfinished requests") // see timer.send
	tests := []struct {
		name string
		time measurement
	}{
		{name: "a request for a code", time: timer.askCode},
		{
			name: "the next request on the same connection",
			time: func(m timer, email string) time.Duration {
				return m.checkAfterCode(m.one, email)
			},
		},
		{
			name: "the next request on another connection",
			time: func(m timer, email string) time.Duration {
				return m.checkAfterCode(m.other, email)
			},
		},
		{name: "a validation", time: timer.validate},
	}
	hubstest.Exec(t, s.Database, `insert into users (email, suspended)
		select 'k' || n || '@time.example', false from generate_series(1, $1) n union all
		select 's' || n || '@time.example', true from generate_series(1, $1) n`,
		len(tests)*timingSamples)

	for i, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			m := timer{
				t:     t,
				base:  s.Base,
				one:   oneConnection(t),
				other: oneConnection(t),
			}
			times := m.measureKinds(i*timingSamples, test.time)

			for kind, name := range map[byte]string{'k': "known", 's': "suspended"} {
				auc := areaUnderROC(times[kind], times['u'])
				fmt.Fprintf(t.Output(), "%s addresses: AUC %.3f\n", name, auc)
				if math.Abs(auc-0.5) > timingBound {
					t.Errorf("%s addresses: got an AUC of %.3f, want 0.5 ± %v",
						name, auc, timingBound)
				}
			}
		})
	}
}

// oneConnection returns an HTTP client that uses at most one connection.
func oneConnection(t *testing.T) *http.Client {
	transport := &http.Transport{MaxConnsPerHost: 1}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// measureKinds measures requests about known (k), suspended (s) and unknown (u) addresses, in
// random order. The numbers in the addresses begin after first.
func (m timer) measureKinds(first int, measure measurement) map[byte][]time.Duration {
	times := map[byte][]time.Duration{}
	for _, i := range rand.Perm(3 * timingSamples) {
		kind := "ksu"[i%3]
		email := fmt.Sprintf("%c%d@time.example", kind, first+i/3+1)
		times[kind] = append(times[kind], measure(m, email))
	}
	return times
}

// areaUnderROC returns the probability that a value of a is greater than a value of b: the
// statistic of Mann and Whitney, divided by the number of pairs. A pair of equal values counts
// half.
func areaUnderROC(a, b []time.Duration) float64 {
	sorted := slices.Sorted(slices.Values(b))
	sum := 0.0
	for _, value := range a {
		less, _ := slices.BinarySearch(sorted, value)
		notGreater, _ := slices.BinarySearch(sorted, value+1)
		sum += float64(less+notGreater) / 2
	}
	return sum / float64(len(a)*len(b))
}
