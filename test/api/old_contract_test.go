//go:build moving

package main

// The contract as a client sees it: Prism (npm @stoplight/prism-cli) stands between client and
// server as a validating proxy, and compares each request and each answer with openapi.json.
// .ci/run fetches it and runs this test: PRISM=path/to/prism go test -tags=contract -run TestContractProxy

import (
	"bytes"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// startPrism starts the proxy in front of a server, and returns its address. It takes the
// contract from the server itself, so that the cookie's name is right.
func startPrism(t *testing.T, srv *testServer) (addr string) {
	t.Helper()
	prism := os.Getenv("PRISM")
	if prism == "" {
		t.Fatal("PRISM must be the path of the program prism")
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr = free.Addr().String()
	free.Close()
	_, port, _ := net.SplitHostPort(addr)
	output := &logBuffer{}
	cmd := exec.Command(prism, "proxy", srv.base+"/openapi.json", srv.base, "--errors", "--host", "127.0.0.1", "--port", port)
	cmd.Stdout, cmd.Stderr = output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		<-ended
		if t.Failed() {
			t.Logf("Prism:\n%s", output)
		}
	})
	waitUntil(t, "Prism listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return addr
}

// All flows pass: every answer of the server is one that the contract has, headers and body,
// for requests that the contract permits. HEAD is left out where GET answers with JSON: Prism
// would parse the body that is not there (TestHeadIsGetWithoutBody has these).
func TestContractProxy(t *testing.T) {
	srv := startServer(t)
	direct := srv.base
	proxy := startPrism(t, srv)
	// The clients below talk to Prism. Their cookies are the server's: same host.
	srv.addr, srv.base = proxy, "http://"+proxy
	t.Cleanup(func() { srv.base = direct })
	db := srv.env["DATABASE_URL"]
	email := newEmail()
	testUser(t, db, email, roleAdmin)
	c := srv.client(t)
	want := func(status int, method, path string, body any, headers ...string) *testResponse {
		t.Helper()
		r, err := c.try(method, path, body, headers...)
		if err != nil {
			t.Fatalf("%s %s: %v", method, path, err)
		}
		violation := r.header.Get("sl-violations")
		if r.status != status || violation != "" || bytes.Contains(r.body, []byte("stoplight")) {
			t.Errorf("%s %s: got %d %s\n%s\nwant %d that the contract has", method, path, r.status, violation, r.body, status)
		}
		return r
	}

	t.Run("the proxy sees a violation", func(t *testing.T) {
		for _, request := range []struct{ path, body string }{
			{"/auth/otp/request", `{"email":"no address"}`},
			{"/auth/otp/request", `{"email":"a@b.example","role":"admin"}`},
			{"/auth/otp/validate", `{"email":"a@b.example"}`},
		} {
			r, err := c.try("POST", request.path, request.body)
			if err != nil || !bytes.Contains(r.body, []byte("stoplight")) {
				t.Errorf("%s: got %v, %v; want a violation", request.body, r, err)
			}
		}
	})
	want(200, "GET", "/healthz", nil)
	want(200, "GET", "/openapi.json", nil)

	want(200, "POST", "/auth/otp/request", map[string]string{"email": email})
	code := srv.code(t, email)
	want(401, "POST", "/auth/otp/validate", map[string]string{"email": email, "code": otherCode(code, 1)})
	signedIn := want(200, "POST", "/auth/otp/validate", map[string]string{"email": email, "code": code})
	token := signedIn.header.Get("Set-Cookie")
	if !strings.HasPrefix(token, srv.cookieName()+"=") {
		t.Fatalf("got Set-Cookie %q, want a session", token)
	}
	want(200, "GET", "/auth/session", nil)
	want(403, "GET", "/hubs", nil)
	want(409, "POST", "/terms/acceptance", map[string]string{"version": "2020-01-01"})
	want(200, "POST", "/terms/acceptance", map[string]string{"version": TERMS_VERSION})

	hub := want(201, "POST", "/hubs", map[string]string{"name": "North", "description": "a\nb", "status": "archived"})
	want(201, "POST", "/hubs", map[string]string{"name": "South"})
	id := hub.field(t, "hubId").(string)
	want(200, "GET", "/hubs/"+id, nil)
	want(404, "GET", "/hubs/"+testUUID(), nil)
	want(200, "PATCH", "/hubs/"+id, map[string]string{"description": ""})
	want(200, "GET", "/hubs", nil)
	want(200, "GET", "/hubs?limit=1&offset=1&orderBy=createdAt&orderDirection=desc&filters%5Bname%5D=o&filters%5Bstatus%5D=active", nil)
	want(204, "DELETE", "/hubs/"+id, nil)
	want(404, "DELETE", "/hubs/"+id, nil)

	form := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\nContent-Type: text/plain\r\n\r\nhello\r\n--b--\r\n"
	file := want(201, "POST", "/files/upload", form, "Content-Type", "multipart/form-data; boundary=b")
	path := file.field(t, "path").(string)
	read := want(200, "GET", path, nil)
	if string(read.body) != "hello" {
		t.Errorf("got %q, want the file", read.body)
	}
	want(206, "GET", path, nil, "Range", "bytes=1-2")
	want(304, "GET", path, nil, "If-None-Match", read.header.Get("ETag"))
	want(412, "GET", path, nil, "If-Match", `"other"`)
	want(416, "GET", path, nil, "Range", "bytes=99-")
	want(200, "HEAD", path, nil)
	want(404, "GET", "/files/"+testUUID()+"/a.txt", nil)

	execSQL(t, db, "update users set permission = 'member' where email = $1", email)
	want(403, "POST", "/hubs", map[string]string{"name": "North"})
	execSQL(t, db, "update users set suspended = true where email = $1", email)
	want(403, "GET", "/auth/session", nil)
	execSQL(t, db, "update users set suspended = false, signed_out_at = clock_timestamp() where email = $1", email)
	want(401, "GET", "/auth/session", nil)
	c.http.Jar.SetCookies(c.baseURL(), []*http.Cookie{{Name: srv.cookieName(), Value: "forged", Path: "/"}})
	want(401, "GET", "/hubs", nil)
	again := srv.client(t)
	c = again
	for range 4 {
		want(200, "POST", "/auth/otp/request", map[string]string{"email": email})
	}
	limited := newEmail()
	for range 5 {
		want(200, "POST", "/auth/otp/request", map[string]string{"email": limited})
	}
	want(429, "POST", "/auth/otp/request", map[string]string{"email": limited})
}
