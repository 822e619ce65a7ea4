package api

import (
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A call is a right request to one route.
type call struct {
	method  string
	path    string
	body    any
	headers []string
}

func (q call) send(c *hubstest.Client) *hubstest.Response {
	return c.Do(q.method, q.path, q.body, q.headers...)
}

// itemPath splits a path behind the last {…} into where such an item is made, and what follows.
var itemPath = regexp.MustCompile(`^(.*)/\{[^}]*\}([^{]*)$`)

// sample returns a right call to a route of the contract, made of the contract's examples. What
// it needs besides the session is made first, by admin.
func sample(t *testing.T, srv *hubstest.Server, admin *hubstest.Client, route string) call {
	t.Helper()
	method, path, _ := strings.Cut(route, " ")
	q := call{method: method, path: path}
	item := itemPath.FindStringSubmatch(path)
	switch {
	case path == "/files/upload":
		q.body = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\n" +
			"Content-Type: text/plain\r\n\r\nhello\r\n--b--\r\n"
		q.headers = []string{"Content-Type", "multipart/form-data; boundary=b"}
	case path == "/files/{fileId}/{name}":
		q.path = admin.Upload("a.txt", []byte("hello")).Want(t, 201).Header.Get("Location")
	case item != nil:
		made := sample(t, srv, admin, "POST "+item[1]).send(admin).Want(t, 201)
		q.path = made.Header.Get("Location") + item[2]
	}
	operation := hubstest.Contract[map[string]any](t, "paths", path, strings.ToLower(method))
	if q.body != nil || operation["requestBody"] == nil {
		return q
	}
	fields := hubstest.Contract[map[string]any](t, "paths", path, strings.ToLower(method),
		"requestBody", "content", "application/json", "schema", "properties")
	body := map[string]any{}
	for name, field := range fields {
		body[name] = field.(map[string]any)["examples"].([]any)[0]
	}
	if body["email"] != nil {
		email := hubstest.NewEmail()
		body["email"] = email
		if body["code"] != nil {
			hubstest.AddUser(t, srv.Env["DATABASE_URL"], email, "member")
			srv.Client(t).AskCode(email)
			body["code"] = srv.Code(t, email)
		}
	}
	q.body = body
	return q
}

// A route of the contract: "GET /hubs" needs "session, terms" and is answered with 200.
type route struct {
	name   string
	needs  string
	status int
}

var needsForm = regexp.MustCompile(`Needs: ([^.]*)\.`)

func contractRoutes(t *testing.T) []route {
	t.Helper()
	var all []route
	paths := hubstest.Contract[map[string]any](t, "paths")
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		for _, method := range []string{"get", "post", "patch", "delete"} {
			if paths[path].(map[string]any)[method] == nil {
				continue
			}
			text := hubstest.Contract[string](t, "paths", path, method, "description")
			answers := hubstest.Contract[map[string]any](t, "paths", path, method, "responses")
			success, err := strconv.Atoi(slices.Min(slices.Collect(maps.Keys(answers))))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, route{
				name:   strings.ToUpper(method) + " " + path,
				needs:  needsForm.FindStringSubmatch(text)[1],
				status: success,
			})
		}
	}
	return all
}

// A visitor has one kind of session. What needs the one thing that they lack refuses them with
// this problem.
type visitor struct {
	name   string
	token  string
	lacks  string // "" for nothing
	status int
	code   string
}

func (v visitor) isRefusedBy(r route) bool {
	return v.lacks != "" && strings.Contains(r.needs, v.lacks)
}

// visitors are in the order of refusals. Those who are refused early lack all that is asked
// for later, too, so that the order shows.
func visitors(t *testing.T, srv *hubstest.Server, admin *hubstest.Client) []visitor {
	t.Helper()
	signedIn := func(role, change string) string {
		email, _ := srv.NewUser(t, role)
		token := srv.SignIn(t, email).Token()
		hubstest.Exec(t, srv.Env["DATABASE_URL"], "update users set "+change+" where email = $1", email)
		return token
	}
	forged := hubstest.Token{}.Sign("another-secret-of-more-than-thirty-two-bytes",
		"<email>", "a@b.example", "<userId>", hubstest.NewUUID())
	ended := signedIn("member", "suspended = true, signed_out_at = clock_timestamp()")
	suspended := signedIn("member", "suspended = true")
	newMember := signedIn("member", "suspended = false")
	newAdmin := signedIn("admin", "suspended = false")
	member, _ := srv.Member(t, "member")
	return []visitor{
		{"no session", "", "session", 401, "unauthenticated"},
		{"forged", forged, "session", 401, "unauthenticated"},
		{"ended", ended, "session", 401, "unauthenticated"},
		{"suspended", suspended, "session", 403, "account_suspended"},
		{"terms missing", newMember, "terms", 403, "terms_not_accepted"},
		{"terms missing, admin", newAdmin, "terms", 403, "terms_not_accepted"},
		{"wrong role", member.Token(), "admin", 403, "forbidden"},
		{"good", admin.Token(), "", 0, ""},
	}
}

// Z1: who is let in where, and in which order they are refused: session, account, terms, role,
// and only then the input. The client compares each answer with the contract.
func TestRefusals(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	admin, _ := srv.Member(t, "admin")
	all := visitors(t, srv, admin)
	stored := func() (rows string) {
		for _, table := range tables(t) {
			rows += hubstest.Query[string](t, srv.Env["DATABASE_URL"],
				"select concat(string_agg(t::text, ' ' order by t::text)) from "+table+" t")
		}
		return rows
	}
	// First those who are refused: one who is let in may get what they lacked.
	for _, r := range contractRoutes(t) {
		right := sample(t, srv, admin, r.name)
		wrong := right
		wrong.body = `{"`
		before := stored()
		for _, v := range all {
			if !v.isRefusedBy(r) {
				continue
			}
			t.Run(v.name+"/"+r.name, func(t *testing.T) {
				client := srv.With(t, v.token)
				hubstest.WantProblem(t, right.send(client), v.status, v.code)
				hubstest.WantProblem(t, wrong.send(client), v.status, v.code)
			})
		}
		if after := stored(); after != before {
			t.Errorf("%s: refused, but done: %s is now %s", r.name, before, after)
		}
	}
	for _, r := range contractRoutes(t) {
		for _, v := range all {
			if v.isRefusedBy(r) {
				continue
			}
			t.Run("let in/"+v.name+"/"+r.name, func(t *testing.T) {
				sample(t, srv, admin, r.name).send(srv.With(t, v.token)).Want(t, r.status)
			})
		}
	}
}

// HEAD works wherever GET does, with the same status and headers.
func TestHeadIsGetWithoutBody(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	admin, _ := srv.Member(t, "admin")
	for _, r := range contractRoutes(t) {
		q := sample(t, srv, admin, r.name)
		if q.method != "GET" {
			continue
		}
		get := q.send(admin).Want(t, 200)
		q.method = "HEAD"
		head := q.send(admin).Want(t, 200)
		for _, headers := range []http.Header{get.Header, head.Header} {
			headers.Del("X-Request-Id")
			headers.Del("Date")
		}
		if !maps.EqualFunc(get.Header, head.Header, slices.Equal) {
			t.Errorf("%s: got %v, for HEAD %v", r.name, get.Header, head.Header)
		}
		if len(head.Body) != 0 {
			t.Errorf("HEAD %s: got the body %q", q.path, head.Body)
		}
	}
}
