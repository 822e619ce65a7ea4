package api

import (
	"cmp"
	"testing"

	"hubs/internal/hubstest"
)

// someID is the id of nothing.
const someID = "7d2f9c1e-0000-4000-8000-3b5a1c9e0f42"

// A bodyCase is a request with a body. In its path and its body, <hubId> is the id of a hub, and
// <terms> is the current version of the terms.
type bodyCase struct {
	Name, Rule string
	As         string   // who sends it: nobody (""), a member or an admin
	Method     string   // "" means POST
	Path       string   // "" means /auth/otp/request
	Type       *string  // Content-Type; nil means application/json, and "" none
	Headers    []string // further ones, names and values in turn
	Body       string
	Want       answer
}

// I3, Z3, O9, I5: A JSON body that a route takes must be one flat object. Each member must be
// known, must be sent once, and must be a string of whole Unicode text. A refused body creates
// nothing.
func TestJSONBodiesAreStrict(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	member, _ := s.Member(t, "member")
	sessions := map[string]*hubstest.Client{
		"":       s.Client(t),
		"admin":  admin,
		"member": member,
	}
	made := admin.Do("POST /hubs", `{"name":"Corpus hub"}`).Must(t, 201)
	words := []string{
		"<hubId>", made.Field(t, "hubId"),
		"<terms>", admin.Get("/auth/session").Field(t, "terms.version"),
	}

	created := 1
	runCases(t, bodyCases, func(t *testing.T, c bodyCase) {
		session := named(t, sessions, c.As).Token()
		wantAnswer(t, c.send(t, s, session, words), c.Want)
		if c.Want.Status == 201 {
			created++
		}
	})

	hubs := hubstest.Query[int](t, s.Database, "select count(*) from hubs")
	wantEqual(t, "hubs, one for each 201", hubs, created)
}

// send sends the request of a case with a session token, or without one if session is empty. It
// replaces the words in body and path.
func (c bodyCase) send(
	t *testing.T, s *hubstest.Server, session string, words []string,
) *hubstest.Response {
	t.Helper()
	headers := append(c.Headers, "X-Forwarded-For", hubstest.NewIP())
	if c.Type == nil {
		headers = append(headers, "Content-Type", "application/json")
	} else if *c.Type != "" {
		headers = append(headers, "Content-Type", *c.Type)
	}
	if session != "" {
		headers = append(headers, "Cookie", s.CookieName()+"="+session)
	}
	path := fillIn(cmp.Or(c.Path, "/auth/otp/request"), words...)
	body := []byte(fillIn(c.Body, words...))
	return onTheWire(t, s, cmp.Or(c.Method, "POST")+" "+path, body, headers...)
}

var bodyCases = []group[bodyCase]{
	// Bodies that are one JSON object.
	{Each: bodyCase{Rule: "I3", Want: ok}, Cases: []bodyCase{
		{Name: "good", Body: `{"email":"b1@corpus.example"}`},
		{Name: "white space around", Body: " \r\n\t{ \"email\" :\n\"b2@corpus.example\" } \n"},
		{Name: "escapes in name and value", Body: `{"\u0065mail":"b3\u0040corpus.example"}`},
		{Name: "a byte order mark", Body: "\xef\xbb\xbf{\"email\":\"b4@corpus.example\"}"},
		{Name: "a byte order mark before white space",
			Body: "\xef\xbb\xbf\r\n {\"email\":\"b6@corpus.example\"}"},
	}},
	// Content types that mean JSON in UTF-8.
	{Each: bodyCase{Rule: "I3", Body: `{"email":"b5@corpus.example"}`, Want: ok}, Cases: []bodyCase{
		{Name: "charset utf-8", Type: new("application/json; charset=utf-8")},
		{Name: "charset in capitals and quotes", Type: new(`Application/JSON;charset="UTF-8"`)},
		{Name: "type with capitals", Type: new("Application/JSON")},
		{Name: "charset in capitals, no space", Type: new("application/json;charset=UTF-8")},
		{Name: "charset in quotes", Type: new(`application/json; charset="utf-8"`)},
	}},
	// A Content-Encoding, or a header that is sent twice.
	{Each: bodyCase{Rule: "I3", Body: `{"email":"b7@corpus.example"}`,
		Want: fails(415, "unsupported_media_type")},
		Cases: []bodyCase{
			{Name: "content type in two headers", Headers: []string{"Content-Type", "application/json"}},
			{Name: "said to be compressed", Headers: []string{"Content-Encoding", "gzip"}},
			{Name: "said to be compressed by br", Headers: []string{"Content-Encoding", "br"}},
			{Name: "said to be compressed, second of two",
				Headers: []string{"Content-Encoding", "identity, gzip"}},
			{Name: "said to be compressed, in a second header",
				Headers: []string{"Content-Encoding", "", "Content-Encoding", "gzip"}},
		}},
	// Other content types.
	{Each: bodyCase{Rule: "I3", Body: `{"email":"b7@corpus.example"}`,
		Want: fails(415, "unsupported_media_type")},
		Cases: []bodyCase{
			{Name: "another charset", Type: new("application/json; charset=iso-8859-1")},
			{Name: "another charset by its other name", Type: new("application/json; charset=latin1")},
			{Name: "charset utf-16", Type: new("application/json; charset=utf-16")},
			{Name: "charset twice", Type: new("application/json; charset=utf-8; charset=utf-7")},
			{Name: "charset without a value", Type: new("application/json; charset")},
			{Name: "another parameter", Type: new("application/json; v=1")},
			{Name: "another parameter behind the charset",
				Type: new("application/json; charset=utf-8; v=1")},
			{Name: "no content type", Type: new("")},
			{Name: "text/plain, which a page may send anywhere", Rule: "C2", Type: new("text/plain")},
			{Name: "a form", Rule: "C2", Type: new("application/x-www-form-urlencoded"),
				Body: "email=b7%40corpus.example"},
			{Name: "text/json", Type: new("text/json")},
			{Name: "a kind of JSON", Type: new("application/problem+json")},
			{Name: "JSON as a beginning", Type: new("application/jsonx")},
			{Name: "two types", Type: new("text/plain, application/json")},
			{Name: "two types, JSON first", Type: new("application/json, text/plain")},
		}},
	// The longest body, and the longest Content-Type.
	{Each: bodyCase{Rule: "H4", Want: ok}, Cases: []bodyCase{
		{Name: "a body of 16 KiB", Body: `{"email":"d1@corpus.example"}` + repeat(" ", 16355)},
		{Name: "a type of 256 bytes",
			Type: new("application/json;" + repeat(" ", 226) + "charset=utf-8"),
			Body: `{"email":"d2@corpus.example"}`},
	}},
	// A longer body, and a longer Content-Type.
	{Each: bodyCase{Rule: "H4", Want: fails(413, "too_large")}, Cases: []bodyCase{
		{Name: "a body of a byte more", Body: `{"email":"d3@corpus.example"}` + repeat(" ", 16356)},
		{Name: "a type of 257 bytes",
			Type: new("application/json;" + repeat(" ", 227) + "charset=utf-8"),
			Body: `{"email":"d4@corpus.example"}`, Want: fails(415, "unsupported_media_type")},
	}},
	// The error's detail names the content type that the endpoint accepts.
	{Each: bodyCase{Rule: "I3", Type: new("text/plain"), Body: "x",
		Want: fails(415, "unsupported_media_type")},
		Cases: []bodyCase{
			{Name: "another type: the detail names the right one",
				Want: answer{Body: values{
					"detail": "The body must be application/json in UTF-8, and not encoded."}}},
			{Name: "another type of an upload: the detail names the right one", As: "member",
				Path: "/files/upload",
				Want: answer{Body: values{
					"detail": "The body must be multipart/form-data in UTF-8, and not encoded."}}},
		}},
	// Bodies that are not one JSON object.
	{Each: bodyCase{Rule: "I3", Want: invalid("body")}, Cases: []bodyCase{
		{Name: "more members than any request has", Body: "{" + repeat(`"a":1,`, 50) + `"a":1}`},
		{Name: "empty", Body: ""},
		{Name: "white space only", Body: " \n"},
		{Name: "null", Body: "null"},
		{Name: "a list", Body: `[{"email":"b8@corpus.example"}]`},
		{Name: "an empty list", Body: "[]"},
		{Name: "a text", Body: `"b8@corpus.example"`},
		{Name: "a number", Body: "1"},
		{Name: "true", Body: "true"},
		{Name: "cut off", Body: `{"email":"b8@corpus.example"`},
		{Name: "cut off in a text", Body: `{"email":"b8@corpus.example`},
		{Name: "a second object", Body: `{"email":"b8@corpus.example"}{"email":"b9@corpus.example"}`},
		{Name: "an empty object behind", Body: `{"email":"b8@corpus.example"} {}`},
		{Name: "a brace behind", Body: `{"email":"b8@corpus.example"}}`},
		{Name: "a word behind", Body: `{"email":"b8@corpus.example"} x`},
		{Name: "a letter behind, no space", Body: `{"email":"b8@corpus.example"}x`},
		{Name: "NUL behind", Body: "{\"email\":\"b8@corpus.example\"}\x00"},
		{Name: "a comma behind the last member", Body: `{"email":"b8@corpus.example",}`},
		{Name: "a comment", Body: `{/**/"email":"b8@corpus.example"}`},
		{Name: "a comment behind the last member", Body: `{"email":"b8@corpus.example"/**/}`},
		{Name: "single quotes", Body: "{'email':'b8@corpus.example'}"},
		{Name: "a name without quotes", Body: `{email:"b8@corpus.example"}`},
		{Name: "NaN", Body: `{"email":NaN}`},
		{Name: "an escape that JSON has not", Body: `{"email":"b8\qcorpus.example"}`},
		{Name: "a line break in a text, not escaped", Body: "{\"email\":\"b8@corpus.example\n\"}"},
		{Name: "a form in place of JSON", Body: "email=b8%40corpus.example"},
		{Name: "an unknown member 8000 lists deep, cut off",
			Body: `{"email":"b8@corpus.example","x":` + repeat("[", 8000)},
		{Name: "8000 brackets that nobody closes", Body: repeat("[", 8000)},
		{Name: "two byte order marks",
			Body: "\xef\xbb\xbf\xef\xbb\xbf{\"email\":\"b8@corpus.example\"}"},
		{Name: "a byte order mark alone", Body: "\xef\xbb\xbf"},
		{Name: "a byte order mark behind a space",
			Body: " \xef\xbb\xbf{\"email\":\"b8@corpus.example\"}"},
		{Name: "UTF-16", Body: "\xff\xfe{\x00}\x00"},
		{Name: "UTF-16 without a byte order mark", Body: "{\x00\"\x00"},
	}},
	// Strings that are not valid Unicode.
	{Each: bodyCase{Rule: "I3", Want: invalid()}, Cases: []bodyCase{
		{Name: "a byte that is no UTF-8", Body: "{\"email\":\"b8\xff@corpus.example\"}",
			Want: invalid("email")},
		{Name: "a byte that is no UTF-8, in a name",
			Body: "{\"email\":\"b8@corpus.example\",\"\xff\":\"\"}", Want: invalid("\ufffd")},
		{Name: "an overlong @", Body: "{\"email\":\"b8\xc1\x80corpus.example\"}",
			Want: invalid("email")},
		{Name: "a surrogate in UTF-8", Body: "{\"email\":\"b8\xed\xa0\x80@corpus.example\"}",
			Want: invalid("email")},
		{Name: "a lone surrogate, escaped", Body: `{"email":"b8\ud800@corpus.example"}`,
			Want: invalid("email")},
		{Name: "a lone low surrogate, escaped", Body: `{"email":"b8\udc00@corpus.example"}`,
			Want: invalid("email")},
		{Name: "a lone surrogate in a hub's name", As: "admin", Path: "/hubs",
			Body: `{"name":"a\ud800"}`, Want: invalid("name")},
		{Name: "surrogates in the wrong order", As: "admin", Path: "/hubs",
			Body: `{"name":"\ude00\ud83d"}`, Want: invalid("name")},
		{Name: "a lone surrogate in a description", As: "admin", Path: "/hubs",
			Body: `{"name":"a","description":"\udbff"}`, Want: invalid("description")},
		{Name: "a lone surrogate in an unknown name",
			Body: `{"email":"b8@corpus.example","\ud800":""}`},
	}},
	// A required member must be sent once, under its exact name, as a string.
	{Each: bodyCase{Rule: "I3", Want: invalid()}, Cases: []bodyCase{
		{Name: "an empty object", Body: "{}", Want: invalid("email")},
		{Name: "nested lists 8000 deep",
			Body: `{"email":` + repeat("[", 8000) + repeat("]", 8000) + "}", Want: invalid("email")},
		{Name: "email twice", Body: `{"email":"b8@corpus.example","email":"b9@corpus.example"}`,
			Want: invalid("email")},
		{Name: "email twice, the same",
			Body: `{"email":"b8@corpus.example","email":"b8@corpus.example"}`,
			Want: invalid("email")},
		{Name: "email twice, once escaped",
			Body: `{"email":"b8@corpus.example","\u0065mail":"b9@corpus.example"}`,
			Want: invalid("email")},
		{Name: "email twice, once in capitals",
			Body: `{"email":"b8@corpus.example","EMAIL":"b9@corpus.example"}`,
			Want: invalid("EMAIL")},
		{Name: "email in other case", Body: `{"Email":"b8@corpus.example"}`,
			Want: invalid("Email", "email")},
		{Name: "email with a space in the name", Body: `{"email ":"b8@corpus.example"}`,
			Want: invalid("email", "email ")},
		{Name: "email null", Body: `{"email":null}`, Want: invalid("email")},
		{Name: "email a number", Body: `{"email":1}`, Want: invalid("email")},
		{Name: "email true", Body: `{"email":true}`, Want: invalid("email")},
		{Name: "email a list", Body: `{"email":["b8@corpus.example","b9@corpus.example"]}`,
			Want: invalid("email")},
		{Name: "email an object", Body: `{"email":{"$ne":""}}`, Want: invalid("email")},
	}},
	// Unknown members.
	{Each: bodyCase{Rule: "I3",
		Want: answer{Status: 400, Code: "invalid_request", Detail: "is not known here"}},
		Cases: []bodyCase{
			{Name: "an unknown member twice", Body: `{"email":"b8@corpus.example","x":"a","x":"a"}`,
				Want: invalid("x")},
			{Name: "an unknown member", Body: `{"email":"b8@corpus.example","lang":"en"}`,
				Want: invalid("lang")},
			{Name: "an unknown member that is null", Body: `{"email":"b8@corpus.example","lang":null}`,
				Want: invalid("lang")},
			{Name: "an unknown member with an empty name", Body: `{"email":"b8@corpus.example","":""}`},
			{Name: "userId when asking for a code", Rule: "Z3",
				Body: `{"email":"b8@corpus.example","userId":"` + someID + `"}`,
				Want: invalid("userId")},
			{Name: "permission when asking for a code", Rule: "Z3",
				Body: `{"email":"b8@corpus.example","permission":"admin","role":"admin"}`,
				Want: invalid("permission", "role")},
			{Name: "a code when asking for one", Rule: "Z3",
				Body: `{"email":"b8@corpus.example","code":"123456"}`, Want: invalid("code")},
			{Name: "__proto__", Rule: "Z3",
				Body: `{"email":"b8@corpus.example","__proto__":{"role":"admin"}}`,
				Want: invalid("__proto__")},
		}},
	// A sign-in for an address that has not asked for a code.
	{Each: bodyCase{Rule: "O6",
		Want: answer{Status: 401, Code: "invalid_code", Headers: headers{"Set-Cookie": ""}}},
		Cases: []bodyCase{
			{Name: "a code that was never sent", Path: "/auth/otp/validate",
				Body: `{"email":"c1@corpus.example","code":"000000"}`},
		}},
	// Codes that are not a string of six digits.
	{Each: bodyCase{Rule: "O9", Path: "/auth/otp/validate",
		Want: answer{Status: 400, Code: "invalid_request", Fields: []string{"code"},
			Detail: "must be six digits, 0 to 9"}},
		Cases: []bodyCase{
			{Name: "code missing", Rule: "I3", Body: `{"email":"c10@corpus.example"}`},
			{Name: "code empty", Rule: "I3", Body: `{"email":"c11@corpus.example","code":""}`},
			{Name: "code of five digits", Body: `{"email":"c14@corpus.example","code":"12345"}`},
			{Name: "code of seven digits", Body: `{"email":"c15@corpus.example","code":"1234567"}`},
			{Name: "code with a hyphen", Body: `{"email":"c8@corpus.example","code":"347-579"}`},
			{Name: "code after a space", Body: `{"email":"c16@corpus.example","code":" 123456"}`},
			{Name: "code with a line feed", Body: `{"email":"c17@corpus.example","code":"123456\n"}`},
			{Name: "code with a sign", Body: `{"email":"c18@corpus.example","code":"+12345"}`},
			{Name: "code hexadecimal", Body: `{"email":"c19@corpus.example","code":"0x1234"}`},
			{Name: "code in full-width digits",
				Body: "{\"email\":\"c20@corpus.example\",\"code\":\"\uff11２３４５６\"}"},
			{Name: "code in Arabic digits", Body: `{"email":"c21@corpus.example","code":"١٢٣٤٥٦"}`},
			{Name: "code: a fraction", Body: `{"email":"c24@corpus.example","code":"1234.6"}`},
			{Name: "code: an exponent", Body: `{"email":"c25@corpus.example","code":"1e0005"}`},
			{Name: "code: a letter like a digit", Body: `{"email":"c26@corpus.example","code":"12345O"}`},
		}},
	// Codes that are not a string of six digits, of another type or sent twice.
	{Each: bodyCase{Rule: "O9", Path: "/auth/otp/validate", Want: invalid("code")},
		Cases: []bodyCase{
			{Name: "code a number", Body: `{"email":"c12@corpus.example","code":123456}`},
			{Name: "code null", Rule: "I3", Body: `{"email":"c13@corpus.example","code":null}`},
			{Name: "code a list of guesses", Rule: "O4",
				Body: `{"email":"c22@corpus.example","code":["000000","000001"]}`},
			{Name: "code twice", Rule: "O4",
				Body: `{"email":"c23@corpus.example","code":"000000","code":"000001"}`},
			{Name: "code: a list", Body: `{"email":"c27@corpus.example","code":["123456"]}`},
		}},
	// A sign-in with missing or unknown members.
	{Each: bodyCase{Rule: "I3", Path: "/auth/otp/validate", Want: invalid()}, Cases: []bodyCase{
		{Name: "email and code missing", Body: "{}", Want: invalid("code", "email")},
		{Name: "userId beside the code", Rule: "Z3",
			Body: `{"email":"c28@corpus.example","code":"000000","userId":"` + someID + `"}`,
			Want: invalid("userId")},
	}},
	// Terms: the current version is accepted, another one is a conflict.
	{Each: bodyCase{Rule: "I3", As: "member", Path: "/terms/acceptance"}, Cases: []bodyCase{
		{Name: "terms: current", Body: `{"version":"<terms>"}`,
			Want: ok},
		{Name: "terms: another version", Body: `{"version":"1999-01-01"}`,
			Want: fails(409, "conflict")},
		{Name: "terms: current, space behind", Body: `{"version":"<terms> "}`,
			Want: fails(409, "conflict")},
	}},
	// Terms: bad input.
	{Each: bodyCase{Rule: "I3", As: "member", Path: "/terms/acceptance", Want: invalid()},
		Cases: []bodyCase{
			{Name: "terms: version empty", Body: `{"version":""}`, Want: invalid("version")},
			{Name: "terms: version true", Body: `{"version":true}`, Want: invalid("version")},
			{Name: "terms: for another user", Rule: "Z3",
				Body: `{"version":"<terms>","userId":"` + someID + `"}`,
				Want: invalid("userId")},
			{Name: "terms: at a time of one's own", Rule: "Z3",
				Body: `{"version":"<terms>","acceptedAt":"2020-01-01T00:00:00Z"}`,
				Want: invalid("acceptedAt")},
		}},
	// Terms: the session is checked before the input.
	{Each: bodyCase{Rule: "Z1", Want: fails(401, "unauthenticated")}, Cases: []bodyCase{
		{Name: "terms: nobody, the session comes before the input", Path: "/terms/acceptance",
			Body: "{"},
	}},
	// A new hub.
	{Each: bodyCase{Rule: "I3", As: "admin", Path: "/hubs", Want: answer{Status: 201}},
		Cases: []bodyCase{
			{Name: "hub: name only", Body: `{"name":"Corpus"}`,
				Want: answer{Body: values{"name": "Corpus", "description": "", "status": "active"}}},
			{Name: "hub: all three, trimmed",
				Body: `{"name":"  Corpus  ","description":"a\r\n\tb ","status":"archived"}`,
				Want: answer{Body: values{
					"name": "Corpus", "description": "a\r\n\tb ", "status": "archived"}}},
			{Name: "hub: a surrogate pair is one character", Body: `{"name":"\ud83d\ude00"}`,
				Want: answer{Body: values{"name": "😀"}}},
			{Name: "hub: an escaped slash", Body: `{"name":"a\/b"}`,
				Want: answer{Body: values{"name": "a/b"}}},
			{Name: "hub: white space around, an escape in a name",
				Body: " \n{ \"n\\u0061me\" : \"a\" }\t\n", Want: answer{Body: values{"name": "a"}}},
			{Name: "hub: the longest name, of four bytes a character",
				Body: `{"name":"` + repeat("😀", maxName) + `"}`},
			{Name: "hub: the longest name, between spaces",
				Body: `{"name":" ` + repeat("a", maxName) + ` "}`},
			{Name: "hub: a letter and its accent are not put together", Body: "{\"name\":\"e\u0301\"}",
				Want: answer{Body: values{"name": "e\u0301"}}},
			{Name: "hub: the longest description",
				Body: `{"name":"Corpus","description":"` + repeat("a", maxDescription) + `"}`},
			{Name: "hub: the longest description, of four bytes a character",
				Body: `{"name":"Corpus","description":"` + repeat("😀", maxDescription) + `"}`},
			{Name: "hub: markup and SQL are plain text", Rule: "I1",
				Body: `{"name":"<script src=x>'); drop table hubs; --"}`,
				Want: answer{Body: values{"name": "<script src=x>'); drop table hubs; --"}}},
		}},
	// A new hub: a name that is refused.
	{Each: bodyCase{Rule: "I3", As: "admin", Path: "/hubs", Want: invalid("name")},
		Cases: []bodyCase{
			{Name: "hub: name too long", Body: `{"name":"` + repeat("a", maxName+1) + `"}`},
			{Name: "hub: name empty", Body: `{"name":""}`},
			{Name: "hub: name of spaces", Body: `{"name":"   "}`},
			{Name: "hub: name missing", Body: `{"description":"a"}`},
			{Name: "hub: name with NUL", Body: `{"name":"a\u0000b"}`},
			{Name: "hub: name with a line break", Rule: "I4", Body: `{"name":"a\r\nb"}`},
			{Name: "hub: name with a tab", Body: `{"name":"a\tb"}`},
			{Name: "hub: name of a zero width space", Body: `{"name":"\u200b"}`},
			{Name: "hub: name of a soft hyphen and a Mongolian vowel separator",
				Body: `{"name":"\u00ad\u180e"}`},
			{Name: "hub: name with DEL", Body: `{"name":"a\u007fb"}`},
			{Name: "hub: name with NEL", Body: `{"name":"a\u0085b"}`},
			{Name: "hub: name with U+FFFD", Body: `{"name":"a\ufffdb"}`},
		}},
	// A new hub: a description that is refused.
	{Each: bodyCase{Rule: "I3", As: "admin", Path: "/hubs", Want: invalid("description")},
		Cases: []bodyCase{
			{Name: "hub: description too long",
				Body: `{"name":"Corpus","description":"` + repeat("a", maxDescription+1) + `"}`},
			{Name: "hub: description with a vertical tab",
				Body: `{"name":"Corpus","description":"a\u000bb"}`},
			{Name: "hub: description with NUL", Body: `{"name":"Corpus","description":"a\u0000b"}`},
			{Name: "hub: description with escape sequences",
				Body: `{"name":"Corpus","description":"\u001b[31m"}`},
			{Name: "hub: description null", Body: `{"name":"Corpus","description":null}`},
		}},
	// A new hub: a status that is refused.
	{Each: bodyCase{Rule: "I3", As: "admin", Path: "/hubs", Want: invalid("status")},
		Cases: []bodyCase{
			{Name: "hub: status unknown", Body: `{"name":"Corpus","status":"deleted"}`},
			{Name: "hub: status in another case", Body: `{"name":"Corpus","status":"Active"}`},
			{Name: "hub: status after a space", Body: `{"name":"Corpus","status":" active"}`},
			{Name: "hub: status empty", Body: `{"name":"Corpus","status":""}`},
		}},
	// A new hub: members that the caller may not set.
	{Each: bodyCase{Rule: "Z3", As: "admin", Path: "/hubs",
		Want: answer{Status: 400, Code: "invalid_request", Detail: "is not known here"}},
		Cases: []bodyCase{
			{Name: "hub: an unknown list: that it is unknown comes before its type", Rule: "I3",
				Body: `{"name":"x","tags":["a"]}`, Want: invalid("tags")},
			{Name: "hub: an unknown object", Rule: "I3", Body: `{"name":"x","owner":{"id":1}}`,
				Want: invalid("owner")},
			{Name: "hub: an unknown member in a known one's letters, null and twice", Rule: "I3",
				Body: `{"name":"x","Status":null,"Status":1}`, Want: invalid("Status")},
			{Name: "hub: an unknown text that is no UTF-8", Rule: "I3",
				Body: "{\"name\":\"x\",\"note\":\"\xff\"}", Want: invalid("note")},
			{Name: "hub: a name that folds to status", Rule: "O9",
				Body: `{"name":"Corpus","\u017ftatus":"archived"}`, Want: invalid("\u017ftatus")},
			{Name: "hub: an id of one's own",
				Body: `{"name":"Corpus","hubId":"` + someID + `"}`,
				Want: invalid("hubId")},
			{Name: "hub: times of one's own",
				Body: `{"name":"Corpus","createdAt":"2020-01-01T00:00:00Z",` +
					`"updatedAt":"2020-01-01T00:00:00Z"}`,
				Want: invalid("createdAt", "updatedAt")},
			{Name: "hub: a column", Body: `{"name":"Corpus","name_lower":"x"}`,
				Want: invalid("name_lower")},
		}},
	// A new hub: members that the caller may not set, of another type or sent twice.
	{Each: bodyCase{Rule: "Z3", As: "admin", Path: "/hubs", Want: invalid()}, Cases: []bodyCase{
		{Name: "hub: several wrong, each is named", Rule: "I3",
			Body: `{"name":"","status":"x","description":1,"role":"admin"}`,
			Want: invalid("description", "name", "role", "status")},
	}},
	// A new hub: the role is checked before the input.
	{Each: bodyCase{Rule: "Z1", As: "member", Path: "/hubs", Want: fails(403, "forbidden")},
		Cases: []bodyCase{
			{Name: "hub: a member, the role comes before the input", Body: "{"},
			{Name: "hub: a member who says to be an admin", Rule: "Z3",
				Body: `{"name":"Corpus","role":"admin","permission":"admin"}`},
		}},
	// A change of a hub.
	{Each: bodyCase{Rule: "I3", As: "admin", Method: "PATCH", Path: "/hubs/<hubId>", Want: ok},
		Cases: []bodyCase{
			{Name: "change: one field", Body: `{"description":"changed"}`,
				Want: answer{Body: values{
					"name": "Corpus hub", "description": "changed", "status": "active"}}},
			{Name: "change: empty description", Body: `{"description":""}`,
				Want: answer{Body: values{
					"name": "Corpus hub", "description": "", "status": "active"}}},
		}},
	// A change that is refused.
	{Each: bodyCase{Rule: "I3", As: "admin", Method: "PATCH", Path: "/hubs/<hubId>", Want: invalid()},
		Cases: []bodyCase{
			{Name: "change: nothing", Body: "{}", Want: invalid("body")},
			{Name: "change: name null", Body: `{"name":null}`, Want: invalid("name")},
			{Name: "change: description null", Body: `{"description":null}`,
				Want: invalid("description")},
			{Name: "change: name empty", Body: `{"name":" "}`, Want: invalid("name")},
			{Name: "change: name with a tab", Body: `{"name":"a\tb"}`, Want: invalid("name")},
			{Name: "change: name too long", Body: `{"name":"` + repeat("a", maxName+1) + `"}`,
				Want: invalid("name")},
			{Name: "change: description too long",
				Body: `{"description":"` + repeat("a", maxDescription+1) + `"}`,
				Want: invalid("description")},
			{Name: "change: status unknown", Body: `{"status":"deleted"}`, Want: invalid("status")},
			{Name: "change: the id", Rule: "Z3",
				Body: `{"status":"active","hubId":"` + someID + `"}`,
				Want: invalid("hubId")},
		}},
	// A change with another content type.
	{Each: bodyCase{Rule: "I3", Want: fails(415, "unsupported_media_type")}, Cases: []bodyCase{
		{Name: "change: as a JSON Patch", As: "admin", Method: "PATCH", Path: "/hubs/<hubId>",
			Type: new("application/json-patch+json"),
			Body: `[{"op":"replace","path":"/name","value":"x"}]`},
	}},
	// A change of a hub that does not exist.
	{Each: bodyCase{Rule: "I2", Want: fails(404, "not_found")}, Cases: []bodyCase{
		{Name: "change: an id that is none", As: "admin", Method: "PATCH", Path: "/hubs/1",
			Body: `{"name":"x"}`},
	}},
	// An endpoint without input ignores the body.
	{Each: bodyCase{Rule: "I3", As: "member", Want: answer{Status: 204}}, Cases: []bodyCase{
		{Name: "logout: an endpoint without input ignores the body", Path: "/auth/logout",
			Type: new("text/plain"), Body: `{"a":`},
		{Name: "logout: an endpoint without input ignores body and query", Path: "/auth/logout?x",
			Body: `[{"`},
	}},
}
