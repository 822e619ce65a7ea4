package hubstest

import (
	"encoding/json"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A Log is what a server writes to, line by line, for tests to wait on.
type Log struct {
	mu      sync.Mutex
	lines   []string
	partial string
	changed chan struct{} // closed by the next Write; nil if nobody waits
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := strings.Split(l.partial+string(p), "\n")
	last := len(lines) - 1
	l.partial = lines[last]
	l.lines = append(l.lines, lines[:last]...)
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
	return len(p), nil
}

// since returns the lines from number n on, and a channel closed when there is more.
func (l *Log) since(n int) ([]string, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return slices.Clone(l.lines[n:]), l.changed
}

// All returns every line, an unfinished one included.
func (l *Log) All() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := slices.Clone(l.lines)
	if l.partial != "" {
		lines = append(lines, l.partial)
	}
	return lines
}

func (l *Log) String() string { return strings.Join(l.All(), "\n") }

// Count returns how many lines so far contain all the parts.
func (l *Log) Count(parts ...string) (n int) {
	matches := containsAll(parts)
	for _, line := range l.All() {
		if matches(line) {
			n++
		}
	}
	return n
}

// WaitFor returns the first line that contains all the parts, written already or not.
func (l *Log) WaitFor(t testing.TB, parts ...string) string {
	t.Helper()
	line, _, err := l.wait(Patience, 0, nil, containsAll(parts))
	if err != nil {
		t.Fatalf("%v that contains %q", err, parts)
	}
	return line
}

func containsAll(parts []string) func(string) bool {
	return func(line string) bool {
		isMissing := func(part string) bool { return !strings.Contains(line, part) }
		return !slices.ContainsFunc(parts, isMissing)
	}
}

// wait returns the first line from number n on that matches, and the number of the
// one after it; it gives up early when done is closed.
func (l *Log) wait(
	limit time.Duration, n int, done <-chan struct{}, match func(string) bool,
) (string, int, error) {
	timeout := time.After(limit)
	for ended := false; ; {
		lines, more := l.since(n)
		i := slices.IndexFunc(lines, match)
		if i >= 0 {
			return lines[i], n + i + 1, nil
		}
		n += len(lines)
		if ended {
			return "", n, fmt.Errorf("it ended, output:\n%s\nwithout a line", l)
		}
		select {
		case <-more:
		case <-done:
			ended = true // one more look: the last lines may have come with the end
		case <-timeout:
			return "", n, fmt.Errorf("after %v, output:\n%s\nno line", limit, l)
		}
	}
}

// usedEmails are all the addresses that any client has sent, in lower case: none may stand in
// any log in full.
var usedEmails sync.Map

// checkLog fails the test for what no log may hold: errors that the test has not allowed, lines
// that are no JSON, secrets, codes, and addresses.
func (s *Server) checkLog(t testing.TB) {
	t.Helper()
	for _, line := range s.Stderr.All() {
		if s.wantedStderr == "" || !strings.Contains(line, s.wantedStderr) {
			t.Errorf("on standard error, where a running server writes nothing: %s", line)
		}
	}
	s.checkErrors(t)
	secrets := s.secrets()
	codes := s.codes()
	printsCodes := s.Env["APP_ENV"] == "local" && s.Mail == nil
	for _, line := range s.Log.All() {
		// A code is set off by blank lines.
		isCodeLine := line == "" || strings.HasPrefix(line, codeLinePrefix)
		if !printsCodes || !isCodeLine {
			s.checkLine(t, line, secrets, codes)
		}
	}
}

// checkErrors fails the test for logged errors that it has not allowed.
func (s *Server) checkErrors(t testing.TB) {
	t.Helper()
	for n, line := range s.Log.All() {
		isError := strings.Contains(line, `"level":"ERROR"`)
		isAllowed := func(a allowance) bool {
			return n < *a.until && strings.Contains(line, a.part)
		}
		if isError && !slices.ContainsFunc(s.allowed, isAllowed) {
			t.Errorf("unexpected error: %s", line)
		}
	}
}

// codes are all that the server has sent, or printed for want of a mail server.
func (s *Server) codes() (codes []string) {
	if s.Mail != nil {
		for _, mail := range s.Mail.Received() {
			codes = append(codes, mail.Codes()...)
		}
	}
	for _, line := range s.Log.All() {
		if strings.HasPrefix(line, codeLinePrefix) {
			codes = append(codes, line[strings.LastIndex(line, " ")+1:])
		}
	}
	return codes
}

func (s *Server) secrets() []string {
	secrets := append(strings.Split(s.Env["SESSION_SECRET"], ","), "eyJ", "postgres://")
	u, err := url.Parse(s.Env["SMTP_URL"])
	if err == nil {
		password, _ := u.User.Password()
		secrets = append(secrets, password)
	}
	usedEmails.Range(func(email, _ any) bool {
		secrets = append(secrets, email.(string))
		return true
	})
	return slices.DeleteFunc(secrets, func(secret string) bool { return secret == "" })
}

func (s *Server) checkLine(t testing.TB, line string, secrets, codes []string) {
	t.Helper()
	if !json.Valid([]byte(line)) {
		t.Errorf("log line that is no JSON: %s", line)
	}
	both := line + strings.ToLower(line) // an address is one in any case
	hasAddress := strings.Contains(line, "@")
	for _, secret := range secrets {
		isAddress := strings.Contains(secret, "@")
		if isAddress && !hasAddress {
			continue // a soak has millions of lines, and thousands of addresses
		}
		if strings.Contains(both, secret) {
			t.Errorf("%q in the log: %s", secret, line)
		}
	}
	texts := bareNumber.ReplaceAllString(line, `":0`)
	for _, found := range codeInLine.FindAllStringSubmatch(texts, -1) {
		if slices.Contains(codes, found[1]) {
			t.Errorf("a one-time code in the log: %s", line)
		}
	}
}

// codeInLine is what may be a code: not a part of a longer number or of a fraction of a second.
var codeInLine = regexp.MustCompile(`(?:^|[^0-9A-Za-z.])([0-9]{6})\b`)

// bareNumber is a number as a member's value: a duration may well have a code's six
// digits, while a code is a string wherever the server holds one.
var bareNumber = regexp.MustCompile(`":[0-9]+`)
