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
	request string // "GET /hubs"
	body    any
	headers []string
}

func (q call) send(c *hubstest.Client) *hubstest.Response {
	return c.Send(q.request, q.body, q.headers...)
}

// itemPath splits a path behind the last {…} into where such an item is made, and what follows.
var itemPath = regexp.MustCompile(`^(.*)/\{[^}]*\}([^{]*)$`)

const uploadForm = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\n" +
	"Content-Type: text/plain\r\n\r\nhello\r\n--b--\r\n"

// sample returns a right call to a route of the contract, made of the contract's examples. What
// it needs besides the session is made first, by admin.
func sample(
	t *testing.T, srv *hubstest.Server, admin *hubstest.Client, route string,
) call {
	t.Helper()
	method, path, _ := strings.Cut(route, " ")
	q := call{request: route}
	item := itemPath.FindStringSubmatch(path)
	switch {
	case path == "/files/upload":
		q.body = uploadForm
		q.headers = []string{"Content-Type", "multipart/form-data; boundary=b"}
		return q
	case path == "/files/{fileId}/{name}":
		q.request = method + " " + upload(t, admin, "hello")
	case item != nil:
		making := sample(t, srv, admin, "POST "+item[1])
		made := making.send(admin).Want(t, 201)
		q.request = method + " " + made.Header.Get("Location") + item[2]
	}
	operation := []string{"paths", path, strings.ToLower(method)}
	described := hubstest.Contract[map[string]any](t, operation...)
	if described["requestBody"] == nil {
		return q
	}
	fields := hubstest.Contract[map[string]any](t, append(operation,
		"requestBody", "content", "application/json", "schema", "properties")...)
	body := map[string]any{}
	for name, field := range fields {
		examples := field.(map[string]any)["examples"]
		body[name] = examples.([]any)[0]
	}
	if body["code"] != nil {
		_, body["email"], body["code"] = asked(t, srv)
	} else if body["email"] != nil {
		body["email"] = hubstest.NewEmail()
	}
	q.body = body
	return q
}

// needs says who may call each route. It stands here once more, on purpose: the contract and the
// table in README.md are made from the server's own routes.
var needs = map[string]string{
	"POST /auth/otp/request":     "nothing",
	"POST /auth/otp/validate":    "nothing",
	"POST /auth/logout":          "session",
	"GET /auth/session":          "session",
	"POST /terms/acceptance":     "session",
	"GET /hubs":                  "session, terms",
	"GET /hubs/{hubId}":          "session, terms",
	"POST /hubs":                 "session, terms, admin",
	"PATCH /hubs/{hubId}":        "session, terms, admin",
	"DELETE /hubs/{hubId}":       "session, terms, admin",
	"POST /files/upload":         "session, terms",
	"GET /files/{fileId}/{name}": "session, terms",
	"GET /healthz":               "nothing",
	"GET /openapi.json":          "nothing",
}

// A route of the contract: "GET /hubs" needs "session, terms" and is answered with 200.
type route struct {
	name   string
	needs  string
	status int
}

func contractRoutes(t *testing.T) []route {
	t.Helper()
	var all []route
	paths := hubstest.Contract[map[string]any](t, "paths")
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		for _, method := range []string{"get", "post", "put", "patch", "delete"} {
			operation, exists := paths[path].(map[string]any)[method].(map[string]any)
			if !exists {
				continue
			}
			name := strings.ToUpper(method) + " " + path
			if needs[name] == "" {
				t.Errorf("access_test.go does not say what %s needs", name)
			}
			answers := operation["responses"].(map[string]any)
			lowest := slices.Min(slices.Collect(maps.Keys(answers)))
			success, err := strconv.Atoi(lowest)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, route{
				name:   name,
				needs:  needs[name],
				status: success,
			})
		}
	}
	return all
}

// A refusal is how a route answers a visitor who lacks what it needs.
type refusal struct {
	need   string
	status int
	code   string
}

var (
	noSession = refusal{"session", 401, "unauthenticated"}
	suspended = refusal{"session", 403, "account_suspended"}
	noTerms   = refusal{"terms", 403, "terms_not_accepted"}
	noAdmin   = refusal{"admin", 403, "forbidden"}
	nothing   = refusal{need: "-"} // no route needs this
)

// A visitor has one kind of session. Routes refuse it if they need what it lacks.
type visitor struct {
	name  string
	token string
	lacks refusal
}

func (v visitor) isRefusedBy(r route) bool {
	return strings.Contains(r.needs, v.lacks.need)
}

// visitors are in the order of refusals. Those who are refused early lack all that is asked
// for later, too, so that the order shows.
func visitors(
	t *testing.T, srv *hubstest.Server, admin *hubstest.Client,
) []visitor {
	t.Helper()
	signedIn := func(role string, commands ...string) string {
		email, _ := srv.NewUser(t, role)
		token := srv.SignIn(t, email).Token()
		for _, command := range commands {
			srv.User(t, command, email)
		}
		return token
	}
	forged := hubstest.Token{}.Sign("another-secret-of-more-than-thirty-two-bytes",
		"<email>", "a@b.example",
		"<userId>", hubstest.NewUUID())
	member, _ := srv.Member(t, "member")
	return []visitor{
		{"no session", "", noSession},
		{"forged", forged, noSession},
		{"ended", signedIn("member", "suspend", "signout"), noSession},
		{"suspended", signedIn("member", "suspend"), suspended},
		{"terms missing", signedIn("member"), noTerms},
		{"terms missing, admin", signedIn("admin"), noTerms},
		{"wrong role", member.Token(), noAdmin},
		{"good", admin.Token(), nothing},
	}
}

// Z1: who is let in where, and in which order they are refused: session, account, terms, role,
// and only then the input. The client compares each answer with the contract.
func TestRefusals(t *testing.T) {
	t.Parallel()
	srv, admin := start(t, "admin")
	all := visitors(t, srv, admin)
	routes := contractRoutes(t)
	stored := func() (rows string) {
		for _, table := range tables(t) {
			rows += hubstest.Query[string](t, srv.Database,
				"select concat(string_agg(t::text, ' ' order by t::text)) from "+table+" t")
		}
		return rows
	}
	// First those who are refused: one who is let in may get what they lacked.
	for _, r := range routes {
		right := sample(t, srv, admin, r.name)
		wrong := right
		wrong.body = `{"`
		before := stored()
		for _, v := range all {
			if !v.isRefusedBy(r) {
				continue
			}
			t.Run("refused/"+v.name+"/"+r.name, func(t *testing.T) {
				for _, q := range []call{right, wrong} {
					answer := q.send(srv.With(t, v.token))
					hubstest.WantProblem(t, answer, v.lacks.status, v.lacks.code)
				}
			})
		}
		after := stored()
		if after != before {
			t.Errorf("%s: refused, but done: %s is now %s", r.name, before, after)
		}
	}
	for _, r := range routes {
		for _, v := range all {
			if v.isRefusedBy(r) {
				continue
			}
			t.Run("let in/"+v.name+"/"+r.name, func(t *testing.T) {
				right := sample(t, srv, admin.In(t), r.name)
				right.send(srv.With(t, v.token)).Want(t, r.status)
			})
		}
	}
}

// HEAD works wherever GET does, with the same status and headers.
func TestHeadIsGetWithoutBody(t *testing.T) {
	t.Parallel()
	srv, admin := start(t, "admin")
	for _, r := range contractRoutes(t) {
		request := sample(t, srv, admin, r.name).request
		path, isGet := strings.CutPrefix(request, "GET ")
		if !isGet {
			continue
		}
		get := admin.Get(path).Want(t, 200)
		head := admin.Do("HEAD", path, nil).Want(t, 200)
		for _, headers := range []http.Header{get.Header, head.Header} {
			headers.Del("X-Request-Id")
			headers.Del("Date")
		}
		if !maps.EqualFunc(get.Header, head.Header, slices.Equal) {
			t.Errorf("%s: got %v, for HEAD %v",
				r.name, get.Header, head.Header)
		}
		if len(head.Body) != 0 {
			t.Errorf("HEAD %s: got the body %q", path, head.Body)
		}
	}
}
