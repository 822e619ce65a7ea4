// Hubs is a passwordless data API server. A user signs in with a one-time code
// sent by e-mail and stays signed in with a signed token in a cookie. Every
// request that needs one reads the account from PostgreSQL again.
//
// A request, such as PATCH /hubs/{hubId}, takes these steps:
//
//  1. ServeHTTP (middleware.go) takes it through the six steps that
//     README.md lists. The last one finds its route in the table below, and
//     calls serveRoute.
//  2. serveRoute reads the fields, checks session, terms and role, and spends the
//     route's own limit. Then it calls what withInput has made: a function that
//     parses the fields, and calls the handler, changeHub.
//  3. The handler runs a statement. It returns an output or an error.
//  4. answer lets the output validate itself, and sends it. fail sends an error
//     instead.
//
// An id in brackets, such as (O3), names a row of SECURITY.md. README.md has an order in
// which to read the files. Leave the second half of this one, from health on, for last.
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
	"net/netip"
	"os"
	"os/signal"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/golang-jwt/jwt/v5"
	"github.com/lib/pq"
)

func main() {
	err := run(os.Args[1:])
	if err == nil {
		return
	}
	if _, ok := errors.AsType[usageError](err); ok { // like errors.As, since Go 1.26
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
	if args[0] == "mail-test" { // takes no context, so Ctrl-C ends it at once
		return mailTest(args[1:])
	}
	endings := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup(1)
		endings = append(endings, syscall.SIGHUP)
	}
	ctx, release := signal.NotifyContext(context.Background(), endings...)
	context.AfterFunc(ctx, release) // so that a second signal ends the process
	if args[0] == "user" {
		return userCommand(ctx, args[1:])
	}
	command, isKnown := commands[strings.Join(args, " ")]
	if !isKnown {
		return usageError("there is no command \"" + strings.Join(args, " ") + "\"\n\n" + usage)
	}
	return command(ctx)
}

// commands are those without arguments.
var commands = map[string]func(context.Context) error{
	"serve":     serve,
	"migrate":   migrate,
	"health":    askHealth,
	"routes":    printRoutes,
	"licenses":  printLicenses,
	"version":   printVersion,
	"--version": printVersion,
}

// A server holds what the handlers share.
type server struct {
	cfg        config
	log        *slog.Logger // events, masked by maskAttr
	requestLog *slog.Logger
	out        *logWriter // the server's logs, and local codes
	store      *store
	files      *os.Root
	codes      oneTimeCodes
	mux        *http.ServeMux
	stopping   chan struct{} // closed by stop
	codeSlots  slots         // requests for a code that are unfinished
	mailSlots  slots         // conversations with the mail server

	healthMu sync.Mutex
	health   *healthCheck // the one under way; nil if there is none

	proxyWarning, cookieWarning sync.Once

	// clientLimit takes one of the first two for each request; the others are for
	// routes. A new code resets none of them (O5).
	requestLimit     *limiter
	fileLimit        *limiter
	codeRequestLimit *limiter
	guessLimit       *limiter
}

func newServer(cfg config, st *store, out *logWriter) *server {
	s := &server{
		cfg:              cfg,
		log:              newEventLog(out),
		requestLog:       slog.New(slog.NewJSONHandler(out, nil)),
		out:              out,
		store:            st,
		codes:            oneTimeCodes{byEmail: map[string]*oneTimeCode{}},
		mux:              http.NewServeMux(),
		stopping:         make(chan struct{}),
		codeSlots:        make(slots, maxCodeRequests),
		mailSlots:        make(slots, maxConversations),
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

const healthPath = "/healthz"

func (s *server) routes() []route {
	// withInput adds the names of a route's fields, the function that parses them,
	// and the handler that gets the result (middleware.go, part 2).
	table := []route{
		withInput(route{
			pattern: "POST /auth/otp/request", access: public, status: 200,
			limit: s.codeRequestLimit, limitKey: codeRequestKey,
		}, []string{"email"}, parseCodeRequest, s.requestCode),
		withInput(route{
			pattern: "POST /auth/otp/validate", access: public, status: 200,
			limit: s.guessLimit, limitKey: guessKey,
		}, []string{"email", "code"}, parseGuess, s.validateCode),
		{pattern: "POST /auth/logout", access: sessionOnly, status: 204, handle: s.logout},
		{pattern: "GET /auth/session", access: sessionOnly, status: 200, handle: s.getSession},
		withInput(route{pattern: "POST /terms/acceptance", access: sessionOnly, status: 200},
			[]string{"version"}, parseAcceptance, s.acceptTerms),
		withInput(route{pattern: "GET /hubs", access: sessionAndTerms, status: 200},
			hubQueryFields, parseHubQuery, s.listHubs),
		{pattern: "GET /hubs/{hubId}", access: sessionAndTerms, status: 200, handle: s.getHub},
		withInput(route{pattern: "POST /hubs", access: adminOnly, status: 201},
			hubFields, parseNewHub, s.createHub),
		withInput(route{pattern: "PATCH /hubs/{hubId}", access: adminOnly, status: 200},
			hubFields, parseHubChange, s.changeHub),
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

//go:embed web/licenses.txt
var licenses string

// Limits of a request and its connection; files.go has those of transfers.
const (
	headerTimeout = 10 * time.Second // to read the header
	bodyTimeout   = 15 * time.Second // to read header and body
	answerTimeout = 30 * time.Second // to write the answer, from the end of the header on
	idleTimeout   = 2 * time.Minute  // between two requests; most proxies close earlier
	maxHeader     = 16 << 10         // bytes of a request's header

	joinTimeout = time.Second            // for a healthCheck that another request has begun
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
	signal.Ignore(syscall.SIGPIPE) // a log without a reader shows in /healthz
	out := &logWriter{Writer: os.Stdout}
	log := newEventLog(out)
	if cfg.env != envLocal && isUnverified(cfg.database) {
		log.Warn("DATABASE_URL: another machine could answer in place of the database, and read or " +
			"change all that passes (use sslmode=verify-full; verify-ca with sslrootcert for a name that is " +
			"not in its certificate)")
	}
	st, err := openStore(cfg.database, log)
	if err != nil {
		return err
	}
	s := newServer(cfg, st, out)
	if err := s.openFiles(); err != nil {
		return err
	}
	listener, err := listen(cfg.addr)
	if err != nil {
		return err
	}
	if cfg.env != envLocal {
		st.warnOfRights()
	}
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
		listener, err := net.Listen("tcp", addr)
		if err != nil {
			return nil, usageError("ADDR: " + err.Error() +
				" (another address would be, for example, ADDR=127.0.0.1:9000)")
		}
		return listener, nil
	}
	listener, err := net.FileListener(os.NewFile(3, "LISTEN_FDS"))
	if err != nil {
		return nil, usageError("LISTEN_FDS: " + err.Error())
	}
	if _, isTCP := listener.(*net.TCPListener); !isTCP || os.Getenv("LISTEN_FDS") != "1" {
		return nil, usageError("LISTEN_FDS: must be one TCP socket that listens")
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

// stop ends the server gracefully (H3). Shutdown would drop connections on which a
// request is just arriving, so stop closes the listener and waits for arrivalTime
// first. Mail comes last, because a request may still ask for a code.
func (s *server) stop(httpServer *http.Server, listener net.Listener) error {
	// Exit even if nobody reads the log and a write to it blocks.
	time.AfterFunc(arrivalTime+2*stopTimeout+time.Second, func() { os.Exit(1) })
	close(s.stopping)
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

// isStopping reports whether stop has begun.
func (s *server) isStopping() bool {
	select {
	case <-s.stopping:
		return true
	default:
		return false
	}
}

// Health.

type healthView struct {
	Status string `json:"status"`
}

func (healthView) validate() fieldErrors { return nil }

// One healthCheck runs at a time, and all who ask meanwhile share it: a folder
// that hangs holds one thread (E2).
type healthCheck struct {
	ended chan struct{} // closed when err is known
	err   error
}

// getHealth returns a 503 if a table, a right, FILES_DIR or the log fails (E1).
func (s *server) getHealth(*request) (output, error) {
	s.healthMu.Lock()
	check, patience := s.health, joinTimeout
	if check == nil {
		patience = dbTimeout
		check = &healthCheck{ended: make(chan struct{})}
		s.health = check
		go s.checkHealth(check)
	}
	s.healthMu.Unlock()
	select {
	case <-check.ended:
	case <-time.After(patience):
		return nil, unavailable(errors.New("the tables, FILES_DIR or the log do not answer in time"))
	}
	if check.err != nil {
		return nil, unavailable(check.err)
	}
	return healthView{"ok"}, nil
}

func (s *server) checkHealth(check *healthCheck) {
	check.err = errors.Join(s.store.probe(), s.probeFiles(), s.out.probe())
	s.healthMu.Lock()
	s.health = nil
	s.healthMu.Unlock()
	close(check.ended)
}

// The log. The line of a request needs no mask: of a client's texts it has a
// request id, ids of the path and an origin, all in a checked form. Texts of
// errors, in events, are masked.

// A logWriter is standard output. It remembers whether the last write has failed.
type logWriter struct {
	io.Writer
	mu        sync.Mutex // held during a write
	hasFailed bool
}

func (w *logWriter) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := w.Writer.Write(line)
	w.hasFailed = err != nil
	return n, err
}

// probe waits for the end of a write. While one hangs, so do all requests.
func (w *logWriter) probe() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hasFailed {
		return errors.New("the log can't be written to standard output")
	}
	return nil
}

func newEventLog(out io.Writer) *slog.Logger {
	return slog.New(slog.NewJSONHandler(out, &slog.HandlerOptions{ReplaceAttr: maskAttr}))
}

func (r *request) log() *slog.Logger {
	log := r.serverLog.With("requestId", r.id, "client", r.client)
	if r.user != nil {
		log = log.With("userId", r.user.UserID)
	}
	return log
}

var knownMethods = []string{"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"}

// logRequest leaves out a healthy /healthz, which proxies ask for every second,
// and a preflight that is allowed, which no limit counts.
func (s *server) logRequest(r *request, started time.Time) {
	isHealthy := r.route.path() == healthPath && r.w.status == 200
	if isHealthy || r.isPreflight() && r.w.status == 204 {
		return
	}
	attrs := append(make([]any, 0, 24), "requestId", r.id, "client", r.client.String()) // room for all
	add := func(name, value string) {
		if value != "" {
			attrs = append(attrs, name, value)
		}
	}
	if slices.Contains(knownMethods, r.Method) {
		add("method", r.Method)
	}
	add("route", r.route.path())
	for part := range strings.SplitSeq(r.route.path(), "/") {
		name := strings.Trim(part, "{}") // hubId, if the part is {hubId}
		if id := r.PathValue(name); strings.HasSuffix(name, "Id") && isUUID(id) {
			add(name, id)
		}
	}
	if r.user != nil {
		add("userId", r.user.UserID)
	}
	add("origin", r.originForLog())
	for _, name := range []string{"Cookie", "Authorization"} {
		if r.Header[name] != nil {
			add(strings.ToLower(name), "***")
		}
	}
	attrs = append(attrs, "status", r.w.status, "bytes", r.w.bytes, "duration", time.Since(started))
	s.requestLog.Info("request", attrs...)
}

var loggedOriginPattern = regexp.MustCompile(`^https?://[a-z0-9.:\[\]-]{1,260}$`)

func (r *request) originForLog() string {
	origin := r.Header.Get("Origin")
	if r.originAllowed || loggedOriginPattern.MatchString(origin) {
		return origin
	}
	return ""
}

// logRefusedOrigin tells why a page's request fails, which its browser hides.
func (r *request) logRefusedOrigin(attrs ...any) {
	r.log().With("origin", r.originForLog()).Info(
		"origin refused: not in ALLOWED_ORIGINS (in production: ALLOWED_ORIGIN_DOMAIN)", attrs...)
}

// logProblem logs failures of the server, and refusals that may be an attack
// (G4).
func (r *request) logProblem(p problem) {
	switch {
	case p.Status >= 500:
		r.log().Error("failed", "code", p.Code, "error", p, "route", r.route.path())
	case p.Code == errCrossOrigin.Code:
		r.logRefusedOrigin("code", p.Code)
	case p.Status == 401 || p.Status == 403 || p.Status == 429:
		r.log().Info("refused", "code", p.Code, "reason", p.reason, "route", r.route.path())
	}
}

// unmasked are the attributes of events whose texts have a checked form.
var unmasked = []string{"requestId", "userId", "fileId", "client", "origin"}

// maskAttr masks the other texts of an event (G2).
func maskAttr(_ []string, a slog.Attr) slog.Attr {
	kind := a.Value.Kind()
	isText := kind == slog.KindString || kind == slog.KindAny
	if isText && !slices.Contains(unmasked, a.Key) {
		a.Value = slog.StringValue(maskText(a.Value.String()))
	}
	return a
}

var masks = []struct {
	pattern     *regexp.Regexp
	replacement string
}{
	// jane.roe@example.com → j***@example.com
	{regexp.MustCompile(`([^\s@:;,<>()\[\]"])[^\s@:;,<>()\[\]"]*@`), "$1***@"},
	// smtps://user:password@mail.example.com → smtps://***@mail.example.com
	{regexp.MustCompile(`://[^/\s]*@`), "://***@"},
	// A key, or a part of a token. An id is shorter.
	{regexp.MustCompile(`[\w+=-]{40,}`), "***"},
	// A one-time code, and every longer number.
	{regexp.MustCompile(`[0-9]{6,}`), "***"},
}

// escapes matches what the verb %q writes for characters that can't be printed.
var escapes = regexp.MustCompile(`\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})`)

// maxLoggedText is in bytes. JSON can double a text, so a line has less than 2
// kB (H4).
const maxLoggedText = 460

// maskText masks a text, then cuts it, because a mask might not recognize the
// first half of a secret.
func maskText(text string) string {
	text = escapes.ReplaceAllString(strings.Map(visible, text), "")
	for _, mask := range masks {
		text = mask.pattern.ReplaceAllString(text, mask.replacement)
	}
	return text[:min(len(text), maxLoggedText)]
}

// visible removes characters that can't be printed, which could hide a secret from masks.
func visible(c rune) rune {
	switch {
	case unicode.IsPrint(c):
		return c
	case unicode.IsSpace(c):
		return ' '
	}
	return -1
}

// The configuration.

// The values of APP_ENV. Local is for development: it needs neither HTTPS nor a
// mail server.
const (
	envLocal      = "local"
	envStaging    = "staging"
	envProduction = "production"
)

type config struct {
	env            string
	addr           string
	database       pq.Config
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

// A settingReader collects mistakes, the first of each setting, to report all at
// once (K1).
type settingReader []error

func (settings *settingReader) require(ok bool, complaint string) {
	name, _, _ := strings.Cut(complaint, ":")
	isKnown := slices.ContainsFunc(*settings, func(known error) bool {
		return strings.HasPrefix(known.Error(), name) // or NAME_FILE
	})
	if !ok && !isKnown {
		*settings = append(*settings, usageError(complaint))
	}
}

func (settings *settingReader) get(name, fallback string) string {
	value := os.Getenv(name)
	settings.requirePlain(name, value)
	return cmp.Or(value, fallback)
}

// requirePlain refuses quotes and white space around a value: docker --env-file
// keeps quotes, and a secret often ends in a line break.
func (settings *settingReader) requirePlain(name, value string) {
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
}

// secret reads a setting or, as Docker, Kubernetes and systemd make them, the
// file that NAME_FILE names.
func (settings *settingReader) secret(name string) string {
	value := settings.get(name, "")
	path := settings.get(name+"_FILE", "")
	if path == "" {
		return value
	}
	content, err := os.ReadFile(path)
	text := strings.TrimSuffix(strings.TrimSuffix(string(content), "\n"), "\r")
	complaint := ""
	switch {
	case value != "":
		complaint = "must be unset if " + name + " is set"
	case err != nil: // but not the path, which may be the secret, by mistake
		complaint = "can't be read: " + errors.Unwrap(err).Error()
	case text == "" || strings.Contains(text, "\n"):
		complaint = "must name a file of one line, the value"
	}
	settings.require(complaint == "", name+"_FILE: "+complaint)
	settings.requirePlain(name, text)
	return text
}

func (settings *settingReader) list(name, fallback string) []string {
	return strings.Fields(strings.ReplaceAll(settings.get(name, fallback), ",", " "))
}

const (
	defaultAddr     = "127.0.0.1:8080"
	defaultFilesDir = "data/files"
)

// loadConfig refuses settings that are malformed or dangerous (K3). ADDR and
// FILES_DIR are tried where they are used.
func loadConfig() (config, error) {
	var settings settingReader
	cfg := config{
		env:      settings.get("APP_ENV", ""),
		addr:     settings.get("ADDR", defaultAddr),
		filesDir: settings.get("FILES_DIR", defaultFilesDir),
	}
	isEnv := slices.Contains([]string{envLocal, envStaging, envProduction}, cfg.env)
	settings.require(isEnv,
		"APP_ENV: must be local, staging or production (docs/deploy.md explains every setting)")
	cfg.database = settings.database()
	size, err := strconv.ParseUint(settings.get("MAX_UPLOAD_BYTES", "26214400"), 10, 40)
	settings.require(err == nil && size > 0, "MAX_UPLOAD_BYTES: must be digits, 1 to 2^40 - 1")
	cfg.maxUploadBytes = int64(size)
	cfg.sessionKeys = readSessionKeys(&settings)
	if isEnv { // or what they say may be wrong
		cfg.readCookie(&settings)
		cfg.readOrigins(&settings)
	}
	cfg.trustedProxies = settings.trustedProxies()
	// Locally, codes may be printed instead.
	if cfg.env != envLocal || os.Getenv("SMTP_URL")+os.Getenv("SMTP_URL_FILE") != "" {
		cfg.mail = readMailer(&settings)
	}
	return cfg, errors.Join(settings...)
}

// The command line, and the commands that no other file has.

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
  user delete [-files] EMAIL          delete the user, and with -files what they have uploaded
  user export EMAIL                   print what the database has about the user, as JSON
  user history EMAIL                  print who has changed the account, when and how
  user list                           list the users
  user show EMAIL                     show one user
  mail-test EMAIL                     send a mail through SMTP_URL, and say what became of it
  health                              ask /healthz at ADDR: exit status 0 if it is well
  licenses                            print the licences of all that is in this program
  version                             print the version
  help                                print this text

Settings are environment variables; docs/deploy.md lists them. The commands migrate and
user need DATABASE_URL only (user delete -files also FILES_DIR), mail-test needs SMTP_URL and
MAIL_FROM only.
`

// askHealth is for images without a shell.
func askHealth(ctx context.Context) error {
	host, port, err := net.SplitHostPort(cmp.Or(os.Getenv("ADDR"), defaultAddr))
	if err != nil {
		return usageError("ADDR: " + err.Error())
	}
	url := "http://" + net.JoinHostPort(cmp.Or(host, "localhost"), port) + healthPath
	question, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return usageError("ADDR: " + err.Error())
	}
	question.Header.Set("X-Forwarded-For", healthAddress)
	client := http.Client{Transport: &http.Transport{}, Timeout: answerTimeout}
	answer, err := client.Do(question)
	if err != nil {
		return err
	}
	answer.Body.Close()
	if answer.StatusCode != 200 {
		return errors.New(url + " answers " + answer.Status + "; the server's log says why")
	}
	fmt.Println("ok")
	return nil
}

func printRoutes(context.Context) error {
	s := newServer(config{env: envLocal}, nil, nil)
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
	return table.Flush()
}

func printLicenses(context.Context) error {
	_, err := fmt.Print(licenses)
	return err
}

func printVersion(context.Context) error {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return errors.New("this program was built without its version")
	}
	fmt.Println("hubs", info.Main.Version, info.GoVersion)
	return nil
}
