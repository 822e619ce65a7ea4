package main

// Sign-in, in the order in which the user lives it: ask for a code, present it, carry the
// session token in a cookie, be authenticated by it, accept the terms, sign out. At the
// end, the commands by which an operator changes accounts.

import (
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// TERMS_VERSION is the version of the terms of use and the privacy policy that a user must
// have accepted. Raising it makes every user accept again. The specification gives it its name.
const TERMS_VERSION = "2026-11-01"

const (
	sessionTTL = 60 * 24 * time.Hour // of the token and of the cookie
	clockSkew  = time.Minute         // between this server's clock and the database's
)

const (
	roleMember = "member"
	roleAdmin  = "admin"
)

var allRoles = []string{roleMember, roleAdmin}

// A user is an account as the database has it now.
type user struct {
	UserID     string `json:"userId"`
	Email      string `json:"email"`
	Permission string `json:"permission"` // the role, one of allRoles

	suspended     bool
	termsAccepted bool      // of TERMS_VERSION
	signedOutAt   time.Time // session tokens issued before it are refused
	now           time.Time // the database's clock when the row was read
}

// The conditions by which loadUser finds a user.
const (
	whereID    = "u.user_id = $1"
	whereEmail = "lower(u.email) = $1" // the address in lower case
)

// loadUser reads a user by one of these conditions. found is false if there is none.
func (s *server) loadUser(condition, key string) (u *user, found bool, err error) {
	u = &user{}
	found, err = s.store.row(read(`select u.user_id, u.email, u.permission, u.suspended,
		coalesce(u.signed_out_at, 'epoch'), t.user_id is not null, clock_timestamp()
		from users u left join terms_acceptances t on t.user_id = u.user_id and t.version = $2
		where `+condition, key, TERMS_VERSION),
		&u.UserID, &u.Email, &u.Permission, &u.suspended, &u.signedOutAt, &u.termsAccepted, &u.now)
	return u, found, err
}

// emailForm is the only form of an address that is accepted: a dot-atom (RFC 5322) and a
// domain made of labels, ASCII only. schema.sql has the same.
var emailForm = regexp.MustCompile("^" + atom + `(\.` + atom + ")*@" + domainLabels + "$")

var domainForm = regexp.MustCompile("^" + domainLabels + "$")

const (
	atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
	// A label has 1 to 63 characters (RFC 1035 2.3.4).
	label        = `[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?`
	domainLabels = label + `(\.` + label + ")*"
)

var emailRule = rule{
	name: "email", trim: true, min: 3, max: 254,
	pattern: emailForm, inWords: "an e-mail address", required: true,
}

// parseEmail returns the address in lower case, by which addresses are compared.
//
// O9: ToLower would turn U+0130 and U+212A into ASCII letters. But emailForm refuses both, and
// with them the request.
// I4: emailForm lets no line break through, so none reaches a mail.
func parseEmail(f *fields) string {
	return strings.ToLower(f.text(emailRule))
}

// A codeRequest is the input of POST /auth/otp/request.
type codeRequest struct{ email string }

func parseCodeRequest(f *fields) codeRequest {
	return codeRequest{parseEmail(f)}
}

func (in codeRequest) limitKey(state *requestState) string {
	return in.email + " " + clientKey(state.client)
}

// A codeAnswer is the same for every address.
type codeAnswer struct {
	CodeLength       int `json:"codeLength"`
	ExpiresInSeconds int `json:"expiresInSeconds"`
}

func (a codeAnswer) isValid() bool {
	return a.CodeLength == codeLength && a.ExpiresInSeconds > 0
}

// requestCode puts the address on the queue and answers. A worker does the rest: sendCodes
// in otp.go.
//
// O6: it does not look up whether the address is known. So neither the answer nor its time
// can tell.
func (s *server) requestCode(state *requestState, in codeRequest) (codeAnswer, error) {
	if !s.queueCode(in.email, state.log()) {
		return codeAnswer{}, unavailable(errors.New("the mail queue is full"))
	}
	return codeAnswer{codeLength, int(codeTTL.Seconds())}, nil
}

// A guess is the input of POST /auth/otp/validate: an address, and a code for it that may
// be right or wrong.
type guess struct{ email, code string }

var codeRule = rule{
	name:    "code",
	pattern: regexp.MustCompile("^[0-9]{6}$"), inWords: "a code of six digits", required: true,
}

func parseGuess(f *fields) guess {
	return guess{parseEmail(f), f.text(codeRule)}
}

// limitKey leaves the client's address out.
//
// O4: many clients together have no more guesses at one mailbox than one client has.
//
// O8: the price is that a stranger can lock an address for 15 minutes.
func (in guess) limitKey(*requestState) string {
	return in.email
}

// A sessionView is what a page needs to know after sign-in or after a reload.
type sessionView struct {
	User      *user     `json:"user"`
	Terms     termsView `json:"terms"`
	ExpiresAt time.Time `json:"expiresAt"`
}

type termsView struct {
	Version  string `json:"version"`
	Accepted bool   `json:"accepted"`
}

func (v sessionView) isValid() bool {
	return isUUID(v.User.UserID) &&
		emailForm.MatchString(v.User.Email) &&
		slices.Contains(allRoles, v.User.Permission) &&
		!v.ExpiresAt.IsZero()
}

// validateCode exchanges an address and its code for a session. An unknown address, a wrong
// code and an expired one are refused in the same way, without asking the database.
//
// A right code is used up first. If the database is away then, the code becomes valid again, so
// that the user need not ask for another.
func (s *server) validateCode(state *requestState, in guess) (sessionView, error) {
	code, ok := s.codes.redeem(in.email, in.code)
	if !ok {
		return sessionView{}, errInvalidCode
	}
	u, found, err := s.loadUser(whereEmail, in.email)
	if err != nil {
		s.codes.restore(in.email, code)
		return sessionView{}, err
	}
	if !found { // deleted, or given another address, since the code was sent
		return sessionView{}, errInvalidCode
	}
	state.user = u
	if u.suspended {
		return sessionView{}, errSuspended
	}
	token := sessionToken{
		email:     u.Email,
		userID:    u.UserID,
		issuedAt:  u.now,
		expiresAt: u.now.Add(sessionTTL),
	}
	state.session = token
	state.log().Info("signed in")
	s.setSessionCookie(state, s.signToken(token), int(sessionTTL.Seconds()))
	return s.getSession(state, nothing{})
}

// A sessionToken is what a token says. It holds no role: that comes from the database. issuedAt is
// by the database's clock, because it is compared with the time of a "sign out everywhere".
type sessionToken struct {
	email, userID       string
	issuedAt, expiresAt time.Time
}

// claims is the payload of the JWT. The times are in seconds, with six decimals. With whole
// seconds, a sign-out everywhere could not tell a session that began just before it from one that
// began just after. A float64 is exact to less than a microsecond for such a number, and
// fromSeconds rounds.
type claims struct {
	Email     string  `json:"email"`
	UserID    string  `json:"userId"`
	IssuedAt  float64 `json:"iat"`
	ExpiresAt float64 `json:"exp"`
	NotBefore float64 `json:"nbf,omitempty"` // never set here; respected if it is there

	jwt.RegisteredClaims `json:"-"` // only for the methods that jwt.Claims asks for
}

// signToken writes the claims and signs them with the first key.
func (s *server) signToken(token sessionToken) string {
	c := claims{
		Email:     token.email,
		UserID:    token.userID,
		IssuedAt:  float64(token.issuedAt.UnixMicro()) / 1e6,
		ExpiresAt: float64(token.expiresAt.UnixMicro()) / 1e6,
	}
	unsigned := jwt.NewWithClaims(jwt.SigningMethodHS256, c)
	signed, _ := unsigned.SignedString(s.cfg.sessionKeys.Keys[0]) // strings and numbers: can't fail
	return signed
}

// tokenParser checks the form, the algorithm and the signature. It checks no times: the library
// would accept a token without iat, and its leeway for iat would lengthen exp, too.
var tokenParser = jwt.NewParser(
	jwt.WithValidMethods([]string{"HS256"}), // not none, HS384 or HS512
	jwt.WithStrictDecoding(),                // no other padding bits in the base64
	jwt.WithoutClaimsValidation(),
)

// verifyToken reads the claims of a token. ok is false if none of our keys signed it, if it is
// malformed, or if its times can't be ours. checkSession checks the rest: whether the token has
// expired, and its account.
//
// T1: HS256 with one of our keys, and no critical extension.
// T2: iat is at most clockSkew in the future, and exp is at most 60 days after it. A missing time
// counts as 1970: a token without exp has expired, and one without iat has more than 60 days to its exp.
// T4: strict base64.
func (s *server) verifyToken(text string) (token sessionToken, ok bool) {
	var c claims
	parsed, err := tokenParser.ParseWithClaims(text, &c, func(*jwt.Token) (any, error) {
		return s.cfg.sessionKeys, nil
	})
	if err != nil {
		return sessionToken{}, false
	}
	token = sessionToken{
		email:     c.Email,
		userID:    c.UserID,
		issuedAt:  fromSeconds(c.IssuedAt),
		expiresAt: fromSeconds(c.ExpiresAt),
	}
	now := time.Now()
	_, critical := parsed.Header["crit"] // RFC 7515 4.1.11: an extension we don't know
	issuedInFuture := token.issuedAt.After(now.Add(clockSkew))
	notYetValid := fromSeconds(c.NotBefore).After(now)
	livesTooLong := c.ExpiresAt-c.IssuedAt > sessionTTL.Seconds()+1 // a second for rounding
	if critical || issuedInFuture || notYetValid || livesTooLong || !isUUID(c.UserID) {
		return sessionToken{}, false
	}
	return token, true
}

func fromSeconds(seconds float64) time.Time {
	return time.UnixMicro(int64(seconds*1e6 + 0.5)).UTC()
}

// isUUID accepts the one form in which PostgreSQL writes a UUID, in lower case. It is not a
// regular expression because a page of hubs checks a hundred ids.
func isUUID(text string) bool {
	if len(text) != 36 {
		return false
	}
	for i, c := range []byte(text) {
		allowed := "0123456789abcdef"
		if i == 8 || i == 13 || i == 18 || i == 23 {
			allowed = "-"
		}
		if strings.IndexByte(allowed, c) < 0 {
			return false
		}
	}
	return true
}

// setSessionCookie sets the cookie or, with a negative age in seconds, clears it. Name,
// path and domain must be the same when it is cleared, or the browser keeps the cookie.
//
// T6: HttpOnly and SameSite=Lax always, Secure except locally, 60 days.
func (s *server) setSessionCookie(state *requestState, value string, maxAge int) {
	http.SetCookie(state, &http.Cookie{
		Name:     s.cfg.cookieName,
		Value:    value,
		Path:     "/",
		Domain:   s.cfg.cookieDomain,
		MaxAge:   maxAge,
		HttpOnly: true,
		Secure:   s.cfg.env != envLocal,
		SameSite: http.SameSiteLaxMode,
	})
}

// access says who may call an endpoint. The zero value is no rule: the server does not
// start with a route that has none.
type access string

const (
	public          access = "-"              // everyone
	local           access = "local"          // everyone; the route exists only in the local environment
	sessionOnly     access = "session"        // a session whose account is not suspended
	sessionAndTerms access = "session, terms" // the same, with the current terms accepted
)

func (a access) needsSession() bool { return a != public && a != local }

// authorize is the session check of every endpoint. It refuses a request at the first of these that
// fails: cookie, token, the account as it is now, terms, role.
func (s *server) authorize(state *requestState, need access, permitted []string) error {
	if !need.needsSession() {
		return nil
	}
	cookie, err := state.request.Cookie(s.cfg.cookieName)
	if err != nil {
		return unauthenticated("missing")
	}
	token, ok := s.verifyToken(cookie.Value)
	if !ok {
		return unauthenticated("forged")
	}
	if err := s.checkSession(state, token); err != nil {
		return err
	}
	if need == sessionAndTerms && !state.user.termsAccepted {
		return errTermsMissing
	}
	if permitted != nil && !slices.Contains(permitted, state.user.Permission) {
		return errForbidden
	}
	return nil
}

// checkSession says whether the session of a token still lasts. If the user exists, it sets
// state.user even if it refuses, so that the log can name the user.
//
// T5: the account is read from the database by each request, so a change shows at once.
func (s *server) checkSession(state *requestState, token sessionToken) error {
	expired := !time.Now().Before(token.expiresAt)
	if expired {
		return unauthenticated("expired")
	}
	u, found, err := s.loadUser(whereID, token.userID)
	if err != nil {
		return err
	}
	if !found { // the account was deleted
		return unauthenticated("ended")
	}
	state.user = u
	state.session = token
	emailChanged := u.Email != token.email
	signedOutEverywhere := token.issuedAt.Before(u.signedOutAt)
	if emailChanged || signedOutEverywhere {
		return unauthenticated("ended")
	}
	if u.suspended {
		return errSuspended
	}
	return nil
}

// getSession shows the session that the request came with, or has just begun.
func (s *server) getSession(state *requestState, _ nothing) (sessionView, error) {
	return sessionView{
		User:      state.user,
		Terms:     termsView{TERMS_VERSION, state.user.termsAccepted},
		ExpiresAt: state.session.expiresAt,
	}, nil
}

// An acceptance is the input of POST /terms/acceptance.
type acceptance struct{ version string }

var versionRule = rule{name: "version", min: 1, max: 100, required: true}

func parseAcceptance(f *fields) acceptance {
	return acceptance{f.text(versionRule)}
}

type acceptanceView struct {
	Version    string    `json:"version"`
	AcceptedAt time.Time `json:"acceptedAt"`
}

func (v acceptanceView) isValid() bool {
	return v.Version != "" && !v.AcceptedAt.IsZero()
}

// acceptTerms records the acceptance. Accepting again keeps the first time: the update changes
// nothing, but without it the statement would return no row.
func (s *server) acceptTerms(state *requestState, in acceptance) (acceptanceView, error) {
	if in.version != TERMS_VERSION {
		return acceptanceView{}, newProblem(409, "conflict",
			"The current terms version is "+TERMS_VERSION+".")
	}
	var v acceptanceView
	_, err := s.store.row(write(`
		insert into terms_acceptances (user_id, version) values ($1, $2)
		on conflict (user_id, version) do update set version = excluded.version
		returning version, accepted_at`,
		state.user.UserID, in.version), &v.Version, &v.AcceptedAt)
	return v, err
}

// logout clears the cookie and does no more. A copied token lives on until it expires or the
// user is signed out everywhere.
//
// T7: the cookie that clears has the name, path and domain of the one that was set, so that the
// browser removes it.
func (s *server) logout(state *requestState, _ nothing) (nothing, error) {
	s.setSessionCookie(state, "", -1)
	state.log().Info("signed out")
	return nothing{}, nil
}

// userCommands has the commands "user …": the number of their arguments, the statement, and
// what is printed when it is done.
var userCommands = map[string]struct {
	arguments  int
	text, done string
}{
	"add": {1, "insert into users (email, permission) values ($1, $2) on conflict do nothing",
		"added"},
	"role": {2, "update users set permission = $2" + ofEmail,
		"has the new role from the next request on"},
	"suspend": {1, "update users set suspended = true" + ofEmail,
		"suspended from the next request on"},
	"activate": {1, "update users set suspended = false" + ofEmail,
		"active from the next request on"},
	"signout": {1, "update users set signed_out_at = clock_timestamp()" + ofEmail,
		"signed out everywhere"},
	"list": {0, "select " + userLine + " from users order by lower(email)", ""},
	"show": {1, "select " + userLine + userDetails + " from users" + ofEmail, ""},
}

const (
	ofEmail = ` where lower(email) = lower($1 collate "C")`

	userLine = `email || '  ' || permission ||
		case when suspended then '  suspended' else '  active' end ||
		to_char(created_at, '"  added "YYYY-MM-DD"T"HH24:MI:SS"Z"')`

	userDetails = ` ||
		coalesce(to_char(signed_out_at,
			E'"\n  signed out everywhere "YYYY-MM-DD"T"HH24:MI:SS"Z"'), '') ||
		coalesce((select string_agg(E'\n  accepted terms ' || version ||
			to_char(accepted_at, '" at "YYYY-MM-DD"T"HH24:MI:SS"Z"'), '' order by accepted_at)
			from terms_acceptances t where t.user_id = users.user_id), '')`
)

// userCommand runs "user …", such as: hubs user add -role admin ada@example.com.
func userCommand(args []string, databaseURL string, out io.Writer) error {
	name := append(args, "")[0] // "" if args is empty
	command, known := userCommands[name]
	if !known {
		return usageError("there is no command \"user " + name + "\"\n\n" + usage)
	}
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	role := roleMember
	if name == "add" {
		flags.StringVar(&role, "role", roleMember, "")
	}
	if err := flags.Parse(args[1:]); err != nil {
		return usageError(fmt.Sprintf("user %s: %v\n\n%s", name, err, usage))
	}
	if flags.NArg() != command.arguments {
		return usageError(fmt.Sprintf("user %s: takes %d argument(s) after its flags, got %d\n\n%s",
			name, command.arguments, flags.NArg(), usage))
	}
	if name == "role" {
		role = flags.Arg(1)
	}
	if !slices.Contains(allRoles, role) {
		return usageError(fmt.Sprintf("there is no role %q; the roles are %s",
			role, strings.Join(allRoles, " and ")))
	}
	email := flags.Arg(0)
	if command.arguments > 0 && emailRule.validate(email) != "" {
		return usageError(fmt.Sprintf("%q is not an e-mail address that this server takes", email))
	}
	// A statement has no parameter, or $1 (the address), or $1 and $2 (the role). Each stands in it
	// once.
	parameters := []any{email, role}[:strings.Count(command.text, "$")]
	return runUserCommand(name, statement{text: command.text, args: parameters}, databaseURL, out)
}

func runUserCommand(name string, command statement, databaseURL string, out io.Writer) error {
	st, err := openStore(databaseURL)
	if err != nil {
		return err
	}
	defer st.db.Close()
	done := userCommands[name].done
	if done != "" {
		command.text += " returning email || ': " + done + "'"
		command.writes = true
	}
	found := false
	err = st.rows(command, func(rows *sql.Rows) error {
		found = true
		var line string
		if err := rows.Scan(&line); err != nil {
			return err
		}
		_, err := fmt.Fprintln(out, line)
		return err
	})
	switch {
	case err != nil:
		return err
	case !found && name == "add":
		return errors.New("there is a user with this address already; nothing was changed")
	case !found && name != "list":
		return errors.New("there is no user with this address; \"user list\" shows all")
	}
	return nil
}
