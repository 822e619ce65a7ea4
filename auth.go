package main

// Sign-in, in the order in which a user meets it.
//
// The token proves who signed in, and when. Each request reads all else from
// the database. There is no list of tokens, so an operator can end all sessions
// of a user, but not one alone.

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

// TERMS_VERSION is the version of the terms of use and the privacy policy that
// users must accept. The specification prescribes the name.
const TERMS_VERSION = "2026-11-01"

const (
	sessionTTL = 60 * 24 * time.Hour // life of a session token and its cookie
	maxToken   = 2 << 10             // bytes; a larger one could take milliseconds
	maxCookies = 8                   // with our name; to check one costs a signature for each key
)

const (
	roleMember = "member"
	roleAdmin  = "admin"
)

var allRoles = []string{roleMember, roleAdmin}

type user struct {
	UserID     string `json:"userId"`
	Email      string `json:"email"`
	Permission string `json:"permission"`

	suspended     bool
	termsAccepted bool      // the user has accepted TERMS_VERSION
	signedOutAt   time.Time // "sign out everywhere": older sessions are refused
	now           time.Time // the database's clock when the row was read
}

// A userCondition is part of a statement. Because of its type, no text of a
// client can become one (I1).
type userCondition string

const (
	whereID    userCondition = "u.user_id = $1"
	whereEmail userCondition = "lower(u.email) = $1" // the address must be in lower case
)

// loadUser returns nil, and no error, if there is no such user.
func (s *server) loadUser(condition userCondition, key string) (*user, error) {
	u := &user{}
	err := s.store.read(`select u.user_id, u.email, u.permission, u.suspended,
		coalesce(u.signed_out_at, 'epoch'), t.user_id is not null, clock_timestamp()
		from users u left join terms_acceptances t on t.user_id = u.user_id and t.version = $2
		where `+string(condition), []any{key, TERMS_VERSION},
		&u.UserID, &u.Email, &u.Permission, &u.suspended, &u.signedOutAt, &u.termsAccepted, &u.now)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return u, nil
}

// An e-mail address is a dot-atom (RFC 5322), "@" and a domain, ASCII only.
// schema.sql has the same pattern.
const (
	atom         = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
	label        = `[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?`
	domainLabels = label + `(\.` + label + ")*"
)

var (
	emailPattern  = regexp.MustCompile("^" + atom + `(\.` + atom + ")*@" + domainLabels + "$")
	domainPattern = regexp.MustCompile("^" + domainLabels + "$")
)

func isEmail(text string) bool { return len(text) <= 254 && emailPattern.MatchString(text) }

// email returns the address in lower case, or "" if it is not valid. isEmail
// comes first, because ToLower maps some other letters to ASCII (O9).
func (f fields) email() string {
	email := strings.Trim(f["email"], " ")
	if !isEmail(email) {
		return ""
	}
	return strings.ToLower(email)
}

func (errs *fieldErrors) requireEmail(email string) {
	errs.require(email != "", "email",
		"must be an ASCII e-mail address (an international domain as xn--…)")
}

func codeRequestKey(r *request) string {
	email := r.fields.email()
	if email == "" {
		return ""
	}
	return email + " " + r.clientKey()
}

// guessKey leaves out the client, so that many clients have no more guesses
// (O4). The price is that a stranger who keeps guessing locks an address out of
// sign-in (O8).
func guessKey(r *request) string { return r.fields.email() }

func checkCodeRequest(f fields) (errs fieldErrors) {
	errs.requireEmail(f.email())
	return errs
}

type codeAnswer struct {
	CodeLength       int `json:"codeLength"`
	ExpiresInSeconds int `json:"expiresInSeconds"`
}

func (codeAnswer) validate() fieldErrors { return nil }

// requestCode answers before the account is looked up, so that neither the
// answer nor its time tells whether there is one (O6).
func (s *server) requestCode(r *request) (output, error) {
	if !s.scheduleCode(r.fields.email(), r.log()) {
		return nil, unavailable(errors.New("too many unfinished requests for a code"))
	}
	return codeAnswer{CodeLength: codeLength, ExpiresInSeconds: int(codeTTL.Seconds())}, nil
}

func checkGuess(f fields) (errs fieldErrors) {
	errs.requireEmail(f.email())
	errs.require(codePattern.MatchString(f["code"]), "code", "must be six digits, 0 to 9")
	return errs
}

// validateCode exchanges an address and its code for a session. It refuses
// unknown addresses and wrong, used or expired codes alike, without a query.
func (s *server) validateCode(r *request) (output, error) {
	email := r.fields.email()
	code := s.codes.find(email, r.fields["code"]) // not used up yet: the database may be away
	if code == nil {
		return nil, errInvalidCode
	}
	u, err := s.loadUser(whereEmail, email)
	if err != nil {
		return nil, err
	}
	if u == nil { // deleted, or its address changed, after the code was sent
		return nil, errInvalidCode
	}
	r.user = u
	// Of several requests with the same code, only one removes it (O3).
	if !s.codes.remove(email, code) {
		return nil, errInvalidCode
	}
	if !code.isFor(u) {
		return nil, errInvalidCode
	}
	if u.suspended {
		return nil, errSuspended
	}
	// Both times are the database's, in whole seconds. authorize compares iat
	// with signedOutAt.
	r.session = sessionToken{Email: u.Email, UserID: u.UserID}
	r.session.IssuedAt = jwt.NewNumericDate(u.now)
	r.session.ExpiresAt = jwt.NewNumericDate(u.now.Add(sessionTTL))
	s.setSessionCookie(r, s.signToken(r.session), int(sessionTTL.Seconds()))
	r.log().Info("signed in")
	return s.getSession(r)
}

type sessionView struct {
	User      *user     `json:"user"`
	Terms     termsView `json:"terms"`
	ExpiresAt timestamp `json:"expiresAt"`
}

type termsView struct {
	Version  string `json:"version"`
	Accepted bool   `json:"accepted"`
}

func (v sessionView) validate() (errs fieldErrors) {
	errs.require(isEmail(v.User.Email), "email", "is not valid")
	errs.requireOneOf("permission", v.User.Permission, allRoles)
	return errs
}

func (s *server) getSession(r *request) (output, error) {
	return sessionView{
		User:      r.user,
		Terms:     termsView{Version: TERMS_VERSION, Accepted: r.user.termsAccepted},
		ExpiresAt: timestamp{r.session.ExpiresAt.Time},
	}, nil
}

// A sessionToken is the payload of the JWT: email, userId, iat and exp.
type sessionToken struct {
	Email  string `json:"email"`
	UserID string `json:"userId"`
	jwt.RegisteredClaims
}

// signToken signs with the first key. The others only verify, so a key can be
// replaced without ending sessions.
func (s *server) signToken(token sessionToken) string {
	unsigned := jwt.NewWithClaims(jwt.SigningMethodHS256, token)
	signed, _ := unsigned.SignedString(s.cfg.sessionKeys.Keys[0]) // can't fail for these claims
	return signed
}

var tokenParser = jwt.NewParser(
	jwt.WithValidMethods([]string{"HS256"}), // rejects none, HS384 and HS512
	jwt.WithStrictDecoding(),                // rejects base64 with nonzero padding bits
	jwt.WithExpirationRequired(),
)

// verifyToken checks the form, the signature (T1) and the expiry (T2) of a
// token.
func (s *server) verifyToken(text string) (sessionToken, error) {
	if len(text) > maxToken {
		return sessionToken{}, unauthenticated("forged")
	}
	var token sessionToken
	parsed, err := tokenParser.ParseWithClaims(text, &token, func(*jwt.Token) (any, error) {
		return s.cfg.sessionKeys, nil // the library tries each key
	})
	if errors.Is(err, jwt.ErrTokenExpired) {
		return sessionToken{}, unauthenticated("expired")
	}
	if err != nil {
		return sessionToken{}, unauthenticated("forged")
	}
	_, isCritical := parsed.Header["crit"] // RFC 7515 4.1.11: no extension is supported
	if isCritical || token.IssuedAt == nil || !isUUID(token.UserID) {
		return sessionToken{}, unauthenticated("forged")
	}
	return token, nil
}

// setSessionCookie sets the cookie for maxAge seconds, or clears it if maxAge
// is negative. For a browser, both must have the same name, path and domain.
func (s *server) setSessionCookie(r *request, value string, maxAge int) {
	http.SetCookie(r.w, &http.Cookie{
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

// readToken returns the first token that verifies. After a change of
// COOKIE_DOMAIN, a browser sends the old cookie beside the new one.
func (s *server) readToken(r *request) (sessionToken, error) {
	var refusal error = unauthenticated("missing")
	cookies := r.CookiesNamed(s.cfg.cookieName)
	for _, cookie := range cookies[:min(len(cookies), maxCookies)] {
		token, err := s.verifyToken(cookie.Value)
		if err == nil {
			return token, nil
		}
		refusal = err
	}
	return sessionToken{}, refusal
}

// authorize checks the token, the account, the terms and the role. It reads the
// account, so a change takes effect with the user's next request (T5).
func (s *server) authorize(r *request) error {
	token, err := s.readToken(r)
	if err != nil {
		return err
	}
	u, err := s.loadUser(whereID, token.UserID)
	if err != nil {
		return err
	}
	if u == nil { // deleted
		return unauthenticated("ended")
	}
	r.user = u
	r.session = token
	// iat has whole seconds, so a token of the very second of the sign-out is
	// refused, too.
	isSignedOut := !token.IssuedAt.After(u.signedOutAt)
	needs := r.route.access
	switch {
	case u.Email != token.Email || isSignedOut:
		return unauthenticated("ended")
	case u.suspended:
		return errSuspended
	case needs.terms && !u.termsAccepted:
		return errTermsMissing
	case needs.roles != nil && !slices.Contains(needs.roles, u.Permission):
		return errForbidden
	}
	return nil
}

func checkAcceptance(f fields) (errs fieldErrors) {
	errs.requireLength("version", f["version"], 1, 100)
	return errs
}

type acceptanceView struct {
	Version    string    `json:"version"`
	AcceptedAt timestamp `json:"acceptedAt"`
}

func (acceptanceView) validate() fieldErrors { return nil }

// acceptTerms records the acceptance. The update changes nothing, but returns
// the row of a user who has accepted before.
func (s *server) acceptTerms(r *request) (output, error) {
	if r.fields["version"] != TERMS_VERSION {
		return nil, newProblem(409, "conflict",
			"The current version of the terms is "+TERMS_VERSION+".")
	}
	var v acceptanceView
	err := s.store.write(`
		insert into terms_acceptances (user_id, version) values ($1, $2)
		on conflict (user_id, version) do update set version = excluded.version
		returning version, accepted_at`,
		[]any{r.user.UserID, TERMS_VERSION}, &v.Version, &v.AcceptedAt.Time)
	if err != nil {
		return nil, endedIfUserGone(err)
	}
	return v, nil
}

// logout clears the cookie. A copy of the token stays valid until it expires.
func (s *server) logout(r *request) (output, error) {
	s.setSessionCookie(r, "", -1)
	r.log().Info("signed out")
	return nil, nil
}
