package hubstest

import (
	"bytes"
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// A Client behaves like one browser. It has its own cookie jar and its own address.
type Client struct {
	t    testing.TB // the test that fails with the client; for a subtest, see In
	srv  *Server
	HTTP *http.Client
	// IP is the client's address, sent as X-Forwarded-For. If it is empty, no header is sent.
	IP string
}

// Client returns a new client without a session.
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
			Transport:     tlsTerminator{transport, s},
			Timeout:       2 * Patience,
			CheckRedirect: noRedirect,
		},
	}
}

// NewIP returns a client address that no other client has, so that the requests of one case do not
// count toward the rate limits of another.
func NewIP() string {
	n := serial.Add(1)
	return fmt.Sprintf("2001:db8:%x:%x::1", n>>16, n&0xffff)
}

// In returns a copy of the client for a subtest: failures of the copy fail t.
func (c *Client) In(t testing.TB) *Client {
	inner := *c
	inner.t = t
	return &inner
}

// Elsewhere returns a copy of the client with a new address and the same cookie jar.
func (c *Client) Elsewhere() *Client {
	moved := *c
	moved.IP = NewIP()
	return &moved
}

// tlsTerminator plays the proxy that ends TLS in front of a deployed server. The client and its
// cookie jar see https and the public name. The server gets plain HTTP.
type tlsTerminator struct {
	*http.Transport
	srv *Server
}

// RoundTrip sends the request to the server as the proxy does: with its Host, but without TLS. The
// cookies of the server's world stand around that of the session.
func (p tlsTerminator) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Host = cmp.Or(r.Host, r.URL.Host)
	r.URL.Scheme = "http"
	r.URL.Host = p.srv.Addr
	if own := r.Header.Get("Cookie"); own != "" && p.srv.world != nil {
		r.Header.Set("Cookie", p.srv.world.around(own))
	}
	return p.Transport.RoundTrip(r)
}

// A Response is an answer whose body has been read to its end.
type Response struct {
	Method, Path string // of the request
	Status       int    // 0: no answer came
	Header       http.Header
	Body         []byte
	Closes       bool // the server announces that it closes the connection

	sent     http.Header // of the request
	sentBody string      // of the request; "" if the test streams it
}

// String describes the request and the answer, for messages. A long body is cut.
func (r *Response) String() string {
	return fmt.Sprintf("%s %s: %d\n%.500s", r.Method, r.Path, r.Status, r.Body)
}

// Do sends a request such as "GET /hubs", and checks the answer for the rules that every answer
// must keep (Fault).
//
// A body that is a string is sent unchanged, as JSON. A body that is an io.Reader is sent
// unchanged, without a Content-Type. Any other body is encoded as JSON. headers are names and
// values in turn.
//
// Do may be called from any goroutine, because a failure marks the test as failed but does not end
// it. If no answer comes, the status is 0.
func (c *Client) Do(request string, body any, headers ...string) *Response {
	c.t.Helper()
	r, err := c.Try(request, body, headers...)
	if err != nil {
		c.t.Errorf("side effect: %s: %v", request, err)
		return r
	}
	r.check(c.t)
	return r
}

// check fails the test if the answer breaks a rule that every answer must keep (Fault).
func (r *Response) check(t testing.TB) {
	t.Helper()
	if err := r.Fault(); err != nil {
		complain(t, "%v", err)
	}
}

// Try is like Do, but returns an error instead of failing the test, and does not check the answer.
// It is for tests in which the server may stop, or in which net/http itself may answer.
func (c *Client) Try(request string, body any, headers ...string) (*Response, error) {
	method, path, _ := strings.Cut(request, " ")
	answer := &Response{Method: method, Path: path, Header: http.Header{}}
	reader, isRaw := body.(io.Reader)
	isJSON := body != nil && !isRaw
	if isJSON {
		text, isText := body.(string)
		if !isText {
			encoded, err := json.Marshal(body)
			if err != nil {
				return answer, err
			}
			text = string(encoded)
		}
		answer.sentBody = text
		reader = strings.NewReader(text)
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
	if c.srv.world != nil {
		headers = append(slices.Clone(c.srv.world.headers), headers...)
		c.srv.killNowAndThen(c.t)
	}
	c.srv.inFlight.RLock()
	defer c.srv.inFlight.RUnlock()
	for pair := range slices.Chunk(headers, 2) {
		req.Header.Set(pair[0], pair[1])
	}
	req.Host = req.Header.Get("Host")
	answer.sent = req.Header
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return answer, err
	}
	return answer, answer.read(resp)
}

// read copies the status and the headers of resp, and reads its body to the end.
func (r *Response) read(resp *http.Response) (err error) {
	defer resp.Body.Close()
	r.Status = resp.StatusCode
	r.Header = resp.Header
	r.Closes = resp.Close
	r.Body, err = io.ReadAll(resp.Body)
	return err
}

// Upload uploads a file in a form, as a browser does.
func (c *Client) Upload(name string, content []byte) *Response {
	c.t.Helper()
	form, contentType := Form(name, content)
	return c.Do("POST /files/upload", form, "Content-Type", contentType)
}

// Store uploads a file and returns its path. It ends the test if the answer is not a 201.
func (c *Client) Store(name, content string) (path string) {
	c.t.Helper()
	r := c.Elsewhere().Upload(name, []byte(content)).Must(c.t, 201)
	return r.Header.Get("Location")
}

// Form returns a multipart form with one file, and the form's Content-Type.
func Form(name string, content []byte) (form io.Reader, contentType string) {
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	part, _ := w.CreateFormFile("file", name) // writing to a bytes.Buffer never fails
	part.Write(content)
	w.Close()
	return &body, w.FormDataContentType()
}

// SignIn signs the client in: it asks for a code, reads the code from the mail or the log, and
// presents it. It returns the last answer, which describes the session.
func (c *Client) SignIn(email string) *Response {
	c.t.Helper()
	c.AskCode(email)
	return c.PresentCode(email, c.srv.Code(c.t, email)).Must(c.t, 200)
}

// AcceptTerms accepts the current terms.
func (c *Client) AcceptTerms() {
	c.t.Helper()
	version := c.Get("/auth/session").Must(c.t, 200).Field(c.t, "terms.version")
	c.Do("POST /terms/acceptance", map[string]any{"version": version}).Must(c.t, 200)
}

// SignIn returns a new client that has signed in with this address.
func (s *Server) SignIn(t testing.TB, email string) *Client {
	t.Helper()
	c := s.Client(t)
	c.SignIn(email)
	return c
}

// Member adds a user with this role. It returns a client that has signed in as the user and has
// accepted the terms. So the client may do everything that the role permits.
func (s *Server) Member(t testing.TB, role string) (c *Client, email string) {
	t.Helper()
	email, _ = s.NewUser(t, role)
	c = s.SignIn(t, email)
	c.AcceptTerms()
	return c, email
}

// Uploader adds a member who has uploaded n files.
func (s *Server) Uploader(t testing.TB, n int) (c *Client, email string) {
	t.Helper()
	c, email = s.Member(t, "member")
	for i := range n {
		c.Store(fmt.Sprint(i, ".txt"), "of the user")
	}
	return c, email
}

// NewUser adds a user with a new e-mail address to the database.
func (s *Server) NewUser(t testing.TB, role string) (email, userID string) {
	t.Helper()
	email = NewEmail()
	return email, Query[string](t, s.Database,
		"insert into users (email, permission) values ($1, $2) returning user_id", email, role)
}

// A Guest is a client whose user has got a code and has not signed in yet.
type Guest struct {
	*Client
	Email, Code string
}

// NewGuest adds a user, asks for a code, and reads it.
func (s *Server) NewGuest(t testing.TB) Guest {
	t.Helper()
	email, _ := s.NewUser(t, "member")
	c := s.Client(t)
	c.AskCode(email)
	return Guest{c, email, s.Code(t, email)}
}

// Present makes one attempt to sign in, from a new client address.
func (g Guest) Present(code string) *Response {
	g.t.Helper()
	return g.Elsewhere().PresentCode(g.Email, code)
}

// PresentAtOnce makes n attempts to sign in at the same time, each from a new client address.
func (g Guest) PresentAtOnce(n int, code string) (answers chan *Response) {
	return SendAtOnce(g.t, n, func() *Response { return g.Present(code) })
}

// SendAtOnce calls send n times at the same time. The channel, whose capacity is n, gets the
// answers. The test does not end before all of them have come.
func SendAtOnce(t testing.TB, n int, send func() *Response) chan *Response {
	answers := make(chan *Response, n)
	var all sync.WaitGroup
	for range n {
		all.Go(func() { answers <- send() })
	}
	t.Cleanup(all.Wait)
	return answers
}

// WantStatuses compares the number of answers of each status. It waits for all answers.
func WantStatuses(t testing.TB, answers chan *Response, want map[int]int) {
	t.Helper()
	WantEqual(t, "answers by status", CountStatuses(answers), want)
}

// CountStatuses waits for the answers of SendAtOnce, and counts them by their status.
func CountStatuses(answers chan *Response) map[int]int {
	counts := map[int]int{}
	for range cap(answers) {
		counts[(<-answers).Status]++
	}
	return counts
}

// CookieName returns the name that the session cookie must have, unless COOKIE_PREFIX is set.
func (s *Server) CookieName() string {
	prefix := "__Secure-hubs"
	if s.Env["APP_ENV"] == "local" {
		prefix = "hubs"
	}
	return prefix + "_auth_" + s.Env["APP_ENV"]
}

// Token returns the session token in the client's cookie jar, or "".
func (c *Client) Token() string {
	for _, cookie := range c.HTTP.Jar.Cookies(c.srv.url()) {
		if cookie.Name == c.srv.CookieName() {
			return cookie.Value
		}
	}
	return ""
}

// With returns a new client with this session token in its cookie jar. If token is "", the client
// has no session.
func (s *Server) With(t testing.TB, token string) *Client {
	c := s.Client(t)
	if token != "" {
		c.SetToken(token)
	}
	return c
}

// SetToken puts a session token into the client's cookie jar. It replaces the token in the jar.
func (c *Client) SetToken(token string) {
	c.HTTP.Jar.SetCookies(c.srv.url(), []*http.Cookie{{
		Name:   c.srv.CookieName(),
		Value:  token,
		Path:   "/",
		Domain: c.srv.Env["COOKIE_DOMAIN"],
		Secure: c.srv.Env["APP_ENV"] != "local",
	}})
}

// NewToken returns a session token of a user, signed with the key. It makes the token without the
// library that the server verifies tokens with.
func NewToken(key, email, userID string, issued, expires time.Time) string {
	payload := fmt.Sprintf(`{"email":%q,"userId":%q,"iat":%d,"exp":%d}`,
		email, userID, issued.Unix(), expires.Unix())
	encode := base64.RawURLEncoding.EncodeToString
	signed := encode([]byte(`{"alg":"HS256","typ":"JWT"}`)) + "." + encode([]byte(payload))
	mac := hmac.New(sha256.New, []byte(key))
	mac.Write([]byte(signed))
	return signed + "." + encode(mac.Sum(nil))
}

// ReadToken decodes a token. It does not verify the signature.
func ReadToken(t testing.TB, token string) (header, claims map[string]any) {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("setup: got a token of %d parts, want 3", len(parts))
	}
	for i, target := range []*map[string]any{&header, &claims} {
		text, err := base64.RawURLEncoding.DecodeString(parts[i])
		Must(t, err)
		if err := json.Unmarshal(text, target); err != nil {
			t.Fatalf("setup: a part of the token is %q, want a JSON object: %v", text, err)
		}
	}
	return header, claims
}

// url returns Base as a parsed URL.
func (s *Server) url() *url.URL {
	u, _ := url.Parse(s.Base) // Base is a valid URL
	return u
}

// Want compares the status of the answer. The test goes on.
func (r *Response) Want(t testing.TB, status int) {
	t.Helper()
	if r.Status != status {
		complain(t, "got status %d, want %d, in the answer to %v", r.Status, status, r)
	}
}

// Must ends the test unless the answer has this status. It returns the answer. It is for a step of
// the test; what the test is about is compared by Want.
func (r *Response) Must(t testing.TB, status int) *Response {
	t.Helper()
	if r.Status != status {
		t.Fatalf("setup: got status %d, want %d, in the answer to %v", r.Status, status, r)
	}
	return r
}

// member returns a member of the body by its path, such as "user.userId". It returns nil if there
// is no such member.
func (r *Response) member(path string) any {
	var object any
	json.Unmarshal(r.Body, &object) // not every body is JSON
	return Within(object, strings.Split(path, ".")...)
}

// text returns a member of the body that is a string, or "".
func (r *Response) text(path string) string {
	value, _ := r.member(path).(string)
	return value
}

// Field returns a member of the body that is a string, by its path, such as "user.userId". If there
// is none, Field ends the test. It is for a step of the test; what the test is about is compared by
// WantField.
func (r *Response) Field(t testing.TB, path string) string {
	t.Helper()
	value := r.text(path)
	if value == "" {
		t.Fatalf("setup: want a text as the member %s, in the answer to %v", path, r)
	}
	return value
}

// WantField compares a member of the body, by its path, such as "terms.accepted".
func (r *Response) WantField(t testing.TB, path string, want any) {
	t.Helper()
	if got := r.member(path); !reflect.DeepEqual(got, want) {
		complain(t, "%s: got %v, want %v, in the answer to %v", path, got, want, r)
	}
}

// Code returns the code of an error, such as "invalid_request", or "".
func (r *Response) Code() string { return r.text("code") }

// headers returns the headers that an answer of this kind must have, with patterns of their whole
// values. An empty pattern means that the header is missing.
func (r *Response) headers() map[string]string {
	const policy = "default-src 'none'; frame-ancestors 'none'"
	want := map[string]string{
		"Strict-Transport-Security":    "max-age=63072000; includeSubDomains",
		"X-Content-Type-Options":       "nosniff",
		"X-Frame-Options":              "DENY",
		"Referrer-Policy":              "no-referrer",
		"Cross-Origin-Resource-Policy": "same-site",
		"Content-Security-Policy":      policy,
		"Cache-Control":                "no-store",
		"Vary":                         "Origin",
		"X-Request-Id":                 ".+",
		"WWW-Authenticate":             "",
		"Allow":                        "",
		"Retry-After":                  "",
	}
	isRead := r.Method == "GET" || r.Method == "HEAD"
	if isRead && r.Status < 400 && strings.HasPrefix(r.Path, "/files/") {
		want["Content-Security-Policy"] = policy +
			"; style-src 'unsafe-inline'; sandbox allow-downloads"
		want["Cache-Control"] = "private, no-store"
	} else if r.Path == "/" && r.Status < 400 { // the page has a further policy in its text
		want["Content-Security-Policy"] = "frame-ancestors 'none'"
	}
	switch r.Status {
	case 401:
		want["WWW-Authenticate"] = "Cookie"
	case 405:
		want["Allow"] = "[A-Z, ]+"
	case 429, 503:
		want["Retry-After"] = "[1-9][0-9]*"
	}
	return want
}

// Fault returns an error if the answer breaks a rule that every answer must keep: the contract, the
// format of errors, the headers of its kind, and no token in the body. Client.Do, Conn.Receive and
// HalfUpload.Finish fail the test with this error. A test that only counts such answers calls Fault
// itself.
func (r *Response) Fault() error {
	faults := []error{r.contractFault(), r.problemFault()}
	for name, pattern := range r.headers() {
		got := strings.Join(r.Header.Values(name), " and ")
		if !compile("^(" + pattern + ")$").MatchString(got) {
			faults = append(faults, fmt.Errorf("%s: got %q, want %q", name, got, pattern))
		}
	}
	kind := r.Header.Get("Content-Type")
	isJSON := kind == "application/json" || kind == "application/problem+json"
	if isJSON && bytes.Contains(r.Body, []byte("eyJ")) {
		faults = append(faults, errors.New("the body contains a token"))
	}
	if err := errors.Join(faults...); err != nil {
		return fmt.Errorf("%w\nin the answer to %v", err, r)
	}
	return nil
}

// A problem is the body of an error, in the format of RFC 9457.
type problem struct {
	Detail, RequestID string
	Status            int
	Errors            []struct{ Field, Detail string }
}

// problem decodes the body of an error.
func (r *Response) problem() (p problem) {
	json.Unmarshal(r.Body, &p) // if this fails, problemFault reports the missing members
	return p
}

// Fields returns the names of the fields in the problem's errors.
func (r *Response) Fields() (names []string) {
	for _, e := range r.problem().Errors {
		names = append(names, e.Field)
	}
	return names
}

// A page may show the detail of an error to its user. So it is a sentence, without a path, the name
// of a header, or a duration as Go writes it.
var (
	sentence    = regexp.MustCompile(`^[A-Z].*\.$`)
	notForUsers = regexp.MustCompile(`(^| )/[a-z]|[A-Z][a-z]+-[A-Z]|[0-9](ms|[smh])\b|[0-9][mh][0-9]`)
)

// problemFault returns an error if the answer is an error but does not have the format that all
// errors have. An answer to HEAD has no body to check.
func (r *Response) problemFault() error {
	if r.Status < 400 || r.Method == "HEAD" {
		return nil
	}
	p := r.problem()
	for _, e := range p.Errors {
		if e.Detail == "" || notForUsers.MatchString(e.Detail) {
			return fmt.Errorf("errors: got %+v, want a detail for users", e)
		}
	}
	kind := r.Header.Get("Content-Type")
	switch {
	case kind != "application/problem+json":
		return fmt.Errorf("Content-Type: got %q, want application/problem+json", kind)
	case !sentence.MatchString(p.Detail) || notForUsers.MatchString(p.Detail):
		return fmt.Errorf("got the detail %q, want a sentence for users", p.Detail)
	case p.Status != r.Status:
		return fmt.Errorf("status in the body: got %d, want %d", p.Status, r.Status)
	case p.RequestID != r.Header.Get("X-Request-Id"):
		return fmt.Errorf("requestId: got %q, want the value of X-Request-Id", p.RequestID)
	}
	return nil
}

// WantProblem checks that the answer is an error with this status and code. fields are the names in
// the problem's errors, each at least once, in any order. Without fields, the names are not
// compared. The body of an answer to HEAD is empty, so its code is not compared.
func (r *Response) WantProblem(t testing.TB, status int, code string, fields ...string) {
	t.Helper()
	hasCode := r.Code() == code || r.Method == "HEAD"
	if r.Status != status || !hasCode {
		complain(t, "got %d %s, want %d %s, in the answer to %v", r.Status, r.Code(), status, code, r)
		return
	}
	got := slices.Compact(slices.Sorted(slices.Values(r.Fields())))
	want := slices.Sorted(slices.Values(fields))
	if len(want) > 0 && !slices.Equal(got, want) {
		complain(t, "got the fields %q, want %q, in the answer to %v", got, want, r)
	}
}

// Get sends a GET without a body, by Do.
func (c *Client) Get(path string, headers ...string) *Response {
	c.t.Helper()
	return c.Do("GET "+path, nil, headers...)
}

// AskCode asks for a code for the address. It ends the test unless the answer is a 200.
func (c *Client) AskCode(email string) *Response {
	c.t.Helper()
	r := c.Do("POST /auth/otp/request", map[string]string{"email": email})
	return r.Must(c.t, 200)
}

// PresentCode makes one attempt to sign in with the code.
func (c *Client) PresentCode(email, code string) *Response {
	c.t.Helper()
	return c.Do("POST /auth/otp/validate", map[string]string{"email": email, "code": code})
}

// OtherCode returns the code that is n greater than the right one. After 999999 comes 000000.
func OtherCode(code string, n int) string {
	value, _ := strconv.Atoi(code)
	text := fmt.Sprintf("%0*d", len(code), value+n)
	return text[len(text)-len(code):]
}
