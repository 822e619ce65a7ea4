// Package api tests the server from outside, through HTTP and SMTP.
package api

import (
	"testing"

	"hubs/internal/hubstest"
)

func TestMain(m *testing.M) {
	hubstest.Main(m)
}

// start starts a local server. Its client has this role, a session, and the terms accepted.
func start(
	t testing.TB, role string, env ...map[string]string,
) (*hubstest.Server, *hubstest.Client) {
	t.Helper()
	s := hubstest.Start(t, env...)
	c, _ := s.Member(t, role)
	return s, c
}

// upload uploads a file, and returns its path.
func upload(t testing.TB, c *hubstest.Client, content string) (path string) {
	t.Helper()
	stored := c.Upload("a.txt", []byte(content)).Want(t, 201)
	return stored.Header.Get("Location")
}

// staging returns the settings of a server on staging, which logs each request and mails the
// codes to a mail server of its own.
func staging(t testing.TB) map[string]string {
	t.Helper()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	return hubstest.StagingEnv(mail)
}

// production is staging for production.
func production(t testing.TB) map[string]string {
	t.Helper()
	mail := hubstest.NewMailServer(t, hubstest.MailOptions{})
	return hubstest.ProductionEnv(mail)
}
