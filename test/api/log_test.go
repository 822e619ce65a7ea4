package api

import (
	"maps"
	"os"
	"regexp"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// G2: Outside the local environment, each request has a log line with exactly these members. The
// test uses staging.
func TestRequestLog(t *testing.T) {
	t.Parallel()
	origins := map[string]string{"ALLOWED_ORIGINS": "https://app.example.com"}
	s, admin := start(t, "admin", staging(t), origins)
	made := admin.Do("POST /hubs", `{"name":"North"}`).Must(t, 201)
	large := make([]byte, 1<<20) // sent in several pieces
	file := admin.Upload("plan.txt", large).Must(t, 201)
	userID := admin.Get("/auth/session").Field(t, "user.userId")
	hubID := made.Field(t, "hubId")
	fileID := file.Field(t, "fileId")
	path := file.Header.Get("Location")
	nobody := s.Client(t)

	for _, c := range []struct {
		name    string
		asAdmin bool // otherwise, the client has no session
		request string
		headers []string
		line    values // members besides those of every line, and of every line of the admin
	}{
		{name: "a list, without its query", asAdmin: true,
			request: "GET /hubs?limit=7&filters[name]=Secret%20name&orderBy=name&filters[status]=active",
			headers: []string{"Origin", "https://app.example.com", "Authorization", "Bearer x"},
			line:    values{"route": "/hubs", "origin": "https://app.example.com", "authorization": "***"}},
		{name: "an unknown parameter", request: "GET /openapi.json?token=opaque",
			line: values{"route": "/openapi.json"}},
		{name: "one hub", asAdmin: true, request: "GET /hubs/" + hubID + "?x=opaque",
			line: values{"route": "/hubs/{hubId}", "hubId": hubID}},
		{name: "an id that is none", asAdmin: true, request: "GET /hubs/opaque",
			line: values{"route": "/hubs/{hubId}"}},
		{name: "a file", asAdmin: true, request: "GET " + path,
			line: values{"route": "/files/{fileId}/{name}", "fileId": fileID}},
		{name: "a part of a file", asAdmin: true, request: "GET " + path,
			headers: []string{"Range", "bytes=100-300000"},
			line:    values{"route": "/files/{fileId}/{name}", "fileId": fileID}},
		{name: "the headers of a list", asAdmin: true, request: "HEAD /hubs",
			line: values{"route": "/hubs"}},
		{name: "the headers of a file", asAdmin: true, request: "HEAD " + path,
			line: values{"route": "/files/{fileId}/{name}", "fileId": fileID}},
		{name: "a query that can't be read", asAdmin: true, request: "GET /hubs?limit=7&a=%zz",
			line: values{"route": "/hubs"}},
		{name: "no such route", request: "GET /opaque?q=opaque"},
		{name: "a method of no route", request: "PUT /hubs"},
		{name: "a write from another origin", request: "POST /healthz",
			headers: []string{"Origin", "https://a-b.example.com:8443"},
			line:    values{"origin": "https://a-b.example.com:8443"}},
		{name: "a read from another origin", request: "GET /openapi.json",
			headers: []string{"Origin", "http://[::1]:3000"},
			line:    values{"origin": "http://[::1]:3000", "route": "/openapi.json"}},
		{name: "an origin in another form", request: "GET /openapi.json",
			headers: []string{"Origin", "https://user:opaque@example.com/"},
			line:    values{"route": "/openapi.json"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := nobody.In(t)
			if c.asAdmin {
				client = admin.In(t)
			}
			method, _, _ := strings.Cut(c.request, " ")
			var body any
			if method == "POST" {
				body = `{"name":"opaque"}`
			}
			r := client.Do(c.request, body, c.headers...)

			want := values{
				"level":     "INFO",
				"msg":       "request",
				"requestId": r.Header.Get("X-Request-Id"),
				"client":    client.IP,
				"method":    method,
				"status":    float64(r.Status),
				"bytes":     float64(len(r.Body)),
			}
			maps.Copy(want, c.line)
			if c.asAdmin {
				want["userId"] = userID
				want["cookie"] = "***"
			}
			line := waitLogged(t, s, r, `"msg":"request"`)
			var got values
			decodeStrict(t, c.name, line, &got)
			for _, name := range []string{"time", "duration"} { // of any value
				if got[name] == nil {
					t.Errorf("got no member %s in %v", name, got)
				}
				delete(got, name)
			}
			wantEqual(t, "members", got, want)
		})
	}
}

// G2: The log line of a request has each UUID of the path, under the name that the contract gives
// it. Without the path, nobody could tell from the log which hub or file a request was about.
func TestEachIDOfAPathIsLogged(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin", staging(t))
	tried := 0
	for _, r := range routes {
		var parts []string // of the log line
		request := wildcard.ReplaceAllStringFunc(r.Route, func(found string) string {
			name := strings.Trim(found, "{}")
			if !strings.HasSuffix(name, "Id") {
				return "x"
			}
			id := hubstest.NewUUID()
			parts = append(parts, `"`+name+`":"`+id+`"`)
			return id
		})
		if parts != nil {
			answer := admin.Elsewhere().Do(request, nil)
			waitLogged(t, s, answer, append(parts, `"msg":"request"`)...)
			tried++
		}
	}
	if tried < 4 {
		t.Errorf("got %d requests with a UUID in the path, want at least 4", tried)
	}
}

// wildcard matches a wildcard of a route, such as {hubId}.
var wildcard = regexp.MustCompile(`{[^}]*}`)

// The places of a request where a client can put a text of its own: paths, in which WORD stands for
// the text, and headers.
const (
	writtenPaths = "/WORD /nowhere?WORD /hubs/WORD /files/WORD/WORD /hubs?q=WORD /hubs?WORD=1 " +
		"/hubs?filters[name]=WORD /hubs?orderBy=WORD /hubs?limit=WORD /openapi.json?WORD"
	writtenHeaders = "User-Agent Origin Content-Type Authorization Referer Cookie Range " +
		"X-Forwarded-Host Access-Control-Request-Method If-None-Match"
)

// G2: Free text from a client does not get into the log, wherever it is in the request.
func TestLogHasNoFreeTextOfClients(t *testing.T) {
	t.Parallel()
	s, member := start(t, "member", staging(t))
	long := strings.Repeat("opaque", 1000)

	// Each word contains "opaque", which must not get into the log.
	for _, word := range []string{"opaque", "opaque@b.example", "code=opaque", long} {
		for path := range strings.FieldsSeq(strings.ReplaceAll(writtenPaths, "WORD", word)) {
			member.Elsewhere().Get(path)
		}
		body := map[string]string{"name": word}
		for name := range strings.FieldsSeq(writtenHeaders) {
			c := member.Elsewhere()
			c.Get("/openapi.json", name, word)
			c.Do("OPTIONS /hubs", nil, name, word, "Sec-Fetch-Site", "cross-site")
			c.Do("POST /hubs", body, name, word, "Sec-Fetch-Site", "cross-site")
		}
		c := member.Elsewhere()
		c.Do("OPAQUE /hubs", nil)
		c.Do(askRoute, map[string]string{"email": word, "opaque": word})
		c.PresentCode(word, word)
		c.Upload(word, []byte(word))
	}

	s.Stop(t)
	for _, line := range s.Log.All() {
		if strings.Contains(strings.ToLower(line), "opaque") {
			t.Errorf("got the log line %s, want none with a client's text", line)
		}
	}
}

// A healthy /healthz leaves no line in the log, because proxies ask for it every second. Any other
// answer of it does.
func TestHealthyHealthzIsNotLogged(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, staging(t))
	s.AllowErrorsWithAnyOf("no such file or directory")
	c := s.Client(t)
	for _, request := range []string{"GET /healthz", "HEAD /healthz", "GET /healthz?probe=1"} {
		c.Do(request, nil).Want(t, 200)
	}
	waitLogged(t, s, c.Get("/openapi.json"), `"msg":"request"`) // its line comes after theirs
	wantEqual(t, "request lines", s.Log.Count(`"msg":"request"`), 1)

	waitLogged(t, s, c.Do("POST /healthz", nil), `"msg":"request"`, `"status":405`)
	hubstest.Must(t, os.RemoveAll(s.Env["FILES_DIR"]))
	waitLogged(t, s, c.Get("/healthz"), `"msg":"request"`, `"route":"/healthz"`, `"status":503`)
}

// G4: Each sign-in, sign-out and refusal has a log line with the request id.
// The refusal of a suspended user or of an ended session also has the user's id, so that an
// operator can see which user still sends requests.
func TestEventsInTheLog(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	email, _ := s.NewUser(t, "member")
	c := s.Client(t)
	const anyUserID = `"userId":"`
	wantRefused := func(code string, parts ...string) {
		t.Helper()
		parts = append(parts, `"msg":"refused"`, `"code":"`+code, `"route":"/hubs"`)
		waitLogged(t, s, c.Get("/hubs"), parts...)
	}

	waitLogged(t, s, c.AskCode(email), `"msg":"code sent"`, maskedEmail(email))
	code := s.Code(t, email)
	wrong := c.PresentCode(email, hubstest.OtherCode(code, 1))
	waitLogged(t, s, wrong, `"msg":"refused"`, `"code":"invalid_code"`)
	waitLogged(t, s, c.PresentCode(email, code), `"msg":"signed in"`, anyUserID)
	wantRefused("terms_not_accepted", anyUserID)
	token := c.Token()
	waitLogged(t, s, c.Do("POST /auth/logout", nil), `"msg":"signed out"`, anyUserID)
	wantRefused("unauthenticated", `"reason":"missing"`)
	c.SetToken(token)
	s.User(t, "suspend", email)
	wantRefused("account_suspended", anyUserID)
	s.User(t, "signout", email)
	wantRefused("unauthenticated", `"reason":"ended"`, anyUserID)
	limit := hubstest.LimitOf(t, "GET /hubs")
	_, limited := exceed(t, s, s.Client(t), limit, "GET /nowhere", nil)
	waitLogged(t, s, limited, `"msg":"refused"`, `"code":"rate_limited"`)
}

// K3: On staging and production, the server logs a warning at its start that names each right of its
// database role beyond those of deploy/roles.sql, wherever it comes from.
func TestPowerfulDatabaseRoleIsReported(t *testing.T) {
	t.Parallel()
	database := hubstest.NewDatabase(t)
	deployed := staging(t)
	hubstest.Exec(t, database, "create role powerful_group")
	t.Cleanup(func() { hubstest.Exec(t, database, "drop role powerful_group") })
	for give, want := range map[string]string{ // to ROLE; the right that the warning names
		"select 1":                                                "",
		"grant insert on users to ROLE":                           "insert on users",
		"grant delete on users to ROLE":                           "delete on users",
		"grant update (permission) on users to ROLE":              "update on users",
		"grant truncate on files to ROLE":                         "truncate on files",
		"grant trigger on hubs to ROLE":                           "trigger on hubs",
		"grant update (user_id) on terms_acceptances to ROLE":     "update on terms_acceptances",
		"grant powerful_group to ROLE; alter role ROLE noinherit": "member of powerful_group",
		"alter role ROLE superuser":                               "superuser",
		"alter role ROLE createrole":                              "createrole",
		"alter role ROLE bypassrls":                               "bypassrls",
	} {
		t.Run(want, func(t *testing.T) {
			role, url := hubstest.NewRole(t, database)
			for _, grant := range hubstest.Matches(t, "deploy/roles.sql", "(?m)^(grant .*) to hubs_server;") {
				hubstest.Exec(t, database, grant+" to "+role)
			}
			hubstest.Exec(t, database, strings.ReplaceAll(give, "ROLE", role))
			s := hubstest.Start(t, deployed, map[string]string{"DATABASE_URL": url})
			s.Stop(t)
			const warning = "the database role has rights that the server does not need"
			if want == "" {
				wantEqual(t, "warnings", s.Log.Count(`"level":"WARN"`, warning), 0)
				return
			}
			wantEqual(t, "warnings", s.Log.Count(`"level":"WARN"`, warning, `"rights":"`+want+`"`), 1)
		})
	}
}
