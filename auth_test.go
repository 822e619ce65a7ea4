package main

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"hubs/internal/hubstest"
)

// T2: A token is good until the last nanosecond before its exp. Then the reason of the refusal, for
// the log, is that it has expired.
func TestTokenExpiryIsExact(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // the clock begins at a whole second
		s := newServer(config{env: envLocal}, nil, nil)
		key := []byte("test-secret-of-more-than-thirty-two-bytes")
		s.cfg.sessionKeys.Keys = append(s.cfg.sessionKeys.Keys, key)
		token := sessionToken{UserID: hubstest.NewUUID()}
		token.IssuedAt = jwt.NewNumericDate(time.Now())
		token.ExpiresAt = jwt.NewNumericDate(time.Now().Add(sessionTTL))
		signed := s.signToken(token)

		time.Sleep(sessionTTL - 1)
		if _, err := s.verifyToken(signed); err != nil {
			t.Errorf("a nanosecond before its exp: got the error %v, want none", err)
		}
		time.Sleep(time.Nanosecond)
		_, err := s.verifyToken(signed)
		if refusal, _ := errors.AsType[problem](err); refusal.reason != "expired" {
			t.Errorf("at its exp: got the error %v, reason %q, want expired", err, refusal.reason)
		}
	})
}
