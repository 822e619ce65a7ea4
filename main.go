// Hubs is a passwordless data API server. A user signs in with a one-time code
// sent by e-mail and stays signed in with a signed token in a cookie. Every
// request with a session reads the account from PostgreSQL again.
//
// A request, such as PATCH /hubs/{hubId}, takes these steps:
//
//  1. ServeHTTP (middleware.go) takes it through the six steps that
//     README.md lists. The last one finds its route in the table below, and
//     calls serveRoute.
//  2. serveRoute reads and validates the fields, checks session, terms and
//     role, spends the route's own limit, and calls the handler, changeHub.
//  3. The handler runs a statement. It returns an output or an error.
//  4. answer lets the output validate itself, and sends it. fail sends an error
//     instead.
//
// An id in brackets, such as (O3), names a row of SECURITY.md. README.md has an
// order in which to read the files. Leave the end of this one, configuration
// and commands, for last.
package main

import (
	"cmp"
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
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
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/lib/pq"
)

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

// A usageError is a mistake in a setting or on the command line. It is printed
// unmasked, so it must never quote a secret.
type usageError string

func (e usageError) Error() string { return string(e) }

func run(args []string) error {
	if len(args) == 0 {
		args = []string{"serve"}
	}
	if slices.Contains([]string{"help", "-h", "-help", "--help"}, args[len(args)-1]) {
		fmt.Print(usage)
		return nil
	}
	if args[0] == "mail-test" {
		return mailTest(args[1:])
	}
	ctx, release := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, release) // so that a second signal ends the process
	if args[0] == "user" {
		return userCommand(ctx, args[1:])
	}
	switch line := strings.Join(args, " "); line {
	case "serve":
		return serve(ctx)
	case "migrate":
		return migrate(ctx)
	case "routes":
		printRoutes()
	case "version", "--version":
		if info, ok := debug.ReadBuildInfo(); ok {
			fmt.Println("hubs", info.Main.Version, info.GoVersion)
		}
	default:
		return usageError("there is no command \"" + line + "\"\n\n" + usage)
	}
	return nil
}

// A server holds what the handlers share.
type server struct {
	cfg        config
	log        *slog.Logger // events, masked by maskAttr
	requestLog *slog.Logger
	out        io.Writer // standard output: both logs, and local codes
	store      *store
	files      *os.Root
	codes      oneTimeCodes
	mux        *http.ServeMux
	stopping   atomic.Bool // each new request ends its connection

	// Semaphores: each piece of work under way has one element in the channel.
	codeSlots chan struct{} // requests for a code that are unfinished
	mailSlots chan struct{} // conversations with the mail server

	// The first two are for step 4, the others for routes. A new code resets
	// none of them (O5).
	requestLimit     *limiter
	fileLimit        *limiter
	codeRequestLimit *limiter
	guessLimit       *limiter
}

func newServer(cfg config, st *store, out io.Writer) *server {
	masked := &slog.HandlerOptions{ReplaceAttr: maskAttr}
	s := &server{
		cfg:              cfg,
		log:              slog.New(slog.NewJSONHandler(out, masked)),
		requestLog:       slog.New(slog.NewJSONHandler(out, nil)),
		out:              out,
		store:            st,
		codes:            oneTimeCodes{byEmail: map[string]*oneTimeCode{}},
		mux:              http.NewServeMux(),
		codeSlots:        make(chan struct{}, maxCodeRequests),
		mailSlots:        make(chan struct{}, maxConversations),
		requestLimit:     newLimiter(100, 10*time.Second, "client address"),
		fileLimit:        newLimiter(500, time.Second, "client address"),
		codeRequestLimit: newLimiter(5, 15*time.Minute, "e-mail and client address"),
		guessLimit:       newLimiter(10, 15*time.Minute, "e-mail"),
	}
	for _, rt := range s.routes() {
		s.addRoute(rt)
	}
	return s
}

type route struct {
	pattern  string // method and path
	access   access
	status   int                      // of a success; http.ServeContent chooses that of a file
	input    []string                 // names of the fields; if nil, body and query are ignored
	check    func(fields) fieldErrors // validates the fields
	limit    *limiter                 // the endpoint's own, besides the one of step 4
	limitKey func(*request) string    // what limit counts by; "" if the request does not count
	handle   func(*request) (output, error)
}

func (rt route) path() string {
	_, path, _ := strings.Cut(rt.pattern, " ")
	return path
}

// An access says who may call an endpoint: everyone, or the users who meet all
// conditions.
type access struct {
	public  bool
	session bool     // is signed in and not suspended
	terms   bool     // has accepted the current terms
	roles   []string // has one of these roles; nil means any
}

var (
	public          = access{public: true}
	sessionOnly     = access{session: true}
	sessionAndTerms = access{session: true, terms: true}
	adminOnly       = access{session: true, terms: true, roles: []string{roleAdmin}}
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

// mustBeValid prevents the start if a route has no access rule or status, an
// input without a check, or a limit without its key (Z1).
func (rt route) mustBeValid() {
	a := rt.access
	hasConditions := a.session || a.terms || a.roles != nil
	if a.public == hasConditions || hasConditions && !a.session {
		panic("the access must be public, or a session with conditions: " + rt.pattern)
	}
	if rt.status == 0 {
		panic("a route must state its status: " + rt.pattern)
	}
	if (rt.input == nil) != (rt.check == nil) {
		panic("an input must have a check, and a check must have an input: " + rt.pattern)
	}
	if (rt.limit == nil) != (rt.limitKey == nil) {
		panic("a limit must have a key, and a key must have a limit: " + rt.pattern)
	}
}

const healthPath = "/healthz"

func (s *server) routes() []route {
	table := []route{
		{
			pattern: "POST /auth/otp/request", access: public, status: 200,
			input: []string{"email"}, check: checkCodeRequest,
			limit: s.codeRequestLimit, limitKey: codeRequestKey, handle: s.requestCode,
		},
		{
			pattern: "POST /auth/otp/validate", access: public, status: 200,
			input: []string{"email", "code"}, check: checkGuess,
			limit: s.guessLimit, limitKey: guessKey, handle: s.validateCode,
		},
		{pattern: "POST /auth/logout", access: sessionOnly, status: 204, handle: s.logout},
		{pattern: "GET /auth/session", access: sessionOnly, status: 200, handle: s.getSession},
		{
			pattern: "POST /terms/acceptance", access: sessionOnly, status: 200,
			input: []string{"version"}, check: checkAcceptance, handle: s.acceptTerms,
		},
		{
			pattern: "GET /hubs", access: sessionAndTerms, status: 200,
			input: hubQueryFields, check: checkHubQuery, handle: s.listHubs,
		},
		{pattern: "GET /hubs/{hubId}", access: sessionAndTerms, status: 200, handle: s.getHub},
		{
			pattern: "POST /hubs", access: adminOnly, status: 201,
			input: hubFields, check: checkNewHub, handle: s.createHub,
		},
		{
			pattern: "PATCH /hubs/{hubId}", access: adminOnly, status: 200,
			input: hubFields, check: checkHubChange, handle: s.changeHub,
		},
		{pattern: "DELETE /hubs/{hubId}", access: adminOnly, status: 204, handle: s.deleteHub},
		{pattern: "POST /files/upload", access: sessionAndTerms, status: 201, handle: s.upload},
		{pattern: "GET /files/{fileId}/{name}", access: sessionAndTerms, status: 200, handle: s.getFile},
		{pattern: "GET " + healthPath, access: public, status: 200, handle: s.getHealth},
		{pattern: "GET /openapi.json", access: public, status: 200, handle: s.getOpenAPI},
	}
	if s.cfg.env == envLocal {
		page := route{pattern: "GET /{$}", access: public, status: 200, handle: getPage}
		table = append(table, page)
	}
	return table
}

type health struct {
	Status string `json:"status"`
}

func (health) validate() fieldErrors { return nil }

// getHealth returns a 503 if the tables can't be read or FILES_DIR is missing
// (E1).
func (s *server) getHealth(*request) (output, error) {
	started := time.Now()
	if err := errors.Join(s.store.probeTables(), s.probeFiles()); err != nil {
		return nil, unavailable(err)
	}
	if time.Since(started) > dbTimeout {
		return nil, unavailable(errors.New("the tables can be read, but too slowly"))
	}
	return health{"ok"}, nil
}

//go:embed web/openapi.json
var openAPI string

//go:embed web/index.html
var indexPage string

func (s *server) getOpenAPI(r *request) (output, error) {
	text := strings.ReplaceAll(openAPI, `"hubs_auth_local"`, strconv.Quote(s.cfg.cookieName))
	sendDocument(r, "application/json", contentPolicy, text)
	return sent{}, nil
}

// getPage sends the local page. A meta element in it has the rest of its
// policy.
func getPage(r *request) (output, error) {
	sendDocument(r, "text/html; charset=utf-8", "frame-ancestors 'none'", indexPage)
	return sent{}, nil
}

func sendDocument(r *request, contentType, policy, text string) {
	r.w.Header().Set("Content-Type", contentType)
	r.w.Header().Set("Content-Security-Policy", policy)
	r.w.WriteHeader(200)
	io.WriteString(r.w, text)
}

// Limits of a request and its connection; files.go has those of transfers.
const (
	headerTimeout = 10 * time.Second // to read the header
	bodyTimeout   = 15 * time.Second // to read header and body
	answerTimeout = 30 * time.Second // to write the answer, from the end of the header on
	idleTimeout   = time.Minute      // between an answer and the next request
	maxHeader     = 16 << 10         // bytes of a request's header

	arrivalTime = 500 * time.Millisecond // time that stop gives to requests that are arriving
	stopTimeout = 12 * time.Second       // time that it gives to requests, then again to mail

	// Linux doubles this, so a client that reads nothing holds 192 kB of the
	// kernel's memory. A download sends no more in one round trip: 2 MB/s at
	// 100 ms.
	sendBuffer = 96 << 10
)

func serve(ctx context.Context) error {
	cfg, err := loadConfig()
	if err != nil {
		return err
	}
	st, err := openStore(cfg.databaseURL)
	if err != nil {
		return err
	}
	s := newServer(cfg, st, os.Stdout)
	if err := s.openFiles(); err != nil {
		return err
	}
	listener, err := listen(cfg.addr)
	if err != nil {
		return usageError("ADDR, or the socket of LISTEN_FDS: " + err.Error())
	}
	s.warnOfDatabaseRights()
	go s.sweepUploads()
	httpServer := s.newHTTPServer()
	failed := make(chan error, 1)
	go func() { failed <- httpServer.Serve(listener) }()
	s.log.Info("listening", "addr", listener.Addr().String(), "env", cfg.env)
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		return s.stop(httpServer, listener)
	}
}

// listen listens on ADDR, or takes the socket that systemd holds over a restart
// (sd_listen_fds(3)).
func listen(addr string) (net.Listener, error) {
	if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return net.Listen("tcp", addr)
	}
	listener, err := net.FileListener(os.NewFile(3, "LISTEN_FDS"))
	if err != nil {
		return nil, err
	}
	if _, isTCP := listener.(*net.TCPListener); !isTCP {
		return nil, errors.New("must be a TCP socket that listens")
	}
	return listener, nil
}

// newHTTPServer returns a server that cuts off slow clients (H1). The proxy in
// front and the unit's descriptors bound the number of connections (deploy/).
func (s *server) newHTTPServer() *http.Server {
	return &http.Server{
		Handler:                      s,
		ConnContext:                  limitSendBuffer,
		ReadHeaderTimeout:            headerTimeout,
		ReadTimeout:                  bodyTimeout,
		WriteTimeout:                 answerTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               maxHeader - (4 << 10), // net/http adds 4 kB
		DisableGeneralOptionsHandler: true,                  // OPTIONS * takes the steps, too (H2)
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
}

func limitSendBuffer(ctx context.Context, conn net.Conn) context.Context {
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetWriteBuffer(sendBuffer)
	}
	return ctx
}

// stop ends the server gracefully (H3). Shutdown would drop connections on
// which a request is just arriving, so stop closes the listener and waits for
// arrivalTime first. Mail comes last, because a request may still ask for a
// code.
func (s *server) stop(httpServer *http.Server, listener net.Listener) error {
	// Exit even if nobody reads the log and a write to it blocks.
	time.AfterFunc(arrivalTime+2*stopTimeout+time.Second, func() { os.Exit(1) })
	s.stopping.Store(true)
	listener.Close()
	time.Sleep(arrivalTime)
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	httpServer.Shutdown(ctx) // may return the listener's error; ctx says what matters
	var err error
	if ctx.Err() != nil {
		err = errors.New("stopped, but some requests did not end in time and were cut off")
	}
	giveUp := time.After(stopTimeout)
	for range maxCodeRequests { // to take all slots is to wait for all mail
		select {
		case s.codeSlots <- struct{}{}:
		case <-giveUp:
			return errors.Join(err, errors.New("stopped with mail unsent"))
		}
	}
	s.log.Info("stopped", "requestsCutOff", err != nil)
	return err
}

// warnOfDatabaseRights warns if the server may write users, because an SQL
// injection could then make an administrator.
func (s *server) warnOfDatabaseRights() {
	if s.cfg.env == envLocal {
		return
	}
	var mayWrite bool
	err := s.store.read(`select has_any_column_privilege('users', 'insert, update')
		or has_table_privilege('users', 'delete')`, nil, &mayWrite)
	if err != nil {
		s.log.Warn("the database role could not be checked", "error", err)
	}
	if mayWrite {
		s.log.Warn("the database role may write users: use the role of deploy/roles.sql")
	}
}

// The configuration.

// The values of APP_ENV. Local is for development, without HTTPS and mail.
const (
	envLocal      = "local"
	envStaging    = "staging"
	envProduction = "production"
)

type config struct {
	env            string
	addr           string
	databaseURL    string
	filesDir       string
	sessionKeys    jwt.VerificationKeySet
	cookieName     string
	cookieDomain   string // "" in the local environment: a host-only cookie
	allowedOrigins []string
	originDomain   string // production: its https subdomains are allowed
	trustedProxies []netip.Prefix
	mail           mailer
	maxUploadBytes int64
}

// A settingReader collects the mistakes in the settings, to report all at once
// (K1).
type settingReader []error

func (settings *settingReader) require(ok bool, complaint string) {
	if !ok {
		*settings = append(*settings, usageError(complaint))
	}
}

// get refuses quotes and white space around a value: docker --env-file keeps
// quotes, and a secret from a file ends in a line break.
func (settings *settingReader) get(name, fallback string) string {
	value := os.Getenv(name)
	const quotes = `"'`
	isQuoted := strings.Trim(value, quotes) != value
	switch name {
	case "MAIL_FROM": // may begin with a quoted name
		isQuoted = strings.TrimRight(value, quotes) != value
	case "DATABASE_URL": // may end in a quoted password
		isQuoted = strings.TrimLeft(value, quotes) != value
	}
	settings.require(!isQuoted && strings.TrimSpace(value) == value,
		name+": must not be in quotes, or begin or end with a space or a line break")
	return cmp.Or(value, fallback)
}

func (settings *settingReader) list(name, fallback string) []string {
	return strings.Fields(strings.ReplaceAll(settings.get(name, fallback), ",", " "))
}

// loadConfig reads the settings, and refuses those that are malformed or
// dangerous (K3). ADDR and FILES_DIR are checked where they are used.
func loadConfig() (config, error) {
	var settings settingReader
	cfg := config{
		env:         settings.get("APP_ENV", ""),
		addr:        settings.get("ADDR", "127.0.0.1:8080"),
		databaseURL: settings.get("DATABASE_URL", ""),
		filesDir:    settings.get("FILES_DIR", "data/files"),
	}
	settings.require(slices.Contains([]string{envLocal, envStaging, envProduction}, cfg.env),
		"APP_ENV: must be local, staging or production (docs/deploy.md explains every setting)")
	if _, err := newConnector(cfg.databaseURL, nil); err != nil {
		settings = append(settings, err)
	}
	size, err := strconv.ParseUint(settings.get("MAX_UPLOAD_BYTES", "26214400"), 10, 40)
	settings.require(err == nil && size > 0, "MAX_UPLOAD_BYTES: must be digits, 1 to 2^40 - 1")
	cfg.maxUploadBytes = int64(size)
	cfg.sessionKeys = readSessionKeys(&settings)
	cfg.readCookie(&settings)
	cfg.readOrigins(&settings)
	for _, text := range settings.list("TRUSTED_PROXIES", "") {
		network, err := netip.ParsePrefix(text)
		settings.require(err == nil && network.Bits() > 0 && !network.Addr().Is4In6(),
			"TRUSTED_PROXIES: must be CIDRs such as 10.0.0.0/8, and not /0")
		cfg.trustedProxies = append(cfg.trustedProxies, network)
	}
	if cfg.env != envLocal || os.Getenv("SMTP_URL") != "" { // locally, codes may be printed instead
		cfg.mail = readMailer(&settings)
	}
	return cfg, errors.Join(settings...)
}

var (
	databaseURLPattern = regexp.MustCompile(`^(postgres(ql)?://|[a-z_]+ *=)`)
	// libpq's form for several hosts, which lib/pq does not know
	portBeforeComma = regexp.MustCompile(`^[a-z]+://([^/?]*@)?[^/?@]*:[0-9]+,`)
)

// newConnector parses DATABASE_URL. It accepts only PostgreSQL's forms, because
// lib/pq would take the URL of another database for key=value, and send the
// password to localhost. It leaves out lib/pq's error, which may quote the
// password.
func newConnector(databaseURL string, settings map[string]string) (*pq.Connector, error) {
	cfg, err := pq.NewConfig(databaseURL)
	isKnownForm := databaseURLPattern.MatchString(databaseURL)
	if err != nil || !isKnownForm || portBeforeComma.MatchString(databaseURL) {
		return nil, usageError("DATABASE_URL: must be postgres://… or key=value …, special " +
			"characters in the password percent-encoded; several hosts as " +
			"postgres://user@host1,host2/hubs?port=5432,5433&target_session_attrs=read-write")
	}
	if cfg.Runtime == nil {
		cfg.Runtime = map[string]string{}
	}
	maps.Copy(cfg.Runtime, settings)
	cfg.BinaryParameters = true // a write needs one round trip less
	return pq.NewConnectorConfig(cfg)
}

const placeholderKey = "REPLACE-WITH-THE-OUTPUT-OF-openssl-rand-base64-48"

// readSessionKeys requires keys as long as the hash (RFC 7518 3.2), of more
// different bytes than most that are typed by hand (T3).
func readSessionKeys(settings *settingReader) (keys jwt.VerificationKeySet) {
	for key := range strings.SplitSeq(settings.get("SESSION_SECRET", ""), ",") {
		different := map[byte]bool{}
		for _, char := range []byte(key) {
			different[char] = true
		}
		isStrong := len(key) >= 32 && len(different) >= 10
		settings.require(isStrong && strings.TrimSpace(key) == key,
			"SESSION_SECRET: each key needs 32 bytes or more, 10 of them different, and no spaces")
		settings.require(key != placeholderKey,
			"SESSION_SECRET: is the placeholder; make a key of your own")
		keys.Keys = append(keys.Keys, []byte(key))
	}
	return keys
}

var cookiePrefixPattern = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// readCookie sets the cookie's name and domain (T8). Browsers take __Host- only
// without a Domain, and __Secure- only over HTTPS, in any letter case.
func (cfg *config) readCookie(settings *settingReader) {
	isLocal := cfg.env == envLocal
	defaultPrefix := "__Secure-hubs"
	if isLocal {
		defaultPrefix = "hubs"
	}
	prefix := settings.get("COOKIE_PREFIX", defaultPrefix)
	lower := strings.ToLower(prefix)
	settings.require(cookiePrefixPattern.MatchString(prefix),
		"COOKIE_PREFIX: must be letters, digits, - and _")
	settings.require(!strings.HasPrefix(lower, "__host-"),
		"COOKIE_PREFIX: __Host- does not go with a Domain")
	cfg.cookieName = prefix + "_auth_" + cfg.env
	cfg.cookieDomain = strings.ToLower(settings.get("COOKIE_DOMAIN", ""))
	if isLocal {
		settings.require(!strings.HasPrefix(lower, "__secure-"),
			"COOKIE_PREFIX: __Secure- needs HTTPS, which the local environment lacks")
		settings.require(cfg.cookieDomain == "", "COOKIE_DOMAIN: must be unset locally")
		return
	}
	settings.require(isParentDomain(cfg.cookieDomain),
		"COOKIE_DOMAIN: must be a domain of two labels or more, not an IP address")
}

// isParentDomain does not know public suffixes such as co.uk.
func isParentDomain(domain string) bool {
	dot := strings.LastIndex(domain, ".")
	isAddress := strings.Trim(domain[dot+1:], "0123456789") == "" // digits at the end
	return dot > 0 && !isAddress && domainPattern.MatchString(domain)
}

const localOrigins = "http://localhost:3000 http://localhost:4200 http://localhost:5173 " +
	"http://localhost:8081 http://127.0.0.1:3000 http://127.0.0.1:4200 http://127.0.0.1:5173 " +
	"http://127.0.0.1:8081"

var originPattern = regexp.MustCompile(`^https?://[a-z0-9.-]+(:[1-9][0-9]{0,4})?$`)

func (cfg *config) readOrigins(settings *settingReader) {
	fallback := ""
	if cfg.env == envLocal {
		fallback = localOrigins
	}
	cfg.allowedOrigins = settings.list("ALLOWED_ORIGINS", fallback)
	cfg.originDomain = strings.ToLower(settings.get("ALLOWED_ORIGIN_DOMAIN", ""))
	if cfg.env == envProduction {
		settings.require(len(cfg.allowedOrigins) == 0, "ALLOWED_ORIGINS: must be unset in production")
		settings.require(isParentDomain(cfg.originDomain),
			"ALLOWED_ORIGIN_DOMAIN: must be a domain of two labels or more, not an IP address")
		return
	}
	settings.require(cfg.originDomain == "",
		"ALLOWED_ORIGIN_DOMAIN: must be unset outside production")
	for _, origin := range cfg.allowedOrigins {
		u, err := url.Parse(origin)
		settings.require(err == nil && originPattern.MatchString(origin) && isPortOrEmpty(u.Port()),
			"ALLOWED_ORIGINS: must be origins such as https://app.example.com, without a path")
	}
}

func isPortOrEmpty(text string) bool {
	port, err := strconv.ParseUint(text, 10, 16) // at most 65535
	return text == "" || err == nil && port > 0
}

var smtpPattern = regexp.MustCompile(
	`^smtps?://([^/?#]*@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]+)?/?$`)

func readMailer(settings *settingReader) mailer {
	text := settings.get("SMTP_URL", "")
	smtpURL, err := url.Parse(text)
	isValid := err == nil && smtpPattern.MatchString(text)
	settings.require(isValid, "SMTP_URL: must be smtp:// or smtps:// with a host and no path, "+
		"special characters in the password percent-encoded; it may be unset locally only")
	settings.require(!isValid || isPortOrEmpty(smtpURL.Port()),
		"SMTP_URL: the port must be 1 to 65535")
	from, err := mail.ParseAddress(settings.get("MAIL_FROM", ""))
	settings.require(err == nil && isEmail(from.Address), "MAIL_FROM: must be an e-mail address")
	return mailer{server: smtpURL, from: from}
}

// The commands of an operator.

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

func printRoutes() {
	s := newServer(config{env: envLocal}, nil, io.Discard)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "METHOD\tPATH\tNEEDS\tLIMIT")
	for _, rt := range s.routes() {
		method, path, _ := strings.Cut(rt.pattern, " ")
		limit := s.clientLimit(method, path).String()
		if rt.limit != nil {
			limit += "; " + rt.limit.String()
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", method, path, rt.access, limit)
	}
	table.Flush()
}

const userLine = `format('%s  %s  %s  added %s', email, permission,
	case when suspended then 'suspended' else 'active' end, created_at)`

// whereAddress compares addresses as the index users_email has them.
const whereAddress = ` where lower(email) = lower($1 collate "C") `

// userCommands has the number of arguments of each command, without flags, and
// its statement, which returns the text to print. $1 is the user's address, $2
// the role or the new address.
var userCommands = map[string]struct {
	arguments int
	text      string
}{
	"add": {1, `insert into users (email, permission) values ($1, $2)
		returning format('%s: added', email)`},
	"role": {2, `update users set permission = $2` + whereAddress +
		`returning format('%s: has the new role from the next request on', email)`},
	"suspend": {1, `update users set suspended = true` + whereAddress +
		`returning format('%s: suspended from the next request on', email)`},
	"activate": {1, `update users set suspended = false` + whereAddress +
		`returning format('%s: active from the next request on', email)`},
	"signout": {1, `update users set signed_out_at = clock_timestamp()` + whereAddress +
		`returning format('%s: signed out everywhere', email)`},
	// Without the sign-out, changing the address back would revive old
	// sessions.
	"email": {2, `update users set email = $2, signed_out_at = clock_timestamp()` + whereAddress +
		`returning format('%s: the new address; signed out everywhere', email)`},
	"delete": {1, `delete from users` + whereAddress +
		`returning format('%s: deleted; uploaded files stay', email)`},
	"list": {0, "select coalesce(string_agg(" + userLine + `, E'\n' order by lower(email)),
		'there are no users') from users`},
	"show": {1, `select concat_ws(E'\n', ` + userLine + `,
			'  signed out everywhere ' || signed_out_at,
			(select string_agg(format('  accepted terms %s at %s', version, accepted_at), E'\n'
				order by accepted_at)
				from terms_acceptances t where t.user_id = users.user_id))
		from users` + whereAddress},
}

func userCommand(ctx context.Context, line []string) error {
	if len(line) == 0 {
		return usageError("user: name a command\n\n" + usage)
	}
	name := line[0]
	command, isKnown := userCommands[name]
	if !isKnown {
		return usageError("there is no command \"user " + name + "\"\n\n" + usage)
	}
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	role := roleMember
	if name == "add" {
		flags.StringVar(&role, "role", role, "")
	}
	if err := flags.Parse(line[1:]); err != nil {
		return usageError(fmt.Sprintf("user %s: %v\n\n%s", name, err, usage))
	}
	args := flags.Args()
	if len(args) != command.arguments {
		complaint := fmt.Sprintf("user %s: takes %d argument(s), got %d",
			name, command.arguments, len(args))
		if name == "add" {
			complaint += "; -role comes before the address"
		}
		return usageError(complaint + "\n\n" + usage)
	}
	if name == "add" {
		args = append(args, role)
	}
	if err := validateUserArguments(name, args); err != nil {
		return err
	}
	return runUserCommand(ctx, command.text, args)
}

func validateUserArguments(name string, args []string) error {
	for i, arg := range args {
		isRole := i == 1 && name != "email"
		if isRole && !slices.Contains(allRoles, arg) {
			roles := strings.Join(allRoles, " or ")
			return usageError("there is no role \"" + arg + "\": it is " + roles)
		}
		if !isRole && !isEmail(arg) {
			return usageError("\"" + arg + "\" is not an ASCII e-mail address")
		}
	}
	return nil
}

func runUserCommand(ctx context.Context, text string, args []string) error {
	conn, err := openForCommand(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	var values []any
	for _, arg := range args {
		values = append(values, arg)
	}
	var answer string
	err = conn.QueryRowContext(ctx, text, values...).Scan(&answer)
	if errors.Is(err, sql.ErrNoRows) {
		return errors.New("there is no user with this address; \"user list\" shows all")
	}
	if sqlState(err) == "23505" { // unique_violation
		return errors.New("there would be two users with the same address; nothing was changed")
	}
	if err != nil {
		return explainDBError(err)
	}
	fmt.Println(answer)
	return nil
}

func mailTest(args []string) error {
	if len(args) != 1 {
		return usageError("mail-test: takes one address\n\n" + usage)
	}
	var settings settingReader
	m := readMailer(&settings)
	if settings != nil {
		return errors.Join(settings...)
	}
	if !isEmail(args[0]) {
		return usageError("mail-test: \"" + args[0] + "\" is not an ASCII e-mail address")
	}
	err := m.send(args[0], "A test", "This mail shows that the server can send mail.\n")
	if err != nil {
		return fmt.Errorf("the mail was not sent: %w", err)
	}
	fmt.Println(m.server.Host, "has accepted the mail")
	return nil
}

// openForCommand sets no time limits, because building an index takes long.
func openForCommand(ctx context.Context) (*sql.Conn, error) {
	var settings settingReader
	databaseURL := settings.get("DATABASE_URL", "")
	connector, err := newConnector(databaseURL, map[string]string{"timezone": "UTC"})
	if settings != nil {
		return nil, errors.Join(settings...)
	}
	if err != nil {
		return nil, err
	}
	conn, err := sql.OpenDB(connector).Conn(ctx)
	if err != nil {
		return nil, explainDBError(err)
	}
	return conn, nil
}

func explainDBError(err error) error {
	const refusedSetting = "DATABASE_URL: the database, or a pooler before it, refuses a setting"
	advice := map[string]string{
		"08P01": refusedSetting,
		"42704": refusedSetting,
		"28000": "DATABASE_URL: the database refuses this user",
		"28P01": "DATABASE_URL: the database refuses this user or password",
		"42P01": "the database lacks the tables (run: hubs migrate)",
		"42703": "a table lacks a column of this version (CHANGELOG.md says how to upgrade)",
		"42501": "the database role lacks a right (migrate and user need the owner's DATABASE_URL)",
	}
	sentence := cmp.Or(advice[sqlState(err)], "the database can't be reached, or reported an error")
	return fmt.Errorf("%s: %w", sentence, err)
}

func migrate(ctx context.Context) error {
	conn, err := openForCommand(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, schema); err != nil {
		return explainDBError(err)
	}
	fmt.Println("the tables are up to date")
	return nil
}
