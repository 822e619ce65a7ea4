package api

import (
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// G3, C4, H2: The errors of net/http's router and of http.ServeContent also have the error format
// of this API. They have none of the headers of a success.
func TestRouterProblems(t *testing.T) {
	t.Parallel()
	srv, admin := start(t, "admin")
	file := upload(t, admin, "hello")
	// want sends a request as admin and checks that the answer is this error.
	want := func(request string, status int, code string, headers ...string) *hubstest.Response {
		t.Helper()
		answer := admin.Send(request, nil, headers...)
		hubstest.WantProblem(t, answer, status, code)
		hubstest.WantHeaders(t, answer, map[string]*string{
			"Location":            nil,
			"ETag":                nil,
			"Last-Modified":       nil,
			"Accept-Ranges":       nil,
			"Content-Disposition": nil,
		})
		return answer
	}
	for _, request := range []string{
		"GET /nowhere",
		"GET /HUBS",
		"GET /hubs/a/b",
		"GET /hubs/a%2Fb",
		"GET /hubs/",
		"GET /%00",
		// By itself, http.ServeMux would redirect these to a cleaned path.
		"GET //hubs",
		"GET /./hubs",
		"GET /hubs/../hubs",
		"POST /files//upload",
	} {
		want(request, 404, "not_found")
	}
	for request, allow := range map[string]string{
		"PUT /hubs":             "GET, HEAD, POST",
		"OPTIONS /hubs":         "GET, HEAD, POST",
		"TRACE /hubs":           "GET, HEAD, POST", // H2
		"FOO /hubs":             "GET, HEAD, POST",
		"PUT /hubs/x":           "DELETE, GET, HEAD, PATCH",
		"HEAD /auth/logout":     "POST",
		"GET /auth/otp/request": "POST",
		"POST /openapi.json":    "GET, HEAD",
	} {
		answer := want(request, 405, "method_not_allowed")
		got := answer.Header.Get("Allow")
		if got != allow {
			t.Errorf("%s: got Allow %q, want %q", request, got, allow)
		}
	}
	for _, request := range []string{"GET " + file, "HEAD " + file} {
		want(request, 412, "precondition_failed", "If-Match", `"other"`)
		want(request, 416, "range_not_satisfiable", "Range", "bytes=9-")
	}
	// H2: Without DisableGeneralOptionsHandler, net/http would answer this itself, with a 200.
	options := srv.Wire(t, "OPTIONS", "*", nil)
	hubstest.WantProblem(t, options, 404, "not_found")
}

// A write with If-Match is a 412, because nothing that can be written has an ETag. Only the value *
// is accepted.
func TestIfMatchRefusesWrites(t *testing.T) {
	t.Parallel()
	srv, admin := start(t, "admin")
	for _, r := range contractRoutes(t) {
		if strings.HasPrefix(r.name, "GET ") {
			continue
		}
		q := sample(t, srv, admin, r.name)
		token := admin.Token()
		refused := q.send(srv.With(t, token), "If-Match", `"1"`)
		hubstest.WantProblem(t, refused, 412, "precondition_failed")
		q.send(srv.With(t, token), "If-Match", "*").Must(t, r.status)
	}
}

// I5: An answer made from a row that breaks its constraints is a 500, and no part of the row is
// sent. The log has the error under the id of the request.
func TestBrokenRowsAreNotSent(t *testing.T) {
	t.Parallel()
	srv, admin := start(t, "admin")
	srv.AllowErrorsWithAnyOf("breaks its contract", "file on disk is not the one")
	db := srv.Database
	file := upload(t, admin, "hello")
	made := admin.Send("POST /hubs", `{"name":"a"}`).Must(t, 201)
	hub := made.Header.Get("Location")
	// Without its constraints, a table takes the broken rows below.
	hubstest.Exec(t, db, `do $$ declare c record; begin
		for c in select conrelid::regclass as t, conname from pg_constraint
			where contype = 'c' and connamespace = 'public'::regnamespace loop
			execute format('alter table %s drop constraint %I', c.t, c.conname);
		end loop; end $$`)
	const good = `update hubs set name = 'a', description = '', status = 'active',
			created_at = now(), updated_at = now();
		update files set name = 'a.txt', content_type = 'text/plain', size = 5;
		update users set permission = 'admin'`
	for change, path := range map[string]string{
		"update hubs set status = 'broken'":                    hub,
		"update hubs set name = ''":                            hub,
		"update hubs set name = rpad('broken', 10000)":         "/hubs",
		"update hubs set description = rpad('broken', 10000)":  hub,
		"update hubs set created_at = '0001-01-01 00:00:00+0'": hub,
		"update hubs set updated_at = '0001-01-01 00:00:00+0'": hub,
		"update files set content_type = ''":                   file,
		"update files set size = 6":                            file,
		"update users set permission = 'broken'":               "/auth/session",
	} {
		t.Run(change, func(t *testing.T) {
			hubstest.Exec(t, db, good)
			hubstest.Exec(t, db, change)
			id := hubstest.NewUUID()
			answer := admin.In(t).Get(path, "X-Request-Id", id)
			hubstest.WantProblem(t, answer, 500, "internal")
			if strings.Contains(string(answer.Body), "broken") {
				t.Errorf("got %v, want no part of the row", answer)
			}
			srv.Log.WaitFor(t, `"level":"ERROR"`, id)
		})
	}
}

// A path with a line break in the name of its file is a 404, even if an operator has written such a
// name into the table.
func TestNamesWithLineBreaksAreNotFound(t *testing.T) {
	t.Parallel()
	srv, c := start(t, "member")
	file := upload(t, c, "hello")
	hubstest.Exec(t, srv.Database, "update files set name = E'a\r\nb'")
	withBreak := strings.Replace(file, "a.txt", "a%0D%0Ab", 1)
	hubstest.WantProblem(t, c.Get(withBreak), 404, "not_found")
}
