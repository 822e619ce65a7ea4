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
	changed chan struct{} // closed and replaced by each new line
}

func (b *Log) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	lines := strings.Split(b.partial+string(p), "\n")
	last := len(lines) - 1
	b.partial = lines[last]
	if last > 0 {
		b.lines = append(b.lines, lines[:last]...)
		if b.changed != nil {
			close(b.changed)
			b.changed = nil
		}
	}
	return len(p), nil
}

// Since returns the lines from number n on, and a channel closed when there are more.
func (b *Log) Since(n int) ([]string, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	return slices.Clone(b.lines[min(n, len(b.lines)):]), b.changed
}

// All returns every line, an unfinished one included.
func (b *Log) All() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.partial != "" {
		return append(slices.Clone(b.lines), b.partial)
	}
	return slices.Clone(b.lines)
}

func (b *Log) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Join(append(slices.Clone(b.lines), b.partial), "\n")
}

// Mark is the number of lines so far, for waitAfter.
func (b *Log) Mark() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.lines)
}

// Count returns how many lines so far contain all the parts.
func (b *Log) Count(parts ...string) (n int) {
	for _, line := range b.All() {
		if containsAll(parts)(line) {
			n++
		}
	}
	return n
}

// WaitFor returns the first line that contains all the parts, written already or not.
func (b *Log) WaitFor(t testing.TB, parts ...string) string {
	t.Helper()
	return b.WaitAfter(t, 0, parts...)
}

// WaitAfter is waitFor from line number mark on.
func (b *Log) WaitAfter(t testing.TB, mark int, parts ...string) string {
	t.Helper()
	line, _, err := b.Wait(mark, nil, containsAll(parts))
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

// Wait returns the first line from number n on that matches, and the number of the
// one after it; it gives up early when done is closed.
func (b *Log) Wait(n int, done <-chan struct{}, match func(string) bool) (string, int, error) {
	timeout := time.After(Patience)
	for ended := false; ; {
		lines, more := b.Since(n)
		for _, line := range lines {
			n++
			if match(line) {
				return line, n, nil
			}
		}
		if ended {
			return "", n, fmt.Errorf("it ended, output:\n%s\nwithout a line", b)
		}
		select {
		case <-more:
		case <-done:
			ended = true // one more look: the last lines may have come with the end
		case <-timeout:
			return "", n, fmt.Errorf("after %v, output:\n%s\nno line", Patience, b)
		}
	}
}

// CheckLog fails the test for what no log may hold.
func (s *Server) CheckLog(t testing.TB) {
	t.Helper()
	s.mu.Lock()
	rules := logRules{allowed: s.allowed, codeLines: s.Env["APP_ENV"] == "local" && s.Mail == nil}
	s.mu.Unlock()
	lines := s.Log.All()
	for _, line := range lines {
		if strings.HasPrefix(line, codeLinePrefix) {
			rules.Codes = append(rules.Codes, line[strings.LastIndex(line, " ")+1:])
		}
	}
	if s.Mail != nil {
		for _, mail := range s.Mail.Received() {
			rules.Codes = append(rules.Codes, mail.Codes()...)
		}
	}
	rules.secrets = append(strings.Split(s.Env["SESSION_SECRET"], ","), "eyJ", "postgres://")
	if u, err := url.Parse(s.Env["SMTP_URL"]); err == nil && u.User != nil {
		password, _ := u.User.Password()
		rules.secrets = append(rules.secrets, password)
	}
	usedEmails.Range(func(email, _ any) bool {
		rules.secrets = append(rules.secrets, email.(string))
		return true
	})
	for _, fault := range rules.faults(lines) {
		t.Error(fault)
	}
	if text := s.Stderr.String(); text != "" {
		t.Errorf("on standard error, where a running server writes nothing: %s", text)
	}
}

// usedEmails are all the addresses that any client has sent: none may stand in any
// log in full.
var usedEmails sync.Map

type logRules struct {
	allowed   []string // parts of errors that the test expects
	secrets   []string
	Codes     []string
	codeLines bool // codes are printed, for want of a mail server
}

// faults returns what is wrong with a server's log: errors that the test has not
// allowed, lines that are no JSON, and whatever must not stand in a log.
func (r logRules) faults(lines []string) (faults []string) {
	for _, line := range lines {
		if r.codeLines && (line == "" || strings.HasPrefix(line, codeLinePrefix)) {
			continue // set off by blank lines, with the whole address: there is no mail server
		} else {
			var entry struct{ Level string }
			if err := json.Unmarshal([]byte(line), &entry); err != nil {
				faults = append(faults, "log line that is no JSON: "+line)
			}
			expected := func(part string) bool { return strings.Contains(line, part) }
			if entry.Level == "ERROR" && !slices.ContainsFunc(r.allowed, expected) {
				faults = append(faults, "unexpected error: "+line)
			}
		}
		lower := strings.ToLower(line)
		for _, secret := range r.secrets {
			within := line
			if strings.Contains(secret, "@") {
				within, secret = lower, strings.ToLower(secret) // an address is one in any case
			}
			if secret != "" && strings.Contains(within, secret) {
				faults = append(faults, fmt.Sprintf("%q in the log: %s", secret, line))
			}
		}
		line = bareNumber.ReplaceAllString(line, `":0`)
		for _, found := range codeInLine.FindAllStringSubmatch(line, -1) {
			if slices.Contains(r.Codes, found[1]) {
				faults = append(faults, "a one-time code in the log: "+line)
			}
		}
	}
	return faults
}

// codeInLine is what may be a code: not a part of a longer number or of a fraction of a second.
var codeInLine = regexp.MustCompile(`(?:^|[^0-9A-Za-z.])([0-9]{6})\b`)

// bareNumber is a number as a member's value: a duration may well have a code's six
// digits, while a code is a string wherever the server holds one.
var bareNumber = regexp.MustCompile(`":[0-9]+`)
