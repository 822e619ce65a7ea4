package api

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// I1, I2: every parameter has its allow-list or its bounds, and stands there once.
func TestHubListRefusesBadParameters(t *testing.T) {
	t.Parallel()
	type queryCase struct {
		hubstest.CorpusCase
		Path  string
		Query string
	}
	file := hubstest.ReadCorpus[queryCase](t, "queries.json")
	srv := hubstest.Start(t)
	admin, _ := srv.Member(t, "admin")
	for _, hub := range file.Hubs {
		admin.Do("POST", "/hubs", hub).Want(t, 201)
	}
	member, _ := srv.Member(t, "member")
	cookie := srv.CookieName() + "=" + member.Token()
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			target := cmp.Or(c.Path, "/hubs") + "?" + hubstest.FillIn(c.Query)
			answer := srv.Wire(t, "GET", target, nil,
				"Cookie", cookie, "X-Forwarded-For", hubstest.NewIP())
			c.Expect.Check(t, answer)
		})
	}
}

// I3, Z3: one flat JSON object, each member known, there once, a whole text.
func TestStrictJSON(t *testing.T) {
	t.Parallel()
	type bodyCase struct {
		hubstest.CorpusCase
		As      string
		Method  string
		Path    string
		Type    *string
		Headers []string
		Body    string
		Base64  []byte // encoding/json decodes it
	}
	file := hubstest.ReadCorpus[bodyCase](t, "bodies.json")
	srv := hubstest.Start(t)
	admin, _ := srv.Member(t, "admin")
	member, _ := srv.Member(t, "member")
	tokens := map[string]string{"admin": admin.Token(), "member": member.Token()}
	hub := admin.Do("POST", "/hubs", `{"name":"Corpus hub"}`).Want(t, 201).Field(t, "hubId")
	terms := admin.Get("/auth/session").Field(t, "terms", "version")
	fill := func(text string) string {
		return hubstest.FillIn(text, "<hubId>", hub.(string), "<terms>", terms.(string))
	}
	created := 1
	for _, c := range file.Cases {
		t.Run(c.Name, func(t *testing.T) {
			body := c.Base64
			if body == nil {
				body = []byte(fill(c.Body))
			}
			headers := append([]string{"X-Forwarded-For", hubstest.NewIP()}, c.Headers...)
			if c.Type == nil {
				headers = append(headers, "Content-Type", "application/json")
			} else if *c.Type != "" {
				headers = append(headers, "Content-Type", fill(*c.Type))
			}
			if c.As != "" {
				headers = append(headers, "Cookie", srv.CookieName()+"="+tokens[c.As])
			}
			for path, value := range c.Expect.Body {
				if text, ok := value.(string); ok {
					c.Expect.Body[path] = fill(text)
				}
			}
			target := fill(cmp.Or(c.Path, "/auth/otp/request"))
			c.Expect.Check(t, srv.Wire(t, cmp.Or(c.Method, "POST"), target, body, headers...))
		})
		if c.Expect.Status == 201 {
			created++
		}
	}
	got := hubstest.Query[int](t, srv.Env["DATABASE_URL"], "select count(*) from hubs")
	if got != created {
		t.Errorf("got %d hubs, want %d: one for each 201", got, created)
	}
}

// I3: the bound of a body holds also if the client does not say its length first.
func TestChunkedBodyIsBounded(t *testing.T) {
	t.Parallel()
	admin, _ := hubstest.Start(t).Member(t, "admin")
	chunked := func(size int) io.Reader {
		text := `{"name":"a"` + strings.Repeat(" ", size-12) + `}`
		return io.MultiReader(strings.NewReader(text))
	}
	admin.Do("POST", "/hubs", chunked(16<<10), "Content-Type", "application/json").Want(t, 201)
	over := admin.Do("POST", "/hubs", chunked(16<<10+1), "Content-Type", "application/json")
	hubstest.WantProblem(t, over, 413, "too_large")
}

// An answer does not grow with what is wrong: it names at most twenty fields, of an unknown one
// 64 bytes, and of an object the first 64 members are read (I3: each costs many times its size).
func TestAnswersToBadInputAreShort(t *testing.T) {
	t.Parallel()
	admin, _ := hubstest.Start(t).Member(t, "admin")
	members := func(n int) string {
		var text strings.Builder
		for i := range n {
			fmt.Fprintf(&text, `"x%02d":"",`, i)
		}
		return "{" + text.String() + `"email":"a@b.example"}`
	}
	const good = `{"email":"a@b.example",`
	for _, test := range []struct {
		name  string
		body  string
		first string // of the fields that the answer names
	}{
		{"many members", members(1000), "email"},
		{"63 others", members(63), "x00"},
		{"64 others", members(64), "email"},
		{"numbers", good + strings.Repeat(`"":1,`, 3000) + `"":1}`, "input"},
		{"a long name", good + `"` + strings.Repeat("<", 5000) + `":1}`, strings.Repeat("<", 64)},
		{"half a letter", good + `"x` + strings.Repeat("λ", 2500) + `":1}`,
			"x" + strings.Repeat("λ", 31) + "\ufffd"},
	} {
		t.Run(test.name, func(t *testing.T) {
			answer := admin.Elsewhere().Do("POST", "/auth/otp/request", test.body)
			hubstest.WantProblem(t, answer, 400, "invalid_request")
			errors := answer.Field(t, "errors").([]any)
			if got := errors[0].(map[string]any)["field"]; got != test.first {
				t.Errorf("got %q first, want %q", got, test.first)
			}
			if len(errors) > 20 || len(answer.Body) > 2000 {
				t.Errorf("got %d errors in %d bytes, want at most 20 in 2000",
					len(errors), len(answer.Body))
			}
		})
	}
	query := url.Values{}
	for n := range 30 {
		query.Set(fmt.Sprint("x", n), "")
	}
	answer := admin.Get("/hubs?"+query.Encode()).Want(t, 400)
	if got := len(answer.Field(t, "errors").([]any)); got != 20 {
		t.Errorf("a query: got %d errors, want 20", got)
	}
}

// A value of a wrong type is one error, and the refusal of a Content-Type names the right one.
func TestRefusalsSayWhatToSend(t *testing.T) {
	t.Parallel()
	member, _ := hubstest.Start(t).Member(t, "member")
	wrong := member.Do("POST", "/auth/otp/request", `{"email":1}`)
	hubstest.WantProblem(t, wrong, 400, "invalid_request", "email")
	for path, want := range map[string]string{
		"/auth/otp/request": "application/json",
		"/files/upload":     "multipart/form-data",
	} {
		answer := member.Do("POST", path, "x", "Content-Type", "text/plain")
		hubstest.WantProblem(t, answer, 415, "unsupported_media_type")
		if detail := answer.Field(t, "detail").(string); !strings.Contains(detail, want) {
			t.Errorf("%s: got %q, want %s in it", path, detail, want)
		}
	}
}

// Order of refusals: the endpoint's own limit does not count a malformed attempt.
func TestMalformedAttemptsAreNotCounted(t *testing.T) {
	t.Parallel()
	c := hubstest.Start(t).Client(t)
	email := hubstest.NewEmail()
	for path, right := range map[string]map[string]string{
		"/auth/otp/request":  {"email": email},
		"/auth/otp/validate": {"email": email, "code": "123456"},
	} {
		wrong := map[string]string{"email": email, "code": "12345"}
		limit := limitsOf(t, "POST", path)[1].n
		for range limit + 1 {
			hubstest.WantProblem(t, c.Do("POST", path, wrong), 400, "invalid_request", "code")
		}
		for range limit {
			if got := c.Do("POST", path, right).Status; got != 200 && got != 401 {
				t.Errorf("%s: got %d, want an attempt that is counted", path, got)
			}
		}
		hubstest.WantProblem(t, c.Do("POST", path, right), 429, "rate_limited")
		hubstest.WantProblem(t, c.Do("POST", path, wrong), 400, "invalid_request", "code")
	}
}

// H1: headers have a bound in size.
func TestLargeHeaders(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	for size, status := range map[int]int{15 << 10: 200, 17 << 10: 431} {
		padding := strings.Repeat("x", size)
		srv.Wire(t, "GET", "/openapi.json", nil, "X-Padding", padding).Want(t, status)
	}
}

// H1: headers and bodies have a bound in time, which a byte now and then does not move. Others
// are served meanwhile.
func TestSlowRequestsEnd(t *testing.T) {
	t.Parallel()
	srv := hubstest.Start(t)
	for _, test := range []struct {
		name   string
		limit  time.Duration
		start  string
		more   string
		answer string
	}{
		{
			name:  "headers",
			limit: 10 * time.Second,
			start: "GET /openapi.json HTTP/1.1\r\nHost: x\r\n",
			more:  "X-A: b\r\n",
		},
		{
			name:  "body",
			limit: 15 * time.Second,
			start: "POST /auth/otp/request HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n" +
				"Content-Type: application/json\r\n\r\n{",
			more:   " ",
			answer: "HTTP/1.1 400 ",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", srv.Addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			// No other limit of the server falls within these four seconds.
			conn.SetDeadline(time.Now().Add(test.limit + 4*time.Second))
			go func() { // until the connection is closed
				_, err := io.WriteString(conn, test.start)
				for tick := time.Tick(time.Second); err == nil; <-tick {
					_, err = io.WriteString(conn, test.more)
				}
			}()
			srv.Client(t).Get("/openapi.json").Want(t, 200)
			answer, err := io.ReadAll(conn) // until the server closes
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("still open %v after its limit of %v", 4*time.Second, test.limit)
			}
			if !strings.HasPrefix(string(answer), test.answer) {
				t.Errorf("got %q, want %q", answer, test.answer)
			}
		})
	}
}
