package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// startStaging starts a server that logs each request.
func startStaging(t *testing.T) *hubstest.Server {
	t.Helper()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	origins := map[string]string{"ALLOWED_ORIGINS": "https://app.example.com"}
	return hubstest.Start(t, hubstest.StagingEnv(mail), origins)
}

// logLine decodes the line of a request.
func logLine(t *testing.T, srv *hubstest.Server, id string) (line map[string]any) {
	t.Helper()
	text := srv.Log.WaitFor(t, `"msg":"request"`, `"requestId":"`+id+`"`)
	if err := json.Unmarshal([]byte(text), &line); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return line
}

// One line a request on staging and production, with these members, and no others.
func TestRequestLog(t *testing.T) {
	t.Parallel()
	srv := startStaging(t)
	admin, email := srv.Member(t, "admin")
	user := hubstest.Query[string](t, srv.Env["DATABASE_URL"],
		"select user_id from users where email = $1", email)
	hub := admin.Do("POST", "/hubs", `{"name":"North"}`).Want(t, 201).Field(t, "hubId").(string)
	file := admin.Upload("plan.txt", make([]byte, 1<<20)) // sent in several pieces
	file.Want(t, 201)
	path := file.Header.Get("Location")
	session := map[string]any{"userId": user, "cookie": "***"}
	with := func(members map[string]any, pairs ...string) map[string]any {
		members = maps.Clone(members)
		for pair := range slices.Chunk(pairs, 2) {
			members[pair[0]] = pair[1]
		}
		return members
	}
	atHubs := with(session, "route", "/hubs")
	atHub := with(session, "route", "/hubs/{hubId}")
	atFile := with(session,
		"route", "/files/{fileId}/{name}",
		"fileId", file.Field(t, "fileId").(string))
	atHealth := map[string]any{"route": "/healthz"}
	foreign := []string{"Origin", "https://opaque.example.com"}
	isForeign := map[string]any{"origin": "(host of 18 characters)"}
	everything := with(atHubs,
		"origin", "https://app.example.com",
		"authorization", "***",
		"query", "limit=7&orderBy=name&filters[name]=(11 characters)&filters[status]=active")
	visitor := srv.Client(t)
	for i, test := range []struct {
		client  *hubstest.Client
		request string
		headers []string
		want    map[string]any
	}{
		{
			admin,
			"GET /hubs?limit=7&filters[name]=Secret%20name&orderBy=name&filters[status]=active",
			[]string{"Origin", "https://app.example.com", "Authorization", "Bearer x"},
			everything,
		},
		{visitor, "GET /healthz?token=opaque", nil, atHealth},
		{admin, "GET /hubs/" + hub + "?x=opaque", nil, with(atHub, "hubId", hub)},
		{admin, "GET /hubs/opaque", nil, atHub},
		{admin, "GET " + path, nil, atFile},
		{admin, "GET " + path, []string{"Range", "bytes=100-300000"}, atFile},
		{admin, "HEAD " + path, nil, atFile},
		{admin, "GET /hubs?limit=opaque&offset=1&offset=2&filters[status]=", nil, atHubs},
		{admin, "GET /hubs?limit=7&a=%zz", nil, atHubs},
		{admin, "POST /hubs?x=opaque", nil, atHubs},
		{visitor, "GET /opaque?q=opaque", nil, nil},
		{visitor, "OPAQUE /hubs", nil, map[string]any{"method": nil}},
		{visitor, "POST /healthz", foreign, isForeign},
		{visitor, "GET /healthz", foreign, with(isForeign, "route", "/healthz")},
	} {
		t.Run(test.request, func(t *testing.T) {
			id := fmt.Sprintf("line-%d", i)
			method, path, _ := strings.Cut(test.request, " ")
			var body any
			if method == "POST" {
				body = `{"name":"opaque"}`
			}
			headers := append([]string{"X-Request-Id", id}, test.headers...)
			answer := test.client.Do(method, path, body, headers...)
			got := logLine(t, srv, id)
			want := map[string]any{
				"level":     "INFO",
				"msg":       "request",
				"requestId": id,
				"client":    test.client.IP,
				"method":    method,
				"status":    float64(answer.Status),
				"bytes":     float64(len(answer.Body)),
			}
			maps.Copy(want, test.want)
			for _, name := range []string{"time", "duration"} {
				if got[name] == nil {
					t.Errorf("no %s in %v", name, got)
				}
				delete(got, name)
			}
			maps.DeleteFunc(want, func(_ string, value any) bool { return value == nil })
			if !maps.Equal(got, want) {
				t.Errorf("got\n%v\nwant\n%v", got, want)
			}
		})
	}
}

// G2: no text that a client wrote gets into the log, wherever it stands in the request.
func TestLogHasNothingOfTheClients(t *testing.T) {
	t.Parallel()
	srv := startStaging(t)
	member, _ := srv.Member(t, "member")
	long := strings.Repeat("opaque", 1000)
	for _, word := range []string{"opaque", "opaque@b.example", "code=opaque", long} {
		for _, target := range []string{
			"/" + word, "/nowhere?" + word, "/hubs/" + word, "/files/" + word + "/" + word,
			"/hubs?q=" + word, "/hubs?" + word + "=1", "/hubs?filters[name]=" + word,
			"/hubs?orderBy=" + word, "/hubs?limit=" + word, "/healthz?" + word,
		} {
			member.Elsewhere().Get(target)
		}
		for _, name := range []string{
			"User-Agent", "Origin", "Content-Type", "Authorization", "Referer", "Cookie", "Range",
			"X-Forwarded-Host", "Access-Control-Request-Method", "If-None-Match",
		} {
			c := member.Elsewhere()
			c.Get("/healthz", name, word)
			c.Do("OPTIONS", "/hubs", nil, name, word, "Sec-Fetch-Site", "cross-site")
			c.Do("POST", "/hubs", `{"name":"`+word+`"}`, name, word, "Sec-Fetch-Site", "cross-site")
		}
		c := member.Elsewhere()
		c.Do("OPAQUE", "/hubs", nil)
		c.Do("POST", "/auth/otp/request", map[string]any{"email": word, "opaque": word})
		c.Do("POST", "/auth/otp/validate", map[string]any{"email": word, "code": word})
		c.Upload(word, []byte(word))
	}
	srv.Stop(t)
	for _, line := range srv.Log.All() {
		if strings.Contains(strings.ToLower(line), "opaque") {
			t.Errorf("got %s, want nothing of the client's", line)
		}
	}
}

// The local environment writes no line a request: there, people watch the log for codes. A code
// is a line of its own with the whole address as it is stored, between blank lines.
func TestLocalLog(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	email := hubstest.NewEmail()
	stored := strings.Replace(email, "user", "User", 1)
	hubstest.AddUser(t, srv.Env["DATABASE_URL"], stored, "member")
	srv.Client(t).AskCode(email)
	code := srv.Code(t, email)
	srv.Stop(t)
	text := srv.Log.String()
	if want := "\n\nSign-in code for " + stored + ": " + code + "\n\n"; !strings.Contains(text, want) {
		t.Errorf("got\n%s\nwant the code between blank lines: %s", text, want)
	}
	if n := srv.Log.Count(`"msg":"request"`); n != 0 {
		t.Errorf("got %d request lines, want 0", n)
	}
}

// G4: one line for each sign-in, refusal and sign-out, in every environment, under the id of its
// request. It names the user of a session that was ended or suspended: who is it that still
// tries?
func TestEventsInTheLog(t *testing.T) {
	t.Parallel()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	for name, env := range map[string]map[string]string{
		"local":      nil,
		"production": hubstest.ProductionEnv(mail),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := hubstest.Start(t, env)
			email, _ := srv.NewUser(t, "member")
			db := srv.Env["DATABASE_URL"]
			c := srv.Client(t)
			step := func(method, path string, body any, parts ...string) {
				t.Helper()
				mark := srv.Log.Mark()
				c.Do(method, path, body, "X-Request-Id", "step")
				srv.Log.WaitAfter(t, mark, append(parts, `"requestId":"step"`)...)
			}
			refused := func(code string, parts ...string) {
				t.Helper()
				parts = append(parts, `"msg":"refused"`, `"code":"`+code, `"route":"/hubs"`)
				step("GET", "/hubs", nil, parts...)
			}
			guess := map[string]any{"email": email}
			step("POST", "/auth/otp/request", guess, `"msg":"code sent"`, hubstest.MaskedEmail(email))
			code := srv.Code(t, email)
			guess["code"] = hubstest.OtherCode(code, 1)
			step("POST", "/auth/otp/validate", guess, `"msg":"refused"`, `"code":"invalid_code"`)
			guess["code"] = code
			step("POST", "/auth/otp/validate", guess, `"msg":"signed in"`, `"userId":"`)
			refused("terms_not_accepted", `"userId":"`)
			token := c.Token()
			step("POST", "/auth/logout", nil, `"msg":"signed out"`, `"userId":"`)
			refused("unauthenticated", `"reason":"missing"`)
			c.SetToken(token)
			hubstest.Exec(t, db, "update users set suspended = true")
			refused("account_suspended", `"userId":"`)
			hubstest.Exec(t, db, "update users set signed_out_at = clock_timestamp()")
			refused("unauthenticated", `"reason":"ended"`, `"userId":"`)
			flood(t, srv, "GET", "/nowhere", "X-Request-Id", "flood").Want(t, 429)
			srv.Log.WaitFor(t, `"msg":"refused"`, `"code":"rate_limited"`, `"requestId":"flood"`)
		})
	}
}

// G2, D3: what a mail server says is logged, but masked: it knows the address and the code, and
// may say both. The harness looks for them in every log.
func TestMailServersWordsAreMasked(t *testing.T) {
	t.Parallel()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	mail.Fail(hubstest.MailRepeats)
	srv := hubstest.Start(t, hubstest.StagingEnv(mail))
	srv.AllowErrors("code not sent")
	email, _ := srv.NewUser(t, "member")
	srv.Client(t).AskCode(email)
	line := srv.Log.WaitFor(t, `"msg":"code not sent"`, "554", hubstest.MaskedEmail(email))
	if mail.WaitMail(t, email).Code(t); strings.Contains(line, "hunter2") {
		t.Errorf("got %s, want no password", line)
	}
}

// K3: on staging and production, a database role that may write users in any way is a warning at
// the start. Locally, and for a role that only reads them, there is none.
func TestPowerfulDatabaseRole(t *testing.T) {
	t.Parallel()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	db := hubstest.NewDatabase(t)
	staging := hubstest.StagingEnv(mail)
	for i, test := range []struct {
		env    map[string]string
		grant  string // on users
		warned int
	}{
		{staging, "select", 0},
		{staging, "select, insert", 1},
		{staging, "select, delete", 1},
		{hubstest.ProductionEnv(mail), "select, update (permission)", 1},
		{nil, "select, insert, update, delete", 0},
	} {
		t.Run(test.env["APP_ENV"]+" "+test.grant, func(t *testing.T) {
			role := fmt.Sprintf("role_%d_%d", os.Getpid(), i)
			hubstest.Exec(t, db, "create role "+role+" login password 'role'")
			t.Cleanup(func() { hubstest.Exec(t, db, "drop owned by "+role+"; drop role "+role) })
			hubstest.Exec(t, db, "grant select on all tables in schema public to "+role)
			hubstest.Exec(t, db, "grant "+test.grant+" on users to "+role)
			url := hubstest.WithUser(t, db, role, "role")
			srv := hubstest.Start(t, test.env, map[string]string{"DATABASE_URL": url})
			srv.Stop(t)
			warning := "the database role may write users: use the role of deploy/roles.sql"
			if got := srv.Log.Count(`"level":"WARN"`, warning); got != test.warned {
				t.Errorf("got %d warnings, want %d:\n%s", got, test.warned, srv.Log)
			}
		})
	}
}
