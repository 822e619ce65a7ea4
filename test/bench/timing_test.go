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
// address.
//
// The AUC of 2,000 samples of each kind has a standard error of 0.009, so chance alone exceeds the
// bound once in thirty comparisons. If the bound is exceeded, the test adds further rounds of 2,000
// to the same samples. After four rounds the standard error is 0.0046, and chance alone exceeds the
// bound once in 70,000 comparisons. The test asserts no time in seconds.
const (
	timingSamples = 2000 // requests about each kind of address in one round
	timingRounds  = 4    // most rounds
	timingBound   = 0.02
)

// A timer measures requests to one server. Each request comes from a new client address.
type timer struct {
	t    *testing.T
	base string
}

// send sends a request and returns how long it took. A 503 means that too many requests for a code
// are unfinished, which does not depend on the address. Then send waits and sends the request
// again.
func (m timer) send(client *http.Client, method, path, body string, want int) time.Duration {
	m.t.Helper()
	for {
		request, err := http.NewRequest(method, m.base+path, strings.NewReader(body))
		if err != nil {
			m.t.Fatal(err)
		}
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("X-Forwarded-For", hubstest.NewIP())
		start := time.Now()
		answer, err := client.Do(request)
		if err != nil {
			m.t.Fatal(err)
		}
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

// O6, O10: The time of an answer does not reveal whether an address is known. This holds for a
// request for a code, for the next request on the same or on another connection, and for a
// validation. The test measures thousands of requests in random order, each about a new address
// that is known, suspended or unknown. A mail server receives the codes.
func TestTimeTellsNothingOfAnAddress(t *testing.T) {
	m := hubstest.NewMailServer(t, hubstest.MailOptions{NoStartTLS: true})
	s := hubstest.Start(t, m.Env())
	s.AllowErrorsWithAnyOf("too many unfinished requests") // see timer.send
	timer := timer{t: t, base: s.Base}
	one := oneConnection(t)
	other := oneConnection(t)
	askCode := func(email string) time.Duration {
		body := fmt.Sprintf(`{"email":%q}`, email)
		return timer.send(one, "POST", "/auth/otp/request", body, 200)
	}
	validate := func(email, code string, want int) time.Duration {
		body := fmt.Sprintf(`{"email":%q,"code":%q}`, email, code)
		return timer.send(one, "POST", "/auth/otp/validate", body, want)
	}
	tests := []struct {
		name string
		time func(email string) time.Duration // sends the request and returns its time
	}{
		{name: "a request for a code", time: askCode},
		{name: "the next request on the same connection", time: func(email string) time.Duration {
			askCode(email)
			return timer.send(one, "GET", "/auth/session", "", 401)
		}},
		{name: "the next request on another connection", time: func(email string) time.Duration {
			askCode(email)
			return timer.send(other, "GET", "/auth/session", "", 401)
		}},
		{name: "a malformed validation", time: func(email string) time.Duration {
			return validate(email, "x", 400)
		}},
		{name: "a validation", time: func(email string) time.Duration {
			return validate(email, "000000", 401)
		}},
	}
	const each = timingRounds * timingSamples // addresses of each kind for each test
	hubstest.Exec(t, s.Database, `insert into users (email, suspended)
		select 'k' || n || '@time.example', false from generate_series(1, $1) n union all
		select 's' || n || '@time.example', true from generate_series(1, $1) n`, len(tests)*each)
	for i, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			wantAlike(t, i*each, test.time)
		})
	}
}

// oneConnection returns an HTTP client that uses at most one connection.
func oneConnection(t *testing.T) *http.Client {
	transport := &http.Transport{MaxConnsPerHost: 1}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// wantAlike measures a round of requests. While the bound is exceeded, it measures another round,
// and after timingRounds rounds it fails the test. The numbers in the addresses begin after first.
func wantAlike(t *testing.T, first int, measure func(email string) time.Duration) {
	t.Helper()
	times := map[byte][]time.Duration{}
	for round := range timingRounds {
		for _, i := range rand.Perm(3 * timingSamples) {
			kind := "ksu"[i%3] // known, suspended, unknown
			n := first + round*timingSamples + i/3 + 1
			took := measure(fmt.Sprintf("%c%d@time.example", kind, n))
			times[kind] = append(times[kind], took)
		}
		known := areaUnderROC(times['k'], times['u'])
		suspended := areaUnderROC(times['s'], times['u'])
		fmt.Fprintf(t.Output(), "AUC of %d samples each: known %.3f, suspended %.3f\n",
			len(times['u']), known, suspended)
		most := max(math.Abs(known-0.5), math.Abs(suspended-0.5))
		if most <= timingBound {
			return
		}
	}
	t.Errorf("after %d rounds, an AUC still differs from 0.5 by more than %.2f",
		timingRounds, timingBound)
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
