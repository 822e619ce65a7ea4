package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A testClient is one browser: a cookie jar and a source address of its own.
type testClient struct {
	t    testing.TB
	srv  *testServer
	http *http.Client
	// ip is sent as X-Forwarded-For; empty: not sent. An address of its own by
	// default, and for IPv6 that means a /64 of its own.
	ip string
}

func (s *testServer) client(t testing.TB) *testClient {
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	n := serial.Add(1)
	transport := &http.Transport{DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	return &testClient{
		t: t, srv: s, ip: fmt.Sprintf("2001:db8:%x:%x::1", n>>16, n&0xffff),
		http: &http.Client{
			Jar:           jar,
			Transport:     proxied{transport, s.addr},
			Timeout:       2 * patience,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// proxied is the proxy that ends TLS in front of a deployed server: the client, and
// above all its cookie jar, sees https and the public name, the server plain HTTP.
type proxied struct {
	*http.Transport
	addr string
}

func (p proxied) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if r.Host == "" {
		r.Host = r.URL.Host
	}
	r.URL.Scheme, r.URL.Host = "http", p.addr
	return p.Transport.RoundTrip(r)
}

// A testResponse is an answer, read to its end.
type testResponse struct {
	method, path string // of the request
	status       int    // 0: there was none
	header       http.Header
	body         []byte
}

func (r *testResponse) String() string {
	return fmt.Sprintf("%s %s: %d %v\n%s", r.method, r.path, r.status, r.header, r.body)
}

// do sends a request. A body that is a string or bytes is sent as it is, as JSON; an
// io.Reader too, but without a content type; anything else is encoded. headers are
// names and values in turn. Every answer is checked for what all of them must have
// (answerFault). Safe in any goroutine: a failure marks the test and yields status 0.
func (c *testClient) do(method, path string, body any, headers ...string) *testResponse {
	c.t.Helper()
	r, err := c.try(method, path, body, headers...)
	if err == nil {
		err = r.answerFault()
	}
	if err != nil {
		c.t.Errorf("%s %s: %v", method, path, err)
	}
	return r
}

// try is do for tests in which the server may go away or answer by net/http alone.
func (c *testClient) try(method, path string, body any, headers ...string) (*testResponse, error) {
	answer := &testResponse{method: method, path: path, header: http.Header{}}
	var reader io.Reader
	switch b := body.(type) {
	case nil:
	case io.Reader:
		reader = b
	case string:
		noteEmail([]byte(b))
		reader = strings.NewReader(b)
	case []byte:
		noteEmail(b)
		reader = bytes.NewReader(b)
	default:
		encoded, err := json.Marshal(b)
		if err != nil {
			return answer, err
		}
		noteEmail(encoded)
		reader = bytes.NewReader(encoded)
	}
	req, err := http.NewRequest(method, c.srv.base+path, reader)
	if err != nil {
		return answer, err
	}
	if _, raw := body.(io.Reader); body != nil && !raw {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.ip != "" {
		req.Header.Set("X-Forwarded-For", c.ip)
	}
	for pair := range slices.Chunk(headers, 2) {
		if req.Header.Set(pair[0], pair[1]); pair[0] == "Host" {
			req.Host = pair[1]
		}
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return answer, err
	}
	defer resp.Body.Close()
	answer.status, answer.header = resp.StatusCode, resp.Header
	answer.body, err = io.ReadAll(resp.Body)
	return answer, err
}

// noteEmail keeps the address in a request's body for the check of the logs.
func noteEmail(body []byte) {
	var sent struct{ Email string }
	if json.Unmarshal(body, &sent) == nil && len(sent.Email) > 5 && strings.Contains(sent.Email, "@") {
		usedEmails.Store(strings.TrimSpace(sent.Email), nil)
	}
}

// raw sends bytes that no client library would, and returns the answer to them.
func (s *testServer) raw(t testing.TB, request string) *testResponse {
	t.Helper()
	conn, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	method, rest, _ := strings.Cut(request, " ")
	path, _, _ := strings.Cut(rest, " ")
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
	if err != nil {
		t.Fatalf("%q: %v", request, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%q: %v", request, err)
	}
	return &testResponse{method: method, path: path, status: resp.StatusCode, header: resp.Header, body: body}
}

// upload sends one file as a form would.
func (c *testClient) upload(name string, content []byte, headers ...string) *testResponse {
	c.t.Helper()
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	part, err := w.CreateFormFile("file", name)
	if err == nil {
		_, err = part.Write(content)
	}
	if err = errors.Join(err, w.Close()); err != nil {
		c.t.Errorf("form: %v", err)
	}
	return c.do("POST", "/files/upload", &form, append([]string{"Content-Type", w.FormDataContentType()}, headers...)...)
}

// signIn goes through the whole code flow and returns the answer, a session view.
func (c *testClient) signIn(email string) *testResponse {
	c.t.Helper()
	c.do("POST", "/auth/otp/request", map[string]string{"email": email}).want(c.t, 200)
	code := c.srv.code(c.t, email)
	return c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": code}).want(c.t, 200)
}

func (c *testClient) acceptTerms() {
	c.t.Helper()
	c.do("POST", "/terms/acceptance", map[string]string{"version": TERMS_VERSION}).want(c.t, 200)
}

// signIn returns a new client with a session.
func (s *testServer) signIn(t testing.TB, email string) *testClient {
	t.Helper()
	c := s.client(t)
	c.signIn(email)
	return c
}

// member returns a client that may do all that a new user of that role ever may:
// signed in, terms accepted.
func (s *testServer) member(t testing.TB, role string) (c *testClient, email string) {
	t.Helper()
	email = newEmail()
	testUser(t, s.env["DATABASE_URL"], email, role)
	c = s.signIn(t, email)
	c.acceptTerms()
	return c, email
}

// cookieName is the name that the session cookie must have.
func (s *testServer) cookieName() string {
	prefix := s.env["COOKIE_PREFIX"]
	if prefix == "" {
		prefix = "__Secure-hubs"
		if s.env["APP_ENV"] == "local" {
			prefix = "hubs"
		}
	}
	return prefix + "_auth_" + s.env["APP_ENV"]
}

// token returns the session token in the client's jar, or "".
func (c *testClient) token() string {
	for _, cookie := range c.http.Jar.Cookies(c.baseURL()) {
		if cookie.Name == c.srv.cookieName() {
			return cookie.Value
		}
	}
	return ""
}

// setToken puts a session token into the client's jar in place of the one it has.
func (c *testClient) setToken(token string) {
	c.http.Jar.SetCookies(c.baseURL(), []*http.Cookie{{
		Name: c.srv.cookieName(), Value: token, Path: "/",
		Domain: c.srv.env["COOKIE_DOMAIN"], Secure: c.srv.env["APP_ENV"] != "local",
	}})
}

func (c *testClient) baseURL() *url.URL {
	u, err := url.Parse(c.srv.base)
	if err != nil {
		panic(err)
	}
	return u
}

// want ends the test when the status is another.
func (r *testResponse) want(t testing.TB, status int) *testResponse {
	t.Helper()
	if r.status != status {
		t.Fatalf("want %d, got %v", status, r)
	}
	return r
}

// json returns the body, which must be one JSON object.
func (r *testResponse) json(t testing.TB) (object map[string]any) {
	t.Helper()
	if err := json.Unmarshal(r.body, &object); err != nil {
		t.Fatalf("%v: %v", err, r)
	}
	return object
}

// field returns a member of the body, or of an object within it.
func (r *testResponse) field(t testing.TB, path ...string) any {
	t.Helper()
	var value any = r.json(t)
	for _, name := range path {
		object, _ := value.(map[string]any)
		var ok bool
		if value, ok = object[name]; !ok {
			t.Fatalf("no member %q in %v", path, r)
		}
	}
	return value
}

// everyAnswer has the headers that all answers bear, errors and preflights included.
var everyAnswer = map[string]string{
	"Strict-Transport-Security":    "max-age=63072000; includeSubDomains",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
	"Referrer-Policy":              "no-referrer",
	"Cross-Origin-Resource-Policy": "same-site",
}

const strictCSP = "default-src 'none'; frame-ancestors 'none'"

// answerFault tells what an answer lacks that every answer of the server must have.
func (r *testResponse) answerFault() error {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	for _, name := range slices.Sorted(maps.Keys(everyAnswer)) {
		if got := r.header.Values(name); len(got) != 1 || got[0] != everyAnswer[name] {
			fault("%s: %q", name, got)
		}
	}
	if id := r.header.Values("X-Request-Id"); len(id) != 1 || id[0] == "" {
		fault("X-Request-Id: %q", id)
	}
	if !slices.Contains(r.header.Values("Vary"), "Origin") {
		fault("Vary: %q, want Origin", r.header.Values("Vary"))
	}
	csp, cache := r.header.Values("Content-Security-Policy"), r.header.Get("Cache-Control")
	if strings.HasPrefix(r.path, "/files/") && r.status < 400 && r.method != "POST" && r.method != "OPTIONS" {
		if len(csp) != 1 || !strings.Contains(csp[0], "sandbox") || cache != "private, no-cache" {
			fault("a file with Content-Security-Policy %q, Cache-Control %q", csp, cache)
		}
	} else if len(csp) != 1 || csp[0] != strictCSP {
		fault("Content-Security-Policy: %q", csp)
	}
	if r.isJSON() && cache != "no-store" {
		fault("JSON with Cache-Control: %q", cache)
	}
	if r.isJSON() && bytes.Contains(r.body, []byte("eyJ")) {
		fault("a token in the body")
	}
	if r.status >= 400 && r.header.Get("Content-Type") != "application/problem+json" {
		fault("an error as %q", r.header.Get("Content-Type"))
	}
	if after := r.header.Values("Retry-After"); len(after) > 0 && r.status != 429 && r.status != 503 {
		fault("Retry-After: %q", after)
	}
	if len(faults) > 0 {
		fault("in %v", r)
	}
	return errors.Join(faults...)
}

func (r *testResponse) isJSON() bool {
	kind, _, _ := mime.ParseMediaType(r.header.Get("Content-Type"))
	return kind == "application/json" || kind == "application/problem+json"
}

// wantProblem checks an error in the one format that all of them have. fields are
// those that the input errors name, in any order; without any, the errors of an
// invalid_request are checked for their form only.
func wantProblem(t testing.TB, r *testResponse, status int, code string, fields ...string) {
	t.Helper()
	if err := r.problemFault(status, code, fields); err != nil {
		t.Errorf("want %d %s %q: %v\nin %v", status, code, fields, err, r)
	}
}

func (r *testResponse) problemFault(status int, code string, fields []string) error {
	if r.status != status {
		return fmt.Errorf("status %d", r.status)
	}
	if err := r.answerFault(); err != nil {
		return err
	}
	if err := r.companionFault(code); err != nil {
		return err
	}
	if r.method == "HEAD" {
		return nil
	}
	var p struct {
		Title, Detail, Code, RequestID *string
		Status                         *int
		Errors                         []map[string]string
	}
	if err := json.Unmarshal(r.body, &p); err != nil {
		return err
	}
	var members map[string]any
	json.Unmarshal(r.body, &members)
	got := slices.Sorted(maps.Keys(members))
	want := []string{"code", "detail", "requestId", "status", "title"}
	if code == "invalid_request" && members["errors"] != nil || len(fields) > 0 {
		want = []string{"code", "detail", "errors", "requestId", "status", "title"}
	}
	switch {
	case !slices.Equal(got, want):
		return fmt.Errorf("members %q, want %q", got, want)
	case p.Title == nil || *p.Title == "" || p.Detail == nil || *p.Detail == "":
		return errors.New("no title or no detail")
	case p.Status == nil || *p.Status != status:
		return errors.New("another status in the body")
	case p.Code == nil || *p.Code != code:
		return errors.New("another code")
	case p.RequestID == nil || *p.RequestID != r.header.Get("X-Request-Id"):
		return errors.New("requestId is not X-Request-Id")
	}
	var named []string
	for _, e := range p.Errors {
		if len(e) != 2 || e["field"] == "" || e["detail"] == "" {
			return fmt.Errorf("error %q, want field and detail", e)
		}
		named = append(named, e["field"])
	}
	if len(fields) > 0 && !slices.Equal(slices.Sorted(slices.Values(named)), slices.Sorted(slices.Values(fields))) {
		return fmt.Errorf("fields %q, want %q", named, fields)
	}
	return nil
}

// companionFault checks the header that some errors must come with.
func (r *testResponse) companionFault(code string) error {
	switch code {
	case "rate_limited", "unavailable":
		if n, err := strconv.Atoi(r.header.Get("Retry-After")); err != nil || n < 1 {
			return fmt.Errorf("Retry-After: %q", r.header.Get("Retry-After"))
		}
	case "unauthenticated", "invalid_code":
		if r.header.Get("WWW-Authenticate") != "Cookie" {
			return fmt.Errorf("WWW-Authenticate: %q", r.header.Get("WWW-Authenticate"))
		}
	case "method_not_allowed":
		if r.header.Get("Allow") == "" {
			return errors.New("no Allow")
		}
	}
	return nil
}
