//go:build moving

package main

// What stands in the log: the members of a request's line, the texts that are cleaned or
// masked, the size of a line, and the events of refused sessions and origins.

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// maxLine is the size of a log line in bytes, whatever the request.
const maxLine = 2048

// logLine decodes the request line of a request id.
func logLine(t testing.TB, srv *testServer, id string) map[string]any {
	t.Helper()
	text := srv.log.waitFor(t, `"msg":"request"`, `"requestId":"`+id+`"`)
	var line map[string]any
	if err := json.Unmarshal([]byte(text), &line); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return line
}

// One line a request on staging and production, with these members, and no others.
func TestRequestLog(t *testing.T) {
	t.Parallel()
	srv := startServer(t, stagingEnv(newMailServer(t, mailOptions{})), map[string]string{"ALLOWED_ORIGINS": "https://app.example.com"})
	admin, email := srv.member(t, roleAdmin)
	userID := queryValue[string](t, srv.env["DATABASE_URL"], "select user_id from users where email = $1", email)
	hubID := admin.do("POST", "/hubs", `{"name":"North"}`).want(t, 201).field(t, "hubId").(string)
	file := admin.upload("plan.txt", []byte("content")).want(t, 201)
	filePath, fileID := file.field(t, "path").(string), file.field(t, "fileId").(string)
	visitor := srv.client(t)
	for i, test := range []struct {
		what         string
		client       *testClient
		method, path string
		body         any
		headers      []string
		status       float64
		bytes        float64 // -1: those of the answer's body
		members      map[string]any
	}{
		{"everything at once", admin, "GET", "/hubs?limit=7&filters[name]=Secret%20name&orderBy=name&offset=0&filters%5Bstatus%5D=active", nil,
			[]string{"User-Agent", "browser-1", "Origin", "https://app.example.com", "Authorization", "Bearer x", "Content-Type", "text/plain; a=b"}, 200, -1,
			map[string]any{"route": "/hubs", "query": "limit=7&offset=0&orderBy=name&filters[name]=(11 characters)&filters[status]=active", "userId": userID,
				"userAgent": "browser-1", "origin": "https://app.example.com", "contentType": "text/plain", "cookie": "***", "authorization": "***"}},
		{"as little as can be", visitor, "GET", "/healthz?token=opaque", nil, []string{"User-Agent", ""}, 200, -1, map[string]any{"route": "/healthz"}},
		{"a hub", admin, "GET", "/hubs/" + hubID + "?x=opaque", nil, nil, 200, -1,
			map[string]any{"route": "/hubs/{hubId}", "hubId": hubID, "userId": userID, "cookie": "***", "userAgent": "Go-http-client/1.1"}},
		{"a hub that is no UUID", admin, "GET", "/hubs/opaque", nil, []string{"User-Agent", ""}, 404, -1,
			map[string]any{"route": "/hubs/{hubId}", "userId": userID, "cookie": "***"}},
		{"a file", admin, "GET", filePath, nil, []string{"User-Agent", ""}, 200, 7,
			map[string]any{"route": "/files/{fileId}/{name}", "fileId": fileID, "userId": userID, "cookie": "***"}},
		{"a part of a file", admin, "GET", filePath, nil, []string{"User-Agent", "", "Range", "bytes=1-2"}, 206, 2,
			map[string]any{"route": "/files/{fileId}/{name}", "fileId": fileID, "userId": userID, "cookie": "***"}},
		{"a file's head", admin, "HEAD", filePath, nil, []string{"User-Agent", ""}, 200, 0,
			map[string]any{"route": "/files/{fileId}/{name}", "fileId": fileID, "userId": userID, "cookie": "***"}},
		{"bad values", admin, "GET", "/hubs?limit=opaque&orderBy=opaque&unknown=opaque&offset=1&offset=2&filters[status]=", nil, []string{"User-Agent", ""}, 400, -1,
			map[string]any{"route": "/hubs", "userId": userID, "cookie": "***"}},
		{"a query where the input is a body", admin, "POST", "/hubs?x=opaque", `{"name":"opaque","status":"archived"}`, []string{"User-Agent", ""}, 201, -1,
			map[string]any{"route": "/hubs", "contentType": "application/json", "userId": userID, "cookie": "***"}},
		{"a broken query", admin, "GET", "/hubs?limit=7&a=%zz", nil, []string{"User-Agent", ""}, 400, -1, map[string]any{"route": "/hubs", "userId": userID, "cookie": "***"}},
		{"no route", visitor, "GET", "/Nowhere/x-1_2.html;a:b(c),d+e?q=opaque", nil, []string{"User-Agent", ""}, 404, -1,
			map[string]any{"path": "/Nowhere/x-1_2.html;a:b(c),d+e"}},
		{"no route, other characters", visitor, "GET", "/a%20b/c~d%20e!f/%C3%A9", nil, []string{"User-Agent", "a!b c/1.0 \u00e9 (d; e)"}, 404, -1,
			map[string]any{"path": "/a *** ***", "userAgent": "*** c/1.0 *** (d; e)"}},
		{"no such method", visitor, "PUT", filePath, "x", []string{"User-Agent", ""}, 405, -1, map[string]any{"contentType": "application/json"}},
		{"a method of their own", visitor, "PURGE", filePath, nil, []string{"User-Agent", ""}, 405, -1, nil},
		{"a write of a foreign page", visitor, "POST", filePath, "x", []string{"User-Agent", "", "Origin", "https://opaque.example.com"}, 403, -1,
			map[string]any{"origin": "(host of 18 characters)", "contentType": "application/json"}},
		{"a foreign origin", visitor, "GET", "/healthz", nil, []string{"User-Agent", "", "Origin", "https://opaque.example.com"}, 200, -1,
			map[string]any{"route": "/healthz", "origin": "(host of 18 characters)"}},
		{"a content type that is none", visitor, "GET", "/healthz", nil, []string{"User-Agent", "", "Content-Type", "opaque"}, 200, -1,
			map[string]any{"route": "/healthz", "contentType": "opaque"}},
		{"a broken content type", visitor, "GET", "/healthz", nil, []string{"User-Agent", "", "Content-Type", "text/plain; opaque"}, 200, -1,
			map[string]any{"route": "/healthz"}},
		{"a body", visitor, "POST", "/auth/otp/validate", `{"email":"opaque@example.com","code":"482913"}`, []string{"User-Agent", ""}, 401, -1,
			map[string]any{"route": "/auth/otp/validate", "contentType": "application/json"}},
	} {
		t.Run(test.what, func(t *testing.T) {
			id := fmt.Sprintf("line-%d", i)
			answer := test.client.do(test.method, test.path, test.body, append(test.headers, "X-Request-Id", id)...)
			line := logLine(t, srv, id)
			if _, err := time.Parse(time.RFC3339Nano, fmt.Sprint(line["time"])); err != nil {
				t.Error(err)
			}
			if d, ok := line["duration"].(float64); !ok || d <= 0 {
				t.Errorf("duration: got %v, want nanoseconds", line["duration"])
			}
			if test.bytes < 0 {
				test.bytes = float64(len(answer.body))
			}
			want := map[string]any{"time": line["time"], "duration": line["duration"], "level": "INFO", "msg": "request", "requestId": id,
				"client": test.client.ip, "method": test.method, "status": test.status, "bytes": test.bytes}
			maps.Copy(want, test.members)
			if !maps.Equal(line, want) {
				t.Errorf("got\n%v\nwant\n%v", line, want)
			}
			if n := srv.log.count(`"msg":"request"`, id+`"`); n != 1 {
				t.Errorf("got %d lines for one request", n)
			}
		})
	}
}

// The local environment writes no line a request: there, people watch the log for codes.
func TestNoRequestLogLocally(t *testing.T) {
	t.Parallel()
	local := startServer(t)
	local.client(t).do("GET", "/hubs", nil, "X-Request-Id", "line-3").want(t, 401)
	local.stop(t)
	if n := local.log.count(`"msg":"request"`); n != 0 {
		t.Errorf("got %d request lines in the local environment, want 0", n)
	}
}

// Locally a code is a line of its own, with the whole address as it is stored, set off by
// blank lines.
func TestLocalCodeIsSetOff(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	sent := newEmail()
	stored := strings.Replace(sent, "user", "User", 1)
	testUser(t, srv.env["DATABASE_URL"], stored, roleMember)
	askCode(srv.client(t), sent)
	code := srv.code(t, sent)
	srv.log.waitFor(t, `"msg":"code sent"`)
	lines := srv.log.all()
	at := slices.Index(lines, codeLinePrefix+stored+": "+code)
	if at < 1 || lines[at-1] != "" || lines[at+1] != "" {
		t.Errorf("got\n%s\nwant the code in a line of its own between blank ones", srv.log)
	}
}

// hostile are texts that hide a secret from a mask. secrets are what must not be seen of each.
func hostileTexts(token, email, code string) map[string][]string {
	parts := strings.Split(token, ".")
	local, domain, _ := strings.Cut(email, "@")
	half := len(parts[1]) / 2
	texts := map[string][]string{
		"/x_" + code + "_" + code + "_":             {code},
		code[:3] + "-" + code[3:]:                   {code[:3] + "-" + code[3:]},
		code[:3] + "_" + code[3:]:                   {code[:3] + "_" + code[3:]},
		strings.Join(strings.Split(code, ""), "-"):  {code[1:2] + "-" + code[2:3] + "-" + code[3:4]},
		"x" + code + "x" + code:                     {code},
		code[:3] + "\u200b" + code[3:]:              {code[:3] + "\u200b" + code[3:], code},
		code[:3] + "\u00ad" + code[3:]:              {code[:3] + "\u00ad" + code[3:], code},
		local + `\u0040` + domain:                   {local + `\u0040`, local},
		local + "%40" + domain:                      {local + "%40", local + "@"},
		local + "%2540" + domain:                    {local + "%2540", local + "@"},
		local + "\u200b@" + domain:                  {local},
		strings.ToUpper(email):                      {strings.ToUpper(local)},
		parts[0] + "." + parts[1] + " ." + parts[2]: {parts[1], parts[2]},
		parts[0] + "." + parts[1][:half] + " " + parts[1][half:] + "." + parts[2]: {parts[1][:half], parts[1][half:], parts[2]},
		parts[0] + " . " + parts[1] + " . " + parts[2]:                            {parts[1], parts[2]},
		"e\u200byJ" + parts[0][3:] + "." + parts[1] + "." + parts[2]:              {parts[1], parts[2]},
		"Cookie: x=" + token:        {parts[1], parts[2]},
		parts[2]:                    {parts[2]},
		"code=" + code + "&x":       {code},
		"%34%38%32%39%31%33" + code: {code, "%34%38"},
	}
	return texts
}

// G2: hostile texts show nothing, wherever a client puts them. The secrets are real ones.
func TestHostileTextsInRequests(t *testing.T) {
	t.Parallel()
	srv := startServer(t, stagingEnv(newMailServer(t, mailOptions{})))
	email := strings.Replace(newEmail(), "user", "jane.roe", 1)
	testUser(t, srv.env["DATABASE_URL"], email, roleAdmin)
	c := srv.client(t)
	c.signIn(email)
	c.acceptTerms()
	cookie := srv.cookieName() + "=" + c.token()
	n := 0
	for text, secrets := range hostileTexts(c.token(), email, "482913") {
		t.Run(text, func(t *testing.T) {
			mark := srv.log.mark()
			inTarget := strings.NewReplacer(" ", "%20", "\u200b", "%E2%80%8B", "\u00ad", "%C2%AD").Replace(text)
			raw := strings.ReplaceAll(text, " ", "\t") // what a sloppy client would send
			for _, request := range [][]string{        // target, headers
				{"/" + inTarget}, {"/nowhere/" + inTarget}, {"/hubs/" + inTarget}, {"/files/" + inTarget + "/" + inTarget},
				{"/nowhere?q=" + inTarget}, {"/hubs?q=" + inTarget}, {"/hubs?" + inTarget}, {"/hubs?filters[name]=" + inTarget},
				{"/hubs?orderBy=" + inTarget}, {"/hubs?limit=" + inTarget}, {"/healthz?" + inTarget},
				{"/healthz", "User-Agent", text}, {"/healthz", "User-Agent", "browser/1.0 (" + raw + ")"},
				{"/healthz", "Origin", "https://" + raw}, {"/healthz", "Origin", text}, {"/healthz", "Content-Type", "text/" + raw},
				{"/healthz", "Content-Type", text}, {"/healthz", "Referer", text}, {"/healthz", "Cookie", text},
				{"/healthz", "Authorization", text}, {"/healthz", "X-Forwarded-Host", text},
				{"/hubs", "Origin", "https://" + raw, "Access-Control-Request-Method", "POST"},
			} {
				n++
				headers := append([]string{"X-Forwarded-For", one(n), "Cookie", cookie, "Connection", "close"}, request[1:]...)
				method := "GET"
				if len(request) == 5 {
					method = "OPTIONS"
				}
				srv.wire(t, method, strings.ReplaceAll(request[0], "\t", "%09"), nil, headers...)
			}
			last := fmt.Sprintf("last-%d", n)
			srv.client(t).do("GET", "/healthz", nil, "X-Request-Id", last).want(t, 200)
			srv.log.waitFor(t, `"requestId":"`+last+`"`)
			wantUnseen(t, srv.log.all()[mark:], secrets)
		})
	}
}

func wantUnseen(t *testing.T, lines []string, secrets []string) {
	t.Helper()
	for _, line := range lines {
		if len(line) > maxLine {
			t.Errorf("a line of %d bytes, want at most %d: %s", len(line), maxLine, line)
		}
		for _, secret := range secrets {
			if strings.Contains(line, secret) {
				t.Errorf("%q in %s", secret, line)
			}
		}
	}
}

// G2: nor do they in the texts of errors: the one place where the log takes a text as it is.
func TestHostileTextsInErrors(t *testing.T) {
	t.Parallel()
	token := testToken{}.sign("a-key-of-thirty-two-bytes-or-more", "<email>", "jane.roe@corp.example", "<userId>", exampleID)
	for text, secrets := range hostileTexts(token, "jane.roe@corp.example", "482913") {
		t.Run(text, func(t *testing.T) {
			for _, around := range []string{"%s", "550 5.1.1 <%s>: no such user", "dial tcp: %s%[1]s", "a\nb %s\nc", strings.Repeat("x ", 340) + "%s"} {
				var out logBuffer
				events := newServer(config{}, nil, &out).log
				whole := fmt.Sprintf(around, text)
				events.Error("failed", "error", errors.New(whole))
				events.Info(whole, "path", whole)
				wantUnseen(t, out.all(), secrets)
			}
		})
	}
}

// G2: the longest word of letters and digits that the log shows, and the shortest that it doesn't;
// digits count as letters do, and letters are those from a to z.
func TestLongestWordThatIsShown(t *testing.T) {
	t.Parallel()
	shown := strings.Repeat("a1Z", 8)
	for text, want := range map[string]string{
		shown:                    shown,
		shown + "0":              "***",
		shown + "a":              "***",
		"/azAZ/" + shown:         "/azAZ/" + shown,
		"/azAZ/" + shown + "-":   "/azAZ/" + shown + "-",
		"/azAZ/" + shown + "-_1": "***",
	} {
		if got := cleanText(text); got != want {
			t.Errorf("%s: got %q, want %q", text, got, want)
		}
	}
}

// Each kind of secret is masked for its own sake: in these texts nothing else is masked that
// would hide it, neither an address nor a telling name nor six digits.
func TestMaskOfEachKind(t *testing.T) {
	t.Parallel()
	const opaque = "(opaque)"
	for _, test := range []struct{ text, masked string }{
		{"smtps://mailer:" + opaque + "@mail.example.com: refused", "smtps:/***@mail.example.com: refused"},
		{"postgres://:" + opaque + "@db.example.com", "postgres:/***@db.example.com"},
		{"x eyJ" + "hbGci.eyJl-_bWFp.abc", "x ***"},
		{"x?code=" + opaque, "x?***"},
		{"x?token=" + opaque + "&a=b", "x?***"},
		{"x?Secret=" + opaque + "\nsecond line " + opaque, "x?***"},
		{"x?password=" + opaque, "x?***"},
		{"x?session_id=" + opaque, "x?***"},
		{"x?authKey=" + opaque, "x?***"},
		{"at 510764.", "at ***."},
		{"_510764x", "_***x"},
		{"/x_510764_510764_", "/x_***_"},
		{"5-1-0-7-6-4", "***"},
		{"ada@b.example", "a***@b.example"},
		{"ada@corp", "a***@corp"},
		{"ada%2540b.example", "a******"},
		{"ada%252540b.example", "a******"},
		{"ada.byron`@b.example", "a***@b.example"},
		{"ada%byron@b.example", "a***@b.example"},
		{`ada\u0040b.example`, `a***\u0040b.example`},
		{"a\u009b31mb\x7fc\u202ed\u200be", "a31mbcde"},
		{strings.Repeat("k", 40), "***"},
		// And what is none of them stays, or no log could be read.
		{"https://example.com:8443/a and b", "https://example.com:8443/a and b"},
		{"limit=20&offset=10000", "limit=20&offset=10000"},
		{"12345 x 12345", "12345 x 12345"},
		{"dial tcp 127.0.0.1:5432: connect: connection refused", "dial tcp 127.0.0.1:5432: connect: connection refused"},
		{"550 5.1.1 user unknown", "550 5.1.1 user unknown"},
		{`pq: password authentication failed for user "hubs" (28P01)`, `pq: password authentication failed for user "hubs" (28P01)`},
	} {
		t.Run(test.text, func(t *testing.T) {
			if got := maskText(test.text); got != test.masked {
				t.Errorf("got %q, want %q", got, test.masked)
			}
		})
	}
}

// G2: the masks look into errors, and find a token that has no digit.
func TestMaskOfErrorsAndPlainTokens(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	events := newServer(config{}, nil, &out).log
	events.Info("x",
		"error", errors.New("550 <ada@example.com>"), "path", "/eyJhbGci.eyJlbWFp.abc", "query", "anna%40example.com",
		"user-agent", "a\u009b31mb\x7fc\u202ed")
	for _, secret := range []string{"ada@", "eyJ", "anna", "\u009b", "\x7f", "\u202e"} {
		if strings.Contains(out.String(), secret) {
			t.Errorf("%q: %s", secret, out.String())
		}
	}
}

// H4: a line has at most 2 kB, and so has each event, whatever the request or the error is
// made of.
func TestLogLinesAreShort(t *testing.T) {
	t.Parallel()
	var out logBuffer
	cfg, err := loadConfig(lookup(merged(deployedEnv(envStaging), "ALLOWED_ORIGINS", "https://app.example.com")))
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(cfg, nil, &out)
	handler := s.handler(s.routes())
	for _, piece := range []string{"x", "\xff", "\x00", `"`, "<", `\`, "é", "\u2028", "\u202e", "😀", "a@", "a%40", `a\u0040`, "a@\xff", "key\u0080", "key,123456,",
		"eyJ ", "1 ", "123456", "%", "%41", "code=", "://a@", "/", "=", "- "} {
		t.Run(fmt.Sprintf("%q", piece), func(t *testing.T) {
			mark := out.mark()
			text := strings.Repeat(piece, 15<<10/len(piece))
			for _, name := range []string{"", "User-Agent", "Origin", "Content-Type", "X-Request-Id", "Cookie", "Authorization", "X-Forwarded-For"} {
				for _, target := range []string{"/nowhere", "/hubs", "/files/" + exampleID + "/x"} {
					r := httptest.NewRequest("GET", target, nil)
					r.RemoteAddr = one(len(out.all())) + ":1"
					if name == "" {
						r.URL.Path, r.URL.RawQuery = target+"/"+text, text
					} else {
						r.Header.Set(name, text)
					}
					r.Header.Add("Access-Control-Request-Method", text)
					handler.ServeHTTP(httptest.NewRecorder(), r)
					r.Method = "POST"
					r.Header.Set("Sec-Fetch-Site", "cross-site")
					handler.ServeHTTP(httptest.NewRecorder(), r)
				}
			}
			// The longest event: an error, of a request with the longest id, about the longest address.
			s.log.Error("failed", "error", errors.New(text), "requestId", strings.Repeat("r", 128), "email", "a@"+strings.Repeat("b.", 126),
				"client", "2001:db8:1111:2222:3333:4444:5555:6666", "userId", exampleID)
			lines := out.all()[mark:]
			if len(lines) < 48 {
				t.Fatalf("got %d lines, want one a request", len(lines))
			}
			wantUnseen(t, lines, nil)
		})
	}
}

// G2, D3: what a mail server says is logged, but masked: it knows the address and the code,
// and may say both.
func TestMailServersWordsAreMasked(t *testing.T) {
	t.Parallel()
	database := newDatabase(t)
	for _, at := range []string{"MAIL", "RCPT", "."} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			var seen logBuffer // what the mail server was sent
			srv := startServer(t, map[string]string{"SMTP_URL": tellingMailServer(t, at, &seen), "MAIL_FROM": "signin@example.com", "DATABASE_URL": database})
			srv.allowErrors("code not sent")
			email := newEmail()
			testUser(t, database, email, roleMember)
			askCode(srv.client(t), email)
			line := srv.log.waitFor(t, `"msg":"code not sent"`, `"level":"ERROR"`, "554", maskedEmail(email))
			code := regexp.MustCompile(`code is (\d{6})`).FindStringSubmatch(seen.String())
			if (code != nil) != (at == ".") {
				t.Fatalf("the mail server was sent:\n%s", &seen)
			}
			secrets := []string{email, strings.ToUpper(email), "eyJ", "hunter2"}
			if code != nil {
				secrets = append(secrets, code[1], code[1][:3]+"-"+code[1][3:])
			}
			wantUnseen(t, srv.log.all(), secrets)
			var entry struct{ Msg string }
			if err := json.Unmarshal([]byte(line), &entry); err != nil || entry.Msg != "code not sent" {
				t.Errorf("got %s, %v; want the server's words as the error, apart from the message", line, err)
			}
		})
	}
}

// tellingMailServer refuses at one command, or at the end of the text ("."), and says
// everything that it knows. It notes what it was sent.
func tellingMailServer(t *testing.T, at string, seen *logBuffer) (url string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	serve := func(conn net.Conn) {
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(patience))
		io.WriteString(conn, "220 test.example.com\r\n")
		inText := false
		for lines := bufio.NewScanner(conn); lines.Scan(); {
			line := lines.Text()
			fmt.Fprintln(seen, line)
			verb, _, _ := strings.Cut(line, " ")
			switch {
			case verb == at:
				mails := regexp.MustCompile(`<(.*)>`).FindStringSubmatch(seen.String())
				code := regexp.MustCompile(`code is (\d{3})(\d{3})`).FindStringSubmatch(seen.String())
				if code == nil {
					code = []string{"", "", ""}
				}
				fmt.Fprintf(conn, "554-%s %s\r\n554-%s%s %[3]s-%[4]s %[3]s\u200b%[4]s\r\n554-eyJhbGciOiJIUzI1NiJ9.eyJlbWFpbCI6ImEi.c2ln\r\n554 password=hunter2\r\n",
					mails[1], strings.ToUpper(seen.String()[strings.LastIndexByte(seen.String(), '<')+1:]), code[1], code[2])
				inText = false
			case inText:
			case verb == "DATA":
				inText = true
				io.WriteString(conn, "354 go ahead\r\n")
			default:
				io.WriteString(conn, "250 ok\r\n")
			}
		}
	}
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go serve(conn)
		}
	}()
	return "smtp://" + ln.Addr().String()
}

// T5: why a session was refused stands in the log, in one word, with the user where there is
// one. The client's answer is the same for all.
func TestReasonOfARefusedSession(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	db, key := srv.env["DATABASE_URL"], srv.env["SESSION_SECRET"]
	email := newEmail()
	userID := testUser(t, db, email, roleMember)
	signed := func(key string, times string) string {
		return testToken{Payload: new(`{"email":"<email>","userId":"<userId>",` + times + `}`)}.sign(key, "<email>", email, "<userId>", userID)
	}
	const good = `"iat":<now>,"exp":<now+3600>`
	account := func(change string) string { // a session that the change ends
		c, email := srv.member(t, roleMember)
		execSQL(t, db, change, email)
		return c.token()
	}
	var first *testResponse
	for _, test := range []struct{ what, token, reason string }{
		{"no cookie", "", "missing"},
		{"no token", "x", "forged"},
		{"another key", signed("another-secret-of-more-than-thirty-two-bytes", good), "forged"},
		{"another key, and expired", signed("another-secret-of-more-than-thirty-two-bytes", `"iat":<now-3600>,"exp":<now-1>`), "forged"},
		{"issued in the future", signed(key, `"iat":<now+3600>,"exp":<now+7200>`), "forged"},
		{"too long a life", signed(key, `"iat":<now>,"exp":<now+9999999>`), "forged"},
		{"expired", signed(key, `"iat":<now-3600>,"exp":<now-1>`), "expired"},
		{"signed out everywhere", account("update users set signed_out_at = clock_timestamp() where email = $1"), "ended"},
		{"address changed", account("update users set email = 'x' || email where email = $1"), "ended"},
		{"user deleted", account("delete from users where email = $1"), "ended"},
		{"signed out and suspended", account("update users set signed_out_at = clock_timestamp(), suspended = true where email = $1"), "ended"},
	} {
		t.Run(test.what, func(t *testing.T) {
			mark := srv.log.mark()
			r := srv.with(t, test.token).do("GET", "/auth/session", nil, "X-Request-Id", "refused-session")
			wantProblem(t, r, 401, "unauthenticated")
			line := srv.log.waitAfter(t, mark, `"msg":"refused"`, `"requestId":"refused-session"`)
			for _, part := range []string{`"code":"unauthenticated"`, `"reason":"` + test.reason + `"`, `"route":"/auth/session"`} {
				if !strings.Contains(line, part) {
					t.Errorf("got %s, want %s", line, part)
				}
			}
			r.header.Del("Date")
			if first == nil {
				first = r
			}
			if !bytes.Equal(r.body, first.body) || !maps.EqualFunc(r.header, first.header, slices.Equal) {
				t.Errorf("got %v, want the answer to a missing cookie: %v", r, first)
			}
		})
	}
	srv.stop(t)
	if got := srv.log.count(`"reason":`); got != 11 {
		t.Errorf("got %d lines with a reason, want one for each refusal", got)
	}
}

// A refused origin, of a write or of a preflight, is one line that names the setting that
// would allow it. Other requests say nothing of it.
func TestRefusedOriginNamesTheSetting(t *testing.T) {
	t.Parallel()
	mails := newMailServer(t, mailOptions{})
	for name, test := range map[string]struct {
		env              map[string]string
		allowed, setting string
	}{
		"local":      {nil, "http://127.0.0.1:5173", "ALLOWED_ORIGINS"},
		"staging":    {merged(stagingEnv(mails), "ALLOWED_ORIGINS", "https://app.example.com"), "https://app.example.com", "ALLOWED_ORIGINS"},
		"production": {productionEnv(mails), "https://app.example.com", "ALLOWED_ORIGIN_DOMAIN"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := startServer(t, test.env)
			const foreign = "https://front-end.example.org"
			for _, request := range []struct {
				what, method string
				headers      []string
				lines        int
			}{
				{"write", "POST", []string{"Origin", foreign}, 1},
				{"cross-site-write", "POST", []string{"Origin", foreign, "Sec-Fetch-Site", "cross-site"}, 1},
				{"null", "POST", []string{"Origin", "null"}, 1},
				{"preflight", "OPTIONS", []string{"Origin", foreign, "Access-Control-Request-Method", "POST"}, 1},
				{"read", "GET", []string{"Origin", foreign}, 0},
				{"options", "OPTIONS", []string{"Origin", foreign}, 0},
				{"allowed-write", "POST", []string{"Origin", test.allowed}, 0},
				{"allowed-preflight", "OPTIONS", []string{"Origin", test.allowed, "Access-Control-Request-Method", "POST"}, 0},
				{"no-browser", "POST", nil, 0},
			} {
				srv.client(t).do(request.method, "/auth/logout", nil, append(request.headers, "X-Request-Id", request.what)...)
				if request.lines > 0 {
					srv.log.waitFor(t, "origin refused", `"requestId":"`+request.what+`"`)
				}
			}
			srv.stop(t)
			for _, what := range []string{"write", "cross-site-write", "null", "preflight", "read", "options", "allowed-write", "allowed-preflight", "no-browser"} {
				want := 0
				if slices.Contains([]string{"write", "cross-site-write", "null", "preflight"}, what) {
					want = 1
				}
				if got := srv.log.count(`"msg":"origin refused: `, test.setting, `"requestId":"`+what+`"`); got != want {
					t.Errorf("%s: got %d lines that name %s, want %d:\n%s", what, got, test.setting, want, srv.log)
				}
				if got := srv.log.count("ALLOWED_", `"requestId":"`+what+`"`); got != want {
					t.Errorf("%s: got %d lines that name a setting, want %d", what, got, want)
				}
			}
			wantUnseen(t, srv.log.all(), []string{"front-end"})
		})
	}
}

// K3: on staging and production, a database role that may write users in any way is a warning
// at the start. Locally, and for the role of deploy/roles.sql, there is none.
func TestPowerfulDatabaseRole(t *testing.T) {
	t.Parallel()
	mails := newMailServer(t, mailOptions{})
	for name, test := range map[string]struct {
		env    map[string]string
		grant  string // on users
		warned bool
	}{
		"reads only":             {stagingEnv(mails), "select", false},
		"reads only, production": {productionEnv(mails), "select", false},
		"insert":                 {stagingEnv(mails), "select, insert", true},
		"update":                 {productionEnv(mails), "select, update", true},
		"delete":                 {stagingEnv(mails), "select, delete", true},
		"update of one column":   {stagingEnv(mails), "select, update (permission)", true},
		"locally":                {nil, "select, insert, update, delete", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			database := newDatabase(t)
			role := fmt.Sprintf("role_%d", serial.Add(1))
			execSQL(t, database, "create role "+role+" login password 'role'")
			t.Cleanup(func() { execSQL(t, database, "drop owned by "+role+"; drop role "+role) })
			execSQL(t, database, "grant select on all tables in schema public to "+role+"; grant "+test.grant+" on users to "+role)
			srv := startServer(t, test.env, map[string]string{"DATABASE_URL": withUser(t, database, role, "role")})
			srv.stop(t)
			got := srv.log.count(`"level":"WARN"`, "the database role may write users: use the role of deploy/roles.sql")
			if (got == 1) != test.warned {
				t.Errorf("got %d warnings, want one: %v\n%s", got, test.warned, srv.log)
			}
		})
	}
}

// H4: the cost of a line does not grow with the request. From 1 kB to 15 kB of a hostile text
// it may grow at most 20 times; what masks without a bound grows hundreds of times.
func TestCostOfALineIsBounded(t *testing.T) {
	s := newServer(config{env: envStaging}, nil, io.Discard)
	handler := s.logRequests(s.setSecurityHeaders(s.setRequestContext(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	}))))
	for _, piece := range []string{"key\u0080", "key,123456,", "\xff", "a@", "eyJ ", "1-", "%25", "code=x&"} {
		t.Run(fmt.Sprintf("%q", piece), func(t *testing.T) {
			cost := func(size int) time.Duration {
				text := strings.Repeat(piece, size/len(piece))
				best := time.Hour
				for range 20 { // the fastest run is the one that nothing else disturbed
					start := time.Now()
					r := httptest.NewRequest("GET", "/x", nil)
					r.URL.Path, r.URL.RawQuery = "/"+text, text
					for _, name := range []string{"User-Agent", "Origin", "Content-Type", "Cookie"} {
						r.Header.Set(name, text)
					}
					handler.ServeHTTP(httptest.NewRecorder(), r)
					maskText(text)
					best = min(best, time.Since(start))
				}
				return best
			}
			small, large := cost(1<<10), cost(15<<10)
			if large > 20*small {
				t.Errorf("1 kB costs %v, 15 kB %v: want at most 20 times as much", small, large)
			}
		})
	}
}

// The server's own identifiers are logged as they are, also if they look like a code: by them
// the lines of a request, and of a user, are found.
func TestOwnIdentifiersAreNotMasked(t *testing.T) {
	t.Parallel()
	const id = "48291348-2913-4829-8482-913482913482"
	for _, name := range []string{"requestId", "userId", "fileId"} {
		var out logBuffer
		newServer(config{}, nil, &out).log.Info("event", name, id)
		if want := `"` + name + `":"` + id + `"`; !strings.Contains(out.String(), want) {
			t.Errorf("got %s, want %s", &out, want)
		}
	}
}

// The log names the user of a session that has ended or is suspended: who is it that still
// tries?
func TestRefusedSessionsNameTheirUser(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	database := srv.env["DATABASE_URL"]
	for _, test := range []struct {
		change string
		status int
		code   string
	}{
		{"update users set signed_out_at = clock_timestamp() where email = $1", 401, "unauthenticated"},
		{"update users set email = 'x' || email where email = $1", 401, "unauthenticated"},
		{"update users set suspended = true where email = $1", 403, "account_suspended"},
	} {
		t.Run(test.change, func(t *testing.T) {
			c, email := srv.member(t, roleMember)
			userID := queryValue[string](t, database, "select user_id from users where email = $1", email)
			execSQL(t, database, test.change, email)
			mark := srv.log.mark()
			wantProblem(t, c.do("GET", "/hubs", nil), test.status, test.code)
			line := srv.log.waitAfter(t, mark, `"msg":"refused"`, `"code":"`+test.code+`"`)
			if !strings.Contains(line, `"userId":"`+userID+`"`) {
				t.Errorf("got %s, want the user %s in it", line, userID)
			}
		})
	}
}

// A file that is sent in several pieces ends where it should, and the log has all its bytes.
// What a client asked for may be a part of it.
func TestPiecesOfAFileAreCounted(t *testing.T) {
	t.Parallel()
	srv := startServer(t, stagingEnv(newMailServer(t, mailOptions{})))
	c, _ := srv.member(t, roleMember)
	const size = 5 * transferPiece
	path := c.upload("large.txt", []byte(strings.Repeat("x", size))).stored(t).Path
	for asked, want := range map[string]int{
		"bytes=0-": size,
		fmt.Sprintf("bytes=100-%d", 100+2*transferPiece-1): 2 * transferPiece,
		fmt.Sprintf("bytes=7-%d", 7+transferPiece):         transferPiece + 1,
	} {
		c.do("GET", path, nil, "Range", asked, "X-Request-Id", asked[len("bytes="):]).want(t, 206)
		if got := logLine(t, srv, asked[len("bytes="):])["bytes"]; got != float64(want) {
			t.Errorf("%s: got %v bytes, want %d", asked, got, want)
		}
	}
}
