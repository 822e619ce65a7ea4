// Hubs is a passwordless data API server: a user proves who he is with a one-time
// code sent to his e-mail, a signed token in a cookie keeps him signed in, and
// every request reads his state afresh from PostgreSQL.
//
// The rules that the code keeps:
//
//   - Every endpoint is declared through one contract (endpoint), which runs the
//     checks in one order; an endpoint whose access rule is forgotten does not start.
//   - Whatever is unknown, unreachable or out of its contract ends in a refusal.
//   - Errors have one format and one place that writes them; what failed inside is
//     logged once, under the request's id, and never shown.
//   - No secret, code, token or whole e-mail address gets into a log or a URL. (Locally,
//     without a mail server, the codes are printed between the lines of the log.)
//
// Read in this order: main.go (configuration, routes, pipeline, start and stop),
// middleware.go (errors, contract, the steps), auth.go (sign-in as the user lives
// it), otp.go (codes and mail), ratelimit.go, store.go and schema.sql, hubs.go (the
// model of a resource), files.go.
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
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

func main() {
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// The values of APP_ENV.
const envLocal, envStaging, envProduction = "local", "staging", "production"

// config is the environment, checked. Limits and lifetimes are constants beside the
// code that keeps them, and no setting turns a check off.
type config struct {
	env, addr, databaseURL, filesDir, cookieName, cookieDomain string

	sessionKeys    jwt.VerificationKeySet
	allowedOrigins []string // local and staging
	originDomain   string   // production
	trustedProxies []netip.Prefix
	smtpURL        *url.URL // nil, in the local environment only: codes are printed
	mailFrom       *mail.Address
	maxUploadBytes int64
}

// configError is a fault of the operator's: exit status 2. It never quotes a value.
type configError string

func (e configError) Error() string { return string(e) }

// loadConfig reads the environment once and reports all that is wrong together.
func loadConfig(getenv func(string) string) (config, error) {
	var errs []error
	check := func(ok bool, complaint string) {
		if !ok {
			errs = append(errs, configError(complaint))
		}
	}
	comma := strings.NewReplacer(",", " ")
	env, prefix, origins := getenv("APP_ENV"), "__Secure-hubs", ""
	isLocal, isProduction := env == envLocal, env == envProduction
	if isLocal {
		prefix, origins = "hubs", "http://localhost:3000,http://localhost:5173"
	}
	prefix = cmp.Or(getenv("COOKIE_PREFIX"), prefix)
	cfg := config{env: env, addr: cmp.Or(getenv("ADDR"), "127.0.0.1:8080"), databaseURL: getenv("DATABASE_URL"),
		cookieName: prefix + "_auth_" + env, cookieDomain: getenv("COOKIE_DOMAIN"),
		filesDir:       cmp.Or(getenv("FILES_DIR"), "data/files"),
		allowedOrigins: strings.Fields(comma.Replace(cmp.Or(getenv("ALLOWED_ORIGINS"), origins))),
		originDomain:   strings.ToLower(getenv("ALLOWED_ORIGIN_DOMAIN"))}

	check(isLocal || isProduction || env == envStaging, "APP_ENV: must be local, staging or production")
	_, err := net.ResolveTCPAddr("tcp", cfg.addr)
	check(err == nil, "ADDR: must be host:port")
	_, err = newConnector(cfg.databaseURL, nil)
	errs = append(errs, err)
	for key := range strings.SplitSeq(getenv("SESSION_SECRET"), ",") {
		cfg.sessionKeys.Keys = append(cfg.sessionKeys.Keys, []byte(key))
		// RFC 7518 3.2: a key for HS256 is no shorter than the hash. A blank after a comma
		// would make another key of it, and sign everyone out.
		check(len(key) >= 32 && strings.TrimSpace(key) == key, "SESSION_SECRET: each key needs 32 bytes, no blanks around")
	}
	lower := strings.ToLower(prefix) // browsers know the two prefixes in any case
	check(cookiePrefixForm.MatchString(prefix), "COOKIE_PREFIX: must be letters, digits, - and _")
	check(!strings.HasPrefix(lower, "__host-"), "COOKIE_PREFIX: __Host- does not go with a Domain")
	check(!isLocal || !strings.HasPrefix(lower, "__secure-"), "COOKIE_PREFIX: __Secure- needs HTTPS, so not locally")
	check(isLocal && cfg.cookieDomain == "" || !isLocal && domainForm.MatchString(cfg.cookieDomain),
		"COOKIE_DOMAIN: must be a domain, and unset locally")
	check(!isProduction || len(cfg.allowedOrigins) == 0, "ALLOWED_ORIGINS: must be unset in production")
	check(!slices.ContainsFunc(cfg.allowedOrigins, func(origin string) bool { return !originForm.MatchString(origin) }),
		"ALLOWED_ORIGINS: must be origins such as https://app.example.com")
	check(isProduction && domainForm.MatchString(cfg.originDomain) || !isProduction && cfg.originDomain == "",
		"ALLOWED_ORIGIN_DOMAIN: must be a domain in production, and unset elsewhere")
	for text := range strings.FieldsSeq(comma.Replace(getenv("TRUSTED_PROXIES"))) {
		// An IPv4 address is compared as such: a prefix of mapped ones would match nobody.
		proxies, err := netip.ParsePrefix(text)
		check(err == nil && !proxies.Addr().Is4In6(), "TRUSTED_PROXIES: must be CIDRs such as 10.0.0.0/8")
		cfg.trustedProxies = append(cfg.trustedProxies, proxies)
	}
	if server := getenv("SMTP_URL"); server != "" || !isLocal {
		cfg.smtpURL, err = url.Parse(server)
		check(err == nil && smtpForm.MatchString(server),
			"SMTP_URL: must be smtp:// or smtps:// with a host and no more, and may be unset locally only")
		cfg.mailFrom, err = mail.ParseAddress(getenv("MAIL_FROM"))
		check(err == nil && emailForm.MatchString(cfg.mailFrom.Address), "MAIL_FROM: must be an e-mail address")
	}
	cfg.maxUploadBytes, err = strconv.ParseInt(cmp.Or(getenv("MAX_UPLOAD_BYTES"), "26214400"), 10, 64)
	check(err == nil && cfg.maxUploadBytes > 0 && cfg.maxUploadBytes <= 1<<40, "MAX_UPLOAD_BYTES: must be 1 to 2^40")
	return cfg, errors.Join(errs...)
}

var cookiePrefixForm = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// A path, a query or no port number would be ignored or fail with the first mail: better at
// the start. The schemes are those of smtpPorts.
var smtpForm = regexp.MustCompile(`^smtps?://([^/?#]*@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[1-9][0-9]{0,4})?/?$`)

var originForm = regexp.MustCompile(`^https?://[a-z0-9.-]+(:[0-9]{1,5})?$`)

// allowsOrigin is the allow-list: origins, or in production only https subdomains of one
// domain on the default port: a host of labels, so no port and no trick passes.
func (c *config) allowsOrigin(origin string) bool {
	host, https := strings.CutPrefix(origin, "https://")
	isSubdomain := https && domainForm.MatchString(host) && strings.HasSuffix(host, "."+c.originDomain)
	return isSubdomain && c.env == envProduction || slices.Contains(c.allowedOrigins, origin)
}

// server is what the handlers share. Its fields do not change once it serves.
type server struct {
	cfg          config
	log          *slog.Logger
	out          io.Writer // standard output: the log, and locally the codes
	store        *store
	files        *os.Root // FILES_DIR
	folder, lock *os.File // FILES_DIR, open to be synced; .lock in it: who holds that alone may sweep
	codes        oneTimeCodes
	codeJobs     chan codeJob
	mailing      sync.WaitGroup
	stopping     atomic.Bool // every answer closes its connection

	// The limits by client address. As all limits they are kept in this process alone.
	globalLimit, fileLimit *limiter

	// uploadStep is one step of an upload. The tests put themselves in its place to
	// make each step fail, before and after it is done.
	uploadStep func(name string, run func() error) func() error
}

func newServer(cfg config, st *store, out io.Writer) *server {
	return &server{
		cfg: cfg, out: out, store: st, codes: oneTimeCodes{byEmail: map[string]oneTimeCode{}},

		log:         slog.New(slog.NewJSONHandler(out, &slog.HandlerOptions{ReplaceAttr: maskAttr})),
		codeJobs:    make(chan codeJob, mailQueue),
		globalLimit: newLimiter(100, 10*time.Second, "by client address"),
		fileLimit:   newLimiter(500, time.Second, "by client address"),
		uploadStep:  func(_ string, run func() error) func() error { return run },
	}
}

// What must not stand in a log, wherever it comes from: tokens, passwords in URLs, all from
// a parameter with a telling name on, or from an escape within an escape on, one-time
// codes, all but the first letter of an e-mail address; and what commands a terminal.
//
// Not guaranteed: an id of this API that happens to have six digits in a row loses them.
var secretText = regexp.MustCompile(`eyJ[\w.%-]+|://[^/\s]*:[^/\s]*@|(?s:%[0-9A-Fa-f]{2}.*)|` +
	`(?is:(?:code|token|secret|pass|pwd|key|session|auth)[^=&\s]*=.*)|(?:\b|[^0-9])[0-9]{6}(?:\b|[^0-9])|` +
	`[\x{7f}-\x{9f}\x{200e}\x{200f}\x{202a}-\x{202e}\x{2066}-\x{2069}]`)
var emailText = regexp.MustCompile("([A-Za-z0-9!#$%&'*+/=?^_`{|}~-])[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]*(@|%(?:25)*40)")

// maskAttr is the slog.HandlerOptions.ReplaceAttr of every log. All texts are masked but
// those of plainAttrs, which are this server's own words, checked ids and addresses.
func maskAttr(_ []string, a slog.Attr) slog.Attr {
	switch kind := a.Value.Kind(); {
	case a.Key == "cookie", a.Key == "authorization":
		a.Value = slog.StringValue("***")
	case !slices.Contains(plainAttrs, a.Key) && (kind == slog.KindString || kind == slog.KindAny):
		a.Value = slog.StringValue(maskText(a.Value.String()))
	}
	return a
}

var plainAttrs = []string{slog.LevelKey, slog.MessageKey, "requestId", "userId", "fileId", "client"}

// maskText looks before it replaces: the expressions cost more than all the rest of a
// log line, and few texts hold what could match.
func maskText(text string) string {
	if strings.ContainsAny(text, "=@%J0123456789") || strings.ContainsFunc(text, func(c rune) bool { return c > '~' }) {
		return secretText.ReplaceAllString(emailText.ReplaceAllString(text, "$1***$2"), "***")
	}
	return text
}

// routes is every operation of this server. {…} is a part of the path.
func (s *server) routes() []route {
	admin := []string{roleAdmin}
	// Call once: the limits of an operation live in its row.
	requests := newLimiter(5, 15*time.Minute, "by e-mail and client address")
	proofs := newLimiter(10, 15*time.Minute, "by e-mail")
	return []route{
		{"POST", "/auth/otp/request", public, nil, 200, requests, endpoint(s.requestCode)},
		{"POST", "/auth/otp/validate", public, nil, 200, proofs, endpoint(s.validateCode)},
		{"POST", "/auth/logout", signedIn, nil, 204, nil, endpoint(s.logout)},
		{"GET", "/auth/session", signedIn, nil, 200, nil, endpoint(s.getSession)},
		{"POST", "/terms/acceptance", signedIn, nil, 200, nil, endpoint(s.acceptTerms)},
		{"GET", "/hubs", termsAccepted, nil, 200, nil, endpoint(s.listHubs)},
		{"GET", "/hubs/{hubId}", termsAccepted, nil, 200, nil, endpoint(s.getHub)},
		{"POST", "/hubs", termsAccepted, admin, 201, nil, endpoint(s.createHub)},
		{"PATCH", "/hubs/{hubId}", termsAccepted, admin, 200, nil, endpoint(s.changeHub)},
		{"DELETE", "/hubs/{hubId}", termsAccepted, admin, 204, nil, endpoint(s.deleteHub)},
		{"POST", "/files/upload", termsAccepted, nil, 201, nil, endpoint(s.upload)},
		{"GET", "/files/{fileId}/{name}", termsAccepted, nil, 200, nil, endpoint(s.getFile)},
		{"GET", "/healthz", public, nil, 200, nil, endpoint(s.getHealth)},
		{"GET", "/openapi.json", public, nil, 200, nil, endpoint(document{"application/json", contentPolicy, openAPI}.get)},
		{"GET", "/{$}", local, nil, 200, nil, endpoint(document{"text/html; charset=utf-8", pagePolicy, page}.get)},
	}
}

// pipeline is the steps that every request takes, in the order of the specification.
// The sixth is the contract: register finds the route, endpoint runs it.
func (s *server) pipeline(routes []route) http.Handler {
	return s.logRequests(before(s.setSecurityHeaders, before(s.setContext, before(s.limitByAddress,
		before(s.checkOrigin, s.register(routes))))))
}

//go:embed openapi.json
var openAPI string

//go:embed index.html
var page string

// The learner's page says itself what else it may load: its own script and style, by
// their hashes, and answers of this server.
const pagePolicy = "frame-ancestors 'none'"

// document is a fixed text with a Content-Security-Policy of its own.
type document struct{ contentType, policy, text string }

func (d document) get(*exchange, nothing) (document, error) { return d, nil }
func (d document) check() bool                              { return true }

func (d document) send(x *exchange) {
	x.Header().Set("Content-Type", d.contentType)
	x.Header().Set("Content-Security-Policy", d.policy)
	io.WriteString(x, d.text)
}

const headerTimeout, bodyTimeout, idleTimeout = 10 * time.Second, 15 * time.Second, 2 * time.Minute

// answerTimeout is for handler and answer of a request; files have more.
const answerTimeout = 30 * time.Second

// drainTime is for requests that arrive as the stop begins, stopTimeout for those under
// way, and again for queued mail.
const drainTime, stopTimeout = 500 * time.Millisecond, 12 * time.Second

// serve runs until ctx ends, then stops: no new connections, the requests under way
// are answered, the queued mail is sent.
func serve(ctx context.Context, getenv func(string) string, out io.Writer) error {
	cfg, err := loadConfig(getenv)
	if err != nil {
		return err
	}
	st, err := openStore(cfg.databaseURL)
	if err != nil {
		return err
	}
	defer st.db.Close()
	s := newServer(cfg, st, out)
	if err := s.openFiles(); err != nil {
		return fmt.Errorf("FILES_DIR: %w", err)
	}
	defer s.lock.Close()
	listener, err := net.Listen("tcp", cfg.addr)
	if err != nil {
		return err
	}
	for range mailWorkers {
		s.mailing.Go(s.sendCodes)
	}
	web := &http.Server{
		Handler:                      s.pipeline(s.routes()),
		ReadHeaderTimeout:            headerTimeout,
		ReadTimeout:                  bodyTimeout, // with the headers; uploads have more
		WriteTimeout:                 answerTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               16<<10 - 4096, // net/http adds 4,096 of its own
		DisableGeneralOptionsHandler: true,          // OPTIONS * goes through the pipeline too
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	s.log.Info("listening", "addr", listener.Addr().String(), "env", cfg.env)
	stopped := make(chan error, 1)
	context.AfterFunc(ctx, func() { stopped <- s.stop(web, listener) })
	if err := web.Serve(listener); ctx.Err() == nil {
		return err
	}
	return <-stopped
}

// stop ends the server in the order in which nothing is lost. Shutdown by itself
// drops connections that were just accepted, and idle ones on which a request is
// arriving: so from now on each answer closes its connection, for a moment, first.
func (s *server) stop(web *http.Server, listener net.Listener) error {
	s.stopping.Store(true)
	listener.Close()
	time.Sleep(drainTime)
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	cut := web.Shutdown(ctx)
	close(s.codeJobs)
	defer time.AfterFunc(stopTimeout, func() {
		s.log.Error("stopped with mail unsent", "queued", len(s.codeJobs))
		os.Exit(1)
	}).Stop()
	s.mailing.Wait()
	s.log.Info("stopped", "requestsCutOff", cut != nil) // they end with the process; until then a code request fails
	return cut
}

const errUsage = configError(`usage: hubs [serve | migrate | routes]
       hubs user add [-role member | -role admin] EMAIL
       hubs user role EMAIL member | admin
       hubs user suspend | activate | signout EMAIL`)

// run runs a command and gives the exit status: 0; 2 for wrong usage or
// configuration; 1 for all else.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	var err error = errUsage
	switch command := strings.Join(args, " "); {
	case len(args) == 0, command == "serve":
		err = serve(ctx, getenv, stdout)
	case command == "migrate":
		err = migrate(getenv("DATABASE_URL"))
	case command == "routes":
		err = printRoutes(stdout)
	case args[0] == "user":
		err = changeUser(args[1:], getenv)
	}
	if err == nil {
		return 0
	}
	fmt.Fprintln(stderr, maskText(err.Error()))
	if _, operator := errors.AsType[configError](err); operator {
		return 2
	}
	return 1
}

// printRoutes prints the route table, which the README has too.
func printRoutes(out io.Writer) error {
	s := newServer(config{env: envLocal}, nil, io.Discard)
	const row = "%-6s  %-22s  %-21s  %s\n"
	_, err := fmt.Fprintf(out, row, "METHOD", "PATH", "NEEDS", "LIMIT")
	for _, r := range s.routes() {
		limit := s.addressLimit(r.method, r.path).String()
		if r.limit != nil {
			limit += "; " + r.limit.String()
		}
		needs := strings.Join(append([]string{string(r.access)}, r.roles...), ", ")
		_, err = fmt.Fprintf(out, row, r.method, strings.TrimSuffix(r.path, "{$}"), needs, limit)
	}
	return err
}
