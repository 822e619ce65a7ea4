package main

// Sign-in, in the order in which a user meets it. Then the settings of sessions,
// and the commands for users.
//
// The token proves who signed in, and when. Each request reads all else from
// the database. There is no list of tokens, so an operator can end all sessions
// of a user, but not one alone.
//
// The database's clock dates tokens, sign-outs, and when an account was read for
// a code. If it goes back, all that is ahead of it is refused until it has caught
// up: a token by more than clockStep, a code, and each token and code of a user
// whose sign-out is ahead (T9).

import (
	"context"
	"database/sql"
	"encoding/json"
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

// TERMS_VERSION is the version of the terms of use and the privacy policy that
// users must accept. The specification prescribes the name.
const TERMS_VERSION = "2026-11-01"

const (
	sessionTTL = 60 * 24 * time.Hour // life of a session token and its cookie
	clockStep  = time.Minute         // a token that is ahead by no more is not from the future
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

// isSignedOutAhead reports whether the clock has gone back behind the sign-out.
// Nobody can tell then what was issued after it.
func (u *user) isSignedOutAhead() bool { return u.signedOutAt.After(u.now) }

// A userCondition is part of a statement. Its own type keeps a text of a client
// from becoming one by mistake (I1).
type userCondition string

const (
	whereID    userCondition = "u.user_id = $1"
	whereEmail userCondition = "lower(u.email) = $1" // the address must be in lower case
)

// loadUser returns nil, and no error, if there is no such user. A second
// statement confirms it, because an answer without rows may be another
// statement's (preparedRead, in store.go), and must not end a session (D6).
func (s *server) loadUser(condition userCondition, key string) (*user, error) {
	u := &user{}
	err := s.store.read(`select u.user_id, u.email, u.permission, u.suspended,
		coalesce(u.signed_out_at, 'epoch'), t.user_id is not null, clock_timestamp()
		from users u left join terms_acceptances t on t.user_id = u.user_id and t.version = $2
		where `+string(condition), []any{key, TERMS_VERSION},
		&u.UserID, &u.Email, &u.Permission, &u.suspended, &u.signedOutAt, &u.termsAccepted, &u.now)
	if err == nil {
		return u, nil
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return nil, err
	}
	var exists bool
	err = s.store.read("select exists (select from users u where "+string(condition)+")",
		[]any{key}, &exists)
	if err == nil && exists {
		err = unavailable(errors.New("the account was added a moment ago, or its row was lost on the way"))
	}
	return nil, err
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

func parseCodeRequest(f fields) (email string, errs fieldErrors) {
	email = f.email()
	errs.requireEmail(email)
	return email, errs
}

type codeAnswer struct {
	CodeLength       int `json:"codeLength"`
	ExpiresInSeconds int `json:"expiresInSeconds"`
}

func (codeAnswer) validate() fieldErrors { return nil }

// requestCode does not look the account up, so neither the answer nor its time
// tells whether there is one (O6).
func (s *server) requestCode(r *request, email string) (output, error) {
	if !s.scheduleCode(email, r.log()) {
		return nil, unavailable(errors.New("too many unfinished requests for a code"))
	}
	return codeAnswer{CodeLength: codeLength, ExpiresInSeconds: int(codeTTL.Seconds())}, nil
}

// guessKey leaves out the client, or many clients would have more guesses than
// one (O4). The price: who keeps guessing locks an address out of sign-in (O8).
func guessKey(r *request) string { return r.fields.email() }

type guess struct{ email, code string }

func parseGuess(f fields) (in guess, errs fieldErrors) {
	in = guess{email: f.email(), code: f["code"]}
	errs.requireEmail(in.email)
	errs.require(codePattern.MatchString(in.code), "code", "must be six digits, 0 to 9")
	return in, errs
}

// validateCode exchanges an address and its code for a session. It refuses
// unknown addresses and wrong, used or expired codes alike. Only a right code
// causes a query.
func (s *server) validateCode(r *request, in guess) (output, error) {
	code := s.codes.find(in.email, in.code) // not used up yet: the database may be away
	if code == nil {
		return nil, errInvalidCode
	}
	u, err := s.loadUser(whereEmail, in.email)
	if err != nil {
		return nil, err
	}
	if u == nil { // deleted, or its address changed, after the code was sent
		return nil, errInvalidCode
	}
	r.user = u
	if reason := code.whyNotFor(u, 0); reason != "" {
		return nil, errInvalidCode.because(reason)
	}
	// Of several requests with the same code, only one removes it (O3).
	if !s.codes.remove(in.email, code) {
		return nil, errInvalidCode
	}
	if u.suspended { // only now: who has no code does not learn it
		return nil, errSuspended
	}
	// Both times are the database's, in whole seconds. sessionToken.whyRefused
	// compares iat with signedOutAt.
	r.session = sessionToken{Email: u.Email, UserID: u.UserID}
	r.session.IssuedAt = jwt.NewNumericDate(u.now)
	r.session.ExpiresAt = jwt.NewNumericDate(u.now.Add(sessionTTL))
	s.setSessionCookie(r, s.signToken(r.session), int(sessionTTL.Seconds()))
	s.warnOfCookieDomain(r)
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
	jwt.WithoutClaimsValidation(),           // whyRefused compares the times with the database's clock
)

// verifyToken checks the form and the signature of a token (T1).
func (s *server) verifyToken(text string) (sessionToken, error) {
	if len(text) > maxToken {
		return sessionToken{}, unauthenticated("forged")
	}
	var token sessionToken
	parsed, err := tokenParser.ParseWithClaims(text, &token, func(*jwt.Token) (any, error) {
		return s.cfg.sessionKeys, nil // the library tries each key
	})
	if err != nil {
		return sessionToken{}, unauthenticated("forged")
	}
	_, isCritical := parsed.Header["crit"] // RFC 7515 4.1.11: no extension is supported
	hasTimes := token.IssuedAt != nil && token.ExpiresAt != nil
	if isCritical || !hasTimes || !isUUID(token.UserID) {
		return sessionToken{}, unauthenticated("forged")
	}
	return token, nil
}

// whyRefused returns, in one word for the log, why a token opens no session of
// its user, or "". All times are the database's (T2). A token of a clock that
// was ahead by more than clockStep could outlive a sign-out (T9).
func (token sessionToken) whyRefused(u *user) string {
	switch {
	case token.IssuedAt.After(u.now.Add(clockStep)), u.isSignedOutAhead():
		return "future"
	case !u.now.Before(token.ExpiresAt.Time):
		return "expired"
	// iat has whole seconds, so a token of the very second of the sign-out is
	// refused, too.
	case u.Email != token.Email, !token.IssuedAt.After(u.signedOutAt):
		return "ended"
	}
	return ""
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

// warnOfCookieDomain warns if a browser will drop the cookie. It does not print
// the host, which the client has written.
func (s *server) warnOfCookieDomain(r *request) {
	host, _, _ := strings.Cut(strings.ToLower(r.Host), ":")
	domain := s.cfg.cookieDomain
	if domain != "" && host != domain && !strings.HasSuffix(host, "."+domain) {
		s.cookieWarning.Do(func() {
			r.log().Warn("COOKIE_DOMAIN does not cover the host of this request, so a browser drops the " +
				"cookie; or a proxy has changed the header Host")
		})
	}
}

// readToken returns the newest token that verifies, of the first maxCookies.
// After a change of COOKIE_DOMAIN, a browser sends the old cookie beside the new
// one (T7). A token from the future counts as older than any other, or it would
// hide each new sign-in. Only here, this process's clock tells what the future is.
func (s *server) readToken(r *request) (sessionToken, error) {
	latest := time.Now().Add(clockStep)
	isNewer := func(a, b sessionToken) bool {
		aIsFuture, bIsFuture := a.IssuedAt.After(latest), b.IssuedAt.After(latest)
		if aIsFuture != bIsFuture {
			return bIsFuture
		}
		return a.IssuedAt.After(b.IssuedAt.Time)
	}
	var newest *sessionToken
	var refusal error = unauthenticated("missing")
	cookies := r.CookiesNamed(s.cfg.cookieName)
	for _, cookie := range cookies[:min(len(cookies), maxCookies)] {
		token, err := s.verifyToken(cookie.Value)
		if err != nil {
			refusal = err
		} else if newest == nil || isNewer(token, *newest) {
			newest = &token
		}
	}
	if newest == nil {
		return sessionToken{}, refusal
	}
	return *newest, nil
}

// authorize reads the account each time, so a change acts at the user's next
// request (T5).
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
	if reason := token.whyRefused(u); reason != "" {
		return unauthenticated(reason)
	}
	needs := r.route.access
	switch {
	case u.suspended:
		return errSuspended
	case needs.terms && !u.termsAccepted:
		return errTermsMissing
	case needs.roles != nil && !slices.Contains(needs.roles, u.Permission):
		return errForbidden
	}
	return nil
}

// endedIfUserGone returns a 401 if the user of a write was deleted meanwhile.
func endedIfUserGone(err error) error {
	if sqlState(err) == "23503" { // foreign_key_violation
		return unauthenticated("ended")
	}
	return err
}

func parseAcceptance(f fields) (version string, errs fieldErrors) {
	version = f["version"]
	errs.requireLength("version", version, 1, 100)
	return version, errs
}

type acceptanceView struct {
	Version    string    `json:"version"`
	AcceptedAt timestamp `json:"acceptedAt"`
}

func (acceptanceView) validate() fieldErrors { return nil }

// acceptTerms records the acceptance. The update changes nothing; it returns the
// row of an earlier one.
func (s *server) acceptTerms(r *request, version string) (output, error) {
	if version != TERMS_VERSION {
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

// The settings of sessions.

const placeholderKey = "REPLACE-WITH-THE-OUTPUT-OF-openssl-rand-base64-48"

// readSessionKeys requires keys as long as the hash (RFC 7518 3.2), of more
// different bytes than most that are typed by hand (T3).
func readSessionKeys(settings *settingReader) (keys jwt.VerificationKeySet) {
	for key := range strings.SplitSeq(settings.secret("SESSION_SECRET"), ",") {
		different := map[byte]bool{}
		for _, char := range []byte(key) {
			different[char] = true
		}
		isStrong := len(key) >= 32 && len(different) >= 10
		settings.require(isStrong && strings.TrimSpace(key) == key,
			"SESSION_SECRET: each key needs 32 bytes or more, 10 of them different, and no spaces around it")
		settings.require(key != placeholderKey,
			"SESSION_SECRET: is the placeholder; make a key of your own")
		keys.Keys = append(keys.Keys, []byte(key))
	}
	return keys
}

var cookiePrefixPattern = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// readCookie sets the cookie's name and domain (T8). Browsers take __Host- only
// without a Domain, and __Secure- and __Http- only over HTTPS, in any letter case.
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
		settings.require(!strings.HasPrefix(lower, "__secure-") && !strings.HasPrefix(lower, "__http-"),
			"COOKIE_PREFIX: __Secure- and __Http- need HTTPS, which the local environment lacks")
		settings.require(cfg.cookieDomain == "", "COOKIE_DOMAIN: must be unset locally")
		return
	}
	settings.require(isParentDomain(cfg.cookieDomain),
		"COOKIE_DOMAIN: must be a domain such as example.com, not one label, an origin or an IP address")
}

// isParentDomain does not know public suffixes such as co.uk.
func isParentDomain(domain string) bool {
	return strings.Contains(domain, ".") && !endsInDigits(domain) && domainPattern.MatchString(domain)
}

// endsInDigits reports whether the last label is a number, as in an IPv4 address.
func endsInDigits(domain string) bool {
	label := domain[strings.LastIndex(domain, ".")+1:]
	return strings.Trim(label, "0123456789") == ""
}

// The commands for users, which an operator runs.

const userLine = `format('%s  %s  %s  added %s', email, permission,
	case when suspended then 'suspended' else 'active' end, created_at)`

// whereAddress compares addresses as the index users_email has them.
const whereAddress = ` where lower(email) = lower($1 collate "C") `

// signOut never goes back, even if the database's clock does.
const signOut = `greatest(signed_out_at, clock_timestamp())`

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
	"signout": {1, `update users set signed_out_at = ` + signOut + whereAddress +
		`returning format('%s: signed out everywhere', email)`},
	// Without the sign-out, changing the address back would revive old
	// sessions.
	"email": {2, `update users set email = $2, signed_out_at = ` + signOut + whereAddress +
		`returning format('%s: the new address; signed out everywhere', email)`},
	"delete": {1, `delete from users` + whereAddress +
		`returning format('%s: deleted; %s uploaded files stay, and others can read them', email,
			(select count(*) from files f where f.user_id = users.user_id))`},
	"list": {0, "select coalesce(string_agg(" + userLine + `, E'\n' order by lower(email)),
		'there are no users') from users`},
	"show": {1, `select concat_ws(E'\n', ` + userLine + `,
			'  signed out everywhere ' || signed_out_at || case when signed_out_at > clock_timestamp()
				then ': in the future, and no sign-in until then' else '' end,
			(select string_agg(format('  accepted terms %s at %s', version, accepted_at), E'\n'
				order by accepted_at)
				from terms_acceptances t where t.user_id = users.user_id))
		from users` + whereAddress},
	"history": {1, `select coalesce(string_agg(format('%s  %s  %s  %s', changed_at, database_role, program,
			(select string_agg(format('%s: %s → %s', key, coalesce(before ->> key, '-'),
				coalesce(after ->> key, '-')), ', ' order by key)
				from jsonb_object_keys(coalesce(after, before)) key
				where before ->> key is distinct from after ->> key)), E'\n' order by changed_at),
			'no change of this account is on record')
		from account_changes where user_id in (select user_id from users` + whereAddress + `
			union select user_id from account_changes
			where lower($1 collate "C") in (lower((before ->> 'email') collate "C"),
				lower((after ->> 'email') collate "C")))`},
	"export": {1, `select jsonb_build_object('user', to_jsonb(users),
		'terms_acceptances', (select jsonb_agg(t) from terms_acceptances t
			where t.user_id = users.user_id),
		'files', (select jsonb_agg(f) from files f where f.user_id = users.user_id),
		'account_changes', (select jsonb_agg(c order by changed_at) from account_changes c
			where c.user_id = users.user_id))
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
	withFiles := false
	switch name {
	case "add":
		flags.StringVar(&role, "role", role, "")
	case "delete":
		flags.BoolVar(&withFiles, "files", false, "")
	}
	if err := flags.Parse(line[1:]); err != nil {
		return usageError(fmt.Sprintf("user %s: %v\n\n%s", name, err, usage))
	}
	args := flags.Args()
	if len(args) != command.arguments {
		complaint := fmt.Sprintf("user %s: takes %d argument(s), got %d",
			name, command.arguments, len(args))
		flags.VisitAll(func(f *flag.Flag) {
			complaint += "; -" + f.Name + " comes before the address"
		})
		return usageError(complaint + "\n\n" + usage)
	}
	if name == "add" {
		args = append(args, role)
	}
	if err := validateUserArguments(name, args); err != nil {
		return err
	}
	if withFiles {
		return deleteWithFiles(ctx, args[0])
	}
	return runUserCommand(ctx, name, command.text, args)
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

func runUserCommand(ctx context.Context, name, text string, args []string) error {
	conn, err := openForCommand(ctx, "user "+name)
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
		return errNoUser
	}
	if sqlState(err) == "23505" { // unique_violation
		return errors.New("there would be two users with the same address; nothing was changed")
	}
	if err != nil {
		return explainDBError(err)
	}
	if name == "export" {
		answer = addPaths(answer)
	}
	fmt.Println(answer)
	return nil
}

var errNoUser = errors.New("there is no user with this address; \"user list\" shows all")

// addPaths adds the paths of the files to an export, and indents it.
func addPaths(text string) string {
	export := struct {
		User             json.RawMessage  `json:"user"`
		TermsAcceptances json.RawMessage  `json:"terms_acceptances"`
		Files            []map[string]any `json:"files"`
		AccountChanges   json.RawMessage  `json:"account_changes"`
	}{}
	json.Unmarshal([]byte(text), &export) // PostgreSQL has made it
	for _, f := range export.Files {
		f["path"] = filePath(f["file_id"].(string), f["name"].(string))
	}
	indented, _ := json.MarshalIndent(export, "", "  ")
	return string(indented)
}

// deleteWithFiles removes the bytes before the rows that lead to them. So after
// a crash at any step, running it again finishes. The lock on the row keeps
// uploads of the user out.
func deleteWithFiles(ctx context.Context, email string) error {
	files, err := openFilesDir()
	if err != nil {
		return err
	}
	defer files.Close()
	conn, err := openForCommand(ctx, "user delete -files")
	if err != nil {
		return err
	}
	defer conn.Close()
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return explainDBError(err)
	}
	defer tx.Rollback()
	var userID, list string
	err = tx.QueryRowContext(ctx, "select user_id from users"+whereAddress+"for update", email).
		Scan(&userID)
	if errors.Is(err, sql.ErrNoRows) {
		return errNoUser
	}
	if err == nil {
		err = tx.QueryRowContext(ctx, "select coalesce(string_agg(file_id::text, ' '), '') from files "+
			"where user_id = $1", userID).Scan(&list)
	}
	if err != nil {
		return explainDBError(err)
	}
	ids := strings.Fields(list)
	missing := 0
	for _, id := range ids {
		if _, err := files.Stat(id); err != nil {
			missing++
		}
		if err := removeUpload(files, id); err != nil {
			return err
		}
	}
	if err := syncFolder(files); err != nil {
		return err
	}
	_, err = tx.Exec("delete from files where user_id = $1", userID)
	if err == nil {
		_, err = tx.Exec("delete from users where user_id = $1", userID)
	}
	if err == nil {
		err = tx.Commit()
	}
	if err != nil {
		return explainDBError(err)
	}
	fmt.Printf("%s: deleted, and %d uploaded files; %d of them were not in FILES_DIR\n",
		email, len(ids), missing)
	return nil
}
