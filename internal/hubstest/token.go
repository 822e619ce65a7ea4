package hubstest

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

// NewToken returns a session token of a user, signed with the key. It makes the token without the
// library that the server verifies tokens with.
func NewToken(key, email, userID string, issued, expires time.Time) string {
	payload := fmt.Sprintf(`{"email":%q,"userId":%q,"iat":%d,"exp":%d}`,
		email, userID, issued.Unix(), expires.Unix())
	encode := base64.RawURLEncoding.EncodeToString
	signed := encode([]byte(`{"alg":"HS256","typ":"JWT"}`)) + "." + encode([]byte(payload))
	mac := hmac.New(sha256.New, []byte(key))
	mac.Write([]byte(signed))
	return signed + "." + encode(mac.Sum(nil))
}

// ReadToken decodes a token. It does not verify the signature.
func ReadToken(t testing.TB, token string) (header, claims map[string]any) {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("setup: got a token of %d parts, want 3", len(parts))
	}
	for i, target := range []*map[string]any{&header, &claims} {
		text, err := base64.RawURLEncoding.DecodeString(parts[i])
		Must(t, err)
		if err := json.Unmarshal(text, target); err != nil {
			t.Fatalf("setup: a part of the token is %q, want a JSON object: %v", text, err)
		}
	}
	return header, claims
}
