package api

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// needs has the access rule of each route. It repeats the rules on purpose: the contract and the
// table in README.md are made from the server's routes, so they would repeat a mistake in them.
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

// A route is an operation of the contract, with its access rule.
type route struct {
	name   string // "GET /hubs"
	needs  string // "session, terms"
	status int    // of a success
}

// contractRoutes returns all routes of the contract. The lowest status that the contract lists for
// a route is that of a success.
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
				t.Errorf("needs in access_test.go has no entry for %s", name)
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

// A refusal is the answer of a route to a visitor that lacks something that the route needs.
type refusal struct {
	need   string // the part of a route's needs that the visitor lacks
	status int
	code   string
}

var (
	noSession = refusal{"session", 401, "unauthenticated"}
	suspended = refusal{"session", 403, "account_suspended"}
	noTerms   = refusal{"terms", 403, "terms_not_accepted"}
	noAdmin   = refusal{"admin", 403, "forbidden"}
)

// A visitor is a client with a certain kind of session, or without one. A route refuses it if the
// route needs what the visitor lacks.
type visitor struct {
	name  string
	token string
	lacks refusal // if it is empty, the visitor lacks nothing
}

func (v visitor) isRefusedBy(r route) bool {
	return v.lacks != refusal{} && strings.Contains(r.needs, v.lacks.need)
}

// visitors returns the visitors in the order of the server's checks: session, account, terms, role.
// A visitor that fails one check also fails the later ones, so that its answer shows which check
// comes first. The exception is the administrator without the terms.
func visitors(t *testing.T, srv *hubstest.Server, admin *hubstest.Client) []visitor {
	t.Helper()
	// signedIn returns the session token of a new user. After the sign-in, it runs the commands
	// on the user.
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
		// name, token, lacks
		{"no session", "", noSession},
		{"forged", forged, noSession},
		{"ended", signedIn("member", "suspend", "signout"), noSession},
		{"suspended", signedIn("member", "suspend"), suspended},
		{"terms missing", signedIn("member"), noTerms},
		{"terms missing, admin", signedIn("admin"), noTerms},
		{"wrong role", member.Token(), noAdmin},
		{"good", admin.Token(), refusal{}},
	}
}

// Z1: Each route refuses a visitor that lacks what the route needs, and lets all others in. It
// checks session, account, terms and role in this order, and only then the input: a malformed body
// does not change the refusal. A refused request changes no row. hubstest.Client compares each
// answer with the contract.
func TestEveryRouteChecksAccess(t *testing.T) {
	t.Parallel()
	srv, admin := start(t, "admin")
	all := visitors(t, srv, admin)
	routes := contractRoutes(t)
	// allRows returns the rows of all tables as a text.
	allRows := func() (rows string) {
		for _, table := range hubstest.Tables(t) {
			rows += hubstest.Query[string](t, srv.Database,
				"select concat(string_agg(t::text, ' ' order by t::text)) from "+table+" t")
		}
		return rows
	}
	// Refusals come first, because a request that is let in may give its visitor what it lacks:
	// POST /terms/acceptance accepts the terms.
	for _, r := range routes {
		valid := sample(t, srv, admin, r.name)
		malformed := valid
		malformed.body = `{"`
		before := allRows()
		for _, v := range all {
			if !v.isRefusedBy(r) {
				continue
			}
			t.Run("refused/"+v.name+"/"+r.name, func(t *testing.T) {
				for _, q := range []call{valid, malformed} {
					answer := q.send(srv.With(t, v.token))
					hubstest.WantProblem(t, answer, v.lacks.status, v.lacks.code)
				}
			})
		}
		after := allRows()
		if after != before {
			t.Errorf("%s: after refused requests: got the rows\n%s\nwant\n%s", r.name, after, before)
		}
	}
	for _, r := range routes {
		for _, v := range all {
			if v.isRefusedBy(r) {
				continue
			}
			t.Run("let in/"+v.name+"/"+r.name, func(t *testing.T) {
				valid := sample(t, srv, admin.In(t), r.name)
				valid.send(srv.With(t, v.token)).Must(t, r.status)
			})
		}
	}
}

// A HEAD has the status and the headers of a GET for the same path. (Its body, if it had one, would
// not be seen: net/http neither sends nor receives one.)
func TestHeadIsLikeGet(t *testing.T) {
	t.Parallel()
	srv, admin := start(t, "admin")
	for _, r := range contractRoutes(t) {
		request := sample(t, srv, admin, r.name).request
		path, isGet := strings.CutPrefix(request, "GET ")
		if !isGet {
			continue
		}
		get := admin.Get(path).Must(t, 200)
		head := admin.Do("HEAD", path, nil).Must(t, 200)
		for _, headers := range []http.Header{get.Header, head.Header} {
			headers.Del("X-Request-Id") // a new one for each request
			headers.Del("Date")
		}
		if !maps.EqualFunc(get.Header, head.Header, slices.Equal) {
			t.Errorf("HEAD %s: got the headers %v, want those of GET: %v",
				path, head.Header, get.Header)
		}
	}
}
