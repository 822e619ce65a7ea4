package hubstest

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"regexp"
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

// word matches a word that FillIn replaces, such as <email>.
var word = regexp.MustCompile(`<[A-Za-z+-][\w.+ -]*>`)

// FillIn replaces words in a text by values that are known only when the test runs. words are pairs
// of a word and its value, such as "<email>", "ada@example.com". FillIn panics if the text has
// another word: a case with a misspelled word could pass for another reason.
func FillIn(text string, words ...string) string {
	text = strings.NewReplacer(words...).Replace(text)
	for _, word := range word.FindAllString(text, -1) {
		if !strings.HasPrefix(word, "<now") { // test/api replaces <now> in tokens
			panic("no value for " + word + " in " + text)
		}
	}
	return text
}
