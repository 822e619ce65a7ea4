package api

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// The server sends web/openapi.json with one change: the name of the cookie is the server's own. In
// the local environment, it sends web/index.html byte for byte. The policy in that file has hashes
// of its script and style (TestPageHashes), so a browser would not run a script with another byte.
func TestDocumentsServed(t *testing.T) {
	t.Parallel()
	contract := hubstest.ReadFile(t, "web/openapi.json")
	index := hubstest.ReadFile(t, "web/index.html")
	for name, env := range map[string]map[string]string{
		"hubs_auth_local":               nil,
		"acme_auth_local":               {"COOKIE_PREFIX": "acme"},
		"__Secure-hubs_auth_staging":    staging(t),
		"__Secure-hubs_auth_production": production(t),
	} {
		s := hubstest.Start(t, env)
		c := s.Client(t)
		answer := c.Get("/openapi.json").Want(t, 200)
		want := strings.Replace(contract, `"name": "hubs_auth_local"`, `"name": "`+name+`"`, 1)
		if string(answer.Body) != want || !strings.Contains(want, name) {
			t.Errorf("GET /openapi.json: got another text, want web/openapi.json with the name %s",
				name)
		}
		page := c.Get("/")
		if s.Env["APP_ENV"] == "local" && string(page.Body) != index {
			t.Error("GET /: got other bytes, want those of web/index.html")
		}
	}
}

// startPrism starts Prism (npm @stoplight/prism-cli), a validating proxy, in front of a server, and
// returns its address. Prism reads the contract from the server, and compares each request and
// answer with it.
func startPrism(t *testing.T, srv *hubstest.Server) (addr string) {
	t.Helper()
	prism := os.Getenv("PRISM")
	if prism == "" {
		hubstest.Skip(t, "PRISM must be the path of Prism; .ci/run fetches it and runs this test")
	}
	addr = hubstest.FreeAddr(t)
	_, port, _ := strings.Cut(addr, ":")
	program := hubstest.StartProgram(t, exec.Command(prism, "proxy",
		srv.Base+"/openapi.json", srv.Base,
		"--errors",
		"--port", port))
	program.WaitFor(t, "Prism is listening")
	return addr
}

// Prism finds no violation of the contract in any flow: the contract permits the requests, and
// describes the headers and the body of each answer. The test sends no HEAD where a GET returns
// JSON, because Prism would try to parse the body, which a HEAD does not have.
func TestContractProxy(t *testing.T) {
	srv := hubstest.Start(t)
	srv.Addr = startPrism(t, srv)
	srv.Base = "http://" + srv.Addr // the clients below talk to Prism
	email, _ := srv.NewUser(t, "admin")
	admin := srv.SignIn(t, email)
	// Prism must report a violation: the contract has no member role here.
	refused, err := admin.Try("POST", "/auth/otp/request", `{"email":"a@b.example","role":"admin"}`)
	if err != nil || !bytes.Contains(refused.Body, []byte("stoplight")) {
		t.Fatalf("an unknown member: got %v, %v, want a violation", refused, err)
	}
	p := prismClient{t, admin}
	p.want(403, "GET /hubs", nil)
	p.want(409, "POST /terms/acceptance", `{"version":"2020-01-01"}`)
	admin.AcceptTerms()
	for _, r := range contractRoutes(t) {
		// The routes below /auth would end or replace the session of admin.
		if !strings.HasPrefix(r.name, "POST /auth/") {
			q := sample(t, srv, admin, r.name)
			p.want(r.status, q.request, q.body, q.headers...)
		}
	}
	p.want(404, "GET /hubs/"+hubstest.NewUUID(), nil)
	p.want(200, "GET /hubs?limit=1&offset=1&orderBy=createdAt&orderDirection=desc"+
		"&filters%5Bname%5D=o&filters%5Bstatus%5D=active", nil)
	file := sample(t, srv, admin, "GET /files/{fileId}/{name}").request
	whole := p.want(200, file, nil)
	etag := whole.Header.Get("ETag")
	p.want(206, file, nil, "Range", "bytes=1-2")
	p.want(416, file, nil, "Range", "bytes=99-")
	p.want(304, file, nil, "If-None-Match", etag)
	p.want(412, file, nil, "If-Match", `"another"`)
	head := strings.Replace(file, "GET", "HEAD", 1)
	p.want(200, head, nil)
	srv.User(t, "role", email, "member")
	p.want(403, "POST /hubs", `{"name":"North"}`)
	p.want(204, "POST /auth/logout", nil)
	admin.SetToken("forged")
	p.want(401, "GET /hubs", nil)
	ask := map[string]string{"email": email}
	for range hubstest.LimitOf(t, askRoute).Requests - 1 {
		p.want(200, askRoute, ask)
	}
	p.want(429, askRoute, ask)
}

// A prismClient sends requests through Prism. Prism reports a violation in the header
// sl-violations, or answers with an error of its own, which contains "stoplight".
type prismClient struct {
	t *testing.T
	*hubstest.Client
}

// want sends a request. It fails on a violation of the contract, and on another status.
func (p prismClient) want(
	status int, request string, body any, headers ...string,
) *hubstest.Response {
	p.t.Helper()
	method, path, _ := strings.Cut(request, " ")
	answer, err := p.Try(method, path, body, headers...)
	if err != nil {
		p.t.Fatalf("%s: %v", request, err)
	}
	violation := answer.Header.Get("sl-violations")
	if violation != "" || bytes.Contains(answer.Body, []byte("stoplight")) {
		p.t.Errorf("%s: got the violation %q in %v, want none", request, violation, answer)
	}
	return answer.Want(p.t, status)
}
