package api

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// wantLogged waits for a line of the log about a request that was answered.
func wantLogged(
	t testing.TB, s *hubstest.Server, r *hubstest.Response, parts ...string,
) string {
	t.Helper()
	id := `"requestId":"` + r.Header.Get("X-Request-Id") + `"`
	return s.Log.WaitFor(t, append(parts, id)...)
}

// A logCase is a request and its line in the log. log.json says what the members mean.
type logCase struct {
	Name    string
	As      string
	Request string
	Headers []string
	Line    json.RawMessage
}

// One line a request on staging and production, with these members, and no others.
func TestRequestLog(t *testing.T) {
	t.Parallel()
	origins := map[string]string{"ALLOWED_ORIGINS": "https://app.example.com"}
	s, admin := start(t,
		"admin", staging(t), origins)
	hub := admin.Send("POST /hubs", `{"name":"North"}`).Want(t, 201)
	large := make([]byte, 1<<20) // sent in several pieces
	file := admin.Upload("plan.txt", large).Want(t, 201)
	session := admin.Get("/auth/session")
	words := []string{
		"<userId>", session.Field(t, "user", "userId").(string),
		"<hubId>", hub.Field(t, "hubId").(string),
		"<fileId>", file.Field(t, "fileId").(string),
		"<file>", file.Header.Get("Location"),
	}
	clients := map[string]*hubstest.Client{
		"admin":  admin,
		"nobody": s.Client(t),
	}
	for _, c := range hubstest.ReadCases[logCase](t, "testdata/log.json") {
		t.Run(c.Name, func(t *testing.T) {
			client := clients[c.As].In(t)
			request := hubstest.FillIn(c.Request, words...)
			method, path, _ := strings.Cut(request, " ")
			var body any
			if method == "POST" {
				body = `{"name":"opaque"}`
			}
			r := client.Do(method, path, body, c.Headers...)
			want := map[string]any{
				"level":     "INFO",
				"msg":       "request",
				"requestId": r.Header.Get("X-Request-Id"),
				"client":    client.IP,
				"method":    method,
				"status":    float64(r.Status),
				"bytes":     float64(len(r.Body)),
			}
			line := hubstest.FillIn(string(c.Line), words...)
			hubstest.Decode(t, c.Name, line, &want)
			wantLine(t,
				wantLogged(t, s, r, `"msg":"request"`), want)
		})
	}
}

// wantLine checks the members of a line, but for the values of its times. A member that is nil
// must not be there.
func wantLine(
	t *testing.T, line string, want map[string]any,
) {
	t.Helper()
	var got map[string]any
	hubstest.Decode(t, line, line, &got)
	for _, name := range []string{"time", "duration"} {
		if got[name] == nil {
			t.Errorf("no %s in %v", name, got)
		}
		delete(got, name)
	}
	maps.DeleteFunc(want, func(_ string, value any) bool {
		return value == nil
	})
	if !maps.Equal(got, want) {
		t.Errorf("got\n%v\nwant\n%v", got, want)
	}
}

// Where a client can write: in a path, where WORD is its word, and in a header.
const (
	writtenPaths = "/WORD /nowhere?WORD /hubs/WORD /files/WORD/WORD /hubs?q=WORD /hubs?WORD=1 " +
		"/hubs?filters[name]=WORD /hubs?orderBy=WORD /hubs?limit=WORD /healthz?WORD"
	writtenHeaders = "User-Agent Origin Content-Type Authorization Referer Cookie Range " +
		"X-Forwarded-Host Access-Control-Request-Method If-None-Match"
)

// G2: no text that a client wrote gets into the log, wherever it stands in the request. Each of
// the requests has its line.
func TestLogHasNothingOfTheClients(t *testing.T) {
	t.Parallel()
	s, member := start(t, "member", staging(t))
	logged := func(answer *hubstest.Response) {
		t.Helper()
		wantLogged(t, s, answer, `"msg":"request"`)
	}
	long := strings.Repeat("opaque", 1000)
	for _, word := range []string{"opaque", "opaque@b.example", "code=opaque", long} {
		for path := range strings.FieldsSeq(strings.ReplaceAll(writtenPaths, "WORD", word)) {
			logged(member.Elsewhere().Get(path))
		}
		hub := map[string]string{"name": word}
		for name := range strings.FieldsSeq(writtenHeaders) {
			c := member.Elsewhere()
			logged(c.Get("/healthz", name, word))
			logged(c.Send("OPTIONS /hubs", nil,
				name, word,
				"Sec-Fetch-Site", "cross-site"))
			logged(c.Send("POST /hubs", hub,
				name, word,
				"Sec-Fetch-Site", "cross-site"))
		}
		c := member.Elsewhere()
		logged(c.Send("OPAQUE /hubs", nil))
		logged(c.Send(askRoute, map[string]string{
			"email":  word,
			"opaque": word,
		}))
		logged(c.PresentCode(word, word))
		logged(c.Upload(word, []byte(word)))
	}
	s.Stop(t)
	for _, line := range s.Log.All() {
		if strings.Contains(strings.ToLower(line), "opaque") {
			t.Errorf("got %s, want nothing of the client's", line)
		}
	}
}

// The local environment writes no line a request: there, people watch the log for codes. A code
// is a line of its own with the whole address as it is stored, between blank lines.
func TestLocalLog(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email := hubstest.NewEmail()
	stored := strings.Replace(email, "user", "User", 1)
	s.User(t, "add", stored)
	s.Client(t).AskCode(email)
	code := s.Code(t, email)
	s.Stop(t)
	text := s.Log.String()
	want := "\n\nSign-in code for " + stored + ": " + code + "\n\n"
	if !strings.Contains(text, want) {
		t.Errorf("got\n%s\nwant the code between blank lines: %s", text, want)
	}
	n := s.Log.Count(`"msg":"request"`)
	if n != 0 {
		t.Errorf("got %d request lines, want 0", n)
	}
}

// G4: one line for each sign-in, refusal and sign-out, in every environment, under the id of its
// request. It names the user of a session that was ended or suspended: who is it that still
// tries?
func TestEventsInTheLog(t *testing.T) {
	t.Parallel()
	for name, env := range map[string]map[string]string{
		"local":      nil,
		"production": production(t),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := hubstest.Start(t, env)
			email, _ := s.NewUser(t, "member")
			c := s.Client(t)
			const someone = `"userId":"`
			refused := func(code string, parts ...string) {
				t.Helper()
				parts = append(parts, `"msg":"refused"`, `"code":"`+code, `"route":"/hubs"`)
				wantLogged(t, s, c.Get("/hubs"), parts...)
			}
			wantLogged(t, s, c.AskCode(email),
				`"msg":"code sent"`, hubstest.MaskedEmail(email))
			code := s.Code(t, email)
			wrong := c.PresentCode(email, hubstest.OtherCode(code, 1))
			wantLogged(t, s, wrong, `"msg":"refused"`, `"code":"invalid_code"`)
			right := c.PresentCode(email, code)
			wantLogged(t, s, right, `"msg":"signed in"`, someone)
			refused("terms_not_accepted", someone)
			token := c.Token()
			out := c.Send("POST /auth/logout", nil)
			wantLogged(t, s, out, `"msg":"signed out"`, someone)
			refused("unauthenticated", `"reason":"missing"`)
			c.SetToken(token)
			s.User(t, "suspend", email)
			refused("account_suspended", someone)
			s.User(t, "signout", email)
			refused("unauthenticated", `"reason":"ended"`, someone)
			limited := flood(t, s.Client(t), "GET /nowhere")
			wantLogged(t, s, limited, `"msg":"refused"`, `"code":"rate_limited"`)
		})
	}
}

// G2, D3: what a mail server says is logged, but masked: it knows the address and the code, and
// may say both. The harness looks for them in every log.
func TestMailServersWordsAreMasked(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	s.Mail.Fail(hubstest.MailRepeats)
	email := failToSend(t, s)
	line := s.Log.WaitFor(t,
		`"msg":"code not sent"`, "554", hubstest.MaskedEmail(email))
	if s.Code(t, email); strings.Contains(line, "hunter2") {
		t.Errorf("got %s, want no password", line)
	}
}

// K3: on staging and production, a database role that may write users in any way is a warning at
// the start. Locally, and for a role that only reads them, there is none.
func TestPowerfulDatabaseRole(t *testing.T) {
	t.Parallel()
	const warning = "the database role may write users: use the role of deploy/roles.sql"
	database := hubstest.NewDatabase(t)
	staging := staging(t)
	for _, test := range []struct {
		env    map[string]string
		grant  string // on users
		warned int
	}{
		{staging, "select", 0},
		{staging, "select, insert", 1},
		{staging, "select, delete", 1},
		{production(t), "select, update (permission)", 1},
		{nil, "select, insert, update, delete", 0},
	} {
		t.Run(test.env["APP_ENV"]+" "+test.grant, func(t *testing.T) {
			role, url := hubstest.NewRole(t, database)
			hubstest.Exec(t, database, "grant select on all tables in schema public to "+role)
			hubstest.Exec(t, database,
				"grant "+test.grant+" on users to "+role)
			s := hubstest.Start(t, test.env,
				map[string]string{"DATABASE_URL": url})
			s.Stop(t)
			got := s.Log.Count(`"level":"WARN"`, warning)
			if got != test.warned {
				t.Errorf("got %d warnings, want %d:\n%s", got, test.warned, s.Log)
			}
		})
	}
}
