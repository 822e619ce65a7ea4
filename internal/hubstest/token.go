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
type Token struct {
	Header      string  // its JSON; "" is that of a good token
	Payload     *string // its JSON; nil is that of a good token
	Algorithm   string  // of the signature: HS256 if "", and none for an empty signature
	SentPayload string  // is sent in the place of the payload that was signed
	Sent        *string // what is sent; nil is <header>.<payload>.<signature>
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

// Sign returns the token. words are as in FillIn; <now+60> is a minute from now. For what may
// stand at the end of the texts, see alter.
func (tok Token) Sign(key string, words ...string) string {
	header := encodePart(cmp.Or(tok.Header, goodHeader), words)
	claims := goodPayload
	if tok.Payload != nil {
		claims = *tok.Payload
	}
	payload := encodePart(claims, words)
	signature := ""
	if tok.Algorithm != "none" {
		mac := hmac.New(tokenHashes[tok.Algorithm], []byte(key))
		mac.Write([]byte(header + "." + payload))
		signature = base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
	}
	if tok.SentPayload != "" {
		payload = encodePart(tok.SentPayload, words)
	}
	sent := "<header>.<payload>.<signature>"
	if tok.Sent != nil {
		sent = *tok.Sent
	}
	words = append(words, "<header>", header, "<payload>", payload, "<signature>", signature)
	end := alteration.FindString(sent)
	return alter(FillIn(strings.TrimSuffix(sent, end), words...), end)
}

func encodePart(text string, words []string) string {
	now := time.Now().Unix()
	end := alteration.FindString(text)
	text = FillIn(strings.TrimSuffix(text, end), words...)
	text = tokenNow.ReplaceAllStringFunc(text, func(word string) string {
		offset, _ := strconv.ParseInt(tokenNow.FindStringSubmatch(word)[1], 10, 64)
		return fmt.Sprint(now + offset) // without a number, the offset is 0
	})
	for end != "" && len(text)%3 == 0 {
		text += " " // until the last digit has bits that decode to nothing
	}
	return alter(base64.RawURLEncoding.EncodeToString([]byte(text)), end)
}

var alteration = regexp.MustCompile(`<[+-]\d>$`)

// alter takes characters off the end (<-4>: four), or adds to the value of the last digit of base64,
// in the bits that decode to nothing (<+1>: one).
func alter(encoded, end string) string {
	n, _ := strconv.Atoi(strings.Trim(end, "<>")) // without an end, n is 0
	if n <= 0 {
		return encoded[:len(encoded)+n]
	}
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := len(encoded) - 1
	digit := strings.IndexByte(digits, encoded[last]) + n
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
