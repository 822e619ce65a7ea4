package main

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"net"
	"net/smtp"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"hubs/internal/hubstest"
)

func newCodes() *oneTimeCodes {
	return &oneTimeCodes{byEmail: map[string]oneTimeCode{}}
}

// mustIssue makes a code where one must be made.
func mustIssue(t *testing.T, c *oneTimeCodes, email string) oneTimeCode {
	t.Helper()
	issued, ok := c.issue(email, time.Time{})
	if !ok {
		t.Fatalf("got no code for %s, want one", email)
	}
	return issued
}

// wantRedeemed presents a code: it is found, then removed.
func wantRedeemed(t *testing.T, c *oneTimeCodes, email, code string, want bool) {
	t.Helper()
	found, ok := c.find(email, code)
	if got := ok && c.remove(email, found); got != want {
		t.Errorf("%q of %q redeemed: got %v, want %v", code, email, got, want)
	}
}

// O1: a code is the very number that the source gives, so all are equally likely: the ends of the
// range exist, leading zeros stay, and what is beyond the range is drawn again. Not parallel: the
// source of the whole process is replaced.
func TestCodesFromKnownRandomness(t *testing.T) {
	real := rand.Reader
	defer func() { rand.Reader = real }()
	for want, drawn := range map[string][]int{ // 20 bits each
		"000000": {0},
		"000007": {7},
		"012345": {12_345},
		"999999": {999_999},
		"000042": {1_000_000, 42},
		"000005": {1<<20 - 1, 1_000_001, 5},
	} {
		var source bytes.Buffer
		for _, n := range drawn {
			source.Write([]byte{byte(n >> 16), byte(n >> 8), byte(n)})
		}
		rand.Reader = &source
		if got := mustIssue(t, newCodes(), "a").code; got != want {
			t.Errorf("%d: got %s, want %s", drawn, got, want)
		}
	}
}

// O2: a code works until the last nanosecond of its life. No timer helps: none was started for
// these codes.
func TestCodeLifetime(t *testing.T) {
	t.Parallel()
	const life = 600 * time.Second
	for after, want := range map[time.Duration]bool{
		0:        true,
		life - 1: true,
		life:     false,
		2 * life: false,
	} {
		synctest.Test(t, func(t *testing.T) {
			codes := newCodes()
			codes.byEmail["a"] = oneTimeCode{code: "012345", issuedAt: time.Now()}
			time.Sleep(after)
			wantRedeemed(t, codes, "a", "012345", want)
		})
	}
}

// O7: while a live code is younger than a minute, a further request changes nothing. From then
// on a new code replaces the old one.
func TestCodeResend(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		codes := newCodes()
		first := mustIssue(t, codes, "a")
		for _, pause := range []time.Duration{0, 30 * time.Second, 30*time.Second - 1} {
			time.Sleep(pause)
			if code, ok := codes.issue("a", time.Time{}); ok {
				t.Fatalf("got a second code %v within the minute", code)
			}
		}
		mustIssue(t, codes, "b") // another mailbox is another matter
		time.Sleep(time.Nanosecond)
		second := mustIssue(t, codes, "a")
		wantRedeemed(t, codes, "a", first.code, first.code == second.code)
		wantRedeemed(t, codes, "a", second.code, true)
		mustIssue(t, codes, "a") // a used code is not a live one
	})
}

// O3: a code works for its mailbox, whole, and once.
func TestCodeWorksOnce(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	code := mustIssue(t, codes, "a").code
	for _, wrong := range []string{hubstest.OtherCode(code, 1), "", code + "0", code[:5]} {
		wantRedeemed(t, codes, "a", wrong, false)
	}
	wantRedeemed(t, codes, "b", code, false)
	wantRedeemed(t, codes, "b", "", false)
	wantRedeemed(t, codes, "a", code, true)
	wantRedeemed(t, codes, "a", code, false)
}

// O3: of many requests that have found a code, one removes it. Only that one opens a session.
func TestOneOfManyRemovesACode(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	found, _ := codes.find("a", mustIssue(t, codes, "a").code)
	removed := atOnce(codes, func() bool { return codes.remove("a", found) })
	if removed != 1 {
		t.Errorf("got a code removed %d times, want once", removed)
	}
}

// O7: of many requests for a code at once, one makes it.
func TestOneOfManyMakesACode(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	made := atOnce(codes, func() bool {
		_, ok := codes.issue("a", time.Time{})
		return ok
	})
	if made != 1 {
		t.Errorf("got %d codes for one mailbox, want 1", made)
	}
}

// atOnce calls try a hundred times at the same moment, and returns how often it was true. All of
// them wait for the lock for longer than a millisecond, and lose it once more to the test. From then
// on, sync.Mutex hands the lock to the one that waits longest. So if try took the lock twice, all
// would do the first part before one does the second. Left to chance, one attempt in a thousand
// would show that.
func atOnce(codes *oneTimeCodes, try func() bool) int64 {
	var won atomic.Int64
	var all sync.WaitGroup
	codes.mu.Lock()
	for range 100 {
		all.Go(func() {
			if try() {
				won.Add(1)
			}
		})
	}
	for range 2 {
		time.Sleep(5 * time.Millisecond)
		codes.mu.Unlock()
		codes.mu.Lock()
	}
	codes.mu.Unlock()
	all.Wait()
	return won.Load()
}

// A code whose mail failed is gone, and so is its minute. O3: a newer one stays.
func TestRemovedCodeSparesTheNext(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	first := mustIssue(t, codes, "a")
	codes.remove("a", first)
	wantRedeemed(t, codes, "a", first.code, false)
	second := mustIssue(t, codes, "a")
	first.code = hubstest.OtherCode(second.code, 1)
	codes.remove("a", first)
	wantRedeemed(t, codes, "a", second.code, true)
}

// Codes that nobody presents don't pile up. The timer of a used or replaced code spares the
// next one of its mailbox.
func TestExpiredCodesAreSwept(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		codes := newCodes()
		for i := range 1000 {
			mustIssue(t, codes, strconv.Itoa(i))
		}
		codes.remove("0", codes.byEmail["0"])
		time.Sleep(codeTTL / 2)
		afterUse := mustIssue(t, codes, "0")
		replacing := mustIssue(t, codes, "1")
		time.Sleep(codeTTL - 1)
		synctest.Wait()
		if n := len(codes.byEmail); n != 2 {
			t.Errorf("got %d codes, want the 2 that are live", n)
		}
		wantRedeemed(t, codes, "0", afterUse.code, true)
		wantRedeemed(t, codes, "1", replacing.code, true)
	})
}

// O2, L1: ages are those of the monotonic clock, so to set the system's clock ends no code, opens no
// limit, and makes neither last longer. Nothing can set one of the two clocks for a test, and a
// bubble of synctest has only one. So this looks whether the times that ages count from have both:
// Round(0) takes the monotonic one away.
func TestSteppedClockChangesNothing(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]time.Time{
		"a code":  mustIssue(t, newCodes(), "a").issuedAt,
		"a limit": newLimiter(1, codeTTL, "").start,
	} {
		if start == start.Round(0) {
			t.Errorf("the age of %s counts from %v, by the system's clock alone", name, start)
		}
	}
}

// O10: the work on a request begins after a random delay, and no request waits for another's.
func TestDelayHoldsUpNoQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log hubstest.Log
		s := serverWithoutDatabase(&log)
		for n := range maxCodeRequests {
			email := fmt.Sprintf("a%d@example.com", n)
			s.requestCode(&requestState{serverLog: s.log}, codeRequest{email})
		}
		wantDone := func(after time.Duration, least, most int) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			n := log.Count(`"msg":"code not sent"`)
			if n < least || n > most {
				t.Errorf("got %d requests done, want %d to %d", n, least, most)
			}
		}
		wantDone(dbTimeout, 0, maxCodeRequests/10) // which each of them takes
		wantDone(codeDelay/2, maxCodeRequests*4/10, maxCodeRequests*6/10)
		wantDone(codeDelay/2, maxCodeRequests, maxCodeRequests)
	})
}

// D4: only the loopback host itself is excused from STARTTLS: no private address, no other
// name of this machine, and no name that looks like localhost. The test speaks to a mail
// server without STARTTLS, under a URL that names the host.
func TestOnlyLoopbackIsExcusedFromTLS(t *testing.T) {
	t.Parallel()
	m := hubstest.NewMailServer(t, hubstest.MailOptions{
		NoStartTLS: true,
		User:       "hubs",
		Password:   "secret-word",
	})
	address := strings.TrimPrefix(m.URL, "smtp://hubs:secret-word@")
	wantExcused := func(user *url.Userinfo, host string, want bool) {
		t.Helper()
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		named := &url.URL{Scheme: "smtp", User: user, Host: host + ":587"}
		client, err := smtp.NewClient(conn, named.Hostname())
		if err != nil {
			t.Fatal(err)
		}
		before := m.Passwords()
		err = mailer{server: named}.secure(client)
		if (err == nil) != want {
			t.Errorf("%s: got %v, want excused: %v", host, err, want)
		}
		if sent := m.Passwords() > before; sent != want {
			t.Errorf("%s: the password was sent: got %v, want %v", host, sent, want)
		}
	}
	user := url.UserPassword("hubs", "secret-word")
	for _, host := range []string{"localhost", "127.0.0.1", "[::1]"} {
		wantExcused(user, host, true)
	}
	others := `10.0.0.1 172.16.0.1 192.168.0.1 169.254.1.1 100.64.0.1 0.0.0.0
		[::] [fd00::1] [fe80::1] [::ffff:10.0.0.1] mail mail.local
		mail.example.com localhost.example.com mylocalhost 127.0.0.1.example.com`
	for host := range strings.FieldsSeq(others) {
		wantExcused(user, host, false)
		wantExcused(nil, host, false) // net/smtp alone guards a password, but no mail
	}
}
