package api

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// The server sends web/openapi.json as it is, but for the name of the cookie: that is the one of
// the environment that serves it. The local page is web/index.html byte for byte: the hashes in its
// policy are those of the file (TestPageHashes), and with another byte its script would not run.
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
			t.Errorf("got another document than web/openapi.json with the cookie %s", name)
		}
		page, err := c.Try("GET", "/", nil)
		if err != nil {
			t.Fatal(err)
		}
		if s.Env["APP_ENV"] == "local" && string(page.Body) != index {
			t.Error("the page is served with other bytes than those of web/index.html")
		}
	}
}

// startPrism starts a validating proxy, Prism (npm @stoplight/prism-cli), in front of a server.
// It takes the contract from the server itself, and compares each request and answer with it.
func startPrism(t *testing.T, srv *hubstest.Server) (addr string) {
	t.Helper()
	prism := os.Getenv("PRISM")
	if prism == "" {
		hubstest.Skip(t, "PRISM must be the path of the program; .ci/run fetches it and runs this test")
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

// All flows pass the proxy: every answer is one that the contract has, headers and body, for
// requests that it permits. HEAD is left out where GET answers with JSON: Prism would parse the
// body that is not there.
func TestContractProxy(t *testing.T) {
	srv := hubstest.Start(t)
	direct := srv.Base
	srv.Addr = startPrism(t, srv)
	srv.Base = "http://" + srv.Addr // the clients below talk to Prism
	defer func() {
		srv.Base = direct
	}()
	email, _ := srv.NewUser(t, "admin")
	admin := srv.SignIn(t, email)
	seen, err := admin.Try("POST", "/auth/otp/request", `{"email":"a@b.example","role":"admin"}`)
	if err != nil || !bytes.Contains(seen.Body, []byte("stoplight")) {
		t.Fatalf("got %v, %v; want a violation that the proxy sees", seen, err)
	}
	p := prismClient{t, admin}
	p.want(403, "GET /hubs", nil)
	p.want(409, "POST /terms/acceptance", `{"version":"2020-01-01"}`)
	admin.AcceptTerms()
	for _, r := range contractRoutes(t) {
		if !strings.HasPrefix(r.name, "POST /auth/") { // they change who admin is
			q := sample(t, srv, admin, r.name)
			p.want(r.status, q.request,
				q.body, q.headers...)
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

// A prismClient talks to Prism, which tells what violates the contract.
type prismClient struct {
	t *testing.T
	*hubstest.Client
}

func (p prismClient) want(
	status int, request string, body any, headers ...string,
) *hubstest.Response {
	p.t.Helper()
	method, path, _ := strings.Cut(request, " ")
	answer, err := p.Try(method, path,
		body, headers...)
	if err != nil {
		p.t.Fatalf("%s: %v", request, err)
	}
	violation := answer.Header.Get("sl-violations")
	if violation != "" || bytes.Contains(answer.Body, []byte("stoplight")) {
		p.t.Errorf("got %s in %v, want an answer of the contract", violation, answer)
	}
	return answer.Want(p.t, status)
}
