package main

// This file carries a request from net/http to its handler, and the answer back.
//
//  1. The six steps of the pipeline, in the order of the specification.
//  2. The contract: what every endpoint declares, and serveRoute, which runs it.
//  3. Strict input: JSON bodies and query strings.
//  4. The answer: answer writes a success, and fail every error.
//  5. Problems: the errors that a client is told about.
//  6. The log: what it takes from a request, and what it masks.

import (
	"bytes"
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

// handler returns the six steps that every request takes. Each is wrapped around those above it,
// so the last line runs first.
func (s *server) handler(routes []route) http.Handler {
	h := s.serveRoutes(routes)  // 6. authentication, permission, input, output
	h = s.checkOrigin(h)        // 5. preflights, cross-site writes
	h = s.limitByClient(h)      // 4. the limits by client address
	h = s.setRequestContext(h)  // 3. request id, client address
	h = s.setSecurityHeaders(h) // 2. with the CORS headers
	h = s.logRequests(h)        // 1. begins first and ends last
	return h
}

// A requestState is one request and its answer: what the six steps share. It is also the
// http.ResponseWriter that the router and http.ServeContent write to: see part 4. Only the request's
// own goroutine uses it.
type requestState struct {
	http.ResponseWriter // net/http's own
	request             *http.Request
	serverLog           *slog.Logger

	originAllowed bool         // step 2: the Origin header names an allowed origin
	id            string       // step 3: the request id, in the log and in every error
	client        netip.Addr   // step 3: the client's address
	route         route        // step 6: the zero route if none takes the request
	user          *user        // step 6: the account, if the route needs or begins a session
	session       sessionToken // step 6: the token of that session
	loggedInput   string       // step 6: what the log may show of the input

	status int   // the status that was sent; 0: nothing has been sent
	bytes  int64 // length of the body as written; net/http sends none of it for a HEAD
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

// logRequests is step 1. It runs around the other steps: it makes the request's state, and
// writes the log line when they are done. A panic ends here, as a 500. The local
// environment writes no line for a request: there, people watch the log for codes.
func (s *server) logRequests(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		started := time.Now()
		state := &requestState{ResponseWriter: w, request: r, serverLog: s.log}
		if s.stopping.Load() {
			w.Header().Set("Connection", "close")
		}
		// Deferred before the recovery below, so it runs after it and logs the 500.
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

// securityHeaders stand on every answer. A file has another policy for content and caches.
var securityHeaders = map[string]string{
	"Strict-Transport-Security":    "max-age=63072000; includeSubDomains",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
	"Referrer-Policy":              "no-referrer",
	"Content-Security-Policy":      contentPolicy,
	"Cross-Origin-Resource-Policy": "same-site",
	"Cache-Control":                "no-store",
	"Vary":                         "Origin",
}

// setSecurityHeaders is step 2: every answer has these headers (C3). It also sets the CORS headers
// for an allowed origin, and for no other (C1), so that a page can read every answer, the 429 of
// step 4 included.
func (s *server) setSecurityHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		for name, value := range securityHeaders {
			header.Set(name, value)
		}
		state := stateOf(w)
		origin := r.Header.Get("Origin")
		state.originAllowed = s.cfg.allowsOrigin(origin)
		if state.originAllowed {
			header.Set("Access-Control-Allow-Origin", origin)
			header.Set("Access-Control-Allow-Credentials", "true")
			header.Set("Access-Control-Expose-Headers", "X-Request-Id, Retry-After, Location")
		}
		next.ServeHTTP(w, r)
	})
}

// maxOrigin is a little more than the length of the longest origin: "https://", a domain of 253
// characters, a port.
const maxOrigin = 270

// allowsOrigin reports whether origin is in the allow-list. In production that is the https
// subdomains of one domain on the default port. domainForm lets no port, user name or path through.
//
// Exactly these origins pass, and never null; in production neither http nor the bare domain (C1).
func (c *config) allowsOrigin(origin string) bool {
	if origin == "" || len(origin) > maxOrigin {
		return false
	}
	if c.env != envProduction {
		return slices.Contains(c.allowedOrigins, origin)
	}
	host, isHTTPS := strings.CutPrefix(origin, "https://")
	return isHTTPS && strings.HasSuffix(host, "."+c.originDomain) && domainForm.MatchString(host)
}

// setRequestContext is step 3: the request id and the client's address. The client's own id is
// kept if it has the right form, else replaced (G1).
func (s *server) setRequestContext(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state := stateOf(w)
		state.id = r.Header.Get("X-Request-Id")
		if !requestIDForm.MatchString(state.id) {
			state.id = rand.Text()
		}
		state.client = clientAddress(r, s.cfg.trustedProxies)
		w.Header().Set("X-Request-Id", state.id)
		next.ServeHTTP(w, r)
	})
}

var requestIDForm = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

// clientAddress returns the address that limits and the log go by. X-Forwarded-For is read
// from the right: each element was written by the hop to its right, and counts only if that
// hop is trusted; the client may have written anything further left (L2). Reading ends at the
// first element that is not an address.
func clientAddress(r *http.Request, trusted []netip.Prefix) netip.Addr {
	client := parseAddress(r.RemoteAddr)
	isTrusted := func(prefix netip.Prefix) bool { return prefix.Contains(client) }
	rest := strings.Join(r.Header.Values("X-Forwarded-For"), ",")
	for rest != "" && slices.ContainsFunc(trusted, isTrusted) {
		comma := strings.LastIndexByte(rest, ',')
		hop := parseAddress(strings.TrimSpace(rest[comma+1:]))
		if !hop.IsValid() {
			break
		}
		client = hop
		rest = rest[:max(comma, 0)]
	}
	return client
}

// parseAddress reads 1.2.3.4, 1.2.3.4:80, 2001:db8::1 and [2001:db8::1]:80. The result is not
// valid if text is none of these.
func parseAddress(text string) netip.Addr {
	addr, err := netip.ParseAddr(text)
	if err != nil {
		withPort, _ := netip.ParseAddrPort(text)
		addr = withPort.Addr()
	}
	return addr.Unmap().WithZone("")
}

// clientKey returns an IPv4 address as its /32, and an IPv6 address as its /64, since one
// customer usually has all the addresses of a /64.
func clientKey(client netip.Addr) string {
	network, _ := client.Prefix(min(client.BitLen(), 64))
	return network.String()
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

// clientLimit returns the limit of step 4 that counts a request. Reading files has a
// bucket of its own instead of requestLimit, which would let only 100 in 10 s pass.
func (s *server) clientLimit(method, path string) *limiter {
	if isRead(method) && strings.HasPrefix(path, "/files/") {
		return s.fileLimit
	}
	return s.requestLimit
}

// checkOrigin is step 5. It answers the preflights of allowed origins and refuses writes
// by pages of all others. SameSite=Lax alone would let pages of the same site write (C2).
//
// A request with neither Sec-Fetch-Site nor Origin passes: browsers send at least one of them
// with every write, so it comes from no page.
func (s *server) checkOrigin(next http.Handler) http.Handler {
	protection := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state := stateOf(w)
		isPreflight := r.Method == http.MethodOptions &&
			r.Header.Get("Access-Control-Request-Method") != ""
		if isPreflight && state.originAllowed {
			w.Header().Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PATCH, DELETE")
			w.Header().Set("Access-Control-Allow-Headers", "Content-Type, X-Request-Id")
			w.Header().Set("Access-Control-Max-Age", "7200")
			w.WriteHeader(http.StatusNoContent)
			return
		}
		isForeignWrite := protection.Check(r) != nil
		if (isForeignWrite || isPreflight) && !state.originAllowed {
			// The browser hides the reason from the page. A developer finds it here.
			state.log().Info(
				"origin refused: not in ALLOWED_ORIGINS (in production: ALLOWED_ORIGIN_DOMAIN)",
				"origin", s.originForLog(state))
		}
		if isForeignWrite && !state.originAllowed {
			state.fail(errCrossOrigin)
			return
		}
		next.ServeHTTP(w, r) // the router answers a refused preflight with its 405 or 404
	})
}

// serveRoutes is step 6: it finds the route, and serveRoute runs its contract. The router's own
// 404, 405 and redirects pass through requestState.WriteHeader.
func (s *server) serveRoutes(routes []route) http.Handler {
	mux := http.NewServeMux()
	for _, row := range routes {
		row.validate()
		if row.access == local && s.cfg.env != envLocal {
			continue
		}
		mux.HandleFunc(row.method+" "+row.path, func(w http.ResponseWriter, _ *http.Request) {
			state := stateOf(w)
			state.route = row
			if err := s.serveRoute(state); err != nil {
				state.fail(err)
			}
		})
	}
	return mux
}

// access says who may call an endpoint. The zero value is no rule: the server does not
// start with a route that has none.
type access string

const (
	public          access = "-"                     // everyone
	local           access = "local"                 // everyone; only the local environment has the route
	sessionOnly     access = "session"               // a session whose account is not suspended
	sessionAndTerms access = "session, terms"        // the same, with the current terms accepted
	adminOnly       access = "session, terms, admin" // the same, of a user with that role
)

func (a access) needsSession() bool { return a != public && a != local }

// A route is one endpoint: a row of the table in main.go.
type route struct {
	method, path string
	access       access
	status       int // of success
	contract     contract
}

// validate panics if a route is not safe to serve: every route states its access rule, and every
// counted input has a limit (Z1). The server then does not start.
func (r route) validate() {
	name := r.method + " " + r.path
	known := []access{public, local, sessionOnly, sessionAndTerms, adminOnly}
	if !slices.Contains(known, r.access) {
		panic("no access rule: " + name)
	}
	if _, isCounted := r.contract.input.(limitKeyer); isCounted && r.contract.limit == nil {
		panic("a counted input without a limit: " + name)
	}
}

// A contract is what an endpoint takes, does and gives. endpoint and limitedEndpoint make it, and
// serveRoute runs it.
type contract struct {
	input, output any               // zero values; the test that writes openapi.json reads their types
	parse         func(*fields) any // makes the input; nil: body and query are ignored
	limit         *limiter          // its own, besides the limit by client address of step 4
	handle        func(state *requestState, input any) (output, error)
}

// An output checks itself against its contract before it is sent.
type output interface{ isValid() bool }

// A limitKeyer is an input that is counted: it gives the key by which its own limit counts it.
type limitKeyer interface{ limitKey(*requestState) string }

// A sender is an output that writes itself, because it is not JSON.
type sender interface{ send(*requestState) }

// nothing is an empty input or output. As an input it means that body and query are ignored, or
// that the handler reads the body itself, as upload does. As an output it is an empty answer.
type nothing struct{}

func (nothing) isValid() bool { return true }

func (nothing) send(state *requestState) { state.WriteHeader(state.route.status) }

// endpoint makes the contract of a handler. parse makes the input from the fields that were sent,
// and checks it; nil means that body and query are ignored.
func endpoint[In any, Out output](
	parse func(*fields) In,
	handle func(*requestState, In) (Out, error),
) contract {
	var zeroIn In
	var zeroOut Out
	c := contract{input: zeroIn, output: zeroOut}
	if parse != nil {
		c.parse = func(f *fields) any { return parse(f) }
	}
	c.handle = func(state *requestState, input any) (output, error) {
		return handle(state, input.(In))
	}
	return c
}

// limitedEndpoint is endpoint for an input that is counted.
func limitedEndpoint[In limitKeyer, Out output](
	limit *limiter,
	parse func(*fields) In,
	handle func(*requestState, In) (Out, error),
) contract {
	c := endpoint(parse, handle)
	c.limit = limit
	return c
}

// serveRoute runs the contract of the request's route. The order of the checks is the order of refusals:
// session, suspended, terms, role (all by authorize), input, If-Match, the route's own limit.
//
// The body must be read before authorize reads the account, although its faults are reported
// after it. Otherwise a client could withhold the rest of a body until it has lost its rights,
// and still write (W1).
//
// The limit comes after the input, so that a malformed attempt is not counted. Attempts at a code
// are counted here, apart from the codes, so a new code resets nothing (O5).
func (s *server) serveRoute(state *requestState) error {
	c := state.route.contract
	var sent *fields
	var readErr error
	if c.parse != nil {
		sent, readErr = readFields(state)
	}
	if state.route.access.needsSession() {
		if err := s.authorize(state); err != nil {
			return err
		}
	}
	if readErr != nil {
		return readErr
	}
	input := c.input
	if c.parse != nil {
		input = c.parse(sent)
		if err := sent.finish(); err != nil {
			return err
		}
		state.loggedInput = strings.Join(sent.forLog, "&")
	}
	if err := checkIfMatch(state.request); err != nil {
		return err
	}
	if counted, ok := input.(limitKeyer); ok {
		if err := c.limit.take(counted.limitKey(state)); err != nil {
			return err
		}
	}
	out, err := c.handle(state, input)
	if err != nil {
		return err
	}
	if closer, ok := out.(io.Closer); ok {
		defer closer.Close()
	}
	return state.answer(out)
}

// checkIfMatch refuses a write with If-Match (RFC 9110 13.1.1): no resource that can be written
// here has an ETag, so the condition never holds. "*" asks only that there is a target.
func checkIfMatch(r *http.Request) error {
	condition := r.Header.Get("If-Match")
	if isRead(r.Method) || condition == "" || condition == "*" {
		return nil
	}
	return errPrecondition
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
	taken  []rule   // what was asked for, in that order; openapi.json is made from it, by a test
	forLog []string // what the log may show of the fields that were sent
	errors []fieldError
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
	maxMembers     = 64       // of a JSON object; no input has more than a few
	maxErrors      = 20       // in one answer
	maxContentType = 256      // bytes of a Content-Type that we look at
)

// readFields reads the input of a request: the query string of a GET or HEAD, else a JSON
// body. A query with a bad escape or ";" is refused here, one with repeated or wrong
// parameters by take, and one with unknown parameters by finish (I2).
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
		return nil, wrongMediaType("application/json")
	}
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxJSONBody))
	if err != nil {
		return nil, bodyProblem(err)
	}
	return readJSON(body)
}

func isRead(method string) bool { return method == http.MethodGet || method == http.MethodHead }

// readJSON parses one flat JSON object of strings. encoding/json alone accepts duplicate
// members, names in another case, null, and data after the object.
// None of these is accepted here (I3).
func readJSON(body []byte) (*fields, error) {
	decoder := json.NewDecoder(bytes.NewReader(body))
	start, _ := decoder.Token()
	if start != json.Delim('{') || !json.Valid(body) {
		return nil, invalid(fieldError{"body", "must be one whole JSON object in UTF-8"})
	}
	f := &fields{values: url.Values{}}
	// The body is valid JSON, so Token can't fail. Decode fails only for a number that is out of
	// range; value is then nil, which is no string. An object of maxMembers is refused in any case,
	// so the rest of it is not read.
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

// refuse notes what is wrong with a field, once. An empty name is reported as "input". A name
// longer than any of ours is cut, and at most maxErrors are noted, so that a small request can't
// cause a large answer.
func (f *fields) refuse(name, detail string) {
	name = cmp.Or(name[:min(len(name), 64)], "input")
	isNoted := slices.ContainsFunc(f.errors, func(e fieldError) bool { return e.Field == name })
	if !isNoted && len(f.errors) < maxErrors {
		f.errors = append(f.errors, fieldError{name, detail})
	}
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

// take removes a field from the input and validates it. The log may show numbers and choices, and
// of a text only its length.
func (f *fields) take(r rule) (value string, sent bool) {
	f.taken = append(f.taken, r)
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
	shown := value
	if !r.number && r.oneOf == nil {
		shown = fmt.Sprintf("(%d characters)", utf8.RuneCountInString(value))
	}
	f.forLog = append(f.forLog, r.name+"="+shown)
	return value, true
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
// wrong: a member that no one asked for, such as role or userId, is refused by name (Z3).
func (f *fields) finish() error {
	for _, name := range slices.Sorted(maps.Keys(f.values)) {
		f.refuse(name, "is not known here")
	}
	if f.errors != nil {
		return invalid(f.errors...)
	}
	return nil
}

// answer checks an output and writes it. An output that breaks its contract is a 500, and
// nothing of it is sent (I5).
func (state *requestState) answer(out output) error {
	if !out.isValid() {
		return errors.New("the output breaks its contract")
	}
	if custom, ok := out.(sender); ok {
		custom.send(state)
		return nil
	}
	text, err := json.Marshal(out)
	if err != nil {
		return err
	}
	state.Header().Set("Content-Type", "application/json")
	state.Header().Set("Content-Length", strconv.Itoa(len(text)))
	state.WriteHeader(state.route.status)
	state.Write(text) // a client that has gone is no error of ours
	return nil
}

var headersOfSuccess = []string{
	"Set-Cookie", "ETag", "Last-Modified", "Accept-Ranges", "Location", "Content-Disposition",
	"Content-Length",
}

// fail answers the request with err. It is the only function that writes an error. It
// removes what a handler has prepared for a success, such as a cookie or caching headers.
// Once a status has been sent, all that is left is to cut the connection.
//
// Every error has the request id (G3), and each 401, 403, 429 and failure inside a line in the
// log (G4).
func (state *requestState) fail(err error) {
	p := toProblem(err)
	state.logProblem(p)
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
	state.bytes = int64(len(body))
	state.ResponseWriter.WriteHeader(p.Status)
	state.ResponseWriter.Write(body)
}

func (state *requestState) logProblem(p problem) {
	switch {
	case p.Status >= 500:
		state.log().Error("failed", "error", p.Error())
	case p.Status == 401 || p.Status == 403 || p.Status == 429:
		state.log().Info("refused", "code", p.Code, "reason", p.reason,
			"route", state.route.path)
	}
}

// What follows makes a requestState the http.ResponseWriter of the router and of http.ServeContent.
// They report an error as WriteHeader(405), then Write(text). WriteHeader answers it by fail, and
// Write drops the text.

// Unwrap lets http.ResponseController reach net/http's writer, which has the deadlines.
func (state *requestState) Unwrap() http.ResponseWriter { return state.ResponseWriter }

// WriteHeader sends a status, once. It replaces the errors that net/http writes by itself with ours:
// the router's 404, 405 and redirects to a cleaned path (404 here), and 412 and 416 of
// http.ServeContent. So these answers have the one error format, too (G3).
func (state *requestState) WriteHeader(status int) {
	if status >= 300 && status != http.StatusNotModified {
		err, isListed := netHTTPErrors[status]
		if !isListed { // a 404, a redirect, or the 400 of OPTIONS *
			err = errNotFound
		}
		state.fail(err)
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
	if state.status >= 400 { // fail has answered
		return len(b), nil
	}
	state.WriteHeader(http.StatusOK)
	n, err := state.ResponseWriter.Write(b)
	state.bytes += int64(n)
	return n, err
}

// ReadFrom sends a file in pieces. Only http.ServeContent calls it, with an *io.LimitedReader.
// io.CopyN puts another one around the same reader: if that is an *os.File, as for all but several
// ranges at once, net/http uses sendfile.
//
// A download may take as long as it likes, if each piece of it is taken within stallTimeout. A
// client that reads nothing is cut off (H5).
func (state *requestState) ReadFrom(src io.Reader) (int64, error) {
	state.WriteHeader(http.StatusOK)
	limited := src.(*io.LimitedReader)
	deadlines := http.NewResponseController(state.ResponseWriter)
	sent := int64(0)
	for limited.N > 0 {
		deadlines.SetWriteDeadline(time.Now().Add(stallTimeout))
		n, err := io.CopyN(state.ResponseWriter, limited.R, min(limited.N, transferPiece))
		sent += n
		state.bytes += n
		limited.N -= n
		if err != nil {
			return sent, err
		}
	}
	return sent, nil
}

// A problem is an error that the client is told about, in the format of RFC 9457. It is a
// value, so that nobody can change one of the shared ones below.
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
func (p problem) Error() string { return fmt.Sprintf("%s: %v", p.Code, p.cause) }

func (p problem) Unwrap() error { return p.cause }

func newProblem(status int, code, detail string) problem {
	return problem{Status: status, Code: code, Detail: detail}
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
	errRange = newProblem(416, "range_not_satisfiable",
		"The file has no such range.")
)

// unauthenticated returns the 401 of a session. The answer to the client is the
// same for every reason: missing, forged, expired or ended.
func unauthenticated(reason string) problem {
	return problem{
		Status: 401, Code: "unauthenticated", reason: reason,
		Detail: "Sign in: the session is missing, expired or ended.",
	}
}

// unavailable returns the 503 of what the server can't do now, and may soon be able to: mostly
// because the database is out of reach.
func unavailable(cause error) problem {
	return problem{
		Status: 503, Code: "unavailable", Detail: "Try again soon.",
		retryAfter: 2 * time.Second, cause: cause,
	}
}

// rateLimited returns the 429 of a limit; wait is the time until a request can pass again.
func rateLimited(limit string, wait time.Duration) problem {
	return problem{
		Status: 429, Code: "rate_limited", Detail: "The limit is " + limit + ".",
		retryAfter: wait,
	}
}

// wrongMediaType returns the 415 that names the type to send.
func wrongMediaType(want string) problem {
	return newProblem(415, "unsupported_media_type",
		"Send Content-Type: "+want+", in UTF-8, without Content-Encoding.")
}

// invalid returns the 400 that names the wrong fields.
func invalid(errs ...fieldError) problem {
	return problem{
		Status: 400, Code: "invalid_request", Detail: "The input is not valid.",
		Errors: errs,
	}
}

// toProblem returns the problem that answers err. An error that it does not know is a bug or a
// broken disk: 500.
func toProblem(err error) problem {
	if p, ok := errors.AsType[problem](err); ok {
		return p
	}
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return errTooLarge
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return problem{
			Status: 507, Code: "insufficient_storage", Detail: "There is no room for the file.",
			cause: err,
		}
	}
	return problem{
		Status: 500, Code: "internal", Detail: "The server failed; its log says why.",
		cause: err,
	}
}

// bodyProblem returns the problem of a body that could not be read or stored. A
// refusal, such as a 413, stays as it is. An error of the disk is the server's fault. All else is
// a body that is incomplete or malformed.
func bodyProblem(err error) problem {
	p := toProblem(err)
	_, isDiskError := errors.AsType[*fs.PathError](err)
	if isDiskError || p.Status < 500 {
		return p
	}
	return invalid(fieldError{"body", "is incomplete or malformed"})
}

// writeLogLine writes the line of one request. Every value is the server's own, an allowed
// origin or a checked identifier, so no secret can get in. (The request id may be the client's
// own: see SECURITY.md.) A line has at most 2 kB, whatever the request (H4).
func (s *server) writeLogLine(state *requestState, duration time.Duration) {
	r := state.request
	attrs := make([]any, 0, 32)
	add := func(name string, value any) {
		if value != "" {
			attrs = append(attrs, name, value)
		}
	}
	add("requestId", state.id)
	add("client", state.client.String())
	if slices.Contains(knownMethods, r.Method) {
		add("method", r.Method)
	}
	add("route", state.route.path)
	for _, name := range []string{"hubId", "fileId"} {
		if id := r.PathValue(name); isUUID(id) {
			add(name, id)
		}
	}
	if isRead(r.Method) {
		add("query", state.loggedInput)
	}
	add("status", state.status)
	add("bytes", state.bytes)
	add("duration", duration)
	if state.user != nil {
		add("userId", state.user.UserID)
	}
	add("origin", s.originForLog(state))
	for _, name := range []string{"Cookie", "Authorization"} {
		if r.Header[name] != nil {
			add(strings.ToLower(name), "***")
		}
	}
	s.requestLog.Info("request", attrs...)
}

// knownMethods are the methods that the log names. Any other is a text that a client wrote.
var knownMethods = []string{"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT", "TRACE"}

// originForLog returns an allowed origin, and of any other only how long its host is. Locally,
// where a developer looks for the origin to allow, it returns every origin.
func (s *server) originForLog(state *requestState) string {
	origin := state.request.Header.Get("Origin")
	if origin == "" || state.originAllowed || s.cfg.env == envLocal {
		return origin
	}
	_, host, _ := strings.Cut(origin, "://")
	return fmt.Sprintf("(host of %d characters)", len(host))
}

// maxLoggedError bounds the text of an error in the log, in bytes. A line of two such texts has less
// than 2 kB (H4).
const maxLoggedError = 460

// maskAttr is the slog.HandlerOptions.ReplaceAttr of the events' logger. It masks every text,
// the message included, except in four attributes, whose values are ids and IP addresses. So no
// code, token, cookie, password or whole address gets into a log (G2).
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

// maskRules are applied to a text one after the other, in this order. The comment says what a
// rule leaves of an example.
var maskRules = []struct {
	pattern     *regexp.Regexp
	replacement string
}{
	// Blanks and line breaks in a row: one blank.
	{regexp.MustCompile(`\s+`), " "},
	// Invisible, direction and control characters, which could hide what they stand in: nothing.
	{regexp.MustCompile(`[\p{Cc}\p{Cf}\x{2028}\x{2029}\x{fffd}]`), ""},
	// jane.roe@example.com, in letters of any script, its @ perhaps written as %40 or \u0040:
	// j***@example.com
	{regexp.MustCompile(`([^\s@:;,<>()\[\]"])[^\s@:;,<>()\[\]"]*(@|%(?:25)*40|\\u0040)`), "$1***$2"},
	// smtps://user:password@mail.example.com, after the rule above: smtps://***@mail.example.com
	{regexp.MustCompile(`://[^/\s]*@`), "://***@"},
	// password=hunter2 and everything after it: ***. The same for an escape, in which another
	// could hide.
	{regexp.MustCompile(`(?is)(code|token|secret|pass|pwd|key|session|auth)[^=&\s]*=.*` +
		`|%[0-9A-F]{2}.*`), "***"},
	// A secret by its form: a token, even if it is broken by blanks; a key or a piece of a token,
	// which has more letters and digits in a row than an id; a one-time code, as 482913, 482-913
	// or 4 8 2 9 1 3: ***
	{regexp.MustCompile(`eyJ[\w.%=-]*(\s+[\w.%=-]{16,})*` +
		`|[\w+/=-]{40,}` +
		`|[0-9]([-_ ]?[0-9]){5,}`), "***"},
}

// maskText applies the rules to a text, then cuts it to maxLoggedError bytes. The first cut only
// bounds the work: what it breaks in two lies far behind the second one.
func maskText(text string) string {
	text = text[:min(len(text), 8*maxLoggedError)]
	for _, mask := range maskRules {
		text = mask.pattern.ReplaceAllString(text, mask.replacement)
	}
	return text[:min(len(text), maxLoggedError)]
}
