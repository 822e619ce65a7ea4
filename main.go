// Hubs is a passwordless data API server. A user signs in with a one-time code sent by e-mail
// and stays signed in with a signed token in a cookie. Every request with a session reads the
// account from PostgreSQL again.
//
// The program follows these rules:
//
//   - Every endpoint has a contract. One function (serveRoute in middleware.go) runs all contracts
//     and makes their checks in the same order. The server does not start if a route has no access
//     rule, if its input is not parsed, or if requests must be counted by their input but the route
//     has no limit for that. An upload parses its own body, in files.go.
//   - An endpoint that takes input refuses unknown fields: in the query of a GET, in the JSON body
//     of any other method. A request whose answer depends on the database is refused while the
//     database is unreachable. An output that breaks its contract is not sent, but a write that
//     came before it is not undone.
//   - All errors have one format and are written by one function, except those that net/http
//     writes before it calls a handler. An internal error is logged once, with the request id,
//     and is never shown to the client.
//   - The server writes no secret, code, token or whole e-mail address into a log or a URL. Texts
//     of errors are masked by rules that can't know every form, and a client can write a text of
//     its own into the log, such as its request id (SECURITY.md, Deviations). In the local
//     environment without a mail server, codes are printed on standard output.
//
// This is what happens to a request, such as PATCH /hubs/{hubId}:
//
//  1. It passes the six steps of middleware.go. The last one, router, finds its route in the
//     table below, and calls serveRoute of its contract.
//  2. serveRoute reads the fields of the body. The route's parse function, parseHubChange, takes
//     each field by a rule and makes the input from them. Errors are collected.
//  3. authorize checks the session, the terms and the role. Only then are the collected errors
//     reported.
//  4. The route's handler, changeHub, runs a statement in the store, and returns an output or an
//     error.
//  5. answer checks the output (isValid) and sends it as JSON, or fail sends the error. Only
//     getFile and the handlers of documents send their answers themselves.
//
// An id in brackets, such as (O3), names the row of SECURITY.md that the function implements.
//
// README.md has the order in which to read the files, and says which parts can be left for the end.
// This file has four parts:
//
//  1. The command line.
//  2. The server, its routes and its smallest endpoints.
//  3. Start and stop, and the connections in between.
//  4. The configuration.
package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/mail"
	"net/netip"
	"net/url"
	"os"
	"os/signal"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// Part 1: the command line.

func main() {
	err := run(os.Args[1:])
	if err == nil {
		return
	}
	if _, ok := errors.AsType[usageError](err); ok {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	fmt.Fprintln(os.Stderr, maskText(err.Error()))
	os.Exit(1)
}

const usage = `usage: hubs [COMMAND]

  serve                               run the server (also without a command)
  migrate                             make or update the tables
  routes                              print the route table
  user add [-role ROLE] EMAIL         add a user; ROLE is member (default) or admin
  user role EMAIL ROLE                change the role
  user suspend EMAIL                  refuse the user from the next request on
  user activate EMAIL                 lift a suspension
  user signout EMAIL                  end all sessions of the user
  user email EMAIL NEW                change the address, and end all sessions
  user delete EMAIL                   delete the user; uploaded files stay
  user list                           list the users
  user show EMAIL                     show one user
  mail-test EMAIL                     send a mail through SMTP_URL, and say what became of it
  version                             print the version
  help                                print this text

Settings are environment variables; docs/deploy.md lists them. The commands migrate and
user need DATABASE_URL only, mail-test needs SMTP_URL and MAIL_FROM only.
`

// run executes the command line.
func run(args []string) error {
	if len(args) == 0 {
		args = []string{"serve"}
	}
	// Look at the last argument, so that "hubs user --help" prints the usage, too.
	if slices.Contains([]string{"help", "-h", "-help", "--help"}, args[len(args)-1]) {
		fmt.Print(usage)
		return nil
	}
	// These two commands have arguments of their own.
	if args[0] == "user" {
		return userCommand(args[1:])
	}
	if args[0] == "mail-test" {
		return mailTest(args[1:])
	}
	ctx, release := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, release) // so that a second signal ends the process
	// The others have none. The whole line is compared, so "serve x" is an unknown command.
	switch command := strings.Join(args, " "); command {
	case "serve":
		return serve(ctx)
	case "migrate":
		return migrate(ctx)
	case "routes":
		printRoutes()
	case "version", "--version":
		printVersion()
	default:
		return usageError("there is no command \"" + command + "\"\n\n" + usage)
	}
	return nil
}

// printVersion prints the version that the Go toolchain recorded in this build.
func printVersion() {
	info, _ := debug.ReadBuildInfo() // always present in a build from a module
	fmt.Println("hubs", info.Main.Version, info.GoVersion)
}

// Part 2: the server, its routes and its smallest endpoints.

// server holds what the handlers share. Its configuration does not change after the start.
type server struct {
	cfg        config
	log        *slog.Logger // events, masked by maskAttr
	requestLog *slog.Logger // one line for each request
	out        io.Writer    // standard output, safe for concurrent use: both logs, and local codes
	store      *store

	// Set by stop: no new sweep begins, and each new request ends its connection.
	stopping atomic.Bool

	files     *os.Root // FILES_DIR
	transfers transfers
	codes     oneTimeCodes

	// Semaphores: each piece of work under way has put one element into the channel.
	codeSlots chan struct{} // requests for a code that are unfinished
	mailSlots chan struct{} // conversations with the mail server

	// Step 4 applies requestLimit or fileLimit to every request. The route table gives the other
	// two to their endpoints. A restart resets all counts. A new code does not (O5).
	requestLimit     *limiter
	fileLimit        *limiter
	codeRequestLimit *limiter
	guessLimit       *limiter
}

func newServer(cfg config, st *store, out io.Writer) *server {
	masked := &slog.HandlerOptions{ReplaceAttr: maskAttr}
	return &server{
		cfg:              cfg,
		log:              slog.New(slog.NewJSONHandler(out, masked)),
		requestLog:       slog.New(slog.NewJSONHandler(out, nil)),
		out:              out,
		store:            st,
		codes:            oneTimeCodes{byEmail: map[string]*oneTimeCode{}},
		codeSlots:        make(chan struct{}, maxCodeRequests),
		mailSlots:        make(chan struct{}, maxConversations),
		requestLimit:     newLimiter(100, 10*time.Second, "client address"),
		fileLimit:        newLimiter(500, time.Second, "client address"),
		codeRequestLimit: newLimiter(5, 15*time.Minute, "e-mail and client address"),
		guessLimit:       newLimiter(10, 15*time.Minute, "e-mail"),
		transfers:        transfers{byUser: map[string]int{}},
	}
}

// routes returns the route table. The paths are patterns of http.ServeMux; "/{$}" is only the root.
//
// The last column is a contract (see part 2 of middleware.go): a handler, and before it, if the
// endpoint has an input, the function that makes the input from the fields of the request.
// limitedEndpoint also counts requests by a key of the input, such as the e-mail address.
func (s *server) routes() []route {
	// openapi.json has the name of the local cookie. Replace it by the name in this environment.
	apiText := strings.ReplaceAll(openAPI, `"hubs_auth_local"`, strconv.Quote(s.cfg.cookieName))
	apiDocument := document{"application/json", contentPolicy, apiText}
	pageDocument := document{"text/html; charset=utf-8", pagePolicy, indexPage}
	table := []route{
		// method, path, access rule, status of a success, contract
		{"POST", "/auth/otp/request", public, 200, limitedEndpoint(s.codeRequestLimit, parseCodeRequest, s.requestCode)},
		{"POST", "/auth/otp/validate", public, 200, limitedEndpoint(s.guessLimit, parseGuess, s.validateCode)},
		{"POST", "/auth/logout", sessionOnly, 204, endpoint(s.logout)},
		{"GET", "/auth/session", sessionOnly, 200, endpoint(s.getSession)},
		{"POST", "/terms/acceptance", sessionOnly, 200, inputEndpoint(parseAcceptance, s.acceptTerms)},
		{"GET", "/hubs", sessionAndTerms, 200, inputEndpoint(parseHubQuery, s.listHubs)},
		{"GET", "/hubs/{hubId}", sessionAndTerms, 200, endpoint(s.getHub)},
		{"POST", "/hubs", adminOnly, 201, inputEndpoint(parseNewHub, s.createHub)},
		{"PATCH", "/hubs/{hubId}", adminOnly, 200, inputEndpoint(parseHubChange, s.changeHub)},
		{"DELETE", "/hubs/{hubId}", adminOnly, 204, endpoint(s.deleteHub)},
		{"POST", "/files/upload", sessionAndTerms, 201, endpoint(s.upload)},
		{"GET", "/files/{fileId}/{name}", sessionAndTerms, 200, endpoint(s.getFile)},
		{"GET", "/healthz", public, 200, endpoint(s.getHealth)},
		{"GET", "/openapi.json", public, 200, endpoint(apiDocument.send)},
	}
	if s.cfg.env == envLocal {
		table = append(table, route{"GET", "/{$}", public, 200, endpoint(pageDocument.send)})
	}
	return table
}

//go:embed web/openapi.json
var openAPI string

//go:embed web/index.html
var indexPage string

// printRoutes prints the route table. A test compares it with the README.
func printRoutes() {
	s := newServer(config{env: envLocal}, nil, io.Discard)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "METHOD\tPATH\tNEEDS\tLIMIT")
	for _, r := range s.routes() {
		limit := s.clientLimit(r.method, r.path).String()
		if own := r.contract.ownLimit(); own != nil {
			limit += "; " + own.String()
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", r.method, r.path, r.access, limit)
	}
	table.Flush()
}

type health struct {
	Status string `json:"status"`
}

func (health) isValid() bool { return true } // it is a constant

// getHealth reports whether the server can read its tables within dbTimeout and whether FILES_DIR
// exists. If not, it returns a 503 (E1). checkTables alone could take longer than dbTimeout,
// because it waits for a slot and then for PostgreSQL.
func (s *server) getHealth(*requestState) (health, error) {
	checked := make(chan error, 1) // buffered, so that a late check can end
	go func() { checked <- s.store.checkTables() }()
	var tablesErr error
	select {
	case tablesErr = <-checked:
	case <-time.After(dbTimeout):
		tablesErr = errors.New("the check of the tables takes too long")
	}
	if err := errors.Join(tablesErr, s.checkFiles()); err != nil {
		return health{}, unavailable(err)
	}
	return health{"ok"}, nil
}

// pagePolicy is the Content-Security-Policy header of the page. A browser ignores frame-ancestors
// in a meta element, so the server sends it. A meta element in index.html has the rest of the
// policy: the page may load its own script and style, by their hashes, and send requests to this
// server.
const pagePolicy = "frame-ancestors 'none'"

// A document is a fixed text with its own Content-Security-Policy.
type document struct{ contentType, policy, text string }

// send is the handler of a document. state is also the ResponseWriter.
func (d document) send(state *requestState) (sent, error) {
	state.Header().Set("Content-Type", d.contentType)
	state.Header().Set("Content-Security-Policy", d.policy)
	state.WriteHeader(state.route.status)
	io.WriteString(state, d.text) // an error means that the client has gone
	return sent{}, nil
}

// Part 3: start and stop, and the connections in between.

// Time limits of a request. net/http starts each again for every request on a connection. The first
// two count from the beginning of the connection or, for a later request, from its first bytes.
//
// Each step of a database statement has a limit of its own (dbTimeout in store.go). A file system
// that hangs has none: see SECURITY.md.
const (
	headerTimeout = 10 * time.Second // to read the header
	bodyTimeout   = 15 * time.Second // to read header and body; an upload extends it
	answerTimeout = 30 * time.Second // to write the answer, from the end of the header on
	idleTimeout   = time.Minute      // between an answer and the next request
)

const (
	arrivalTime = 500 * time.Millisecond // time that stop gives to requests that are arriving
	stopTimeout = 12 * time.Second       // time that stop gives to requests, then again to mail
)

// serve runs the server until ctx ends, then stops it.
func serve(ctx context.Context) error {
	cfg, err := loadConfig()
	if err != nil {
		return err
	}
	st, err := openStore(cfg.databaseURL)
	if err != nil {
		return err
	}
	defer st.db.Close()
	s := newServer(cfg, st, os.Stdout)
	if err := s.openFiles(); err != nil {
		return err
	}
	httpServer := s.newHTTPServer() // panics if a route is not valid
	listener, err := listen(cfg.addr, ctx.Done())
	if err != nil {
		return err
	}
	s.warnOfDatabaseRights()

	go s.sweepUploads()
	s.log.Info("listening", "addr", listener.Addr().String(), "env", cfg.env)
	failed := make(chan error, 1)
	go func() { failed <- httpServer.Serve(listener) }()
	select {
	case err := <-failed:
		// When ctx ends, Accept may return an error (see boundedListener). That is no failure. Any
		// other error ends the process at once, and cuts off the requests that run.
		if ctx.Err() == nil {
			return err
		}
	case <-ctx.Done():
	}
	return s.stop(httpServer, listener)
}

// newHTTPServer returns the HTTP server. Its time limits cut off clients that send or read too
// slowly (H1). OPTIONS * goes through the same steps as every other request (H2).
func (s *server) newHTTPServer() *http.Server {
	return &http.Server{
		Handler:                      s.handler(s.routes()),
		ReadHeaderTimeout:            headerTimeout,
		ReadTimeout:                  bodyTimeout,
		WriteTimeout:                 answerTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               12 << 10, // 16 kB in effect: net/http adds 4 kB
		DisableGeneralOptionsHandler: true,
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
}

// stop shuts the server down gracefully (H3), in four steps:
//
//  1. It closes the listener. A connection that is not accepted yet is lost, unless systemd holds
//     the socket.
//  2. It serves requests for another arrivalTime, because http.Server.Shutdown drops connections
//     that were just accepted, and idle connections on which a request is arriving. Each request
//     that begins in that time is answered with Connection: close.
//  3. It waits for requests, at most stopTimeout. Each that ends in that time is answered.
//  4. It waits for mail, at most stopTimeout. A request that still runs ends with the process.
func (s *server) stop(httpServer *http.Server, listener net.Listener) error {
	s.stopping.Store(true)
	listener.Close()
	time.Sleep(arrivalTime)
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	// Shutdown returns when all requests have ended, or ctx has. Its error may also be about the
	// listener, so ctx says whether requests were cut off.
	httpServer.Shutdown(ctx)
	var err error
	if ctx.Err() != nil {
		err = errors.New("stopped, but some requests did not end in time and were cut off")
	}
	// Wait for mail only after Shutdown: until then, a request may still ask for a code. Each
	// unfinished request for a code holds a slot, so to take all slots is to wait for all of them.
	giveUp := time.After(stopTimeout)
	for range maxCodeRequests {
		select {
		case s.codeSlots <- struct{}{}:
		case <-giveUp:
			return errors.Join(err, errors.New("stopped with mail unsent"))
		}
	}
	s.log.Info("stopped", "requestsCutOff", err != nil)
	return err
}

// Each connection takes up to 192 kB (twice sendBuffer) of the kernel's send buffer, and some
// memory of Go. Measured with clients that read nothing, all of them use less than 256 MB if
// GOMEMLIMIT is set as in deploy/. The kernel's receive buffers come on top.
//
// The price of a small buffer is that a download gets at most 192 kB in each round trip to the
// client: 2 MB/s at 100 ms.
const (
	maxConnections = 1024
	sendBuffer     = 96 << 10 // bytes asked for; Linux doubles it
)

// listen listens on ADDR, or on the first socket passed by systemd (socket activation). systemd
// keeps its socket open while the server restarts, so that no connection is refused. When stop is
// closed, an Accept that waits for a slot returns.
func listen(addr string, stop <-chan struct{}) (net.Listener, error) {
	var limit syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit)
	if err != nil {
		return nil, err
	}
	var listener net.Listener
	if os.Getenv("LISTEN_PID") == strconv.Itoa(os.Getpid()) {
		// The sockets are for this process. The first is descriptor 3; see sd_listen_fds(3).
		listener, err = net.FileListener(os.NewFile(3, "LISTEN_FDS"))
	} else {
		listener, err = net.Listen("tcp", addr)
	}
	if err != nil {
		return nil, usageError("ADDR, or the socket of LISTEN_FDS: " + err.Error())
	}
	tcp, ok := listener.(*net.TCPListener)
	if !ok {
		return nil, usageError("LISTEN_FDS: the socket must be a TCP socket that listens")
	}
	// Leave three quarters of the file descriptors to files and the database: each transfer
	// holds a connection and a file.
	slots := make(chan struct{}, min(maxConnections, limit.Cur/4))
	return &boundedListener{TCPListener: tcp, slots: slots, stop: stop}, nil
}

// A boundedListener bounds the number of open connections: each holds a slot until it is closed.
// The time limits of a request free the slots of slow and idle clients. Nothing here stops one
// client from taking all slots; that is the proxy's part.
type boundedListener struct {
	*net.TCPListener
	slots chan struct{}
	stop  <-chan struct{} // closed when the server stops
}

// Accept takes a slot, then accepts a connection. While no slot is free, new connections wait in
// the kernel (H8). When the server stops, Accept must not keep waiting for a slot, because
// http.Server.Shutdown waits for Accept to return.
func (l *boundedListener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.stop:
		return nil, net.ErrClosed
	}
	conn, err := l.AcceptTCP()
	if err != nil {
		<-l.slots
		return nil, err
	}
	conn.SetWriteBuffer(sendBuffer)
	return &boundedConnection{TCPConn: conn, release: sync.OnceFunc(func() { <-l.slots })}, nil
}

// A boundedConnection frees its slot when it is closed. It embeds *net.TCPConn, not net.Conn,
// because net/http needs the ReadFrom method of *net.TCPConn to send files with sendfile.
type boundedConnection struct {
	*net.TCPConn
	release func() // frees the slot, once: net/http may close a connection twice
}

func (c *boundedConnection) Close() error {
	err := c.TCPConn.Close()
	c.release() // only after Close, so that the bound is never exceeded
	return err
}

// Part 4: the configuration.

// The values of APP_ENV.
const (
	envLocal      = "local"
	envStaging    = "staging"
	envProduction = "production"
)

// config holds the validated settings. Lifetimes and rate limits are constants, not settings.
//
// The local environment is for development. It needs neither HTTPS nor a mail server, and differs
// from the others in this:
//
//   - The cookie has no Secure, no Domain and no __Secure- prefix.
//   - The localOrigins are allowed, unless ALLOWED_ORIGINS is set.
//   - Without a mail server, codes are printed.
//   - web/index.html is served at /.
//   - FILES_DIR is created.
//   - Requests are not logged, and refused origins are logged in full.
//   - There is no warning about the rights of the database role.
//
// Staging differs from production in its origins, a list which may contain http origins, and in the
// name of its cookie.
type config struct {
	env            string
	addr           string
	databaseURL    string
	filesDir       string
	sessionKeys    jwt.VerificationKeySet // the first key signs, all keys verify
	cookieName     string
	cookieDomain   string         // "" in the local environment: a host-only cookie
	allowedOrigins []string       // local and staging: the exact origins
	originDomain   string         // production: the domain whose subdomains are allowed
	trustedProxies []netip.Prefix // proxies whose X-Forwarded-For is believed
	mail           mailer
	maxUploadBytes int64
}

// A usageError reports an operator's mistake in a setting or on the command line. It is printed
// unmasked, so it never quotes a setting that may hold a secret. It may quote the command line.
type usageError string

func (e usageError) Error() string { return string(e) }

// A configReader reads the settings from the environment and collects all errors in them.
type configReader struct {
	env    string // APP_ENV
	errors []error
}

// check records the complaint unless ok is true. It does not stop the caller.
func (r *configReader) check(ok bool, complaint string) {
	if !ok {
		r.errors = append(r.errors, usageError(complaint))
	}
}

// list returns the elements of a setting, separated by commas or spaces.
func (r *configReader) list(name, fallback string) []string {
	value := cmp.Or(os.Getenv(name), fallback)
	return strings.Fields(strings.ReplaceAll(value, ",", " "))
}

// loadConfig reads and validates the settings. Its error lists every mistake, except in ADDR and
// FILES_DIR, which are found wrong when they are used. The error contains no secret (K1).
// loadConfig also rejects settings that would work but are dangerous (K3); the methods below say
// which.
func loadConfig() (config, error) {
	r := &configReader{env: os.Getenv("APP_ENV")}
	r.check(slices.Contains([]string{envLocal, envStaging, envProduction}, r.env),
		"APP_ENV: must be local, staging or production (docs/deploy.md explains every setting)")

	cfg := config{
		env:            r.env,
		addr:           cmp.Or(os.Getenv("ADDR"), "127.0.0.1:8080"), // listen checks it
		databaseURL:    r.databaseURL(),
		filesDir:       cmp.Or(os.Getenv("FILES_DIR"), "data/files"),
		maxUploadBytes: r.maxUploadBytes(),
		sessionKeys:    r.sessionKeys(),
		cookieName:     r.cookieName(),
		cookieDomain:   r.cookieDomain(),
		allowedOrigins: r.allowedOrigins(),
		originDomain:   r.originDomain(),
		trustedProxies: r.trustedProxies(),
	}
	// Locally, codes may be printed instead.
	if r.env != envLocal || os.Getenv("SMTP_URL") != "" {
		cfg.mail = r.mailer()
	}
	if r.errors != nil {
		return config{}, errors.Join(r.errors...)
	}
	return cfg, nil
}

func (r *configReader) databaseURL() string {
	databaseURL := os.Getenv("DATABASE_URL")
	if _, err := newConnector(databaseURL, nil); err != nil {
		r.errors = append(r.errors, err)
	}
	return databaseURL
}

func (r *configReader) maxUploadBytes() int64 {
	size, err := strconv.ParseUint(cmp.Or(os.Getenv("MAX_UPLOAD_BYTES"), "26214400"), 10, 40)
	r.check(err == nil && size > 0,
		"MAX_UPLOAD_BYTES: must be digits, 1 to 2^40 - 1")
	return int64(size)
}

// placeholderKey is the session key in the examples in deploy/.
const placeholderKey = "REPLACE-WITH-THE-OUTPUT-OF-openssl-rand-base64-48"

// sessionKeys requires keys at least as long as the hash, 32 bytes (RFC 7518 3.2), with at least
// 10 different bytes, because a key typed by hand often has fewer (T3).
func (r *configReader) sessionKeys() jwt.VerificationKeySet {
	var keys jwt.VerificationKeySet
	for key := range strings.SplitSeq(os.Getenv("SESSION_SECRET"), ",") {
		different := slices.Compact(slices.Sorted(slices.Values([]byte(key)))) // each byte once
		r.check(len(key) >= 32 && len(different) >= 10,
			"SESSION_SECRET: each key needs at least 32 bytes, 10 of them different")
		r.check(key != placeholderKey,
			"SESSION_SECRET: is the placeholder; make a key of your own")
		// A space after a comma would become part of the key, and tokens signed with the key
		// meant would be rejected.
		r.check(strings.TrimSpace(key) == key,
			"SESSION_SECRET: no spaces around a key")
		keys.Keys = append(keys.Keys, []byte(key))
	}
	return keys
}

var cookiePrefixPattern = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// cookieName returns a name that contains the environment (T8). Browsers match the prefixes __Host-
// and __Secure- case-insensitively. They accept a cookie with __Host- only if it has no Domain, and
// one with either prefix only over HTTPS.
func (r *configReader) cookieName() string {
	prefix := "__Secure-hubs"
	if r.env == envLocal {
		prefix = "hubs"
	}
	prefix = cmp.Or(os.Getenv("COOKIE_PREFIX"), prefix)
	lower := strings.ToLower(prefix)
	r.check(cookiePrefixPattern.MatchString(prefix),
		"COOKIE_PREFIX: must be letters, digits, - and _")
	r.check(!strings.HasPrefix(lower, "__host-"), "COOKIE_PREFIX: __Host- does not go with a Domain")
	r.check(r.env != envLocal || !strings.HasPrefix(lower, "__secure-"),
		"COOKIE_PREFIX: __Secure- needs HTTPS, which the local environment lacks")
	return prefix + "_auth_" + r.env
}

// isParentDomain reports whether domain may be the common parent of the operator's hosts, to which
// cookies and origins are scoped. It must have at least two labels, because a single one would be a
// whole top-level domain, and must not be an IP address. Public suffixes such as co.uk are not
// detected.
func isParentDomain(domain string) bool {
	dot := strings.LastIndex(domain, ".")
	// The last label of an address has only digits: 10.0.0.1, or 10.1 for short. A domain that
	// ends in a dot has an empty last label, and is refused as well.
	isAddress := strings.Trim(domain[dot+1:], "0123456789") == ""
	return dot > 0 && !isAddress && domainPattern.MatchString(domain)
}

func (r *configReader) cookieDomain() string {
	domain := strings.ToLower(os.Getenv("COOKIE_DOMAIN"))
	if r.env == envLocal {
		r.check(domain == "", "COOKIE_DOMAIN: must be unset locally")
	} else {
		r.check(isParentDomain(domain),
			"COOKIE_DOMAIN: must be a domain of two labels or more, not an IP address")
	}
	return domain
}

// localOrigins are the usual origins of front ends in development.
const localOrigins = `
	http://localhost:3000 http://localhost:4200 http://localhost:5173 http://localhost:8081
	http://127.0.0.1:3000 http://127.0.0.1:4200 http://127.0.0.1:5173 http://127.0.0.1:8081`

// originPattern matches an origin as a browser sends it: in lower case and without a path. It
// matches no IPv6 address.
var originPattern = regexp.MustCompile(`^https?://[a-z0-9.-]+(:[1-9][0-9]{0,4})?$`)

// defaultPorts are left out of an origin by browsers, so https://app.example.com:443 would never
// match.
var defaultPorts = []string{"http:80", "https:443"}

func (r *configReader) allowedOrigins() []string {
	fallback := ""
	if r.env == envLocal {
		fallback = localOrigins
	}
	origins := r.list("ALLOWED_ORIGINS", fallback)
	if r.env == envProduction {
		r.check(len(origins) == 0,
			"ALLOWED_ORIGINS: must be unset in production")
		return nil
	}
	for _, origin := range origins {
		u, err := url.Parse(origin)
		valid := err == nil && originPattern.MatchString(origin) && isPortOrEmpty(u.Port()) &&
			!slices.Contains(defaultPorts, u.Scheme+":"+u.Port())
		r.check(valid,
			"ALLOWED_ORIGINS: must be origins such as https://app.example.com, without a default port")
	}
	return origins
}

// isPortOrEmpty reports whether text is a port number or empty.
func isPortOrEmpty(text string) bool {
	port, err := strconv.ParseUint(text, 10, 16) // at most 65535
	return text == "" || err == nil && port > 0
}

func (r *configReader) originDomain() string {
	domain := strings.ToLower(os.Getenv("ALLOWED_ORIGIN_DOMAIN"))
	cookieDomain := strings.ToLower(os.Getenv("COOKIE_DOMAIN"))
	if r.env != envProduction {
		r.check(domain == "",
			"ALLOWED_ORIGIN_DOMAIN: must be unset outside production")
		return ""
	}
	valid := isParentDomain(domain)
	r.check(valid,
		"ALLOWED_ORIGIN_DOMAIN: must be a domain of two labels or more in production, not an IP address")
	// The domains are related if they are equal or if one is under the other; the dots keep
	// badexample.com apart from example.com. If they are unrelated, one is probably mistyped, and
	// no allowed page would send the cookie. Siblings such as app.example.com and api.example.com
	// would work, but the server can't tell them from two sites of one public suffix.
	related := strings.HasSuffix("."+domain, "."+cookieDomain) ||
		strings.HasSuffix("."+cookieDomain, "."+domain)
	r.check(related || !valid,
		"COOKIE_DOMAIN: must be ALLOWED_ORIGIN_DOMAIN, or a parent or a child of it")
	return domain
}

func (r *configReader) trustedProxies() []netip.Prefix {
	var proxies []netip.Prefix
	for _, text := range r.list("TRUSTED_PROXIES", "") {
		prefix, err := netip.ParsePrefix(text)
		// A prefix such as ::ffff:10.0.0.0/104 would match nothing, because parseAddress unmaps
		// addresses. A /0 would trust every client.
		valid := err == nil && !prefix.Addr().Is4In6() && prefix.Bits() > 0
		r.check(valid, "TRUSTED_PROXIES: must be CIDRs such as 10.0.0.0/8, and not /0")
		proxies = append(proxies, prefix)
	}
	return proxies
}

// smtpPattern matches scheme://[user:password@]host[:port][/]. The host is a name, or an IPv6
// address in brackets. A path or a query is rejected, because either would be ignored.
var smtpPattern = regexp.MustCompile(`^smtps?://([^/?#]*@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]+)?/?$`)

// mailer reads SMTP_URL and MAIL_FROM.
func (r *configReader) mailer() mailer {
	text := os.Getenv("SMTP_URL")
	smtpURL, err := url.Parse(text)
	valid := err == nil && smtpPattern.MatchString(text) && isPortOrEmpty(smtpURL.Port())
	r.check(valid,
		"SMTP_URL: must be smtp:// or smtps:// with a host and no path; it may be unset locally only")
	from, err := mail.ParseAddress(os.Getenv("MAIL_FROM"))
	r.check(err == nil && emailPattern.MatchString(from.Address),
		"MAIL_FROM: must be an e-mail address")
	return mailer{server: smtpURL, from: from}
}
