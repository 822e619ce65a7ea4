//go:build moving

package faults

// Z2: a database out of reach is a 503, never a session and never the lack of one; a
// request for a code does not even notice (O6), and once it is back all is as before.
func TestDatabaseAway(t *testing.T) {
	t.Parallel()
	for name, away := range map[string]func(*tcpProxy){"cut": (*tcpProxy).cut, "hangs": (*tcpProxy).hang} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := newDatabase(t)
			proxy, database := proxyURL(t, direct)
			srv := startServer(t, map[string]string{"DATABASE_URL": database})
			srv.allowErrors("unavailable", "code not sent")
			c, _ := srv.member(t, "admin")
			email := newEmail()
			testUser(t, direct, email, "member")
			guest := srv.client(t)
			askCode(guest, email)
			code := srv.code(t, email)

			away(proxy)
			var all sync.WaitGroup
			for _, send := range []func() *testResponse{
				func() *testResponse { return c.do("GET", "/auth/session", nil) },
				func() *testResponse { return c.do("POST", "/auth/logout", nil) },
				func() *testResponse { return c.do("GET", "/hubs", nil) },
				func() *testResponse {
					return c.do("POST", "/terms/acceptance", map[string]string{"version": TERMS_VERSION})
				},
				func() *testResponse { return c.do("GET", "/healthz", nil) },
				func() *testResponse { return presentCode(guest, email, code) },
			} {
				all.Go(func() {
					r := send()
					wantProblem(t, r, 503, "unavailable")
					if r.header.Get("Set-Cookie") != "" {
						t.Errorf("a cookie with a 503: %v", r)
					}
				})
			}
			// What needs no database is decided without it.
			wantProblem(t, srv.client(t).do("GET", "/hubs", nil), 401, rejected)
			wantProblem(t, presentCode(guest, newEmail(), code), 401, "invalid_code")
			wantProblem(t, presentCode(guest, email, otherCode(code, 1)), 401, "invalid_code")
			askCode(guest, newEmail())
			srv.log.waitFor(t, "code not sent", "ERROR")
			all.Wait()

			proxy.resume()
			waitUntil(t, "recovered", func() bool { r, _ := c.try("GET", "/auth/session", nil); return r.status == 200 })
			if guest.token() != "" {
				t.Fatal("signed in while the database was away")
			}
			// The attempt used nothing up: the code is still good, once. But it was counted, as
			// the wrong one was: eight of the ten attempts are left.
			for range 7 {
				wantProblem(t, presentCode(guest, email, otherCode(code, 1)), 401, "invalid_code")
			}
			presentCode(guest, email, code).want(t, 200)
			wantProblem(t, presentCode(guest, email, code), 429, "rate_limited")
		})
	}
}

// Z2: so is a database that is there, and takes no connections: for the operator closed it,
// renamed it, or changed the role's password.
func TestDatabaseRefusesConnections(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	name := database[strings.LastIndexByte(database, '/')+1:]
	name, _, _ = strings.Cut(name, "?")
	operator := withDatabase(database, "postgres")
	srv := startServer(t, map[string]string{"DATABASE_URL": database})
	srv.allowErrors("unavailable")
	c, _ := srv.member(t, "member")
	for closing, opening := range map[string]string{
		"alter database " + name + " allow_connections false":  "alter database " + name + " allow_connections true",
		"alter database " + name + " rename to " + name + "_x": "alter database " + name + "_x rename to " + name,
	} {
		if strings.Contains(closing, "rename") {
			endConnections(t, operator, name)
		}
		execSQL(t, operator, closing)
		endConnections(t, operator, name)
		wantProblem(t, c.do("GET", "/auth/session", nil), 503, "unavailable")
		wantProblem(t, c.do("GET", "/healthz", nil), 503, "unavailable")
		execSQL(t, operator, opening)
		c.do("GET", "/healthz", nil).want(t, 200)
		c.do("GET", "/auth/session", nil).want(t, 200)
	}
}

func endConnections(t *testing.T, operator, database string) {
	queryValue[int](t, operator, "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname like $1", database+"%")
}
