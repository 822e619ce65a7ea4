package main

import (
	"errors"
	"fmt"
	"io"
	"net/mail"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"hubs/internal/hubstest"
)

const testKey = "test-secret-of-more-than-thirty-two-bytes"

// serverWithoutDatabase returns a server on which each statement fails after dbTimeout.
func serverWithoutDatabase(out io.Writer) *server {
	s := newServer(config{env: envLocal}, &store{}, out)
	s.cfg.sessionKeys.Keys = append(s.cfg.sessionKeys.Keys, []byte(testKey))
	return s
}

// T2: a token's times hold to the microsecond: the last moment at which it is good, and the
// first at which it is not.
func TestTokenTimesAreExact(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		issued, expires time.Duration // from now
		want            string
	}{
		{expires: time.Microsecond},
		{issued: -time.Hour, expires: 0, want: "expired"},
		{issued: -time.Hour, expires: -time.Microsecond, want: "expired"},
		{issued: time.Minute, expires: time.Hour},
		{issued: time.Minute + time.Microsecond, expires: time.Hour, want: "clock"},
		{expires: sessionTTL},
		{expires: sessionTTL + time.Microsecond, want: "clock"},
	} {
		synctest.Test(t, func(t *testing.T) {
			at := func(d time.Duration) string {
				return fmt.Sprintf("%.6f", float64(time.Now().Add(d).UnixMicro())/1e6)
			}
			token := hubstest.Forge(testKey, hubstest.FillIn(
				`{"userId":"<id>","iat":<iat>,"exp":<exp>}`,
				"<id>", hubstest.NewUUID(),
				"<iat>", at(test.issued),
				"<exp>", at(test.expires)))
			_, err := serverWithoutDatabase(io.Discard).verifyToken(token)
			refusal, _ := errors.AsType[problem](err)
			if refusal.reason != test.want {
				t.Errorf("%+v: got %q, want %q", test, refusal.reason, test.want)
			}
		})
	}
}

// T5: a token says the very times that were signed, to the microsecond.
func TestTokenKeepsItsTimes(t *testing.T) {
	t.Parallel()
	s := serverWithoutDatabase(io.Discard)
	now := time.Now().Truncate(time.Microsecond).UTC()
	for i := range 1000 {
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
			t.Fatalf("got %v, %v, want %v", got, err, signed)
		}
		if !got.IssuedAt.time().Equal(issued) || !got.ExpiresAt.time().Equal(expires) {
			t.Fatalf("got the times of %v, want %v to %v", got, issued, expires)
		}
	}
}

// An identifier is a UUID as PostgreSQL prints it, and nothing else.
func TestIdentifierForm(t *testing.T) {
	t.Parallel()
	form := regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	const id = "0a1b2c3d-4e5f-6789-abcd-ef0123456789"
	texts := []string{
		id,
		id + "0",
		strings.ToUpper(id),
	}
	for i := range id {
		for _, other := range []string{"", "0", "-", "g", "/", ":", "`", "A", "é", "\x00", "00"} {
			texts = append(texts, id[:i]+other+id[i+1:])
		}
	}
	for _, text := range texts {
		if got, want := isUUID(text), form.MatchString(text); got != want {
			t.Errorf("isUUID(%q): got %v, want %v", text, got, want)
		}
	}
}

// I4: whatever is taken as an address is one recipient to a mail library too.
func FuzzEmail(f *testing.F) {
	file := hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		Email, Stored string
	}](f, "emails.json")
	for _, c := range file.Cases {
		f.Add(hubstest.FillIn(c.Email))
	}
	f.Fuzz(func(t *testing.T, text string) {
		if emailRule.validate(text) != "" {
			return
		}
		parsed, err := mail.ParseAddress(text)
		if err != nil || parsed.Address != text || parsed.Name != "" {
			t.Errorf("%q is taken, and is %+v, %v to net/mail", text, parsed, err)
		}
	})
}
