package main

// What is between net/http and the handlers, but for the log (main.go), who is
// counted (ratelimit.go) and who is signed in (auth.go).

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"mime"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"
)

// Part 1: the steps.

// A request is an HTTP request and what the steps have found out about it.
// r.Header has the headers of the request, r.w.Header() those of the answer.
type request struct {
	*http.Request
	w         *response
	serverLog *slog.Logger // log adds the request's id to it

	originAllowed bool       // step 2: the Origin header names an allowed origin
	id            string     // step 3
	client        netip.Addr // step 3

	// Step 6.
	route     route       // the zero route if none matches
	fields    fields      // the input, before it is parsed
	badFields fieldErrors // its mistakes that addField has found
	user      *user       // the account, also of a session that is refused; or nil
	session   sessionToken
}

type requestKey struct{} // the key of the request in its own context

func (s *server) ServeHTTP(w http.ResponseWriter, httpRequest *http.Request) {
	r := &request{serverLog: s.log}
	r.Request = httpRequest.WithContext(context.WithValue(httpRequest.Context(), requestKey{}, r))
	r.w = &response{ResponseWriter: w, isHead: r.Method == "HEAD"}
	if s.cfg.env != envLocal {
		defer s.logRequest(r, time.Now()) // 1. log, when all else is done
	}
	defer r.recoverPanic()
	s.setCommonHeaders(r)                    // 2. security and CORS headers, also on a 429
	s.identify(r)                            // 3. request id, client address (ratelimit.go)
	if err := s.limitClient(r); err != nil { // 4. limit by client address (ratelimit.go)
		r.fail(err)
		return
	}
	if isAnswered := r.checkOrigin(); isAnswered { // 5. preflights, writes from other origins
		return
	}
	s.dispatch(r) // 6. the contract of a route
}

func (r *request) recoverPanic() {
	fault := recover()
	if fault == http.ErrAbortHandler { // tells net/http to close the connection
		panic(fault)
	}
	if fault != nil {
		r.fail(fmt.Errorf("panic in %s: %v", panicFrames(), fault))
	}
}

// panicFrames names the innermost functions of a panic, without the runtime's.
func panicFrames() string {
	callers := make([]uintptr, 16)
	n := runtime.Callers(3, callers) // without Callers, this function and the deferred one
	frames := runtime.CallersFrames(callers[:n])
	var names []string
	for more := true; more && len(names) < 3; {
		var frame runtime.Frame
		frame, more = frames.Next()
		if !strings.HasPrefix(frame.Function, "runtime.") {
			names = append(names, fmt.Sprintf("%s:%d", frame.Function, frame.Line))
		}
	}
	return strings.Join(names, " < ")
}

// contentPolicy lets an answer load and run nothing, and no page frame it.
const contentPolicy = "default-src 'none'; frame-ancestors 'none'"

// securityHeaders are on every answer. Files and documents replace some. All
// answers share the values, so nothing may change these.
var securityHeaders = http.Header{
	"Strict-Transport-Security":    {"max-age=63072000; includeSubDomains"},
	"X-Content-Type-Options":       {"nosniff"},
	"X-Frame-Options":              {"DENY"},
	"Referrer-Policy":              {"no-referrer"},
	"Content-Security-Policy":      {contentPolicy},
	"Cross-Origin-Resource-Policy": {"same-site"},
	"Cache-Control":                {"no-store"},
	"Vary":                         {"Origin"},
}

func (s *server) setCommonHeaders(r *request) {
	header := r.w.Header()
	maps.Copy(header, securityHeaders)
	if s.isStopping() {
		header.Set("Connection", "close")
	}
	origin := r.Header.Get("Origin")
	r.originAllowed = s.cfg.allowsOrigin(origin)
	if r.originAllowed {
		header.Set("Access-Control-Allow-Origin", origin)
		header.Set("Access-Control-Allow-Credentials", "true")
		header.Set("Access-Control-Expose-Headers", "X-Request-Id, Retry-After, Location")
	}
}

// allowsOrigin reports whether an origin is in the list or, in production, an
// https subdomain of the one domain, without a port (C1).
func (c *config) allowsOrigin(origin string) bool {
	if c.env != envProduction {
		return slices.Contains(c.allowedOrigins, origin)
	}
	host, isHTTPS := strings.CutPrefix(origin, "https://")
	isSubdomain := len(host) <= 253 && strings.HasSuffix(host, "."+c.originDomain)
	return isHTTPS && isSubdomain && domainPattern.MatchString(host)
}

var requestIDPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

// identify keeps the client's request id only in a form that can't forge a line
// of a log (G1).
func (s *server) identify(r *request) {
	r.id = r.Header.Get("X-Request-Id")
	if !requestIDPattern.MatchString(r.id) {
		r.id = rand.Text()
	}
	r.w.Header().Set("X-Request-Id", r.id)
	s.identifyClient(r)
}

func isRead(method string) bool { return method == "GET" || method == "HEAD" }

func (r *request) isPreflight() bool {
	return r.Method == "OPTIONS" && r.Header.Get("Origin") != "" &&
		r.Header.Get("Access-Control-Request-Method") != ""
}

// crossOriginCheck looks at Sec-Fetch-Site or, in browsers that send none, at
// whether the host of Origin is Host.
var crossOriginCheck = http.NewCrossOriginProtection()

// checkOrigin answers preflights of allowed origins, and refuses writes from
// foreign ones. SameSite=Lax alone would let writes from sibling subdomains
// pass (C2). A request with neither Sec-Fetch-Site nor Origin passes, because
// no current browser sends such a write.
func (r *request) checkOrigin() (isAnswered bool) {
	isForeignWrite := crossOriginCheck.Check(r.Request) != nil && !r.originAllowed
	switch {
	case r.isPreflight() && r.originAllowed:
		header := r.w.Header()
		wanted := r.Header.Get("Access-Control-Request-Headers") // any: the origin is trusted
		header.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PATCH, DELETE")
		header.Set("Access-Control-Allow-Headers", cmp.Or(wanted, "Content-Type, X-Request-Id"))
		header.Set("Access-Control-Max-Age", "7200")
		r.w.WriteHeader(204)
		return true
	case r.isPreflight(): // of another origin: the router refuses it
		r.logRefusedOrigin()
	case isForeignWrite:
		r.fail(errCrossOrigin)
		return true
	}
	return false
}

// dispatch lets net/http's router call the route. The router knows only an
// http.Request, so our request travels in its context. If the router writes an
// error itself, such as a 404, dispatch answers with a problem instead.
func (s *server) dispatch(r *request) {
	catcher := &errorCatcher{response: r.w}
	s.mux.ServeHTTP(catcher, r.Request)
	if err := catcher.toError(); err != nil {
		r.fail(err)
	}
}

// addRoute registers a route with the router.
func (s *server) addRoute(rt route) {
	rt.mustBeValid()
	s.mux.HandleFunc(rt.pattern, func(_ http.ResponseWriter, httpRequest *http.Request) {
		r := httpRequest.Context().Value(requestKey{}).(*request)
		r.route = rt
		if err := s.serveRoute(r); err != nil {
			r.fail(err)
		}
	})
}

// An errorCatcher is the ResponseWriter of the two parts of net/http that write
// errors themselves, its router and http.ServeContent. It drops an error, and
// passes a success on.
type errorCatcher struct {
	*response     // whose ReadFrom sends a file
	caught    int // status of the error; 0 if there is none
}

func (w *errorCatcher) WriteHeader(status int) {
	if status < 300 || status == 304 {
		w.response.WriteHeader(status)
		return
	}
	w.caught = status
}

func (w *errorCatcher) Write(b []byte) (int, error) {
	if w.caught != 0 {
		return len(b), nil
	}
	return w.response.Write(b)
}

func (w *errorCatcher) toError() error {
	switch w.caught {
	case 0:
		return nil
	case 405: // net/http has set Allow
		return errMethod
	case 412:
		return errPrecondition
	case 416:
		return errRange
	case 500:
		return errors.New("http.ServeContent could not read the file")
	}
	return errNotFound // a 404, a redirect to a cleaned path, and the 400 of "OPTIONS *"
}

// Part 2: the contract of a route.

type route struct {
	pattern  string // method and path
	access   access
	status   int                   // of a success; http.ServeContent chooses that of a file
	input    []string              // names of the fields; if nil, only the handler reads body or query
	isParsed bool                  // set by withInput
	limit    *limiter              // the endpoint's own, besides the one of step 4
	limitKey func(*request) string // what limit counts by; "" if the request does not count
	handle   func(*request) (output, error)
}

func (rt route) path() string {
	_, path, _ := strings.Cut(rt.pattern, " ")
	return path
}

// withInput completes a route that has an input. A request runs only rt.handle,
// which calls the given handler after parse has accepted the input.
func withInput[T any](rt route, names []string, parse func(fields) (T, fieldErrors),
	handle func(*request, T) (output, error)) route {
	rt.input = names
	rt.isParsed = true
	rt.handle = func(r *request) (output, error) {
		in, errs := parse(r.fields)
		// The client gets the first error of each field, and parse says best what
		// is expected.
		errs = append(errs, r.badFields...)
		if errs != nil {
			return nil, invalid(errs...)
		}
		return handle(r, in)
	}
	return rt
}

// An access says who may call an endpoint: everyone, or the users who meet all
// conditions. The zero value asks for a session only.
type access struct {
	public bool
	terms  bool     // only users who have accepted the current terms
	roles  []string // only users with one of these roles; nil means any
}

var (
	public          = access{public: true}
	sessionOnly     = access{}
	sessionAndTerms = access{terms: true}
	adminOnly       = access{terms: true, roles: []string{roleAdmin}}
)

func (a access) String() string {
	if a.public {
		return "-"
	}
	text := "session"
	if a.terms {
		text += ", terms"
	}
	if a.roles != nil {
		text += ", " + strings.Join(a.roles, " or ")
	}
	return text
}

// mustBeValid prevents the start with a route whose access contradicts itself,
// that has no status or handler, whose input is not parsed, or whose limit has no
// key (Z1).
func (rt route) mustBeValid() {
	switch {
	case rt.access.public && (rt.access.terms || rt.access.roles != nil):
		panic("a public route can have no conditions: " + rt.pattern)
	case rt.status == 0 || rt.handle == nil:
		panic("a route must have a status and a handler: " + rt.pattern)
	case (rt.input != nil) != rt.isParsed:
		panic("an input must be parsed by withInput: " + rt.pattern)
	case (rt.limit == nil) != (rt.limitKey == nil):
		panic("a limit must have a key, and a key must have a limit: " + rt.pattern)
	}
}

// An output is what a handler returns for a success. It is nil if the answer
// has no body.
type output interface{ validate() fieldErrors }

// sent is the output of a handler that has sent its answer itself.
type sent struct{}

func (sent) validate() fieldErrors { return nil }

// serveRoute makes the checks of a route, then calls its handler. It reads the
// body before the account. Otherwise a client could withhold the end of a body
// until it has lost its rights, and still write (W1).
func (s *server) serveRoute(r *request) error {
	inputErr := r.readFields()
	if !r.route.access.public {
		if err := s.authorize(r); err != nil {
			return err
		}
	}
	if r.route.limit != nil {
		if err := r.route.limit.spend(r.route.limitKey(r)); err != nil {
			return err
		}
	}
	if inputErr != nil {
		return inputErr
	}
	// Nothing that can be written has an ETag, so only the If-Match "*" matches
	// (RFC 9110 13.1.1).
	ifMatch := r.Header.Get("If-Match")
	if ifMatch != "" && ifMatch != "*" && !isRead(r.Method) {
		return errPrecondition
	}
	out, err := r.route.handle(r)
	if err != nil {
		return err
	}
	return r.answer(out)
}

// Part 3: strict input. addField finds fields that the route does not know,
// that come twice or are no text, and the route's parse function finds the rest.

// fields are the members of a JSON object, or the parameters of a query.
type fields map[string]string

type fieldError struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

type fieldErrors []fieldError

func (errs *fieldErrors) require(ok bool, name, detail string) {
	if !ok {
		*errs = append(*errs, fieldError{name, detail})
	}
}

const (
	maxJSONBody    = 16 << 10 // bytes
	maxFields      = 50       // of an input; 16 kB full of fields would take 5 ms
	maxContentType = 256      // bytes; parsing 16 kB would take 2 ms
)

func (r *request) readFields() error {
	if r.route.input == nil {
		return nil
	}
	r.fields = fields{}
	read := r.readBody
	if isRead(r.Method) {
		read = r.readQuery
	}
	return read()
}

func (r *request) readBody() error {
	kind, params := mediaType(r.Header)
	if kind != "application/json" || len(params) > 0 {
		return wrongMediaType("application/json")
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxJSONBody+1))
	if err != nil {
		return bodyProblem(err)
	}
	if len(body) > maxJSONBody {
		return errTooLarge
	}
	return r.readJSON(body)
}

func (r *request) readQuery() error {
	if strings.Count(r.URL.RawQuery, "&") >= maxFields {
		return invalid(fieldError{"query", "has too many parameters"})
	}
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return invalid(fieldError{"query", "has a semicolon or a bad escape"})
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		for _, value := range values[name] {
			r.addField(name, value, true)
		}
	}
	return nil
}

// readJSON reads one flat JSON object of strings (I3). Decoding it into a
// struct would accept names in another letter case, duplicates and null. Nested
// values are not decoded: they would take milliseconds.
func (r *request) readJSON(body []byte) error {
	body = bytes.TrimPrefix(body, []byte("\uFEFF")) // a byte order mark (RFC 8259 8.1)
	decoder := json.NewDecoder(bytes.NewReader(body))
	start, _ := decoder.Token()
	if start != json.Delim('{') || !json.Valid(body) {
		return invalid(fieldError{"body", "must be one whole JSON object in UTF-8"})
	}
	for n := 0; decoder.More(); n++ { // the body is valid, so no step can fail
		if n == maxFields {
			return invalid(fieldError{"body", "has too many fields"})
		}
		name, _ := decoder.Token()
		var raw json.RawMessage
		decoder.Decode(&raw)
		text := ""
		isText := raw[0] == '"'
		if isText {
			json.Unmarshal(raw, &text)
		}
		r.addField(name.(string), text, isText)
	}
	return nil
}

// addField adds a field, and records what is wrong with it. A field that the
// route does not name is an error, so no client can set a field such as role
// (Z3). Invalid UTF-8 and lone surrogates count as U+FFFD, which encoding/json
// puts in their place.
func (r *request) addField(name, value string, isText bool) {
	_, isRepeated := r.fields[name]
	isKnown := slices.Contains(r.route.input, name)
	isUnicode := !strings.ContainsRune(value, utf8.RuneError)
	r.badFields.require(isKnown, name, "is not known here")
	r.badFields.require(!isRepeated, name, "is sent more than once")
	r.badFields.require(isText, name, "must be a string")
	r.badFields.require(isUnicode, name, "must be Unicode text without U+FFFD")
	r.fields[name] = value
}

// mediaType returns the type of the body and its parameters without the
// charset, or "" if the header is not usable, the charset is not UTF-8, or the
// body is encoded.
func mediaType(header http.Header) (kind string, params map[string]string) {
	lines := header["Content-Type"]
	if len(lines) != 1 || len(lines[0]) > maxContentType || header["Content-Encoding"] != nil {
		return "", nil
	}
	kind, params, err := mime.ParseMediaType(lines[0])
	if err != nil || !strings.EqualFold(cmp.Or(params["charset"], "utf-8"), "utf-8") {
		return "", nil
	}
	delete(params, "charset")
	return kind, params
}

// Part 4: the answer.

type response struct {
	http.ResponseWriter
	isHead  bool  // net/http discards the body
	status  int   // 0 if none was sent
	bytes   int64 // of the body
	copyErr error // set by ReadFrom: why a file could not be sent to its end
}

func (w *response) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

func (w *response) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(200)
	}
	n, err := w.ResponseWriter.Write(b)
	if !w.isHead {
		w.bytes += int64(n)
	}
	return n, err
}

// ReadFrom lets the kernel send a file (sendfile), which saves a quarter of the
// processor time.
func (w *response) ReadFrom(src io.Reader) (int64, error) {
	n, err := io.Copy(w.ResponseWriter, src)
	w.bytes += n
	w.copyErr = err
	return n, err
}

// Unwrap is for http.ResponseController, which sets deadlines.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// A timestamp has three decimals in answers, because many parsers read no other
// number of them.
type timestamp struct{ Time time.Time }

func (t timestamp) MarshalText() ([]byte, error) {
	text := make([]byte, 0, 32)
	return t.Time.UTC().AppendFormat(text, "2006-01-02T15:04:05.000Z"), nil
}

// answer sends an output. It sends nothing of one that breaks its contract
// (I5).
func (r *request) answer(out output) error {
	switch out.(type) {
	case sent:
		return nil
	case nil:
		r.w.WriteHeader(r.route.status)
		return nil
	}
	if errs := out.validate(); errs != nil {
		return fmt.Errorf("%T breaks its contract: %s %s", out, errs[0].Field, errs[0].Detail)
	}
	var body bytes.Buffer
	encoder := json.NewEncoder(&body)
	encoder.SetEscapeHTML(false) // else "<" takes six bytes; an answer is never HTML (nosniff)
	if err := encoder.Encode(out); err != nil {
		return err
	}
	header := r.w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Content-Length", strconv.Itoa(body.Len()))
	r.w.WriteHeader(r.route.status)
	r.w.Write(body.Bytes())
	return nil
}

// headersOfErrors are the headers that an error keeps. All others, such as a
// cookie, were set for a success.
var headersOfErrors = []string{
	"Connection", "X-Request-Id", "Allow", "Content-Range", "Access-Control-Allow-Origin",
	"Access-Control-Allow-Credentials", "Access-Control-Expose-Headers",
}

// fail answers with an error, or closes the connection if an answer has begun.
// No other function sends errors, so all have one format.
func (r *request) fail(err error) {
	p := toProblem(err)
	r.logProblem(p)
	if r.w.status != 0 {
		panic(http.ErrAbortHandler)
	}
	header := r.w.Header()
	for name := range header {
		if securityHeaders[name] == nil && !slices.Contains(headersOfErrors, name) {
			header.Del(name)
		}
	}
	maps.Copy(header, securityHeaders) // a handler may have replaced some
	header.Set("Content-Type", "application/problem+json")
	if p.Status == 401 {
		header.Set("WWW-Authenticate", "Cookie")
	}
	if p.retryAfter > 0 {
		header.Set("Retry-After", fmt.Sprint(math.Ceil(p.retryAfter.Seconds())))
	}
	p.Title = http.StatusText(p.Status)
	p.RequestID = r.id
	body, _ := json.Marshal(p) // strings and numbers: can't fail
	// Before the answer, net/http reads the rest of a short body. It gets a second.
	http.NewResponseController(r.w).SetReadDeadline(time.Now().Add(time.Second))
	r.w.WriteHeader(p.Status)
	r.w.Write(body)
}

// Part 5: problems.

// A problem is an error for a client (RFC 9457).
type problem struct {
	Title     string      `json:"title"`
	Status    int         `json:"status"`
	Detail    string      `json:"detail"` // sentence that a page may show
	Code      string      `json:"code"`   // stable word for programs
	RequestID string      `json:"requestId"`
	Errors    fieldErrors `json:"errors,omitempty"`

	retryAfter time.Duration // sent in whole seconds, rounded up; not sent if 0
	cause      error         // only logged
	reason     string        // why a session or a code was refused, in one word; only logged
}

func (p problem) Error() string {
	if p.cause == nil {
		return p.Code
	}
	return p.cause.Error()
}

func (p problem) Unwrap() error { return p.cause }

func newProblem(status int, code, detail string) problem {
	return problem{Status: status, Code: code, Detail: detail}
}

var (
	errInvalidCode = newProblem(401, "invalid_code",
		"The code is wrong, used or expired.")
	errSuspended = newProblem(403, "account_suspended",
		"This account is suspended.")
	errForbidden = newProblem(403, "forbidden",
		"Your role does not permit this.")
	errTermsMissing = newProblem(403, "terms_not_accepted",
		"Please accept the current terms of use and privacy policy first.")
	errCrossOrigin = newProblem(403, "cross_origin",
		"Pages of this origin may not write here.")
	errNotFound = newProblem(404, "not_found",
		"There is nothing at this address.")
	errMethod = newProblem(405, "method_not_allowed",
		"This address does not support this method.")
	errPrecondition = newProblem(412, "precondition_failed",
		"A condition of the request does not hold.")
	errTooLarge = newProblem(413, "too_large",
		"This is larger than the service accepts.")
	errRange = newProblem(416, "range_not_satisfiable",
		"The file has no such range.")
)

// unauthenticated returns a 401, for a reason: missing, forged, expired, ended or
// future.
func unauthenticated(reason string) problem {
	return newProblem(401, "unauthenticated",
		"Please sign in: the session is missing, expired or ended.").because(reason)
}

// because adds a reason for the log.
func (p problem) because(reason string) problem {
	p.reason = reason
	return p
}

func unavailable(cause error) problem {
	p := newProblem(503, "unavailable",
		"The service can't answer now. Please try again in a moment.")
	p.retryAfter = 2 * time.Second
	p.cause = cause
	return p
}

func rateLimited(limit string, wait time.Duration) problem {
	p := newProblem(429, "rate_limited", "Too many requests: the limit is "+limit+".")
	p.retryAfter = wait
	return p
}

func wrongMediaType(want string) problem {
	return newProblem(415, "unsupported_media_type",
		"The body must be "+want+" in UTF-8, and not encoded.")
}

const (
	maxFieldErrors = 20 // a small request must not cause a large answer
	maxFieldName   = 64 // bytes
)

// invalid returns a 400 with the first error of each field, of maxFieldErrors.
func invalid(errs ...fieldError) problem {
	p := newProblem(400, "invalid_request", "The input is not valid.")
	for _, e := range errs {
		cut := e.Field[:min(len(e.Field), maxFieldName)]
		e.Field = cmp.Or(strings.ToValidUTF8(cut, ""), "input")
		isNamed := func(named fieldError) bool { return named.Field == e.Field }
		if len(p.Errors) < maxFieldErrors && !slices.ContainsFunc(p.Errors, isNamed) {
			p.Errors = append(p.Errors, e)
		}
	}
	return p
}

// toProblem turns an unexpected error into a 500, so that no text of
// PostgreSQL, the file system or Go reaches a client.
func toProblem(err error) problem {
	if p, ok := errors.AsType[problem](err); ok {
		return p
	}
	p := newProblem(500, "internal", "The service has failed. Its operator can find out why.")
	if isDiskFull(err) {
		p = newProblem(507, "insufficient_storage", "There is no room for the file.")
	}
	p.cause = err
	return p
}

func isDiskFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// bodyProblem blames the client for an error of reading or storing a body,
// unless the disk has failed.
func bodyProblem(err error) problem {
	p := toProblem(err)
	_, isDiskError := errors.AsType[*fs.PathError](err)
	if p.Status < 500 || isDiskError {
		return p
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return invalid(fieldError{"body", "came too slowly"})
	}
	return invalid(fieldError{"body", "is incomplete or malformed"})
}
