package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// I1, I2: every parameter has its allow-list or its bounds, and stands there once.
func TestHubListParameters(t *testing.T) {
	t.Parallel()
	file := hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		Path  string
		Query string
	}](t, "queries.json")
	srv, admin := start(t, "admin")
	for _, hub := range file.Hubs {
		admin.Send("POST /hubs", hub).Want(t, 201)
	}
	member, _ := srv.Member(t, "member")
	cookie := srv.CookieName() + "=" + member.Token()
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			path := cmp.Or(c.Path, "/hubs")
			target := path + "?" + hubstest.FillIn(c.Query)
			answer := srv.Wire(t, "GET", target, nil,
				"Cookie", cookie,
				"X-Forwarded-For", hubstest.NewIP())
			c.Expect.Check(t, answer)
		})
	}
}

// A bodyCase is a request with a body. bodies.json says what the members mean.
type bodyCase struct {
	hubstest.CorpusCase
	As      string
	Method  string
	Path    string
	Type    *string
	Headers []string
	Body    json.RawMessage
}

// I3, Z3, O9: one flat JSON object, each member known, there once, a whole text.
func TestStrictJSON(t *testing.T) {
	t.Parallel()
	srv, admin := start(t, "admin")
	member, _ := srv.Member(t, "member")
	sessions := map[string]*hubstest.Client{
		"":       srv.Client(t),
		"admin":  admin,
		"member": member,
	}
	hub := admin.Send("POST /hubs", `{"name":"Corpus hub"}`).Want(t, 201)
	words := []string{
		"<hubId>", hub.Field(t, "hubId").(string),
		"<terms>", admin.Get("/auth/session").Field(t, "terms", "version").(string),
	}
	created := 1
	for _, c := range hubstest.ReadCorpus[bodyCase](t, "bodies.json").Cases {
		t.Run(c.Name, func(t *testing.T) {
			for path, value := range c.Expect.Body {
				if text, ok := value.(string); ok {
					c.Expect.Body[path] = hubstest.FillIn(text, words...)
				}
			}
			session := sessions[c.As].Token()
			c.Expect.Check(t, c.send(t, srv, session, words))
			if c.Expect.Status == 201 {
				created++
			}
		})
	}
	got := hubstest.Query[int](t,
		srv.Database, "select count(*) from hubs")
	if got != created {
		t.Errorf("got %d hubs, want %d: one for each 201", got, created)
	}
}

func (c bodyCase) send(
	t *testing.T, srv *hubstest.Server, session string, words []string,
) *hubstest.Response {
	t.Helper()
	body := string(c.Body)
	if strings.HasPrefix(body, `"`) {
		hubstest.Decode(t, c.Name, string(c.Body), &body)
	}
	body = hubstest.FillIn(body, words...)
	headers := append(c.Headers, "X-Forwarded-For", hubstest.NewIP())
	if c.Type == nil {
		headers = append(headers, "Content-Type", "application/json")
	} else if *c.Type != "" {
		headers = append(headers, "Content-Type", hubstest.FillIn(*c.Type))
	}
	if session != "" {
		headers = append(headers, "Cookie", srv.CookieName()+"="+session)
	}
	path := hubstest.FillIn(cmp.Or(c.Path, "/auth/otp/request"), words...)
	return srv.Wire(t,
		cmp.Or(c.Method, "POST"), path, []byte(body), headers...)
}

// I3: the limits of a body and of its type hold to the byte, whether it says its length or not.
func TestBodyLimits(t *testing.T) {
	t.Parallel()
	const maxBody = 16 << 10
	const maxType = 256
	c := hubstest.Start(t).Client(t)
	ask := func(t *testing.T, body io.Reader, kind string, want int) {
		t.Helper()
		c.In(t).Elsewhere().Send(askRoute, body, "Content-Type", kind).Want(t, want)
	}
	for size, want := range map[int]int{
		maxBody:     200,
		maxBody + 1: 413,
		5 * maxBody: 413,
	} {
		padded := fmt.Sprintf("%-*s", size, `{"email":"a@limits.example"}`)
		for way, body := range bothWays(padded) {
			t.Run(fmt.Sprintf("a body of %d bytes, %s", size, way), func(t *testing.T) {
				ask(t, body, "application/json", want)
			})
		}
	}
	for size, want := range map[int]int{
		maxType:     200,
		maxType + 1: 415,
	} {
		const kind = "application/json;"
		padded := fmt.Sprintf("%s%*s", kind, size-len(kind), "charset=utf-8")
		t.Run(fmt.Sprintf("a type of %d bytes", size), func(t *testing.T) {
			ask(t, strings.NewReader(`{"email":"b@limits.example"}`), padded, want)
		})
	}
}

// An answer does not grow with what is wrong: it names at most twenty fields, of an unknown one
// 64 bytes.
func TestAnswersToBadInputAreShort(t *testing.T) {
	t.Parallel()
	const (
		maxErrors = 20
		maxName   = 64 // bytes
	)
	_, admin := start(t, "admin")
	members := func(n int) string {
		var text strings.Builder
		for i := range n {
			fmt.Fprintf(&text, `"x%03d":"",`, i)
		}
		return "{" + text.String() + `"email":"a@b.example"}`
	}
	named := func(name string) string {
		return `{"email":"a@b.example","` + name + `":1}`
	}
	for name, test := range map[string]struct {
		body  string
		first string // of the fields that the answer names
	}{
		"many members": {members(1000), "x000"},
		"no names":     {`{"email":"a@b.example"` + strings.Repeat(`,"":1`, 3000) + `}`, "input"},
		"a long name": {
			named(strings.Repeat("<", 5000)),
			strings.Repeat("<", maxName),
		},
		"half a letter": {
			named("x" + strings.Repeat("λ", 2500)),
			"x" + strings.Repeat("λ", maxName/2-1) + "\ufffd",
		},
	} {
		t.Run(name, func(t *testing.T) {
			answer := admin.In(t).Elsewhere().Send(askRoute, test.body)
			hubstest.WantProblem(t, answer, 400, "invalid_request")
			fields := answer.Fields()
			if fields[0] != test.first {
				t.Errorf("got %q first, want %q", fields[0], test.first)
			}
			if len(fields) > maxErrors || len(answer.Body) > 2000 {
				t.Errorf("got %d errors in %d bytes, want at most %d in 2000",
					len(fields), len(answer.Body), maxErrors)
			}
		})
	}
	query := url.Values{}
	for n := range 30 {
		query.Set(fmt.Sprint("x", n), "")
	}
	answer := admin.Get("/hubs?"+query.Encode()).Want(t, 400)
	got := len(answer.Fields())
	if got != maxErrors {
		t.Errorf("a query: got %d errors, want %d", got, maxErrors)
	}
}

// Order of refusals: the endpoint's own limit does not count a malformed attempt. A value of a
// wrong type is one error.
func TestMalformedAttemptsAreNotCounted(t *testing.T) {
	t.Parallel()
	c := hubstest.Start(t).Client(t)
	email := hubstest.NewEmail()
	wrong := map[string]any{
		"email": email,
		"code":  12345,
	}
	wantCounted := func(route string, right map[string]string, status int) {
		limit := hubstest.LimitOf(t, route)
		for range limit.Requests + 1 {
			hubstest.WantProblem(t,
				c.Send(route, wrong), 400, "invalid_request", "code")
		}
		for range limit.Requests {
			c.Send(route, right).Want(t, status)
		}
		hubstest.WantProblem(t, c.Send(route, right), 429, "rate_limited")
		hubstest.WantProblem(t,
			c.Send(route, wrong), 400, "invalid_request", "code")
	}
	wantCounted(askRoute, map[string]string{"email": email}, 200)
	guess := map[string]string{
		"email": email,
		"code":  "123456",
	}
	wantCounted(guessRoute, guess, 401)
}

// H1: headers have a bound in size.
func TestLargeHeaders(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	for size, status := range map[int]int{
		15 << 10: 200,
		17 << 10: 431,
	} {
		padding := strings.Repeat("x", size)
		srv.Wire(t, "GET", "/openapi.json", nil, "X-Padding", padding).Want(t, status)
	}
}

// H1: headers and bodies have a bound in time, which a byte now and then does not move. Clients
// that need half of it are served, and others meanwhile.
func TestSlowRequestsEnd(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	for _, test := range []struct {
		name   string
		limit  time.Duration
		start  string
		more   string
		rest   string
		answer string // to a client that is too slow
	}{
		{
			name:  "headers",
			limit: 10 * time.Second,
			start: "GET /openapi.json HTTP/1.1\r\nHost: x\r\n",
			more:  "X-A: b\r\n",
			rest:  "\r\n",
		},
		{
			name:  "body",
			limit: 15 * time.Second,
			start: "POST /auth/otp/request HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n" +
				"Content-Type: application/json\r\n\r\n{",
			more:   " ",
			rest:   fmt.Sprintf("%-49s", `"email":"a@b.example"}`),
			answer: "HTTP/1.1 400 Bad Request",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			conn := hubstest.Dial(t, srv.Addr)
			// No other limit of the server falls within these four seconds.
			conn.SetDeadline(time.Now().Add(test.limit + 4*time.Second))
			go func() { // until the connection is closed
				_, err := io.WriteString(conn, test.start)
				for tick := time.Tick(time.Second); err == nil; <-tick {
					_, err = io.WriteString(conn, test.more)
				}
			}()
			slow := hubstest.Dial(t, srv.Addr)
			io.WriteString(slow, test.start)
			time.Sleep(test.limit / 2)
			slow.Exchange(t, test.rest, 200)
			srv.Client(t).Get("/openapi.json").Want(t, 200)
			answer, err := io.ReadAll(conn) // until the server closes
			if os.IsTimeout(err) {
				t.Errorf("still open %v after its limit of %v", 4*time.Second, test.limit)
			}
			line, _, _ := strings.Cut(string(answer), "\r\n")
			if line != test.answer {
				t.Errorf("got %q, want %q", line, test.answer)
			}
		})
	}
}
