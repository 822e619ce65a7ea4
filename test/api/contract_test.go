package api

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"hubs/internal/hubstest"
)

// The server sends web/openapi.json as it is, but for the name of the cookie: that is the one of
// the environment that serves it.
func TestContractServed(t *testing.T) {
	t.Parallel()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	onDisk := hubstest.ReadFile(t, "web/openapi.json")
	for name, env := range map[string]map[string]string{
		"hubs_auth_local":               nil,
		"acme_auth_local":               {"COOKIE_PREFIX": "acme"},
		"__Secure-hubs_auth_staging":    hubstest.StagingEnv(mail),
		"__Secure-hubs_auth_production": hubstest.ProductionEnv(mail),
	} {
		answer := hubstest.Start(t, env).Client(t).Get("/openapi.json").Want(t, 200)
		if kind := answer.Header.Get("Content-Type"); kind != "application/json" {
			t.Errorf("got the content type %q", kind)
		}
		want := strings.Replace(onDisk, `"name": "hubs_auth_local"`, `"name": "`+name+`"`, 1)
		if string(answer.Body) != want || !strings.Contains(want, name) {
			t.Errorf("got another document than web/openapi.json with the cookie %s", name)
		}
	}
}

// startPrism starts a validating proxy, Prism (npm @stoplight/prism-cli), in front of a server.
// It takes the contract from the server itself, and compares each request and answer with it.
func startPrism(t *testing.T, srv *hubstest.Server) (addr string) {
	t.Helper()
	prism := os.Getenv("PRISM")
	if prism == "" {
		t.Skip("PRISM must be the path of the program; .ci/run fetches it and runs this test")
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free.Close()
	addr = free.Addr().String()
	_, port, _ := strings.Cut(addr, ":")
	output := &hubstest.Log{}
	cmd := exec.Command(prism, "proxy", srv.Base+"/openapi.json", srv.Base, "--errors", "--port", port)
	cmd.Stdout = output
	cmd.Stderr = output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // it starts others
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		cmd.Wait()
		if t.Failed() {
			t.Logf("Prism:\n%s", output)
		}
	})
	output.WaitFor(t, "Prism is listening")
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
	defer func() { srv.Base = direct }()
	email, _ := srv.NewUser(t, "admin")
	admin := srv.SignIn(t, email)
	want := func(status int, q call) *hubstest.Response {
		t.Helper()
		answer, err := admin.Try(q.method, q.path, q.body, q.headers...)
		if err != nil {
			t.Fatalf("%s %s: %v", q.method, q.path, err)
		}
		violation := answer.Header.Get("sl-violations")
		if violation != "" || bytes.Contains(answer.Body, []byte("stoplight")) {
			t.Errorf("got %s in %v, want an answer of the contract", violation, answer)
		}
		return answer.Want(t, status)
	}
	seen, err := admin.Try("POST", "/auth/otp/request", `{"email":"a@b.example","role":"admin"}`)
	if err != nil || !bytes.Contains(seen.Body, []byte("stoplight")) {
		t.Fatalf("got %v, %v; want a violation that the proxy sees", seen, err)
	}
	want(403, call{method: "GET", path: "/hubs"})
	want(409, call{method: "POST", path: "/terms/acceptance", body: `{"version":"2020-01-01"}`})
	admin.AcceptTerms()
	for _, r := range contractRoutes(t) {
		if !strings.HasPrefix(r.name, "POST /auth/") { // they change who admin is
			want(r.status, sample(t, srv, admin, r.name))
		}
	}
	want(404, call{method: "GET", path: "/hubs/" + hubstest.NewUUID()})
	want(200, call{method: "GET", path: "/hubs?limit=1&offset=1&orderBy=createdAt&" +
		"orderDirection=desc&filters%5Bname%5D=o&filters%5Bstatus%5D=active"})
	file := sample(t, srv, admin, "GET /files/{fileId}/{name}")
	etag := want(200, file).Header.Get("ETag")
	for header, status := range map[string]int{
		"Range=bytes=1-2":       206,
		"Range=bytes=99-":       416,
		"If-None-Match=" + etag: 304,
		`If-Match="another"`:    412,
	} {
		name, value, _ := strings.Cut(header, "=")
		file.headers = []string{name, value}
		want(status, file)
	}
	file.method, file.headers = "HEAD", nil
	want(200, file)
	hubstest.Exec(t, srv.Env["DATABASE_URL"], "update users set permission = 'member'")
	want(403, call{method: "POST", path: "/hubs", body: `{"name":"North"}`})
	want(204, call{method: "POST", path: "/auth/logout"})
	admin.SetToken("forged")
	want(401, call{method: "GET", path: "/hubs"})
	ask := call{method: "POST", path: "/auth/otp/request", body: map[string]string{"email": email}}
	for range limitsOf(t, "POST", ask.path)[1].n - 1 {
		want(200, ask)
	}
	want(429, ask)
}
