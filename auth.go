package main

// Sign-in, in the order of a user's session: request a code, exchange it for a session, keep
// the session token in a cookie, authenticate each request, accept the terms, sign out. The
// commands with which an operator manages accounts come last.
//
// The token proves who signed in, and when. Because it is signed, a forged cookie costs no query,
// and whoever reads the database can't make one. Everything else about the account is read from the
// database by each request. The server keeps no list of tokens, so it can end all sessions of a
// user at once ("sign out everywhere", by an operator), but not one session alone.
//
// If an input has a limitKey method, serveRoute counts the request under that key before it calls
// the handler (see limitedEndpoint in middleware.go).

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// TERMS_VERSION is the version of the terms of use and the privacy policy that a user must
// have accepted. Changing it makes every user accept again. The specification prescribes the name.
const TERMS_VERSION = "2026-11-01"

const (
	sessionTTL = 60 * 24 * time.Hour // lifetime of a session token and of its cookie
	clockSkew  = time.Minute         // maximum difference between our clock and the database's
)

const (
	roleMember = "member"
	roleAdmin  = "admin"
)

var allRoles = []string{roleMember, roleAdmin}

// A user is an account as just read from the database.
type user struct {
	UserID     string `json:"userId"`
	Email      string `json:"email"`
	Permission string `json:"permission"` // the role, one of allRoles

	suspended     bool
	termsAccepted bool      // whether the user has accepted TERMS_VERSION
	signedOutAt   time.Time // "sign out everywhere": tokens issued before this time are refused
	now           time.Time // the database's clock when the row was read
}

// A userCondition selects the user in loadUser. $1 is the key. It has a type of its own, so that no
// text of a client can become part of the statement.
type userCondition string

const (
	whereID    userCondition = "u.user_id = $1"
	whereEmail userCondition = "lower(u.email) = $1" // the key must be in lower case
)

// loadUser reads the user that matches the condition. It returns nil if there is none. Without an
// acceptance of the current terms, the columns of terms_acceptances are null.
func (s *server) loadUser(condition userCondition, key string) (*user, error) {
	u := &user{}
	found, err := s.store.row(readOnly(`select u.user_id, u.email, u.permission, u.suspended,
		coalesce(u.signed_out_at, 'epoch'), t.user_id is not null, clock_timestamp()
		from users u left join terms_acceptances t on t.user_id = u.user_id and t.version = $2
		where `+string(condition), key, TERMS_VERSION),
		&u.UserID, &u.Email, &u.Permission, &u.suspended, &u.signedOutAt, &u.termsAccepted, &u.now)
	if err != nil || !found {
		return nil, err
	}
	return u, nil
}

// The parts of an e-mail address.
const (
	// One or more of the characters that RFC 5322 permits without quotes.
	atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
	// A label has 1 to 63 characters (RFC 1035 2.3.4).
	label        = `[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?`
	domainLabels = label + `(\.` + label + ")*"
)

// emailPattern matches the only addresses that are accepted: a dot-atom (RFC 5322), "@" and a
// domain name, ASCII only. schema.sql has the same pattern.
var emailPattern = regexp.MustCompile("^" + atom + `(\.` + atom + ")*@" + domainLabels + "$")

var domainPattern = regexp.MustCompile("^" + domainLabels + "$")

var emailRule = rule{
	name: "email", trim: true, min: 3, max: 254,
	pattern: emailPattern, inWords: "an e-mail address", required: true,
}

// parseEmail returns the address in lower case. All comparisons of addresses ignore case.
//
// ToLower maps U+0130 and U+212A to ASCII letters, but emailPattern rejects both, so that
// look-alike addresses never match (O9). It also rejects line breaks (I4); a mail goes to the
// address as stored in the database, which has the same rule.
func parseEmail(f *fields) string {
	return strings.ToLower(f.text(emailRule))
}

// A codeRequest is the input of POST /auth/otp/request.
type codeRequest struct{ email string }

func parseCodeRequest(f *fields) codeRequest {
	return codeRequest{parseEmail(f)}
}

// limitKey is the key by which requests are counted: each pair of an e-mail address and a client
// has its own count.
func (in codeRequest) limitKey(state *requestState) string {
	return in.email + " " + clientKey(state.client)
}

// A codeAnswer is the output of POST /auth/otp/request. It is the same for every address.
type codeAnswer struct {
	CodeLength       int `json:"codeLength"`
	ExpiresInSeconds int `json:"expiresInSeconds"`
}

func (codeAnswer) isValid() bool { return true } // its values are constants

// requestCode schedules the work (scheduleCode in otp.go) and answers without waiting for it. It
// does not look up the account, so neither the answer nor its timing reveals whether one exists
// (O6).
func (s *server) requestCode(state *requestState, in codeRequest) (codeAnswer, error) {
	if !s.scheduleCode(in.email, state.log()) {
		return codeAnswer{}, unavailable(errors.New("too many unfinished requests for a code"))
	}
	return codeAnswer{codeLength, int(codeTTL.Seconds())}, nil
}

// A guess is the input of POST /auth/otp/validate: an address and a code that may be wrong.
type guess struct{ email, code string }

var codeRule = rule{
	name: "code", max: codeLength,
	pattern: regexp.MustCompile("^[0-9]{6}$"), inWords: "a code of six digits", required: true,
}

func parseGuess(f *fields) guess {
	return guess{parseEmail(f), f.text(codeRule)}
}

// limitKey does not include the client's address, so that an attacker with many client addresses
// gets no more guesses at one mailbox than with one (O4), unless a flood makes the limiter discard
// the key (L5). The count is in guessLimit, apart from the codes, so a new code brings no new
// guesses (O5). The price is that a stranger can block sign-in for an e-mail address for as long as
// they keep guessing, and up to 15 minutes longer (O8).
func (in guess) limitKey(*requestState) string {
	return in.email
}

// A sessionView tells a page about the current session, after sign-in or a reload.
type sessionView struct {
	User      *user     `json:"user"`
	Terms     termsView `json:"terms"`
	ExpiresAt time.Time `json:"expiresAt"`
}

type termsView struct {
	Version  string `json:"version"`
	Accepted bool   `json:"accepted"`
}

func newSessionView(u *user, token sessionToken) sessionView {
	return sessionView{
		User:      u,
		Terms:     termsView{TERMS_VERSION, u.termsAccepted},
		ExpiresAt: token.ExpiresAt.time(),
	}
}

func (v sessionView) isValid() bool {
	return emailPattern.MatchString(v.User.Email) && slices.Contains(allRoles, v.User.Permission)
}

// validateCode exchanges an address and its code for a session. It refuses unknown addresses,
// wrong codes and expired codes alike, without a query to the database.
//
// It reads the account before it removes the code: if the database fails, the user can try the same
// code again. A code is also refused if sendCode read the account before a "sign out everywhere",
// because somebody else may have been reading the mailbox (S1).
func (s *server) validateCode(state *requestState, in guess) (sessionView, error) {
	code := s.codes.find(in.email, in.code)
	if code == nil {
		return sessionView{}, errInvalidCode
	}
	u, err := s.loadUser(whereEmail, in.email)
	if err != nil {
		return sessionView{}, err
	}
	if u == nil { // the account was deleted, or its address changed, after the code was sent
		return sessionView{}, errInvalidCode
	}
	state.user = u // for the log
	if err := compareClocks(u.now); err != nil {
		return sessionView{}, err
	}
	removed := s.codes.remove(in.email, code) // used up, even if the sign-in is refused below
	signedOutEverywhere := code.userReadAt.Before(u.signedOutAt)
	if !removed || signedOutEverywhere {
		return sessionView{}, errInvalidCode
	}
	if u.suspended {
		return sessionView{}, errSuspended
	}
	token := sessionToken{
		Email:     u.Email,
		UserID:    u.UserID,
		IssuedAt:  toSeconds(u.now),
		ExpiresAt: toSeconds(u.now.Add(sessionTTL)),
	}
	state.log().Info("signed in")
	s.setSessionCookie(state, s.signToken(token), int(sessionTTL.Seconds()))
	return newSessionView(u, token), nil
}

// compareClocks returns a 503 if the database's clock and this server's differ by more than
// clockSkew (T9). If the database's clock is ahead, verifyToken would refuse every new token. If
// it is behind, sessions would end early.
func compareClocks(databaseNow time.Time) error {
	ahead := time.Until(databaseNow)
	if ahead.Abs() <= clockSkew {
		return nil
	}
	return unavailable(fmt.Errorf("the database's clock minus the server's: %v", ahead))
}

// A sessionToken is the payload of the JWT. It holds no role: each request reads the role from
// the database. Its times come from the database's clock, because IssuedAt is compared with
// signedOutAt, which the database sets.
type sessionToken struct {
	Email     string  `json:"email"`
	UserID    string  `json:"userId"`
	IssuedAt  seconds `json:"iat"`
	ExpiresAt seconds `json:"exp"`

	// Embedded only because the library requires these methods. It stays nil: encoding/json skips
	// it, and tokenParser does not call its methods.
	jwt.Claims `json:"-"`
}

// seconds is a time as a JWT has it: a JSON number of seconds since 1970 (RFC 7519, section 2). It
// has six decimals, the precision of PostgreSQL. Whole seconds could not tell a session that began
// just before a "sign out everywhere" from one that began just after.
//
// A float64 of seconds is off by 0.12 µs at most today, and multiplying it by 1e6 adds about as
// much. Together that is less than half a microsecond, so rounding restores the original value.
type seconds float64

func toSeconds(t time.Time) seconds { return seconds(t.UnixMicro()) / 1e6 }

func (s seconds) time() time.Time {
	return time.UnixMicro(int64(math.Round(float64(s) * 1e6))).UTC()
}

// signToken signs the token with the first key. The other keys only verify, so that a key can be
// replaced without ending sessions.
func (s *server) signToken(token sessionToken) string {
	unsigned := jwt.NewWithClaims(jwt.SigningMethodHS256, token)
	signed, _ := unsigned.SignedString(s.cfg.sessionKeys.Keys[0]) // can't fail for these fields
	return signed
}

// tokenParser checks the form, the algorithm and the signature. verifyToken checks the times,
// because the library would accept a token without iat, and would apply the leeway that iat needs
// to exp as well.
var tokenParser = jwt.NewParser(
	jwt.WithValidMethods([]string{"HS256"}), // rejects none, HS384 and HS512
	jwt.WithStrictDecoding(),                // rejects base64 with nonzero padding bits
	jwt.WithoutClaimsValidation(),
)

// verifyToken checks the form (T4), the signature (T1) and the times (T2) of a token, and returns
// its payload. It does not check the account: checkSession does. The word in each 401 is for the
// log.
func (s *server) verifyToken(text string) (sessionToken, error) {
	var token sessionToken
	parsed, err := tokenParser.ParseWithClaims(text, &token, func(*jwt.Token) (any, error) {
		return s.cfg.sessionKeys, nil // the library tries each key
	})
	if err != nil { // not a JWT in strict base64, or not signed by HS256 and one of our keys
		return sessionToken{}, unauthenticated("forged")
	}
	_, critical := parsed.Header["crit"] // RFC 7515 4.1.11: we support no extension
	if critical || !isUUID(token.UserID) {
		return sessionToken{}, unauthenticated("forged")
	}
	// A missing time is 0, which is 1970. So a token without iat lives too long, and one without exp
	// has expired.
	now := time.Now()
	issuedAt := token.IssuedAt.time()
	expiresAt := token.ExpiresAt.time()
	issuedInFuture := issuedAt.After(now.Add(clockSkew))
	livesTooLong := expiresAt.Sub(issuedAt) > sessionTTL
	if issuedInFuture || livesTooLong {
		// A clock was set back, or another program made the token.
		return sessionToken{}, unauthenticated("clock")
	}
	expired := !now.Before(expiresAt)
	if expired {
		return sessionToken{}, unauthenticated("expired")
	}
	return token, nil
}

// setSessionCookie sets the session cookie for maxAge seconds, or clears it if maxAge is negative.
// A browser clears a cookie only if name, path and domain are the same as when it was set. The
// cookie is always HttpOnly and SameSite=Lax, and Secure except in the local environment (T6).
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

// authorize checks a request to an endpoint that needs a session. It checks, in this order, the
// cookie, the token, the account, the terms and the role, and returns the first failure.
func (s *server) authorize(state *requestState) error {
	cookie, err := state.request.Cookie(s.cfg.cookieName)
	if err != nil {
		return unauthenticated("missing")
	}
	token, err := s.verifyToken(cookie.Value)
	if err != nil {
		return err
	}
	if err := s.checkSession(state, token); err != nil {
		return err
	}
	need := state.route.access
	if need.terms && !state.user.termsAccepted {
		return errTermsMissing
	}
	if need.roles != nil && !slices.Contains(need.roles, state.user.Permission) {
		return errForbidden
	}
	return nil
}

// checkSession returns an error if the session of a token has ended or the user is suspended. It
// reads the account from the database, so a change takes effect with the user's next request (T5).
// If the user exists, it sets state.user even if it returns an error, so that the log has the
// user's id.
func (s *server) checkSession(state *requestState, token sessionToken) error {
	u, err := s.loadUser(whereID, token.UserID)
	if err != nil {
		return err
	}
	if u == nil { // the account was deleted
		return unauthenticated("ended")
	}
	state.user = u
	state.session = token
	emailChanged := u.Email != token.Email
	signedOutEverywhere := token.IssuedAt.time().Before(u.signedOutAt)
	if emailChanged || signedOutEverywhere {
		return unauthenticated("ended")
	}
	if u.suspended {
		return errSuspended
	}
	return nil
}

// getSession returns the session of the request.
func (s *server) getSession(state *requestState) (sessionView, error) {
	return newSessionView(state.user, state.session), nil
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

func (acceptanceView) isValid() bool { return true } // no column can be null

// acceptTerms records the acceptance. Accepting again keeps the time of the first acceptance: the
// update changes no value, but without it the statement would return no row.
func (s *server) acceptTerms(state *requestState, in acceptance) (acceptanceView, error) {
	if in.version != TERMS_VERSION {
		return acceptanceView{}, newProblem(409, "conflict",
			"The current terms version is "+TERMS_VERSION+".")
	}
	var v acceptanceView
	_, err := s.store.row(readWrite(`
		insert into terms_acceptances (user_id, version) values ($1, $2)
		on conflict (user_id, version) do update set version = excluded.version
		returning version, accepted_at`,
		state.user.UserID, in.version), &v.Version, &v.AcceptedAt)
	if err != nil {
		return acceptanceView{}, endedIfUserGone(err)
	}
	return v, nil
}

// logout clears the session cookie in the browser (T7). It does not revoke the token: a copy stays
// valid until it expires or the user is signed out everywhere.
func (s *server) logout(state *requestState) (nothing, error) {
	s.setSessionCookie(state, "", -1)
	state.log().Info("signed out")
	return nothing{}, nil
}

// userCommand runs a "user" command. line holds its arguments, such as
// add -role admin ada@example.com.
func userCommand(line []string) error {
	if len(line) == 0 {
		return usageError("user: name a command\n\n" + usage)
	}
	name := line[0]
	command, isKnown := userCommands[name]
	if !isKnown {
		return usageError("there is no command \"user " + name + "\"\n\n" + usage)
	}
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard) // the usageError below says it
	role := roleMember
	if name == "add" { // the only command with a flag
		flags.StringVar(&role, "role", role, "")
	}
	if err := flags.Parse(line[1:]); err != nil {
		return usageError(fmt.Sprintf("user %s: %v\n\n%s", name, err, usage))
	}
	if flags.NArg() != command.arguments {
		return usageError(fmt.Sprintf("user %s: takes %d argument(s), got %d\n\n%s",
			name, command.arguments, flags.NArg(), usage))
	}
	var args []any // $1 and $2 of the statement
	for _, arg := range flags.Args() {
		args = append(args, arg)
	}
	if name == "add" {
		args = append(args, role)
	}
	return runUserCommand(readWrite(command.text, args...))
}

// userLine is the SQL expression for one line about a user.
const userLine = `format('%s  %s  %s  added %s', email, permission,
	case when suspended then 'suspended' else 'active' end, created_at)`

// userCommands holds, for each command, the number of its arguments (flags not counted) and its
// statement. $1 is the address of the user, $2 the role or the new address. The constraints of the
// table users check what is stored. A statement returns one text, which is printed.
//
// Addresses are compared as the index users_email has them: in lower case by collation C, which
// changes ASCII letters only.
var userCommands = map[string]struct {
	arguments int
	text      string
}{
	"add": {1, `insert into users (email, permission) values ($1, $2)
		returning format('%s: added', email)`},
	"role": {2, `update users set permission = $2
		where lower(email) = lower($1 collate "C")
		returning format('%s: has the new role from the next request on', email)`},
	"suspend": {1, `update users set suspended = true
		where lower(email) = lower($1 collate "C")
		returning format('%s: suspended from the next request on', email)`},
	"activate": {1, `update users set suspended = false
		where lower(email) = lower($1 collate "C")
		returning format('%s: active from the next request on', email)`},
	"signout": {1, `update users set signed_out_at = clock_timestamp()
		where lower(email) = lower($1 collate "C")
		returning format('%s: signed out everywhere', email)`},
	// Sign the user out as well. Otherwise changing the address back would revive old sessions.
	"email": {2, `update users set email = $2, signed_out_at = clock_timestamp()
		where lower(email) = lower($1 collate "C")
		returning format('%s: the new address; signed out everywhere', email)`},
	"delete": {1, `delete from users
		where lower(email) = lower($1 collate "C")
		returning format('%s: deleted; uploaded files stay', email)`},
	"list": {0, "select coalesce(string_agg(" + userLine + `, E'\n' order by lower(email)),
		'there are no users') from users`},
	"show": {1, `select concat_ws(E'\n', ` + userLine + `,
			'  signed out everywhere ' || signed_out_at,
			(select string_agg(format('  accepted terms %s at %s', version, accepted_at), E'\n'
				order by accepted_at)
				from terms_acceptances t where t.user_id = users.user_id))
		from users where lower(email) = lower($1 collate "C")`},
}

func runUserCommand(command statement) error {
	st, err := openStore(os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer st.db.Close()
	var text string
	found, err := st.row(command, &text)
	if err != nil {
		return explainDBError(err)
	}
	if !found {
		return errors.New("there is no user with this address; \"user list\" shows all")
	}
	fmt.Println(text)
	return nil
}
