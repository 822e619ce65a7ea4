package main

// Sign-in, in the order the user lives it: ask for a code, present it, carry the
// session token in a cookie, be authenticated by it, accept the terms, sign out.

import (
	"database/sql"
	"errors"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// TERMS_VERSION is the version of the terms of use and the privacy policy that a
// user must have accepted. Raising it makes every user accept again.
const TERMS_VERSION = "2026-11-01"

const sessionLife = 60 * 24 * time.Hour // of the token and the cookie
const issuedAtLeeway = time.Minute      // between this server's clock and the database's

const roleMember, roleAdmin = "member", "admin"

var roles = []string{roleMember, roleAdmin}

// user is an account as the database has it now.
type user struct {
	UserID     string `json:"userId"`
	Email      string `json:"email"`
	Permission string `json:"permission"` // one of roles

	suspended, accepted bool      // accepted: the terms of TERMS_VERSION
	signedOutAt         time.Time // session tokens issued before it are refused
	now                 time.Time // the database's clock when the row was read
}

// What users are looked up by; the e-mail address in lower case.
const byID, byEmail = "u.user_id = $1", "lower(u.email) = $1"

// loadUser reads a user, or gives the error for when there is none.
func (s *server) loadUser(where, key string, missing error) (*user, error) {
	u := &user{}
	err := s.store.row(`select u.user_id, u.email, u.permission, u.suspended,
		coalesce(u.signed_out_at, 'epoch'), t.user_id is not null, clock_timestamp()
		from users u left join terms_acceptances t on t.user_id = u.user_id and t.version = $2
		where `+where, []any{key, TERMS_VERSION},
		&u.UserID, &u.Email, &u.Permission, &u.suspended, &u.signedOutAt, &u.accepted, &u.now)
	if errors.Is(err, sql.ErrNoRows) {
		err = missing
	}
	return u, err
}

// emailForm is the one form of an address that is taken: a dot-atom (RFC 5322) and
// a domain of labels, ASCII only. schema.sql has the same.
var emailForm = regexp.MustCompile("^" + atom + `(\.` + atom + ")*@" + domainLabels + "$")
var domainForm = regexp.MustCompile("^" + domainLabels + "$")

const atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"

// A label has 1 to 63 characters (RFC 1035 2.3.4): net/http leaves a cookie's domain out
// where it has a longer one.
const domainLabels = `[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*`

var emailRule = rule{name: "email", trim: true, min: 3, max: 254, pattern: emailForm, form: "an e-mail address"}

// readEmail gives the address in lower case, by which it is compared. ToLower maps
// two other letters (U+0130, U+212A) to ASCII ones, but the form is ASCII only.
func readEmail(f *fields) string { return strings.ToLower(f.text(emailRule)) }

type codeRequest struct{ email string }

func (codeRequest) read(f *fields) codeRequest { return codeRequest{readEmail(f)} }

func (in codeRequest) limitKey(x *exchange) string { return in.email + " " + addressKey(x.client) }

// codeAnswer is the same for every address.
type codeAnswer struct {
	CodeLength       int `json:"codeLength"`
	ExpiresInSeconds int `json:"expiresInSeconds"`
}

func (a codeAnswer) check() bool { return a.CodeLength == codeLength && a.ExpiresInSeconds > 0 }

// requestCode puts the address on the queue and answers. It asks nobody whether
// the address is known: status, body and time can't tell (ASVS 6.3.8).
func (s *server) requestCode(x *exchange, in codeRequest) (codeAnswer, error) {
	select {
	case s.codeJobs <- codeJob{in.email, x.log}:
		return codeAnswer{codeLength, int(codeLife.Seconds())}, nil
	default:
		return codeAnswer{}, unavailable(errors.New("the mail queue is full"))
	}
}

type codeProof struct{ email, code string }

var codeRule = rule{name: "code", pattern: regexp.MustCompile("^[0-9]{6}$"), form: "a code of six digits"}

func (codeProof) read(f *fields) codeProof { return codeProof{readEmail(f), f.text(codeRule)} }

// limitKey leaves the client out: 40 clients together have no more guesses than one
// (ASVS 6.6.3). The price: a stranger can lock an e-mail address for 15 minutes.
func (in codeProof) limitKey(*exchange) string { return in.email }

// sessionView is what a page needs to know after sign-in or a reload.
type sessionView struct {
	User      *user     `json:"user"`
	Terms     termsView `json:"terms"`
	ExpiresAt time.Time `json:"expiresAt"`
}

type termsView struct {
	Version  string `json:"version"`
	Accepted bool   `json:"accepted"`
}

func (v sessionView) check() bool {
	return isUUID(v.User.UserID) && emailForm.MatchString(v.User.Email) &&
		slices.Contains(roles, v.User.Permission) && !v.ExpiresAt.IsZero()
}

// validateCode exchanges address and code for a session. An unknown address, a
// wrong code and an expired one differ in nothing: none of them asks the database.
func (s *server) validateCode(x *exchange, in codeProof) (v sessionView, err error) {
	if !s.codes.redeem(in.email, in.code) {
		return v, errInvalidCode
	}
	u, err := s.loadUser(byEmail, in.email, errInvalidCode) // deleted or renamed since the code was sent
	switch {
	case err != nil:
		return v, err
	case u.suspended:
		return v, errSuspended
	}
	x.user, x.sessionEnds, x.log = u, u.now.Add(sessionLife), x.log.With("userId", u.UserID)
	x.log.Info("signed in")
	s.setCookie(x, s.issueToken(u, x.sessionEnds), int(sessionLife.Seconds()))
	return s.getSession(x, nothing{})
}

// claims is the payload of a session token: no role, no permission. Both times are
// seconds with microseconds: whole ones would let "sign out everywhere" spare a token
// of the same second, or kill the next one. Numbers of this size hold them exactly.
type claims struct {
	Email     string  `json:"email"`
	UserID    string  `json:"userId"`
	IssuedAt  float64 `json:"iat"` // by the database's clock
	ExpiresAt float64 `json:"exp"`
	NotBefore float64 `json:"nbf,omitempty"` // never set here, and kept where it is

	jwt.RegisteredClaims `json:"-"` // for its methods only, which jwt.Claims asks for
}

func toSeconds(t time.Time) float64         { return float64(t.UnixMicro()) / 1e6 }
func fromSeconds(seconds float64) time.Time { return time.UnixMicro(int64(seconds*1e6 + 0.5)).UTC() }

func (s *server) issueToken(u *user, expiresAt time.Time) string {
	token, _ := jwt.NewWithClaims(jwt.SigningMethodHS256, claims{Email: u.Email, UserID: u.UserID,
		IssuedAt: toSeconds(u.now), ExpiresAt: toSeconds(expiresAt)}).SignedString(s.cfg.sessionKeys.Keys[0])
	return token // texts, numbers and a key of bytes can't fail
}

// verifyToken checks everything that the token alone can tell: signature, form, and that
// now is within a life no longer than sessionLife. The library by itself would take other
// algorithms, an unknown crit (RFC 7515 4.1.11) and loose base64; its checks of the times
// would take texts for numbers.
func (s *server) verifyToken(token string) (c claims, valid bool) {
	parsed, err := tokenParser.ParseWithClaims(token, &c, func(*jwt.Token) (any, error) { return s.cfg.sessionKeys, nil })
	if err != nil {
		return c, false
	}
	now := toSeconds(time.Now())
	// The second leeway is for the rounding of both times to float64.
	inTime := c.NotBefore <= now && 0 < c.IssuedAt && c.IssuedAt <= now+issuedAtLeeway.Seconds() &&
		now < c.ExpiresAt && c.ExpiresAt-c.IssuedAt <= (sessionLife+issuedAtLeeway).Seconds()
	_, critical := parsed.Header["crit"]
	return c, inTime && !critical && isUUID(c.UserID)
}

var tokenParser = jwt.NewParser(
	jwt.WithValidMethods([]string{"HS256"}), jwt.WithStrictDecoding(), jwt.WithoutClaimsValidation())

// isUUID takes the one form that PostgreSQL gives out: small letters. No regular
// expression: a list checks a hundred of them.
func isUUID(text string) bool {
	return len(text) == 36 && text[8:9]+text[13:14]+text[18:19]+text[23:24] == "----" &&
		strings.Trim(text[:8]+text[9:13]+text[14:18]+text[19:23]+text[24:], "0123456789abcdef") == ""
}

// setCookie sets or, with a negative age in seconds, clears the session cookie.
// Name, path and domain must be the same for both, or the browser keeps it. In the local
// environment the domain is empty: host-only.
func (s *server) setCookie(x *exchange, token string, maxAge int) {
	http.SetCookie(x, &http.Cookie{Name: s.cfg.cookieName, Value: token, MaxAge: maxAge, Path: "/",
		Domain: s.cfg.cookieDomain, HttpOnly: true, Secure: s.cfg.env != envLocal, SameSite: http.SameSiteLaxMode})
}

// access says who may call an operation: everybody; the same, but the operation is there
// only where APP_ENV is local; a session whose account is not suspended; such a session
// with the current terms accepted. The zero value is no rule: an operation whose access
// was forgotten does not start.
type access string

const public, local, signedIn, termsAccepted access = "-", "local", "session", "session, terms"

func (a access) needsSession() bool { return a != public && a != local }

// authorize is the session check of every endpoint, in the order of refusals:
// cookie, token, the account as it is now, terms, role. In x.user it leaves the
// user, loaded by one query, once.
func (s *server) authorize(x *exchange, a access, roles []string) error {
	if !a.needsSession() {
		return nil
	}
	cookie, err := x.r.Cookie(s.cfg.cookieName)
	if err != nil {
		return errUnauthenticated
	}
	token, valid := s.verifyToken(cookie.Value)
	if !valid {
		return errUnauthenticated
	}
	u, err := s.loadUser(byID, token.UserID, errUnauthenticated)
	if err != nil {
		return err
	}
	x.user, x.sessionEnds, x.log = u, fromSeconds(token.ExpiresAt), x.log.With("userId", u.UserID)
	switch {
	case u.Email != token.Email, fromSeconds(token.IssuedAt).Before(u.signedOutAt):
		return errUnauthenticated
	case u.suspended:
		return errSuspended
	case a != signedIn && !u.accepted:
		return errTermsMissing
	case roles != nil && !slices.Contains(roles, u.Permission):
		return errForbidden
	}
	return nil
}

// getSession shows the session that the request came with.
func (s *server) getSession(x *exchange, _ nothing) (sessionView, error) {
	return sessionView{x.user, termsView{TERMS_VERSION, x.user.accepted}, x.sessionEnds}, nil
}

type acceptance struct{ version string }

var versionRule = rule{name: "version", min: 1, max: 100}

func (acceptance) read(f *fields) acceptance { return acceptance{f.text(versionRule)} }

type acceptanceView struct {
	Version    string    `json:"version"`
	AcceptedAt time.Time `json:"acceptedAt"`
}

func (v acceptanceView) check() bool { return v.Version != "" && !v.AcceptedAt.IsZero() }

// acceptTerms records the acceptance. A second one keeps the first time; the
// update that changes nothing is there to have the row returned.
func (s *server) acceptTerms(x *exchange, in acceptance) (v acceptanceView, err error) {
	if in.version != TERMS_VERSION {
		return v, newProblem(409, "conflict", "The current terms version is "+TERMS_VERSION+".")
	}
	err = s.store.row(`insert into terms_acceptances (user_id, version) values ($1, $2)
		on conflict (user_id, version) do update set version = excluded.version returning version, accepted_at`,
		[]any{x.user.UserID, in.version}, &v.Version, &v.AcceptedAt)
	return v, err
}

// logout clears the cookie and no more; the token itself lives on until it expires
// or the user is signed out everywhere.
func (s *server) logout(x *exchange, _ nothing) (nothing, error) {
	s.setCookie(x, "", -1)
	x.log.Info("signed out")
	return nothing{}, nil
}

// userCommands are the statements behind the commands "user …"; their parameters are
// what the command line has besides the words here, in that order.
var userCommands = map[string]string{
	"add":       "insert into users (email) values ($1) on conflict do nothing returning user_id",
	"add -role": "insert into users (permission, email) values ($1, $2) on conflict do nothing returning user_id",
	"role":      "update users set permission = $2" + ofEmail,
	"suspend":   "update users set suspended = true" + ofEmail,
	"activate":  "update users set suspended = false" + ofEmail,
	"signout":   "update users set signed_out_at = clock_timestamp()" + ofEmail,
}

const ofEmail = ` where lower(email) = lower($1 collate "C") returning user_id`

// changeUser runs "user …". What an address or a role may be, the table's own
// constraints say.
func changeUser(args []string, getenv func(string) string) error {
	name, parameters := "", []any{}
	for i, arg := range args {
		if i == 0 || i == 1 && arg == "-role" {
			name = strings.TrimSpace(name + " " + arg)
		} else {
			parameters = append(parameters, arg)
		}
	}
	statement, known := userCommands[name]
	if !known || len(parameters) != strings.Count(statement, "$") {
		return errUsage
	}
	st, err := openStore(getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer st.db.Close()
	err = st.row(statement, parameters, new(string))
	if errors.Is(err, sql.ErrNoRows) {
		return errors.New("no such user, or for add: there is one already")
	}
	return err
}
