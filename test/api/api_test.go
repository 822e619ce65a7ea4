// Package api tests the server from outside, through HTTP and SMTP.
package api

import (
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) {
	hubstest.Main(m)
}

// start starts a server, by default in the local environment. It returns the server, and a client
// whose user is new, has this role, is signed in and has accepted the terms.
func start(
	t testing.TB, role string, env ...map[string]string,
) (*hubstest.Server, *hubstest.Client) {
	t.Helper()
	s := hubstest.Start(t, env...)
	c, _ := s.Member(t, role)
	return s, c
}

// upload uploads a file named a.txt with this content, and returns its path.
func upload(t testing.TB, c *hubstest.Client, content string) (path string) {
	t.Helper()
	stored := c.Upload("a.txt", []byte(content)).Want(t, 201)
	return stored.Header.Get("Location")
}

// staging returns the settings of a server on staging with a new mail server. Such a server logs
// each request and sends codes by mail.
func staging(t testing.TB) map[string]string {
	t.Helper()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	return hubstest.StagingEnv(mail)
}

// production returns the settings of a server in production with a new mail server.
func production(t testing.TB) map[string]string {
	t.Helper()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	return hubstest.ProductionEnv(mail)
}
