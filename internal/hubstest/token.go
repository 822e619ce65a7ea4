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

// A Token describes a session token that a test forges. Sign makes it without the library that the
// server verifies tokens with, so each part can be wrong. The zero value describes a valid token.
type Token struct {
	Header      string  // JSON; "" means the header of a valid token
	Payload     *string // JSON; nil means the payload of a valid token
	Algorithm   string  // of the signature; "" means HS256, and "none" an empty signature
	SentPayload string  // if not "", sent in place of the payload that was signed
	Sent        *string // the whole token; nil means <header>.<payload>.<signature>
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

// Forge returns a token with this payload and a valid signature made with the key.
func Forge(key, payload string) string {
	return Token{Payload: &payload}.Sign(key)
}

// Sign returns the token, with a signature made with the key. It fills words into each text, as
// FillIn does, and replaces <now+60> by the time a minute from now, in seconds since 1970. A text
// may end with an alteration, such as <-4>: see alter.
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

// encodePart returns the base64 of a header or payload, after replacing ' by " and filling in words
// and times. An alteration at the end of the text is applied to the base64.
func encodePart(text string, words []string) string {
	now := time.Now().Unix()
	end := alteration.FindString(text)
	text = strings.ReplaceAll(strings.TrimSuffix(text, end), "'", `"`)
	text = tokenNow.ReplaceAllStringFunc(FillIn(text, words...), func(word string) string {
		offset, _ := strconv.ParseInt(tokenNow.FindStringSubmatch(word)[1], 10, 64)
		return fmt.Sprint(now + offset) // <now> has the offset 0
	})
	for end != "" && len(text)%3 == 0 {
		text += " " // so that the last digit of the base64 has unused bits
	}
	return alter(base64.RawURLEncoding.EncodeToString([]byte(text)), end)
}

var alteration = regexp.MustCompile(`<[+-]\d>$`)

// alter applies an alteration to base64. <-4> removes four characters from the end. <+1> adds 1 to
// the value of the last digit, in the unused bits: those that a lenient decoder ignores. An empty
// end changes nothing.
func alter(encoded, end string) string {
	n, _ := strconv.Atoi(strings.Trim(end, "<>")) // 0 if end is ""
	if n <= 0 {
		return encoded[:len(encoded)+n]
	}
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := len(encoded) - 1
	digit := strings.IndexByte(digits, encoded[last]) + n
	return encoded[:last] + digits[digit:digit+1]
}

// ReadToken decodes a token. It does not verify the signature.
func ReadToken(t testing.TB, token string) (header, claims map[string]any) {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("got a token of %d parts, want 3", len(parts))
	}
	for i, target := range []*map[string]any{&header, &claims} {
		text, err := base64.RawURLEncoding.DecodeString(parts[i])
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, target); err != nil {
			t.Fatalf("a part of the token is %q, want a JSON object: %v", text, err)
		}
	}
	return header, claims
}
