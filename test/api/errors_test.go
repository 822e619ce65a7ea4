package api

import (
	"fmt"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// G3, C4, H2: The errors of net/http's router and of http.ServeContent also have the error format
// of this API. They have none of the headers of a success.
func TestRouterProblems(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	file := admin.Store("a.txt", "hello")
	for _, c := range hubstest.ReadCorpus[struct {
		hubstest.CorpusCase
		Request string
		Headers []string
	}](t, "router.json").Cases {
		t.Run(c.Name, func(t *testing.T) {
			request := hubstest.FillIn(c.Request, "<file>", file)
			admin.In(t).Do(request, nil, c.Headers...).WantAnswer(t, c.Expect)
		})
	}
	// H2: Without DisableGeneralOptionsHandler, net/http would answer this itself, with a 200.
	s.Wire(t, "OPTIONS *", nil).WantProblem(t, 404, "not_found")
}

// A write with If-Match is a 412, because nothing that can be written has an ETag. Only the value *
// is accepted.
func TestIfMatchRefusesWrites(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	for _, r := range routes {
		if strings.HasPrefix(r.Route, "GET ") {
			continue
		}
		q := r.call(t, s, admin)
		token := admin.Token()
		refused := q.send(s.With(t, token), "If-Match", `"1"`)
		refused.WantProblem(t, 412, "precondition_failed")
		q.send(s.With(t, token), "If-Match", "*").Want(t, r.Status)
	}
}

// I5: An answer made from a row that breaks its constraints is a 500, and no part of the row is
// sent. The log has the error under the id of the request.
func TestBrokenRowsAreNotSent(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	s.AllowErrorsWithAnyOf("breaks its contract", "file on disk is not")
	db := s.Database
	file := admin.Store("a.txt", "hello")
	made := admin.Do("POST /hubs", `{"name":"a"}`).Must(t, 201)
	hub := made.Header.Get("Location")

	// Without its constraints, a table takes the broken rows below.
	hubstest.Exec(t, db, `do $$ declare c record; begin
		for c in select conrelid::regclass as t, conname from pg_constraint
			where contype = 'c' and connamespace = 'public'::regnamespace loop
			execute format('alter table %s drop constraint %I', c.t, c.conname);
		end loop; end $$`)
	const good = `update hubs set name = 'a', description = '', status = 'active',
			created_at = now(), updated_at = now();
		update files set name = 'a.txt', content_type = 'text/plain', size = 5;
		update users set permission = 'admin'`

	for _, c := range hubstest.ReadTextCases(t, "broken-rows.txt") {
		t.Run(c.Name, func(t *testing.T) {
			text := hubstest.FillIn(strings.TrimSpace(c.Text), "<hub>", hub, "<file>", file)
			change, path, _ := strings.Cut(text, "\nGET ")
			hubstest.Exec(t, db, good)
			hubstest.Exec(t, db, change)
			id := hubstest.NewUUID()
			answer := admin.In(t).Get(path, "X-Request-Id", id)
			answer.WantProblem(t, 500, "internal")
			if strings.Contains(string(answer.Body), "broken") {
				t.Errorf("got %v, want no part of the row", answer)
			}
			s.Log.WaitFor(t, `"level":"ERROR"`, id)
		})
	}
}

// The detail of an error of the input names its one cause, and for a field that is not known, this
// before anything else.
func TestDetailsNameTheCause(t *testing.T) {
	t.Parallel()
	const (
		digits  = "must be six digits, 0 to 9"
		address = "must be an ASCII e-mail address (an international domain as xn--…)"
		unknown = "is not known here"
	)
	_, admin := start(t, "admin")
	for _, test := range []struct{ route, body, field, detail string }{
		{guessRoute, `{"email":"a1@b.example","code":"347-579"}`, "code", digits},
		{guessRoute, `{"email":"a1@b.example","code":" 347579"}`, "code", digits},
		{guessRoute, `{"email":"a1@b.example","code":"３４７５７９"}`, "code", digits},
		{guessRoute, `{"email":"a1@b.example","code":"34757"}`, "code", digits},
		{guessRoute, `{"email":"a1@b.example","code":""}`, "code", digits},
		{guessRoute, `{"email":"a1@b.example"}`, "code", digits},
		{guessRoute, `{"email":"ann@bücher.example","code":"347579"}`, "email", address},
		{askRoute, `{"email":"ann@bücher.example"}`, "email", address},
		{askRoute, `{"email":"änn@b.example"}`, "email", address},
		{askRoute, `{"email":"Ann <ann@b.example>"}`, "email", address},
		{askRoute, `{}`, "email", address},
		{askRoute, `{"email":"a2@b.example","lang":1}`, "lang", unknown},
		{"POST /hubs", `{"name":"x","tags":["a"]}`, "tags", unknown},
		{"POST /hubs", `{"name":"x","owner":{"id":1}}`, "owner", unknown},
		{"POST /hubs", `{"name":"x","Status":null}`, "Status", unknown},
		{"POST /hubs", `{"name":"x","id":"1","id":2}`, "id", unknown},
		{"POST /hubs", "{\"name\":\"x\",\"note\":\"\xff\"}", "note", unknown},
		{"POST /hubs", `{"name":"x","description":["a"]}`, "description", "must be a string"},
	} {
		answer := admin.Elsewhere().Do(test.route, test.body)
		answer.WantProblem(t, 400, "invalid_request", test.field)
		got := fmt.Sprint(answer.Details())
		wantEqual(t, test.route+" "+test.body, got, "["+test.detail+"]")
	}
}

// Each cause for which an upload is refused has a sentence of its own.
func TestDetailsOfUploadsDiffer(t *testing.T) {
	t.Parallel()
	_, c := start(t, "member")
	const chosen = `Content-Disposition: form-data; name="file"; filename=`
	field := `--edge` + "\r\n" + `Content-Disposition: form-data; name="album"` + "\r\n\r\nx\r\n"
	good := form(partHeader, "x")
	causes := map[string]string{} // by detail
	for _, test := range []struct{ cause, kind, body, word string }{
		{"no boundary", "multipart/form-data", good, "boundary"},
		{"an empty form", formType, "--edge--\r\n", "missing"},
		{"no file chosen", formType, form(chosen+`""`, ""), "file"},
		{"another field", formType, form(otherHeader, "x"), ""},
		{"a field before the file", formType, field + good, "before"},
		{"a name of 86 kanji", formType, form(chosen+`"`+strings.Repeat("港", 86)+`"`, "x"), "255"},
		{"a name that turns text around", formType, form(chosen+"\"a\u202eb\"", "x"), "direction"},
		{"a folder", formType, form(chosen+`".."`, "x"), "folder"},
		{"cut off", formType, strings.TrimSuffix(good, formEnd), "incomplete"},
	} {
		answer := c.Elsewhere().Do(uploadRoute, strings.NewReader(test.body), "Content-Type", test.kind)
		answer.WantProblem(t, 400, "invalid_request")
		detail := fmt.Sprint(answer.Details())
		if !strings.Contains(detail, test.word) {
			t.Errorf("%s: got the details %s, want the word %q", test.cause, detail, test.word)
		}
		if causes[detail] != "" {
			t.Errorf("got the details %s for two causes: %s, and %s", detail, test.cause, causes[detail])
		}
		causes[detail] = test.cause
	}
}

// startTriggered starts a server whose database runs a trigger before each insert. onInsert sets what the
// trigger does.
func startTriggered(t *testing.T) (s *hubstest.Server, admin *hubstest.Client, onInsert func(body string)) {
	t.Helper()
	s, admin = start(t, "admin")
	s.AllowErrorsWithAnyOf(`"msg":"failed"`)
	setBody := func(body string) {
		hubstest.Exec(t, s.Database, `create or replace function on_insert() returns trigger
			language plpgsql as $$ begin `+body+`; end $$`)
	}
	setBody("return new")
	for _, table := range hubstest.Tables(t) {
		hubstest.Exec(t, s.Database, "create trigger on_insert before insert on "+table+
			" for each row execute function on_insert()")
	}
	return s, admin, setBody
}

// Z2: A write that fails for a reason which may soon pass is a 503, and any other failure is a 500.
func TestPassingFailuresAreUnavailable(t *testing.T) {
	t.Parallel()
	_, admin, onInsert := startTriggered(t)
	for state, status := range map[string]int{
		"40001": 503, // serialization_failure
		"40P01": 503, // deadlock_detected
		"53100": 503, // disk_full
		"55P03": 503, // lock_not_available
		"57014": 503, // query_canceled
		"58030": 503, // io_error
		"22012": 500, // division_by_zero
		"23514": 500, // check_violation
		"P0001": 500, // raise_exception
		"XX000": 500, // internal_error
	} {
		onInsert("raise exception 'on purpose' using errcode = '" + state + "'")
		got := admin.Do("POST /hubs", `{"name":"North"}`)
		wantEqual(t, "status for "+state, got.Status, status)
	}
	onInsert("return new")
	admin.Do("POST /hubs", `{"name":"North"}`).Want(t, 201)
}

// Z2: A write is a 503 if it meets a lock that is not free in time, or a transaction that does not permit
// it. Later it succeeds.
func TestWritesThatMeetOthers(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		setting string // of the server's connections
		write   string // of the other transaction
	}{
		"a lock":        {"lock_timeout=50ms", "select from hubs for update"},
		"serialization": {"default_transaction_isolation=serializable", "update hubs set name = 'East'"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			database := hubstest.NewDatabase(t)
			s, admin := start(t, "admin", map[string]string{"DATABASE_URL": database + "&" + test.setting})
			s.AllowErrorsWithAnyOf("unavailable")
			hub := admin.Do("POST /hubs", `{"name":"North"}`).Must(t, 201).Header.Get("Location")
			other, err := hubstest.OpenDB(t, database).Begin()
			hubstest.Must(t, err)
			defer other.Rollback()
			_, err = other.Exec(test.write)
			hubstest.Must(t, err)

			answers := hubstest.SendAtOnce(t, 1, func() *hubstest.Response {
				return admin.Do("PATCH "+hub, `{"name":"South"}`)
			})
			if name == "serialization" {
				hubstest.WaitUntil(t, "the write that waits for the other transaction", func() bool {
					return hubstest.Query[bool](t, database, `select exists (select from pg_stat_activity
						where wait_event_type = 'Lock' and datname = current_database())`)
				})
				hubstest.Must(t, other.Commit())
			}
			(<-answers).WantProblem(t, 503, "unavailable")
			other.Rollback() // an error means that it is committed
			admin.Do("PATCH "+hub, `{"name":"South"}`).Want(t, 200)
		})
	}
}

// I5, F3: An insert after which there is no row, because of a trigger, is a 500. An upload leaves no
// bytes.
func TestInsertsWithoutARowAreErrors(t *testing.T) {
	t.Parallel()
	s, admin, onInsert := startTriggered(t)
	c, _, current := newcomer(t, s)
	onInsert("return null")
	admin.Do("POST /hubs", `{"name":"North"}`).WantProblem(t, 500, "internal")
	admin.Upload("a.txt", []byte("hello")).WantProblem(t, 500, "internal")
	accept(c, current).WantProblem(t, 500, "internal")
	s.WantStored(t, 0)
	wantTerms(t, c, false)
}

// A path with a line break in the name of its file is a 404, even if an operator has written such a
// name into the table.
func TestNamesWithLineBreaksAreNotFound(t *testing.T) {
	t.Parallel()
	s, c := start(t, "member")
	file := c.Store("a.txt", "hello")
	hubstest.Exec(t, s.Database, "update files set name = E'a\r\nb'")
	withBreak := strings.Replace(file, "a.txt", "a%0D%0Ab", 1)
	c.Get(withBreak).WantProblem(t, 404, "not_found")
}
