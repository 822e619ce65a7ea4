package hubstest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A Client is one browser: a cookie jar and a source address of its own.
type Client struct {
	t    testing.TB // what its failures fail; a subtest uses the client that In returns
	srv  *Server
	HTTP *http.Client
	// IP is sent as X-Forwarded-For; empty: not sent. It is an address of the client's own.
	IP string
}

// Client returns a new client, with nobody signed in.
func (s *Server) Client(t testing.TB) *Client {
	jar, _ := cookiejar.New(nil) // without options there is no error
	transport := &http.Transport{DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	noRedirect := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Client{
		t:   t,
		srv: s,
		IP:  NewIP(),
		HTTP: &http.Client{
			Jar:           jar,
			Transport:     proxied{transport, s.Addr},
			Timeout:       2 * Patience,
			CheckRedirect: noRedirect,
		},
	}
}

// NewIP returns a client address that nobody else has, so that the rate limits of one case
// don't meet those of the next.
func NewIP() string {
	n := serial.Add(1)
	return fmt.Sprintf("2001:db8:%x:%x::1", n>>16, n&0xffff)
}

// In returns the client for a subtest: its failures fail t.
func (c *Client) In(t testing.TB) *Client {
	inner := *c
	inner.t = t
	return &inner
}

// Elsewhere returns the client at another address, with the same cookies.
func (c *Client) Elsewhere() *Client {
	moved := *c
	moved.IP = NewIP()
	return &moved
}

// proxied is the proxy that ends TLS in front of a deployed server: the client, and
// above all its cookie jar, sees https and the public name, the server plain HTTP.
type proxied struct {
	*http.Transport
	addr string
}

func (p proxied) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Host = cmp.Or(r.Host, r.URL.Host)
	r.URL.Scheme = "http"
	r.URL.Host = p.addr
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

// Do sends a request. A body that is a string is sent as it is, as JSON; an
// io.Reader too, but without a content type; anything else is encoded. headers are
// names and values in turn. Every answer is checked for what all of them must have
// (Fault). Safe in any goroutine: a failure marks the test and yields status 0.
func (c *Client) Do(method, path string, body any, headers ...string) *Response {
	c.t.Helper()
	r, err := c.Try(method, path, body, headers...)
	if err == nil {
		err = r.Fault()
	}
	if err != nil {
		c.t.Errorf("%s %s: %v", method, path, err)
	}
	return r
}

// Try is Do for tests in which the server may go away or answer by net/http alone.
func (c *Client) Try(method, path string, body any, headers ...string) (*Response, error) {
	answer := &Response{Method: method, Path: path, Header: http.Header{}}
	reader, isRaw := body.(io.Reader)
	isJSON := body != nil && !isRaw
	if isJSON {
		text, err := encode(body)
		if err != nil {
			return answer, err
		}
		noteEmail(text)
		reader = bytes.NewReader(text)
	}
	req, err := http.NewRequest(method, c.srv.Base+path, reader)
	if err != nil {
		return answer, err
	}
	if isJSON {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.IP != "" {
		req.Header.Set("X-Forwarded-For", c.IP)
	}
	for pair := range slices.Chunk(headers, 2) {
		req.Header.Set(pair[0], pair[1])
	}
	req.Host = req.Header.Get("Host")
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return answer, err
	}
	return answer, answer.read(resp)
}

func encode(body any) ([]byte, error) {
	if text, isText := body.(string); isText {
		return []byte(text), nil
	}
	return json.Marshal(body)
}

// read takes what net/http has received, and the rest of the body.
func (r *Response) read(resp *http.Response) (err error) {
	defer resp.Body.Close()
	r.Status = resp.StatusCode
	r.Header = resp.Header
	r.Body, err = io.ReadAll(resp.Body)
	return err
}

// noteEmail keeps the address in a request's body for the check of the logs.
func noteEmail(body []byte) {
	var sent struct{ Email string }
	json.Unmarshal(body, &sent) // not every body is JSON
	email := strings.ToLower(strings.TrimSpace(sent.Email))
	if len(email) > 5 && strings.Index(email, "@") > 0 {
		usedEmails.Store(email, nil)
	}
}

// Upload sends one file as a form would.
func (c *Client) Upload(name string, content []byte) *Response {
	c.t.Helper()
	form, contentType := Form(name, content)
	return c.Do("POST", "/files/upload", form, "Content-Type", contentType)
}

// Form returns a form with one file, and its content type.
func Form(name string, content []byte) (form io.Reader, contentType string) {
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	part, _ := w.CreateFormFile("file", name) // a bytes.Buffer takes everything
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
	version := c.Get("/auth/session").Want(c.t, 200).Field(c.t, "terms", "version")
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
	email = NewEmail()
	return email, AddUser(t, s.Database, email, role)
}

// CookieName is the name that the session cookie must have.
func (s *Server) CookieName() string {
	prefix := "__Secure-hubs"
	if s.Env["APP_ENV"] == "local" {
		prefix = "hubs"
	}
	return cmp.Or(s.Env["COOKIE_PREFIX"], prefix) + "_auth_" + s.Env["APP_ENV"]
}

// Token returns the session token in the client's jar, or "".
func (c *Client) Token() string {
	for _, cookie := range c.HTTP.Jar.Cookies(c.srv.url()) {
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
	c.HTTP.Jar.SetCookies(c.srv.url(), []*http.Cookie{{
		Name:   c.srv.CookieName(),
		Value:  token,
		Path:   "/",
		Domain: c.srv.Env["COOKIE_DOMAIN"],
		Secure: c.srv.Env["APP_ENV"] != "local",
	}})
}

func (s *Server) url() *url.URL {
	u, _ := url.Parse(s.Base) // it is one
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
	value := within(r.JSON(t), path...)
	if value == nil {
		t.Fatalf("no member %q in %v", path, r)
	}
	return value
}

// member returns a text of the body, or "".
func (r *Response) member(name string) string {
	var object map[string]any
	json.Unmarshal(r.Body, &object) // not every body is JSON
	value, _ := object[name].(string)
	return value
}

// Code returns the word in an error that programs go by, or "".
func (r *Response) Code() string { return r.member("code") }

func (r *Response) isJSON() bool {
	kind := r.Header.Get("Content-Type")
	return kind == "application/json" || kind == "application/problem+json"
}

// StrictCSP is the policy of all answers but files and the page.
const StrictCSP = "default-src 'none'; frame-ancestors 'none'"

// wantedHeaders are those that an answer must have, each once, and what its value matches.
func (r *Response) wantedHeaders() map[string]string {
	wanted := map[string]string{
		"Strict-Transport-Security":    "^max-age=63072000; includeSubDomains$",
		"X-Content-Type-Options":       "^nosniff$",
		"X-Frame-Options":              "^DENY$",
		"Referrer-Policy":              "^no-referrer$",
		"Cross-Origin-Resource-Policy": "^same-site$",
		"Content-Security-Policy":      "^" + StrictCSP + "$",
		"X-Request-Id":                 ".",
	}
	if r.isJSON() {
		wanted["Cache-Control"] = "^no-store$"
	}
	isRead := r.Method == "GET" || r.Method == "HEAD"
	if isRead && strings.HasPrefix(r.Path, "/files/") && r.Status < 400 {
		wanted["Content-Security-Policy"] = "sandbox"
		wanted["Cache-Control"] = "^private, no-cache$"
	}
	if r.Status >= 400 {
		wanted["Content-Type"] = `^application/problem\+json$`
	}
	switch r.Status {
	case 401:
		wanted["WWW-Authenticate"] = "^Cookie$"
	case 405:
		wanted["Allow"] = "."
	case 429, 503:
		wanted["Retry-After"] = "^[1-9][0-9]*$"
	}
	return wanted
}

// Fault says what an answer lacks that every answer of the server must have. Do and WantProblem
// fail the test for it; tests that count such faults ask here.
func (r *Response) Fault() error {
	faults := []error{r.contractFault(), r.problemFault()}
	wanted := r.wantedHeaders()
	for name, pattern := range wanted {
		got := r.Header.Values(name)
		if len(got) != 1 || !regexp.MustCompile(pattern).MatchString(got[0]) {
			faults = append(faults, fmt.Errorf("%s: got %q, want %s", name, got, pattern))
		}
	}
	if after := r.Header.Get("Retry-After"); after != "" && wanted["Retry-After"] == "" {
		faults = append(faults, fmt.Errorf("Retry-After: got %q", after))
	}
	if !slices.Contains(r.Header.Values("Vary"), "Origin") {
		faults = append(faults, errors.New("there is no Origin in Vary"))
	}
	if r.isJSON() && bytes.Contains(r.Body, []byte("eyJ")) {
		faults = append(faults, errors.New("a token is in the body"))
	}
	if err := errors.Join(faults...); err != nil {
		return fmt.Errorf("%w\nin %v", err, r)
	}
	return nil
}

// A problem is the body of an error.
type problem struct {
	Title, Detail, Code, RequestID string
	Status                         int
	Errors                         []struct{ Field, Detail string }
}

func (r *Response) problem() (p problem) {
	json.Unmarshal(r.Body, &p) // what is missing then is a fault
	return p
}

// Fields returns the fields that the errors of a problem name.
func (r *Response) Fields() (names []string) {
	for _, e := range r.problem().Errors {
		names = append(names, e.Field)
	}
	return names
}

// problemFault says what is wrong with an error, in the one format that all errors have.
func (r *Response) problemFault() error {
	if r.Status < 400 || r.Method == "HEAD" {
		return nil
	}
	p := r.problem()
	for _, e := range p.Errors {
		if e.Field == "" || e.Detail == "" {
			return fmt.Errorf("error %+v, want field and detail", e)
		}
	}
	switch {
	case p.Title == "" || p.Detail == "":
		return errors.New("no title or no detail")
	case p.Status != r.Status:
		return errors.New("another status in the body")
	case p.RequestID != r.Header.Get("X-Request-Id"):
		return errors.New("requestId is not X-Request-Id")
	case p.Errors != nil && p.Code != "invalid_request":
		return errors.New("errors of fields, which belong to invalid_request only")
	}
	return nil
}

// WantProblem checks an error. fields are those that the input errors name, in any order;
// without any, the errors of an invalid_request are checked for their form only.
func WantProblem(t testing.TB, r *Response, status int, code string, fields ...string) {
	t.Helper()
	hasCode := r.Code() == code || r.Method == "HEAD"
	if r.Status != status || !hasCode {
		t.Errorf("want %d %s, got %v", status, code, r)
		return
	}
	if err := r.Fault(); err != nil {
		t.Error(err)
	}
	got := r.Fields()
	slices.Sort(got)
	slices.Sort(fields)
	if len(fields) > 0 && !slices.Equal(slices.Compact(got), fields) {
		t.Errorf("want the fields %q, got %v", fields, r)
	}
}

// Send is Do for a request such as "GET /hubs".
func (c *Client) Send(request string, body any, headers ...string) *Response {
	c.t.Helper()
	method, path, _ := strings.Cut(request, " ")
	return c.Do(method, path, body, headers...)
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
	value, _ := strconv.Atoi(code)
	return fmt.Sprintf("%06d", (value+n)%1_000_000)
}
