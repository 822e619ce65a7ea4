//go:build moving

package main

// Tests of middleware.go, through HTTP: who is let in, the one error format, the
// strict readers, and the steps of the pipeline.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// with is a new client that bears a session token; "" for none.
func (s *testServer) with(t testing.TB, token string) *testClient {
	c := s.client(t)
	if token != "" {
		c.setToken(token)
	}
	return c
}

// forgedToken is right in everything but its signature.
func forgedToken(t testing.TB, userID, email string) string {
	t.Helper()
	now := time.Now()
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{
		"email": email, "userId": userID, "iat": now.Unix(), "exp": now.Add(time.Hour).Unix(),
	}).SignedString([]byte("another-secret-of-more-than-thirty-two-bytes"))
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// A sampleRequest is a right request to one route.
type sampleRequest struct {
	path        string
	body        any
	contentType string
}

// sample makes one; what it needs besides the session it makes first, by admin.
func sample(t testing.TB, srv *testServer, admin *testClient, r route) (q sampleRequest) {
	t.Helper()
	q.path = r.path
	newHub := func() string {
		return admin.do("POST", "/hubs", `{"name":"sample"}`).want(t, 201).field(t, "hubId").(string)
	}
	switch r.method + " " + r.path {
	case "POST /auth/otp/request":
		q.body = map[string]string{"email": newEmail()}
	case "POST /auth/otp/validate":
		email, visitor := newEmail(), srv.client(t)
		testUser(t, srv.env["DATABASE_URL"], email, roleMember)
		visitor.do("POST", "/auth/otp/request", map[string]string{"email": email}).want(t, 200)
		q.body = map[string]string{"email": email, "code": srv.code(t, email)}
	case "POST /terms/acceptance":
		q.body = map[string]string{"version": TERMS_VERSION}
	case "POST /hubs":
		q.body = `{"name":"North","description":"a\nb","status":"archived"}`
	case "PATCH /hubs/{hubId}":
		q.path, q.body = "/hubs/"+newHub(), `{"name":"South"}`
	case "GET /hubs/{hubId}", "DELETE /hubs/{hubId}":
		q.path = "/hubs/" + newHub()
	case "POST /files/upload":
		q.contentType = "multipart/form-data; boundary=b"
		q.body = "--b\r\nContent-Disposition: form-data; name=file; filename=a.txt\r\n\r\nhello\r\n--b--\r\n"
	case "GET /files/{fileId}/{name}":
		q.path = admin.upload("a.txt", []byte("hello")).want(t, 201).field(t, "path").(string)
	case "GET /{$}":
		q.path = "/"
	case "POST /auth/logout", "GET /auth/session", "GET /hubs", "GET /healthz", "GET /openapi.json":
	default:
		t.Fatalf("no sample of %s %s: a new route needs one here", r.method, r.path)
	}
	return q
}

func (q sampleRequest) send(c *testClient, method string) *testResponse {
	c.t.Helper()
	headers := []string{}
	if q.contentType != "" {
		headers = []string{"Content-Type", q.contentType}
	}
	if q.path == "/" { // the page has a policy of its own
		r, err := c.try(method, q.path, q.body, headers...)
		if err != nil {
			c.t.Error(err)
		}
		return r
	}
	return c.do(method, q.path, q.body, headers...)
}

// Z1: who is let in where, and in which order it is refused: session, account, terms,
// role, and only then the input. And every answer is one that openapi.json has.
func TestRefusals(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	db := srv.env["DATABASE_URL"]
	admin, adminEmail := srv.member(t, roleAdmin)
	member, _ := srv.member(t, roleMember)
	// The refused lack all that comes later too: so the order shows.
	fresh, suspended := newEmail(), newEmail()
	testUser(t, db, fresh, roleMember)
	testUser(t, db, suspended, roleMember)
	freshToken, suspendedToken := srv.signIn(t, fresh).token(), srv.signIn(t, suspended).token()
	execSQL(t, db, "update users set suspended = true where email = $1", suspended)
	adminID := queryValue[string](t, db, "select user_id from users where email = $1", adminEmail)
	// "terms missing, role right" must be refused for the terms alone.
	freshAdmin := newEmail()
	testUser(t, db, freshAdmin, roleAdmin)

	never := func(route) bool { return false }
	terms := func(r route) bool { return r.access == sessionAndTerms }
	session := func(r route) bool { return r.access.needsSession() }
	states := []struct {
		name, token string
		refuses     func(route) bool
		status      int
		code        string
	}{
		{"no session", "", session, 401, "unauthenticated"},
		{"forged", forgedToken(t, adminID, adminEmail), session, 401, "unauthenticated"},
		{"suspended", suspendedToken, session, 403, "account_suspended"},
		{"terms missing", freshToken, terms, 403, "terms_not_accepted"},
		{"terms missing, admin", srv.signIn(t, freshAdmin).token(), terms, 403, "terms_not_accepted"},
		{"wrong role", member.token(), func(r route) bool { return r.roles != nil }, 403, "forbidden"},
		{"good", admin.token(), never, 0, ""},
	}
	fingerprint := func() string {
		return queryValue[string](t, db, `select concat((select max(updated_at) from hubs), ' ', (select count(*) from hubs), ' ',
			(select count(*) from files), ' ', (select count(*) from terms_acceptances))`)
	}
	document := readOpenAPI(t)
	routes := newServer(config{env: envLocal}, nil, io.Discard).routes()
	// First all that is refused: what is let in changes what others lack.
	for _, r := range routes {
		right := sample(t, srv, admin, r)
		wrong := right
		wrong.body, wrong.contentType = `{"`, "text/plain"
		for _, state := range states {
			if !state.refuses(r) {
				continue
			}
			t.Run(state.name+"/"+r.method+" "+r.path, func(t *testing.T) {
				before := fingerprint()
				for _, request := range []sampleRequest{right, wrong} {
					answer := request.send(srv.with(t, state.token), r.method)
					wantProblem(t, answer, state.status, state.code)
					document.check(t, r, answer)
				}
				if after := fingerprint(); after != before {
					t.Errorf("refused, and yet done: %s, %s", before, after)
				}
			})
		}
	}
	for _, r := range routes {
		for _, state := range states {
			if state.refuses(r) {
				continue
			}
			t.Run("let in/"+state.name+"/"+r.method+" "+r.path, func(t *testing.T) {
				answer := sample(t, srv, admin, r).send(srv.with(t, state.token), r.method)
				answer.want(t, r.status)
				document.check(t, r, answer)
			})
		}
	}
}

// openAPIDocument is openapi.json as a reader of it sees it.
type openAPIDocument struct {
	Paths      map[string]map[string]json.RawMessage
	Components struct {
		Responses map[string]openAPIResponse
		Schemas   map[string]struct {
			Required   []string
			Properties map[string]any
		}
	}
}

type openAPIResponse struct {
	Ref     string `json:"$ref"`
	Content map[string]struct {
		Schema struct {
			Ref   string `json:"$ref"`
			AllOf []struct {
				Properties struct{ Code struct{ Enum []string } }
			}
		}
	}
}

func readOpenAPI(t testing.TB) (d openAPIDocument) {
	t.Helper()
	text, err := os.ReadFile("openapi.json")
	if err = errors.Join(err, json.Unmarshal(text, &d)); err != nil {
		t.Fatal(err)
	}
	return d
}

// check holds an answer against the document: its status, the code of a problem, the
// members of all else.
func (d openAPIDocument) check(t *testing.T, r route, answer *testResponse) {
	t.Helper()
	if r.access == local {
		return
	}
	var operation struct{ Responses map[string]openAPIResponse }
	if err := json.Unmarshal(d.Paths[r.path][strings.ToLower(r.method)], &operation); err != nil {
		t.Fatal(err)
	}
	documented, ok := operation.Responses[fmt.Sprint(answer.status)]
	if !ok {
		t.Fatalf("openapi.json has no such answer: %v", answer)
	}
	if answer.status >= 400 {
		documented = d.Components.Responses[strings.TrimPrefix(documented.Ref, "#/components/responses/")]
		allOf := documented.Content["application/problem+json"].Schema.AllOf
		if len(allOf) != 2 || !slices.Contains(allOf[1].Properties.Code.Enum, answer.field(t, "code").(string)) {
			t.Errorf("openapi.json has no such problem: %v", answer)
		}
		return
	}
	schema := documented.Content["application/json"].Schema.Ref
	if schema == "" {
		return // no JSON, or the document itself
	}
	members := slices.Sorted(maps.Keys(answer.json(t)))
	want := d.Components.Schemas[strings.TrimPrefix(schema, "#/components/schemas/")]
	if !slices.Equal(members, slices.Sorted(maps.Keys(want.Properties))) || !slices.Equal(members, slices.Sorted(slices.Values(want.Required))) {
		t.Errorf("openapi.json has other members than %v", answer)
	}
}

// serveRoutes serves routes of the test's own through the whole pipeline.
func serveRoutes(t testing.TB, routes func(*server) []route, overrides ...map[string]string) *testServer {
	t.Helper()
	srv := newTestServer(serverEnv(t, append([]map[string]string{{"DATABASE_URL": "postgres://not.used.example/"}}, overrides...)...))
	cfg, err := loadConfig(lookup(srv.env))
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(cfg, nil, srv.log)
	web := httptest.NewServer(s.handler(routes(s)))
	t.Cleanup(web.Close)
	srv.addr, srv.base = web.Listener.Addr().String(), web.URL
	if domain := srv.env["COOKIE_DOMAIN"]; domain != "" {
		srv.base = "https://api." + domain
	}
	return srv
}

// Z1: a forgotten or misspelled access rule does not start, and neither does a role without
// a session.
func TestRouteWithoutAccessDoesNotStart(t *testing.T) {
	t.Parallel()
	serve := endpoint(nil, func(*requestState, nothing) (nothing, error) { return nothing{}, nil })
	for name, test := range map[string]struct {
		route route
		panic bool
	}{
		"none":             {route{"GET", "/x", "", nil, 204, nil, serve}, true},
		"misspelled":       {route{"GET", "/x", "sesion", nil, 204, nil, serve}, true},
		"capital":          {route{"GET", "/x", "Session", nil, 204, nil, serve}, true},
		"two in one":       {route{"GET", "/x", "session,terms", nil, 204, nil, serve}, true},
		"role, public":     {route{"GET", "/x", public, []string{roleAdmin}, 204, nil, serve}, true},
		"role, local":      {route{"GET", "/x", local, []string{roleAdmin}, 204, nil, serve}, true},
		"public":           {route{"GET", "/x", public, nil, 204, nil, serve}, false},
		"role and session": {route{"GET", "/x", sessionOnly, []string{roleAdmin}, 204, nil, serve}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if fault := startRoutes([]route{test.route}); (fault != nil) != test.panic {
				t.Errorf("got panic %v, want a panic: %v", fault, test.panic)
			}
		})
	}
}

// startRoutes makes the handler of these routes, and returns the panic that keeps the server
// from starting; nil: it starts.
func startRoutes(routes []route) (fault any) {
	defer func() { fault = recover() }()
	s := newServer(config{env: envLocal}, nil, io.Discard)
	s.handler(routes)
	return nil
}

// Z1: each route of the table does not start if its access rule is taken away or misspelled,
// if its limit is taken away, or if it gets a limit that it has no key for.
func TestEachRouteFailsClosed(t *testing.T) {
	t.Parallel()
	table := newServer(config{env: envLocal}, nil, io.Discard).routes()
	if fault := startRoutes(table); fault != nil {
		t.Fatalf("the table itself does not start: %v", fault)
	}
	limited := 0
	for i, r := range table {
		t.Run(r.method+" "+r.path, func(t *testing.T) {
			wantNoStart := func(what string, change func(*route)) {
				t.Helper()
				changed := slices.Clone(table)
				change(&changed[i])
				fault := startRoutes(changed)
				if text, ok := fault.(string); !ok || !strings.HasSuffix(text, r.method+" "+r.path) {
					t.Errorf("%s: got panic %v, want one that names the route", what, fault)
				}
			}
			wantNoStart("no access rule", func(r *route) { r.access = "" })
			wantNoStart("unknown access rule", func(r *route) { r.access += "x" })
			if r.limit != nil {
				limited++
				wantNoStart("limit taken away", func(r *route) { r.limit = nil })
				return
			}
			wantNoStart("limit without a key", func(r *route) { r.limit = newLimiter(1, time.Hour, "") })
		})
	}
	if limited != 2 {
		t.Errorf("got %d routes with a limit of their own, want 2", limited)
	}
}

// The page is there in the local environment only.
func TestPageIsLocalOnly(t *testing.T) {
	t.Parallel()
	mails := newMailServer(t, mailOptions{})
	wantProblem(t, startServer(t, stagingEnv(mails)).client(t).do("GET", "/", nil), 404, "not_found")
	page, err := startServer(t).client(t).try("GET", "/", nil)
	if err != nil || page.status != 200 || page.header.Get("Content-Type") != "text/html; charset=utf-8" {
		t.Errorf("%v, %v", err, page)
	}
}

// Outside the local environment, a route of it is left out, and those that follow it are not.
func TestRoutesBehindALocalOneAreServed(t *testing.T) {
	t.Parallel()
	s := newServer(config{env: envStaging}, nil, io.Discard)
	routes := s.routes()
	slices.Reverse(routes) // GET / is the last one
	staging := office{s, s.handler(routes)}
	call(t, staging, one(1), "GET", "/openapi.json", "").want(t, 200)
	wantProblem(t, call(t, staging, one(1), "GET", "/", ""), 404, "not_found")
}

const panicSecret = "a-secret-in-the-stack"

type halfAnswer struct{}

func (halfAnswer) isValid() bool { return true }
func (halfAnswer) send(x *requestState) {
	x.Write([]byte("half"))
	http.NewResponseController(x).Flush()
	panic(panicSecret)
}

type standardFailure struct{}

func (standardFailure) isValid() bool { return true }
func (standardFailure) send(x *requestState) {
	http.Error(x, panicSecret, http.StatusInternalServerError)
}

type badAnswer struct {
	Secret string `json:"secret"`
}

func (badAnswer) isValid() bool { return false }

// G3, I5: panics, unknown errors and outputs that break their contract are a 500 that
// says nothing; the log says it, under the same id. Nothing of the failed answer stays.
func TestFailuresInside(t *testing.T) {
	t.Parallel()
	add := func(path string, c contract) route { return route{"GET", path, public, nil, 200, nil, c} }
	srv := serveRoutes(t, func(*server) []route {
		return []route{
			add("/panic", endpoint(nil, func(*requestState, nothing) (nothing, error) { panic(panicSecret) })),
			add("/half", endpoint(nil, func(*requestState, nothing) (halfAnswer, error) { return halfAnswer{}, nil })),
			add("/late", endpoint(nil, func(x *requestState, _ nothing) (nothing, error) {
				x.Write([]byte("half"))
				http.NewResponseController(x).Flush()
				return nothing{}, errors.New(panicSecret)
			})),
			// As http.ServeContent answers when it can't read a file.
			add("/standard", endpoint(nil, func(*requestState, nothing) (standardFailure, error) { return standardFailure{}, nil })),
			add("/contract", endpoint(nil, func(*requestState, nothing) (badAnswer, error) { return badAnswer{panicSecret}, nil })),
			add("/error", endpoint(nil, func(x *requestState, _ nothing) (nothing, error) {
				for _, name := range []string{"Set-Cookie", "ETag", "Location", "Content-Disposition", "Last-Modified", "Accept-Ranges"} {
					x.Header().Set(name, panicSecret)
				}
				x.Header().Set("Content-Length", "1")
				x.Header().Set("Cache-Control", "public")
				x.Header().Set("Content-Security-Policy", "default-src *")
				return nothing{}, errors.New(panicSecret)
			})),
		}
	}, stagingEnv(newMailServer(t, mailOptions{})))
	for _, path := range []string{"/panic", "/standard", "/contract", "/error"} {
		answer := srv.client(t).do("GET", path, nil, "X-Request-Id", "id-of-"+path[1:])
		wantProblem(t, answer, 500, "internal")
		if strings.Contains(answer.String(), panicSecret) {
			t.Errorf("it leaks: %v", answer)
		}
		srv.log.waitFor(t, `"level":"ERROR"`, `"requestId":"id-of-`+path[1:])
		srv.log.waitFor(t, `"msg":"request"`, `"requestId":"id-of-`+path[1:], `"status":500`)
	}
	srv.log.waitFor(t, `"level":"ERROR"`, panicSecret, "middleware_test.go") // with the stack
	// Too late for another answer: the connection is cut, so that half is not taken for
	// whole. It is logged like any other request.
	if answer, err := srv.client(t).try("GET", "/half", nil, "X-Request-Id", "id-of-half"); err == nil {
		t.Errorf("half an answer passes for a whole one: %v", answer)
	}
	if answer, err := srv.client(t).try("GET", "/late", nil, "X-Request-Id", "id-of-late"); err == nil {
		t.Errorf("half an answer passes for a whole one: %v", answer)
	}
	srv.log.waitFor(t, `"level":"ERROR"`, `"requestId":"id-of-half`, panicSecret)
	srv.log.waitFor(t, `"msg":"request"`, `"requestId":"id-of-half`)
	// And the server goes on.
	wantProblem(t, srv.client(t).do("GET", "/nowhere", nil), 404, "not_found")
}

// I5: what the database holds against its constraints is not sent.
func TestBrokenRows(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	srv.allowErrors("breaks its contract")
	db := srv.env["DATABASE_URL"]
	admin, email := srv.member(t, roleAdmin)
	path := admin.upload("a.txt", []byte("hello")).want(t, 201).field(t, "path").(string)
	execSQL(t, db, `alter table hubs drop constraint hubs_status_check;
		alter table users drop constraint users_permission_check`)
	id := queryValue[string](t, db, "insert into hubs (name, status) values ('n', 'brokenrow') returning hub_id")
	execSQL(t, db, "update files set size = 6")
	for _, path := range []string{"/hubs", "/hubs/" + id, path} {
		answer := admin.do("GET", path, nil, "X-Request-Id", "broken")
		wantProblem(t, answer, 500, "internal")
		if strings.Contains(answer.String(), "brokenrow") {
			t.Errorf("it leaks: %v", answer)
		}
	}
	execSQL(t, db, "update users set permission = 'root' where email = $1", email)
	wantProblem(t, admin.do("GET", "/auth/session", nil, "X-Request-Id", "broken"), 500, "internal")
	if n := srv.log.count(`"level":"ERROR"`, `"requestId":"broken"`); n != 4 {
		t.Errorf("%d errors in the log, want 4:\n%s", n, srv.log)
	}
}

// I5: an output is checked in each of its members before it is sent.
func TestOutputsAreChecked(t *testing.T) {
	t.Parallel()
	now := time.Now()
	type change[T any] map[string]func(*T)
	goodUser := user{UserID: exampleID, Email: "a@b.example", Permission: roleAdmin}
	checkEach(t, sessionView{&goodUser, termsView{TERMS_VERSION, true}, now}, change[sessionView]{
		"user id":    func(v *sessionView) { v.User = &user{UserID: "x", Email: goodUser.Email, Permission: roleAdmin} },
		"email":      func(v *sessionView) { v.User = &user{UserID: exampleID, Email: "a b@c", Permission: roleAdmin} },
		"permission": func(v *sessionView) { v.User = &user{UserID: exampleID, Email: goodUser.Email, Permission: "root"} },
		"expiresAt":  func(v *sessionView) { v.ExpiresAt = time.Time{} },
	})
	checkEach(t, acceptanceView{TERMS_VERSION, now}, change[acceptanceView]{
		"version":    func(v *acceptanceView) { v.Version = "" },
		"acceptedAt": func(v *acceptanceView) { v.AcceptedAt = time.Time{} },
	})
	checkEach(t, codeAnswer{6, 600}, change[codeAnswer]{
		"codeLength":       func(v *codeAnswer) { v.CodeLength = 5 },
		"expiresInSeconds": func(v *codeAnswer) { v.ExpiresInSeconds = 0 },
	})
	goodHub := hub{exampleID, strings.Repeat("é", 100), strings.Repeat("é", 2000), "archived", now, now}
	badHub := change[hub]{
		"id":               func(v *hub) { v.HubID = strings.ToUpper(exampleID) },
		"no name":          func(v *hub) { v.Name = "" },
		"long name":        func(v *hub) { v.Name += "n" },
		"long description": func(v *hub) { v.Description += "d" },
		"status":           func(v *hub) { v.Status = "gone" },
		"createdAt":        func(v *hub) { v.CreatedAt = time.Time{} },
		"updatedAt":        func(v *hub) { v.UpdatedAt = time.Time{} },
	}
	checkEach(t, goodHub, badHub)
	pages := change[hubPage]{
		"no items":       func(v *hubPage) { v.Items = nil },
		"too many items": func(v *hubPage) { v.Limit = 1 },
	}
	for what, spoil := range badHub {
		pages["item: "+what] = func(v *hubPage) {
			v.Items = slices.Clone(v.Items)
			spoil(&v.Items[1])
		}
	}
	checkEach(t, hubPage{[]hub{goodHub, goodHub}, 2, 0, true}, pages)
	goodFile := file{exampleID, "a.txt", "text/plain", 0, "/files/" + exampleID + "/a.txt", now}
	badFile := change[file]{
		"id":        func(v *file) { v.FileID = "../x" },
		"name":      func(v *file) { v.Name = "a\r\nb" },
		"folder":    func(v *file) { v.Name = "a/b" },
		"drive":     func(v *file) { v.Name = `C:\b` },
		"type":      func(v *file) { v.ContentType = "" },
		"size":      func(v *file) { v.Size = -1 },
		"createdAt": func(v *file) { v.CreatedAt = time.Time{} },
	}
	checkEach(t, goodFile, badFile)
	content, err := os.Create(t.TempDir() + "/content")
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()
	contents := change[fileContent]{"another size": func(v *fileContent) { v.Size = 1 }}
	for what, spoil := range badFile {
		contents[what] = func(v *fileContent) { spoil(&v.file) }
	}
	checkEach(t, fileContent{goodFile, content, nil}, contents)
}

// checkEach: a good output passes, and with any of the changes it does not.
func checkEach[T output](t *testing.T, good T, changes map[string]func(*T)) {
	t.Helper()
	if !good.isValid() {
		t.Errorf("%T: a good one is refused", good)
	}
	for what, spoil := range changes {
		bad := good
		if spoil(&bad); bad.isValid() {
			t.Errorf("%T: taken in spite of its %s", good, what)
		}
	}
}

// A body that could not be stored is the server's fault, and no malformed one.
func TestBodyProblem(t *testing.T) {
	t.Parallel()
	onDisk := func(err error) error { return &os.PathError{Op: "write", Path: "x", Err: err} }
	for _, test := range []struct {
		err    error
		status int
	}{
		{onDisk(syscall.EIO), 500}, {onDisk(syscall.ENOSPC), 507}, {onDisk(syscall.EDQUOT), 507}, {errTooLarge, 413},
		{io.ErrUnexpectedEOF, 400}, {os.ErrDeadlineExceeded, 400}, {errors.New("multipart: x"), 400},
	} {
		if p, ok := errors.AsType[*problem](bodyProblem(fmt.Errorf("within: %w", test.err))); !ok || p.Status != test.status {
			t.Errorf("%v: %+v, want %d", test.err, p, test.status)
		}
	}
}

// G3: what net/http's own router and file serving refuse has the one format too.
func TestRouterProblems(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	admin, _ := srv.member(t, roleAdmin)
	file := admin.upload("a.txt", []byte("hello")).want(t, 201).field(t, "path").(string)
	for _, test := range []struct {
		method, path string
		status       int
		code, allow  string
		headers      []string
	}{
		{"GET", "/nowhere", 404, "not_found", "", nil},
		{"GET", "/HUBS", 404, "not_found", "", nil},
		// The router would redirect these to a cleaned path.
		{"GET", "//hubs", 404, "not_found", "", nil},
		{"GET", "/hubs/../hubs", 404, "not_found", "", nil},
		{"GET", "/./hubs", 404, "not_found", "", nil},
		{"GET", "/hubs/", 404, "not_found", "", nil},
		{"POST", "/files//upload", 404, "not_found", "", nil},
		{"GET", "/hubs/a/b", 404, "not_found", "", nil},
		{"GET", "/hubs/a%2Fb", 404, "not_found", "", nil},
		{"GET", "/%00", 404, "not_found", "", nil},
		{"GET", file + "%00", 404, "not_found", "", nil},
		{"GET", file + "%ff", 404, "not_found", "", nil},
		{"PUT", "/hubs", 405, "method_not_allowed", "GET, HEAD, POST", nil},
		{"HEAD", "/auth/logout", 405, "method_not_allowed", "POST", nil},
		{"GET", "/auth/otp/request", 405, "method_not_allowed", "POST", nil},
		{"POST", "/openapi.json", 405, "method_not_allowed", "GET, HEAD", nil},
		{"PUT", "/hubs/x", 405, "method_not_allowed", "DELETE, GET, HEAD, PATCH", nil},
		{"OPTIONS", "/hubs", 405, "method_not_allowed", "GET, HEAD, POST", nil},
		{"TRACE", "/hubs", 405, "method_not_allowed", "GET, HEAD, POST", nil}, // H2
		{"FOO", "/hubs", 405, "method_not_allowed", "GET, HEAD, POST", nil},
		{"GET", file, 412, "precondition_failed", "", []string{"If-Match", `"other"`}},
		{"HEAD", file, 412, "precondition_failed", "", []string{"If-Match", `"other"`}},
		{"GET", file, 416, "range_not_satisfiable", "", []string{"Range", "bytes=9-"}},
	} {
		answer := admin.do(test.method, test.path, nil, test.headers...)
		wantProblem(t, answer, test.status, test.code)
		if answer.header.Get("Allow") != test.allow {
			t.Errorf("want Allow %q: %v", test.allow, answer)
		}
		for _, name := range []string{"Location", "ETag", "Last-Modified", "Accept-Ranges", "Content-Disposition"} {
			if answer.header.Get(name) != "" {
				t.Errorf("%s in %v", name, answer)
			}
		}
	}
	// H2: net/http would answer this by itself.
	answer := srv.raw(t, "OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: star\r\n\r\n")
	if err := answer.answerFault(); err != nil || answer.status < 400 || answer.header.Get("X-Request-Id") != "star" {
		t.Errorf("%v: %v", err, answer)
	}
}

// HEAD works wherever GET does, with the same status and headers.
func TestHeadIsGetWithoutBody(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	admin, _ := srv.member(t, roleAdmin)
	for _, r := range newServer(config{env: envLocal}, nil, io.Discard).routes() {
		if r.method != "GET" {
			continue
		}
		request := sample(t, srv, admin, r)
		get, head := request.send(admin, "GET").want(t, 200), request.send(admin, "HEAD").want(t, 200)
		for _, headers := range []http.Header{get.header, head.header} {
			headers.Del("X-Request-Id")
			headers.Del("Date")
		}
		// net/http sends a long document in chunks, and for HEAD says nothing of its length.
		if get.header.Get("Content-Length") == "" {
			head.header.Del("Content-Length")
		}
		if !maps.EqualFunc(get.header, head.header, slices.Equal) || len(head.body) != 0 {
			t.Errorf("GET %s: %v, HEAD: %v", r.path, get.header, head.header)
		}
	}
}

// wantInvalid checks a 400 that names these fields, each at least once.
func wantInvalid(t testing.TB, answer *testResponse, fields ...string) {
	t.Helper()
	wantProblem(t, answer, 400, "invalid_request")
	var body struct{ Errors []fieldError }
	if err := json.Unmarshal(answer.body, &body); err != nil {
		t.Fatal(err)
	}
	var named []string
	for _, e := range body.Errors {
		named = append(named, e.Field)
	}
	slices.Sort(named)
	if slices.Sort(fields); !slices.Equal(slices.Compact(named), fields) {
		t.Errorf("fields %q, want %q, in %v", named, fields, answer)
	}
}

// Order of refusals: a malformed attempt is not counted by the endpoint's own limit.
func TestMalformedAttemptsAreNotCounted(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	c, email := srv.client(t), newEmail()
	good := map[string]string{"email": email}
	for range 10 {
		c.do("POST", "/auth/otp/request", map[string]string{"email": email, "x": "y"}).want(t, 400)
		c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": "12345"}).want(t, 400)
	}
	for range 5 {
		c.do("POST", "/auth/otp/request", good).want(t, 200)
	}
	wantProblem(t, c.do("POST", "/auth/otp/request", good), 429, "rate_limited")
	wantInvalid(t, c.do("POST", "/auth/otp/request", `{"email":1}`), "email")
	for range 10 {
		wantProblem(t, c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": "123456"}), 401, "invalid_code")
	}
	wantProblem(t, c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": "123456"}), 429, "rate_limited")
}

// G1: an id in the right form is the client's own, any other is replaced; the same id
// stands in the answer, the error and the log.
func TestRequestID(t *testing.T) {
	t.Parallel()
	srv := startServer(t, stagingEnv(newMailServer(t, mailOptions{})))
	c := srv.client(t)
	for _, id := range []string{"a", "0", "A.b_c-9", "..", strings.Repeat("x", 128)} {
		answer := c.do("GET", "/nowhere", nil, "X-Request-Id", id)
		if wantProblem(t, answer, 404, "not_found"); answer.header.Get("X-Request-Id") != id {
			t.Errorf("%q: %v", id, answer)
		}
		srv.log.waitFor(t, `"msg":"request"`, `"requestId":"`+id+`"`)
	}
	seen := map[string]bool{}
	for _, id := range []string{"", "a b", "a\tb", "a,b", "a/b", "é", "\xff", "\u2028", "a\u0085", "<script>", `"`, strings.Repeat("x", 129)} {
		answer := c.do("GET", "/nowhere", nil, "X-Request-Id", id)
		got := answer.header.Get("X-Request-Id")
		if wantProblem(t, answer, 404, "not_found"); got == id || len(got) < 16 || seen[got] {
			t.Errorf("%q became %q", id, got)
		}
		seen[got] = true
		srv.log.waitFor(t, `"msg":"request"`, `"requestId":"`+got+`"`)
	}
	// A folded header, two headers: one id in the answer, and no line break in it.
	for _, header := range []string{"X-Request-Id: a\r\n b\r\n", "X-Request-Id: a b\r\nX-Request-Id: c\r\n", "X-Request-Id:\r\n"} {
		answer := srv.raw(t, "GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"+header+"\r\n")
		wantProblem(t, answer, 404, "not_found")
		if got := answer.header.Get("X-Request-Id"); len(got) < 16 {
			t.Errorf("%q became %q", header, got)
		}
	}
}

// C3, C4: do checks the headers of every answer; here is one of each kind, so that
// none goes unchecked.
func TestHeadersOnEveryKindOfAnswer(t *testing.T) {
	t.Parallel()
	pg := newDatabase(t)
	proxy, through := proxyURL(t, pg)
	srv := startServer(t, map[string]string{"DATABASE_URL": through, "MAX_UPLOAD_BYTES": "10"})
	srv.allowErrors(`"code":"unavailable"`, "unavailable")
	admin, _ := srv.member(t, roleAdmin)
	path := admin.upload("a.txt", []byte("hello")).want(t, 201).field(t, "path").(string)
	etag := admin.do("GET", path, nil).want(t, 200).header.Get("ETag")
	admin.do("GET", path, nil, "If-None-Match", etag).want(t, 304)
	admin.do("GET", path, nil, "Range", "bytes=1-2").want(t, 206)
	admin.do("POST", "/hubs", `{"name":"a"}`).want(t, 201)
	wantProblem(t, admin.upload("a.txt", []byte("more than ten")), 413, "too_large")
	origin := []string{"Origin", "http://localhost:3000", "Access-Control-Request-Method", "PATCH"}
	admin.do("OPTIONS", "/hubs", nil, origin...).want(t, 204)
	wantProblem(t, admin.do("POST", "/hubs", `{"name":"a"}`, "Sec-Fetch-Site", "cross-site"), 403, "cross_origin")
	proxy.cut()
	wantProblem(t, admin.do("GET", "/hubs", nil), 503, "unavailable") // Z2
	wantProblem(t, admin.do("GET", "/healthz", nil), 503, "unavailable")
	proxy.resume()
	wantProblem(t, flood(t, srv, "GET", "/nowhere"), 429, "rate_limited")
}

// flood spends an address's global limit, and returns the first refusal.
func flood(t testing.TB, srv *testServer, method, path string, headers ...string) *testResponse {
	t.Helper()
	c := srv.client(t)
	for range 100 {
		if answer := c.do(method, path, nil, headers...); answer.status == 429 {
			t.Fatal("refused too early")
		}
	}
	return c.do(method, path, nil, headers...)
}

// The order of the steps: the limit comes before CORS and the contract, so preflights,
// refused origins and unknown paths count; headers and id come before the limit, so a
// page of an allowed origin can read the 429.
func TestOrderOfSteps(t *testing.T) {
	t.Parallel()
	srv := startServer(t, stagingEnv(newMailServer(t, mailOptions{})), map[string]string{"ALLOWED_ORIGINS": "https://app.example.com"})
	for name, test := range map[string]struct {
		method, path string
		headers      []string
	}{
		"preflights":   {"OPTIONS", "/hubs", []string{"Origin", "https://app.example.com", "Access-Control-Request-Method", "POST"}},
		"cross-origin": {"POST", "/hubs", []string{"Sec-Fetch-Site", "cross-site"}},
		"unknown":      {"GET", "/nowhere", []string{"Origin", "https://app.example.com"}},
		"no session":   {"DELETE", "/hubs/x", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			id := "order-" + strings.ReplaceAll(name, " ", "-")
			answer := flood(t, srv, test.method, test.path, append(test.headers, "X-Request-Id", id)...)
			wantProblem(t, answer, 429, "rate_limited")
			if answer.header.Get("X-Request-Id") != id {
				t.Error(answer)
			}
			wantAllowed := ""
			if slices.Contains(test.headers, "Origin") {
				wantAllowed = "https://app.example.com"
			}
			if err := corsFault(answer, wantAllowed); err != nil {
				t.Error(err)
			}
			srv.log.waitFor(t, `"msg":"request"`, `"requestId":"`+id+`"`, `"status":429`) // the log frames them all
		})
	}
}

// corsFault tells whether an answer lets that origin's pages read it, and no others.
func corsFault(r *testResponse, origin string) error {
	want := map[string]string{"Access-Control-Allow-Origin": "", "Access-Control-Allow-Credentials": "",
		"Access-Control-Expose-Headers": ""}
	if origin != "" {
		want = map[string]string{"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Credentials": "true",
			"Access-Control-Expose-Headers": "X-Request-Id, Retry-After, Location"}
	}
	for name, value := range want {
		if got := strings.Join(r.header.Values(name), "|"); got != value {
			return fmt.Errorf("%s: %q, want %q", name, got, value)
		}
	}
	return nil
}

func merged(env map[string]string, pairs ...string) map[string]string {
	env = maps.Clone(env)
	for pair := range slices.Chunk(pairs, 2) {
		env[pair[0]] = pair[1]
	}
	return env
}

// C2: SameSite=Lax alone would let a same-site page of another origin write.
func TestCrossSiteWrites(t *testing.T) {
	t.Parallel()
	srv := startServer(t, productionEnv(newMailServer(t, mailOptions{})))
	admin, _ := srv.member(t, roleAdmin)
	host := "api.example.com"
	for _, test := range []struct {
		name    string
		headers []string
		allowed bool
	}{
		{"cross-site form", []string{"Sec-Fetch-Site", "cross-site", "Origin", "https://evil.test"}, false},
		{"same-site, foreign origin", []string{"Sec-Fetch-Site", "same-site", "Origin", "http://app.example.com"}, false},
		{"same-site, no origin", []string{"Sec-Fetch-Site", "same-site"}, false},
		{"old browser, foreign origin", []string{"Origin", "https://evil.test"}, false},
		{"opaque origin", []string{"Origin", "null"}, false},
		{"same-site, allowed origin", []string{"Sec-Fetch-Site", "same-site", "Origin", "https://app.example.com"}, true},
		{"cross-site, allowed origin", []string{"Sec-Fetch-Site", "cross-site", "Origin", "https://app.example.com"}, true},
		{"same origin", []string{"Sec-Fetch-Site", "same-origin", "Origin", "https://" + host}, true},
		{"old browser, same origin", []string{"Host", host, "Origin", "https://" + host}, true},
		{"typed in", []string{"Sec-Fetch-Site", "none"}, true},
		{"no browser", nil, true},
	} {
		id := queryValue[string](t, srv.env["DATABASE_URL"], "insert into hubs (name) values ('n') returning hub_id")
		answers := map[string]*testResponse{
			"upload": admin.upload("a.txt", []byte("x"), test.headers...),
			"POST":   admin.do("POST", "/hubs", `{"name":"a"}`, test.headers...),
			"PATCH":  admin.do("PATCH", "/hubs/"+id, `{"name":"a"}`, test.headers...),
			"DELETE": admin.do("DELETE", "/hubs/"+id, nil, test.headers...),
		}
		for method, answer := range answers {
			if test.allowed && answer.status >= 300 {
				t.Errorf("%s, %s: %v", test.name, method, answer)
			} else if !test.allowed {
				wantProblem(t, answer, 403, "cross_origin")
			}
		}
		admin.do("GET", "/hubs", nil, test.headers...).want(t, 200) // reading changes nothing; CORS hides it
	}
	if n := queryValue[int](t, srv.env["DATABASE_URL"], "select count(*) from hubs where name = 'a'"); n != 6 {
		t.Errorf("%d hubs were created, want 6", n)
	}
}

// G2: no code, token or whole address in any line, wherever a client puts it. The
// harness looks through the log of every test for what it knows; here are the places.
func TestNothingSecretInTheLog(t *testing.T) {
	t.Parallel()
	srv := startServer(t, stagingEnv(newMailServer(t, mailOptions{user: "mailer", password: "mail-password-1"})))
	db := srv.env["DATABASE_URL"]
	email := strings.Replace(newEmail(), "user", "o'neil+private", 1)
	usedEmails.Store(email, nil)
	testUser(t, db, email, roleMember)
	c := srv.client(t)
	c.do("POST", "/auth/otp/request", map[string]string{"email": email}).want(t, 200)
	code := srv.code(t, email)
	c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": code}).want(t, 200)
	token := c.token()
	escaped := strings.NewReplacer("@", "%40", "+", "%2B").Replace(email)
	twice := strings.ReplaceAll(escaped, "%", "%25")
	mark := srv.log.mark()
	for _, text := range []string{code, token, email, escaped, twice, "code=" + code, "Cookie: " + srv.cookieName() + "=" + token} {
		inURL := strings.NewReplacer(" ", "%20").Replace(text)
		c.do("GET", "/nowhere/"+inURL, nil)
		c.do("GET", "/"+inURL, nil)
		c.do("GET", "/nowhere?q="+inURL, nil)
		c.do("GET", "/nowhere?a=b&token="+inURL+"&x="+inURL, nil)
		c.do("GET", "/hubs/"+inURL, nil)
		c.do("POST", "/auth/otp/request", map[string]string{"email": text, "code": code})
		c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": text, "x": text})
		for _, name := range []string{"User-Agent", "Origin", "Content-Type", "Authorization", "Referer", "X-Forwarded-Host"} {
			c.do("GET", "/nowhere", nil, name, text)
		}
	}
	c.do("GET", "/nowhere", nil, "Origin", "https://user:url-password-1@app.example.com", "Authorization", "Bearer some-bearer-1")
	c.do("GET", "/nowhere?password=pass-word-1&x=1&access_token=opaque-1&Secret=opaque-2", nil)
	for _, path := range []string{ // half of an escape, escapes of escapes, values with & and spaces, an address around a secret
		"/nowhere?%zz=%65" + token[1:], "/nowhere?%zz&tok%65n=opaque-3", "/nowhere?x=" + strings.ReplaceAll(token, ".", "%2E"),
		"/" + strings.ReplaceAll(token, ".", "%252E"), "/nowhere?token=a%26opaque-4", "/nowhere?secret=a%20opaque-5",
		"/nowhere?a=1&password=opaque-6@tail", "/nowhere?limit=1&token=opaque-7@example.com",
	} {
		if r := srv.raw(t, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n"); r.status != 404 {
			t.Errorf("%s: %v", path, r)
		}
	}
	c.do("GET", "/nowhere", nil, "X-Request-Id", "last-of-all")
	srv.log.waitFor(t, "last-of-all", `"msg":"request"`)
	for _, line := range srv.log.all()[mark:] {
		for _, secret := range []string{token, strings.Split(token, ".")[1], strings.Split(token, ".")[2], email, escaped, twice,
			"private", "mail-password-1", "url-password-1", "some-bearer-1", "pass-word-1", "opaque-"} {
			if strings.Contains(line, secret) {
				t.Errorf("%q in %s", secret, line)
			}
		}
	}
	srv.log.waitAfter(t, mark, `"cookie":"***"`)
	srv.log.waitAfter(t, mark, `"authorization":"***"`)
	srv.log.waitFor(t, `"msg":"code sent"`, "o***@u")
}

// G4: one line for each sign-in, refusal and sign-out, in every environment, under the
// id of its request.
func TestEventsInTheLog(t *testing.T) {
	t.Parallel()
	mails := newMailServer(t, mailOptions{})
	for name, env := range map[string]map[string]string{"local": nil, "staging": stagingEnv(mails), "production": productionEnv(mails)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := startServer(t, env)
			email := newEmail()
			testUser(t, srv.env["DATABASE_URL"], email, roleMember)
			c := srv.client(t)
			c.do("POST", "/auth/otp/request", map[string]string{"email": email}, "X-Request-Id", "ask").want(t, 200)
			code := srv.code(t, email)
			wrong := anotherCode(code)
			c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": wrong}, "X-Request-Id", "wrong").want(t, 401)
			c.do("POST", "/auth/otp/validate", map[string]string{"email": email, "code": code}, "X-Request-Id", "right").want(t, 200)
			c.do("GET", "/hubs", nil, "X-Request-Id", "terms").want(t, 403)
			c.do("POST", "/auth/logout", nil, "X-Request-Id", "leave").want(t, 204)
			c.do("GET", "/hubs", nil, "X-Request-Id", "gone").want(t, 401)
			flood(t, srv, "GET", "/nowhere", "X-Request-Id", "flood").want(t, 429)
			for id, want := range map[string][]string{
				"ask":   {`"msg":"code sent"`, `"email":"u***@u`},
				"wrong": {`"msg":"refused"`, `"code":"invalid_code"`},
				"right": {`"msg":"signed in"`, `"userId":"`},
				"terms": {`"msg":"refused"`, `"code":"terms_not_accepted"`},
				"leave": {`"msg":"signed out"`, `"userId":"`},
				"gone":  {`"msg":"refused"`, `"code":"unauthenticated"`},
				"flood": {`"msg":"refused"`, `"code":"rate_limited"`},
			} {
				srv.log.waitFor(t, append(want, `"requestId":"`+id+`"`)...)
			}
		})
	}
}

// anotherCode is a code of the right form that is not this one.
func anotherCode(code string) string {
	return string('0'+(code[0]-'0'+1)%10) + code[1:]
}

// H1: headers have a bound in size and, like bodies, in time; others are served
// meanwhile.
func TestSlowAndLargeRequests(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	request := func(padding int) string {
		return "GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Padding: " + strings.Repeat("x", padding) + "\r\n\r\n"
	}
	srv.raw(t, request(15<<10)).want(t, 200)
	srv.raw(t, request(17<<10)).want(t, 431)

	// A byte now and then keeps nothing open: each limit, and a margin that no other
	// limit of the server falls into.
	const margin = 4 * time.Second
	var connections sync.WaitGroup
	slow := func(name, start, more string, limit time.Duration, status string) {
		connections.Go(func() {
			conn, err := net.Dial("tcp", srv.addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(limit + margin))
			go func() { // until the connection is closed
				_, err := io.WriteString(conn, start)
				for tick := time.Tick(time.Second); err == nil; <-tick {
					_, err = io.WriteString(conn, more)
				}
			}()
			answer, err := io.ReadAll(conn) // until the server closes
			if errors.Is(err, os.ErrDeadlineExceeded) || !strings.HasPrefix(string(answer), status) {
				t.Errorf("slow %s: %v, %q", name, err, answer)
			}
		})
	}
	slow("headers", "GET /openapi.json HTTP/1.1\r\nHost: x\r\n", "X-A: b\r\n", 10*time.Second, "")
	slow("body", "POST /auth/otp/request HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{", " ",
		15*time.Second, "HTTP/1.1 400 ")
	for range 20 {
		srv.client(t).do("GET", "/openapi.json", nil).want(t, 200) // meanwhile
	}
	connections.Wait()
}

// Whatever a client says its request id is: accepted unchanged or replaced, and always
// of the one form that may stand in a header, a log and a JSON text.
func FuzzRequestID(f *testing.F) {
	for _, id := range []string{"", "a", "A.b_c-9", "a b", "\xff", "\u2028", strings.Repeat("x", 128), strings.Repeat("x", 129), "a\r\nB: c"} {
		f.Add(id)
	}
	handler := fuzzHandler(f, func(s *server) []route { return nil })
	f.Fuzz(func(t *testing.T, id string) {
		r := httptest.NewRequest("GET", "/x", nil)
		r.Header["X-Request-Id"] = []string{id}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		got := w.Header().Values("X-Request-Id")
		if w.Code != 404 || len(got) != 1 || !requestIDPattern.MatchString(got[0]) || requestIDPattern.MatchString(id) && got[0] != id {
			t.Errorf("%q: %d, %q", id, w.Code, got)
		}
	})
}

// fuzzHandler is the pipeline without its limit, which would end the fuzzing.
func fuzzHandler(t testing.TB, routes func(*server) []route) http.Handler {
	s := newServer(config{env: envLocal}, nil, io.Discard)
	return s.logRequests(s.setSecurityHeaders(s.setRequestContext(s.checkOrigin(s.serveRoutes(routes(s))))))
}

// Whatever a body holds: a 4xx or an input that keeps its rules, and that reads the
// same when it is encoded again; never a panic, never a 5xx.
func FuzzJSONBody(f *testing.F) {
	for _, body := range []string{`{"name":"a"}`, `{"name":" a ","description":"x\ny","status":"archived"}`, `{"name":"a","name":"b"}`,
		`{"name":"\ud800"}`, `{"name":null}`, `[]`, `{}`, ``, `{"Name":"a"}`, "{\"name\":\"\xff\"}", `{"name":"a"}{}`, `{"name":"\ufffd"}`} {
		f.Add([]byte(body))
	}
	var got *newHub
	handler := fuzzHandler(f, func(*server) []route {
		return []route{{"POST", "/x", public, nil, 200, nil, endpoint(parseNewHub, func(_ *requestState, in newHub) (nothing, error) {
			got = &in
			return nothing{}, nil
		})}}
	})
	read := func(body []byte) (*newHub, int) {
		got = nil
		r := httptest.NewRequest("POST", "/x", bytes.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return got, w.Code
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		in, status := read(body)
		if in == nil {
			if status < 400 || status > 499 {
				t.Fatalf("%q: %d", body, status)
			}
			return
		}
		if !(hub{exampleID, in.name, in.description, in.status, time.Now(), time.Now()}).isValid() {
			t.Fatalf("%q was taken, and breaks its contract: %+v", body, in)
		}
		first := *in
		again, err := json.Marshal(map[string]string{"name": first.name, "description": first.description, "status": first.status})
		if err != nil {
			t.Fatal(err)
		}
		if second, status := read(again); second == nil && len(again) <= maxJSONBody || second != nil && *second != first {
			t.Fatalf("%q became %+v, and again %+v (%d)", body, first, second, status)
		}
	})
}

// The same for a query string.
func FuzzQuery(f *testing.F) {
	for _, query := range []string{"", "limit=1", "limit=01", "limit=9223372036854775808", "offset=10000&orderBy=name", "filters[name]=%25_",
		"filters%5Bname%5D=a", "limit=1&limit=1", "a;b", "%zz", "filters[name]=%ff", "filters[name]=%00", "orderDirection=desc&filters[status]=active"} {
		f.Add(query)
	}
	var got *hubQuery
	handler := fuzzHandler(f, func(*server) []route {
		return []route{{"GET", "/x", public, nil, 200, nil, endpoint(parseHubQuery, func(_ *requestState, in hubQuery) (nothing, error) {
			got = &in
			return nothing{}, nil
		})}}
	})
	read := func(query string) (*hubQuery, int) {
		got = nil
		r := httptest.NewRequest("GET", "/x", nil)
		r.URL.RawQuery = query
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return got, w.Code
	}
	f.Fuzz(func(t *testing.T, query string) {
		in, status := read(query)
		if in == nil {
			if status != 400 {
				t.Fatalf("%q: %d", query, status)
			}
			return
		}
		if in.limit < 1 || in.limit > 100 || in.offset < 0 || in.offset > 10000 || hubOrders[in.orderBy] == "" ||
			in.orderDirection != "asc" && in.orderDirection != "desc" {
			t.Fatalf("%q was taken as %+v", query, in)
		}
		first := *in
		if second, _ := read(encodeQuery(first)); second == nil || encodeQuery(*second) != encodeQuery(first) {
			t.Fatalf("%q became %+v, and again %+v", query, first, second)
		}
	})
}

func encodeQuery(q hubQuery) string {
	values := url.Values{"limit": {strconv.Itoa(q.limit)}, "offset": {strconv.Itoa(q.offset)},
		"orderBy": {q.orderBy}, "orderDirection": {q.orderDirection}}
	if q.name != nil {
		values.Set("filters[name]", *q.name)
	}
	if q.status != nil {
		values.Set("filters[status]", *q.status)
	}
	return values.Encode()
}

// G2: neither escapes nor neighbours hide a code or a token from the mask, and a token
// for a method is masked, too.
func TestEscapesHideNothingFromTheMask(t *testing.T) {
	t.Parallel()
	s := startServer(t, stagingEnv(newMailServer(t, mailOptions{host: "0.0.0.0"})))
	token := "eyJhbGciOiJIUzI1NiJ9.eyJlbWFpbCI6ImEifQ.c2lnbmF0dXJl"
	mark := s.log.mark()
	for i, path := range []string{
		"/x?x=%22code%22%3A%22510764%22", "/x?a=code%3D510764", "/x?c=%35%31%30%37%36%34", "/x?co%64e=51076%34",
		"/x?c%256Fde=%2535%2531%2530%2537%2536%2534", "/x/%2535%2531%2530764", "/x?pwd=hunter", "/x?api_key=hunter", "/x?pass=hunter&a",
		"/otp_510764", "/x?ts=_510764", "/x?otp=510764x", "/x?t=" + strings.ReplaceAll(token, ".", "%2E"), "/x?" + token,
	} {
		s.raw(t, fmt.Sprintf("GET %s HTTP/1.1\r\nHost: x\r\nX-Request-Id: mask%d\r\nConnection: close\r\n\r\n", path, i))
		line := s.log.waitAfter(t, mark, fmt.Sprintf(`"requestId":"mask%d"`, i), `"msg":"request"`)
		if strings.Contains(line, "510764") || strings.Contains(line, "eyJ") || strings.Contains(line, "%35%31") ||
			strings.Contains(line, "hunter") {
			t.Errorf("%s: %s", path, line)
		}
	}
	s.raw(t, token+" /x HTTP/1.1\r\nHost: x\r\nX-Request-Id: maskmethod\r\nConnection: close\r\n\r\n")
	if line := s.log.waitAfter(t, mark, "maskmethod", `"msg":"request"`); strings.Contains(line, "eyJ") {
		t.Error(line)
	}
}

// A list of what is wrong ends at twenty, however much is: an answer of many times the
// size of its request would serve who has a third party to flood.
func TestErrorsEndAtTwenty(t *testing.T) {
	t.Parallel()
	c, _ := startServer(t).member(t, "member")
	for _, body := range []string{"{" + strings.Repeat(`"":1,`, 3000) + `"":1}`, "{" + strings.Repeat(`"":"",`, 2000) + `"x":"","y":""}`} {
		r := c.do("POST", "/auth/otp/request", body)
		wantProblem(t, r, 400, "invalid_request")
		if len(r.body) > 2000 {
			t.Errorf("%d bytes of an answer to %d", len(r.body), len(body))
		}
	}
	many := url.Values{}
	for n := range 30 {
		many.Set(fmt.Sprintf("x%02d", n), "")
	}
	r := c.do("GET", "/hubs?"+many.Encode(), nil)
	if named := r.field(t, "errors").([]any); r.status != 400 || len(named) != 20 {
		t.Errorf("%d errors named: %v", len(named), r)
	}
}

// A field that is not known is reported by the first 64 bytes of its name, for the same reason: each
// "<" of it has six characters in the answer.
func TestLongNamesOfFieldsAreCut(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	for name, want := range map[string]string{
		strings.Repeat("<", 5000):       strings.Repeat("<", 64),
		"x" + strings.Repeat("λ", 2500): "x" + strings.Repeat("λ", 31) + "\ufffd",
	} {
		r := call(t, s, one(1), "POST", "/auth/otp/request", fmt.Sprintf(`{%q:1}`, name))
		wantProblem(t, r, 400, "invalid_request", want, "email", want)
		if len(r.body) > 2000 {
			t.Errorf("got %d bytes as the answer to %d, want at most 2000", len(r.body), len(name))
		}
	}
}

// I3: of a JSON object the first 64 members are read, and no more: each costs many times its
// size. So an address behind as many others is not seen.
func TestTooManyMembers(t *testing.T) {
	t.Parallel()
	c := startServer(t).client(t)
	for others, wantField := range map[int]string{63: "x00", 64: "email"} {
		var body strings.Builder
		for n := range others {
			fmt.Fprintf(&body, `"x%02d":"",`, n)
		}
		r := c.do("POST", "/auth/otp/request", "{"+body.String()+`"email":"a@b.example"}`)
		wantProblem(t, r, 400, "invalid_request")
		first := r.field(t, "errors").([]any)[0].(map[string]any)
		if first["field"] != wantField {
			t.Errorf("%d other members: got the field %q first, want %q", others, first["field"], wantField)
		}
	}
}

// An answer of any length says how long it is, so that a client sees when its end is missing.
func TestAnswersTellTheirLength(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	c, _ := srv.member(t, roleMember)
	execSQL(t, srv.env["DATABASE_URL"], "insert into hubs (name) select 'hub ' || n from generate_series(1, 100) n")
	for _, path := range []string{"/auth/session", "/hubs?limit=100"} {
		for _, method := range []string{"GET", "HEAD"} {
			r := c.do(method, path, nil).want(t, 200)
			length, err := strconv.Atoi(r.header.Get("Content-Length"))
			if err != nil || length < 100 || method == "GET" && length != len(r.body) {
				t.Errorf("%s %s: got Content-Length %q of %d bytes", method, path, r.header.Get("Content-Length"), len(r.body))
			}
		}
	}
}

// L4: Retry-After is in whole seconds, rounded up: a client that comes then is not refused again.
func TestRetryAfterIsRoundedUp(t *testing.T) {
	t.Parallel()
	s := newServer(config{env: envLocal}, nil, io.Discard)
	for wait, want := range map[time.Duration]string{time.Millisecond: "1", time.Second: "1", 1001 * time.Millisecond: "2"} {
		w := httptest.NewRecorder()
		state := &requestState{ResponseWriter: w, request: httptest.NewRequest("GET", "/", nil), serverLog: s.log}
		state.fail(rateLimited("by client address", wait))
		if got := w.Header().Get("Retry-After"); w.Code != 429 || got != want {
			t.Errorf("%v: got %d, Retry-After %q, want 429 and %q", wait, w.Code, got, want)
		}
	}
}

// H4: a Content-Type of more than 256 bytes is refused unread.
func TestLongContentTypeIsRefused(t *testing.T) {
	t.Parallel()
	c := startServer(t).client(t)
	for length, want := range map[int]int{256: 401, 257: 415} {
		contentType := "application/json;" + strings.Repeat(" ", length-len("application/json;charset=utf-8")) + "charset=utf-8"
		r := c.do("POST", "/auth/otp/validate", `{"email":"a@b.example","code":"123456"}`, "Content-Type", contentType)
		if r.status != want {
			t.Errorf("%d bytes: got %v, want %d", length, r, want)
		}
	}
}

// A refusal that no waiting helps has no Retry-After.
func TestRetryAfterOnlyWhereWaitingHelps(t *testing.T) {
	t.Parallel()
	s := newOffice(t)
	for path, status := range map[string]int{"/none": 404, "/hubs": 401} {
		answer := call(t, s, one(1), "GET", path, "").want(t, status)
		if got := answer.header.Values("Retry-After"); len(got) != 0 {
			t.Errorf("%s: got Retry-After %q, want none", path, got)
		}
	}
}
