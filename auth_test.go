package main

import (
	"errors"
	"io"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"hubs/internal/hubstest"
)

const testKey = "test-secret-of-more-than-thirty-two-bytes"

// serverWithoutDatabase returns a server without a database: its store has no slots, so each
// statement fails after dbTimeout.
func serverWithoutDatabase(out io.Writer) *server {
	s := newServer(config{env: envLocal}, &store{}, out)
	s.cfg.sessionKeys.Keys = append(s.cfg.sessionKeys.Keys, []byte(testKey))
	return s
}

// T2: The limits of a token's times are exact to the microsecond. The cases are the last time at
// which a token is accepted and the first at which it is not.
func TestTokenTimesAreExact(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name            string
		issued, expires time.Duration // from now
		want            string        // reason of the refusal; "" if the token is valid
	}{
		{name: "last microsecond", expires: time.Microsecond},
		{name: "end", issued: -time.Hour, expires: 0, want: "expired"},
		{
			name:    "past the end",
			issued:  -time.Hour,
			expires: -time.Microsecond,
			want:    "expired",
		},
		{name: "a minute ahead", issued: time.Minute, expires: time.Hour},
		{
			name:    "more than a minute ahead",
			issued:  time.Minute + time.Microsecond,
			expires: time.Hour,
			want:    "clock",
		},
		{name: "longest life", expires: sessionTTL},
		{name: "longer life", expires: sessionTTL + time.Microsecond, want: "clock"},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := serverWithoutDatabase(io.Discard)
			_, err := s.verifyToken(s.signToken(sessionToken{
				UserID:    hubstest.NewUUID(),
				IssuedAt:  toSeconds(time.Now().Add(test.issued)),
				ExpiresAt: toSeconds(time.Now().Add(test.expires)),
			}))

			refusal, _ := errors.AsType[problem](err)
			isValid := err == nil
			if refusal.reason != test.want || isValid != (test.want == "") {
				t.Errorf("%s: got the error %v, reason %q, want the reason %q",
					test.name, err, refusal.reason, test.want)
			}
		})
	}
}

// T5: A token that was signed and verified has the same fields. Its times are the same to the
// microsecond.
func TestTokenKeepsItsTimes(t *testing.T) {
	t.Parallel()
	s := serverWithoutDatabase(io.Discard)
	now := time.Now().Truncate(time.Microsecond).UTC()
	for i := range 1000 {
		// 7,919 is a prime number, so each token has another fraction of a second.
		issued := now.Add(-time.Duration(i) * 7_919 * time.Microsecond)
		expires := issued.Add(sessionTTL)
		signed := sessionToken{
			Email:     "ada@example.com",
			UserID:    hubstest.NewUUID(),
			IssuedAt:  toSeconds(issued),
			ExpiresAt: toSeconds(expires),
		}
		got, err := s.verifyToken(s.signToken(signed))
		if err != nil || !reflect.DeepEqual(got, signed) {
			t.Fatalf("got the token %v and the error %v, want %v", got, err, signed)
		}
		if !got.IssuedAt.time().Equal(issued) || !got.ExpiresAt.time().Equal(expires) {
			t.Fatalf("got the token %v, want its times to be %v and %v", got, issued, expires)
		}
	}
}

// isUUID accepts a UUID in the one form in which PostgreSQL writes it. It rejects the UUID with one
// character replaced, removed or added at any place.
func TestOnlyUUIDsAreIdentifiers(t *testing.T) {
	t.Parallel()
	const id = "0a1b2c3d-4e5f-6789-abcd-ef0123456789"
	if !isUUID(id) {
		t.Errorf("isUUID(%q): got false, want true", id)
	}
	wrong := []string{
		id + "0",
		id + "\n",
		"0a1b2c3-d4e5f-6789-abcd-ef0123456789",
		"0a1b2c3d04e5f-6789-abcd-ef0123456789",
	}
	for i := range id {
		for _, other := range []string{"", "g", "/", ":", "`", "A", "é", "\x00", "00"} {
			wrong = append(wrong, id[:i]+other+id[i+1:])
		}
	}
	for _, text := range wrong {
		if isUUID(text) {
			t.Errorf("isUUID(%q): got true, want false", text)
		}
	}
}
