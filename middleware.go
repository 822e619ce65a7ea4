package main

// This file carries a request from the socket to its handler, and the answer back.
//
//  1. problem: the one error format, and the one function that writes it.
//  2. requestState: what the six steps share about a request.
//  3. fields: the strict reader of JSON bodies and query strings.
//  4. contract: what every endpoint declares, and endpoint, which runs it.
//  5. The six steps of the pipeline, in their order.
//  6. The log: what it takes from a request, and what it masks.

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"database/sql"
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
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"
)

// A problem is an error that the client is told about, in the format of RFC 9457.
type problem struct {
	Title     string       `json:"title"`
	Status    int          `json:"status"`
	Detail    string       `json:"detail"` // a sentence for people
	Code      string       `json:"code"`   // a stable word for programs
	RequestID string       `json:"requestId"`
	Errors    []fieldError `json:"errors,omitempty"`

	retryAfter time.Duration // sent as Retry-After, rounded up to whole seconds; 0: not sent
	cause      error         // for the log only
	reason     string        // why a session was refused, in one word; for the log only
}

// A fieldError says what is wrong with one field of the input.
type fieldError struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

// Error is for the log, which masks it.
func (p *problem) Error() string { return fmt.Sprintf("%s: %v", p.Code, p.cause) }

func newProblem(status int, code, detail string) *problem {
	return &problem{Status: status, Code: code, Detail: detail}
}

// The problems that are the same for every request. The others are made where they arise.
var (
	errInvalidCode = newProblem(401, "invalid_code",
		"The code is wrong, used or expired.")
	errSuspended = newProblem(403, "account_suspended",
		"This account is suspended.")
	errForbidden = newProblem(403, "forbidden",
		"Your role does not permit this.")
	errTermsMissing = newProblem(403, "terms_not_accepted",
		"Accept the terms: send the version from GET /auth/session to POST /terms/acceptance.")
	errCrossOrigin = newProblem(403, "cross_origin",
		"Pages of this origin may not write here.")
	errNotFound = newProblem(404, "not_found",
		"There is nothing at this address.")
	errMethod = newProblem(405, "method_not_allowed",
		"The Allow header lists the methods of this address.")
	errPrecondition = newProblem(412, "precondition_failed",
		"A condition in the request's headers does not hold.")
	errTooLarge = newProblem(413, "too_large",
		"The body is larger than this endpoint takes.")
	errMediaType = newProblem(415, "unsupported_media_type",
		"Send the Content-Type that this endpoint takes, without Content-Encoding.")
	errRange = newProblem(416, "range_not_satisfiable",
		"The file has no such range.")
)

// unauthenticated returns the 401 of a session. The answer to the client is the
// same for every reason: missing, forged, expired or ended.
func unauthenticated(reason string) *problem {
	return &problem{
		Status: 401, Code: "unauthenticated", reason: reason,
		Detail: "Sign in: the session is missing, expired or ended.",
	}
}

// unavailable returns the 503 of a database that is out of reach, or of a mail queue that is full.
func unavailable(cause error) *problem {
	return &problem{
		Status: 503, Code: "unavailable", Detail: "Try again soon.",
		retryAfter: 2 * time.Second, cause: cause,
	}
}

// rateLimited returns the 429 of a limit; wait is the time until a request can pass again.
func rateLimited(limit string, wait time.Duration) *problem {
	return &problem{
		Status: 429, Code: "rate_limited", Detail: "The limit is " + limit + ".",
		retryAfter: wait,
	}
}

// invalid returns the 400 that names the wrong fields. It reports at most 20, so that a small
// request can't cause a large answer.
func invalid(errs ...fieldError) *problem {
	return &problem{
		Status: 400, Code: "invalid_request", Detail: "The input is not valid.",
		Errors: errs[:min(len(errs), 20)],
	}
}

// toProblem returns the problem that answers err. An error that it does not know is a bug or a
// broken disk: 500.
func toProblem(err error) *problem {
	if p, ok := errors.AsType[*problem](err); ok {
		return p
	}
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return errTooLarge
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &problem{
			Status: 507, Code: "insufficient_storage", Detail: "There is no room for the file.",
			cause: err,
		}
	}
	return &problem{
		Status: 500, Code: "internal", Detail: "The server failed; its log says why.",
		cause: err,
	}
}

// bodyProblem returns the problem of a body that could not be read to its end or be stored. A
// refusal, such as a 413, stays as it is. An error of the disk is the server's fault. All else is
// a body that is incomplete or malformed.
func bodyProblem(err error) *problem {
	p := toProblem(err)
	_, ofDisk := errors.AsType[*fs.PathError](err)
	if ofDisk || p.Status < 500 {
		return p
	}
	return invalid(fieldError{"body", "is incomplete or malformed"})
}

// A requestState is one request and its answer: what the steps of the pipeline share. It is also the
// http.ResponseWriter that the router and http.ServeContent write to. Only the request's own
// goroutine uses it.
type requestState struct {
	http.ResponseWriter // net/http's own
	request             *http.Request
	serverLog           *slog.Logger

	id     string     // step 3: the request id, in the log and in every error
	client netip.Addr // step 3: the client's address

	user        *user        // step 6: the account, if the route needs or begins a session
	session     sessionToken // step 6: with user
	loggedInput string       // step 6: what the log may show of the input

	status       int   // as sent; 0: nothing has been sent
	bytes        int64 // of the body, as written; for a HEAD of a file it is 0
	errorWritten bool  // fail has answered; what net/http writes after that is dropped
}

// stateOf returns the state that logRequests has put around the http.ResponseWriter.
func stateOf(w http.ResponseWriter) *requestState { return w.(*requestState) }

// log returns the logger for events of this request.
func (state *requestState) log() *slog.Logger {
	log := state.serverLog.With("requestId", state.id, "client", state.client.String())
	if state.user != nil {
		log = log.With("userId", state.user.UserID)
	}
	return log
}

// Unwrap lets http.ResponseController reach net/http's writer, which has the deadlines.
func (state *requestState) Unwrap() http.ResponseWriter { return state.ResponseWriter }

// WriteHeader replaces the errors that net/http writes by itself with ours: the router's
// 404, 405 and redirects to a cleaned path (404 here), and 412 and 416 of
// http.ServeContent. Only the first status counts.
//
// G3: one error format, for the router's own answers too.
func (state *requestState) WriteHeader(status int) {
	if status >= 300 && status != http.StatusNotModified {
		// What is not in the table becomes a 404: redirects, and the 400 of OPTIONS *.
		state.fail(cmp.Or(netHTTPErrors[status], error(errNotFound)))
		return
	}
	if state.status == 0 {
		state.status = status
		state.ResponseWriter.WriteHeader(status)
	}
}

// netHTTPErrors has the errors that net/http's own code answers with.
var netHTTPErrors = map[int]error{
	http.StatusMethodNotAllowed:             errMethod,
	http.StatusPreconditionFailed:           errPrecondition,
	http.StatusRequestedRangeNotSatisfiable: errRange,
	http.StatusInternalServerError:          errors.New("net/http could not read the file"),
}

func (state *requestState) Write(b []byte) (int, error) {
	if state.errorWritten {
		return len(b), nil
	}
	state.WriteHeader(http.StatusOK)
	n, err := state.ResponseWriter.Write(b)
	state.bytes += int64(n)
	return n, err
}

var headersOfSuccess = []string{
	"Set-Cookie", "ETag", "Last-Modified", "Accept-Ranges", "Location", "Content-Disposition",
	"Content-Length",
}

// fail answers the request with err. It is the only function that writes an error. It
// removes what a handler has prepared for a success, such as a cookie or caching headers.
// Once a status has been sent, all that is left is to cut the connection.
//
// G3: one error format, with the request id.
// G4: a line in the log for each 401, 403 and 429, and for each failure inside.
func (state *requestState) fail(err error) {
	p := *toProblem(err) // a copy: some problems are shared variables
	state.logProblem(&p)
	if state.status != 0 {
		panic(http.ErrAbortHandler)
	}
	header := state.Header()
	for _, name := range headersOfSuccess {
		header.Del(name)
	}
	header.Set("Content-Security-Policy", contentPolicy)
	header.Set("Cache-Control", "no-store")
	header.Set("Content-Type", "application/problem+json")
	// net/http reads the rest of the body, up to 256 kB, before it sends the answer. A client that
	// withholds the rest gets a second for it.
	http.NewResponseController(state.ResponseWriter).SetReadDeadline(time.Now().Add(time.Second))
	if p.Status == 401 {
		header.Set("WWW-Authenticate", "Cookie")
	}
	if p.retryAfter > 0 {
		header.Set("Retry-After", fmt.Sprint(math.Ceil(p.retryAfter.Seconds())))
	}
	p.Title = http.StatusText(p.Status)
	p.RequestID = state.id
	body, _ := json.Marshal(p) // strings and numbers: can't fail
	state.status = p.Status
	state.ResponseWriter.WriteHeader(p.Status)
	state.Write(body)
	state.errorWritten = true
}

func (state *requestState) logProblem(p *problem) {
	switch {
	case p.Status >= 500:
		state.log().Error("failed", "error", p.Error())
	case p.Status == 401 || p.Status == 403 || p.Status == 429:
		state.log().Info("refused", "code", p.Code, "reason", p.reason,
			"route", routeOf(state.request))
	}
}

// pathID returns the identifier in a path. What is not a UUID becomes NULL, which equals no id:
// 404.
func (state *requestState) pathID(name string) sql.Null[string] {
	id := state.request.PathValue(name)
	return sql.Null[string]{V: id, Valid: isUUID(id)}
}

// fields hands out the members of a JSON object, or the parameters of a query, by name.
// Each is checked against its rule. What is left over at the end is unknown, and refused.
type fields struct {
	values url.Values
	logged []string // what the log may show of the values
	errors []fieldError
	onRead func(rule) // set only by the test that writes openapi.json
}

// A rule is what a field must satisfy. Every value of this API is sent as a string.
type rule struct {
	name     string
	min, max int            // bounds of a number, or of a text's length; max 0: any length
	number   bool           // a whole number in decimal digits
	trim     bool           // spaces around the text don't count
	controls string         // the control characters that are allowed
	pattern  *regexp.Regexp // of a text; checked after max
	inWords  string         // the pattern in words
	oneOf    []string
	fallback string // the value of a field that is not sent
	required bool
}

const (
	maxJSONBody    = 16 << 10 // bytes
	maxMembers     = 64       // of a JSON object; no input has more than three
	maxContentType = 256      // bytes of a Content-Type that we look at
)

// readFields reads the input of a request: the query string of a GET or HEAD, else a JSON
// body.
//
// I2: a query with a bad escape or ";" is a 400; with repeated or wrong parameters, take refuses
// it; with unknown ones, finish does.
func readFields(state *requestState) (*fields, error) {
	r := state.request
	if isRead(r.Method) {
		values, err := url.ParseQuery(r.URL.RawQuery)
		if err != nil {
			return nil, invalid(fieldError{"query", "has a bad escape or a semicolon"})
		}
		return &fields{values: values}, nil
	}
	kind, params := mediaType(r.Header)
	if kind != "application/json" || len(params) > 0 {
		return nil, errMediaType
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxJSONBody+1))
	if err != nil {
		return nil, bodyProblem(err)
	}
	if len(body) > maxJSONBody {
		return nil, errTooLarge
	}
	return readJSON(body)
}

func isRead(method string) bool { return method == http.MethodGet || method == http.MethodHead }

// readJSON parses one flat JSON object of strings. encoding/json alone accepts duplicate
// members, names in another case, null, and data after the object.
//
// I3: none of these is accepted here.
func readJSON(body []byte) (*fields, error) {
	decoder := json.NewDecoder(bytes.NewReader(body))
	start, _ := decoder.Token()
	if start != json.Delim('{') || !json.Valid(body) {
		return nil, invalid(fieldError{"body", "must be one whole JSON object in UTF-8"})
	}
	f := &fields{values: url.Values{}}
	// The body is valid JSON, so Token can't fail. Decode fails only for a number that is out of
	// range, and value is then nil, which is no string. A body of maxMembers members is refused in
	// any case, because no input has so many. So the rest need not be read.
	for members := 0; decoder.More() && members < maxMembers; members++ {
		token, _ := decoder.Token()
		name := token.(string)
		var value any
		decoder.Decode(&value)
		text, isText := value.(string)
		if !isText {
			f.refuse(name, "must be a string")
		}
		f.values.Add(name, text)
	}
	return f, nil
}

// mediaType parses Content-Type and returns its parameters without the charset. It
// returns "" if the header is missing, repeated, too long or malformed, if the charset is
// not UTF-8, or if the body is encoded.
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

// refuse notes what is wrong with a field. An empty name is reported as "input". A name longer than
// any of ours is cut, so that a small request can't cause a large answer.
func (f *fields) refuse(name, detail string) {
	name = cmp.Or(name[:min(len(name), 64)], "input")
	f.errors = append(f.errors, fieldError{name, detail})
}

// text returns the value of a field, or its fallback if it is not sent.
func (f *fields) text(r rule) string {
	value, sent := f.take(r)
	if !sent && r.required {
		f.refuse(r.name, "is required")
	}
	return value
}

// number returns the value of a field that holds a whole number.
func (f *fields) number(r rule) int {
	n, _ := strconv.Atoi(f.text(r)) // what is no number has been refused
	return n
}

// optional returns the value of a field, or nil if it is not sent. It ignores required and
// fallback, because PATCH uses the rules of POST.
func (f *fields) optional(r rule) *string {
	value, sent := f.take(r)
	if !sent {
		return nil
	}
	return &value
}

// take removes a field from the input and validates it.
func (f *fields) take(r rule) (value string, sent bool) {
	if f.onRead != nil {
		f.onRead(r)
	}
	values := f.values[r.name]
	delete(f.values, r.name)
	if len(values) == 0 {
		return r.fallback, false
	}
	value = values[0]
	if r.trim {
		value = strings.Trim(value, " ")
	}
	complaint := r.validate(value)
	if len(values) > 1 {
		complaint = "is sent more than once"
	}
	if complaint != "" {
		f.refuse(r.name, complaint)
	}
	f.logged = append(f.logged, r.name+"="+r.forLog(value))
	return value, true
}

// forLog returns what the log shows of a value if the whole input is valid: numbers and
// choices, and of a text only its length.
func (r rule) forLog(value string) string {
	if r.number || r.oneOf != nil {
		return value
	}
	return fmt.Sprintf("(%d characters)", utf8.RuneCountInString(value))
}

// validate returns what is wrong with a value; "" means nothing. encoding/json has replaced a
// lone surrogate by U+FFFD (utf8.RuneError).
func (r rule) validate(value string) string {
	switch {
	case strings.ContainsRune(value, utf8.RuneError): // true of invalid UTF-8 as well
		return "must be whole Unicode text"
	case r.oneOf != nil && !slices.Contains(r.oneOf, value):
		return "must be one of: " + strings.Join(r.oneOf, ", ")
	case r.number:
		return r.validateNumber(value)
	default:
		return r.validateText(value)
	}
}

// validateNumber takes no sign, no space and no leading zeros.
func (r rule) validateNumber(value string) string {
	n, err := strconv.Atoi(value)
	if err != nil || strconv.Itoa(n) != value || n < r.min || n > r.max {
		return fmt.Sprintf("must be a whole number from %d to %d", r.min, r.max)
	}
	return ""
}

func (r rule) validateText(value string) string {
	length := utf8.RuneCountInString(value)
	if r.max > 0 && (length < r.min || length > r.max) {
		return fmt.Sprintf("must have %d to %d characters", r.min, r.max)
	}
	for _, c := range value {
		if unicode.IsControl(c) && !strings.ContainsRune(r.controls, c) {
			return "must not have control characters"
		}
	}
	if r.pattern != nil && !r.pattern.MatchString(value) {
		return "must be " + r.inWords
	}
	return ""
}

// finish returns the 400 that names the wrong fields, or nil. What is left over is unknown, and
// wrong.
//
// Z3: a member that no one asked for, such as role or userId, is refused by name.
func (f *fields) finish() error {
	for _, name := range slices.Sorted(maps.Keys(f.values)) {
		f.refuse(name, "is not known here")
	}
	if f.errors != nil {
		return invalid(f.errors...)
	}
	return nil
}

// A route is one endpoint: a row of the table in main.go.
type route struct {
	method, path string
	access       access
	roles        []string // one of them is needed; nil: any role
	status       int      // of success
	limit        *limiter // its own, besides the limit by client address of step 4
	contract     contract
}

// A contract is what an endpoint takes and gives. endpoint makes it, and every handler is
// registered through it.
type contract struct {
	input, output any  // zero values; the test that writes openapi.json reads their types
	hasLimitKey   bool // the input has a key for the route's own limit
	serve         func(*server, route, *requestState) error
}

// An output checks itself against its contract before it is sent.
type output interface{ isValid() bool }

// A limitKeyer is an input that gives the key by which the route's own limit counts the request.
type limitKeyer interface{ limitKey(*requestState) string }

// A sender is an output that writes itself, because it is not JSON.
type sender interface{ send(*requestState) }

// nothing is an empty input or output. As an input it means that body and query are ignored, or
// that the handler reads the body itself, as upload does. As an output it is a 204.
type nothing struct{}

func (nothing) isValid() bool            { return true }
func (nothing) send(state *requestState) { state.WriteHeader(http.StatusNoContent) }

// endpoint makes the contract of a handler. parse fills the input and checks it; nil means
// that body and query are ignored.
//
// The order of the checks is the order of refusals: session, suspended, terms, role (all
// by authorize), input, the route's own limit. The limit comes after the input, so that a
// malformed attempt is not counted.
//
// O5: attempts at a code are counted in route.limit, apart from the codes. A new code resets
// nothing.
func endpoint[In any, Out output](
	parse func(*fields) In,
	handle func(*requestState, In) (Out, error),
) contract {
	var noIn In
	var noOut Out
	_, hasLimitKey := any(noIn).(limitKeyer)
	c := contract{input: noIn, output: noOut, hasLimitKey: hasLimitKey}
	c.serve = func(s *server, row route, state *requestState) error {
		if err := s.authorize(state, row.access, row.roles); err != nil {
			return err
		}
		var in In
		if parse != nil {
			f, err := readFields(state)
			if err != nil {
				return err
			}
			in = parse(f)
			if err := f.finish(); err != nil {
				return err
			}
			state.loggedInput = strings.Join(f.logged, "&")
		}
		if counted, ok := any(in).(limitKeyer); ok {
			if err := row.limit.take(counted.limitKey(state)); err != nil {
				return err
			}
		}
		out, err := handle(state, in)
		if err != nil {
			return err
		}
		if closer, ok := any(out).(io.Closer); ok {
			defer closer.Close()
		}
		return row.send(state, out)
	}
	return c
}

// send checks an output and writes it.
//
// I5: an output that breaks its contract is a 500, and nothing of it is sent.
func (r route) send(state *requestState, out output) error {
	if !out.isValid() {
		return fmt.Errorf("the output of %s %s breaks its contract", r.method, r.path)
	}
	if custom, ok := out.(sender); ok {
		custom.send(state)
		return nil
	}
	return json.NewEncoder(jsonAnswer{state, r.status}).Encode(out)
}

// A jsonAnswer is what json.Encoder writes to. The encoder writes once, when it has the whole
// text. So if it fails, nothing has been sent.
type jsonAnswer struct {
	state  *requestState
	status int
}

func (a jsonAnswer) Write(text []byte) (int, error) {
	a.state.Header().Set("Content-Type", "application/json")
	a.state.Header().Set("Content-Length", strconv.Itoa(len(text)))
	a.state.WriteHeader(a.status)
	a.state.Write(text) // a client that has gone is no error of ours
	return len(text), nil
}

// validate panics if a route is not safe to serve. The server then does not start.
//
// Z1: every route states its access rule; every counted input has a limit, and every limit
// an input that it can count.
func (r route) validate() {
	name := r.method + " " + r.path
	switch {
	case !slices.Contains([]access{public, local, sessionOnly, sessionAndTerms}, r.access):
		panic("no access rule: " + name)
	case !r.access.needsSession() && r.roles != nil:
		panic("a role without a session: " + name)
	case r.contract.hasLimitKey != (r.limit != nil):
		panic("a counted input without a limit, or a limit without a key to count by: " + name)
	}
}

// logRequests is step 1. It runs around the other steps: it makes the request's state, and
// writes the log line when they are done. A panic ends here, as a 500. The local
// environment writes no line for a request: there, people watch the log for codes.
func (s *server) logRequests(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		started := time.Now()
		finishRequestHead(r)
		state := &requestState{ResponseWriter: w, request: r, serverLog: s.log}
		if s.stopping.Load() {
			w.Header().Set("Connection", "close")
		}
		if s.cfg.env != envLocal {
			defer func() { s.writeLogLine(state, time.Since(started)) }()
		}
		defer func() {
			fault := recover()
			if fault == http.ErrAbortHandler { // net/http's way to cut a connection
				panic(fault)
			}
			if fault != nil {
				_, stack, _ := strings.Cut(string(debug.Stack()), "panic(") // from it on
				state.fail(fmt.Errorf("panic: %v: %s", fault, stack))
			}
		}()
		next.ServeHTTP(state, r)
	})
}

// contentPolicy forbids a browser to do anything with an answer but read it.
const contentPolicy = "default-src 'none'; frame-ancestors 'none'"

// setSecurityHeaders is step 2. It also sets the CORS headers for an allowed origin, so
// that a page can read every answer, the 429 of step 4 included.
//
// C1: CORS headers for exactly the allowed origins.
// C3: the headers stand on every answer.
func (s *server) setSecurityHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("Strict-Transport-Security", "max-age=63072000; includeSubDomains")
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("X-Frame-Options", "DENY")
		header.Set("Referrer-Policy", "no-referrer")
		header.Set("Content-Security-Policy", contentPolicy)
		header.Set("Cross-Origin-Resource-Policy", "same-site")
		header.Set("Cache-Control", "no-store")
		header.Set("Vary", "Origin")
		origin := r.Header.Get("Origin")
		if s.cfg.allowsOrigin(origin) {
			header.Set("Access-Control-Allow-Origin", origin)
			header.Set("Access-Control-Allow-Credentials", "true")
			header.Set("Access-Control-Expose-Headers", "X-Request-Id, Retry-After, Location")
		}
		next.ServeHTTP(w, r)
	})
}

// setRequestContext is step 3: the request id and the client's address.
//
// G1: the client's own id is kept if it has the right form, else replaced.
func (s *server) setRequestContext(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state := stateOf(w)
		state.id = r.Header.Get("X-Request-Id")
		if !isRequestID(state.id) {
			state.id = rand.Text()
		}
		state.client = clientAddress(r, s.cfg.trustedProxies)
		w.Header().Set("X-Request-Id", state.id)
		next.ServeHTTP(w, r)
	})
}

const requestIDCharacters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"

// isRequestID reports whether a text is 1 to 128 of these characters. Trim leaves nothing of such
// a text.
func isRequestID(text string) bool {
	return text != "" && len(text) <= 128 && strings.Trim(text, requestIDCharacters) == ""
}

// limitByClient is step 4: the limit by client address.
func (s *server) limitByClient(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state := stateOf(w)
		limit := s.clientLimit(r.Method, r.URL.Path)
		if err := limit.take(clientKey(state.client)); err != nil {
			state.fail(err)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// checkOrigin is step 5. It answers the preflights of allowed origins and refuses writes
// by pages of all others.
//
// C2: SameSite=Lax alone would let pages of the same site write.
func (s *server) checkOrigin(next http.Handler) http.Handler {
	protection := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state := stateOf(w)
		allowed := s.cfg.allowsOrigin(r.Header.Get("Origin"))
		isForeignWrite := protection.Check(r) != nil
		isPreflight := r.Method == http.MethodOptions &&
			r.Header.Get("Access-Control-Request-Method") != ""
		if !allowed && (isForeignWrite || isPreflight) {
			// The browser hides the reason from the page. A developer finds it here.
			state.log().Info(
				"origin refused: not in ALLOWED_ORIGINS (in production: ALLOWED_ORIGIN_DOMAIN)",
				"origin", s.originForLog(r), "method", cleanText(r.Method))
		}
		switch {
		case !allowed && isForeignWrite:
			state.fail(errCrossOrigin)
		case allowed && isPreflight:
			w.Header().Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PATCH, DELETE")
			w.Header().Set("Access-Control-Allow-Headers", "Content-Type, X-Request-Id")
			w.Header().Set("Access-Control-Max-Age", "7200")
			w.WriteHeader(http.StatusNoContent)
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// serveRoutes is step 6: it finds the route and runs its contract. The router's own 404,
// 405 and redirects pass through requestState.WriteHeader.
func (s *server) serveRoutes(routes []route) http.Handler {
	mux := http.NewServeMux()
	for _, route := range routes {
		route.validate()
		if route.access == local && s.cfg.env != envLocal {
			continue
		}
		mux.HandleFunc(route.method+" "+route.path, func(w http.ResponseWriter, _ *http.Request) {
			state := stateOf(w)
			if err := route.contract.serve(s, route, state); err != nil {
				state.fail(err)
			}
		})
	}
	return mux
}

// writeLogLine writes the line of one request. Every value is the server's own, a checked
// identifier, or cleaned and cut. So no secret can get in. (The request id may be the
// client's own: see SECURITY.md.)
//
// H4: a line has at most 2 kB, whatever the request, and its cost hardly grows with the request.
func (s *server) writeLogLine(state *requestState, duration time.Duration) {
	r := state.request
	attrs := make([]slog.Attr, 0, 18)
	add := func(name, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(name, value))
		}
	}
	add("requestId", state.id)
	add("client", state.client.String())
	add("method", cleanText(r.Method))
	add("route", routeOf(r))
	if r.Pattern == "" && state.status == http.StatusNotFound {
		add("path", cleanText(r.URL.Path))
	}
	for _, name := range []string{"hubId", "fileId"} {
		if id := r.PathValue(name); isUUID(id) {
			add(name, id)
		}
	}
	if isRead(r.Method) {
		add("query", state.loggedInput)
	}
	attrs = append(attrs, slog.Int("status", state.status), slog.Int64("bytes", state.bytes),
		slog.Duration("duration", duration))
	if state.user != nil {
		add("userId", state.user.UserID)
	}
	kind, _ := mediaType(r.Header) // "" if it is missing or malformed
	add("contentType", cleanText(kind))
	add("origin", s.originForLog(r))
	add("userAgent", cleanText(r.Header.Get("User-Agent")))
	for _, name := range []string{"Cookie", "Authorization"} {
		if r.Header[name] != nil {
			add(strings.ToLower(name), "***")
		}
	}
	s.requestLog.LogAttrs(context.Background(), slog.LevelInfo, "request", attrs...)
}

// routeOf returns the pattern that took the request, without its method, or "" if none has.
func routeOf(r *http.Request) string {
	_, path, _ := strings.Cut(r.Pattern, " ")
	return path
}

// originForLog shows an allowed origin, and of any other only how long its host is.
func (s *server) originForLog(r *http.Request) string {
	origin := r.Header.Get("Origin")
	if origin == "" || s.cfg.allowsOrigin(origin) {
		return origin
	}
	_, host, _ := strings.Cut(origin, "://")
	return fmt.Sprintf("(host of %d characters)", len(host))
}

const (
	maxLoggedText  = 100 // bytes of a path or a User-Agent that the log looks at
	maxLoggedError = 700 // bytes of an error's text
)

// cleanText returns what the log may show of a text that a client wrote: of its first 100 bytes,
// nothing from a token on. A word that could be a secret becomes ***.
func cleanText(text string) string {
	text = text[:min(len(text), maxLoggedText)]
	if token := strings.Index(text, "eyJ"); token >= 0 { // {" in base64: a JWT begins so
		text = text[:token] + "***"
	}
	words := strings.Split(text, " ")
	for i, word := range words {
		if looksSecret(word) {
			words[i] = "***"
		}
	}
	return strings.Join(words, " ")
}

// looksSecret reports whether a word could be a secret. That is so if it has
//
//   - a character besides letters, digits and ./_-;:(),+ (an address has an @ or its escape),
//   - six digits in a row, such as a one-time code, also as 482-913 or 482_913,
//   - more than 24 letters and digits in a row, with any - and _ among them: a key or a piece
//     of a token.
func looksSecret(word string) bool {
	digits := 0
	run := 0
	for _, c := range []byte(word) {
		switch {
		case strings.IndexByte("0123456789", c) >= 0:
			digits++
			run++
		case 'a' <= c|0x20 && c|0x20 <= 'z': // a letter: |0x20 makes it lower case
			digits = 0
			run++
		case strings.IndexByte("./;:(),+", c) >= 0:
			digits = 0
			run = 0
		case c != '-' && c != '_':
			return true
		}
		if digits >= 6 || run > 24 {
			return true
		}
	}
	return false
}

// maskAttr is the slog.HandlerOptions.ReplaceAttr of the events' logger. It masks every text,
// the message included, except in four attributes, whose values are ids and IP addresses.
//
// G2: no code, token, cookie, password or whole address gets into a log. (A request id is the
// client's own word, and has at most 128 characters.)
func maskAttr(_ []string, a slog.Attr) slog.Attr {
	if slices.Contains([]string{"requestId", "userId", "fileId", "client"}, a.Key) {
		return a
	}
	if kind := a.Value.Kind(); kind == slog.KindString || kind == slog.KindAny {
		text := a.Value.String()
		if text == "" {
			return slog.Attr{} // left out
		}
		a.Value = slog.StringValue(maskText(text))
	}
	return a
}

// maskRules are applied to a text one after the other, in this order.
var maskRules = []struct {
	pattern     *regexp.Regexp
	replacement string
}{
	{regexp.MustCompile(`\s+`), " "},
	// Invisible, direction and control characters, which could hide what they stand in.
	{regexp.MustCompile(`[\p{Cc}\p{Cf}\x{2028}\x{2029}\x{fffd}]`),
		""},
	// smtps://user:password@mail.example.com
	{regexp.MustCompile(`://[^/\s]*@`),
		"://***@"},
	// jane.roe@example.com, jane.roe%40example.com, jane.roe\u0040example.com. \x60 is `.
	{regexp.MustCompile(`([\w!#$%&'*+/=?^\x60{|}~-])[\w!#$%&'*+/=?^\x60{|}~.-]*(@|%(?:25)*40|\\u0040)`),
		"$1***$2"},
	// A token, also one that is broken by blanks.
	{regexp.MustCompile(`eyJ[\w.%=-]*(\s+[\w.%=-]{16,})*`),
		"***"},
	// password=hunter2, and everything after it.
	{regexp.MustCompile(`(?is)(code|token|secret|pass|pwd|key|session|auth)[^=&\s]*=.*`),
		"***"},
	// An escape, in which another could hide, and everything after it.
	{regexp.MustCompile(`(?s)%[0-9A-Fa-f]{2}.*`),
		"***"},
	// A one-time code: 482913, 482-913, 4 8 2 9 1 3.
	{regexp.MustCompile(`[0-9]([-_ ]?[0-9]){5,}`),
		"***"},
	// A key or a piece of a token: more letters and digits in a row than an id has.
	{regexp.MustCompile(`[\w+/=-]{40,}`),
		"***"},
}

// maskText cuts a text to maxLoggedError bytes, then applies the rules.
func maskText(text string) string {
	text = text[:min(len(text), maxLoggedError)]
	for _, rule := range maskRules {
		text = rule.pattern.ReplaceAllString(text, rule.replacement)
	}
	return text[:min(len(text), maxLoggedError)] // a mask can be longer than what it hides
}
