package main

// Tests of what can't be seen of middleware.go from outside: how an endpoint fails, and what the
// log masks.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// startRoutes makes the handler of these routes. It returns the value of the panic that prevents
// the start, or nil if there is none.
func startRoutes(routes []route) (fault any) {
	defer func() { fault = recover() }()
	newServer(config{env: envLocal}, nil, io.Discard).handler(routes)
	return nil
}

// Z1: The server does not start if any route of its table has no access rule, has an input that is
// not parsed, or has an input that is counted without a limit.
func TestRouteWithoutAccessDoesNotStart(t *testing.T) {
	t.Parallel()
	table := newServer(config{env: envLocal}, nil, io.Discard).routes()
	if fault := startRoutes(table); fault != nil {
		t.Fatalf("the unchanged table: got the panic %v, want none", fault)
	}
	limited := 0
	for i, r := range table {
		wantNoStart := func(what string, changed route) { // changed replaces r
			t.Helper()
			routes := slices.Clone(table)
			routes[i] = changed
			text, _ := startRoutes(routes).(string)
			if !strings.HasSuffix(text, r.method+" "+r.path) {
				t.Errorf("%s: got the panic %q, want one that names %s", what, text, r.path)
			}
		}
		changed := r
		for _, invalid := range []access{
			{},
			{terms: true},
			{public: true, terms: true},
			{public: true, session: true},
		} {
			changed.access = invalid
			wantNoStart("no valid access", changed)
		}
		if r.contract.parse != nil {
			changed = r
			changed.contract.parse = nil
			wantNoStart("no parse function", changed)
		}
		if r.contract.limit == nil {
			continue
		}
		limited++
		changed = r
		changed.contract.limit = nil
		wantNoStart("no limit", changed)
	}
	if limited == 0 {
		t.Error("got no route with a limit of its own, want at least one")
	}
}

// The server has the page at / only in the local environment.
func TestPageIsLocal(t *testing.T) {
	t.Parallel()
	for environment, want := range map[string]int{
		envLocal:      200,
		envStaging:    404,
		envProduction: 404,
	} {
		s := newServer(config{env: environment}, nil, io.Discard)
		answer := httptest.NewRecorder()
		s.handler(s.routes()).ServeHTTP(answer, httptest.NewRequest("GET", "/", nil))
		if answer.Code != want {
			t.Errorf("GET / in %s: got status %d, want %d", environment, answer.Code, want)
		}
	}
}

const panicSecret = "a-secret-in-the-stack"

// A brokenAnswer is an output that is sent by write. If write is nil, the output breaks its
// contract.
type brokenAnswer struct {
	Secret string `json:"secret"`
	write  func(*requestState)
}

func (a brokenAnswer) isValid() bool {
	return a.write != nil
}

func (a brokenAnswer) send(state *requestState) error {
	if a.write == nil { // only if the server sends an output that breaks its contract
		state.Write([]byte(a.Secret))
		return nil
	}
	a.write(state)
	return nil
}

// failing returns an endpoint whose output is a brokenAnswer with this write.
func failing(write func(*requestState)) contract {
	return endpoint(nil, func(*requestState, nothing) (brokenAnswer, error) {
		return brokenAnswer{Secret: panicSecret, write: write}, nil
	})
}

// G3, I5: A panic, an unknown error or an output that breaks its contract is a 500 that does not
// reveal the cause, and has no header of the failed answer. If a part of the answer was already
// sent, the connection is cut instead. The log has an error with the same request id.
func TestInternalErrorsAreLoggedNotShown(t *testing.T) {
	t.Parallel()
	half := func(state *requestState) { state.Write([]byte("half")) }
	for name, test := range map[string]struct {
		contract contract
		cut      bool   // a part of the answer is sent, so the connection must be cut
		logged   string // text that the log must also have
	}{
		// The log must show where the panic was. The test looks for a function of the stack, not
		// for a path, because a long path would be masked or cut off.
		"panic": {
			contract: failing(func(*requestState) { panic(panicSecret) }),
			logged:   "TestInternalErrorsAreLoggedNotShown",
		},
		"contract": {contract: failing(nil)},
		"standard": {contract: failing(func(state *requestState) {
			http.Error(netHTTPWriter{state}, panicSecret, 500) // as http.ServeContent does
		})},
		"error": {contract: endpoint(nil, func(state *requestState, _ nothing) (nothing, error) {
			for header := range strings.FieldsSeq(`Set-Cookie ETag Last-Modified Accept-Ranges Location
				Content-Disposition Content-Length Cache-Control Content-Security-Policy`) {
				state.Header().Set(header, panicSecret)
			}
			return nothing{}, errors.New(panicSecret)
		})},
		"half": {cut: true, contract: failing(func(state *requestState) {
			half(state)
			panic(panicSecret)
		})},
		"late": {cut: true, contract: endpoint(nil, func(state *requestState, _ nothing) (nothing, error) {
			half(state)
			return nothing{}, errors.New(panicSecret)
		})},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			s := newServer(config{env: envStaging}, nil, &log)
			handler := s.handler([]route{{"GET", "/x", public, 200, test.contract}})
			answer := httptest.NewRecorder()
			request := httptest.NewRequest("GET", "/x", nil)
			request.Header.Set("X-Request-Id", "id-of-"+name)
			if cut := serveOrCut(handler, answer, request); cut != test.cut {
				t.Errorf("got the connection cut: %v, want %v", cut, test.cut)
			}
			if !test.cut {
				wantInternal(t, answer, "id-of-"+name)
			}
			rest := `.*"requestId":"id-of-` + name + `".*\n`
			want := regexp.MustCompile(`^.*"level":"ERROR"` + rest + `.*"msg":"request"` + rest + `$`)
			if !want.Match(log.Bytes()) {
				t.Errorf("got the log\n%s\nwant an error and the request, both with this id", &log)
			}
			if !strings.Contains(log.String(), test.logged) {
				t.Errorf("got the log\n%s\nwant %s in it", &log, test.logged)
			}
		})
	}
}

// serveOrCut serves a request. It reports whether the handler panics with http.ErrAbortHandler,
// with which it tells net/http to cut the connection.
func serveOrCut(handler http.Handler, w http.ResponseWriter, r *http.Request) (cut bool) {
	defer func() { cut = recover() == http.ErrAbortHandler }()
	handler.ServeHTTP(w, r)
	return false
}

// wantInternal checks that an answer is the 500 of an internal error with this request id, and has
// nothing of the failed answer.
func wantInternal(t *testing.T, answer *httptest.ResponseRecorder, id string) {
	t.Helper()
	var p problem
	if err := json.Unmarshal(answer.Body.Bytes(), &p); err != nil {
		t.Fatal(err)
	}
	if answer.Code != 500 || p.Code != "internal" || p.RequestID != id {
		t.Errorf("got status %d and %+v, want 500, internal and the id %s", answer.Code, p, id)
	}
	text := fmt.Sprint(answer.Header(), answer.Body)
	if strings.Contains(text, panicSecret) {
		t.Errorf("got %s, want no %s in it", text, panicSecret)
	}
}

// If the server could not store a body, the answer is a 5xx. If the body was too large, broke off
// or came too slowly, the answer is a 4xx.
func TestBodyFaultsAreToldApart(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err    error
		status int
	}{
		{&os.PathError{Err: syscall.EIO}, 500},
		{&os.PathError{Err: syscall.ENOSPC}, 507},
		{&os.PathError{Err: syscall.EDQUOT}, 507},
		{&http.MaxBytesError{}, 413},
		{errTooLarge, 413},
		{io.ErrUnexpectedEOF, 400},
		{os.ErrDeadlineExceeded, 400},
	} {
		if got := bodyProblem(fmt.Errorf("within: %w", test.err)).Status; got != test.status {
			t.Errorf("%v: got status %d, want %d", test.err, got, test.status)
		}
	}
}

// L4: Retry-After is in whole seconds and rounded up, so that a client that waits this long is not
// refused again.
func TestRetryAfterIsRoundedUp(t *testing.T) {
	t.Parallel()
	s := newServer(config{env: envLocal}, nil, io.Discard)
	for wait, want := range map[time.Duration]string{
		time.Millisecond: "1",
		time.Second:      "1",
		time.Second + 1:  "2",
	} {
		answer := httptest.NewRecorder()
		state := &requestState{
			ResponseWriter: answer,
			request:        httptest.NewRequest("GET", "/", nil),
			serverLog:      s.log,
		}
		state.fail(rateLimited("", wait))
		if got := answer.Header().Get("Retry-After"); got != want {
			t.Errorf("a wait of %v: got Retry-After %q, want %q", wait, got, want)
		}
	}
}

// G2: maskText removes every kind of secret from an error's text, and nothing else. Then it cuts
// the text to maxLoggedError bytes.
func TestMaskOfEachKind(t *testing.T) {
	t.Parallel()
	type maskCase struct{ Why, Text, Logged string }
	cases := hubstest.ReadCases[maskCase](t, "testdata/masks.json")
	cases = append(cases, maskCase{
		Text:   strings.Repeat("-123456,", maxLoggedError),
		Logged: strings.Repeat("-***,", maxLoggedError/len("-***,")),
	}, maskCase{ // the mask comes before the cut, which would split the address
		Text:   strings.Repeat(". ", maxLoggedError/2-2) + "jane.roe@example.com",
		Logged: strings.Repeat(". ", maxLoggedError/2-2) + "j***",
	})
	for _, c := range cases {
		if got := maskText(c.Text); got != c.Logged {
			t.Errorf("%q: got %q, want %q: %s", c.Text, got, c.Logged, c.Why)
		}
	}
}

// G2: Every text of an event is masked, except the four identifiers by which an operator finds the
// lines of a request. H4: An event has at most 2 kB.
func TestEventsAreMasked(t *testing.T) {
	t.Parallel()
	const id = "48291348-2913-4829-8482-913482913482" // in another text, its digits would be masked
	for _, text := range []string{"ada@b.example", "510764", `"`, "\xff", "<", "a@", "://a@"} {
		var out bytes.Buffer
		long := strings.Repeat(text+" ", 15<<10/len(text))
		newServer(config{}, nil, &out).log.Info(long[:200],
			"error", errors.New(long),
			"query", long[:200],
			"requestId", id,
			"userId", id,
			"fileId", id,
			"client", id)
		if got := strings.Count(out.String(), id); got != 4 {
			t.Errorf("got %s, want its four identifiers as they are", &out)
		}
		for _, secret := range []string{"ada@", "510764"} {
			if strings.Contains(out.String(), secret) {
				t.Errorf("got %s, want no %s in it", &out, secret)
			}
		}
		if out.Len() > 2048 {
			t.Errorf("an event with %q: got %d bytes, want at most 2048", text, out.Len())
		}
	}
}
