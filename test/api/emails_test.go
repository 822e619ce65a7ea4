package api

import (
	"encoding/json"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// An emailCase is an address and the answer to a request for a code for it.
type emailCase struct {
	Name, Rule string
	Email      string
	Stored     string // if not "", that of a user, who gets the code
	Want       answer
}

// I4, O9: The server accepts and refuses exactly these addresses, in a request for a code and in a
// sign-in. The code for a user's address is sent.
func TestOnlyPlainAddressesAreTaken(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	runCases(t, emailCases, func(t *testing.T, c emailCase) {
		if c.Stored != "" {
			hubstest.Exec(t, s.Database, "insert into users (email) values ($1)", c.Stored)
		}
		wantAnswer(t, askOnTheWire(t, s, c.Email, "X-Forwarded-For", hubstest.NewIP()), c.Want)
		if c.Stored != "" {
			s.Code(t, c.Stored)
			return
		}
		if c.Want.Status == 200 {
			c.Want = fails(401, "invalid_code")
		}
		wantAnswer(t, s.Client(t).PresentCode(c.Email, "000000"), c.Want)
	})
}

// The table users accepts exactly the addresses that a request may have. Otherwise an operator
// could add a user who can never sign in, or mail could be sent to a text that was never checked.
func TestTableTakesTheSameAddresses(t *testing.T) {
	t.Parallel()
	db := hubstest.OpenDB(t, hubstest.NewDatabase(t))
	for _, c := range allCases(t, emailCases) {
		email := strings.Trim(c.Email, " ") // the server trims it, too
		if strings.Contains(email, "\x00") {
			continue // a text in PostgreSQL can't contain a NUL
		}
		want := "check_violation"
		if c.Want.Status == 200 {
			want = ""
		}
		got := sqlErrorOf(t, db, "insert into users (email) values ($1)", email)
		wantEqual(t, email, got, want)
	}
}

// askOnTheWire asks for a code with exactly these headers and a Content-Type. http.Client would change
// or refuse some of them.
func askOnTheWire(
	t *testing.T, s *hubstest.Server, email string, headers ...string,
) *hubstest.Response {
	t.Helper()
	body, err := json.Marshal(map[string]string{"email": email})
	hubstest.Must(t, err)
	headers = append(headers, "Content-Type", "application/json")
	return onTheWire(t, s, "POST /auth/otp/request", body, headers...)
}

// longEmail is 244 bytes of an address.
var longEmail = repeat("a", 60) + "@" + repeat("b", 60) + "." + repeat("c", 60) + "." + repeat("d", 60) + "."

var emailCases = []group[emailCase]{
	// Addresses that are accepted.
	{Each: emailCase{Rule: "I2", Want: ok}, Cases: []emailCase{
		{Name: "plain", Email: "someone@corpus.example"},
		{Name: "dots in the local part", Email: "a.b.c@corpus.example"},
		{Name: "plus and tag", Email: "someone+tag@corpus.example"},
		{Name: "dot, hyphen, plus and underscore", Email: "ada.b-c+d_e@x-y.example"},
		{Name: "every character of an atom", Email: "!#$%&'*+/=?^_`{|}~-@corpus.example"},
		{Name: "every character of an atom, a digit in the last label",
			Email: "!#$%&'*+/=?^_`{|}~-@corpus.a1"},
		{Name: "digits only", Email: "123456@123.example"},
		{Name: "shortest", Email: "a@b"},
		{Name: "one label", Email: "root@localhost"},
		{Name: "hyphens inside a label", Email: "someone@a--b-c.example"},
		{Name: "punycode", Email: "someone@xn--bcher-kva.example"},
		{Name: "spaces around", Email: "  spaces@corpus.example   "},
		{Name: "254 bytes",
			Email: longEmail + "ee.example"},
		{Name: "254 bytes and many spaces around",
			Email: longEmail + "ff.example" + repeat(" ", 300)},
		{Name: "254 bytes, most of them in the local part", Email: repeat("a", 242) + "@example.com"},
	}},
	// Known addresses: the code goes to the address as it is stored.
	{Each: emailCase{Rule: "O9", Want: ok}, Cases: []emailCase{
		{Name: "known, as stored", Rule: "O6", Stored: "known@c1.corpus.example",
			Email: "known@c1.corpus.example"},
		{Name: "known, in capitals", Stored: "known@c2.corpus.example",
			Email: "KNOWN@C2.CORPUS.EXAMPLE"},
		{Name: "known, in capitals and spaces around", Stored: "ada@c7.corpus.example",
			Email: "  ADA@C7.Corpus.EXAMPLE "},
		{Name: "known, stored in capitals", Stored: "Known.Person@C3.Corpus.Example",
			Email: "known.person@c3.corpus.example"},
		{Name: "known, spaces around", Rule: "I2", Stored: "known@c4.corpus.example",
			Email: " known@c4.corpus.example "},
		{Name: "known, k and i in capitals", Stored: "kiki@c5.corpus.example",
			Email: "KIKI@c5.corpus.example"},
		{Name: "known, every character of an atom", Rule: "G2",
			Stored: "o!#$%&'*+/=?^_`{|}~-@c6.corpus.example",
			Email:  "o!#$%&'*+/=?^_`{|}~-@c6.corpus.example"},
		{Name: "known, like an encoded word", Rule: "I4",
			Stored: "=?utf-8?q?ada=40example.com?=@c8.corpus.example",
			Email:  "=?utf-8?q?ada=40example.com?=@c8.corpus.example"},
	}},
	// Addresses that are refused.
	{Each: emailCase{Rule: "I2",
		Want: answer{Status: 400, Code: "invalid_request", Fields: []string{"email"},
			Detail: "must be an ASCII e-mail address (an international domain as xn--…)"}},
		Cases: []emailCase{
			{Name: "empty", Email: ""},
			{Name: "spaces only", Email: "   "},
			{Name: "no @", Email: "someone.corpus.example"},
			{Name: "no @, a backslash", Email: `a\@corpus.example`},
			{Name: "@ only", Email: "@"},
			{Name: "no local part", Email: "@corpus.example"},
			{Name: "no domain", Email: "someone@"},
			{Name: "two @", Email: "a@b@corpus.example"},
			{Name: "@@", Email: "a@@corpus.example"},
			{Name: "255 bytes",
				Email: longEmail + "eee.example"},
			{Name: "255 bytes, most of them in the local part", Email: repeat("a", 243) + "@example.com"},
			{Name: "local part begins with a dot", Email: ".a@corpus.example"},
			{Name: "local part ends with a dot", Email: "a.@corpus.example"},
			{Name: "two dots in the local part", Email: "a..b@corpus.example"},
			{Name: "domain begins with a dot", Email: "a@.corpus.example"},
			{Name: "domain ends with a dot", Email: "a@corpus.example."},
			{Name: "two dots in the domain", Email: "a@corpus..example"},
			{Name: "label begins with a hyphen", Email: "a@-corpus.example"},
			{Name: "label ends with a hyphen", Email: "a@corpus-.example"},
			{Name: "last label ends with a hyphen", Email: "a@corpus.example-"},
			{Name: "underscore in the domain", Email: "a@cor_pus.example"},
			{Name: "port", Email: "a@corpus.example:25"},
			{Name: "address literal", Email: "a@[127.0.0.1]"},
			{Name: "IPv6 literal", Email: "a@[IPv6:::1]"},
			{Name: "quoted local part", Email: `"a"@corpus.example`},
			{Name: "quoted local part with @", Email: `"a@b"@corpus.example`},
			{Name: "display name", Email: "Someone <a@corpus.example>"},
			{Name: "angle brackets", Email: "<a@corpus.example>"},
			{Name: "comment", Email: "a(comment)@corpus.example"},
			{Name: "two addresses, comma", Rule: "I4", Email: "a@corpus.example,b@corpus.example"},
			{Name: "two addresses, comma and space", Rule: "I4",
				Email: "a@corpus.example, b@corpus.example"},
			{Name: "two addresses, semicolon", Rule: "I4", Email: "a@corpus.example;b@corpus.example"},
			{Name: "two addresses, space", Rule: "I4", Email: "a@corpus.example b@corpus.example"},
			{Name: "source route", Rule: "I4", Email: "@evil.example:a@corpus.example"},
			{Name: "mailto", Rule: "I4", Email: "mailto:a@corpus.example"},
			{Name: "query behind", Rule: "I4", Email: "a@corpus.example?bcc=b@corpus.example"},
			{Name: "an SMTP parameter behind", Rule: "I4", Email: "a@corpus.example> SIZE=1"},
			{Name: "CR LF in percent escapes, before @", Rule: "I4",
				Email: "a%0d%0aBcc:b@corpus.example@corpus.example"},
			{Name: "LF in a percent escape, behind", Rule: "I4",
				Email: "a@corpus.example%0aBcc:b@corpus.example"},
			{Name: "space within", Email: "a b@corpus.example"},
			{Name: "space before @", Email: "a @corpus.example"},
			{Name: "space in the domain", Email: "a@cor pus.example"},
			{Name: "tab before", Rule: "I4", Email: "\ta@corpus.example"},
			{Name: "line feed behind", Rule: "I4", Email: "a@corpus.example\n"},
			{Name: "CR LF and a header", Rule: "I4", Email: "a@corpus.example\r\nBcc: b@corpus.example"},
			{Name: "CR LF before @", Rule: "I4", Email: "a\r\n@corpus.example"},
			{Name: "CR LF and an SMTP command", Rule: "I4",
				Email: "a@corpus.example>\r\nRCPT TO:<b@corpus.example"},
			{Name: "NUL behind", Rule: "I4", Email: "a@corpus.example\x00"},
			{Name: "NUL and another domain", Rule: "I4", Email: "a@corpus.example\x00.evil.example"},
			{Name: "DEL", Rule: "I4", Email: "a\x7f@corpus.example"},
			{Name: "U+0085 next line", Rule: "I4", Email: "a@corpus.example\u0085"},
			{Name: "U+2028 line separator", Rule: "I4", Email: "a@corpus.example\u2028b"},
			{Name: "U+2028 and a header", Rule: "I4",
				Email: "a@corpus.example\u2028Bcc: b@corpus.example"},
			{Name: "U+00A0 is no space", Rule: "O9", Email: "\u00a0a@corpus.example"},
			{Name: "U+00A0 behind", Rule: "O9", Email: "a@corpus.example\u00a0"},
			{Name: "U+200B zero width", Rule: "O9", Email: "a\u200b@corpus.example"},
			{Name: "U+200B behind", Rule: "O9", Email: "a@corpus.example\u200b"},
			{Name: "U+FEFF before", Rule: "O9", Email: "\ufeffa@corpus.example"},
			{Name: "U+202E right to left", Rule: "O9", Email: "a\u202e@corpus.example"},
			{Name: "U+212A is no k", Rule: "O9", Email: "\u212aiki@c5.corpus.example"},
			{Name: "U+0130 is no i", Rule: "O9", Email: "k\u0130ki@c5.corpus.example"},
			{Name: "U+0131 is no i", Rule: "O9", Email: "k\u0131ki@c5.corpus.example"},
			{Name: "U+017F is no s", Rule: "O9", Email: "a@corpu\u017f.example"},
			{Name: "full-width digit", Rule: "O9", Email: "a\uff11@corpus.example"},
			{Name: "full-width k", Rule: "O9", Email: "\uff4biki@c5.corpus.example"},
			{Name: "full-width last label", Rule: "O9", Email: "a@corpus.\uff43\uff4f\uff4d"},
			{Name: "full-width @", Rule: "O9", Email: "a\uff20corpus.example"},
			{Name: "ideographic full stop", Rule: "O9", Email: "a@corpus\u3002example"},
			{Name: "Cyrillic a", Rule: "O9", Email: "\u0430@corpus.example"},
			{Name: "Cyrillic letter in the domain", Rule: "O9", Email: "a@corpus.ex\u0430mple"},
			{Name: "combining accent", Rule: "O9", Email: "e\u0301@corpus.example"},
			{Name: "i with two dots", Rule: "O9", Email: "kïki@c5.corpus.example"},
			{Name: "domain beyond ASCII", Rule: "O9", Email: "a@bücher.example"},
			{Name: "emoji", Rule: "O9", Email: "😀@corpus.example"},
		}},
}
