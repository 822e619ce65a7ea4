package api

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A tokenCase is a token that a client sends as its cookie. It has only what differs from a good
// token, which has the payload {<user>,<times>}.
type tokenCase struct {
	Name, Rule string
	User       string // "" means active; see the test
	Key        string // a name of tokenKeys; "" means first
	Token      token
	Want       answer
	// Reason is the word that the server's log has for a 401; "" means forged. If it is any, the
	// word depends on the processor.
	Reason string
}

// tokenKeys are keys by name. The server signs with the first, and takes the first two.
var tokenKeys = map[string]string{
	"first":    "corpus-key-one-of-forty-bytes-and-more-1",
	"second":   "corpus-key-two-of-forty-bytes-and-more-2",
	"stranger": "corpus-key-that-this-server-never-had-03",
	"short":    "corpus-key-one-of-forty-bytes-and-more-",
	"empty":    "",
}

// T1, T2, T4, T5: A token that this server would not have issued, or that has expired or ended,
// is a 401, and the log has the reason.
func TestOnlyValidTokensOpenSessions(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, map[string]string{
		"SESSION_SECRET": tokenKeys["first"] + "," + tokenKeys["second"],
	})
	users := map[string]account{}
	for _, name := range []string{"active", "other", "suspended", "signedOut"} {
		email, id := s.NewUser(t, "member")
		users[name] = account{email, id}
	}
	s.User(t, "suspend", users["suspended"].email)
	hubstest.Exec(t, s.Database, `update users
		set signed_out_at = now() - interval '100 s' where user_id = $1`, users["signedOut"].id)

	runCases(t, tokenCases, func(t *testing.T, c tokenCase) {
		key := named(t, tokenKeys, cmp.Or(c.Key, "first"))
		user := named(t, users, cmp.Or(c.User, "active"))
		token := c.Token.sign(key, tokenWords(user, users["other"])...)
		r := onTheWire(t, s, "GET /auth/session", nil,
			"X-Forwarded-For", hubstest.NewIP(),
			"Cookie", s.CookieName()+"="+token)

		wantAnswer(t, r, c.Want)
		if r.Status == 401 && c.Reason != "any" {
			waitLogged(t, s, r, `"reason":"`+cmp.Or(c.Reason, "forged")+`"`)
		}
		if r.Status == 200 {
			r.WantField(t, "user.userId", user.id)
		}
	})
	waitLogged(t, s, s.Client(t).Get("/auth/session"), `"reason":"missing"`)

	// The first key signs: a server that has only this one takes the token of a sign-in.
	signed := s.SignIn(t, users["active"].email).Token()
	onlyFirst := hubstest.Start(t, s.Env, map[string]string{"SESSION_SECRET": tokenKeys["first"]})
	onlyFirst.With(t, signed).Get("/auth/session").Want(t, 200)
}

// An account is a user of these cases.
type account struct{ email, id string }

// tokenWords returns the words of the cases with their values. token.sign replaces <now> and the
// like.
func tokenWords(user, other account) []string {
	return []string{
		"<user>", fmt.Sprintf(`"email":%q,"userId":%q`, user.email, user.id),
		"<times>", `"iat":<now>,"exp":<now+3600>`,
		"<email>", user.email,
		"<userId>", user.id,
		"<EMAIL>", strings.ToUpper(user.email),
		"<USERID>", strings.ToUpper(user.id),
		"<other.email>", other.email,
		"<other.userId>", other.id,
	}
}

var tokenCases = []group[tokenCase]{
	// Good tokens.
	{Each: tokenCase{Rule: "T1", Want: ok}, Cases: []tokenCase{
		{Name: "good", Want: answer{Body: values{"user.permission": "member"}}},
		{Name: "good, with the old key that stands second", Key: "second"},
		{Name: "good, header without typ", Token: token{Header: `{"alg":"HS256"}`}},
		{Name: "good, times with fractions",
			Token: token{Payload: new(`{<user>,"iat":<now-1>.654321,"exp":<now+3600>.123456}`)}},
		{Name: "good, a role in the token changes nothing", Rule: "Z3",
			Token: token{Payload: new(`{<user>,"permission":"admin","role":"admin",<times>}`)},
			Want:  answer{Body: values{"user.permission": "member"}}},
	}},
	// The algorithm: the header must name HS256, and the signature must use it.
	{Each: tokenCase{Rule: "T1", Want: fails(401, "unauthenticated")}, Cases: []tokenCase{
		{Name: "none without a signature",
			Token: token{Header: `{"alg":"none","typ":"JWT"}`, Algorithm: "none"}},
		{Name: "none with a good signature", Token: token{Header: `{"alg":"none"}`}},
		{Name: "none in capitals", Token: token{Header: `{"alg":"NONE"}`, Algorithm: "none"}},
		{Name: "none with a capital",
			Token: token{Header: `{"alg":"None","typ":"JWT"}`, Algorithm: "none"}},
		{Name: "none in mixed case", Token: token{Header: `{"alg":"nOnE"}`, Algorithm: "none"}},
		{Name: "HS256 said, no signature", Token: token{Algorithm: "none"}},
		{Name: "HS384 by the right key", Token: token{Header: `{"alg":"HS384"}`, Algorithm: "HS384"}},
		{Name: "HS512 by the right key", Token: token{Header: `{"alg":"HS512"}`, Algorithm: "HS512"}},
		{Name: "HS256 said, signed as HS512", Token: token{Algorithm: "HS512"}},
		{Name: "HS384 said, signed as HS256", Token: token{Header: `{"alg":"HS384","typ":"JWT"}`}},
		{Name: "RS256 said, signed as HS256", Token: token{Header: `{"alg":"RS256"}`}},
		{Name: "PS256 said, signed as HS256", Token: token{Header: `{"alg":"PS256"}`}},
		{Name: "ES256 said, signed as HS256", Token: token{Header: `{"alg":"ES256"}`}},
		{Name: "EdDSA said, signed as HS256", Token: token{Header: `{"alg":"EdDSA"}`}},
		{Name: "alg in lower case", Token: token{Header: `{"alg":"hs256"}`}},
		{Name: "alg with a space", Token: token{Header: `{"alg":"HS256 "}`}},
		{Name: "alg unknown", Token: token{Header: `{"alg":"HS1"}`}},
		{Name: "alg missing", Token: token{Header: `{"typ":"JWT"}`}},
		{Name: "alg empty", Token: token{Header: `{"alg":"","typ":"JWT"}`}},
		{Name: "alg a number", Token: token{Header: `{"alg":256,"typ":"JWT"}`}},
		{Name: "alg null", Token: token{Header: `{"alg":null}`}},
		{Name: "alg a list", Token: token{Header: `{"alg":["HS256"]}`}},
	}},
	// The key must be one of this server's, and the header must not name an extension.
	{Each: tokenCase{Rule: "T1", Want: fails(401, "unauthenticated")}, Cases: []tokenCase{
		{Name: "a key that this server never had", Rule: "T8", Key: "stranger"},
		{Name: "the empty key", Key: "empty"},
		{Name: "the right key short of a byte", Key: "short"},
		{Name: "the empty key, named by kid", Key: "empty",
			Token: token{Header: `{"alg":"HS256","kid":"../../dev/null"}`}},
		{Name: "a key that the token brings along", Key: "stranger",
			Token: token{Header: `{"alg":"HS256","jwk":{"kty":"oct",` +
				`"k":"Y29ycHVzLWtleS10aGF0LXRoaXMtc2VydmVyLW5ldmVyLWhhZC0wMw"}}`}},
		{Name: "a key to be fetched", Key: "stranger",
			Token: token{Header: `{"alg":"HS256","jku":"http://127.0.0.1:1/keys",` +
				`"x5u":"http://127.0.0.1:1/cert"}`}},
		{Name: "crit names an extension",
			Token: token{Header: `{"alg":"HS256","crit":["com.example.bind"],"com.example.bind":1}`}},
		{Name: "crit names a known claim", Token: token{Header: `{"alg":"HS256","crit":["exp"]}`}},
		{Name: "crit is empty", Token: token{Header: `{"alg":"HS256","crit":[]}`}},
		{Name: "crit null", Token: token{Header: `{"alg":"HS256","crit":null}`}},
		{Name: "crit with unencoded payload",
			Token: token{Header: `{"alg":"HS256","b64":false,"crit":["b64"]}`}},
	}},
	// Valid times.
	{Each: tokenCase{Rule: "T2", Want: ok}, Cases: []tokenCase{
		{Name: "expires in a minute",
			Token: token{Payload: new(`{<user>,"iat":<now-3600>,"exp":<now+60>}`)}},
	}},
	// Tokens that have expired.
	{Each: tokenCase{Rule: "T2", Reason: "expired", Want: fails(401, "unauthenticated")},
		Cases: []tokenCase{
			{Name: "exp 0", Token: token{Payload: new(`{<user>,"iat":<now>,"exp":0}`)}},
			{Name: "exp negative", Token: token{Payload: new(`{<user>,"iat":<now>,"exp":-1}`)}},
			{Name: "exp negative, with the digits of today",
				Token: token{Payload: new(`{<user>,"iat":<now>,"exp":-<now+3600>}`)}},
			{Name: "expired a second ago",
				Token: token{Payload: new(`{<user>,"iat":<now-3600>,"exp":<now-1>}`)}},
			{Name: "expired now", Token: token{Payload: new(`{<user>,"iat":<now-3600>,"exp":<now>}`)}},
		}},
	// Times that are missing, are not numbers, or are too large.
	{Each: tokenCase{Rule: "T2", Want: fails(401, "unauthenticated")}, Cases: []tokenCase{
		{Name: "no exp", Token: token{Payload: new(`{<user>,"iat":<now>}`)}},
		{Name: "exp null", Token: token{Payload: new(`{<user>,"iat":<now>,"exp":null}`)}},
		{Name: "no iat", Token: token{Payload: new(`{<user>,"exp":<now+3600>}`)}},
		{Name: "iat null", Token: token{Payload: new(`{<user>,"iat":null,"exp":<now+3600>}`)}},
		{Name: "exp a date",
			Token: token{Payload: new(`{<user>,"iat":<now>,"exp":"2999-01-01T00:00:00Z"}`)}},
		{Name: "exp a list", Token: token{Payload: new(`{<user>,"iat":<now>,"exp":[<now+3600>]}`)}},
		{Name: "exp true", Token: token{Payload: new(`{<user>,"iat":<now>,"exp":true}`)}},
		{Name: "exp no number that a machine can hold",
			Token: token{Payload: new(`{<user>,"iat":<now>,"exp":1e999}`)}},
		{Name: "exp further off than any date", Reason: "any",
			Token: token{Payload: new(`{<user>,"iat":<now>,"exp":1e300}`)}},
	}},
	// The session has ended: the token does not match the account as it is now.
	{Each: tokenCase{Rule: "T5", Reason: "ended", Want: fails(401, "unauthenticated")},
		Cases: []tokenCase{
			{Name: "issued before the user was signed out everywhere", User: "signedOut",
				Token: token{Payload: new(`{<user>,"iat":<now-160>,"exp":<now+3600>}`)}},
			{Name: "email no longer the user's",
				Token: token{Payload: new(`{"email":"former@example.com","userId":"<userId>",<times>}`)}},
			{Name: "email of another user",
				Token: token{Payload: new(`{"email":"<other.email>","userId":"<userId>",<times>}`)}},
			{Name: "email with more before it",
				Token: token{Payload: new(`{"email":"x<email>","userId":"<userId>",<times>}`)}},
			{Name: "email in upper case",
				Token: token{Payload: new(`{"email":"<EMAIL>","userId":"<userId>",<times>}`)}},
			{Name: "email missing", Token: token{Payload: new(`{"userId":"<userId>",<times>}`)}},
			{Name: "email under the name mail",
				Token: token{Payload: new(`{"mail":"<email>","userId":"<userId>",<times>}`)}},
			{Name: "user unknown or deleted",
				Token: token{Payload: new(`{"email":"<email>","userId":"` + someID + `",<times>}`)}},
		}},
	// The account is suspended, or its user was signed out everywhere.
	{Each: tokenCase{Rule: "T5"}, Cases: []tokenCase{
		{Name: "suspended", User: "suspended", Want: fails(403, "account_suspended")},
		{Name: "suspended and expired: the token comes first", Reason: "expired", User: "suspended",
			Token: token{Payload: new(`{<user>,"iat":<now-60>,"exp":<now-30>}`)},
			Want:  fails(401, "unauthenticated")},
		{Name: "issued after the user was signed out everywhere", User: "signedOut",
			Token: token{Payload: new(`{<user>,"iat":<now-40>,"exp":<now+3600>}`)}, Want: ok},
	}},
	// Email and userId must be exactly as the server writes them.
	{Each: tokenCase{Rule: "T5", Want: fails(401, "unauthenticated")}, Cases: []tokenCase{
		{Name: "email a list",
			Token: token{Payload: new(`{"email":["<email>"],"userId":"<userId>",<times>}`)}},
		{Name: "userId missing", Token: token{Payload: new(`{"email":"<email>",<times>}`)}},
		{Name: "userId under the name sub",
			Token: token{Payload: new(`{"email":"<email>","sub":"<userId>",<times>}`)}},
		{Name: "userId empty", Token: token{Payload: new(`{"email":"<email>","userId":"",<times>}`)}},
		{Name: "userId no UUID",
			Token: token{Payload: new(`{"email":"<email>","userId":"1",<times>}`)}},
		{Name: "userId a number",
			Token: token{Payload: new(`{"email":"<email>","userId":1,<times>}`)}},
		{Name: "userId in upper case",
			Token: token{Payload: new(`{"email":"<email>","userId":"<USERID>",<times>}`)}},
		{Name: "userId in upper case, a space behind",
			Token: token{Payload: new(`{"email":"<email>","userId":"<USERID> ",<times>}`)}},
		{Name: "userId in braces",
			Token: token{Payload: new(`{"email":"<email>","userId":"{<userId>}",<times>}`)}},
		{Name: "userId with SQL", Rule: "I1",
			Token: token{Payload: new(`{"email":"<email>",` +
				`"userId":"<userId>\u0027 or \u00271\u0027=\u00271",<times>}`)}},
		{Name: "userId with NUL", Rule: "I2",
			Token: token{Payload: new(`{"email":"<email>","userId":"<userId>\u0000",<times>}`)}},
	}},
	// Signatures that do not match.
	{Each: tokenCase{Rule: "T1", Want: fails(401, "unauthenticated")}, Cases: []tokenCase{
		{Name: "payload of another user under this signature",
			Token: token{SentPayload: `{"email":"<other.email>","userId":"<other.userId>",<times>}`}},
		{Name: "payload of other times under this signature",
			Token: token{SentPayload: `{<user>,"iat":<now-1>,"exp":<now+7200>}`}},
		{Name: "signature short of a character", Token: token{Cut: 1}},
		{Name: "signature short of three bytes", Token: token{Cut: 4}},
		{Name: "signature with more behind it",
			Token: token{Sent: new("<header>.<payload>.<signature>AAAA")}},
		{Name: "signature very long",
			Token: token{Sent: new("<header>.<payload>.<signature>" + repeat("A", 8000))}},
		{Name: "good, but longer than any token of this server", Rule: "H4",
			Token: token{Payload: new(`{<user>,<times>,"x":"` + repeat("a", 2000) + `"}`)}},
		{Name: "payload very long, under a strange key", Key: "stranger",
			Token: token{Payload: new(`{"email":"` + repeat("a", 6000) + `","userId":"<userId>",<times>}`)}},
	}},
	// Base64 that is not strict.
	{Each: tokenCase{Rule: "T4", Want: fails(401, "unauthenticated")}, Cases: []tokenCase{
		{Name: "padding bits of the signature", Token: token{UnusedBits: 1}},
		{Name: "padding bits of the signature, the second", Token: token{UnusedBits: 2}},
		{Name: "padding bits of the signature, both", Token: token{UnusedBits: 3}},
		{Name: "signature with base64 padding",
			Token: token{Sent: new("<header>.<payload>.<signature>=")}},
	}},
	// A wrong number of parts, or other characters around or within them.
	{Each: tokenCase{Rule: "T1", Want: fails(401, "unauthenticated")}, Cases: []tokenCase{
		{Name: "a dot behind", Token: token{Sent: new("<header>.<payload>.<signature>.")}},
		{Name: "four parts", Token: token{Sent: new("<header>.<payload>.<signature>.x")}},
		{Name: "a dot before", Token: token{Sent: new(".<header>.<payload>.<signature>")}},
		{Name: "two dots in a row", Token: token{Sent: new("<header>..<payload>.<signature>")}},
		{Name: "five parts",
			Token: token{Sent: new("<header>.<payload>.<signature>.<payload>.<signature>")}},
		{Name: "two parts", Token: token{Sent: new("<header>.<payload>")}},
		{Name: "dots only", Token: token{Sent: new("..")}},
		{Name: "a letter", Token: token{Sent: new("x")}},
		{Name: "empty", Token: token{Sent: new("")}},
		{Name: "payload alone, not encoded", Token: token{Sent: new("{'userId':'<userId>'}")}},
		{Name: "dots percent-encoded", Token: token{Sent: new("<header>%2E<payload>%2E<signature>")}},
		{Name: "Bearer before", Token: token{Sent: new("Bearer <header>.<payload>.<signature>")}},
		{Name: "Bearer before, without a space",
			Token: token{Sent: new("Bearer<header>.<payload>.<signature>")}},
		{Name: "a space before", Rule: "T4",
			Token: token{Sent: new(" <header>.<payload>.<signature>")}},
		{Name: "a space within", Rule: "T4",
			Token: token{Sent: new("<header>. <payload>.<signature>")}},
		{Name: "a tab within", Rule: "T4", Reason: "missing",
			Token: token{Sent: new("<header>.<payload>\t.<signature>")}},
		{Name: "a line feed within, percent-encoded", Rule: "T4",
			Token: token{Sent: new("<header>.%0A<payload>.<signature>")}},
	}},
	// Headers and payloads that are empty or not one JSON object.
	{Each: tokenCase{Rule: "T2", Want: fails(401, "unauthenticated")}, Cases: []tokenCase{
		{Name: "header an empty object", Rule: "T1", Token: token{Header: "{}"}},
		{Name: "header null", Rule: "T1", Token: token{Header: "null"}},
		{Name: "header cut off", Rule: "T1", Token: token{Header: `{"alg":"HS256"`}},
		{Name: "payload null", Token: token{Payload: new("null")}},
		{Name: "payload empty", Token: token{Payload: new("")}},
		{Name: "payload a list", Token: token{Payload: new("[]")}},
		{Name: "payload a list of a good one", Token: token{Payload: new("[{<user>,<times>}]")}},
		{Name: "payload cut off", Token: token{Payload: new("{<user>,<times>")}},
		{Name: "payload with data behind it", Token: token{Payload: new("{<user>,<times>}{}")}},
	}},
}
