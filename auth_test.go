package main

import (
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
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
		if got := token.fault(u); got != test.want {
			t.Errorf("%+v: got the fault %q, want %q", test, got, test.want)
		}
	}
}
