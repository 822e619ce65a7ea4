package main

// Tests of middleware.go: what can't be seen from outside. How an endpoint fails, what the log
// masks, and parsers that get whatever a fuzzer finds.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const anyID = "3f1c2a9e-7c1b-4e0a-9d53-0b6f4c8e2d71"

// startRoutes makes the handler of these routes, and returns the panic that keeps the server
// from starting; nil: it starts.
func startRoutes(routes []route) (fault any) {
	defer func() { fault = recover() }()
	newServer(config{env: envLocal}, nil, io.Discard).handler(routes)
	return nil
}

// Z1: no route of the table starts if its access rule is taken away or misspelled, and none
// whose input is counted without its limit.
func TestRouteWithoutAccessDoesNotStart(t *testing.T) {
	t.Parallel()
	table := newServer(config{env: envLocal}, nil, io.Discard).routes()
	if fault := startRoutes(table); fault != nil {
		t.Fatalf("the table itself does not start: %v", fault)
	}
	limited := 0
	for i, r := range table {
		wantNoStart := func(what string, changed route) {
			t.Helper()
			routes := slices.Clone(table)
			routes[i] = changed
			text, _ := startRoutes(routes).(string)
			if !strings.HasSuffix(text, r.method+" "+r.path) {
				t.Errorf("%s: got the panic %q, want one that names %s", what, text, r.path)
			}
		}
		changed := r
		changed.access = ""
		wantNoStart("no access", changed)
		changed.access = r.access + "x"
		wantNoStart("misspelled access", changed)
		if r.contract.limit == nil {
			continue
		}
		limited++
		changed = r
		changed.contract.limit = nil
		wantNoStart("no limit", changed)
	}
	if limited != 2 {
		t.Errorf("got %d routes with a limit of their own, want 2", limited)
	}
}

// Outside the local environment, a local route is left out, and those behind it are not.
func TestRoutesBehindALocalOneAreServed(t *testing.T) {
	t.Parallel()
	s := newServer(config{env: envStaging}, nil, io.Discard)
	routes := s.routes()
	slices.Reverse(routes) // GET / is the last one
	handler := s.handler(routes)
	for path, want := range map[string]int{"/openapi.json": 200, "/": 404} {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest("GET", path, nil))
		if answer.Code != want {
			t.Errorf("%s: got %d, want %d", path, answer.Code, want)
		}
	}
}

const panicSecret = "a-secret-in-the-stack"

// A brokenAnswer fails while it is sent, or breaks its contract.
type brokenAnswer struct {
	Secret string `json:"secret"`
	write  func(*requestState)
}

func (a brokenAnswer) isValid() bool { return a.write != nil }

func (a brokenAnswer) send(state *requestState, _ int) { a.write(state) }

// failing returns an endpoint that is answered by write.
func failing(write func(*requestState)) contract {
	return endpoint(nil, func(*requestState, nothing) (brokenAnswer, error) {
		return brokenAnswer{Secret: panicSecret, write: write}, nil
	})
}

// G3, I5: panics, unknown errors and outputs that break their contract are a 500 that says
// nothing. Nothing of the failed answer stays. The log says it, under the same id.
func TestFailuresInside(t *testing.T) {
	t.Parallel()
	half := func(state *requestState) { state.Write([]byte("half")) }
	for name, test := range map[string]struct {
		contract contract
		cut      bool // too late for another answer
	}{
		"panic":    {contract: failing(func(*requestState) { panic(panicSecret) })},
		"contract": {contract: failing(nil)},
		"standard": {contract: failing(func(state *requestState) {
			http.Error(state, panicSecret, 500) // as http.ServeContent does
		})},
		"error": {contract: endpoint(nil, func(state *requestState, _ nothing) (nothing, error) {
			for _, header := range append(headersOfSuccess, "Cache-Control", "Content-Security-Policy") {
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
			var fault any
			func() {
				defer func() { fault = recover() }()
				handler.ServeHTTP(answer, request)
			}()
			if isCut := fault == http.ErrAbortHandler; isCut != test.cut {
				t.Errorf("got the connection cut: %v, want %v", isCut, test.cut)
			}
			if !test.cut {
				wantInternal(t, answer, "id-of-"+name)
			}
			lines := strings.Split(strings.TrimSpace(log.String()), "\n")
			for i, want := range []string{`"level":"ERROR"`, `"msg":"request"`} {
				if len(lines) != 2 || !strings.Contains(lines[i], want) ||
					!strings.Contains(lines[i], `"requestId":"id-of-`+name) {
					t.Errorf("got the log\n%s\nwant an error and the request", &log)
				}
			}
			if name == "panic" && !strings.Contains(log.String(), "middleware_test.go") {
				t.Errorf("got %s, want the stack", &log)
			}
		})
	}
}

func wantInternal(t *testing.T, answer *httptest.ResponseRecorder, id string) {
	t.Helper()
	var p problem
	if err := json.Unmarshal(answer.Body.Bytes(), &p); err != nil {
		t.Fatal(err)
	}
	if answer.Code != 500 || p.Code != "internal" || p.RequestID != id {
		t.Errorf("got %d %+v, want a 500 internal of %s", answer.Code, p, id)
	}
	text := fmt.Sprint(answer.Header(), answer.Body)
	if strings.Contains(text, panicSecret) {
		t.Errorf("got %s, want nothing of the failed answer", text)
	}
	if got := answer.Header().Get("Cache-Control"); got != "no-store" {
		t.Errorf("got Cache-Control %q, want no-store", got)
	}
}

// A body that could not be stored is the server's fault, and no malformed one.
func TestBodyProblem(t *testing.T) {
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
			t.Errorf("%v: got %d, want %d", test.err, got, test.status)
		}
	}
}

// L4: Retry-After is in whole seconds, rounded up: a client that comes then is not refused again.
func TestRetryAfterIsRoundedUp(t *testing.T) {
	t.Parallel()
	s := newServer(config{env: envLocal}, nil, io.Discard)
	for milliseconds, want := range map[int]string{1: "1", 1000: "1", 1001: "2"} {
		answer := httptest.NewRecorder()
		request := httptest.NewRequest("GET", "/", nil)
		state := &requestState{ResponseWriter: answer, request: request, serverLog: s.log}
		state.fail(rateLimited("", time.Duration(milliseconds)*time.Millisecond))
		if got := answer.Header().Get("Retry-After"); got != want {
			t.Errorf("%d ms: got Retry-After %q, want %q", milliseconds, got, want)
		}
	}
}

// G2: what the log shows of an error's text. Each text has one kind of secret, so that nothing
// else in it is masked that would hide it.
func TestMaskOfEachKind(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"smtps://mailer:(opaque)@mail.example.com: refused":                  "smtps://***@mail.example.com: refused",
		"postgres://:(opaque)@db.example.com":                                "postgres://***@db.example.com",
		"x eyJhbGci.eyJl-_bWFp.abc":                                          "x ***",
		"eyJhbGciOiJIUzI1NiJ9.eyJlbWFpbCI6 ImEiLCJ1c2VySWQiOiI.c2lnbmF0dXJl": "***",
		"x?code=(opaque)":                         "x?***",
		"x?token=(opaque)&a=b":                    "x?***",
		"x?Secret=(opaque)\nsecond line (opaque)": "x?***",
		"x?password=(opaque)":                     "x?***",
		"x?pwd=(opaque)":                          "x?***",
		"x?api_key=(opaque)":                      "x?api_***",
		"x?session_id=(opaque)":                   "x?***",
		"x?authKey=(opaque)":                      "x?***",
		"at 510764.":                              "at ***.",
		"_510764x":                                "_***x",
		"/x_510764_510764_":                       "/x_***_",
		"510-764":                                 "***",
		"5-1-0-7-6-4":                             "***",
		"510\u200b764":                            "***",
		"%35%31%30764":                            "***",
		"ada@b.example":                           "a***@b.example",
		"550 <ada@corp>: no such user":            "550 <a***@corp>: no such user",
		"\u00e4da@b.example":                      "\u00e4***@b.example",
		"ada.byron`@b.example":                    "a***@b.example",
		"ada%2540b.example":                       "a******",
		"ada%252540b.example":                     "a******",
		`ada\u0040b.example`:                      `a***\u0040b.example`,
		"a\u009b31mb\x7fc\u202ed\u200be":          "a31mbcde",
		strings.Repeat("k", 40):                   "***",
		// What is none of them stays, or no log could be read.
		"12345 x 12345":                               "12345 x 12345",
		"limit=20&offset=10000":                       "limit=20&offset=10000",
		"550 5.1.1 user unknown":                      "550 5.1.1 user unknown",
		"dial tcp 127.0.0.1:5432: connection refused": "dial tcp 127.0.0.1:5432: connection refused",
		`password failed for "hubs" (28P01)`:          `password failed for "hubs" (28P01)`,
		// Only what the log looks at costs time (H4).
		strings.Repeat("-123456,", 2000): strings.Repeat("-***,", maxLoggedError/8) + "-123",
	} {
		if got := maskText(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// G2: each text of an event is masked, but for the server's own identifiers, by which the lines
// of a request are found. H4: an event has at most 2 kB.
func TestEventsAreMasked(t *testing.T) {
	t.Parallel()
	const id = "48291348-2913-4829-8482-913482913482"
	for _, text := range []string{"ada@b.example", "510764", `"`, "\xff", "<", "a@", "://a@"} {
		var out bytes.Buffer
		long := strings.Repeat(text+" ", 15<<10/len(text))
		newServer(config{}, nil, &out).log.Info(long[:200], "error", errors.New(long), "query", long[:200],
			"requestId", id, "userId", id, "fileId", id, "client", id)
		if got := strings.Count(out.String(), id); got != 4 {
			t.Errorf("got %s, want its four identifiers", &out)
		}
		if strings.Contains(out.String(), "ada@") || strings.Contains(out.String(), "510764") {
			t.Errorf("got %s, want the text masked", &out)
		}
		if out.Len() > 2048 {
			t.Errorf("got %d bytes for %q, want at most 2048", out.Len(), text)
		}
	}
}

// readInput reads the input of a request as endpoint does.
func readInput[In any](parse func(*fields) In, r *http.Request) (in In, err error) {
	r.Header.Set("Content-Type", "application/json")
	state := &requestState{ResponseWriter: httptest.NewRecorder(), request: r}
	f, err := readFields(state)
	if err != nil {
		return in, err
	}
	in = parse(f)
	return in, f.finish()
}

// Whatever a body holds: it is refused, or it is an input that keeps its rules and reads the
// same when it is encoded again.
func FuzzJSONBody(f *testing.F) {
	for _, body := range []string{
		`{"name":" a ","description":"x\ny","status":"archived"}`, `{"name":"a","name":"b"}`, `[]`,
		`{"name":"\ud800"}`, `{"name":null}`, `{"Name":"a"}`, "{\"name\":\"\xff\"}", `{"name":"a"}{}`,
	} {
		f.Add([]byte(body))
	}
	read := func(body []byte) (newHub, error) {
		return readInput(parseNewHub, httptest.NewRequest("POST", "/", bytes.NewReader(body)))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		first, err := read(body)
		if err != nil {
			return
		}
		now := time.Now()
		if !(hub{anyID, first.name, first.description, first.status, now, now}).isValid() {
			t.Fatalf("%q was taken, and breaks its contract: %+v", body, first)
		}
		again, err := json.Marshal(map[string]string{
			"name": first.name, "description": first.description, "status": first.status,
		})
		if err != nil {
			t.Fatal(err)
		}
		second, err := read(again)
		if second != first && len(again) <= maxJSONBody {
			t.Fatalf("%q became %+v, and again %+v: %v", body, first, second, err)
		}
	})
}

// The same for a query string.
func FuzzQuery(f *testing.F) {
	for _, query := range []string{
		"", "limit=01", "limit=9223372036854775808", "offset=10000&orderBy=name", "limit=1&limit=1",
		"filters[name]=%25_", "a;b", "%zz", "filters[name]=%ff", "orderDirection=desc",
	} {
		f.Add(query)
	}
	read := func(query string) (hubQuery, error) {
		r := httptest.NewRequest("GET", "/", nil)
		r.URL.RawQuery = query
		return readInput(parseHubQuery, r)
	}
	f.Fuzz(func(t *testing.T, query string) {
		first, err := read(query)
		if err != nil {
			return
		}
		isInBounds := first.limit >= 1 && first.limit <= maxPageLimit &&
			first.offset >= 0 && first.offset <= maxPageOffset
		if !isInBounds || hubOrders[first.orderBy] == "" {
			t.Fatalf("%q was taken as %+v", query, first)
		}
		values := url.Values{
			"limit":          {strconv.Itoa(first.limit)},
			"offset":         {strconv.Itoa(first.offset)},
			"orderBy":        {first.orderBy},
			"orderDirection": {first.orderDirection},
		}
		if first.name != nil {
			values.Set("filters[name]", *first.name)
		}
		second, err := read(values.Encode())
		second.status = first.status
		if !reflect.DeepEqual(first, second) {
			t.Fatalf("%q became %+v, and again %+v: %v", query, first, second, err)
		}
	})
}
