package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"hubs/internal/hubstest"
)

// T2, T5, T9: A token opens sessions from a minute before its iat, so that the database's clock may
// be set right, until the last nanosecond before its exp, and if it was issued in a later second
// than the last sign-out everywhere. All are times of the database's clock.
func TestTimesOfATokenAreExact(t *testing.T) {
	t.Parallel()
	const second, before = time.Second, -time.Nanosecond
	issued := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	var token sessionToken
	token.Email = "a@b.example"
	token.IssuedAt = jwt.NewNumericDate(issued)
	token.ExpiresAt = jwt.NewNumericDate(issued.Add(sessionTTL))
	for _, test := range []struct {
		email          string
		now, signedOut time.Duration // after iat
		want           string
	}{
		{now: 0, signedOut: -second},
		{now: -clockStep, signedOut: -2 * clockStep},
		{now: -clockStep + before, signedOut: -2 * clockStep, want: "future"},
		{now: sessionTTL + before, signedOut: -second},
		{now: sessionTTL, signedOut: -second, want: "expired"},
		{now: second, signedOut: before},
		{now: second, signedOut: 0, want: "ended"},
		{now: second, signedOut: second, want: "ended"},
		{now: second, signedOut: second - before, want: "future"},
		{email: "A@b.example", now: second, signedOut: -second, want: "ended"},
	} {
		u := &user{Email: "a@b.example", now: issued.Add(test.now), signedOutAt: issued.Add(test.signedOut)}
		if test.email != "" {
			u.Email = test.email
		}
		if got := token.whyRefused(u); got != test.want {
			t.Errorf("%+v: got the fault %q, want %q", test, got, test.want)
		}
	}
}

// newTokenServer returns a server that signs and verifies tokens.
func newTokenServer() *server {
	s := newServer(config{env: envLocal, cookieName: "hubs_auth_local"}, nil, nil)
	s.cfg.sessionKeys.Keys = []jwt.VerificationKey{[]byte("test-secret-of-more-than-thirty-two-bytes")}
	return s
}

// newToken returns the token of a sign-in at a time.
func newToken(issuedAt time.Time) sessionToken {
	token := sessionToken{Email: "a@b.example", UserID: hubstest.NewUUID()}
	token.IssuedAt = jwt.NewNumericDate(issuedAt)
	token.ExpiresAt = jwt.NewNumericDate(issuedAt.Add(sessionTTL))
	return token
}

// T1, T2, T4: A token is accepted only if its last part is the HMAC-SHA-256 of the others by our key,
// in strict base64, its header says HS256 and has no crit, and it has both times and a UUID. The
// fuzzed header and payload are signed with the right key, too: only the holder of the key could.
func FuzzToken(f *testing.F) {
	s := newTokenServer()
	parts := strings.Split(s.signToken(newToken(time.Now())), ".")
	for _, header := range []string{`{"alg":"HS256"}`, `{"alg":"none"}`, `{"alg":"HS256","crit":["exp"]}`} {
		payload, _ := base64.RawURLEncoding.DecodeString(parts[1])
		f.Add(header, string(payload), "")
	}
	f.Add(`{"alg":"HS256","typ":"JWT"}`, `{"userId":"x","iat":1,"exp":2}`, "=")
	f.Fuzz(func(t *testing.T, header, payload, behind string) {
		encode := base64.RawURLEncoding.EncodeToString
		signed := encode([]byte(header)) + "." + encode([]byte(payload))
		mac := hmac.New(sha256.New, s.cfg.sessionKeys.Keys[0].([]byte))
		mac.Write([]byte(signed))
		text := signed + "." + encode(mac.Sum(nil)) + behind
		token, err := s.verifyToken(text)
		if err != nil {
			return
		}
		var head struct {
			Alg  string
			Crit any
		}
		var claims map[string]any
		if json.Unmarshal([]byte(header), &head) != nil || json.Unmarshal([]byte(payload), &claims) != nil {
			t.Errorf("got %q accepted, which is no JSON", text)
		}
		if head.Alg != "HS256" || head.Crit != nil || behind != "" || len(text) > maxToken {
			t.Errorf("got header %q and %q behind the token accepted", header, behind)
		}
		if token.IssuedAt == nil || token.ExpiresAt == nil || !isUUID(token.UserID) {
			t.Errorf("got the payload %q accepted", payload)
		}
	})
}

// T6, T7: Whatever cookies stand beside the session's, the newest good token counts.
func FuzzCookies(f *testing.F) {
	s := newTokenServer()
	f.Add("theme=dark; a=b", "lang=de", uint8(3))
	f.Add(`hubs_auth_local=x; "; hubs_auth_local`, "hubs_auth_local=;;=,", uint8(0))
	now := time.Now()
	f.Fuzz(func(t *testing.T, before, behind string, old uint8) {
		newest := newToken(now)
		older := newToken(now.Add(-time.Duration(1+int(old)) * time.Second))
		ours := s.cfg.cookieName + "="
		if strings.Count(before+behind, ours) > maxCookies-2 { // one too many hides ours
			return
		}
		for _, pair := range [][2]sessionToken{{newest, older}, {older, newest}} {
			header := before + "; " + ours + s.signToken(pair[0]) + "; " + ours + s.signToken(pair[1]) +
				"; " + behind
			wantToken(t, s, header, newest)
		}
	})
}

// T9: A token of a clock that was ahead hides no sign-in, however long the process has run.
func TestTokenOfTheFutureOnEachDay(t *testing.T) {
	t.Parallel()
	s := newTokenServer()
	synctest.Test(t, func(t *testing.T) {
		for range 3 {
			good, ahead := newToken(time.Now()), newToken(time.Now().Add(2*time.Hour))
			name := s.cfg.cookieName
			wantToken(t, s, name+"="+s.signToken(ahead)+"; "+name+"="+s.signToken(good), good)
			time.Sleep(24 * time.Hour)
		}
	})
}

// wantToken checks which token counts of a Cookie header.
func wantToken(t *testing.T, s *server, header string, want sessionToken) {
	t.Helper()
	token, err := s.readToken(&request{Request: &http.Request{Header: http.Header{"Cookie": {header}}}})
	if err != nil || token.UserID != want.UserID {
		t.Errorf("Cookie: %q: got the token of %q, error %v, want the other", header, token.UserID, err)
	}
}
