package api

import (
	"fmt"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A routerCase is a request that no route takes, or a condition or range of a file that does not
// hold. <file> is the path of a file of five bytes.
type routerCase struct {
	Name, Rule string
	Request    string
	Headers    []string
	Want       answer
}

// G3, C4, H2: The errors of net/http's router and of http.ServeContent also have the error format
// of this API. They have none of the headers of a success.
func TestRouterProblems(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	file := admin.Store("a.txt", "hello")
	runCases(t, routerCases, func(t *testing.T, c routerCase) {
		request := fillIn(c.Request, "<file>", file)
		r := admin.In(t).Do(request, nil, c.Headers...)
		wantAnswer(t, r, c.Want)
		wantHeaders(t, r, headers{
			"Location":            "",
			"ETag":                "",
			"Last-Modified":       "",
			"Accept-Ranges":       "",
			"Content-Disposition": "",
		})
	})
	// H2: Without DisableGeneralOptionsHandler, net/http would answer this itself, with a 200.
	onTheWire(t, s, "OPTIONS *", nil).WantProblem(t, 404, "not_found")
}

var routerCases = []group[routerCase]{
	// No such path.
	{Each: routerCase{Rule: "G3", Want: fails(404, "not_found")}, Cases: []routerCase{
		{Name: "GET /nowhere", Request: "GET /nowhere"},
		{Name: "GET /HUBS", Request: "GET /HUBS"},
		{Name: "GET /hubs/a/b", Request: "GET /hubs/a/b"},
		{Name: "GET /hubs/a%2Fb", Request: "GET /hubs/a%2Fb"},
		{Name: "GET /hubs/", Request: "GET /hubs/"},
		{Name: "GET /%00", Request: "GET /%00"},
	}},
	// A path that http.ServeMux, by itself, would redirect to a cleaned path.
	{Each: routerCase{Rule: "G3", Want: fails(404, "not_found")}, Cases: []routerCase{
		{Name: "GET //hubs", Request: "GET //hubs"},
		{Name: "GET /./hubs", Request: "GET /./hubs"},
		{Name: "GET /hubs/../hubs", Request: "GET /hubs/../hubs"},
		{Name: "POST /files//upload", Request: "POST /files//upload"},
	}},
	// No such method.
	{Each: routerCase{Rule: "G3", Want: fails(405, "method_not_allowed")}, Cases: []routerCase{
		{Name: "PUT /hubs", Request: "PUT /hubs",
			Want: answer{Headers: headers{"Allow": "GET, HEAD, POST"}}},
		{Name: "OPTIONS /hubs", Request: "OPTIONS /hubs",
			Want: answer{Headers: headers{"Allow": "GET, HEAD, POST"}}},
		{Name: "TRACE /hubs", Request: "TRACE /hubs", Rule: "H2",
			Want: answer{Headers: headers{"Allow": "GET, HEAD, POST"}}},
		{Name: "FOO /hubs", Request: "FOO /hubs",
			Want: answer{Headers: headers{"Allow": "GET, HEAD, POST"}}},
		{Name: "PUT /hubs/x", Request: "PUT /hubs/x",
			Want: answer{Headers: headers{"Allow": "DELETE, GET, HEAD, PATCH"}}},
		{Name: "HEAD /auth/logout", Request: "HEAD /auth/logout",
			Want: answer{Headers: headers{"Allow": "POST"}}},
		{Name: "GET /auth/otp/request", Request: "GET /auth/otp/request",
			Want: answer{Headers: headers{"Allow": "POST"}}},
		{Name: "POST /openapi.json", Request: "POST /openapi.json",
			Want: answer{Headers: headers{"Allow": "GET, HEAD"}}},
	}},
	// A condition of a file that does not hold.
	{Each: routerCase{Rule: "G3", Want: fails(412, "precondition_failed")}, Cases: []routerCase{
		{Name: "GET a file, If-Match", Request: "GET <file>",
			Headers: []string{"If-Match", `"other"`}},
		{Name: "HEAD a file, If-Match", Request: "HEAD <file>",
			Headers: []string{"If-Match", `"other"`}},
	}},
	// A range beyond the end of a file.
	{Each: routerCase{Rule: "G3", Want: fails(416, "range_not_satisfiable")}, Cases: []routerCase{
		{Name: "GET a file, Range", Request: "GET <file>", Headers: []string{"Range", "bytes=9-"}},
		{Name: "HEAD a file, Range", Request: "HEAD <file>", Headers: []string{"Range", "bytes=9-"}},
	}},
}

// I5: An answer made from a row that breaks the contract is a 500, in a list too, and no part of the row
// is sent. The log has the error under the id of the request.
func TestBrokenRowsAreNotSent(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	s.AllowErrorsWithAnyOf("breaks its contract", "file on disk is not")
	db := s.Database
	file := admin.Store("a.txt", "hello")
	shown := map[string][]string{} // paths by the id of the table whose rows they show
	for _, r := range routes {
		template, isGet := strings.CutPrefix(r.Route, "GET ")
		if isGet && strings.HasSuffix(template, "Id}") {
			path := maker{s, admin, admin}.newPath(t, template)
			key := snakeCase(idOf(collectionOf(template)))
			shown[key] = []string{path}
			if _, isListed := listOf(collectionOf(template)); isListed {
				shown[key] = append(shown[key], collectionOf(path))
			}
		}
	}
	columns := keyedColumns(t, db)
	// Without its constraints, a table takes the broken rows below.
	hubstest.Exec(t, db, `do $$ declare c record; begin
		for c in select conrelid::regclass as t, conname from pg_constraint
			where contype = 'c' and connamespace = 'public'::regnamespace loop
			execute format('alter table %s drop constraint %I', c.t, c.conname);
		end loop; end $$`)

	wantNotSent := func(table, column, kind string, paths []string, bad ...any) {
		t.Run(table+"."+column, func(t *testing.T) {
			set := fmt.Sprintf("update %s set %s = $1::text::%s", table, column, kind)
			good := hubstest.Query[string](t, db, fmt.Sprintf("select min(%s::text) from %s", column, table))
			t.Cleanup(func() { hubstest.Exec(t, db, set, good) })
			for _, value := range bad {
				text := fmt.Sprint(value)
				hubstest.Exec(t, db, set, text)
				for _, path := range paths {
					answer := admin.In(t).Elsewhere().Get(path)
					answer.WantProblem(t, 500, "internal")
					if len(text) > 3 && strings.Contains(string(answer.Body), text) {
						t.Errorf("%s: got a part of the row, want none", path)
					}
					waitLogged(t, s, answer, `"level":"ERROR"`)
				}
			}
		})
	}
	for _, c := range columns {
		_, bad := valuesOf(c.schema)
		if c.Type == "timestamp with time zone" {
			bad = []any{"0001-01-01 00:00:00+0"} // as if the scan had missed the column
		}
		if shown[c.Key] != nil && c.schema != nil && bad != nil {
			wantNotSent(c.Table, c.Name, c.Type, shown[c.Key], bad...)
		}
	}
	wantNotSent("files", "content_type", "text", []string{file}, "")
	wantNotSent("files", "size", "bigint", []string{file}, 6)
	wantNotSent("users", "permission", "text", []string{"/auth/session"}, "broken")
}

// I5, F3: An insert after which there is no row, because of a trigger, is a 500. An upload leaves
// no bytes.
func TestInsertsWithoutARowAreErrors(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	s.AllowErrorsWithAnyOf(`"msg":"failed"`)
	c, _, current := newcomer(t, s)
	hubstest.Exec(t, s.Database, `create function nothing() returns trigger
		language plpgsql as $$ begin return null; end $$`)
	for _, table := range hubstest.Tables(t) {
		hubstest.Exec(t, s.Database, "create trigger nothing before insert on "+table+
			" for each row execute function nothing()")
	}
	admin.Do("POST /hubs", `{"name":"North"}`).WantProblem(t, 500, "internal")
	admin.Upload("a.txt", []byte("hello")).WantProblem(t, 500, "internal")
	accept(c, current).WantProblem(t, 500, "internal")
	s.WantStored(t, 0)
	wantTerms(t, c, false)
}
