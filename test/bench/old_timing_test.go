//go:build moving

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
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

// O6, O10: time does not tell whose address it is: not the time of a code request, nor that of
// the next request on the same connection or on another one, nor that of a validation.
// Thousands of requests about fresh addresses, known, suspended and unknown ones in random
// order, each from a client of its own; codes go to a mail server.
func TestTimeTellsNothingOfAnAddress(t *testing.T) {
	url := newDatabase(t)
	const addresses = 5 * timingRounds * timingSamples // of each kind: none is used twice
	execSQL(t, url, `insert into users (email, suspended)
		select 'k' || n || '@time.example', false from generate_series(1, $1) n union all
		select 's' || n || '@time.example', true from generate_series(1, $1) n`, addresses)
	mails := newMailServer(t, mailOptions{noStartTLS: true})
	st, err := openStore(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.db.Close() })
	cfg, err := loadConfig(lookup(serverEnv(t, mails.env(), map[string]string{"DATABASE_URL": url})))
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(cfg, st, io.Discard)
	ctx, endWorkers := context.WithCancel(context.Background())
	for range mailWorkers {
		go s.sendCodes(ctx)
	}
	t.Cleanup(func() { finishCodes(s); endWorkers() })
	web := httptest.NewServer(s.handler(s.routes()))
	t.Cleanup(web.Close)

	n := 0
	client := func() *http.Client { // one connection
		transport := &http.Transport{MaxConnsPerHost: 1}
		t.Cleanup(transport.CloseIdleConnections)
		return &http.Client{Transport: transport}
	}
	send := func(client *http.Client, method, path, body string, want int) float64 {
		n++
		request, err := http.NewRequest(method, web.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("X-Forwarded-For", fmt.Sprintf("2001:db8:%x:%x::1", n>>16, n&0xffff))
		start := time.Now()
		answer, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
		took := time.Since(start)
		if answer.StatusCode != want {
			t.Fatalf("%s: got %d, want %d", path, answer.StatusCode, want)
		}
		return took.Seconds()
	}
	one, other := client(), client()
	askCode := func(email string) float64 {
		// Not so many at once that the queue is full: that would be told to all alike.
		waitUntil(t, "room in the queue", func() bool { return len(s.codeSlots) < mailQueue/2 })
		return send(one, "POST", "/auth/otp/request", emailBody(email), 200)
	}
	next := func(client *http.Client) float64 { return send(client, "GET", "/auth/session", "", 401) }

	for place, test := range []struct {
		what string
		time func(email string) float64
	}{
		{"a code request", askCode},
		{"the next request on the same connection", func(email string) float64 { askCode(email); return next(one) }},
		{"the next request on another connection", func(email string) float64 { askCode(email); return next(other) }},
		{"a malformed validation", func(email string) float64 {
			return send(one, "POST", "/auth/otp/validate", codeBody(email, "x"), 400)
		}},
		{"a validation", func(email string) float64 {
			return send(one, "POST", "/auth/otp/validate", codeBody(email, "000000"), 401)
		}},
	} {
		t.Run(test.what, func(t *testing.T) {
			times := map[byte][]float64{}
			var known, suspended float64
			for round := range timingRounds {
				first := (place*timingRounds+round)*timingSamples + 1 // address of each kind
				for _, i := range rand.Perm(3 * timingSamples) {
					kind := "ksu"[i%3]
					took := test.time(fmt.Sprintf("%c%d@time.example", kind, first+i/3))
					times[kind] = append(times[kind], took)
				}
				known, suspended = areaUnderROC(times['k'], times['u']), areaUnderROC(times['s'], times['u'])
				if math.Abs(known-0.5) <= timingBound && math.Abs(suspended-0.5) <= timingBound {
					break
				}
			}
			t.Logf("AUC of %d samples each: known %.3f, suspended %.3f", len(times['u']), known, suspended)
			if math.Abs(known-0.5) > timingBound || math.Abs(suspended-0.5) > timingBound {
				t.Errorf("got AUC known %.3f, suspended %.3f; want 0.50 ± %.2f", known, suspended, timingBound)
			}
		})
	}
}

// areaUnderROC is the chance that a value of a is greater than one of b: the statistic of Mann
// and Whitney, as a share of all pairs.
func areaUnderROC(a, b []float64) float64 {
	type value struct {
		of float64
		a  bool
	}
	var all []value
	for _, v := range a {
		all = append(all, value{v, true})
	}
	for _, v := range b {
		all = append(all, value{v, false})
	}
	slices.SortFunc(all, func(x, y value) int { return cmp.Compare(x.of, y.of) })
	ranks := 0.0
	for i, v := range all {
		if v.a {
			ranks += float64(i + 1)
		}
	}
	m, n := float64(len(a)), float64(len(b))
	return (ranks - m*(m+1)/2) / (m * n)
}

// The area under the curve finds a difference where there is one, and none where there is none.
func TestAreaUnderROC(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	draw := func(shift float64) (values []float64) {
		for range 4 * timingSamples {
			values = append(values, random.NormFloat64()+shift)
		}
		return values
	}
	for shift, want := range map[float64]float64{0: 0.5, 0.3: 0.584, -0.3: 0.416, 0.1: 0.528} {
		t.Run(fmt.Sprint(shift), func(t *testing.T) {
			if got := areaUnderROC(draw(shift), draw(0)); math.Abs(got-want) > timingBound {
				t.Errorf("got %.3f, want %.3f", got, want)
			}
		})
	}
	if got := areaUnderROC([]float64{1, 2}, []float64{3, 4}); got != 0 {
		t.Errorf("got %v for smaller values, want 0", got)
	}
	if got := areaUnderROC([]float64{3, 4}, []float64{1, 2}); got != 1 {
		t.Errorf("got %v for greater values, want 1", got)
	}
}
