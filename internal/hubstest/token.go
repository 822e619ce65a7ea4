package hubstest

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A Token is a session token to be made by hand, so that it can be as wrong as a test wants:
// the library that the server verifies with has no part in it. The zero value is a good token.
// testdata/tokens.json says what the fields mean.
type Token struct {
	Header      string
	Payload     *string
	Algorithm   string
	SentPayload string
	PaddingBits string
	Bits        int
	Sent        *string
	Cut         int
}

const (
	goodHeader  = `{"alg":"HS256","typ":"JWT"}`
	goodPayload = `{"email":"<email>","userId":"<userId>","iat":<now>,"exp":<now+3600>}`
)

var tokenHashes = map[string]func() hash.Hash{
	"":      sha256.New,
	"HS256": sha256.New,
	"HS384": sha512.New384,
	"HS512": sha512.New,
}

var tokenNow = regexp.MustCompile(`<now([+-][0-9]+)?>`)

// Forge returns a token with this payload and a good signature by the key.
func Forge(key, payload string) string {
	return Token{Payload: &payload}.Sign(key)
}

// Sign returns the token. words are as in FillIn; <now+60> is a minute from now.
func (tok Token) Sign(key string, words ...string) string {
	header := tok.encode("header", cmp.Or(tok.Header, goodHeader), words)
	claims := goodPayload
	if tok.Payload != nil {
		claims = *tok.Payload
	}
	payload := tok.encode("payload", claims, words)
	signature := ""
	if tok.Algorithm != "none" {
		mac := hmac.New(tokenHashes[tok.Algorithm], []byte(key))
		mac.Write([]byte(header + "." + payload))
		signature = base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
	}
	if tok.PaddingBits == "signature" {
		signature = tok.alterPadding(signature)
	}
	if tok.SentPayload != "" {
		payload = tok.encode("", tok.SentPayload, words)
	}
	sent := "<header>.<payload>.<signature>"
	if tok.Sent != nil {
		sent = *tok.Sent
	}
	words = append(words, "<header>", header, "<payload>", payload, "<signature>", signature)
	sent = FillIn(sent, words...)
	return sent[:len(sent)-tok.Cut]
}

func (tok Token) encode(part, text string, words []string) string {
	now := time.Now().Unix()
	text = tokenNow.ReplaceAllStringFunc(FillIn(text, words...), func(word string) string {
		offset, _ := strconv.ParseInt(tokenNow.FindStringSubmatch(word)[1], 10, 64)
		return fmt.Sprint(now + offset) // without a number, the offset is 0
	})
	if part == "" || part != tok.PaddingBits {
		return base64.RawURLEncoding.EncodeToString([]byte(text))
	}
	for len(text)%3 == 0 {
		text += " "
	}
	return tok.alterPadding(base64.RawURLEncoding.EncodeToString([]byte(text)))
}

// alterPadding adds to the last digit, whose lowest bits decode to nothing.
func (tok Token) alterPadding(encoded string) string {
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := len(encoded) - 1
	digit := strings.IndexByte(digits, encoded[last]) + cmp.Or(tok.Bits, 1)
	return encoded[:last] + digits[digit:digit+1]
}

// ReadToken decodes a token without a look at its signature.
func ReadToken(t testing.TB, token string) (header, claims map[string]any) {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("a token of %d parts, want 3", len(parts))
	}
	for i, target := range []*map[string]any{&header, &claims} {
		text, err := base64.RawURLEncoding.DecodeString(parts[i])
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, target); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
	}
	return header, claims
}
