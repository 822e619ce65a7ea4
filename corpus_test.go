package main

// The corpus: the cases of testdata/*.json, which any implementation could run, run
// against this server. testdata/README.md says how the files are to be read. Requests
// go out byte for byte: http.Client would mend or refuse some of them.

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
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
func readCorpus[C interface{ common() corpusCase }](t *testing.T, name string) (file corpusFile[C]) {
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
	if err != nil || len(files) != len(known) || total < 100 {
		t.Errorf("%d cases in %d files, want 100 or more in %d: %v", total, len(files), len(known), err)
	}
}

// corpusCount is a case of which only the common part is looked at.
type corpusCount struct{ corpusCase }

func (c *corpusCount) UnmarshalJSON(data []byte) error { return json.Unmarshal(data, &c.corpusCase) }

// testToken is a token of the corpus before it is signed.
type testToken struct {
	Header, Payload, Algorithm, SentPayload, PaddingBits string
	Sent                                                 *string
	Cut                                                  int
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
			encoded = alterPadding(encoded)
		}
		return encoded
	}
	header := fill(cmp.Or(tok.Header, corpusHeader), "header")
	payload := fill(cmp.Or(tok.Payload, corpusPayload), "payload")
	signature := ""
	if tok.Algorithm != "none" {
		mac := hmac.New(corpusHashes[tok.Algorithm], []byte(key))
		mac.Write([]byte(header + "." + payload))
		signature = base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
	}
	if tok.PaddingBits == "signature" {
		signature = alterPadding(signature)
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

// alterPadding adds one to the last digit, whose lowest bits decode to nothing.
func alterPadding(encoded string) string {
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := len(encoded) - 1
	return encoded[:last] + digits[strings.IndexByte(digits, encoded[last])+1:][:1]
}

func TestCorpusTokens(t *testing.T) {
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
		t.Run(c.Rule+" "+c.Name, func(t *testing.T) {
			key, known := file.Keys[cmp.Or(c.Key, "first")]
			user, other := users[cmp.Or(c.User, "active")], users["other"]
			if _, hashed := corpusHashes[c.Algorithm]; !known || user == nil || !hashed && c.Algorithm != "none" {
				t.Fatal("a key, a user or an algorithm that the file has not")
			}
			token := c.sign(key, "<email>", user[0], "<userId>", user[1], "<USERID>", strings.ToUpper(user[1]),
				"<other.email>", other[0], "<other.userId>", other[1])
			r := s.wire(t, "GET", "/auth/session", nil, append(elsewhere(), "Cookie", "hubs_auth_local="+token)...)
			c.Expect.check(t, r)
			if r.status == 200 && r.field(t, "user", "userId") != user[1] {
				t.Errorf("another user: %v", r)
			}
		})
	}
}

func TestCorpusCookies(t *testing.T) {
	t.Parallel()
	file := readCorpus[struct {
		corpusCase
		Environment, Other, Target string
		Headers                    []string
	}](t, "cookies.json")
	db, email := newDatabase(t), newEmail()
	id := testUser(t, db, email, roleMember)
	servers := startEnvironments(t, file.Settings, map[string]string{"DATABASE_URL": db})
	tokenOf := func(environment string) string {
		return testToken{}.sign(servers[environment].env["SESSION_SECRET"], "<email>", email, "<userId>", id)
	}
	for _, c := range file.Cases {
		t.Run(c.Rule+" "+c.Name, func(t *testing.T) {
			pairs := []string{"<token>", tokenOf(c.Environment), "<other>", tokenOf(cmp.Or(c.Other, "production"))}
			headers := elsewhere()
			for _, text := range c.Headers {
				headers = append(headers, fillIn(text, pairs...))
			}
			target := fillIn(cmp.Or(c.Target, "/auth/session"), pairs...)
			c.Expect.check(t, servers[c.Environment].wire(t, "GET", target, nil, headers...))
		})
	}
}

// startEnvironments starts one server for each environment, with its settings.
func startEnvironments(
	t *testing.T, settings map[string]map[string]string, common ...map[string]string,
) map[string]*testServer {
	t.Helper()
	mailbox := newMailServer(t, mailOptions{})
	servers := map[string]*testServer{}
	for environment, values := range settings {
		env := map[string]string{"APP_ENV": environment}
		if environment != envLocal {
			maps.Copy(env, mailbox.env())
		}
		servers[environment] = startServer(t, append(common, env, values)...)
	}
	return servers
}

func TestCorpusOrigins(t *testing.T) {
	t.Parallel()
	file := readCorpus[struct {
		corpusCase
		Environment string
		Origin      *string
		FetchSite   string
		CORS        bool
	}](t, "origins.json")
	if len(file.CORSHeaders) == 0 || len(file.PreflightHeaders) == 0 {
		t.Fatal("no headers to compare with")
	}
	servers := startEnvironments(t, file.Settings)
	for _, c := range file.Cases {
		t.Run(c.Rule+" "+c.Name, func(t *testing.T) {
			s, headers, origin := servers[c.Environment], elsewhere(), ""
			if c.Origin != nil {
				origin = fillIn(*c.Origin, "<host>", strings.SplitN(s.base, "/", 3)[2])
				headers = append(headers, "Origin", origin)
			}
			if c.FetchSite != "" {
				headers = append(headers, "Sec-Fetch-Site", c.FetchSite)
			}
			checkCORS := func(r *testResponse) { // Vary is for answerFault to look at
				t.Helper()
				if c.CORS {
					wantHeaders(t, r, file.CORSHeaders)
					wantHeaders(t, r, map[string]*string{"Access-Control-Allow-Origin": &origin})
					return
				}
				for name := range r.header {
					if strings.HasPrefix(name, "Access-Control-") {
						t.Errorf("%s: %q, in %v", name, r.header[name], r)
					}
				}
			}
			read := s.wire(t, "GET", "/healthz", nil, headers...)
			corpusAnswer{Status: 200}.check(t, read)
			checkCORS(read)

			preflight := s.wire(t, "OPTIONS", "/hubs", nil, append(headers, "Access-Control-Request-Method", "POST")...)
			checkCORS(preflight)
			if c.CORS {
				corpusAnswer{Status: 204, Headers: file.PreflightHeaders}.check(t, preflight)
			} else if err := preflight.answerFault(); err != nil || preflight.status < 400 {
				t.Errorf("no refusal: %v, %v", preflight, err)
			}

			write := s.askCode(t, "nobody@example.com", headers...)
			c.Expect.check(t, write)
			checkCORS(write)
		})
	}
}

func TestCorpusEmails(t *testing.T) {
	t.Parallel()
	file := readCorpus[struct {
		corpusCase
		Email, Stored string
	}](t, "emails.json")
	s := startServer(t)
	for _, c := range file.Cases {
		t.Run(c.Rule+" "+c.Name, func(t *testing.T) {
			email := fillIn(c.Email)
			if c.Stored != "" {
				testUser(t, s.env["DATABASE_URL"], c.Stored, roleMember)
			}
			c.Expect.check(t, s.askCode(t, email, elsewhere()...))
			if c.Stored != "" {
				s.code(t, c.Stored)
				return
			}
			want := c.Expect
			if want.Status == 200 {
				want = corpusAnswer{Status: 401, Code: "invalid_code"}
			}
			body, _ := json.Marshal(map[string]string{"email": email, "code": "000000"})
			r := s.wire(t, "POST", "/auth/otp/validate", body, append(elsewhere(), "Content-Type", "application/json")...)
			want.check(t, r)
		})
	}
}

func TestCorpusForwarded(t *testing.T) {
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
		t.Run(c.Rule+" "+c.Name, func(t *testing.T) {
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
}

func TestCorpusQueries(t *testing.T) {
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
		t.Run(c.Rule+" "+c.Name, func(t *testing.T) {
			target := cmp.Or(c.Path, "/hubs") + "?" + fillIn(c.Query)
			c.Expect.check(t, s.wire(t, "GET", target, nil, append(elsewhere(), "Cookie", cookie)...))
		})
	}
}

func TestCorpusBodies(t *testing.T) {
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
		t.Run(c.Rule+" "+c.Name, func(t *testing.T) {
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
}
