//go:build moving

package main

// Sign-in as the user lives it, and everything that must not pass for a session.

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const (
	rejected = "unauthenticated"
	sixty    = 60 * 24 * time.Hour
)

// The whole way in and out, locally, where the code is printed.
func TestSignIn(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	email := newEmail()
	userID := testUser(t, srv.env["DATABASE_URL"], email, "member")
	c := srv.client(t)
	wantProblem(t, c.do("GET", "/auth/session", nil), 401, rejected)

	askCode(c, strings.ToUpper(email))
	code := srv.code(t, email)
	for _, wrong := range []string{otherCode(code, 1), otherCode(code, 500_000)} {
		r := presentCode(c, email, wrong)
		if wantProblem(t, r, 401, "invalid_code"); r.header.Get("Set-Cookie") != "" {
			t.Errorf("a cookie for a wrong code: %v", r)
		}
	}
	wantProblem(t, presentCode(c, newEmail(), code), 401, "invalid_code")
	view := presentCode(c, " "+strings.ToUpper(email), code).want(t, 200)
	wantProblem(t, presentCode(srv.client(t), email, code), 401, "invalid_code")

	again := c.do("GET", "/auth/session", nil).want(t, 200)
	if !bytes.Equal(view.body, again.body) {
		t.Errorf("the session at sign-in %s\nand after a reload %s", view.body, again.body)
	}
	expires, err := time.Parse(time.RFC3339Nano, view.field(t, "expiresAt").(string))
	if left := time.Until(expires); err != nil || left > sixty || left < sixty-time.Hour {
		t.Errorf("expires at %v, %v", expires, err)
	}
	want := map[string]any{
		"user":      map[string]any{"userId": userID, "email": email, "permission": "member"},
		"terms":     map[string]any{"version": TERMS_VERSION, "accepted": false},
		"expiresAt": expires.Format(time.RFC3339Nano),
	}
	if got := view.json(t); !reflect.DeepEqual(got, want) || !strings.HasSuffix(want["expiresAt"].(string), "Z") {
		t.Errorf("session view %v, want %v", got, want)
	}

	token := c.token()
	r := c.do("POST", "/auth/logout", nil).want(t, 204)
	if len(r.body) != 0 || c.token() != "" {
		t.Errorf("after sign-out: token %q, %v", c.token(), r)
	}
	wantProblem(t, c.do("GET", "/auth/session", nil), 401, rejected)
	wantProblem(t, c.do("POST", "/auth/logout", nil), 401, rejected)
	// Sign-out clears the cookie and no more, as the README owns up to.
	c.setToken(token)
	c.do("GET", "/auth/session", nil).want(t, 200)
}

// T6, T7: the cookie to the letter, and that its clearing empties a real jar; T1: the
// payload has nothing but its four claims.
func TestCookieAndToken(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	for environment, c := range map[string]struct {
		env              map[string]string
		name, attributes string
	}{
		"local":  {nil, "hubs_auth_local", "Path=/; Max-Age=%d; HttpOnly; SameSite=Lax"},
		"prefix": {map[string]string{"COOKIE_PREFIX": "acme"}, "acme_auth_local", "Path=/; Max-Age=%d; HttpOnly; SameSite=Lax"},
		"staging": {stagingEnv(newMailServer(t, mailOptions{})), "__Secure-hubs_auth_staging",
			"Path=/; Domain=staging.example.com; Max-Age=%d; HttpOnly; Secure; SameSite=Lax"},
		"production": {productionEnv(newMailServer(t, mailOptions{})), "__Secure-hubs_auth_production",
			"Path=/; Domain=example.com; Max-Age=%d; HttpOnly; Secure; SameSite=Lax"},
	} {
		t.Run(environment, func(t *testing.T) {
			t.Parallel()
			srv := startServer(t, c.env, map[string]string{"DATABASE_URL": database})
			email := newEmail()
			userID := testUser(t, database, email, "admin")
			client := srv.client(t)
			signedIn := client.signIn(email)
			token := client.token()
			want := c.name + "=" + token + "; " + fmt.Sprintf(c.attributes, 5184000)
			if got := signedIn.header.Values("Set-Cookie"); token == "" || len(got) != 1 || got[0] != want {
				t.Errorf("Set-Cookie %q\nwant %q", got, want)
			}
			if insecure := strings.Replace(srv.base, "https:", "http:", 1); environment != "local" && environment != "prefix" {
				u, _ := url.Parse(insecure)
				if got := client.http.Jar.Cookies(u); len(got) != 0 {
					t.Errorf("sent without TLS: %v", got)
				}
			}
			header, payload := tokenParts(t, token)
			iat, exp := micros(t, payload["iat"]), micros(t, payload["exp"])
			if got := slices.Sorted(maps.Keys(payload)); !slices.Equal(got, []string{"email", "exp", "iat", "userId"}) ||
				payload["email"] != email || payload["userId"] != userID || exp-iat != sixty.Microseconds() {
				t.Errorf("payload %v", payload)
			}
			if header["alg"] != "HS256" || header["typ"] != "JWT" || len(header) != 2 {
				t.Errorf("header %v", header)
			}
			expires, _ := time.Parse(time.RFC3339Nano, signedIn.field(t, "expiresAt").(string))
			if age := time.Since(time.UnixMicro(iat)); age.Abs() > time.Minute || expires.UnixMicro() != exp {
				t.Errorf("issued %v ago, exp %d, the view says %v", age, exp, expires)
			}

			r := client.do("POST", "/auth/logout", nil).want(t, 204)
			want = c.name + "=; " + fmt.Sprintf(c.attributes, 0)
			if got := r.header.Values("Set-Cookie"); len(got) != 1 || got[0] != want {
				t.Errorf("cleared with %q\nwant %q", got, want)
			}
			if left := client.http.Jar.Cookies(client.baseURL()); len(left) != 0 {
				t.Errorf("left in the jar: %v", left)
			}
		})
	}
}

// tokenParts decodes a token without a look at its signature.
func tokenParts(t testing.TB, token string) (header, payload map[string]any) {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("%d parts", len(parts))
	}
	for i, into := range []*map[string]any{&header, &payload} {
		text, err := base64.RawURLEncoding.DecodeString(parts[i])
		decoder := json.NewDecoder(bytes.NewReader(text))
		decoder.UseNumber()
		if err != nil || decoder.Decode(into) != nil {
			t.Fatalf("%q: %v", text, err)
		}
	}
	return header, payload
}

// micros reads a time of a token, in microseconds.
func micros(t testing.TB, value any) int64 {
	t.Helper()
	seconds, err := value.(json.Number).Float64()
	if err != nil {
		t.Fatal(err)
	}
	return int64(math.Round(seconds * 1e6))
}

// forge makes a token by hand, so that it can be as wrong as one likes.
func forge(header, payload, key string, newHash func() hash.Hash) string {
	signed := base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))
	if newHash == nil {
		return signed + "."
	}
	mac := hmac.New(newHash, []byte(key))
	mac.Write([]byte(signed))
	return signed + "." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

const hs256 = `{"alg":"HS256","typ":"JWT"}`

// T2: a token's times hold to the microsecond: the last one at which it is good, and the
// first at which it is none.
func TestTokenTimesAreExact(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const key = "test-secret-of-more-than-thirty-two-bytes"
		s := newServer(config{env: envLocal}, nil, io.Discard)
		s.cfg.sessionKeys.Keys = append(s.cfg.sessionKeys.Keys, []byte(key))
		at := func(d time.Duration) string { return fmt.Sprintf("%.6f", float64(time.Now().Add(d).UnixMicro())/1e6) }
		for _, test := range []struct {
			issued, expires time.Duration
			notBefore       string
			good            bool
		}{
			{0, time.Microsecond, "", true},
			{-time.Hour, 0, "", false},
			{-time.Hour, -time.Microsecond, "", false},
			{time.Minute, time.Hour, "", true},
			{time.Minute + time.Microsecond, time.Hour, "", false},
			{0, sessionTTL, "", true},
			{0, sessionTTL + time.Second + time.Microsecond, "", false},
			{0, time.Hour, at(0), true},
			{0, time.Hour, at(time.Microsecond), false},
		} {
			payload := fmt.Sprintf(`{"email":"a@b.example","userId":%q,"iat":%s,"exp":%s`, exampleID, at(test.issued), at(test.expires))
			if test.notBefore != "" {
				payload += `,"nbf":` + test.notBefore
			}
			token, ok := s.verifyToken(forge(hs256, payload+"}", key, sha256.New))
			valid := ok && time.Now().Before(token.expiresAt) // as checkSession has it
			if valid != test.good {
				t.Errorf("%+v: got %v, want %v", test, valid, test.good)
			}
		}
	})
}

// T2: a session ends at the nanosecond at which it expires, without a look at the database,
// which is away here: while the session lasts, that is a 503.
func TestSessionEndsAtItsExpiry(t *testing.T) {
	t.Parallel()
	for left, status := range map[time.Duration]int{time.Microsecond: 503, time.Nanosecond: 503, 0: 401, -time.Nanosecond: 401} {
		t.Run(left.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, _ := awayOffice(t)
				now := time.Now().Unix()
				token := forge(hs256, fmt.Sprintf(`{"email":"a@b.example","userId":%q,"iat":%d,"exp":%d}`, exampleID, now, now+60),
					string(s.cfg.sessionKeys.Keys[0].([]byte)), sha256.New)
				time.Sleep(time.Until(time.Unix(now+60, 0)) - left)
				call(t, s, one(0), "GET", "/auth/session", "", "Cookie", s.cfg.cookieName+"="+token).want(t, status)
			})
		})
	}
}

// The identifiers of this API are random UUIDs as PostgreSQL prints them, and nothing else.
func TestIdentifierForm(t *testing.T) {
	t.Parallel()
	const id = "0a1b2c3d-4e5f-6789-abcd-ef0123456789"
	if !isUUID(id) || !isUUID(strings.Repeat("0", 8)+"-0000-0000-0000-"+strings.Repeat("f", 12)) {
		t.Error("a UUID is refused")
	}
	for i := range id {
		for _, other := range []string{"", "g", "/", ":", "`", "A", "F", "-", "0", "é", "\x00", "00", "--"} {
			text := id[:i] + other + id[i+1:]
			isDigit := other == "0" && id[i] != '-' || other == "-" && id[i] == '-'
			if got := isUUID(text); got != isDigit {
				t.Errorf("isUUID(%q) = %v", text, got)
			}
		}
	}
	for _, text := range []string{"", id[:35], id + "0", "{" + id + "}", strings.ReplaceAll(id, "-", ""),
		strings.ToUpper(id), strings.Repeat("0", 36), strings.Repeat("-", 36), id[:24] + "-0-0-0-0-0-0"} {
		if isUUID(text) {
			t.Errorf("isUUID(%q)", text)
		}
	}
}

// The rotation of keys: the first signs, all verify, one that is gone does not.
func TestSessionKeys(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	older, newer := "the-older-key-of-thirty-two-bytes", "the-newer-key-of-thirty-two-bytes"
	start := func(secret string) *testServer {
		return startServer(t, map[string]string{"DATABASE_URL": database, "SESSION_SECRET": secret})
	}
	email := newEmail()
	testUser(t, database, email, "member")
	before, during, after := start(older), start(newer+","+older), start(newer)
	tokenOld, tokenNew := before.signIn(t, email).token(), during.signIn(t, email).token()

	for name, c := range map[string]struct {
		srv    *testServer
		token  string
		status int
	}{
		"old token, both keys": {during, tokenOld, 200},
		"old token, new key":   {after, tokenOld, 401},
		"new token, old key":   {before, tokenNew, 401},
		"new token, both keys": {during, tokenNew, 200},
		"new token, new key":   {after, tokenNew, 200},
	} {
		t.Run(name, func(t *testing.T) {
			client := c.srv.client(t)
			client.setToken(c.token)
			client.do("GET", "/auth/session", nil).want(t, c.status)
		})
	}
}

// T5: what happens to an account shows at the very next request of a session that
// began before it; and the way back, where there is one.
func TestSessionFollowsAccount(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	database := srv.env["DATABASE_URL"]
	operator := func(args ...string) {
		t.Helper()
		if code, out, errOut := runCLI(srv.env, append([]string{"user"}, args...)...); code != 0 {
			t.Fatalf("user %s: exit %d, %s%s", args, code, out, errOut)
		}
	}
	newHubBody := map[string]string{"name": "North"}

	t.Run("suspended", func(t *testing.T) {
		c, email := srv.member(t, "admin")
		operator("suspend", email)
		for _, r := range []*testResponse{c.do("GET", "/auth/session", nil), c.do("GET", "/hubs", nil),
			c.do("POST", "/auth/logout", nil), c.do("POST", "/hubs", newHubBody)} {
			wantProblem(t, r, 403, "account_suspended")
		}
		operator("activate", email)
		c.do("GET", "/hubs", nil).want(t, 200)
	})
	t.Run("activated after being signed out", func(t *testing.T) { // that brings no session back
		c, email := srv.member(t, "member")
		operator("suspend", email)
		operator("signout", email)
		operator("activate", email)
		wantProblem(t, c.do("GET", "/auth/session", nil), 401, rejected)
		other := srv.client(t)
		operator("activate", email) // nor does it once more
		wantProblem(t, c.do("GET", "/hubs", nil), 401, rejected)
		execSQL(t, database, "update users set signed_out_at = now() where email = $1", email)
		at := queryValue[time.Time](t, database, "select signed_out_at from users where email = $1", email)
		operator("suspend", email)
		operator("activate", email)
		if got := queryValue[time.Time](t, database, "select signed_out_at from users where email = $1", email); !got.Equal(at) {
			t.Errorf("the time of the last sign-out: got %v, want %v", got, at)
		}
		other.setToken(c.token())
		wantProblem(t, other.do("GET", "/auth/session", nil), 401, rejected)
	})
	t.Run("suspended and signed out", func(t *testing.T) { // an ended session is not told of the suspension
		c, email := srv.member(t, "member")
		operator("suspend", email)
		operator("signout", email)
		wantProblem(t, c.do("GET", "/auth/session", nil), 401, rejected)
	})
	t.Run("role", func(t *testing.T) {
		c, email := srv.member(t, "member")
		wantProblem(t, c.do("POST", "/hubs", newHubBody), 403, "forbidden")
		operator("role", email, "admin")
		c.do("POST", "/hubs", newHubBody).want(t, 201)
		if role := c.do("GET", "/auth/session", nil).field(t, "user", "permission"); role != "admin" {
			t.Errorf("permission %v", role)
		}
		operator("role", email, "member")
		wantProblem(t, c.do("POST", "/hubs", newHubBody), 403, "forbidden")
	})
	t.Run("deleted", func(t *testing.T) {
		c, email := srv.member(t, "admin")
		execSQL(t, database, "delete from users where email = $1", email)
		wantProblem(t, c.do("GET", "/hubs", nil), 401, rejected)
		testUser(t, database, email, "admin") // the same address, but another user
		wantProblem(t, c.do("GET", "/hubs", nil), 401, rejected)
	})
	t.Run("e-mail", func(t *testing.T) {
		c, email := srv.member(t, "admin")
		execSQL(t, database, "update users set email = 'x' || email where email = $1", email)
		wantProblem(t, c.do("GET", "/hubs", nil), 401, rejected)
	})
	t.Run("signed out everywhere", func(t *testing.T) {
		c, email := srv.member(t, "member")
		other := srv.client(t)
		other.signIn(email)
		operator("signout", email)
		wantProblem(t, c.do("GET", "/hubs", nil), 401, rejected)
		wantProblem(t, other.do("GET", "/hubs", nil), 401, rejected)
		srv.signIn(t, email).do("GET", "/hubs", nil).want(t, 200)
		wantProblem(t, c.do("GET", "/hubs", nil), 401, rejected)
	})
	// Exact to the microsecond, both ways: neither is an older session spared because
	// it began in the same second, nor is the next one killed.
	t.Run("signed out everywhere, exactly", func(t *testing.T) {
		c, email := srv.member(t, "member")
		for range 20 {
			_, payload := tokenParts(t, c.token())
			issued := micros(t, payload["iat"])
			for shift, status := range map[int64]int{-1: 200, 0: 200, 1: 401} {
				execSQL(t, database, "update users set signed_out_at = 'epoch'::timestamptz + $2 * interval '1 microsecond' where email = $1",
					email, issued+shift)
				if r := c.do("GET", "/auth/session", nil); r.status != status {
					t.Errorf("issued at %d, signed out %+d µs: %v", issued, shift, r)
				}
			}
			// Any other microsecond will do for the next round.
			next := fmt.Sprintf("%d.%06d", issued/1e6, (issued+47_111)%1e6)
			c.setToken(forge(hs256, fmt.Sprintf(`{"email":%q,"userId":%q,"iat":%s,"exp":%d}`, email, payload["userId"],
				next, time.Now().Unix()+1000), srv.env["SESSION_SECRET"], sha256.New))
		}
	})
	t.Run("between code and validation", func(t *testing.T) {
		for what, c := range map[string]struct {
			change string
			status int
			code   string
		}{
			"suspended": {"update users set suspended = true where email = $1", 403, "account_suspended"},
			"deleted":   {"delete from users where email = $1", 401, "invalid_code"},
			"e-mail":    {"update users set email = 'x' || email where email = $1", 401, "invalid_code"},
		} {
			email := newEmail()
			testUser(t, database, email, "member")
			userID := queryValue[string](t, database, "select user_id from users where email = $1", email)
			client := srv.client(t)
			askCode(client, email)
			code := srv.code(t, email)
			execSQL(t, database, c.change, email)
			r := presentCode(client, email, code)
			if wantProblem(t, r, c.status, c.code); r.header.Get("Set-Cookie") != "" {
				t.Errorf("%s: a cookie: %v", what, r)
			}
			// Only the code of a suspended user has proved who it is.
			named := srv.log.count(`"msg":"refused"`, `"code":"`+c.code+`"`, userID)
			if want := map[string]int{"account_suspended": 1}[c.code]; named != want {
				t.Errorf("%s: got %d log lines that name the user, want %d", what, named, want)
			}
		}
	})
}

// O6: to whom an address belongs can't be told: not when asking for a code, not when
// presenting one, not when refused for asking too often.
func TestAddressesLookAlike(t *testing.T) {
	t.Parallel()
	m := newMailServer(t, mailOptions{})
	srv := startServer(t, stagingEnv(m))
	known, suspended, unknown := newEmail(), newEmail(), newEmail()
	testUser(t, srv.env["DATABASE_URL"], known, "member")
	testUser(t, srv.env["DATABASE_URL"], suspended, "member")
	execSQL(t, srv.env["DATABASE_URL"], "update users set suspended = true where email = $1", suspended)
	c := srv.client(t)
	alike := func(what string, status int, send func(email string) *testResponse) {
		t.Helper()
		want := send(known).want(t, status)
		for _, email := range []string{suspended, unknown} {
			got := send(email)
			if a, b := withoutChance(want), withoutChance(got); a != b {
				t.Errorf("%s: known %s\n%s %s", what, a, email, b)
			}
		}
	}
	request := func(email string) *testResponse {
		return c.do("POST", "/auth/otp/request", map[string]string{"email": email}, "X-Request-Id", "one")
	}
	alike("request", 200, request)
	code := m.waitMail(t, known).code(t)
	validate := func(email string) *testResponse {
		return c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": otherCode(code, 1)}, "X-Request-Id", "one")
	}
	for range 4 {
		alike("request", 200, request)
	}
	alike("sixth request", 429, request)
	for range 10 {
		alike("validation", 401, validate)
	}
	alike("eleventh validation", 429, validate)
	srv.log.waitFor(t, "code not sent", maskedEmail(suspended))
	srv.log.waitFor(t, "code not sent", maskedEmail(unknown))
	if n := len(m.received()); n != 1 {
		t.Errorf("%d mails, 1 of them to an active user", n)
	}
}

// withoutChance is an answer without what differs between any two: the date, and by a
// second, the time to wait.
func withoutChance(r *testResponse) string {
	h := r.header.Clone()
	h.Del("Date")
	if after := h.Get("Retry-After"); regexp.MustCompile(`^(8[5-9][0-9]|900)$`).MatchString(after) {
		h.Set("Retry-After", "15 minutes")
	}
	return fmt.Sprintf("%d %v %s", r.status, h, r.body)
}

// O3, O4, O5: the guesses at one mailbox are counted before they are looked at,
// wherever they come from, and no new code gives new ones.
func TestGuessesAreCounted(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	// attempts presents codes from as many addresses, all at once, and counts the answers.
	attempts := func(t *testing.T, n int, email, code string) map[int]int {
		var mu sync.Mutex
		var all sync.WaitGroup
		counts := map[int]int{}
		for range n {
			c := srv.client(t)
			all.Go(func() {
				r := presentCode(c, email, code)
				mu.Lock()
				defer mu.Unlock()
				counts[r.status]++
			})
		}
		all.Wait()
		return counts
	}
	withCode := func(t *testing.T) (email, code string) {
		email = newEmail()
		testUser(t, srv.env["DATABASE_URL"], email, "member")
		askCode(srv.client(t), email)
		return email, srv.code(t, email)
	}
	t.Run("O3", func(t *testing.T) {
		email, code := withCode(t)
		if got := attempts(t, 100, email, code); !maps.Equal(got, map[int]int{200: 1, 401: 9, 429: 90}) {
			t.Errorf("100 right answers at once: %v", got)
		}
	})
	t.Run("O4", func(t *testing.T) {
		email, code := withCode(t)
		if got := attempts(t, 40, email, otherCode(code, 1)); !maps.Equal(got, map[int]int{401: 10, 429: 30}) {
			t.Errorf("40 wrong answers at once: %v", got)
		}
		wantProblem(t, presentCode(srv.client(t), email, code), 429, "rate_limited")
	})
	t.Run("O5", func(t *testing.T) {
		email, code := withCode(t)
		presentCode(srv.client(t), email, code).want(t, 200)
		c := srv.client(t)
		for n := range 9 {
			if n == 5 {
				askCode(c, email)
				code = srv.code(t, email)
			}
			wantProblem(t, presentCode(c, email, otherCode(code, 1)), 401, "invalid_code")
		}
		wantProblem(t, presentCode(c, email, code), 429, "rate_limited")
	})
	t.Run("requests", func(t *testing.T) {
		email, code := withCode(t)
		c := srv.client(t)
		for range 5 {
			askCode(c, email)
		}
		r := c.do("POST", "/auth/otp/request", map[string]string{"email": email})
		wantProblem(t, r, 429, "rate_limited")
		presentCode(c, email, code).want(t, 200) // to be refused a new code spoils no old one
	})
}

// Accepting the terms: the gate before, the first time kept, no other version.
func TestTerms(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	database, email := srv.env["DATABASE_URL"], newEmail()
	userID := testUser(t, database, email, "admin")
	c := srv.signIn(t, email)
	gate := func(closed bool) {
		t.Helper()
		for _, r := range []*testResponse{c.do("GET", "/hubs", nil), c.do("POST", "/hubs", map[string]string{"name": "North"})} {
			if (r.status == 403) != closed {
				t.Errorf("closed should be %v: %v", closed, r)
			} else if closed {
				wantProblem(t, r, 403, "terms_not_accepted")
			}
		}
		if got := c.do("GET", "/auth/session", nil).want(t, 200).field(t, "terms", "accepted"); got == closed {
			t.Errorf("accepted: %v", got)
		}
	}
	accept := func(version string) *testResponse {
		return c.do("POST", "/terms/acceptance", map[string]string{"version": version})
	}
	gate(true)
	for _, version := range []string{"2026-10-31", TERMS_VERSION + " ", strings.ToUpper(TERMS_VERSION) + "x", "x"} {
		wantProblem(t, accept(version), 409, "conflict")
	}
	for _, body := range []string{`{}`, `{"version":""}`, `{"version":null}`, `{"version":20261101}`,
		`{"version":"` + TERMS_VERSION + `","userId":"` + userID + `"}`} {
		wantProblem(t, c.do("POST", "/terms/acceptance", body), 400, "invalid_request")
	}
	wantProblem(t, srv.client(t).do("POST", "/terms/acceptance", map[string]string{"version": TERMS_VERSION}), 401, rejected)
	gate(true)

	// Two at once: one time, in both answers.
	var both [2]*testResponse
	var all sync.WaitGroup
	for i := range both {
		all.Go(func() { both[i] = accept(TERMS_VERSION) })
	}
	all.Wait()
	first := both[0].want(t, 200)
	time.Sleep(time.Millisecond) // a second time would be another
	for _, r := range []*testResponse{both[1], accept(TERMS_VERSION)} {
		if !bytes.Equal(r.want(t, 200).body, first.body) {
			t.Errorf("accepted twice: %s, then %s", first.body, r.body)
		}
	}
	at, err := time.Parse(time.RFC3339Nano, first.field(t, "acceptedAt").(string))
	if view := first.json(t); err != nil || time.Since(at).Abs() > time.Minute || at.Location() != time.UTC ||
		len(view) != 2 || view["version"] != TERMS_VERSION {
		t.Errorf("%s: %v", first.body, err)
	}
	gate(false)
	// The constant raised is the acceptance of another version: the gate is shut again.
	execSQL(t, database, "update terms_acceptances set version = '2025-01-01' where user_id = $1", userID)
	gate(true)
	accept(TERMS_VERSION).want(t, 200)
	gate(false)
}

// Z2: a database out of reach is a 503, never a session and never the lack of one; a
// request for a code does not even notice (O6), and once it is back all is as before.
func TestDatabaseAway(t *testing.T) {
	t.Parallel()
	for name, away := range map[string]func(*tcpProxy){"cut": (*tcpProxy).cut, "hangs": (*tcpProxy).hang} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := newDatabase(t)
			proxy, database := proxyURL(t, direct)
			srv := startServer(t, map[string]string{"DATABASE_URL": database})
			srv.allowErrors("unavailable", "code not sent")
			c, _ := srv.member(t, "admin")
			email := newEmail()
			testUser(t, direct, email, "member")
			guest := srv.client(t)
			askCode(guest, email)
			code := srv.code(t, email)

			away(proxy)
			var all sync.WaitGroup
			for _, send := range []func() *testResponse{
				func() *testResponse { return c.do("GET", "/auth/session", nil) },
				func() *testResponse { return c.do("POST", "/auth/logout", nil) },
				func() *testResponse { return c.do("GET", "/hubs", nil) },
				func() *testResponse {
					return c.do("POST", "/terms/acceptance", map[string]string{"version": TERMS_VERSION})
				},
				func() *testResponse { return c.do("GET", "/healthz", nil) },
				func() *testResponse { return presentCode(guest, email, code) },
			} {
				all.Go(func() {
					r := send()
					wantProblem(t, r, 503, "unavailable")
					if r.header.Get("Set-Cookie") != "" {
						t.Errorf("a cookie with a 503: %v", r)
					}
				})
			}
			// What needs no database is decided without it.
			wantProblem(t, srv.client(t).do("GET", "/hubs", nil), 401, rejected)
			wantProblem(t, presentCode(guest, newEmail(), code), 401, "invalid_code")
			wantProblem(t, presentCode(guest, email, otherCode(code, 1)), 401, "invalid_code")
			askCode(guest, newEmail())
			srv.log.waitFor(t, "code not sent", "ERROR")
			all.Wait()

			proxy.resume()
			waitUntil(t, "recovered", func() bool { r, _ := c.try("GET", "/auth/session", nil); return r.status == 200 })
			if guest.token() != "" {
				t.Fatal("signed in while the database was away")
			}
			// The attempt used nothing up: the code is still good, once. But it was counted, as
			// the wrong one was: eight of the ten attempts are left.
			for range 7 {
				wantProblem(t, presentCode(guest, email, otherCode(code, 1)), 401, "invalid_code")
			}
			presentCode(guest, email, code).want(t, 200)
			wantProblem(t, presentCode(guest, email, code), 429, "rate_limited")
		})
	}
}

// Z2: so is a database that is there, and takes no connections: for the operator closed it,
// renamed it, or changed the role's password.
func TestDatabaseRefusesConnections(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	name := database[strings.LastIndexByte(database, '/')+1:]
	name, _, _ = strings.Cut(name, "?")
	operator := withDatabase(database, "postgres")
	srv := startServer(t, map[string]string{"DATABASE_URL": database})
	srv.allowErrors("unavailable")
	c, _ := srv.member(t, "member")
	for closing, opening := range map[string]string{
		"alter database " + name + " allow_connections false":  "alter database " + name + " allow_connections true",
		"alter database " + name + " rename to " + name + "_x": "alter database " + name + "_x rename to " + name,
	} {
		if strings.Contains(closing, "rename") {
			endConnections(t, operator, name)
		}
		execSQL(t, operator, closing)
		endConnections(t, operator, name)
		wantProblem(t, c.do("GET", "/auth/session", nil), 503, "unavailable")
		wantProblem(t, c.do("GET", "/healthz", nil), 503, "unavailable")
		execSQL(t, operator, opening)
		c.do("GET", "/healthz", nil).want(t, 200)
		c.do("GET", "/auth/session", nil).want(t, 200)
	}
}

func endConnections(t *testing.T, operator, database string) {
	queryValue[int](t, operator, "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname like $1", database+"%")
}

// What a request costs that only asks whether there is a session: the token, and the
// whole way through the pipeline with its one query.
func BenchmarkSessionCheck(b *testing.B) {
	env := serverEnv(b)
	cfg, err := loadConfig(lookup(env))
	if err != nil {
		b.Fatal(err)
	}
	st, err := openStore(env["DATABASE_URL"])
	if err != nil {
		b.Fatal(err)
	}
	defer st.db.Close()
	srv := newServer(cfg, st, io.Discard)
	handler := srv.handler(srv.routes())
	email := newEmail()
	userID := testUser(b, env["DATABASE_URL"], email, "member")
	now := time.Now().Unix()
	token := forge(hs256, fmt.Sprintf(`{"email":%q,"userId":%q,"iat":%d.123456,"exp":%d.123456}`, email, userID, now, now+3600),
		env["SESSION_SECRET"], sha256.New)
	b.Run("token", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, ok := srv.verifyToken(token); !ok {
				b.Fatal(err)
			}
		}
	})
	b.Run("request", func(b *testing.B) {
		b.ReportAllocs()
		for n := 0; b.Loop(); n++ {
			r := httptest.NewRequest("GET", "/auth/session", nil)
			r.RemoteAddr = one(n&0xffff) + ":4711"
			r.AddCookie(&http.Cookie{Name: cfg.cookieName, Value: token})
			w := httptest.NewRecorder()
			if handler.ServeHTTP(w, r); w.Code != 200 {
				b.Fatal(w.Body)
			}
		}
	})
}

// Only the current version of the terms counts: an earlier one does not, nor does a later one,
// which a release brought that was taken back.
func TestOnlyTheCurrentTermsCount(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	database, email := srv.env["DATABASE_URL"], newEmail()
	userID := testUser(t, database, email, roleMember)
	c := srv.signIn(t, email)
	for _, version := range []string{"", "2026-10-31", TERMS_VERSION + " ", TERMS_VERSION + "b", "2026-11-02", "x"} {
		execSQL(t, database, "insert into terms_acceptances (user_id, version) values ($1, $2)", userID, version)
		wantProblem(t, c.do("GET", "/hubs", nil), 403, "terms_not_accepted")
		if got := c.do("GET", "/auth/session", nil).want(t, 200).field(t, "terms", "accepted"); got != false {
			t.Errorf("version %q accepted: got %v, want false", version, got)
		}
	}
	c.acceptTerms()
	c.do("GET", "/hubs", nil).want(t, 200)
}

// T5: a session is dated by the database's clock, as "sign out everywhere" is. So the two are
// in their order, although the clocks of the server and of the database differ by seconds.
func TestSessionsAreDatedByTheDatabase(t *testing.T) {
	t.Parallel()
	for _, shift := range []string{"-30 seconds", "30 seconds"} {
		t.Run(shift, func(t *testing.T) {
			t.Parallel()
			direct := newDatabase(t)
			execSQL(t, direct, "create schema shifted")
			execSQL(t, direct, `create function shifted.clock_timestamp() returns timestamptz language sql
				return pg_catalog.clock_timestamp() + interval '`+shift+`'`)
			u, err := url.Parse(direct)
			if err != nil {
				t.Fatal(err)
			}
			query := u.Query()
			query.Set("search_path", "shifted, pg_catalog, public") // of two functions, the first
			u.RawQuery = query.Encode()
			srv := startServer(t, map[string]string{"DATABASE_URL": u.String()})
			email := newEmail()
			testUser(t, direct, email, roleMember)
			before := srv.signIn(t, email)
			before.do("GET", "/auth/session", nil).want(t, 200)
			if code, _, errOut := runCLI(srv.env, "user", "signout", email); code != 0 {
				t.Fatal(errOut)
			}
			signedOut := queryValue[time.Time](t, direct, "select signed_out_at from users where email = $1", email)
			if off := time.Since(signedOut).Abs(); off < 15*time.Second {
				t.Fatalf("signed out at %v: the clock is not shifted", signedOut)
			}
			wantProblem(t, before.do("GET", "/auth/session", nil), 401, rejected)
			srv.signIn(t, email).do("GET", "/auth/session", nil).want(t, 200)
		})
	}
}
