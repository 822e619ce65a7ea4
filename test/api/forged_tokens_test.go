package api

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"hash"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// A token describes a session token that a test forges. sign makes it without the library that the
// server verifies tokens with, so each part can be wrong. The zero value describes a valid token.
type token struct {
	Header      string  // JSON; "" means the header of a valid token
	Payload     *string // JSON; nil means the payload of a valid token
	Algorithm   string  // of the signature; "" means HS256, and "none" an empty signature
	UnusedBits  int     // of the signature; see toBase64
	SentPayload string  // if not "", sent in place of the payload that was signed
	Sent        *string // the whole token; nil means <header>.<payload>.<signature>
	Cut         int     // characters that are missing at the end of the whole token
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

// sign returns the token, with a signature made with the key. It fills words into each text, as
// fillIn does, and replaces <now+60> by the time a minute from now, in seconds since 1970.
func (tok token) sign(key string, words ...string) string {
	claims := goodPayload
	if tok.Payload != nil {
		claims = *tok.Payload
	}
	header := toBase64(fill(cmp.Or(tok.Header, goodHeader), words), 0)
	payload := toBase64(fill(claims, words), 0)
	signature := ""
	if tok.Algorithm != "none" {
		mac := hmac.New(tokenHashes[tok.Algorithm], []byte(key))
		mac.Write([]byte(header + "." + payload))
		signature = toBase64(mac.Sum(nil), tok.UnusedBits)
	}
	if tok.SentPayload != "" {
		payload = toBase64(fill(tok.SentPayload, words), 0)
	}
	sent := "<header>.<payload>.<signature>"
	if tok.Sent != nil {
		sent = *tok.Sent
	}
	words = append(words, "<header>", header, "<payload>", payload, "<signature>", signature)
	sent = fillIn(sent, words...)
	return sent[:len(sent)-tok.Cut]
}

// fill returns a header or payload. It fills in words and times.
func fill(text string, words []string) []byte {
	now := time.Now().Unix()
	text = fillIn(text, words...)
	text = tokenNow.ReplaceAllStringFunc(text, func(word string) string {
		offset, _ := strconv.ParseInt(tokenNow.FindStringSubmatch(word)[1], 10, 64)
		return fmt.Sprint(now + offset) // <now> has the offset 0
	})
	return []byte(text)
}

// toBase64 returns the base64 of a part of a token. It adds bits to the value of the last digit. In
// a signature, a lenient decoder ignores the last two bits of that digit.
func toBase64(part []byte, bits int) string {
	encoded := base64.RawURLEncoding.EncodeToString(part)
	if bits == 0 {
		return encoded
	}
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := len(encoded) - 1
	digit := strings.IndexByte(digits, encoded[last]) + bits
	return encoded[:last] + digits[digit:digit+1]
}
