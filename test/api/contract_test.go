package api

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// In the local environment, the server sends web/index.html byte for byte, also if its cookie has
// another name. The policy in that file has hashes of its script and style (TestPageHashes), so a
// browser would not run a script with another byte.
func TestPageIsServedAsItIs(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t, map[string]string{"COOKIE_PREFIX": "acme"})
	page := s.Client(t).Get("/")
	wantText(t, "GET /", string(page.Body), hubstest.ReadFile(t, "web/index.html"))
}

// The server sends web/openapi.json with one change: the name of the cookie is the server's own.
func TestContractNamesTheCookie(t *testing.T) {
	t.Parallel()
	contract := hubstest.ReadFile(t, "web/openapi.json")
	const local = `"name": "hubs_auth_local"`
	if !strings.Contains(contract, local) {
		t.Errorf("web/openapi.json: got no %s, want the name of the local cookie", local)
	}
	for name, env := range map[string]map[string]string{ // by the name of the cookie
		"hubs_auth_local":               nil,
		"acme_auth_local":               {"COOKIE_PREFIX": "acme"},
		"__Secure-hubs_auth_staging":    staging(t),
		"__Secure-hubs_auth_production": production(t),
	} {
		answer := hubstest.Start(t, env).Client(t).Get("/openapi.json").Must(t, 200)
		want := strings.Replace(contract, local, `"name": "`+name+`"`, 1)
		wantText(t, "GET /openapi.json with "+name, string(answer.Body), want)
	}
}

// startPrism starts Prism (npm @stoplight/prism-cli), a validating proxy, in front of a server, and
// returns its address. Prism reads the contract from the server, and compares each request and
// answer with it.
func startPrism(t *testing.T, s *hubstest.Server) (addr string) {
	t.Helper()
	prism := os.Getenv("PRISM")
	if prism == "" {
		hubstest.Skip(t, "PRISM must be the path of Prism; .ci/run fetches it and runs this test")
	}
	addr = hubstest.FreeAddr(t)
	_, port, _ := strings.Cut(addr, ":")
	program := hubstest.StartProgram(t, exec.Command(prism, "proxy",
		s.Base+"/openapi.json", s.Base,
		"--errors",
		"--port", port))
	program.WaitFor(t, "Prism is listening")
	return addr
}

// Prism finds no violation of the contract in any flow: the contract permits the requests, and
// describes the headers and the body of each answer. The test sends no HEAD where a GET returns
// JSON, because Prism would try to parse the body, which a HEAD does not have.
//
// The test is not parallel, because another one could take the port on which Prism is to listen.
func TestValidatingProxyFindsNoViolation(t *testing.T) {
	s := hubstest.Start(t)
	s.Addr = startPrism(t, s)
	s.Base = "http://" + s.Addr // the clients below talk to Prism
	email, _ := s.NewUser(t, "admin")
	admin := s.SignIn(t, email)
	// Prism must report a violation: the contract has no member role here.
	refused, err := admin.Try("POST /auth/otp/request", `{"email":"a@b.example","role":"admin"}`)
	if err != nil || !bytes.Contains(refused.Body, []byte("stoplight")) {
		t.Fatalf("an unknown member: got %v, %v, want a violation", refused, err)
	}
	p := prismClient{t, admin}
	p.wantAnswer("GET /hubs", nil, 403)
	p.wantAnswer("POST /terms/acceptance", `{"version":"2020-01-01"}`, 409)
	admin.AcceptTerms()
	for _, r := range routes {
		// The routes below /auth would end or replace the session of admin.
		if !strings.HasPrefix(r.Route, "POST /auth/") {
			q := r.call(t, s, admin)
			p.wantAnswer(q.request, q.body, r.Status, q.headers...)
		}
	}
	p.wantAnswer("GET /hubs/"+hubstest.NewUUID(), nil, 404)
	p.wantAnswer("GET /hubs?limit=1&offset=1&orderBy=createdAt&orderDirection=desc"+
		"&filters%5Bname%5D=o&filters%5Bstatus%5D=active", nil, 200)
	p.wantFileAnswers("GET " + admin.Store("a.txt", "hello"))

	s.User(t, "role", email, "member")
	p.wantAnswer("POST /hubs", `{"name":"North"}`, 403)
	p.wantAnswer("POST /auth/logout", nil, 204)
	admin.SetToken("forged")
	p.wantAnswer("GET /hubs", nil, 401)
	body := map[string]string{"email": email}
	for range hubstest.LimitOf(t, askRoute).Requests - 1 { // the sign-in above has asked once
		p.wantAnswer(askRoute, body, 200)
	}
	p.wantAnswer(askRoute, body, 429)
}

// wantFileAnswers sends requests for a file, with conditions and ranges.
func (p prismClient) wantFileAnswers(get string) {
	p.t.Helper()
	etag := p.wantAnswer(get, nil, 200).Header.Get("ETag")
	p.wantAnswer(get, nil, 206, "Range", "bytes=1-2")
	p.wantAnswer(get, nil, 416, "Range", "bytes=99-")
	p.wantAnswer(get, nil, 304, "If-None-Match", etag)
	p.wantAnswer(get, nil, 412, "If-Match", `"another"`)
	p.wantAnswer(strings.Replace(get, "GET", "HEAD", 1), nil, 200)
}

// A prismClient sends requests through Prism. Prism reports a violation in the header
// sl-violations, or answers with an error of its own, which contains "stoplight".
type prismClient struct {
	t *testing.T
	*hubstest.Client
}

// wantAnswer sends a request. It fails the test on a violation of the contract, and on another
// status.
func (p prismClient) wantAnswer(
	request string, body any, status int, headers ...string,
) *hubstest.Response {
	p.t.Helper()
	answer, err := p.Try(request, body, headers...)
	hubstest.Must(p.t, err)
	violation := answer.Header.Get("sl-violations")
	if violation != "" || bytes.Contains(answer.Body, []byte("stoplight")) {
		p.t.Errorf("%s: got the violation %q in %v, want none", request, violation, answer)
	}
	answer.Want(p.t, status)
	return answer
}
