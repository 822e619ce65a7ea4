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
// ToLower would turn U+0130 and U+212A into ASCII letters, but emailForm refuses both (O9). It
// lets no line break through either, so none reaches a mail (I4).
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
	return a.ExpiresInSeconds > 0
}

// requestCode answers before the work on the request begins: startCode in otp.go. It does not
// look up whether the address is known, so neither the answer nor its time can tell (O6).
func (s *server) requestCode(state *requestState, in codeRequest) (codeAnswer, error) {
	if !s.startCode(in.email, state.log()) {
		return codeAnswer{}, unavailable(errors.New("too many unfinished requests for a code"))
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

// limitKey leaves the client's address out, so that many clients together have no more guesses
// at one mailbox than one client has (O4). The price is that a stranger can lock an address for
// 15 minutes (O8).
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
// A right code is used up last: if the account can't be read, the user need not ask for another.
// "Sign out everywhere" ends codes in flight, too: it is what an operator does if somebody else may
// read the mailbox (S1).
func (s *server) validateCode(state *requestState, in guess) (sessionView, error) {
	code, ok := s.codes.find(in.email, in.code)
	if !ok {
		return sessionView{}, errInvalidCode
	}
	u, found, err := s.loadUser(whereEmail, in.email)
	if err != nil {
		return sessionView{}, err
	}
	if !found { // deleted, or given another address, since the code was sent
		return sessionView{}, errInvalidCode
	}
	if err := compareClocks(u.now); err != nil {
		return sessionView{}, err
	}
	state.user = u
	signedOutEverywhere := code.userReadAt.Before(u.signedOutAt)
	if !s.codes.remove(in.email, code) || signedOutEverywhere {
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
	state.session = token
	state.log().Info("signed in")
	s.setSessionCookie(state, s.signToken(token), int(sessionTTL.Seconds()))
	return s.getSession(state, nothing{})
}

// compareClocks returns a 503 if the database's clock and this server's are more than clockSkew
// apart (T9). If the database is ahead, verifyToken would refuse every token that is issued then;
// if it is behind, sessions would end early.
func compareClocks(database time.Time) error {
	ahead := time.Until(database)
	if ahead.Abs() <= clockSkew {
		return nil
	}
	return unavailable(fmt.Errorf("the database's clock is %v ahead of this server's", ahead))
}

// A sessionToken is the payload of the JWT. It holds no role: that comes from the database. Its
// times are by the database's clock, because they are compared with the time of a "sign out
// everywhere".
type sessionToken struct {
	Email     string  `json:"email"`
	UserID    string  `json:"userId"`
	IssuedAt  seconds `json:"iat"`
	ExpiresAt seconds `json:"exp"`

	jwt.RegisteredClaims `json:"-"` // only for the methods that jwt.Claims asks for
}

// seconds since 1970, with six decimals, which is PostgreSQL's precision: with whole seconds, a
// sign-out everywhere could not tell a session that began just before it from one that began
// just after. A float64 has room for 53 bits. Such a time in microseconds needs 51, so rounding
// gives back exactly what was written.
type seconds float64

func toSeconds(t time.Time) seconds { return seconds(t.UnixMicro()) / 1e6 }

func (s seconds) time() time.Time {
	return time.UnixMicro(int64(math.Round(float64(s) * 1e6))).UTC()
}

// signToken signs the token with the first key.
func (s *server) signToken(token sessionToken) string {
	unsigned := jwt.NewWithClaims(jwt.SigningMethodHS256, token)
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

// verifyToken reads a token. Its error is the 401, with the reason for the log: "forged" if none of
// our keys signed the token or it is malformed, "expired", or "clock" if its times can't be ours by
// this server's clock. checkSession checks the account.
//
// A token is HS256 with one of our keys and without a critical extension (T1), in strict base64
// (T4). Its iat is at most clockSkew in the future, and its exp at most 60 days after it (T2). A
// missing time counts as 1970: a token without exp has expired, and one without iat has more
// than 60 days to its exp.
func (s *server) verifyToken(text string) (sessionToken, error) {
	var token sessionToken
	parsed, err := tokenParser.ParseWithClaims(text, &token, func(*jwt.Token) (any, error) {
		return s.cfg.sessionKeys, nil
	})
	if err != nil {
		return sessionToken{}, unauthenticated("forged")
	}
	_, critical := parsed.Header["crit"] // RFC 7515 4.1.11: an extension we don't know
	if critical || !isUUID(token.UserID) {
		return sessionToken{}, unauthenticated("forged")
	}
	now := time.Now()
	issuedAt := token.IssuedAt.time()
	expiresAt := token.ExpiresAt.time()
	issuedInFuture := issuedAt.After(now.Add(clockSkew))
	livesTooLong := expiresAt.Sub(issuedAt) > sessionTTL
	if issuedInFuture || livesTooLong {
		return sessionToken{}, unauthenticated("clock")
	}
	expired := !now.Before(expiresAt)
	if expired {
		return sessionToken{}, unauthenticated("expired")
	}
	return token, nil
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
// It is HttpOnly and SameSite=Lax always, Secure except locally, and lives 60 days (T6).
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

// authorize is the session check of every endpoint that needs a session. It refuses a request at
// the first of these that fails: cookie, token, the account as it is now, terms, role.
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
	if need != sessionOnly && !state.user.termsAccepted {
		return errTermsMissing
	}
	if need == adminOnly && state.user.Permission != roleAdmin {
		return errForbidden
	}
	return nil
}

// checkSession says whether the session of a token still lasts. If the user exists, it sets
// state.user even if it refuses, so that the log can name the user. Each request reads the
// account from the database, so a change shows at once (T5).
func (s *server) checkSession(state *requestState, token sessionToken) error {
	u, found, err := s.loadUser(whereID, token.UserID)
	if err != nil {
		return err
	}
	if !found { // the account was deleted
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

// getSession shows the session that the request came with, or has just begun.
func (s *server) getSession(state *requestState, _ nothing) (sessionView, error) {
	return sessionView{
		User:      state.user,
		Terms:     termsView{TERMS_VERSION, state.user.termsAccepted},
		ExpiresAt: state.session.ExpiresAt.time(),
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
	if err != nil {
		return acceptanceView{}, endedIfUserGone(err)
	}
	return v, nil
}

// endedIfUserGone returns the 401 if a write failed because the user it refers to was deleted
// while the request ran.
func endedIfUserGone(err error) error {
	if sqlState(err) == "23503" { // foreign_key_violation
		return unauthenticated("ended")
	}
	return err
}

// logout clears the cookie and does no more. A copied token lives on until it expires or the
// user is signed out everywhere. The cookie that clears has the name, path and domain of the one
// that was set, so that the browser removes it (T7).
func (s *server) logout(state *requestState, _ nothing) (nothing, error) {
	s.setSessionCookie(state, "", -1)
	state.log().Info("signed out")
	return nothing{}, nil
}

// userCommand runs "user …", such as: hubs user add -role admin ada@example.com.
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
	flags.SetOutput(io.Discard)
	role := roleMember
	if name == "add" {
		flags.StringVar(&role, "role", roleMember, "")
	}
	err := flags.Parse(line[1:])
	if err != nil {
		return usageError(fmt.Sprintf("user %s: %v\n\n%s", name, err, usage))
	}
	if flags.NArg() != command.arguments {
		return usageError(fmt.Sprintf("user %s: takes %d argument(s), got %d\n\n%s",
			name, command.arguments, flags.NArg(), usage))
	}
	var args []any
	for _, arg := range flags.Args() {
		args = append(args, arg)
	}
	if name == "add" {
		args = append(args, role)
	}
	return runUserCommand(name, write(command.text, args...))
}

// userCommands has the statement of each command, and how many arguments come after its flags. $1
// is the address, $2 the role or the new address: the table checks both. Each row that a statement
// returns is printed.
var userCommands = map[string]struct {
	arguments int
	text      string
}{
	"add": {1, `insert into users (email, permission) values ($1, $2)
		returning format('%s: added', email)`},
	"role": {2, "update users set permission = $2" + ofUser +
		"returning format('%s: has the new role from the next request on', email)"},
	"suspend": {1, "update users set suspended = true" + ofUser +
		"returning format('%s: suspended from the next request on', email)"},
	"activate": {1, "update users set suspended = false" + ofUser +
		"returning format('%s: active from the next request on', email)"},
	"signout": {1, "update users set signed_out_at = clock_timestamp()" + ofUser +
		"returning format('%s: signed out everywhere', email)"},
	// Signed out as well, so that an address that is changed back revives no session.
	"email": {2, "update users set email = $2, signed_out_at = clock_timestamp()" + ofUser +
		"returning format('%s: the new address; signed out everywhere', email)"},
	"delete": {1, "delete from users" + ofUser +
		"returning format('%s: deleted; uploaded files stay', email)"},
	"list": {0, "select " + userLine + " from users order by lower(email)"},
	"show": {1, `select concat_ws(E'\n', ` + userLine + `,
		'  signed out everywhere ' || signed_out_at,
		(select string_agg(format('  accepted terms %s at %s', version, accepted_at), E'\n'
			order by accepted_at)
			from terms_acceptances t where t.user_id = users.user_id))
		from users` + ofUser},
}

// ofUser compares addresses in ASCII, whatever the locale of the database.
const ofUser = ` where lower(email) = lower($1 collate "C") `

const userLine = `format('%s  %s  %s  added %s', email, permission,
	case when suspended then 'suspended' else 'active' end, created_at)`

func runUserCommand(name string, command statement) error {
	st, err := openStore(os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer st.db.Close()
	found := false
	err = st.rows(command, func(rows *sql.Rows) error {
		found = true
		var line string
		if err := rows.Scan(&line); err != nil {
			return err
		}
		fmt.Println(line)
		return nil
	})
	if err != nil {
		return explainDBError(err)
	}
	if !found && name != "list" {
		return errors.New("there is no user with this address; \"user list\" shows all")
	}
	return nil
}
