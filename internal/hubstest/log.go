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

// A Log collects the lines that a process writes. Tests can wait for a line.
type Log struct {
	mu      sync.Mutex
	lines   []string      // complete lines, without line ends
	partial string        // line whose end has not been written yet
	changed chan struct{} // closed by the next Write; nil if no goroutine waits
}

// Write adds output to the log and wakes the goroutines that wait for a line. It never fails.
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

// All returns all lines, including an incomplete last one.
func (l *Log) All() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := slices.Clone(l.lines)
	if l.partial != "" {
		lines = append(lines, l.partial)
	}
	return lines
}

// String returns all lines as one text.
func (l *Log) String() string { return strings.Join(l.All(), "\n") }

// End returns the last 20 lines, for messages.
func (l *Log) End() string {
	lines := l.All()
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// Count returns the number of lines so far that contain all parts.
func (l *Log) Count(parts ...string) (n int) {
	matches := containsAll(parts)
	for _, line := range l.All() {
		if matches(line) {
			n++
		}
	}
	return n
}

// WaitFor returns the first line that contains all parts. If there is none yet, it waits for one,
// and ends the test after Patience.
func (l *Log) WaitFor(t testing.TB, parts ...string) string {
	t.Helper()
	line, _, err := l.wait(Patience, 0, nil, containsAll(parts))
	if err != nil {
		t.Fatalf("want a line that contains %q: %v", parts, err)
	}
	return line
}

// containsAll returns a function that reports whether a line contains all parts.
func containsAll(parts []string) func(string) bool {
	return func(line string) bool {
		isMissing := func(part string) bool { return !strings.Contains(line, part) }
		return !slices.ContainsFunc(parts, isMissing)
	}
}

// wait returns the first line from number n on that matches, and the number of the line after it.
// It returns an error if no line matches within limit, or before done is closed.
func (l *Log) wait(
	limit time.Duration, n int, done <-chan struct{}, match func(string) bool,
) (string, int, error) {
	timeout := time.After(limit)
	for ended := false; ; {
		l.mu.Lock()
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		lines, more := slices.Clone(l.lines[n:]), l.changed
		l.mu.Unlock()
		i := slices.IndexFunc(lines, match)
		if i >= 0 {
			return lines[i], n + i + 1, nil
		}
		n += len(lines)
		if ended {
			return "", n, fmt.Errorf("the process has ended without one; the log ends:\n%s", l.End())
		}
		select {
		case <-more:
		case <-done:
			ended = true // look once more: lines may have come just before the end
		case <-timeout:
			return "", n, fmt.Errorf("there is none after %v; the log ends:\n%s", limit, l.End())
		}
	}
}

// wantCleanLog fails the test if standard error has a line, or if the log has an error that is not
// allowed (AllowErrorsWithAnyOf), a line that is not JSON, a secret, a code or an unmasked e-mail
// address.
func (s *Server) wantCleanLog(t testing.TB) {
	t.Helper()
	for _, line := range s.Stderr.All() {
		t.Errorf("standard error: got the line %q, want none", line)
	}
	s.wantNoErrors(t)
	secrets := s.secrets()
	codes := s.codes()
	printsCodes := s.Env["APP_ENV"] == "local" && s.Mail == nil
	for _, line := range s.Log.All() {
		// The server prints an empty line before and after a code.
		isCodeLine := line == "" || strings.HasPrefix(line, codeLinePrefix)
		if !printsCodes || !isCodeLine {
			s.wantNoSecrets(t, line, secrets, codes)
		}
	}
}

// wantNoErrors fails the test if errors were logged that AllowErrorsWithAnyOf does not allow.
func (s *Server) wantNoErrors(t testing.TB) {
	t.Helper()
	var errors []string
	for n, line := range s.Log.All() {
		isError := strings.Contains(line, `"level":"ERROR"`)
		isIn := func(part string) bool { return strings.Contains(line, part) }
		isAllowed := func(a *allowance) bool {
			return n < a.until && slices.ContainsFunc(a.parts, isIn)
		}
		if isError && !slices.ContainsFunc(s.allowed, isAllowed) {
			errors = append(errors, line)
		}
	}
	if errors != nil {
		t.Errorf("side effect: got %d errors in the log, want none; the first: %s", len(errors), errors[0])
	}
}

// codes returns all codes that the server has mailed or, without a mail server, printed.
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

// secrets returns texts that no log line may contain: the keys in SESSION_SECRET, the passwords in
// SMTP_URL and DATABASE_URL, and the beginnings of a token, of a database URL and of NewEmail.
func (s *Server) secrets() []string {
	secrets := append(strings.Split(s.Env["SESSION_SECRET"], ","),
		"eyJ", "postgres://", serverPassword, emailPrefix)
	for _, name := range []string{"SMTP_URL", "DATABASE_URL"} {
		u, err := url.Parse(s.Env[name])
		if err == nil {
			password, _ := u.User.Password()
			secrets = append(secrets, password)
		}
	}
	return slices.DeleteFunc(secrets, func(secret string) bool { return secret == "" })
}

// wantNoSecrets fails the test if a log line is not JSON, or contains a secret or a code.
func (s *Server) wantNoSecrets(t testing.TB, line string, secrets, codes []string) {
	t.Helper()
	if !json.Valid([]byte(line)) {
		t.Errorf("got a log line that is not JSON: %s", line)
	}
	both := line + strings.ToLower(line) // NewEmail is in lower case, a line need not be
	for _, secret := range secrets {
		if strings.Contains(both, secret) {
			t.Errorf("the log contains %q: %s", secret, line)
		}
	}
	texts := bareNumber.ReplaceAllString(line, `":0`)
	for _, found := range codeInLine.FindAllStringSubmatch(texts, -1) {
		if slices.Contains(codes, found[1]) {
			t.Errorf("the log contains the code %s: %s", found[1], line)
		}
	}
}

// codeInLine matches digits that may be a code. It does not match a part of a longer number or
// word, or the fraction of a second.
var codeInLine = regexp.MustCompile(`(?:^|[^0-9A-Za-z.])(` + codePattern + `)\b`)

// bareNumber matches a member's value that is a number. Such a number, for example a duration, may
// have six digits by chance. It is not a code, because the server keeps codes as strings.
var bareNumber = regexp.MustCompile(`":[0-9]+`)
