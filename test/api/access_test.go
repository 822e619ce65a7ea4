package api

import (
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A call is a request to one route.
type call struct {
	request string // "GET /hubs"
	body    any
	headers []string
}

// send sends the request with these headers besides its own.
func (q call) send(c *hubstest.Client, headers ...string) *hubstest.Response {
	return c.Do(q.request, q.body, slices.Concat(q.headers, headers)...)
}

// validCall returns a valid call to a route. What its path names is made first.
func (m maker) validCall(t *testing.T, r operation) call {
	t.Helper()
	method, template, _ := strings.Cut(r.Route, " ")
	return callOf(t, m.Server, r, method+" "+m.newPath(t, template))
}

// callOf returns a valid call to a route whose path has these values.
func callOf(t *testing.T, s *hubstest.Server, r operation, request string) call {
	t.Helper()
	if r.Route == uploadRoute {
		return call{
			request: request,
			body:    form(partHeader, "hello"),
			headers: []string{"Content-Type", formType},
		}
	}
	return call{request: request, body: validBody(t, s, r)}
}

// validBody returns a valid body for a route, or nil if the route takes none. It has the examples of the
// contract. If it needs a code, a new user asks for it.
func validBody(t *testing.T, s *hubstest.Server, r operation) any {
	t.Helper()
	if r.Fields == nil || strings.HasPrefix(r.Route, "GET ") {
		return nil
	}
	body := map[string]any{}
	for _, field := range r.Fields {
		body[field.Name] = hubstest.Example(field.Schema)
	}
	if body["code"] != nil {
		g := s.NewGuest(t)
		body["email"] = g.Email
		body["code"] = g.Code
	} else if body["email"] != nil {
		body["email"] = hubstest.NewEmail()
	}
	return body
}

// A refusal is the answer of a route to a visitor that lacks something that the route needs.
type refusal struct {
	need   string // the part of a route's needs that the visitor lacks
	status int
	code   string
}

var (
	noSession = refusal{need: "session", status: 401, code: "unauthenticated"}
	suspended = refusal{need: "session", status: 403, code: "account_suspended"}
	noTerms   = refusal{need: "terms", status: 403, code: "terms_not_accepted"}
	noAdmin   = refusal{need: "admin", status: 403, code: "forbidden"}
)

// A visitor is a client with a certain kind of session, or without one. A route refuses it if the
// route needs what the visitor lacks.
type visitor struct {
	name  string
	token string
	lacks refusal // if it is empty, the visitor lacks nothing
}

func (v visitor) isRefusedBy(r operation) bool {
	return v.lacks != refusal{} && strings.Contains(r.Needs, v.lacks.need)
}

// visitors returns the visitors in the order of the server's checks: session, account, terms, role.
// A visitor that fails one check also fails the later ones, so that its answer shows which check
// comes first. The exception is the administrator without the terms.
func visitors(t *testing.T, s *hubstest.Server, admin *hubstest.Client) []visitor {
	t.Helper()
	// signedIn returns the session token of a new user. After the sign-in, it runs the commands
	// on the user.
	signedIn := func(role string, commands ...string) string {
		email, _ := s.NewUser(t, role)
		token := s.SignIn(t, email).Token()
		for _, command := range commands {
			s.User(t, command, email)
		}
		return token
	}
	member, _ := s.Member(t, "member")
	return []visitor{
		{name: "no session", lacks: noSession},
		{name: "ended", token: signedIn("member", "suspend", "signout"), lacks: noSession},
		{name: "suspended", token: signedIn("member", "suspend"), lacks: suspended},
		{name: "terms missing", token: signedIn("member"), lacks: noTerms},
		{name: "terms missing, admin", token: signedIn("admin"), lacks: noTerms},
		{name: "wrong role", token: member.Token(), lacks: noAdmin},
		{name: "good", token: admin.Token()},
	}
}

// allRows returns the rows of all tables as a text.
func allRows(t *testing.T, s *hubstest.Server) (rows string) {
	t.Helper()
	for _, table := range hubstest.Tables(t) {
		rows += hubstest.Query[string](t, s.Database,
			"select concat(string_agg(t::text, ' ' order by t::text)) from "+table+" t")
	}
	return rows
}

// Z1: Each route refuses a visitor that lacks what the route needs, and lets all others in. It
// checks session, account, terms and role in this order, and only then the input: a malformed body
// does not change the refusal. A refused request changes no row. hubstest.Client compares each
// answer with the contract.
func TestEveryRouteChecksAccess(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	all := visitors(t, s, admin)

	// Refusals come first, because a request that is let in may give its visitor what it lacks:
	// POST /terms/acceptance accepts the terms.
	for _, r := range routes {
		valid := maker{s, admin, admin}.validCall(t, r)
		malformed := valid
		malformed.body = `{"`
		before := allRows(t, s)
		for _, v := range all {
			if !v.isRefusedBy(r) {
				continue
			}
			t.Run("refused/"+v.name+"/"+r.Route, func(t *testing.T) {
				for _, q := range []call{valid, malformed} {
					answer := q.send(s.With(t, v.token))
					answer.WantProblem(t, v.lacks.status, v.lacks.code)
				}
			})
		}
		wantEqual(t, r.Route+": rows after refused requests", allRows(t, s), before)
	}

	for _, r := range routes {
		for _, v := range all {
			if v.isRefusedBy(r) {
				continue
			}
			t.Run("let in/"+v.name+"/"+r.Route, func(t *testing.T) {
				c := s.With(t, v.token)
				m := maker{s, admin, admin}
				if r.Owner == true {
					m.user = c
				}
				m.validCall(t, r).send(c).Want(t, r.Status)
			})
		}
	}
}

// A HEAD has the status and the headers of a GET for the same path, and the contract lists the same
// parameters and answers for both. (Its body, if it had one, would not be seen: net/http neither
// sends nor receives one.)
func TestHeadIsLikeGet(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	for _, r := range routes {
		template, isGet := strings.CutPrefix(r.Route, "GET ")
		if !isGet {
			continue
		}
		listed := func(method string) []any {
			operation := hubstest.Contract[map[string]any](t, "paths", template, method)
			answers, _ := operation["responses"].(map[string]any)
			return []any{operation["parameters"], slices.Sorted(maps.Keys(answers))}
		}
		wantEqual(t, "the contract's HEAD of "+template, listed("head"), listed("get"))

		path := strings.TrimPrefix(maker{s, admin, admin}.validCall(t, r).request, "GET ")
		get := admin.Get(path).Must(t, 200)
		head := admin.Do("HEAD "+path, nil)
		head.Want(t, 200)
		for _, headers := range []http.Header{get.Header, head.Header} {
			headers.Del("X-Request-Id") // a new one for each request
			headers.Del("Date")
		}
		wantEqual(t, "headers of HEAD "+path, head.Header, get.Header)
	}
}
