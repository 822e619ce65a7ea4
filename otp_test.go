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

// newCodes returns an empty map of codes.
func newCodes() *oneTimeCodes {
	return &oneTimeCodes{byEmail: map[string]*oneTimeCode{}}
}

// mustIssue returns a new code for an address. It fails the test if issue makes none.
func mustIssue(t *testing.T, c *oneTimeCodes, email string) *oneTimeCode {
	t.Helper()
	issued := c.issue(email, time.Time{})
	if issued == nil {
		t.Fatalf("setup: got no code for %s, want one", email)
	}
	return issued
}

// redeem uses a code as a sign-in does: it finds the code, then removes it. It reports whether both
// succeed.
func redeem(c *oneTimeCodes, email, code string) bool {
	found := c.find(email, code)
	return found != nil && c.remove(email, found)
}

// O1: A code is exactly the number that the random source gives, so all codes are equally likely.
// The smallest and the largest code exist, leading zeros are kept, and a number above 999999 is
// drawn again. The test is not parallel, because it replaces the random source of the whole
// process.
func TestCodesFromKnownRandomness(t *testing.T) {
	real := rand.Reader
	defer func() { rand.Reader = real }()
	for want, drawn := range map[string][]int{ // numbers of the source, of 20 bits each
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
		if got := mustIssue(t, newCodes(), "a").digits; got != want {
			t.Errorf("source %d: got the code %s, want %s", drawn, got, want)
		}
	}
}

// O2: A code works until the last nanosecond of its lifetime, and not after it. The test stores the
// codes without issue, so no timer removes them: find itself must reject an expired code.
func TestCodesExpire(t *testing.T) {
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
			codes.byEmail["a"] = &oneTimeCode{digits: "012345", issuedAt: time.Now()}
			time.Sleep(after)
			if got := redeem(codes, "a", "012345"); got != want {
				t.Errorf("a code after %v: got it redeemed: %v, want %v", after, got, want)
			}
		})
	}
}

// O7: While a code is younger than a minute, another request for the same address makes no code.
// After the minute, a new code replaces the old one.
func TestYoungCodeIsNotReplaced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		codes := newCodes()
		first := mustIssue(t, codes, "a")
		for _, pause := range []time.Duration{0, 30 * time.Second, 30*time.Second - 1} {
			time.Sleep(pause)
			if code := codes.issue("a", time.Time{}); code != nil {
				t.Fatal("got a second code within the minute, want none")
			}
		}
		mustIssue(t, codes, "b") // another address has a minute of its own

		time.Sleep(time.Nanosecond)
		second := codes.issue("a", time.Time{})
		if second == nil {
			t.Fatal("got no second code after the minute, want one")
		}

		// By chance, the two can have the same digits.
		if first.digits != second.digits && redeem(codes, "a", first.digits) {
			t.Error("the old code: got it redeemed, want it refused")
		}
		if !redeem(codes, "a", second.digits) {
			t.Error("the new code: got it refused, want it redeemed")
		}
		mustIssue(t, codes, "a") // after a code was used, the next one is made at once
	})
}

// O3: A code works only for its own address, only as a whole, and only once.
func TestCodeWorksOnce(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	code := mustIssue(t, codes, "a").digits
	for _, wrong := range []string{hubstest.OtherCode(code, 1), "", code + "0", code[:5]} {
		if redeem(codes, "a", wrong) {
			t.Errorf("%q instead of %q: got it redeemed, want it refused", wrong, code)
		}
	}
	for _, digits := range []string{code, ""} {
		if redeem(codes, "b", digits) {
			t.Errorf("%q for another address: got it redeemed, want it refused", digits)
		}
	}
	if !redeem(codes, "a", code) {
		t.Error("the right code: got it refused, want it redeemed")
	}
	if redeem(codes, "a", code) {
		t.Error("the used code: got it redeemed, want it refused")
	}
}

// O3: If many requests have found the same code, only one of them removes it, and so opens a
// session.
func TestOneOfManyRemovesACode(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	found := codes.find("a", mustIssue(t, codes, "a").digits)
	removed := contend(&codes.mu, func() bool { return codes.remove("a", found) })
	if removed != 1 {
		t.Errorf("got a code removed %d times, want 1", removed)
	}
}

// O7: If many requests ask for a code for one address at once, only one of them makes a code.
func TestOneOfManyMakesACode(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	made := contend(&codes.mu, func() bool { return codes.issue("a", time.Time{}) != nil })
	if made != 1 {
		t.Errorf("got %d codes for one address, want 1", made)
	}
}

// contend calls try in a hundred goroutines at once, and returns how many calls returned true. mu is
// the lock that try takes.
//
// While contend holds the lock, all goroutines wait for it, so long that sync.Mutex then serves them
// in turn. So if try takes the lock twice, all do its first part before one does the second, and too
// many succeed. That order is no promise of sync.Mutex: without it, a test can miss such a fault, but
// not report a wrong one. The sleeps stay because no event marks that a goroutine waits for a lock.
func contend(mu *sync.Mutex, try func() bool) int64 {
	var won atomic.Int64
	var started, all sync.WaitGroup
	started.Add(100)
	mu.Lock()
	for range 100 {
		all.Go(func() {
			started.Done()
			if try() {
				won.Add(1)
			}
		})
	}
	started.Wait()
	for range 2 {
		time.Sleep(5 * time.Millisecond)
		mu.Unlock()
		mu.Lock()
	}
	mu.Unlock()
	all.Wait()
	return won.Load()
}

// Codes that nobody uses are removed from memory when they expire. The timer of a code that was
// used or replaced does not remove the next code of the same address.
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
			t.Errorf("got %d codes in memory, want the 2 that have not expired", n)
		}
		if !redeem(codes, "0", afterUse.digits) {
			t.Error("the code after a used one: got it refused, want it redeemed")
		}
		if !redeem(codes, "1", replacing.digits) {
			t.Error("the code that replaced another: got it refused, want it redeemed")
		}
	})
}

// O2, L1: Ages are measured with the monotonic clock. So when somebody sets the system's clock, no
// code and no limit ends earlier or later. A test can't set one of the two clocks alone, and
// synctest has only one. So this test checks that the times from which ages are measured include
// monotonic time, which Round(0) removes.
func TestAgesUseTheMonotonicClock(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]time.Time{
		"a code":  mustIssue(t, newCodes(), "a").issuedAt,
		"a limit": newLimiter(1, codeTTL, "").start,
	} {
		if start == start.Round(0) {
			t.Errorf("the age of %s: got the start %v, want one with monotonic time", name, start)
		}
	}
}

// O10: The work on a request for a code begins after a random delay, and no request waits for the
// delay or the work of another. So the requests end evenly over half a second.
func TestRequestsForCodesEndAtRandom(t *testing.T) {
	t.Parallel()
	const delay = 500 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		var log hubstest.Log
		s := serverWithoutDatabase(&log)
		for n := range maxCodeRequests {
			email := fmt.Sprintf("a%d@example.com", n)
			s.requestCode(&requestState{serverLog: s.log}, codeRequest{email})
		}

		time.Sleep(dbTimeout)                             // the work on each takes as long
		for _, step := range []struct{ least, most int }{ // requests done, in tenths of all
			{least: 0, most: 1},
			{least: 4, most: 6},
			{least: 10, most: 10},
		} {
			synctest.Wait()
			got := log.Count(`"msg":"code not sent"`)
			least, most := step.least*maxCodeRequests/10, step.most*maxCodeRequests/10
			if got < least || got > most {
				t.Errorf("got %d requests done, want %d to %d", got, least, most)
			}
			time.Sleep(delay / 2)
		}
	})
}

// D4: Only a mail server on a loopback host may lack STARTTLS. Private addresses, other names of
// this machine and names that look like localhost are not loopback hosts. The test always connects
// to the same mail server without STARTTLS, and changes only the host in the mailer's URL.
func TestOnlyLoopbackIsExcusedFromTLS(t *testing.T) {
	t.Parallel()
	m := hubstest.NewMailServer(t, hubstest.MailOptions{
		NoStartTLS: true,
		User:       "hubs",
		Password:   "secret-word",
	})
	real, err := url.Parse(m.URL)
	hubstest.Must(t, err)

	secure := func(user *url.Userinfo, host string) (passwordSent bool, err error) {
		t.Helper()
		conn, err := net.Dial("tcp", real.Host)
		hubstest.Must(t, err)
		defer conn.Close()
		named := &url.URL{Scheme: "smtp", User: user, Host: host + ":587"}
		client, err := smtp.NewClient(conn, named.Hostname())
		hubstest.Must(t, err)
		before := m.Passwords()
		err = mailer{server: named}.encryptAndLogIn(client)
		return m.Passwords() > before, err
	}

	for _, host := range []string{"localhost", "127.0.0.1", "[::1]"} {
		sent, err := secure(real.User, host)
		if err != nil || !sent {
			t.Errorf("%s: got the password sent: %v, and the error %v, want it sent",
				host, sent, err)
		}
	}

	others := `10.0.0.1 172.16.0.1 192.168.0.1 169.254.1.1 100.64.0.1 0.0.0.0
		[::] [fd00::1] [fe80::1] [::ffff:10.0.0.1] mail mail.local
		mail.example.com localhost.example.com mylocalhost 127.0.0.1.example.com`
	for host := range strings.FieldsSeq(others) {
		// Without a password, net/smtp alone would send the mail.
		for _, user := range []*url.Userinfo{real.User, nil} {
			sent, err := secure(user, host)
			if err == nil || sent {
				t.Errorf("%s: got the password sent: %v, and the error %v, want one before it",
					host, sent, err)
			}
		}
	}
}
