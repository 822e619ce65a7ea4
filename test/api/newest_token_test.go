package api

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A newestCase is the values of several cookies of the session's name, in the order in which they are
// sent, and the token that must count. The tokens, by their names:
//
//	new, old, ended  of a user who was signed out everywhere between ended and old
//	other            of another user, newer than all of them
//	soon             of a clock that is half a minute ahead
//	future, farther  of one that is hours ahead
//	nextYear         of one that is a year ahead
//	forged           newer than all, signed with another key
//	expired          older than all
//	deleted          of a user who was deleted, newer than old
type newestCase struct {
	Name, Rule string
	Cookies    string // words; others than the names above are sent as they are
	Counts     string // the token whose session is seen; "" if there is none
	Want       answer
}

// T7, T9: Of several cookies of the name, the newest token that verifies counts, in whatever order a
// browser sends them, and whatever else of this name it sends. A token of a clock that is ahead comes
// last.
func TestNewestTokenCounts(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	ada, adaID := s.NewUser(t, "member")
	ben, benID := s.NewUser(t, "member")
	key, otherKey := s.Env["SESSION_SECRET"], "another-key-of-more-than-thirty-two-bytes"
	payload := func(iat, exp string) *string {
		text := `{"email":"<email>","userId":"<userId>","iat":<now` + iat + `>,"exp":<now` + exp + `>}`
		return &text
	}
	tokens := map[string]string{}
	for name, made := range map[string]struct{ email, userID, iat, exp, key string }{
		"new":      {ada, adaID, "-10", "+1000", key},
		"old":      {ada, adaID, "-1000", "+2000", key},
		"ended":    {ada, adaID, "-3000", "+3000", key},
		"other":    {ben, benID, "-5", "+4000", key},
		"soon":     {ada, adaID, "+30", "+5000", key},
		"future":   {ada, adaID, "+7200", "+9000", key},
		"farther":  {ben, benID, "+9000", "+9999", key},
		"nextYear": {ben, benID, "+31536000", "+36720000", key},
		"forged":   {ada, adaID, "-1", "+6000", otherKey},
		"expired":  {ada, adaID, "-9000", "-60", key},
		"deleted":  {"gone@example.com", hubstest.NewUUID(), "-100", "+7000", key},
	} {
		tokens[name] = token{Payload: payload(made.iat, made.exp)}.sign(made.key,
			"<email>", made.email, "<userId>", made.userID)
	}
	hubstest.Exec(t, s.Database, `update users set signed_out_at = now() - interval '2000 s'
		where user_id = $1`, adaID)

	runCases(t, newestCases, func(t *testing.T, c newestCase) {
		var sent []string
		for word := range strings.FieldsSeq(c.Cookies) {
			if token := tokens[word]; token != "" {
				word = s.CookieName() + "=" + token
			}
			sent = append(sent, word)
		}
		want := c.Want
		if c.Counts != "" {
			_, claims := hubstest.ReadToken(t, named(t, tokens, c.Counts))
			want = answer{Status: 200, Body: values{"user.email": claims["email"]}}
		}
		r := onTheWire(t, s, "GET /auth/session", nil, "X-Forwarded-For", hubstest.NewIP(),
			"Cookie", strings.Join(sent, "; "))
		wantAnswer(t, r, want)
		if r.Status == 200 {
			_, claims := hubstest.ReadToken(t, tokens[c.Counts])
			wantEqual(t, "expiresAt", float64(timeOf(t, r, "expiresAt").Unix()), claims["exp"])
		}
	})
}

var newestCases = []group[newestCase]{
	{Each: newestCase{Rule: "T7", Want: ok}, Cases: []newestCase{
		{Name: "new, old", Cookies: "new old", Counts: "new"},
		{Name: "old, new", Cookies: "old new", Counts: "new"},
		{Name: "ended, new", Cookies: "ended new", Counts: "new"},
		{Name: "new, ended", Cookies: "new ended", Counts: "new"},
		{Name: "ended, new, old", Cookies: "ended new old", Counts: "new"},
		{Name: "old, ended", Cookies: "old ended", Counts: "old"},
		{Name: "another user's is the newest", Cookies: "new other", Counts: "other"},
		{Name: "another user's is the newest, and comes first", Cookies: "other new", Counts: "other"},
		{Name: "forged, new", Cookies: "forged new", Counts: "new"},
		{Name: "old, forged, ended", Cookies: "old forged ended", Counts: "old"},
		{Name: "expired, new", Cookies: "expired new", Counts: "new"},
		{Name: "new, expired", Cookies: "new expired", Counts: "new"},
		{Name: "others around them",
			Cookies: "theme=dark ended hubs_auth_local= x=y new hubs_auth_staging=old hubs_auth_local=z",
			Counts:  "new"},
		{Name: "eight, the newest last", Cookies: "ended old forged expired ended old forged new",
			Counts: "new"},
		{Name: "of a clock that is a little ahead", Cookies: "new soon old", Counts: "soon"},
	}},
	{Each: newestCase{Rule: "T9", Want: ok}, Cases: []newestCase{
		{Name: "future, new", Cookies: "future new", Counts: "new"},
		{Name: "new, future", Cookies: "new future", Counts: "new"},
		{Name: "old between two of the future", Cookies: "future old farther", Counts: "old"},
		{Name: "a clock that is a year ahead", Cookies: "nextYear new", Counts: "new"},
		{Name: "a clock that is a year ahead, last", Cookies: "old future nextYear", Counts: "old"},
		{Name: "a clock a little ahead, and one far ahead", Cookies: "farther soon", Counts: "soon"},
	}},
	{Each: newestCase{Rule: "T7", Want: fails(401, "unauthenticated")}, Cases: []newestCase{
		{Name: "ended twice", Cookies: "ended ended"},
		{Name: "ended, expired", Cookies: "ended expired"},
		{Name: "forged, expired", Cookies: "forged expired"},
		{Name: "a deleted user's is the newest", Cookies: "old deleted"},
		{Name: "future alone", Rule: "T9", Cookies: "future"},
		{Name: "future, forged", Rule: "T9", Cookies: "future forged"},
		{Name: "future, farther", Rule: "T9", Cookies: "future farther"},
		{Name: "future and ended: none opens a session", Rule: "T9", Cookies: "future ended"},
	}},
}

// T7, T9: If the server's clock is an hour behind the database's, all tokens seem to be of the future.
// Then the newest counts, too.
func TestNewestTokenCountsThoughTheClockIsBehind(t *testing.T) {
	t.Parallel()
	// PostgreSQL takes clock_timestamp from the first schema in search_path that has it.
	database := hubstest.NewDatabase(t)
	hubstest.Exec(t, database, "create schema shifted; grant usage on schema shifted to public")
	hubstest.Exec(t, database, `create function shifted.clock_timestamp() returns timestamptz
		language sql return pg_catalog.clock_timestamp() + interval '1 hour'`)
	s := hubstest.Start(t, map[string]string{
		"DATABASE_URL": database + "&search_path=shifted,pg_catalog,public",
	})
	email, userID := s.NewUser(t, "member")
	fresh := s.SignIn(t, email).Token()
	payload := `{"email":"<email>","userId":"<userId>","iat":<now+3000>,"exp":<now+9000>}`
	ended := token{Payload: &payload}.sign(s.Env["SESSION_SECRET"],
		"<email>", email, "<userId>", userID)
	hubstest.Exec(t, database, "update users set signed_out_at = now() + interval '58 minutes'")
	s.With(t, ended).Get("/auth/session").Want(t, 401)
	for _, tokens := range [][]string{{ended, fresh}, {fresh, ended}, {ended, fresh, ended}} {
		var cookies []string
		for _, token := range tokens {
			cookies = append(cookies, s.CookieName()+"="+token)
		}
		onTheWire(t, s, "GET /auth/session", nil, "Cookie", strings.Join(cookies, "; ")).Want(t, 200)
	}
}

// T7: After a change of COOKIE_DOMAIN, a browser sends the old cookie first, with each request. A user
// who is signed out everywhere can still sign in again.
func TestSignInWorksBesideAnOldCookie(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	email, _ := s.NewUser(t, "member")
	c := s.SignIn(t, email)
	base, err := url.Parse(s.Base)
	hubstest.Must(t, err)
	// Of two cookies of a name, a browser sends the one with the longer path first.
	for _, path := range []string{"/auth", "/auth/session"} {
		c.HTTP.Jar.SetCookies(base, []*http.Cookie{{
			Name: s.CookieName(), Value: c.Token(), Path: path, Secure: true,
		}})
	}
	hubstest.Exec(t, s.Database, "update users set signed_out_at = now() + interval '1 second'")
	hubstest.WaitUntil(t, "the second of the sign-out is over", func() bool {
		return hubstest.Query[bool](t, s.Database, "select now() > signed_out_at + interval '1 s' from users")
	})
	c.Get("/auth/session").WantProblem(t, 401, "unauthenticated")
	fresh := s.SignIn(t, email)
	c.SetToken(fresh.Token()) // as the answer to a sign-in of this client would
	c.Get("/auth/session").Want(t, 200)
}

// D3, O7: However often a mail fails, and in whatever way, the next request mails at once, and brings
// the same code.
func TestFailedMailsCountAsNotSent(t *testing.T) {
	t.Parallel()
	s := startFailing(t, hubstest.MailCloses)
	email, _ := s.NewUser(t, "member")
	c := s.Client(t)
	fail := func(mode hubstest.MailMode) {
		before := s.Log.Count(`"msg":"code not sent"`)
		s.Mail.Fail(mode)
		c.AskCode(email)
		hubstest.WaitFor(t, "failed mails", before+1, func() int {
			return s.Log.Count(`"msg":"code not sent"`)
		})
	}
	fail(hubstest.MailCloses) // before the sender is named
	fail(hubstest.MailRepeats)
	code := s.Code(t, email) // that mail arrived, although it was refused
	c.PresentCode(email, hubstest.OtherCode(code, 1)).WantProblem(t, 401, "invalid_code")
	fail(hubstest.MailCloses)
	s.Mail.Fail(hubstest.MailWorks)
	c.AskCode(email)
	wantEqual(t, "the code that is mailed at last", s.Code(t, email), code)
	waitLogged(t, s, c.AskCode(email), "the last mail is too young") // it was not refused
	c.PresentCode(email, code).Want(t, 200)
}
