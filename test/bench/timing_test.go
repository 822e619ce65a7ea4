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

// The bound on what time may tell: the chance that a request about a known address takes longer
// than one about an unknown address (the area under the ROC curve, AUC) is 0.50 ± 0.02.
//
// The AUC of 2,000 samples of each kind has a standard error of 0.009, so chance alone exceeds
// the bound once in thirty comparisons. Where it is exceeded, further rounds of 2,000 are added
// to the same samples: of four rounds the error is 0.0046, and chance exceeds 0.02 once in
// 70,000 comparisons. No figure in seconds is asserted.
const (
	timingSamples = 2000 // of each kind, a round
	timingRounds  = 4
	timingBound   = 0.02
)

// A timer measures requests to one server, each from a client address of its own.
type timer struct {
	t    *testing.T
	base string
}

// send returns how long a request took. It asks again while too many requests for codes are
// unfinished: that is the same for every address.
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
			m.t.Fatalf("%s: got %d, want %d", path, answer.StatusCode, want)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// O6, O10: time does not tell whose address it is: not the time of a request for a code, nor
// that of the next request on the same connection or on another one, nor that of a validation.
// Thousands of requests about fresh addresses, known, suspended and unknown ones in random
// order; codes go to a mail server.
func TestTimeTellsNothingOfAnAddress(t *testing.T) {
	m := hubstest.NewMailServer(t, hubstest.MailOptions{NoStartTLS: true})
	s := hubstest.Start(t, m.Env())
	s.AllowErrors("too many unfinished requests")      // see timer.send
	const addresses = 5 * timingRounds * timingSamples // of each kind: none is used twice
	hubstest.Exec(t, s.Database, `insert into users (email, suspended)
		select 'k' || n || '@time.example', false from generate_series(1, $1) n union all
		select 's' || n || '@time.example', true from generate_series(1, $1) n`, addresses)
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
	for place, test := range []struct {
		what string
		time func(email string) time.Duration
	}{
		{"a request for a code", askCode},
		{"the next request on the same connection", func(email string) time.Duration {
			askCode(email)
			return timer.send(one, "GET", "/auth/session", "", 401)
		}},
		{"the next request on another connection", func(email string) time.Duration {
			askCode(email)
			return timer.send(other, "GET", "/auth/session", "", 401)
		}},
		{"a malformed validation", func(email string) time.Duration {
			return validate(email, "x", 400)
		}},
		{"a validation", func(email string) time.Duration {
			return validate(email, "000000", 401)
		}},
	} {
		t.Run(test.what, func(t *testing.T) {
			wantAlike(t, place*timingRounds*timingSamples, test.time)
		})
	}
}

func oneConnection(t *testing.T) *http.Client {
	transport := &http.Transport{MaxConnsPerHost: 1}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// wantAlike measures rounds until the bound holds. Addresses are numbered from first on.
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
	t.Errorf("the times differ by more than %.2f", timingBound)
}

// areaUnderROC is the chance that a value of a is greater than one of b: the statistic of Mann
// and Whitney, as a share of all pairs. Equal values count half.
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
