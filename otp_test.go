package main

// Tests of one-time codes with a fake clock, known randomness and many requests at once.

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	rand2 "math/rand/v2"
	"net"
	"net/http/httptest"
	"net/mail"
	"net/smtp"
	"net/url"
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

// ask asks for a code, for a user who was never signed out everywhere. It returns nil if no mail is
// due.
func ask(c *oneTimeCodes, email string) *oneTimeCode {
	code, _ := c.issue(email, &user{now: time.Now()})
	return code
}

// redeem uses a code as a sign-in does: it finds the code, then removes it. It reports whether both
// succeed.
func redeem(c *oneTimeCodes, email, digits string) bool {
	found := c.find(email, digits)
	return found != nil && c.remove(email, found)
}

// guessWrong makes n wrong guesses at a code.
func guessWrong(c *oneTimeCodes, email string, code *oneTimeCode, n int) {
	for range n {
		c.find(email, hubstest.OtherCode(code.digits, 1))
	}
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
		if got := ask(newCodes(), "a").digits; got != want {
			t.Errorf("source %d: got the code %s, want %s", drawn, got, want)
		}
	}
}

// O2: A code works until the last nanosecond of its life, and not after it, also if it was mailed
// again. The test stores the code without issue, so no timer removes it: find itself must refuse an
// expired code.
func TestCodesExpire(t *testing.T) {
	t.Parallel()
	for age, want := range map[time.Duration]bool{
		0:           true,
		codeTTL - 1: true,
		codeTTL:     false,
		2 * codeTTL: false,
	} {
		synctest.Test(t, func(t *testing.T) {
			codes := newCodes()
			codes.byEmail["a"] = &oneTimeCode{digits: "012345", issuedAt: time.Now()}
			time.Sleep(min(age, codeRenew-1))
			mailedAgain := ask(codes, "a")
			time.Sleep(age - min(age, codeRenew-1))
			if got := redeem(codes, "a", "012345"); got != want || mailedAgain == nil {
				t.Errorf("a code after %v: got it redeemed: %v, want %v", age, got, want)
			}
		})
	}
}

// O7: A mailbox gets at most one mail every codeResend, counted from the last one. While a code is
// younger than codeRenew, it is mailed again; after that, a new one. A code that nobody uses is
// removed from memory when it expires, and no code that was replaced takes the next one with it.
func TestSameCodeIsMailedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const nothing, same, other = "no mail", "the same code", "a new code"
		codes := newCodes()
		last := map[string]*oneTimeCode{} // by address
		start := time.Now()
		for _, step := range []struct {
			email string
			at    time.Duration // since the start
			want  string
		}{
			{email: "a", at: 0, want: other},
			{email: "b", at: 0, want: other},
			{email: "a", at: 0, want: nothing},
			{email: "a", at: codeResend - 1, want: nothing},
			{email: "a", at: codeResend, want: same},
			{email: "b", at: codeRenew - 1, want: same},
			{email: "b", at: codeRenew, want: nothing},
			{email: "b", at: codeRenew + codeResend - 2, want: nothing}, // counted from the second mail
			{email: "b", at: codeRenew + codeResend - 1, want: other},
			{email: "b", at: 2*codeRenew + codeResend - 1, want: other}, // exactly codeRenew later
		} {
			time.Sleep(time.Until(start.Add(step.at)))
			code, _ := codes.issue(step.email, &user{now: time.Now()})
			got := other
			switch code {
			case nil:
				got = nothing
			case last[step.email]:
				got = same
			}
			if got != step.want {
				t.Fatalf("%v: got %s, want %s", step.at, got, step.want)
			}
			if code != nil {
				last[step.email] = code
			}
		}

		time.Sleep(codeTTL - 1)
		synctest.Wait()
		if codes.find("b", last["b"].digits) == nil {
			t.Error("before its end: got the last code refused, want it found")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if len(codes.byEmail) > 0 {
			t.Errorf("after their ends: got the codes %v in memory, want none", codes.byEmail)
		}
	})
}

// L5: The wrong guess number maxGuesses ends a code, also for who knows it. It stays for codeRenew, so
// that asking again brings no new guesses.
func TestTenGuessesEndACode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		codes := newCodes()
		first := ask(codes, "a")
		guessWrong(codes, "a", first, maxGuesses-1)
		if codes.find("a", first.digits) == nil {
			t.Error("one guess before the last: got the right code refused, want it found")
		}
		guessWrong(codes, "a", first, 1)
		if codes.find("a", first.digits) != nil {
			t.Error("after the last guess: got the right code found, want it refused")
		}
		for _, pause := range []time.Duration{codeResend, codeRenew - codeResend - 1} {
			time.Sleep(pause)
			if ask(codes, "a") != nil {
				t.Fatal("before codeRenew: got a mail, want none")
			}
		}
		time.Sleep(time.Nanosecond)
		second := ask(codes, "a")
		if second == nil || !redeem(codes, "a", second.digits) {
			t.Errorf("after codeRenew: got the code %v, want a new one that works", second)
		}
	})
}

// D3, L5, O7: A mail that failed counts as not sent, whichever it was: the next request mails at once.
// It brings the same code, whose guesses still count.
func TestFailedMailKeepsTheGuesses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		codes := newCodes()
		code := ask(codes, "a")
		for range 2 {
			guessWrong(codes, "a", code, maxGuesses/2-1)
			codes.mailFailed(code)
			again := ask(codes, "a")
			if again != code || codes.find("a", code.digits) == nil {
				t.Fatalf("the next request: got %+v, want the same code, which works", again)
			}
			if ask(codes, "a") != nil {
				t.Error("just after a mail: got another one, want none")
			}
			time.Sleep(codeResend)
		}
		guessWrong(codes, "a", code, 2)
		codes.mailFailed(code)
		if ask(codes, "a") != nil || codes.issueAgain("a", code) == nil {
			t.Errorf("after %d wrong guesses: got a mail, want none", maxGuesses)
		}
	})
}

// S1, T9: A code from before the user was signed out everywhere is refused, and the next request
// replaces it at once. So is a code of a time when the database's clock was ahead. Only the
// database's clock counts.
func TestSignOutEndsACode(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	readAt := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	ada := &user{UserID: "ada", now: readAt}
	first, _ := codes.issue("a", ada)
	for _, test := range []struct {
		signedOut, now time.Duration // after the code
		want           string
	}{
		{want: ""},
		{now: time.Hour, want: ""},
		{signedOut: time.Microsecond, now: time.Microsecond, want: "ended"},
		{signedOut: time.Microsecond, want: "future"},
		{now: -time.Microsecond, want: "future"},
		{signedOut: -time.Hour, now: -time.Microsecond, want: "future"},
	} {
		u := &user{UserID: "ada", now: readAt.Add(test.now), signedOutAt: readAt.Add(test.signedOut)}
		if got := first.whyNotFor(u, 0); got != test.want {
			t.Errorf("%+v: got the fault %q, want %q", test, got, test.want)
		}
	}
	later := readAt.Add(time.Second)
	ada = &user{UserID: "ada", now: later, signedOutAt: later}
	second, _ := codes.issue("a", ada)
	if second == nil || second == first || second.whyNotFor(ada, 0) != "" || codes.remove("a", first) {
		t.Errorf("after the sign-out: got %+v, want another code", second)
	}
}

// O3: A code works only for its own address, only as a whole, and only once. When it was used, the
// next request brings a new one at once.
func TestCodeWorksOnce(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	code := ask(codes, "a").digits
	for _, wrong := range []string{hubstest.OtherCode(code, 1), "", code + "0", code[:5]} {
		if redeem(codes, "a", wrong) {
			t.Errorf("%q instead of %q: got it redeemed, want it refused", wrong, code)
		}
	}
	if redeem(codes, "b", code) {
		t.Error("the code of another address: got it redeemed, want it refused")
	}
	if !redeem(codes, "a", code) {
		t.Error("the right code: got it refused, want it redeemed")
	}
	if redeem(codes, "a", code) {
		t.Error("the used code: got it redeemed, want it refused")
	}
	if ask(codes, "a") == nil {
		t.Error("after a code was used: got no new code, want one")
	}
}

// A codeModel says in the plainest way what the specification and the decisions want of codes.
type codeModel struct {
	codes     map[string]*modelCode // by address
	signedOut map[string]time.Time  // by address, by the database's clock
	clock     time.Duration         // how far the database's clock is ahead
}

type modelCode struct {
	real               *oneTimeCode // the code of the server that it stands for
	made, mailed, read time.Time    // mailed is zero if the last mail has failed
	guesses            int
}

// user returns a user as the database would.
func (m *codeModel) user(email string) *user {
	return &user{UserID: email, now: time.Now().Add(m.clock), signedOutAt: m.signedOut[email]}
}

// alive returns the code of an address that is not too old.
func (m *codeModel) alive(email string) *modelCode {
	code := m.codes[email]
	if code == nil || time.Since(code.made) >= codeTTL {
		return nil
	}
	return code
}

// mails says what a request makes of a user's code: nothing, a mail of it, or a new one.
func (m *codeModel) mails(email string) string {
	u, code := m.user(email), m.alive(email)
	switch {
	case u.signedOutAt.After(u.now):
		return "nothing"
	case code == nil, code.read.Before(u.signedOutAt), code.read.After(u.now.Add(clockStep)):
		return "new"
	case time.Since(code.mailed) < codeResend:
		return "nothing"
	case time.Since(code.made) >= codeRenew:
		return "new"
	case code.guesses >= maxGuesses:
		return "nothing"
	}
	return "again"
}

// opens reports whether a code opens a session of its user.
func (m *codeModel) opens(email string) bool {
	u, code := m.user(email), m.alive(email)
	return code != nil && code.guesses < maxGuesses && !code.read.Before(u.signedOutAt) &&
		!code.read.After(u.now) && !u.signedOutAt.After(u.now)
}

// pauses are the times that pass in a history. Most are at a bound of a code's life, or a tick
// before it.
var pauses = []time.Duration{
	1, time.Second, codeResend - 1, codeResend, codeRenew - 1, codeRenew, codeRenew - codeResend,
	codeTTL - codeRenew, codeTTL - 1, codeTTL, 24 * time.Hour, clockStep + 1,
}

// playCodes plays a history, one step for each byte, on codes and on their model. It returns the
// steps until they differ, and how.
func playCodes(history []byte) (steps []string, difference string) {
	real := newCodes()
	model := &codeModel{codes: map[string]*modelCode{}, signedOut: map[string]time.Time{}}
	for _, draw := range history {
		email, choice := string("ab"[draw>>7]), int(draw&0x7f)
		u, code := model.user(email), model.codes[email]
		step, got, want := "", "", ""
		switch {
		case choice < 34: // a request; its mail fails after every fifth
			step, want = "request for "+email, model.mails(email)
			issued, err := real.issue(email, u)
			switch {
			case err != nil:
				got = "nothing"
			case code != nil && issued == code.real:
				got = "again"
				code.mailed = time.Now()
			default:
				got = "new"
				code = &modelCode{real: issued, made: time.Now(), mailed: time.Now(), read: u.now}
				model.codes[email] = code
			}
			if issued != nil && choice%5 == 0 {
				step += ", whose mail fails"
				real.mailFailed(issued)
				code.mailed = time.Time{}
			}
		case choice < 40: // another attempt to mail a code
			step, got, want = "another mail to "+email, "nothing", "nothing"
			alive := model.alive(email)
			if alive != nil && alive.guesses < maxGuesses {
				want = "again"
			}
			if code != nil && real.issueAgain(email, code.real) == nil {
				got = "again"
				code.mailed = time.Now()
			}
		case choice < 76: // wrong guesses, often all at once
			n := []int{1, 1, 2, maxGuesses - 1, maxGuesses, maxGuesses + 1}[choice%6]
			step = fmt.Sprintf("%d wrong guesses at %s", n, email)
			if alive := model.alive(email); alive != nil {
				guessWrong(real, email, alive.real, n)
				alive.guesses = min(alive.guesses+n, maxGuesses)
			}
		case choice < 88:
			step, want = "sign-in of "+email, fmt.Sprint(model.opens(email))
			got = "false"
			if code != nil {
				found := real.find(email, code.real.digits)
				if found != nil && found.whyNotFor(u, 0) == "" && real.remove(email, found) {
					got = "true"
					delete(model.codes, email)
				}
			}
		case choice < 92:
			step = email + " is signed out everywhere"
			model.signedOut[email] = u.now
		case choice < 96:
			model.clock = []time.Duration{0, -1, 2 * time.Hour, -clockStep}[choice%4]
			step = "the database's clock is ahead by " + model.clock.String()
		default:
			pause := pauses[choice%len(pauses)]
			step = "pause of " + pause.String()
			time.Sleep(pause)
		}
		steps = append(steps, step)
		synctest.Wait() // for the timers
		if got != want {
			return steps, fmt.Sprintf("got %q, want %q", got, want)
		}
		if difference := model.differs(real); difference != "" {
			return steps, difference
		}
	}
	return steps, ""
}

// differs compares what is in memory with the model.
func (m *codeModel) differs(real *oneTimeCodes) string {
	real.mu.Lock() // a timer may remove a code
	defer real.mu.Unlock()
	for email := range m.codes {
		code, kept := m.alive(email), real.byEmail[email]
		switch {
		case code == nil && kept != nil:
			return "a code that has expired is kept"
		case code != nil && kept != code.real:
			return "a code that lives is gone"
		case code != nil && kept.guesses != code.guesses:
			return fmt.Sprintf("got %d wrong guesses, want %d", kept.guesses, code.guesses)
		}
	}
	return ""
}

// O2, O3, O7, L5, S1, T9: Whatever is done in whichever order, codes are made, mailed, mailed again,
// guessed at, used, replaced and forgotten as the model says.
func TestCodesAreAsTheirModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(40) {
		random := rand2.New(rand2.NewPCG(seed, 2))
		history := make([]byte, 1500)
		for i := range history {
			history[i] = byte(random.Uint32())
		}
		synctest.Test(t, func(t *testing.T) {
			steps, difference := playCodes(history)
			if difference != "" {
				t.Errorf("seed %d: %s, after %d steps, the last of which are\n%s",
					seed, difference, len(steps), strings.Join(steps[max(0, len(steps)-20):], "\n"))
			}
		})
	}
}

// FuzzCodes makes a history short that TestCodesAreAsTheirModel fails with.
func FuzzCodes(f *testing.F) {
	f.Add([]byte{1, 40, 80, 97, 5, 129, 90, 2})
	f.Fuzz(func(t *testing.T, history []byte) {
		synctest.Test(t, func(t *testing.T) {
			if steps, difference := playCodes(history[:min(len(history), 500)]); difference != "" {
				t.Errorf("%s, after\n%s", difference, strings.Join(steps, "\n"))
			}
		})
	})
}

// O3, O7, L5: Of many requests at once, one makes a code, maxGuesses wrong guesses count, and one of
// those that have found the code removes it, and so opens a session.
func TestCodesInParallel(t *testing.T) {
	t.Parallel()
	codes := newCodes()
	made := contend(&codes.mu, func() bool { return ask(codes, "a") != nil })
	if made != 1 {
		t.Errorf("got %d codes for one address, want 1", made)
	}
	code := codes.byEmail["a"]
	contend(&codes.mu, func() bool {
		guessWrong(codes, "a", code, 1)
		return false
	})
	if code.guesses != maxGuesses {
		t.Errorf("got %d wrong guesses counted, want %d", code.guesses, maxGuesses)
	}
	removed := contend(&codes.mu, func() bool { return codes.remove("a", code) })
	if removed != 1 {
		t.Errorf("got a code removed %d times, want 1", removed)
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

// O7: A mail that fails does so before the next one can begin. Otherwise its failure would let a third
// one begin at once.
func TestMailsDoNotOverlap(t *testing.T) {
	t.Parallel()
	if codeMaxWait+mailTimeout > codeResend {
		t.Errorf("got attempts of %v up to %v after a request, want them to end within %v",
			mailTimeout, codeMaxWait, codeResend)
	}
}

// O2, L1: Ages are measured with the monotonic clock. So when somebody sets the system's clock, no
// code and no limit ends earlier or later. A test can't set one of the two clocks alone, and
// synctest has only one. So this test checks that the times from which ages are measured include
// monotonic time, which Round(0) removes.
func TestAgesUseTheMonotonicClock(t *testing.T) {
	t.Parallel()
	code := ask(newCodes(), "a")
	for name, start := range map[string]time.Time{
		"a code":  code.issuedAt,
		"a mail":  code.mailedAt,
		"a limit": newLimiter(1, codeTTL, "").start,
	} {
		if start == start.Round(0) {
			t.Errorf("the age of %s: got the start %v, want one with monotonic time", name, start)
		}
	}
}

// O10: The work on a request for a code begins after a random delay, and no request waits for the
// delay or the work of another. So the requests end evenly over codeDelay.
//
// D3, O6: While maxCodeRequests are unfinished, a new request gets a 503, before the server looks
// whether its address has an account: the store of this test answers nothing.
func TestRequestsForCodesEndAtRandom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log hubstest.Log
		s := newServer(config{env: envLocal}, &store{}, &logWriter{Writer: &log})
		for n := range maxCodeRequests {
			s.scheduleCode(fmt.Sprintf("a%d@example.com", n), s.log)
		}
		more := httptest.NewRequest("POST", "/auth/otp/request",
			strings.NewReader(`{"email":"one-more@example.com"}`))
		more.Header.Set("Content-Type", "application/json")
		answer := httptest.NewRecorder()
		s.ServeHTTP(answer, more)
		if answer.Code != 503 {
			t.Errorf("one more than %d unfinished requests: got status %d, want 503",
				maxCodeRequests, answer.Code)
		}

		time.Sleep(slotTimeout)                           // the work on each takes as long
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
			time.Sleep(codeDelay / 2)
		}
	})
}

// O7: A mail says how many whole minutes its code has left, also if the code is mailed again.
func TestMailSaysTheMinutesLeft(t *testing.T) {
	t.Parallel()
	m := hubstest.NewMailServer(t, hubstest.MailOptions{})
	smtpURL, err := url.Parse(m.URL)
	hubstest.Must(t, err)
	from := &mail.Address{Address: "hubs@example.com"}
	s := newServer(config{mail: mailer{server: smtpURL, from: from}}, nil, nil)
	for _, age := range []time.Duration{0, codeResend + time.Second} {
		left := int((codeTTL - age).Minutes())
		code := &oneTimeCode{issuedAt: time.Now().Add(-age)}
		hubstest.Must(t, s.mailCode("a@b.example", code))
		got := m.WaitMail(t, "a@b.example").Data
		if want := fmt.Sprintf(" within %d minutes.", left); !strings.Contains(got, want) {
			t.Errorf("a code of %v: got the mail %q, want %q in it", age, got, want)
		}
	}
}

// D4: Only a mail server on a loopback host gets a mail without STARTTLS. Private addresses, other
// names of this machine and names that look like localhost are not loopback hosts. The test always
// connects to the same mail server without STARTTLS, and changes only the host in the mailer's URL.
func TestOnlyLoopbackIsExcusedFromTLS(t *testing.T) {
	t.Parallel()
	m := hubstest.NewMailServer(t, hubstest.MailOptions{
		NoStartTLS: true,
		User:       "hubs",
		Password:   "secret-word",
	})
	real, err := url.Parse(m.URL)
	hubstest.Must(t, err)

	logIn := func(user *url.Userinfo, host string) error {
		t.Helper()
		conn, err := net.Dial("tcp", real.Host)
		hubstest.Must(t, err)
		defer conn.Close()
		named := &url.URL{Scheme: "smtp", User: user, Host: host + ":587"}
		client, err := smtp.NewClient(conn, named.Hostname())
		hubstest.Must(t, err)
		return mailer{server: named, from: &mail.Address{}}.encryptAndLogIn(client)
	}

	loopback := []string{"localhost", "127.0.0.1", "[::1]"}
	for _, host := range loopback {
		if err := logIn(real.User, host); err != nil {
			t.Errorf("%s: got the error %v, want none", host, err)
		}
	}
	others := `10.0.0.1 172.16.0.1 192.168.0.1 169.254.1.1 100.64.0.1 0.0.0.0
		[::] [fd00::1] [fe80::1] [::ffff:10.0.0.1] mail mail.local
		mail.example.com localhost.example.com mylocalhost 127.0.0.1.example.com`
	for host := range strings.FieldsSeq(others) {
		// Without a password, net/smtp alone would send the mail.
		for _, user := range []*url.Userinfo{real.User, nil} {
			if err := logIn(user, host); err == nil {
				t.Errorf("%s: got no error, want one without TLS", host)
			}
		}
	}
	hubstest.WantEqual(t, "passwords at the mail server", m.Passwords.Load(), int64(len(loopback)))
}

// M1: Whatever a mail server says, a mail ends in its time, and counts as sent only if the server has
// said 2yz after the mail.
func FuzzMailServer(f *testing.F) {
	f.Add("220 a\r\n250 b\r\n250 c\r\n250 d\r\n354 e\r\n250 f\r\n")
	f.Add("220 a\r\n421 b\r\n")
	f.Add("220-a\r\n220 b\r\n250-AUTH\r\n250 c\r\n450 d\r\n")
	f.Fuzz(func(t *testing.T, says string) {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		hubstest.Must(t, err)
		defer listener.Close()
		heard := make(chan string, 1)
		go func() {
			conn, err := listener.Accept()
			if err != nil {
				heard <- ""
				return
			}
			io.WriteString(conn, says)
			conn.(*net.TCPConn).CloseWrite()
			text, _ := io.ReadAll(conn)
			conn.Close()
			heard <- string(text)
		}()
		server := &url.URL{Scheme: "smtp", Host: listener.Addr().String()}
		m := mailer{server: server, from: &mail.Address{Address: "hubs@example.com"}}
		err = m.send("a@b.example", "subject", "text\n")
		text := <-heard
		hasMail := strings.Contains(text, "\r\n.\r\n")
		if err == nil && (!hasMail || !strings.Contains(says, "250")) {
			t.Errorf("the mail server says %q and has heard %q: got no error, want one", says, text)
		}
		if isRefusedForNow(err) && !strings.Contains(says, "4") {
			t.Errorf("the mail server says %q: got %v, want no refusal for now", says, err)
		}
	})
}
