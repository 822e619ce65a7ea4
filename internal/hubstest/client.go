package hubstest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// A Client is one browser: a cookie jar and a source address of its own.
type Client struct {
	t    testing.TB
	srv  *Server
	HTTP *http.Client
	// ip is sent as X-Forwarded-For; empty: not sent. An address of its own by
	// default, and for IPv6 that means a /64 of its own.
	IP string
}

func (s *Server) Client(t testing.TB) *Client {
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	n := serial.Add(1)
	transport := &http.Transport{DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	return &Client{
		t: t, srv: s, IP: fmt.Sprintf("2001:db8:%x:%x::1", n>>16, n&0xffff),
		HTTP: &http.Client{
			Jar:           jar,
			Transport:     proxied{transport, s.Addr},
			Timeout:       2 * Patience,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// proxied is the proxy that ends TLS in front of a deployed server: the client, and
// above all its cookie jar, sees https and the public name, the server plain HTTP.
type proxied struct {
	*http.Transport
	Addr string
}

func (p proxied) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if r.Host == "" {
		r.Host = r.URL.Host
	}
	r.URL.Scheme, r.URL.Host = "http", p.Addr
	return p.Transport.RoundTrip(r)
}

// A Response is an answer, read to its end.
type Response struct {
	Method, Path string // of the request
	Status       int    // 0: there was none
	Header       http.Header
	Body         []byte
}

func (r *Response) String() string {
	return fmt.Sprintf("%s %s: %d %v\n%s", r.Method, r.Path, r.Status, r.Header, r.Body)
}

// Do sends a request. A body that is a string or bytes is sent as it is, as JSON; an
// io.Reader too, but without a content type; anything else is encoded. headers are
// names and values in turn. Every answer is checked for what all of them must have
// (answerFault). Safe in any goroutine: a failure marks the test and yields status 0.
func (c *Client) Do(method, path string, body any, headers ...string) *Response {
	c.t.Helper()
	r, err := c.Try(method, path, body, headers...)
	if err == nil {
		err = r.answerFault()
	}
	if err != nil {
		c.t.Errorf("%s %s: %v", method, path, err)
	}
	return r
}

// Try is do for tests in which the server may go away or answer by net/http alone.
func (c *Client) Try(method, path string, body any, headers ...string) (*Response, error) {
	answer := &Response{Method: method, Path: path, Header: http.Header{}}
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
	req, err := http.NewRequest(method, c.srv.Base+path, reader)
	if err != nil {
		return answer, err
	}
	if _, raw := body.(io.Reader); body != nil && !raw {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.IP != "" {
		req.Header.Set("X-Forwarded-For", c.IP)
	}
	for pair := range slices.Chunk(headers, 2) {
		if req.Header.Set(pair[0], pair[1]); pair[0] == "Host" {
			req.Host = pair[1]
		}
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return answer, err
	}
	defer resp.Body.Close()
	answer.Status, answer.Header = resp.StatusCode, resp.Header
	answer.Body, err = io.ReadAll(resp.Body)
	return answer, err
}

// noteEmail keeps the address in a request's body for the check of the logs.
func noteEmail(body []byte) {
	var sent struct{ Email string }
	if err := json.Unmarshal(body, &sent); err != nil {
		return
	}
	email := strings.TrimSpace(sent.Email)
	if len(email) > 5 && strings.Index(email, "@") > 0 {
		usedEmails.Store(email, nil)
	}
}

// Raw sends bytes that no client library would, and returns the answer to them.
func (s *Server) Raw(t testing.TB, request string) *Response {
	t.Helper()
	conn, err := net.Dial("tcp", s.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(Patience))
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
	return &Response{Method: method, Path: path, Status: resp.StatusCode, Header: resp.Header, Body: body}
}

// Upload sends one file as a form would.
func (c *Client) Upload(name string, content []byte, headers ...string) *Response {
	c.t.Helper()
	form, contentType := Form(name, content)
	return c.Do("POST", "/files/upload", form, append(headers, "Content-Type", contentType)...)
}

// Form returns a form with one file, and its content type.
func Form(name string, content []byte) (form io.Reader, contentType string) {
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	part, err := w.CreateFormFile("file", name)
	if err != nil {
		panic(err) // a bytes.Buffer takes everything
	}
	part.Write(content)
	w.Close()
	return &body, w.FormDataContentType()
}

// SignIn goes through the whole code flow and returns the answer, a session view.
func (c *Client) SignIn(email string) *Response {
	c.t.Helper()
	c.AskCode(email)
	return c.PresentCode(email, c.srv.Code(c.t, email)).Want(c.t, 200)
}

// AcceptTerms accepts the current terms.
func (c *Client) AcceptTerms() {
	c.t.Helper()
	version := c.Do("GET", "/auth/session", nil).Want(c.t, 200).Field(c.t, "terms", "version")
	c.Do("POST", "/terms/acceptance", map[string]any{"version": version}).Want(c.t, 200)
}

// SignIn returns a new client with a session.
func (s *Server) SignIn(t testing.TB, email string) *Client {
	t.Helper()
	c := s.Client(t)
	c.SignIn(email)
	return c
}

// Member returns a client that may do all that a new user of that role ever may:
// signed in, terms accepted.
func (s *Server) Member(t testing.TB, role string) (c *Client, email string) {
	t.Helper()
	email, _ = s.NewUser(t, role)
	c = s.SignIn(t, email)
	c.AcceptTerms()
	return c, email
}

// NewUser adds a user with a new address.
func (s *Server) NewUser(t testing.TB, role string) (email, userID string) {
	t.Helper()
	email = NewEmail()
	return email, AddUser(t, s.Env["DATABASE_URL"], email, role)
}

// CookieName is the name that the session cookie must have.
func (s *Server) CookieName() string {
	prefix := s.Env["COOKIE_PREFIX"]
	if prefix == "" {
		prefix = "__Secure-hubs"
		if s.Env["APP_ENV"] == "local" {
			prefix = "hubs"
		}
	}
	return prefix + "_auth_" + s.Env["APP_ENV"]
}

// Token returns the session token in the client's jar, or "".
func (c *Client) Token() string {
	for _, cookie := range c.HTTP.Jar.Cookies(c.baseURL()) {
		if cookie.Name == c.srv.CookieName() {
			return cookie.Value
		}
	}
	return ""
}

// With returns a new client that bears a session token; "" for none.
func (s *Server) With(t testing.TB, token string) *Client {
	c := s.Client(t)
	if token != "" {
		c.SetToken(token)
	}
	return c
}

// SetToken puts a session token into the client's jar in place of the one it has.
func (c *Client) SetToken(token string) {
	c.HTTP.Jar.SetCookies(c.baseURL(), []*http.Cookie{{
		Name: c.srv.CookieName(), Value: token, Path: "/",
		Domain: c.srv.Env["COOKIE_DOMAIN"], Secure: c.srv.Env["APP_ENV"] != "local",
	}})
}

func (c *Client) baseURL() *url.URL {
	u, err := url.Parse(c.srv.Base)
	if err != nil {
		panic(err)
	}
	return u
}

// Want ends the test when the status is another.
func (r *Response) Want(t testing.TB, status int) *Response {
	t.Helper()
	if r.Status != status {
		t.Fatalf("want %d, got %v", status, r)
	}
	return r
}

// JSON returns the body, which must be one JSON object.
func (r *Response) JSON(t testing.TB) (object map[string]any) {
	t.Helper()
	if err := json.Unmarshal(r.Body, &object); err != nil {
		t.Fatalf("%v: %v", err, r)
	}
	return object
}

// Field returns a member of the body, or of an object within it.
func (r *Response) Field(t testing.TB, path ...string) any {
	t.Helper()
	var value any = r.JSON(t)
	for _, name := range path {
		object, _ := value.(map[string]any)
		var ok bool
		if value, ok = object[name]; !ok {
			t.Fatalf("no member %q in %v", path, r)
		}
	}
	return value
}

// member returns a member of the body, or nil.
func (r *Response) member(name string) any {
	var object map[string]any
	json.Unmarshal(r.Body, &object) // not every body is JSON
	return object[name]
}

// everyAnswer has the headers that all answers bear, errors and preflights included.
var everyAnswer = map[string]string{
	"Strict-Transport-Security":    "max-age=63072000; includeSubDomains",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
	"Referrer-Policy":              "no-referrer",
	"Cross-Origin-Resource-Policy": "same-site",
}

const StrictCSP = "default-src 'none'; frame-ancestors 'none'"

// answerFault says what an answer lacks that every answer of the server must have.
func (r *Response) answerFault() error {
	for name, want := range everyAnswer {
		if got := r.Header.Values(name); !slices.Equal(got, []string{want}) {
			return fmt.Errorf("%s: got %q, want %q in %v", name, got, want, r)
		}
	}
	id := r.Header.Values("X-Request-Id")
	after := r.Header.Values("Retry-After")
	mayRetry := r.Status == 429 || r.Status == 503
	switch {
	case len(id) != 1 || id[0] == "":
		return fmt.Errorf("X-Request-Id: got %q in %v", id, r)
	case !slices.Contains(r.Header.Values("Vary"), "Origin"):
		return fmt.Errorf("there is no Origin in Vary: %v", r)
	case after != nil && !mayRetry:
		return fmt.Errorf("Retry-After: got %q in %v", after, r)
	case r.Status >= 400 && r.Header.Get("Content-Type") != "application/problem+json":
		return fmt.Errorf("an error has another type in %v", r)
	case r.isJSON() && bytes.Contains(r.Body, []byte("eyJ")):
		return fmt.Errorf("a token is in the body of %v", r)
	}
	if err := errors.Join(r.policyFault(), r.contractFault()); err != nil {
		return fmt.Errorf("%w in %v", err, r)
	}
	return nil
}

// policyFault says what is wrong with what a browser may do with an answer, and a cache.
func (r *Response) policyFault() error {
	policy := strings.Join(r.Header.Values("Content-Security-Policy"), "|")
	cache := r.Header.Get("Cache-Control")
	isRead := r.Method == "GET" || r.Method == "HEAD"
	isFile := isRead && strings.HasPrefix(r.Path, "/files/") && r.Status < 400
	switch {
	case isFile && !strings.Contains(policy, "sandbox"), !isFile && policy != StrictCSP:
		return fmt.Errorf("Content-Security-Policy: got %q", policy)
	case isFile && cache != "private, no-cache", r.isJSON() && cache != "no-store":
		return fmt.Errorf("Cache-Control: got %q", cache)
	}
	return nil
}

// Fault tells what an answer lacks that it must have, whatever its status. Do and WantProblem
// fail the test for it; tests that count such faults ask here.
func (r *Response) Fault() error {
	if r.Status < 400 {
		return r.answerFault()
	}
	return r.problemFault(r.Status, r.Code(), nil)
}

// Code returns the word in an error that programs go by, or "".
func (r *Response) Code() string {
	code, _ := r.member("code").(string)
	return code
}

func (r *Response) isJSON() bool {
	kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return kind == "application/json" || kind == "application/problem+json"
}

// WantProblem checks an error in the one format that all of them have. fields are
// those that the input errors name, in any order; without any, the errors of an
// invalid_request are checked for their form only.
func WantProblem(t testing.TB, r *Response, status int, code string, fields ...string) {
	t.Helper()
	if err := r.problemFault(status, code, fields); err != nil {
		t.Errorf("want %d %s %q: %v\nin %v", status, code, fields, err, r)
	}
}

func (r *Response) problemFault(status int, code string, fields []string) error {
	if r.Status != status {
		return fmt.Errorf("status %d", r.Status)
	}
	if err := r.answerFault(); err != nil {
		return err
	}
	if err := r.companionFault(code); err != nil {
		return err
	}
	if r.Method == "HEAD" {
		return nil
	}
	var p struct {
		Title, Detail, Code, RequestID string
		Status                         int
		Errors                         []struct{ Field, Detail string }
	}
	if err := json.Unmarshal(r.Body, &p); err != nil {
		return err
	}
	named := []string{}
	for _, e := range p.Errors {
		named = append(named, e.Field)
		if e.Field == "" || e.Detail == "" {
			return fmt.Errorf("error %+v, want field and detail", e)
		}
	}
	slices.Sort(named)
	switch {
	case p.Title == "" || p.Detail == "":
		return errors.New("no title or no detail")
	case p.Status != status:
		return errors.New("another status in the body")
	case p.Code != code:
		return errors.New("another code")
	case p.RequestID != r.Header.Get("X-Request-Id"):
		return errors.New("requestId is not X-Request-Id")
	case p.Errors != nil && code != "invalid_request":
		return errors.New("errors of fields, which belong to invalid_request only")
	case len(fields) > 0 && !slices.Equal(named, slices.Sorted(slices.Values(fields))):
		return fmt.Errorf("fields %q, want %q", named, fields)
	}
	return nil
}

// companionFault checks the header that some errors must come with.
func (r *Response) companionFault(code string) error {
	switch code {
	case "rate_limited", "unavailable":
		if n, err := strconv.Atoi(r.Header.Get("Retry-After")); err != nil || n < 1 {
			return fmt.Errorf("Retry-After: %q", r.Header.Get("Retry-After"))
		}
	case "unauthenticated", "invalid_code":
		if r.Header.Get("WWW-Authenticate") != "Cookie" {
			return fmt.Errorf("WWW-Authenticate: %q", r.Header.Get("WWW-Authenticate"))
		}
	case "method_not_allowed":
		if r.Header.Get("Allow") == "" {
			return errors.New("no Allow")
		}
	}
	return nil
}

// Get is Do without a body.
func (c *Client) Get(path string, headers ...string) *Response {
	c.t.Helper()
	return c.Do("GET", path, nil, headers...)
}

// AskCode asks for a code.
func (c *Client) AskCode(email string) *Response {
	c.t.Helper()
	r := c.Do("POST", "/auth/otp/request", map[string]string{"email": email})
	return r.Want(c.t, 200)
}

// PresentCode is one attempt to sign in.
func (c *Client) PresentCode(email, code string) *Response {
	c.t.Helper()
	return c.Do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": code})
}

// OtherCode returns a wrong code, the n-th after the right one.
func OtherCode(code string, n int) string {
	value, err := strconv.Atoi(code)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf("%06d", (value+n)%1_000_000)
}
