package main

// This file contains everything between net/http and the handlers:
//
//  1. The six steps that every request takes, in the order of the specification.
//  2. The contract: what each endpoint declares, and serveRoute, which runs it.
//  3. Strict input: JSON bodies and query strings.
//  4. The answer: answer writes the success of an endpoint, fail writes every error.
//  5. Problems: the errors that are sent to clients.
//  6. The log: what is logged of a request, and what is masked.

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

// Part 1: the steps.

// handler returns the handler of all requests: six steps, each of which calls the next.
func (s *server) handler(routes []route) http.Handler {
	return s.logRequests( // 1. log line, recovery from panics; makes the state that the others use
		s.setSecurityHeaders( // 2. security and CORS headers
			s.identifyRequest( // 3. request id, client address
				s.limitByClient( // 4. limits by client address
					s.checkOrigin( // 5. preflights, cross-origin writes
						s.router(routes)))))) // 6. the contract of a route
}

// A requestState holds what the six steps share about one request. logRequests makes it, and passes
// it to the later steps as their http.ResponseWriter: w.(*requestState) is the state again. So it
// also counts what they send. (A value in the request's context would need a copy of the request in
// each step.) Its Header method returns the headers of the answer, and request.Header those of the
// request. It is used only by the goroutine that serves the request.
//
// Four ResponseWriters stand one in front of the other:
//
//	fileWriter      sends a download in pieces, so that a stalled one is cut off (files.go)
//	problemWriter   replaces the errors of net/http's router and of ServeContent (part 4)
//	requestState    counts what is sent; the steps and the handlers write to it
//	net/http's own  writes to the connection
type requestState struct {
	http.ResponseWriter               // the ResponseWriter of net/http
	request             *http.Request // the request, the same in all steps
	serverLog           *slog.Logger

	// Set by step 2.
	originAllowed bool // whether the Origin header names an allowed origin

	// Set by step 3.
	id     string     // the request id, sent with every answer
	client netip.Addr // the client's address

	// Set by step 6.
	route       route        // the zero route if no route matches
	user        *user        // the account, if the route needs or begins a session
	session     sessionToken // the token, if the route needs a session
	loggedQuery string       // the parts of a query that may be logged

	status int   // status sent to the client; 0 if none has been sent
	bytes  int64 // bytes of the body written so far; net/http discards them for a HEAD
}

// log returns a logger that adds the request id, the client and the user to each event.
func (state *requestState) log() *slog.Logger {
	log := state.serverLog.With("requestId", state.id, "client", state.client)
	if state.user != nil {
		log = log.With("userId", state.user.UserID)
	}
	return log
}

// WriteHeader sends a status. It is called once for each request.
func (state *requestState) WriteHeader(status int) {
	state.status = status
	state.ResponseWriter.WriteHeader(status)
}

// Write sends a part of the body, after a 200 if no status has been sent.
func (state *requestState) Write(b []byte) (int, error) {
	if state.status == 0 {
		state.WriteHeader(200)
	}
	n, err := state.ResponseWriter.Write(b)
	state.bytes += int64(n)
	return n, err
}

// Unwrap returns the ResponseWriter of net/http, for http.ResponseController.
func (state *requestState) Unwrap() http.ResponseWriter { return state.ResponseWriter }

// logRequests is step 1. It makes the request's state and, when the other steps are done, writes
// the log line. It turns a panic into a 500. The local environment logs no requests
// (specification, request pipeline, 1): developers watch the same output for codes.
func (s *server) logRequests(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		started := time.Now()
		state := &requestState{ResponseWriter: w, request: r, serverLog: s.log}
		if s.stopping.Load() {
			state.Header().Set("Connection", "close")
		}
		// Deferred calls run in reverse order: first the recovery below, which may send a 500, then
		// this one, which logs it.
		if s.cfg.env != envLocal {
			defer func() { s.writeLogLine(state, time.Since(started)) }()
		}
		defer func() {
			fault := recover()
			if fault == http.ErrAbortHandler { // tells net/http to close the connection
				panic(fault)
			}
			if fault != nil {
				_, stack, _ := strings.Cut(string(debug.Stack()), "panic(") // from the panic on
				state.fail(fmt.Errorf("panic: %v: %s", fault, stack))
			}
		}()
		next.ServeHTTP(state, r)
	})
}

// contentPolicy prevents a browser from loading or running anything in an answer, and from
// framing it.
const contentPolicy = "default-src 'none'; frame-ancestors 'none'"

// securityHeaders are set on every answer. Files replace Content-Security-Policy and
// Cache-Control; documents replace Content-Security-Policy.
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

// setSecurityHeaders is step 2. It sets the security headers on every answer (C3). It also sets the
// CORS headers, if the origin is allowed (C1). In step 5, they would come too late for the 429 of
// step 4, and a page could not read it.
func (s *server) setSecurityHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state := w.(*requestState)
		header := state.Header()
		for name, value := range securityHeaders {
			header.Set(name, value)
		}
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

// maxOrigin is the longest origin that may be allowed, in bytes, because an allowed origin is sent
// back and logged. A valid one has at most 267: "https://", a domain of 253 and a port.
const maxOrigin = 270

// allowsOrigin reports whether origin is allowed: exactly the origins in the allow-list or, in
// production, the https subdomains of one domain on the default port. It never allows "null" or,
// in production, http or the bare domain (C1). domainPattern rejects ports, user names and paths.
func (c *config) allowsOrigin(origin string) bool {
	if origin == "" || len(origin) > maxOrigin {
		return false
	}
	if c.env != envProduction {
		return slices.Contains(c.allowedOrigins, origin)
	}
	host, isHTTPS := strings.CutPrefix(origin, "https://")
	return isHTTPS && strings.HasSuffix(host, "."+c.originDomain) && domainPattern.MatchString(host)
}

// identifyRequest is step 3. It sets the request id and the client's address. A request id sent
// by the client is kept if it matches requestIDPattern; otherwise a new one is generated (G1).
func (s *server) identifyRequest(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state := w.(*requestState)
		state.id = r.Header.Get("X-Request-Id")
		if !requestIDPattern.MatchString(state.id) {
			state.id = rand.Text()
		}
		state.client = clientAddress(r, s.cfg.trustedProxies)
		state.Header().Set("X-Request-Id", state.id)
		next.ServeHTTP(w, r)
	})
}

var requestIDPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

// clientAddress returns the address used for limits and the log. It reads X-Forwarded-For from
// the right, because each proxy appends the address of its own client. An element is used only if
// the proxy that appended it is trusted; a client can forge everything to the left of that (L2).
// Reading stops at the first element that is not an address.
func clientAddress(r *http.Request, trusted []netip.Prefix) netip.Addr {
	client := parseAddress(r.RemoteAddr)
	// The loop changes client, so each call looks at the current one.
	isTrusted := func(proxy netip.Prefix) bool { return proxy.Contains(client) }
	rest := strings.Join(r.Header.Values("X-Forwarded-For"), ",")
	for rest != "" && slices.ContainsFunc(trusted, isTrusted) {
		comma := strings.LastIndexByte(rest, ',') // -1 at the last element
		hop := parseAddress(strings.TrimSpace(rest[comma+1:]))
		if !hop.IsValid() {
			break
		}
		client = hop
		rest = rest[:max(comma, 0)]
	}
	return client
}

// parseAddress parses 1.2.3.4, 1.2.3.4:80, 2001:db8::1 and [2001:db8::1]:80. It returns the zero
// Addr for any other form.
func parseAddress(text string) netip.Addr {
	addr, err := netip.ParseAddr(text)
	if err != nil {
		withPort, _ := netip.ParseAddrPort(text)
		addr = withPort.Addr()
	}
	return addr.Unmap().WithZone("")
}

// clientKey returns the key by which a client is limited: an IPv4 address, or the /64 network of
// an IPv6 address, because one customer usually has all addresses of a /64.
func clientKey(client netip.Addr) string {
	network, _ := client.Prefix(min(client.BitLen(), 64)) // an IPv4 address has 32 bits
	return network.String()
}

// limitByClient is step 4. It applies the limit by client address.
func (s *server) limitByClient(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state := w.(*requestState)
		limit := s.clientLimit(r.Method, r.URL.Path)
		if err := limit.spend(clientKey(state.client)); err != nil {
			state.fail(err)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// clientLimit returns the limiter that step 4 applies to a request. Downloads are counted by
// fileLimit instead of requestLimit, whose 100 requests in 10 s are too few for them.
func (s *server) clientLimit(method, path string) *limiter {
	if isRead(method) && strings.HasPrefix(path, "/files/") {
		return s.fileLimit
	}
	return s.requestLimit
}

// checkOrigin is step 5. It answers preflights from allowed origins, and refuses writes from any
// other origin except the server's own. SameSite=Lax alone would allow writes from sibling
// subdomains (C2).
func (s *server) checkOrigin(next http.Handler) http.Handler {
	protection := http.NewCrossOriginProtection()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		state := w.(*requestState)
		isPreflight := r.Method == "OPTIONS" &&
			r.Header.Get("Access-Control-Request-Method") != ""
		// Check lets a request with neither Sec-Fetch-Site nor Origin through, because it does not
		// come from a page: current browsers send one of them with every write. Without
		// Sec-Fetch-Site, it compares only the hosts: a page of http:// on the server's host
		// passes.
		isForeignWrite := protection.Check(r) != nil && !state.originAllowed
		switch {
		case isPreflight && state.originAllowed:
			header := state.Header()
			header.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PATCH, DELETE")
			header.Set("Access-Control-Allow-Headers", "Content-Type, X-Request-Id")
			header.Set("Access-Control-Max-Age", "7200")
			state.WriteHeader(204)
		case isPreflight:
			// The router answers 405 or 404, without CORS headers. So the browser does not send
			// the request.
			s.logRefusedOrigin(state)
			next.ServeHTTP(w, r)
		case isForeignWrite:
			s.logRefusedOrigin(state)
			state.fail(errCrossOrigin)
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// logRefusedOrigin tells the developer of a page why its request fails. The browser hides the
// reason.
func (s *server) logRefusedOrigin(state *requestState) {
	state.log().Info("origin refused: not in ALLOWED_ORIGINS (in production: ALLOWED_ORIGIN_DOMAIN)",
		"origin", s.originForLog(state))
}

// router is step 6. It finds the route of a request and runs its contract.
//
// The router of net/http writes a 404, a 405 and redirects itself. So it gets a problemWriter (see
// part 4), which replaces them by our errors. A route writes through its state instead.
func (s *server) router(routes []route) http.Handler {
	mux := http.NewServeMux()
	for _, entry := range routes {
		entry.mustBeValid()
		mux.HandleFunc(entry.method+" "+entry.path, func(w http.ResponseWriter, _ *http.Request) {
			state := w.(problemWriter).state
			state.route = entry
			if err := entry.contract.serveRoute(s, state); err != nil {
				state.fail(err)
			}
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mux.ServeHTTP(problemWriter{w.(*requestState)}, r)
	})
}

// Part 2: the contract.

// An access is the rule for who may call an endpoint: either everyone, or the users with a session
// that meet all further conditions. Any other rule, such as the zero value, prevents the start.
type access struct {
	public  bool     // everyone
	session bool     // the user must be signed in and not suspended
	terms   bool     // the user must have accepted the current terms
	roles   []string // the user must have one of these roles; nil means any
}

var (
	public          = access{public: true}
	sessionOnly     = access{session: true}
	sessionAndTerms = access{session: true, terms: true}
	adminOnly       = access{session: true, terms: true, roles: []string{roleAdmin}}
)

// String returns the rule as the route table shows it, such as "session, terms, admin".
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

// A route is one endpoint: an entry of the route table in main.go.
type route struct {
	method, path string
	access       access
	status       int // HTTP status of a success; http.ServeContent chooses that of a file
	contract     contract
}

// mustBeValid panics, so that the server does not start, if the route has no valid access rule
// (Z1).
func (r route) mustBeValid() {
	a := r.access
	hasConditions := a.terms || a.roles != nil
	// A route is public or needs a session, but not both, and a public one has no conditions.
	if a.public == a.session || a.public && hasConditions {
		panic("no valid access rule: " + r.method + " " + r.path)
	}
}

// A contract is what serveRoute runs for a route. The interface hides the types of input and
// output, so that all contracts fit into one route table.
type contract interface {
	serveRoute(*server, *requestState) error
	ownLimit() *limiter
}

// A typedContract describes an endpoint: its input, its output, its own limit and its handler.
// endpoint, inputEndpoint and limitedEndpoint make contracts.
type typedContract[In any, Out output] struct {
	parse    func(*fields) In               // makes the input; nil if there is none
	limit    *limiter                       // the endpoint's own; nil if there is none
	limitKey func(In, *requestState) string // the key for limit; nil without a limit
	handle   func(*requestState, In) (Out, error)
}

// An output is what a handler returns for a success. answer sends it as JSON, unless it is
// nothing or sent. isValid reports whether the output satisfies its contract.
type output interface{ isValid() bool }

// nothing is the output of a handler whose success has no body.
type nothing struct{}

// sent is the output of a handler that has sent its success itself, as getFile does.
type sent struct{}

func (nothing) isValid() bool { return true }
func (sent) isValid() bool    { return true }

// endpoint returns the contract of a handler without an input: body and query are ignored, or the
// handler reads the body itself, as upload does.
func endpoint[Out output](handle func(*requestState) (Out, error)) contract {
	return typedContract[struct{}, Out]{
		handle: func(state *requestState, _ struct{}) (Out, error) { return handle(state) },
	}
}

// inputEndpoint returns the contract of a handler with an input. parse validates the fields of the
// request and makes the input from them.
//
// inputEndpoint and limitedEndpoint panic, so that the server does not start, if the input is not
// parsed, or if it has a limitKey but there is no limit (Z1).
func inputEndpoint[In any, Out output](
	parse func(*fields) In,
	handle func(*requestState, In) (Out, error),
) contract {
	// An input with a limitKey must be passed to limitedEndpoint. *In has the methods of In, and a
	// limitKey that was declared on *In by mistake.
	_, isCounted := any(new(In)).(limitKeyer)
	if parse == nil || isCounted {
		panic("inputEndpoint: without a parse function, or with a limitKey but without a limit")
	}
	return typedContract[In, Out]{parse: parse, handle: handle}
}

// A limitKeyer is an input with a key, under which the endpoint's own limit counts the request.
type limitKeyer interface{ limitKey(*requestState) string }

// limitedEndpoint returns the contract of a handler whose requests are counted by limit.
// In.limitKey, below, is the method as a function of the input.
func limitedEndpoint[In limitKeyer, Out output](
	limit *limiter,
	parse func(*fields) In,
	handle func(*requestState, In) (Out, error),
) contract {
	if parse == nil || limit == nil {
		panic("limitedEndpoint: without a parse function or without a limit")
	}
	return typedContract[In, Out]{
		parse: parse, limit: limit, limitKey: In.limitKey, handle: handle,
	}
}

func (c typedContract[In, Out]) ownLimit() *limiter { return c.limit }

// serveRoute runs the contract. A request that fails several checks is refused for the first of
// these: session, suspension, terms, role, input, If-Match, the endpoint's own limit.
//
// A JSON body is read before the account. Otherwise a client could withhold the end of a body until
// it has lost its rights, and still write (W1). An error in it is reported in its turn. The body of
// an upload is read by the handler, which then calls authorize again.
func (c typedContract[In, Out]) serveRoute(s *server, state *requestState) error {
	input, inputErr := c.readInput(state)
	if !state.route.access.public {
		if err := s.authorize(state); err != nil {
			return err
		}
	}
	if inputErr != nil {
		return inputErr
	}
	// No resource that can be written has an ETag, so If-Match is false on a write (RFC 9110
	// 13.1.1), unless it is "*", which only requires that the target exists.
	ifMatch := state.request.Header.Get("If-Match")
	if ifMatch != "" && ifMatch != "*" && !isRead(state.request.Method) {
		return errPrecondition
	}
	if c.limit != nil { // after the input, so that a malformed request is not counted
		if err := c.limit.spend(c.limitKey(input, state)); err != nil {
			return err
		}
	}
	out, err := c.handle(state, input)
	if err != nil {
		return err
	}
	return state.answer(out)
}

// readInput reads the fields of a request and makes the input from them. finish comes last, because
// only after parse is it known which fields are unknown. After an error, the input must not be
// used.
func (c typedContract[In, Out]) readInput(state *requestState) (input In, err error) {
	if c.parse == nil {
		return input, nil
	}
	f, err := readFields(state)
	if err != nil {
		return input, err
	}
	input = c.parse(f)
	if isRead(state.request.Method) {
		state.loggedQuery = strings.Join(f.forLog, "&")
	}
	return input, f.finish()
}

// pathID returns an id from the path. If it is not a UUID, pathID returns NULL, which matches no
// row, so the answer is a 404.
func (state *requestState) pathID(name string) sql.Null[string] {
	id := state.request.PathValue(name)
	return sql.Null[string]{V: id, Valid: isUUID(id)}
}

// uuidPattern is the one form in which PostgreSQL writes a UUID.
var uuidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func isUUID(text string) bool { return uuidPattern.MatchString(text) }

// Part 3: strict input.

// fields holds the members of a JSON object, or the parameters of a query. A parse function takes
// each known field by its rule, which validates it. Fields that no one takes are unknown.
//
// The methods that take a field record errors instead of returning them, and finish returns one 400
// for all errors and unknown fields.
type fields struct {
	values url.Values // fields that were sent
	taken  []rule     // rules that a parse function has asked for
	forLog []string   // each valid field, such as "limit=20", for the log of a query
	errors []fieldError
}

// A rule describes the valid values of a field: a number, or else one of a list, or else a text,
// whose length needs a max: without one, only the empty text is valid. Every input value is sent as
// a string.
type rule struct {
	name string

	number   bool     // the value is a whole number in decimal digits, from min to max
	oneOf    []string // the value is one of these
	min, max int      // bounds of a number, or of the length of a text in characters

	// For a text, in the order in which they apply. Its length is checked after trim.
	trim     bool           // spaces around the value are removed
	controls string         // control characters that the text may contain
	pattern  *regexp.Regexp // form of the text
	inWords  string         // description of pattern for the client

	// For a field that is not sent. The method optional ignores both.
	fallback string // the value
	required bool
}

const (
	maxJSONBody    = 16 << 10 // bytes in a JSON body
	maxErrors      = 20       // field errors in one answer
	maxContentType = 256      // bytes in a Content-Type header: parsing 16 kB would take 2 ms
)

// readFields reads the input of a request: the query string of a GET or HEAD, or else a JSON body.
// It refuses a query with a bad escape, a semicolon or more than 10,000 parameters. Repeated and
// invalid parameters are refused by take, and unknown ones by finish (I2).
func readFields(state *requestState) (*fields, error) {
	r := state.request
	if isRead(r.Method) {
		values, err := url.ParseQuery(r.URL.RawQuery)
		if err != nil {
			return nil, invalid(fieldError{"query", "is malformed, or has too many parameters"})
		}
		return &fields{values: values}, nil
	}
	kind, params := mediaType(r.Header)
	if kind != "application/json" || len(params) > 0 {
		return nil, wrongMediaType("application/json")
	}
	// With net/http's ResponseWriter, MaxBytesReader would close the connection after a 413. With
	// nil, net/http first reads a short rest of the body (see fail), so that the answer arrives.
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxJSONBody))
	if err != nil {
		return nil, bodyProblem(err)
	}
	return readJSON(body)
}

func isRead(method string) bool { return method == "GET" || method == "HEAD" }

// readJSON parses one flat JSON object of strings. Unlike encoding/json alone, it does not accept
// names in another letter case, null, or data after the object (I3). It goes through the members
// one by one, to keep those that encoding/json would drop: take refuses duplicates, and finish
// unknown names.
func readJSON(body []byte) (*fields, error) {
	decoder := json.NewDecoder(bytes.NewReader(body))
	start, _ := decoder.Token()
	// Valid rejects data after the object. It accepts invalid UTF-8, which the decoder replaces by
	// U+FFFD. rule.validate refuses that.
	if start != json.Delim('{') || !json.Valid(body) {
		return nil, invalid(fieldError{"body", "must be one whole JSON object in UTF-8"})
	}
	f := &fields{values: url.Values{}}
	for decoder.More() {
		// The body is valid JSON, so Token can't fail. Decode fails only for a number out of range.
		// Then value is not a string.
		token, _ := decoder.Token()
		name := token.(string)
		var value any
		decoder.Decode(&value)
		text, isText := value.(string)
		if !isText {
			f.addError(name, "must be a string")
		}
		f.values.Add(name, text) // even if it is no string, because it was sent
	}
	return f, nil
}

// mediaType parses Content-Type and returns the media type and its parameters without the
// charset. It returns "" if the header is missing, repeated, too long or malformed, if the charset
// is not UTF-8, or if the request has a Content-Encoding.
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

// addError records the first error of a field. An empty name is reported as "input". Long names are
// cut and at most maxErrors errors are recorded, so that a small request can't cause a large
// answer.
func (f *fields) addError(name, detail string) {
	name = cmp.Or(name[:min(len(name), 64)], "input")
	isNoted := slices.ContainsFunc(f.errors, func(e fieldError) bool { return e.Field == name })
	if !isNoted && len(f.errors) < maxErrors {
		f.errors = append(f.errors, fieldError{name, detail})
	}
}

// text returns the value of a field, or the rule's fallback if the field is not sent.
func (f *fields) text(r rule) string {
	value, isSent := f.take(r)
	if !isSent && r.required {
		f.addError(r.name, "is required")
	}
	return value
}

// number returns the value of a field as a whole number.
func (f *fields) number(r rule) int {
	n, _ := strconv.Atoi(f.text(r)) // a value that is not a number has been refused
	return n
}

// optional returns the value of a field, or nil if the field is not sent. It ignores required and
// fallback, so that PATCH can use the rules of POST.
func (f *fields) optional(r rule) *string {
	value, isSent := f.take(r)
	if !isSent {
		return nil
	}
	return &value
}

// take validates the value of a field and returns it. An invalid value is never used, because
// finish then returns a 400. For the log, take records valid numbers and valid values with an
// allow-list as they are, and only the length of any other valid text.
func (f *fields) take(r rule) (value string, isSent bool) {
	f.taken = append(f.taken, r)
	values := f.values[r.name]
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
		f.addError(r.name, complaint)
		return value, true
	}
	shown := value
	if !r.number && r.oneOf == nil {
		shown = fmt.Sprintf("(%d characters)", utf8.RuneCountInString(value))
	}
	f.forLog = append(f.forLog, r.name+"="+shown)
	return value, true
}

// validate returns a description of the error in a value, or "" if the value is valid. It refuses
// U+FFFD (utf8.RuneError), with which encoding/json replaces lone surrogates and invalid UTF-8.
func (r rule) validate(value string) string {
	if strings.ContainsRune(value, utf8.RuneError) { // also true for invalid UTF-8 in a query
		return "must be Unicode text without U+FFFD"
	}
	if r.number {
		return r.validateNumber(value)
	}
	if r.oneOf == nil {
		return r.validateText(value)
	}
	if !slices.Contains(r.oneOf, value) {
		return "must be one of: " + strings.Join(r.oneOf, ", ")
	}
	return ""
}

// validateNumber accepts a number within its bounds, without plus sign, spaces or leading zeros.
func (r rule) validateNumber(value string) string {
	n, err := strconv.Atoi(value)
	if err != nil || strconv.Itoa(n) != value || n < r.min || n > r.max {
		return fmt.Sprintf("must be a whole number from %d to %d", r.min, r.max)
	}
	return ""
}

func (r rule) validateText(value string) string {
	length := utf8.RuneCountInString(value)
	if length < r.min || length > r.max {
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

// finish returns a 400 that lists the invalid fields, or nil if there are none. Fields that were
// not taken are unknown and refused by name, so a client can't set a field such as role or
// userId that the endpoint does not offer (Z3).
func (f *fields) finish() error {
	for _, name := range slices.Sorted(maps.Keys(f.values)) {
		isKnown := slices.ContainsFunc(f.taken, func(r rule) bool { return r.name == name })
		if !isKnown {
			f.addError(name, "is not known here")
		}
	}
	if f.errors != nil {
		return invalid(f.errors...)
	}
	return nil
}

// Part 4: the answer.

// answer writes a valid output to the client. If the output breaks its contract, answer sends
// nothing and returns an error, which becomes a 500 (I5).
func (state *requestState) answer(out output) error {
	if !out.isValid() {
		return fmt.Errorf("%T breaks its contract", out)
	}
	switch out.(type) {
	case sent:
		return nil
	case nothing:
		state.WriteHeader(state.route.status)
		return nil
	}
	text, err := json.Marshal(out)
	if err != nil {
		return err
	}
	state.Header().Set("Content-Type", "application/json")
	state.Header().Set("Content-Length", strconv.Itoa(len(text)))
	state.WriteHeader(state.route.status)
	state.Write(text) // an error means that the client has gone, so it is ignored
	return nil
}

// headersOfErrors are the headers that an error keeps, besides the securityHeaders. Steps 1 to 3
// set most of them. net/http sets Allow with a 405, and Content-Range with a 416.
var headersOfErrors = []string{
	"Connection", "X-Request-Id", "Allow", "Content-Range", "Access-Control-Allow-Origin",
	"Access-Control-Allow-Credentials", "Access-Control-Expose-Headers",
}

// fail answers the request with err. It is the only function that writes errors, so they all have
// one format with the request id (G3). It logs every 401, 403, 429 and 5xx (G4).
//
// If a status has already been sent, fail panics with http.ErrAbortHandler, which closes the
// connection. Otherwise it removes all headers that were set for a success, such as a cookie.
func (state *requestState) fail(err error) {
	p := toProblem(err)
	state.logProblem(p)
	if state.status != 0 {
		panic(http.ErrAbortHandler)
	}
	header := state.Header()
	for name := range header {
		if securityHeaders[name] == "" && !slices.Contains(headersOfErrors, name) {
			header.Del(name)
		}
	}
	header.Set("Content-Security-Policy", contentPolicy)
	header.Set("Cache-Control", "no-store")
	header.Set("Content-Type", "application/problem+json")
	if p.Status == 401 {
		header.Set("WWW-Authenticate", "Cookie")
	}
	if p.retryAfter > 0 {
		header.Set("Retry-After", fmt.Sprint(math.Ceil(p.retryAfter.Seconds())))
	}
	p.Title = http.StatusText(p.Status)
	p.RequestID = state.id
	body, _ := json.Marshal(p) // strings and numbers: can't fail
	// Before it sends the answer, net/http reads what is left of the request's body, so that the
	// client can take the answer: up to 256 kB, but nothing if 256 kB or more of an announced body
	// are left, or if the connection will be closed. A client that withholds its body delays this
	// for a second at most.
	http.NewResponseController(state).SetReadDeadline(time.Now().Add(time.Second))
	state.WriteHeader(p.Status)
	state.Write(body)
}

// A problemWriter is the http.ResponseWriter for the two parts of net/http that write an answer
// themselves: its router and http.ServeContent. They write an error as a status and a plain text. A
// problemWriter sends our error instead and discards the text, so that these errors have the format
// of all others (G3). A success passes unchanged.
type problemWriter struct{ state *requestState }

func (w problemWriter) Header() http.Header { return w.state.Header() }

// WriteHeader sends the status of a success. For an error, it sends our whole answer.
func (w problemWriter) WriteHeader(status int) {
	if status < 300 || status == 304 {
		w.state.WriteHeader(status)
		return
	}
	p := errNotFound // for a 404, a redirect to a cleaned path, and the 400 of "OPTIONS *"
	switch status {
	case 405: // from the router
		p = errMethod
	case 412: // this and the next two: from http.ServeContent
		p = errPrecondition
	case 416:
		p = errRange
	case 500:
		p = toProblem(errors.New("net/http could not read the file"))
	}
	w.state.fail(p)
}

// Write sends a part of the body. It discards the text that net/http writes after an error.
func (w problemWriter) Write(b []byte) (int, error) {
	if w.state.status >= 400 {
		return len(b), nil
	}
	return w.state.Write(b)
}

// Part 5: problems.

// A problem is an error that is sent to the client, in the format of RFC 9457. It is passed by
// value: fail fills in a copy, and the shared problems below stay unchanged.
type problem struct {
	Title     string       `json:"title"`
	Status    int          `json:"status"`
	Detail    string       `json:"detail"` // sentence for people
	Code      string       `json:"code"`   // stable identifier for programs
	RequestID string       `json:"requestId"`
	Errors    []fieldError `json:"errors,omitempty"`

	retryAfter time.Duration // sent as Retry-After in seconds, rounded up; not sent if 0
	cause      error         // internal error; only logged
	reason     string        // why a session was refused, in one word; only logged
}

// A fieldError describes an error in one field of the input.
type fieldError struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

// Error returns the text that the log has of a problem, masked by maskAttr. It is never sent to the
// client.
func (p problem) Error() string { return fmt.Sprintf("%s: %v", p.Code, p.cause) }

func (p problem) Unwrap() error { return p.cause }

func newProblem(status int, code, detail string) problem {
	return problem{Status: status, Code: code, Detail: detail}
}

// Problems that are the same for every request. Other problems are made where they occur.
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

// unauthenticated returns the 401 for a missing or invalid session. The reason is missing, forged,
// clock, expired or ended. It is only logged: the client gets the same answer for all of them.
func unauthenticated(reason string) problem {
	return problem{
		Status: 401, Code: "unauthenticated", reason: reason,
		Detail: "Sign in: the session is missing, expired or ended.",
	}
}

// unavailable returns a 503 for a failure that may soon pass, such as an unreachable database.
func unavailable(cause error) problem {
	return problem{
		Status: 503, Code: "unavailable", Detail: "Try again soon.",
		retryAfter: 2 * time.Second, cause: cause,
	}
}

// rateLimited returns a 429. limit describes the limit; wait is the time until a request can pass.
func rateLimited(limit string, wait time.Duration) problem {
	return problem{
		Status: 429, Code: "rate_limited", Detail: "The limit is " + limit + ".",
		retryAfter: wait,
	}
}

// wrongMediaType returns a 415 that names the media type to send.
func wrongMediaType(want string) problem {
	return newProblem(415, "unsupported_media_type",
		"Send Content-Type: "+want+", in UTF-8, without Content-Encoding.")
}

// invalid returns a 400 that lists the invalid fields.
func invalid(errs ...fieldError) problem {
	return problem{
		Status: 400, Code: "invalid_request", Detail: "The input is not valid.",
		Errors: errs,
	}
}

// toProblem returns the problem to send for err. An unexpected error, such as a bug or a broken
// disk, becomes a 500.
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

// bodyProblem returns the problem for a body that could not be read or stored. Either a check has
// refused it, which is a 4xx already, such as 413. Or the disk has failed, which is a 500 or 507.
// Or the client has sent an incomplete or malformed body, or sent it too slowly, which is a 400.
func bodyProblem(err error) problem {
	p := toProblem(err)
	_, isDiskError := errors.AsType[*fs.PathError](err)
	if p.Status < 500 || isDiskError {
		return p
	}
	return invalid(fieldError{"body", "is incomplete, malformed or too slow"})
}

// Part 6: the log.

// writeLogLine writes the log line of one request. Every value comes from the server or an
// allow-list, or has a checked form, so that no secret gets into the log. A client can choose three
// texts of such a form: the request id, a UUID in the path and, in production, the host of an
// allowed origin (see SECURITY.md). A line has at most 2 kB for any request (H4).
func (s *server) writeLogLine(state *requestState, duration time.Duration) {
	r := state.request
	attrs := []any{"requestId", state.id, "client", state.client.String()}
	add := func(name, value string) { // leaves out what the request does not have
		if value != "" {
			attrs = append(attrs, name, value)
		}
	}
	if slices.Contains(knownMethods, r.Method) {
		add("method", r.Method)
	}
	add("route", state.route.path)
	for _, name := range []string{"hubId", "fileId"} {
		if id := r.PathValue(name); isUUID(id) {
			add(name, id)
		}
	}
	add("query", state.loggedQuery)
	attrs = append(attrs, "status", state.status, "bytes", state.bytes, "duration", duration)
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

// knownMethods is the allow-list of methods to log. Any other is free text from the client.
var knownMethods = []string{"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"}

// originForLog returns an allowed origin as it is, and only the length of the host of any other.
// In the local environment it returns every origin, because a developer needs it for
// ALLOWED_ORIGINS.
func (s *server) originForLog(state *requestState) string {
	origin := state.request.Header.Get("Origin")
	if origin == "" || state.originAllowed || s.cfg.env == envLocal {
		return origin
	}
	_, host, _ := strings.Cut(origin, "://")
	return fmt.Sprintf("(host of %d characters)", len(host))
}

// logProblem logs what an operator may have to act on: failures of the server, and refusals (G4).
// The reason is empty unless the code is "unauthenticated".
func (state *requestState) logProblem(p problem) {
	switch {
	case p.Status >= 500:
		state.log().Error("failed", "error", p, "route", state.route.path)
	case p.Status == 401 || p.Status == 403 || p.Status == 429:
		state.log().Info("refused", "code", p.Code, "reason", p.reason,
			"route", state.route.path)
	}
}

// maxLoggedText is the length in bytes to which maskText cuts a text. JSON can double it,
// because it writes a quote in two bytes. No event has two texts of this length, and the rest of an
// event has less than 1 kB, so a line has less than 2 kB (H4).
const maxLoggedText = 460

// maskAttr is the slog.HandlerOptions.ReplaceAttr of the event log. It masks every text, including
// the message, by the maskRules: codes, tokens, cookies, passwords and e-mail addresses (G2). It
// leaves four attributes as they are, because they hold only ids and IP addresses; the request id
// may be the client's own. An id that is part of another attribute may be masked.
func maskAttr(_ []string, a slog.Attr) slog.Attr {
	if slices.Contains([]string{"requestId", "userId", "fileId", "client"}, a.Key) {
		return a
	}
	if kind := a.Value.Kind(); kind == slog.KindString || kind == slog.KindAny {
		a.Value = slog.StringValue(maskText(a.Value.String()))
	}
	return a
}

// maskRules are applied in this order. Each comment says what its rule matches and, after the
// arrow, what remains.
var maskRules = []struct {
	pattern     *regexp.Regexp
	replacement string
}{
	// A run of white space, including line breaks → one space.
	{regexp.MustCompile(`\s+`), " "},
	// Control, invisible, direction and replacement characters → nothing. They could hide a secret
	// from the rules below, as in pass<U+200B>word=hunter2. JSON would write some of them in six
	// bytes (H4).
	{regexp.MustCompile(`[\p{Cc}\p{Cf}\x{2028}\x{2029}\x{fffd}]`), ""},
	// An e-mail address in any script: jane.roe@example.com → j***@example.com
	{regexp.MustCompile(`([^\s@:;,<>()\[\]"])[^\s@:;,<>()\[\]"]*@`), "$1***@"},
	// User and password in a URL: smtps://user:password@mail.example.com →
	// smtps://***@mail.example.com
	{regexp.MustCompile(`://[^/\s]*@`), "://***@"},
	// A word for a secret and an equals sign, with everything after them: my_password=hunter2 a →
	// my_***
	{regexp.MustCompile(`(?is)(code|token|secret|pass|pwd|key|session|auth)[^=&\s]*=.*`), "***"},
	// 40 characters or more of a key, or of the payload or the signature of a session token → ***.
	// An id has only 36. A "/" ends a run, so that the path of a file stays.
	{regexp.MustCompile(`[\w+=-]{40,}`), "***"},
	// A one-time code, also written as 482-913 or 4 8 2 9 1 3 → ***
	{regexp.MustCompile(`[0-9]{6,}|[0-9]{3}[-_ ][0-9]{3}|[0-9]([-_ ][0-9]){5}`), "***"},
}

// maskText applies the rules to a text, then cuts it to maxLoggedText bytes. The order matters: a
// cut could split a secret so that no rule matches its first half.
func maskText(text string) string {
	for _, mask := range maskRules {
		text = mask.pattern.ReplaceAllString(text, mask.replacement)
	}
	return text[:min(len(text), maxLoggedText)]
}
