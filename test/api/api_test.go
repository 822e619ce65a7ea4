// Package api tests the server from outside, through HTTP and SMTP.
package api

import (
	"strings"
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

// newRole makes a role of PostgreSQL's without any right, and returns its name and the URL of
// the database with it.
func newRole(t testing.TB, database string) (role, roleURL string) {
	t.Helper()
	const password = "secret-1"
	role = "role_" + strings.ReplaceAll(hubstest.NewUUID(), "-", "")
	hubstest.Exec(t, database,
		"create role "+role+" login password '"+password+"'")
	t.Cleanup(func() {
		hubstest.Exec(t, database, "drop owned by "+role+"; drop role "+role)
	})
	return role, hubstest.WithUser(t, database, role, password)
}
