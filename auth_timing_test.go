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
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

// O6: time does not tell whose address it is. Thousands of requests about fresh
// addresses, known, suspended and unknown ones in random order, each from a client of
// its own; the rank test of Mann and Whitney compares the times. No figure is
// asserted, only that no kind tends to be slower. Chance alone exceeds the bound once
// in some 16,000 comparisons, and has to do so three times in a row.
func TestTimeTellsNothingOfAnAddress(t *testing.T) {
	const samples = 1000 // of each kind
	url := newDatabase(t)
	execSQL(t, url, `insert into users (email, suspended)
		select 'k' || n || '@time.example', false from generate_series(10000, 14999) n union all
		select 's' || n || '@time.example', true from generate_series(10000, 14999) n`)
	st, err := openStore(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.db.Close() })
	cfg := config{env: envLocal, trustedProxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
	s := newServer(cfg, st, io.Discard)
	ctx, endWorkers := context.WithCancel(context.Background())
	for range mailWorkers {
		go s.sendCodes(ctx)
	}
	t.Cleanup(func() { s.finishCodes(); endWorkers() })
	web := httptest.NewServer(s.handler(s.routes()))
	t.Cleanup(web.Close)

	n := 0
	ask := func(path, body string, want int) time.Duration {
		n++
		request, err := http.NewRequest("POST", web.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("X-Forwarded-For", fmt.Sprintf("2001:db8:%x:%x::1", n>>16, n&0xffff))
		start := time.Now()
		answer, err := web.Client().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
		took := time.Since(start)
		if answer.StatusCode != want {
			t.Fatalf("%s: %d, not %d", path, answer.StatusCode, want)
		}
		return took
	}
	measure := func(round int, path, body string, want int) map[byte][]float64 {
		times := map[byte][]float64{}
		for _, i := range rand.Perm(3 * samples) {
			kind := "ksu"[i%3]
			email := fmt.Sprintf("%c%d@time.example", kind, 10000+round*samples+i/3)
			took := ask(path, fmt.Sprintf(body, email), want)
			times[kind] = append(times[kind], took.Seconds())
		}
		return times
	}
	for _, test := range []struct {
		path, body string
		want       int
	}{
		{"/auth/otp/request", `{"email":"%s"}`, 200},
		{"/auth/otp/validate", `{"email":"%s","code":"x"}`, 400}, // malformed
		{"/auth/otp/validate", `{"email":"%s","code":"000000"}`, 401},
	} {
		var z map[byte]float64
		for round := range 3 {
			times := measure(round, test.path, test.body, test.want)
			z = map[byte]float64{'k': rankTest(times['k'], times['u']), 's': rankTest(times['s'], times['u'])}
			if math.Abs(z['k']) < 4 && math.Abs(z['s']) < 4 {
				z = nil
				break
			}
		}
		if z != nil {
			t.Errorf("%s %s: known and suspended addresses differ from unknown ones by %v standard deviations", test.path, test.body, z)
		}
	}
}

// rankTest is the statistic of Mann and Whitney in standard deviations: how much the
// values of a rank above those of b.
func rankTest(a, b []float64) float64 {
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
	return (ranks - m*(m+n+1)/2) / math.Sqrt(m*n*(m+n+1)/12)
}

// The rank test finds a difference where there is one, and none where there is none.
func TestRankTest(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	draw := func(shift float64) (values []float64) {
		for range 1000 {
			values = append(values, random.NormFloat64()+shift)
		}
		return values
	}
	if z := rankTest(draw(0.3), draw(0)); z < 4 {
		t.Errorf("a shift of 0.3 standard deviations gives %v", z)
	}
	if z := rankTest(draw(0), draw(0)); math.Abs(z) > 4 {
		t.Errorf("no shift gives %v", z)
	}
}
