//go:build moving

package main

// The corpus: the cases of testdata/*.json, which any implementation could run, run
// against this server. testdata/README.md says how the files are to be read. Requests
// go out byte for byte: http.Client would mend or refuse some of them. What a case can't
// say stands in Go, in the test that runs the cases.

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// corpusFile is a file of testdata; C is what its cases have besides corpusCase.
type corpusFile[C any] struct {
	About            []string                     // for people
	Settings         map[string]map[string]string // by server: its environment variables
	Keys             map[string]string            // tokens
	Hubs             []map[string]string          // queries
	CORSHeaders      map[string]*string           // origins
	PreflightHeaders map[string]*string
	Cases            []C
}

type corpusCase struct {
	Name, Rule string
	Expect     corpusAnswer
}

func (c corpusCase) common() corpusCase { return c }

type corpusAnswer struct {
	Status  int
	Code    string
	Fields  []string
	Headers map[string]*string // nil: not there
	Body    map[string]any     // by path, "user.permission"
	Items   []string           // names
}

// check is the comparison with the answer that a case expects. What is not in the
// case is not compared, but for what every answer must have.
func (want corpusAnswer) check(t *testing.T, r *testResponse) {
	t.Helper()
	if want.Status >= 400 {
		wantProblem(t, r, want.Status, want.Code)
	} else if err := r.answerFault(); err != nil || r.status != want.Status {
		t.Errorf("want %d: %v\nin %v", want.Status, err, r)
	}
	if t.Failed() {
		return
	}
	if want.Fields != nil {
		var problem struct{ Errors []fieldError }
		json.Unmarshal(r.body, &problem) // wantProblem has looked at its form
		var named []string
		for _, e := range problem.Errors {
			named = append(named, e.Field)
		}
		slices.Sort(named)
		if named = slices.Compact(named); !slices.Equal(named, slices.Sorted(slices.Values(want.Fields))) {
			t.Errorf("fields %q, want %q, in %v", named, want.Fields, r)
		}
	}
	wantHeaders(t, r, want.Headers)
	for path, value := range want.Body {
		if got := r.field(t, strings.Split(path, ".")...); got != value {
			t.Errorf("%s: %v, want %v", path, got, value)
		}
	}
	if want.Items != nil {
		var page struct{ Items []hub }
		json.Unmarshal(r.body, &page)
		names := []string{}
		for _, h := range page.Items {
			names = append(names, h.Name)
		}
		if !slices.Equal(names, want.Items) {
			t.Errorf("items %q, want %q", names, want.Items)
		}
	}
}

func wantHeaders(t *testing.T, r *testResponse, want map[string]*string) {
	t.Helper()
	for name, value := range want {
		got := r.header.Values(name)
		if value == nil && got != nil || value != nil && (len(got) != 1 || got[0] != *value) {
			t.Errorf("%s: %q, in %v", name, got, r)
		}
	}
}

var (
	corpusRule   = regexp.MustCompile(`^[A-Z][0-9]$`)
	corpusRepeat = regexp.MustCompile(`<(.)\*([0-9]+)>`)
	corpusNow    = regexp.MustCompile(`<now([+-][0-9]+)?>`)
)

// readCorpus reads a file of testdata. A member that this program does not know is an
// error, else a slip of the pen in a case would make it pass.
func readCorpus[C interface{ common() corpusCase }](t testing.TB, name string) (file corpusFile[C]) {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	decoder := json.NewDecoder(strings.NewReader(string(data)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&file); err != nil || decoder.More() {
		t.Fatalf("%s: one object that is known: %v", name, err)
	}
	seen := map[string]bool{}
	for _, c := range file.Cases {
		if c := c.common(); c.Name == "" || seen[c.Name] || !corpusRule.MatchString(c.Rule) || c.Expect.Status == 0 ||
			(c.Expect.Status >= 400) != (c.Expect.Code != "") {
			t.Errorf("%s: a case without its name, rule or answer, or a name again: %+v", name, c)
		} else {
			seen[c.Name] = true
		}
	}
	if len(file.About) == 0 || len(file.Cases) == 0 {
		t.Errorf("%s: nothing said, or no case", name)
	}
	return file
}

// fillIn gives the words in angle brackets their meaning: pairs are words and values.
func fillIn(text string, pairs ...string) string {
	text = corpusRepeat.ReplaceAllStringFunc(text, func(s string) string {
		part := corpusRepeat.FindStringSubmatch(s)
		n, _ := strconv.Atoi(part[2])
		return strings.Repeat(part[1], n)
	})
	return strings.NewReplacer(pairs...).Replace(text)
}

// wire sends a request as it is written, headers being names and values in turn.
func (s *testServer) wire(t *testing.T, method, target string, body []byte, headers ...string) *testResponse {
	t.Helper()
	var request strings.Builder
	fmt.Fprintf(&request, "%s %s HTTP/1.1\r\nHost: %s\r\n", method, target, strings.SplitN(s.base, "/", 3)[2])
	for pair := range slices.Chunk(headers, 2) {
		fmt.Fprintf(&request, "%s: %s\r\n", pair[0], pair[1])
	}
	if body != nil {
		fmt.Fprintf(&request, "Content-Length: %d\r\n", len(body))
	}
	request.WriteString("\r\n")
	request.Write(body)
	return s.raw(t, request.String())
}

// elsewhere is the header of a client whose address nobody else has.
func elsewhere() []string {
	return []string{"X-Forwarded-For", fmt.Sprintf("2001:db8:c0:%x::1", serial.Add(1))}
}

// askCode asks for a code. Only what is an address is for checkLog to look for.
func (s *testServer) askCode(t *testing.T, email string, headers ...string) *testResponse {
	t.Helper()
	body, _ := json.Marshal(map[string]string{"email": email})
	r := s.wire(t, "POST", "/auth/otp/request", body, append(headers, "Content-Type", "application/json")...)
	if r.status == 200 {
		noteEmail(body)
	}
	return r
}

// TestCorpusIsWhole counts: each file must be run by a test here, and have its cases.
func TestCorpusIsWhole(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.json")
	known := []string{"bodies", "cookies", "emails", "forwarded", "origins", "queries", "tokens"}
	total := 0
	for i, file := range files {
		if name := filepath.Base(file); i >= len(known) || name != known[i]+".json" {
			t.Errorf("%s is run by no test, or one before it is missing", name)
		} else {
			total += len(readCorpus[corpusCount](t, name).Cases)
		}
	}
	if err != nil || len(files) != len(known) || total < 600 {
		t.Errorf("%d cases in %d files, want 600 or more in %d: %v", total, len(files), len(known), err)
	}
}

// corpusCount is a case of which only the common part is looked at.
type corpusCount struct{ corpusCase }

func (c *corpusCount) UnmarshalJSON(data []byte) error { return json.Unmarshal(data, &c.corpusCase) }

// testToken is a token of the corpus before it is signed.
type testToken struct {
	Header, Algorithm, SentPayload, PaddingBits string
	Payload, Sent                               *string
	Cut, Bits                                   int
}

const (
	corpusHeader  = `{"alg":"HS256","typ":"JWT"}`
	corpusPayload = `{"email":"<email>","userId":"<userId>","iat":<now>,"exp":<now+3600>}`
)

var corpusHashes = map[string]func() hash.Hash{
	"": sha256.New, "HS256": sha256.New, "HS384": sha512.New384, "HS512": sha512.New,
}

// sign makes the token by hand: the library that the server verifies with is not asked.
func (tok testToken) sign(key string, pairs ...string) string {
	now := time.Now().Unix()
	fill := func(text, name string) string {
		text = corpusNow.ReplaceAllStringFunc(fillIn(text, pairs...), func(s string) string {
			offset, _ := strconv.ParseInt(corpusNow.FindStringSubmatch(s)[1], 10, 64) // none: 0
			return fmt.Sprint(now + offset)
		})
		altered := name != "" && tok.PaddingBits == name
		for altered && len(text)%3 == 0 {
			text += " "
		}
		encoded := base64.RawURLEncoding.EncodeToString([]byte(text))
		if altered {
			encoded = tok.alterPadding(encoded)
		}
		return encoded
	}
	header := fill(cmp.Or(tok.Header, corpusHeader), "header")
	claims := corpusPayload
	if tok.Payload != nil {
		claims = *tok.Payload
	}
	payload := fill(claims, "payload")
	signature := ""
	if tok.Algorithm != "none" {
		mac := hmac.New(corpusHashes[tok.Algorithm], []byte(key))
		mac.Write([]byte(header + "." + payload))
		signature = base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
	}
	if tok.PaddingBits == "signature" {
		signature = tok.alterPadding(signature)
	}
	if tok.SentPayload != "" {
		payload = fill(tok.SentPayload, "")
	}
	sent := "<header>.<payload>.<signature>"
	if tok.Sent != nil {
		sent = *tok.Sent
	}
	sent = fillIn(sent, append(pairs, "<header>", header, "<payload>", payload, "<signature>", signature)...)
	return sent[:len(sent)-tok.Cut]
}

// alterPadding adds to the last digit, whose lowest bits decode to nothing.
func (tok testToken) alterPadding(encoded string) string {
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := len(encoded) - 1
	return encoded[:last] + digits[strings.IndexByte(digits, encoded[last])+cmp.Or(tok.Bits, 1):][:1]
}

// T1, T2, T4, T5: what is not exactly a token of this server, of now, is none.
func TestForgedTokens(t *testing.T) {
	t.Parallel()
	file := readCorpus[struct {
		corpusCase
		testToken
		User, Key string
	}](t, "tokens.json")
	s := startServer(t, map[string]string{"SESSION_SECRET": file.Keys["first"] + "," + file.Keys["second"]})
	db := s.env["DATABASE_URL"]
	users := map[string][]string{} // by name: e-mail and id
	for _, name := range []string{"active", "other", "suspended", "signedOut"} {
		email := newEmail()
		users[name] = []string{email, testUser(t, db, email, roleMember)}
	}
	execSQL(t, db, "update users set suspended = true where email = $1", users["suspended"][0])
	execSQL(t, db, "update users set signed_out_at = now() - interval '100 s' where email = $1", users["signedOut"][0])
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			key, known := file.Keys[cmp.Or(c.Key, "first")]
			user, other := users[cmp.Or(c.User, "active")], users["other"]
			if _, hashed := corpusHashes[c.Algorithm]; !known || user == nil || !hashed && c.Algorithm != "none" {
				t.Fatal("a key, a user or an algorithm that the file has not")
			}
			token := c.sign(key, "<email>", user[0], "<userId>", user[1], "<EMAIL>", strings.ToUpper(user[0]),
				"<USERID>", strings.ToUpper(user[1]), "<other.email>", other[0], "<other.userId>", other[1])
			r := s.wire(t, "GET", "/auth/session", nil, append(elsewhere(), "Cookie", "hubs_auth_local="+token)...)
			c.Expect.check(t, r)
			if r.status == 200 && r.field(t, "user", "userId") != user[1] {
				t.Errorf("another user: %v", r)
			}
		})
	}
	t.Run("as issued", func(t *testing.T) {
		issued := s.signIn(t, users["active"][0]).token()
		r := s.wire(t, "GET", "/auth/session", nil, append(elsewhere(), "Cookie", "hubs_auth_local="+issued)...)
		corpusAnswer{Status: 200, Body: map[string]any{"user.userId": users["active"][1]}}.check(t, r)
	})
}

// T6, T8: a session is in the one cookie of its environment, and nowhere else.
func TestCookieName(t *testing.T) {
	t.Parallel()
	file := readCorpus[struct {
		corpusCase
		Server, Other, Target string
		Headers               []string
	}](t, "cookies.json")
	db, email := newDatabase(t), newEmail()
	id := testUser(t, db, email, roleMember)
	servers := startEnvironments(t, file.Settings, map[string]string{"DATABASE_URL": db})
	tokenOf := func(server string) string {
		return testToken{}.sign(servers[server].env["SESSION_SECRET"], "<email>", email, "<userId>", id)
	}
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			pairs := []string{"<token>", tokenOf(c.Server), "<other>", tokenOf(cmp.Or(c.Other, "production"))}
			headers := elsewhere()
			for _, text := range c.Headers {
				headers = append(headers, fillIn(text, pairs...))
			}
			target := fillIn(cmp.Or(c.Target, "/auth/session"), pairs...)
			c.Expect.check(t, servers[c.Server].wire(t, "GET", target, nil, headers...))
		})
	}
}

// startEnvironments starts one server for each of settings. Its name is its environment,
// unless the settings have one.
func startEnvironments(
	t *testing.T, settings map[string]map[string]string, common ...map[string]string,
) map[string]*testServer {
	t.Helper()
	mailbox := newMailServer(t, mailOptions{})
	servers := map[string]*testServer{}
	for name, values := range settings {
		env := map[string]string{"APP_ENV": cmp.Or(values["APP_ENV"], name)}
		if env["APP_ENV"] != envLocal {
			maps.Copy(env, mailbox.env())
		}
		servers[name] = startServer(t, slices.Concat(common, []map[string]string{env, values})...)
	}
	return servers
}

// C1, C2: exactly the allowed origins, on each server.
func TestCORS(t *testing.T) {
	t.Parallel()
	type originCase struct {
		corpusCase
		Server    string
		Origin    *string
		FetchSite string
		CORS      bool
	}
	file := readCorpus[originCase](t, "origins.json")
	if len(file.CORSHeaders) == 0 || len(file.PreflightHeaders) == 0 {
		t.Fatal("no headers to compare with")
	}
	for _, c := range file.Cases {
		if c.Server != "" && file.Settings[c.Server] == nil {
			t.Errorf("%s: no server %q", c.Name, c.Server)
		}
	}
	for name, s := range startEnvironments(t, file.Settings) {
		t.Run(name, func(t *testing.T) {
			for _, c := range file.Cases {
				if c.Server != "" && c.Server != name {
					continue
				}
				t.Run(c.Name, func(t *testing.T) {
					var headers []string
					origin := ""
					if c.Origin != nil {
						origin = fillIn(*c.Origin, "<host>", strings.SplitN(s.base, "/", 3)[2])
						headers = append(headers, "Origin", origin)
					}
					if c.FetchSite != "" {
						headers = append(headers, "Sec-Fetch-Site", c.FetchSite)
					}
					cors := map[string]*string{"Access-Control-Allow-Origin": &origin}
					maps.Copy(cors, file.CORSHeaders)
					if !c.CORS {
						cors = nil
					}
					checkOrigin(t, s, headers, cors, file.PreflightHeaders, c.Expect)
				})
			}
		})
	}
}

// checkOrigin sends the requests of a case. cors are the headers that let the origin's pages
// read the answers; nil: they may not.
func checkOrigin(
	t *testing.T, s *testServer, headers []string, cors, preflightHeaders map[string]*string, write corpusAnswer,
) {
	t.Helper()
	notAllowed := corpusAnswer{Status: 405, Code: "method_not_allowed"}
	from := elsewhere()
	send := func(want corpusAnswer, method, path string, more ...string) {
		t.Helper()
		r := s.wire(t, method, path, nil, slices.Concat(from, headers, more)...)
		want.check(t, r) // looks at Vary, too
		checkCORS(t, r, cors)
	}
	send(corpusAnswer{Status: 200}, "GET", "/healthz")
	send(corpusAnswer{Status: 200}, "GET", "/openapi.json")
	send(corpusAnswer{Status: 404, Code: "not_found"}, "GET", "/nowhere")

	preflight := notAllowed
	if cors != nil {
		preflight = corpusAnswer{Status: 204, Headers: preflightHeaders}
	}
	send(preflight, "OPTIONS", "/hubs", "Access-Control-Request-Method", "POST")
	send(preflight, "OPTIONS", "/hubs/x", "Access-Control-Request-Method", "PATCH",
		"Access-Control-Request-Headers", "content-type,x-request-id")
	send(notAllowed, "OPTIONS", "/hubs/x")

	r := s.askCode(t, "nobody@example.com", slices.Concat(from, headers)...)
	write.check(t, r)
	checkCORS(t, r, cors)
}

// checkCORS checks that an answer has these headers of CORS; nil: none at all.
func checkCORS(t *testing.T, r *testResponse, want map[string]*string) {
	t.Helper()
	wantHeaders(t, r, want)
	for name := range r.header {
		if want == nil && strings.HasPrefix(name, "Access-Control-") {
			t.Errorf("%s: %q, in %v", name, r.header[name], r)
		}
	}
}

// emailCase is a case of emails.json.
type emailCase struct {
	corpusCase
	Email, Stored string
}

// I4, O9, and the form of an address: what is taken, as what, and what is refused.
func TestEmailForms(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	for _, c := range readCorpus[emailCase](t, "emails.json").Cases {
		t.Run(c.Name, func(t *testing.T) {
			email := fillIn(c.Email)
			if c.Stored != "" {
				testUser(t, s.env["DATABASE_URL"], c.Stored, roleMember)
			}
			c.Expect.check(t, s.askCode(t, email, elsewhere()...))
			if c.Stored != "" {
				s.code(t, c.Stored)
			} else {
				want := c.Expect
				if want.Status == 200 {
					want = corpusAnswer{Status: 401, Code: "invalid_code"}
				}
				body, _ := json.Marshal(map[string]string{"email": email, "code": "000000"})
				r := s.wire(t, "POST", "/auth/otp/validate", body, append(elsewhere(), "Content-Type", "application/json")...)
				want.check(t, r)
			}

			// The address that goes on the queue, which no client sees.
			want := plainEmail(email)
			if (want != "") != (c.Expect.Status == 200) || c.Stored != "" && want != strings.ToLower(c.Stored) {
				t.Errorf("plainEmail(%q) = %q, want %q and status %d", email, want, c.Stored, c.Expect.Status)
			}
			synctest.Test(t, func(t *testing.T) {
				office := newOffice(t)
				r := call(t, office, one(0), "POST", "/auth/otp/request", jsonOf("email", email))
				if got := queued(office); got != want {
					t.Errorf("got %q on the queue, want %q", got, want)
				}
				if want == "" {
					wantProblem(t, r, 400, "invalid_request", "email")
				}
			})
		})
	}
}

// L2: from the right, past trusted proxies, to the first address that is none.
func TestClientAddress(t *testing.T) {
	t.Parallel()
	file := readCorpus[struct {
		corpusCase
		Server, Client          string
		Headers                 []string
		SharesWith, DiffersFrom []string
	}](t, "forwarded.json")
	mailbox := newMailServer(t, mailOptions{})
	servers := map[string]*testServer{}
	for name, settings := range file.Settings {
		servers[name] = startServer(t, stagingEnv(mailbox), settings)
	}
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			s, email, id := servers[c.Server], newEmail(), fmt.Sprintf("chain-%d", serial.Add(1))
			for range 5 {
				c.Expect.check(t, s.askCode(t, email, append(c.Headers, "X-Request-Id", id)...))
			}
			var line struct{ Client string }
			json.Unmarshal([]byte(s.log.waitFor(t, `"msg":"request"`, `"requestId":"`+id+`"`)), &line)
			if line.Client != c.Client {
				t.Errorf("client %q in the log, want %q", line.Client, c.Client)
			}
			if c.SharesWith == nil {
				c.SharesWith = []string{c.Client}
			}
			if c.DiffersFrom == nil {
				c.DiffersFrom = []string{"198.51.100.99"}
			}
			for _, chain := range c.SharesWith {
				wantProblem(t, s.askCode(t, email, "X-Forwarded-For", chain), 429, "rate_limited")
			}
			for _, chain := range c.DiffersFrom {
				corpusAnswer{Status: 200}.check(t, s.askCode(t, email, "X-Forwarded-For", chain))
			}
		})
	}

	// Peers that the cases can't have.
	trusted := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8:ffff::/48")}
	for _, c := range []struct {
		peer, forwarded, want string // forwarded "": no header
	}{
		{"192.0.2.1:80", "", "192.0.2.1"},
		{"192.0.2.1:80", "203.0.113.1", "192.0.2.1"},
		{"[::ffff:192.0.2.1]:80", "", "192.0.2.1"},
		{"[fe80::1%eth0]:80", "", "fe80::1"},
		{"10.0.0.1:80", "", "10.0.0.1"},
		{"[::ffff:10.0.0.1]:80", "203.0.113.1", "203.0.113.1"},
		{"10.0.0.1:80", "203.0.113.1:4711, 10.0.0.9:80, [2001:db8:ffff::1]:443", "203.0.113.1"},
	} {
		t.Run(c.peer+" "+c.forwarded, func(t *testing.T) {
			r := &http.Request{RemoteAddr: c.peer, Header: http.Header{}}
			if c.forwarded != "" {
				r.Header.Set("X-Forwarded-For", c.forwarded)
			}
			if got := clientAddress(r, trusted).String(); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

// I1, I2: every parameter has its allow-list or its bounds, and stands there once.
func TestHubListRefusesBadParameters(t *testing.T) {
	t.Parallel()
	file := readCorpus[struct {
		corpusCase
		Path, Query string
	}](t, "queries.json")
	s := startServer(t)
	admin, _ := s.member(t, roleAdmin)
	member, _ := s.member(t, roleMember)
	for _, hub := range file.Hubs {
		admin.do("POST", "/hubs", hub).want(t, 201)
	}
	cookie := s.cookieName() + "=" + member.token()
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			target := cmp.Or(c.Path, "/hubs") + "?" + fillIn(c.Query)
			c.Expect.check(t, s.wire(t, "GET", target, nil, append(elsewhere(), "Cookie", cookie)...))
		})
	}
}

// I3, Z3: one flat JSON object, each member known, there once, a whole text.
func TestStrictJSON(t *testing.T) {
	t.Parallel()
	file := readCorpus[struct {
		corpusCase
		As, Method, Path, Body string
		Type                   *string
		Headers                []string
		Base64                 []byte // encoding/json decodes it
	}](t, "bodies.json")
	s := startServer(t)
	admin, _ := s.member(t, roleAdmin)
	member, _ := s.member(t, roleMember)
	cookies := map[string]string{"admin": admin.token(), "member": member.token()}
	hub := admin.do("POST", "/hubs", map[string]string{"name": "Corpus hub"}).want(t, 201).field(t, "hubId").(string)
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			pairs := []string{"<hubId>", hub, "<terms>", TERMS_VERSION}
			body := c.Base64
			if body == nil {
				body = []byte(fillIn(c.Body, pairs...))
			}
			headers, contentType := append(elsewhere(), c.Headers...), "application/json"
			if c.Type != nil {
				contentType = *c.Type
			}
			if contentType != "" {
				headers = append(headers, "Content-Type", contentType)
			}
			if c.As != "" {
				headers = append(headers, "Cookie", s.cookieName()+"="+cookies[c.As])
			}
			for path, value := range c.Expect.Body {
				if text, ok := value.(string); ok {
					c.Expect.Body[path] = fillIn(text, pairs...)
				}
			}
			target := fillIn(cmp.Or(c.Path, "/auth/otp/request"), pairs...)
			c.Expect.check(t, s.wire(t, cmp.Or(c.Method, "POST"), target, body, headers...))
		})
	}
	created := 1 // above
	for _, c := range file.Cases {
		if c.Expect.Status == 201 {
			created++
		}
	}
	if n := queryValue[int](t, s.env["DATABASE_URL"], "select count(*) from hubs"); n != created {
		t.Errorf("%d hubs, want %d: one for each 201", n, created)
	}
	// 16 KiB is taken, one byte more is not, also if the client does not say so first.
	full := `{"name":"a"` + strings.Repeat(" ", 16<<10-12) + `}`
	for more, status := range map[string]int{"": 201, " ": 413} {
		chunked := io.MultiReader(strings.NewReader(full), strings.NewReader(more))
		r := admin.elsewhere().do("POST", "/hubs", chunked, "Content-Type", "application/json")
		if status == 413 {
			wantProblem(t, r, 413, "too_large")
		} else {
			r.want(t, status)
		}
	}
}
