package main

import (
	"fmt"
	"strings"
	"testing"
)

const page = `
| CVE | advisory | what |
|---|---|---|
| CVE-2026-1111 | GO-2026-1111 | a flaw that is known |
`

// found returns what govulncheck -json prints for one advisory in a module. The function is that
// which the server calls, or empty.
func found(id, alias, fixed, function string) string {
	return fmt.Sprintf(`
		{"config": {"protocol_version": "v1.0.0", "db": "https://vuln.go.dev"}}
		{"progress": {"message": "Checking the code against the vulnerabilities..."}}
		{"osv": {"id": %q, "aliases": [%q], "summary": "a flaw"}}
		{"finding": {"osv": %[1]q, "fixed_version": %[3]q, "trace": [
			{"module": "m", "version": "v1.0.0"}]}}
		{"finding": {"osv": %[1]q, "fixed_version": %[3]q, "trace": [
			{"module": "m", "version": "v1.0.0", "package": "m", "function": %[4]q},
			{"module": "hubs", "package": "hubs", "function": "main"}]}}`, id, alias, fixed, function)
}

// Code that is called must not have a flaw that SECURITY.md does not name, or that has a fix.
func TestAdvisoriesMustBeKnown(t *testing.T) {
	for _, c := range []struct {
		name, found string
		want        string // what is printed of the advisory
		fails       bool
	}{
		{name: "named by its id", found: found("GO-2026-1111", "CVE-2026-9999", "", "Open"), want: "known"},
		{name: "named by its CVE", found: found("GO-2026-9999", "CVE-2026-1111", "", "Open"), want: "known"},
		{name: "not called", found: found("GO-2026-9999", "CVE-2026-9999", "", ""), want: "not called"},
		{name: "not called, with a fix", found: found("GO-2026-1111", "", "v1.0.1", ""), want: "not called"},
		{
			name:  "not named",
			found: found("GO-2026-9999", "CVE-2026-9999", "", "Open"),
			want:  "NOT NAMED",
			fails: true,
		},
		{
			name:  "an id that only begins like a known one",
			found: found("GO-2026-11112", "", "", "Open"),
			want:  "NOT NAMED",
			fails: true,
		},
		{
			name:  "named, with a fix",
			found: found("GO-2026-1111", "CVE-2026-1111", "v1.0.1", "Open"),
			want:  "FIXED in v1.0.1",
			fails: true,
		},
		{
			name:  "a second advisory that is not named",
			found: found("GO-2026-1111", "", "", "Open") + found("GO-2026-9999", "", "", "Open"),
			want:  "NOT NAMED",
			fails: true,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			err := compare(strings.NewReader(c.found), &out, page)
			if fails := err != nil; fails != c.fails {
				t.Errorf("got the error %v, want one: %v", err, c.fails)
			}
			if !strings.Contains(out.String(), c.want) {
				t.Errorf("got\n%swant a line with %q", out.String(), c.want)
			}
		})
	}
}

// What is not the whole output of govulncheck never passes.
func TestAdvisoriesNeedAnAnswer(t *testing.T) {
	whole := strings.TrimSpace(found("GO-2026-1111", "", "", "Open"))
	for name, output := range map[string]string{
		"nothing":     "",
		"cut off":     whole[:len(whole)-10],
		"no database": `{"progress": {"message": "Fetching vulnerabilities from the database..."}}`,
		"an error":    "govulncheck: fetching vulnerabilities: no such host",
	} {
		t.Run(name, func(t *testing.T) {
			if err := compare(strings.NewReader(output), &strings.Builder{}, page); err == nil {
				t.Error("got no error, want one")
			}
		})
	}
}
