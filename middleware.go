package main

// This file carries a request from the socket to its handler and the answer back.
//
//  1. problem: the one error format, and the one place that writes it;
//  2. exchange: what the steps share about a request, and the response wrapper;
//  3. fields: the strict reader of JSON bodies and query strings;
//  4. contract: what every operation is declared by;
//  5. the steps of the pipeline, in the order of the specification.

import (
	"cmp"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
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

// problem is an error that a client is told of, in the format of RFC 9457. Any
// other error that reaches the contract is an internal one, but for those that toProblem
// knows: logged, not shown.
type problem struct {
	Title      string        `json:"title"`
	Status     int           `json:"status"`
	Detail     string        `json:"detail"` // a sentence for people
	Code       string        `json:"code"`   // the stable word that programs compare
	RequestID  string        `json:"requestId"`
	Errors     []fieldError  `json:"errors,omitempty"`
	retryAfter time.Duration // sent in whole seconds, rounded up; 0: not sent
	cause      error         // for the log only
}

// fieldError says what is wrong with one field of the input.
type fieldError struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

// Error is for the log, which masks it.
func (p *problem) Error() string { return fmt.Sprintf("%s: %v", p.Code, p.cause) }

func newProblem(status int, code, detail string) *problem {
	return &problem{Status: status, Code: code, Detail: detail}
}

// The problems that need nothing of the request at hand. Rate limits, invalid
// input and conflicts are made where they arise.
var errUnauthenticated = newProblem(401, "unauthenticated", "Sign in: the session is missing, expired or ended.")
var errInvalidCode = newProblem(401, "invalid_code", "The code is wrong, used or expired.")
var errSuspended = newProblem(403, "account_suspended", "This account is suspended.")
var errForbidden = newProblem(403, "forbidden", "Your role does not permit this.")
var errTermsMissing = newProblem(403, "terms_not_accepted", "Accept the terms first: POST /terms/acceptance.")
var errCrossOrigin = newProblem(403, "cross_origin", "Pages of this origin may not write here.")
var errNotFound = newProblem(404, "not_found", "There is nothing at this address.")
var errMethod = newProblem(405, "method_not_allowed", "The Allow header lists the methods of this address.")
var errPrecondition = newProblem(412, "precondition_failed", "A condition in the request's headers does not hold.")
var errTooLarge = newProblem(413, "too_large", "The body is larger than this endpoint takes.")
var errMediaType = newProblem(415, "unsupported_media_type", "This Content-Type or Content-Encoding is not taken.")
var errRange = newProblem(416, "range_not_satisfiable", "The file has no such range.")

// invalid is the 400 of an input in which these fields are wrong: no input of ours has more
// than 20, and an answer must not be many times as long as its request.
func invalid(f ...fieldError) *problem {
	return &problem{Status: 400, Code: "invalid_request", Detail: "The input is not valid.", Errors: f[:min(len(f), 20)]}
}

// toProblem gives each error its answer. What is not known is a bug: 500.
func toProblem(err error) *problem {
	if p, ok := errors.AsType[*problem](err); ok {
		return p
	}
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	switch {
	case tooLarge:
		return errTooLarge
	case errors.Is(err, sql.ErrNoRows):
		return errNotFound
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return &problem{Status: 507, Code: "insufficient_storage", Detail: "There is no room for the file.", cause: err}
	}
	return &problem{Status: 500, Code: "internal", Detail: "The server failed; its log says why.", cause: err}
}

// bodyProblem is the answer to a body that could not be read to its end, or stored.
func bodyProblem(err error) error {
	_, disk := errors.AsType[*fs.PathError](err)
	if p := toProblem(err); disk || p.Status < 500 {
		return p
	}
	return invalid(fieldError{"body", "is broken off or malformed"})
}

// exchange is one request and its answer: what the steps of the pipeline share.
// To net/http it is the http.ResponseWriter. It belongs to the goroutine of the request.
type exchange struct {
	http.ResponseWriter // net/http's own
	r                   *http.Request
	log                 *slog.Logger // from step 3 on with the request's id and client, then with its user
	id                  string       // step 3: the request id, in the log and in every error
	client              netip.Addr   // step 3: the client's address
	user                *user        // step 6: loaded once, where the route asks for a session or begins one
	sessionEnds         time.Time    // with user: when the token expires
	status              int          // as sent; 0: nothing is sent yet
	bytes               int64        // of the body, as sent; of a HEAD as net/http has dropped them
	failed              bool         // fail has answered: what net/http's own code still writes is dropped
}

// Unwrap gives http.ResponseController the writer that has the deadlines.
func (x *exchange) Unwrap() http.ResponseWriter { return x.ResponseWriter }

// WriteHeader replaces the errors of net/http's own code by ours: the router's 404
// and 405, its redirects to a cleaned path (404), http.ServeContent's 412 and 416.
// The first status is the one that counts.
func (x *exchange) WriteHeader(status int) {
	if status >= 300 && status != http.StatusNotModified {
		x.fail(cmp.Or(standardErrors[status], error(errNotFound)))
	} else if x.status == 0 {
		x.status = status
		x.ResponseWriter.WriteHeader(status)
	}
}

// A 500 of http.ServeContent's is a file that can't be read: a fault inside, as any other.
var standardErrors = map[int]error{405: errMethod, 412: errPrecondition, 416: errRange, 500: errors.New("net/http")}

func (x *exchange) Write(b []byte) (int, error) {
	if x.failed {
		return len(b), nil
	}
	x.WriteHeader(http.StatusOK)
	n, err := x.ResponseWriter.Write(b)
	x.bytes += int64(n)
	return n, err
}

// ReadFrom keeps sendfile: http.ServeContent copies a file through it.
func (x *exchange) ReadFrom(src io.Reader) (int64, error) {
	x.WriteHeader(http.StatusOK)
	n, err := io.Copy(x.ResponseWriter, src)
	x.bytes += n
	return n, err
}

// fail answers with err: the one place that writes an error. Nothing of an answer
// that was begun stays, neither its cookie nor its caching headers. After the
// status has gone out, only cutting the connection tells the client.
func (x *exchange) fail(err error) {
	p := *toProblem(err)
	switch {
	case p.Status >= 500:
		x.log.Error("failed", "error", p.Error())
	case p.Status == 401 || p.Status == 403 || p.Status == 429:
		x.log.Info("refused", "code", p.Code, "path", x.r.URL.Path)
	}
	if x.status != 0 {
		panic(http.ErrAbortHandler)
	}
	for _, name := range []string{"Set-Cookie", "ETag", "Last-Modified", "Accept-Ranges", "Location",
		"Content-Disposition", "Content-Length"} {
		x.Header().Del(name)
	}
	x.Header().Set("Content-Security-Policy", contentPolicy)
	x.Header().Set("Cache-Control", "no-store")
	x.Header().Set("Content-Type", "application/problem+json")
	if p.Status == 401 {
		x.Header().Set("WWW-Authenticate", "Cookie")
	}
	if p.retryAfter > 0 {
		x.Header().Set("Retry-After", fmt.Sprint(int64((p.retryAfter+time.Second-1)/time.Second)))
	}
	p.Title, p.RequestID = http.StatusText(p.Status), x.id
	body, _ := json.Marshal(p) // texts and numbers: can't fail
	x.status = p.Status
	x.ResponseWriter.WriteHeader(p.Status)
	x.Write(body)
	x.failed = true
}

// fields hands out the members of a JSON object or the parameters of a query, by
// name, each checked by its rule. Every value of this API is sent as a text. What
// nobody has asked for at the end is unknown, and refused.
type fields struct {
	values url.Values
	rules  []rule // what was asked for; the tests make openapi.json of it
	errors []fieldError
}

// rule is what a field must satisfy.
type rule struct {
	name     string
	min, max int    // characters of a text after trimming, or the bounds of a number
	number   bool   // a whole one, in decimal digits
	trim     bool   // spaces around the text don't count
	controls string // the control characters that are allowed
	pattern  *regexp.Regexp
	form     string // the pattern in words
	oneOf    []string
	fallback string // of a field that is not sent; where it ("", say) breaks the rule, the field is required
	optional bool   // not sent is as good
}

const maxJSONBody = 16 << 10 // bytes

// readFields reads the query string of a GET, whole escapes and no ";"; of all else a
// body of one flat JSON object of texts. encoding/json by itself would let duplicates,
// other case, trailing data and broken Unicode pass.
func readFields(x *exchange) (*fields, error) {
	if x.r.Method == http.MethodGet || x.r.Method == http.MethodHead {
		query, err := url.ParseQuery(x.r.URL.RawQuery)
		if err != nil {
			return nil, invalid(fieldError{"query", "has a bad escape or a semicolon"})
		}
		return &fields{values: query}, nil
	}
	if kind, others := mediaType(x.r.Header); kind != "application/json" || len(others) > 0 {
		return nil, errMediaType
	}
	body, err := io.ReadAll(http.MaxBytesReader(x.ResponseWriter, x.r.Body, maxJSONBody))
	if err != nil {
		return nil, bodyProblem(err)
	}
	decoder := json.NewDecoder(strings.NewReader(string(body)))
	if start, _ := decoder.Token(); start != json.Delim('{') || !json.Valid(body) {
		return nil, invalid(fieldError{"body", "must be one whole JSON object in UTF-8"})
	}
	f := &fields{values: url.Values{}}
	for decoder.More() { // no errors any more: the body is valid
		var value any
		name, _ := decoder.Token()
		decoder.Decode(&value)
		text, isText := value.(string)
		if !isText {
			f.refuse(cmp.Or(name.(string), "input"), "must be a string")
		}
		f.values.Add(name.(string), text)
	}
	return f, nil
}

// mediaType is what the one Content-Type line of a body in UTF-8 without
// Content-Encoding says; its parameters but for that charset.
func mediaType(h http.Header) (kind string, params map[string]string) {
	kind, params, err := mime.ParseMediaType(h.Get("Content-Type"))
	isUTF8 := strings.EqualFold(cmp.Or(params["charset"], "utf-8"), "utf-8")
	if err != nil || !isUTF8 || len(h["Content-Type"]) > 1 || h["Content-Encoding"] != nil {
		return "", nil
	}
	delete(params, "charset")
	return kind, params
}

func (f *fields) refuse(name, detail string) { f.errors = append(f.errors, fieldError{name, detail}) }

// optional is the checked text of a field, or nil where the field is not sent, be it
// required elsewhere.
func (f *fields) optional(r rule) *string {
	_, sent := f.values[r.name]
	r.optional, r.fallback = true, ""
	if text := f.text(r); sent {
		return &text
	}
	return nil
}

// text is the checked text of a field, or the rule's fallback.
func (f *fields) text(r rule) string {
	f.rules = append(f.rules, r)
	values, sent := f.values[r.name]
	delete(f.values, r.name)
	value := append(values, r.fallback)[0]
	if r.trim {
		value = strings.Trim(value, " ")
	}
	switch fault := r.fault(value); {
	case len(values) > 1:
		f.refuse(r.name, "is there more than once")
	case sent && fault != "":
		f.refuse(r.name, fault)
	case !sent && fault != "" && !r.optional:
		f.refuse(r.name, "is required")
	}
	return value
}

// number is the checked value of a field that holds a whole number.
func (f *fields) number(r rule) int {
	n, _ := strconv.Atoi(f.text(r))
	return n
}

// fault says what is wrong with a value, or nothing. U+FFFD is what a lone surrogate
// decodes to: it stands for text that was lost.
func (r rule) fault(value string) string {
	length := utf8.RuneCountInString(value)
	n, err := strconv.Atoi(value)
	control := func(c rune) bool { return unicode.IsControl(c) && !strings.ContainsRune(r.controls, c) }
	switch {
	case strings.ContainsRune(value, utf8.RuneError): // or invalid UTF-8, says strings.IndexRune
		return "must be whole Unicode text"
	case r.oneOf != nil && !slices.Contains(r.oneOf, value):
		return "must be one of: " + strings.Join(r.oneOf, ", ")
	case r.number && (err != nil || strconv.Itoa(n) != value || n < r.min || n > r.max): // no sign, no leading zeros
		return fmt.Sprintf("must be a whole number from %d to %d", r.min, r.max)
	case !r.number && r.max > 0 && (length < r.min || length > r.max):
		return fmt.Sprintf("must have %d to %d characters", r.min, r.max)
	case strings.ContainsFunc(value, control):
		return "must not have control characters"
	case r.pattern != nil && !r.pattern.MatchString(value):
		return "must be " + r.form
	}
	return ""
}

// check is the 400 that names every wrong field, the unknown ones included.
func (f *fields) check() error {
	for _, name := range slices.Sorted(maps.Keys(f.values)) {
		f.refuse(cmp.Or(name, "input"), "is not known here")
	}
	if f.errors != nil {
		return invalid(f.errors...)
	}
	return nil
}

// route is one operation: a row of the table in main.go.
type route struct {
	method, path string
	access       access
	roles        []string // one of them is needed; nil: any role
	status       int      // of success
	limit        *limiter // its own, besides the limit by address of step 4
	contract     contract
}

// contract is what an operation takes and gives, with the checks of both. It is the
// only way to register a handler.
type contract struct {
	input, output any // zero values: the test that makes openapi.json reads their types
	perform       func(*server, route, *exchange) error
}

// An input reads and checks itself; an output checks itself before it is sent. An
// input that its route's own limit counts gives the key to count by.
type input[In any] interface{ read(*fields) In }
type output interface{ check() bool }
type limited interface{ limitKey(*exchange) string }

// nothing is the input of an endpoint that ignores body and query (or reads the body
// itself, as upload does), and the output of one that answers 204.
type nothing struct{}

func (nothing) read(*fields) nothing { return nothing{} }
func (nothing) check() bool          { return true }
func (nothing) send(x *exchange)     { x.WriteHeader(http.StatusNoContent) }

// sender is an output that is not JSON and writes itself.
type sender interface{ send(*exchange) }

// endpoint makes the contract of a handler from its types: step 6 of the pipeline.
// The order of its checks is the order of refusals. The route's own limit comes
// after the check of the input, so that a malformed attempt does not count.
func endpoint[In input[In], Out output](handle func(*exchange, In) (Out, error)) contract {
	var in In
	var out Out
	return contract{in, out, func(s *server, r route, x *exchange) error {
		var in In
		var out Out
		return inOrder(
			func() error { return s.authorize(x, r.access, r.roles) },
			func() (err error) { in, err = readInput[In](x); return err },
			func() error { return r.count(x, in) },
			func() (err error) { out, err = handle(x, in); return err },
			func() error { return r.send(x, out) },
		)
	}}
}

// inOrder takes one step after the other, until one fails.
func inOrder(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func readInput[In input[In]](x *exchange) (in In, err error) {
	if _, ignored := any(in).(nothing); ignored {
		return in, nil
	}
	f, err := readFields(x)
	if err != nil {
		return in, err
	}
	in = in.read(f)
	return in, f.check()
}

func (r route) count(x *exchange, in any) error {
	if r.limit == nil {
		return nil
	}
	return r.limit.take(in.(limited).limitKey(x))
}

// send checks an output and writes it.
func (r route) send(x *exchange, out output) error {
	if !out.check() {
		return fmt.Errorf("an output of %s %s breaks its contract", r.method, r.path)
	}
	if out, sends := out.(sender); sends {
		out.send(x)
		return nil
	}
	body, err := json.Marshal(out) // before the status goes out: it could fail
	if err != nil {
		return err
	}
	x.Header().Set("Content-Type", "application/json")
	x.Header().Set("Content-Length", strconv.Itoa(len(body)))
	x.WriteHeader(r.status)
	x.Write(body) // a client that has gone is no error of ours
	return nil
}

// register makes a router of the routes. Its own 404, 405 and redirects pass
// through exchange.WriteHeader.
func (s *server) register(routes []route) http.Handler {
	mux := http.NewServeMux()
	for _, route := range routes {
		switch {
		case route.access == "" || !route.access.needsSession() && route.roles != nil:
			panic("no access rule, or a role without a session: " + route.path)
		case route.access == local && s.cfg.env != envLocal:
			continue
		}
		perform := func(x *exchange) error { return route.contract.perform(s, route, x) }
		mux.Handle(route.method+" "+route.path, before(perform, nil)) // nil on purpose: nothing written is a panic, a 500
	}
	return mux
}

// logRequests is step 1. It frames the others: it begins the exchange, and writes
// its line when the rest is done, a panic included, which ends as a 500 here. Bodies
// are never logged; of the headers only those listed, and none that bears a secret. The
// local environment, where one watches the log for codes, has no such line.
func (s *server) logRequests(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x, started := &exchange{ResponseWriter: w, r: r, log: s.log}, time.Now()
		if s.stopping.Load() {
			w.Header().Set("Connection", "close")
		}
		defer func() {
			if s.cfg.env == envLocal {
				return
			}
			// Escapes could hide what has to be masked; a query with a bad one is not logged.
			query, _ := url.PathUnescape(r.URL.RawQuery)
			line := []any{"method", r.Method, "path", r.URL.Path, "query", query,
				"status", x.status, "bytes", x.bytes, "duration", time.Since(started)}
			for _, name := range loggedHeaders {
				if value := r.Header.Get(name); value != "" {
					line = append(line, strings.ToLower(name), value)
				}
			}
			x.log.Info("request", line...)
		}()
		defer func() {
			if fault := recover(); fault == http.ErrAbortHandler { // the way to cut a connection
				panic(fault)
			} else if fault != nil {
				x.fail(fmt.Errorf("panic: %v\n%s", fault, debug.Stack()))
			}
		}()
		next.ServeHTTP(x, r)
	})
}

// loggedHeaders are those that help to tell clients apart; of the last two maskAttr leaves
// only that they were there.
var loggedHeaders = []string{"User-Agent", "Content-Type", "Origin", "Cookie", "Authorization"}

// contentPolicy lets a browser do nothing with an answer but read it.
const contentPolicy = "default-src 'none'; frame-ancestors 'none'"

// before makes a middleware of a step that refuses a request, answers it or lets it go on.
func before(step func(*exchange) error, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := w.(*exchange)
		if err := step(x); err != nil {
			x.fail(err)
		} else if x.status == 0 {
			next.ServeHTTP(w, r)
		}
	})
}

// setSecurityHeaders is step 2. The CORS headers for an allowed origin stand here
// too, so that a page can read every answer, the 429 of step 4 included.
func (s *server) setSecurityHeaders(x *exchange) error {
	x.Header().Set("Strict-Transport-Security", "max-age=63072000; includeSubDomains")
	x.Header().Set("X-Content-Type-Options", "nosniff")
	x.Header().Set("X-Frame-Options", "DENY")
	x.Header().Set("Referrer-Policy", "no-referrer")
	x.Header().Set("Content-Security-Policy", contentPolicy)
	x.Header().Set("Cross-Origin-Resource-Policy", "same-site")
	x.Header().Set("Cache-Control", "no-store")
	x.Header().Set("Vary", "Origin")
	if origin := x.r.Header.Get("Origin"); s.cfg.allowsOrigin(origin) {
		x.Header().Set("Access-Control-Allow-Origin", origin)
		x.Header().Set("Access-Control-Allow-Credentials", "true")
		x.Header().Set("Access-Control-Expose-Headers", "X-Request-Id, Retry-After, Location")
	}
	return nil
}

var requestIDForm = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

// setContext is step 3: the request id, the client's own where it has the right
// form, and the client's address.
func (s *server) setContext(x *exchange) error {
	if x.id = x.r.Header.Get("X-Request-Id"); !requestIDForm.MatchString(x.id) {
		x.id = rand.Text()
	}
	x.Header().Set("X-Request-Id", x.id)
	x.client = clientAddress(x.r, s.cfg.trustedProxies)
	x.log = s.log.With("requestId", x.id, "client", x.client.String())
	return nil
}

// limitByAddress is step 4. Reading files has a bucket of its own in place of the
// global one, else its 500 a second could never be reached.
func (s *server) limitByAddress(x *exchange) error {
	return s.addressLimit(x.r.Method, x.r.URL.Path).take(addressKey(x.client))
}

// checkOrigin is step 5. It answers the preflights of allowed origins, and refuses
// writes by pages of all other origins: SameSite=Lax alone lets same-site ones pass.
func (s *server) checkOrigin(x *exchange) error {
	switch allowed := s.cfg.allowsOrigin(x.r.Header.Get("Origin")); {
	case !allowed && new(http.CrossOriginProtection).Check(x.r) != nil:
		return errCrossOrigin
	case allowed && x.r.Method == http.MethodOptions && x.r.Header.Get("Access-Control-Request-Method") != "":
		x.Header().Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PATCH, DELETE")
		x.Header().Set("Access-Control-Allow-Headers", "Content-Type, X-Request-Id")
		x.Header().Set("Access-Control-Max-Age", "7200")
		x.WriteHeader(http.StatusNoContent)
	}
	return nil
}
