// Advisories compares what govulncheck -json says on standard input with the table of known flaws in
// SECURITY.md. It prints each advisory that concerns a module of the server. Its exit status is 1 if
// the server calls the affected code, and
//
//   - the table does not name the advisory, or
//   - a version with a fix exists, so nothing need be put up with.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
)

func main() {
	page, err := os.ReadFile("SECURITY.md")
	if err == nil {
		err = compare(os.Stdin, os.Stdout, string(page))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "advisories:", err)
		os.Exit(1)
	}
}

// A message is one of the JSON objects that govulncheck -json prints, with one member set. Only what
// is needed here has a field.
type message struct {
	Config *struct {
		DB string `json:"db"`
	} `json:"config"`
	OSV *struct {
		ID      string   `json:"id"`
		Aliases []string `json:"aliases"`
		Summary string   `json:"summary"`
	} `json:"osv"`
	Finding *struct {
		OSV          string `json:"osv"`
		FixedVersion string `json:"fixed_version"`
		// The first is the affected place. It has a function only if the server calls it.
		Trace []struct {
			Module   string `json:"module"`
			Version  string `json:"version"`
			Function string `json:"function"`
		} `json:"trace"`
	} `json:"finding"`
}

// An advisory is what all findings of one id say together.
type advisory struct {
	id, module, fixed string
	called            bool
}

// row matches the ids in a row of the table of known flaws.
var row = regexp.MustCompile(`(?m)^\| (CVE-\d+-\d+) \| (GO-\d+-\d+) \|`)

// compare reads what govulncheck found, prints a line for each advisory, and returns an error if one
// of them must not stand.
func compare(found io.Reader, out io.Writer, page string) error {
	var known []string
	for _, ids := range row.FindAllStringSubmatch(page, -1) {
		known = append(known, ids[1:]...)
	}
	looked := false
	names := map[string][]string{} // the ids of an advisory
	summaries := map[string]string{}
	var all []*advisory
	for decoder := json.NewDecoder(found); ; {
		var m message
		err := decoder.Decode(&m)
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("not the output of govulncheck -json: %w", err)
		}
		switch {
		case m.Config != nil:
			looked = m.Config.DB != ""
		case m.OSV != nil:
			names[m.OSV.ID] = append(m.OSV.Aliases, m.OSV.ID)
			summaries[m.OSV.ID] = m.OSV.Summary
		case m.Finding != nil && len(m.Finding.Trace) > 0:
			f, place := m.Finding, m.Finding.Trace[0]
			i := slices.IndexFunc(all, func(a *advisory) bool { return a.id == f.OSV })
			if i < 0 {
				i = len(all)
				all = append(all, &advisory{id: f.OSV})
			}
			all[i].module = place.Module + "@" + place.Version
			all[i].fixed = max(all[i].fixed, f.FixedVersion)
			all[i].called = all[i].called || place.Function != ""
		}
	}
	if !looked {
		return errors.New("govulncheck has not looked: its output names no database")
	}

	failed := 0
	for _, a := range all {
		isKnown := slices.ContainsFunc(append(names[a.id], a.id), func(id string) bool {
			return slices.Contains(known, id)
		})
		verdict, stands := "known, and has no fix yet", true
		switch {
		case !a.called:
			verdict = "not called"
		case a.fixed != "":
			verdict, stands = "FIXED in "+a.fixed+": take that version", false
		case !isKnown:
			verdict, stands = "NOT NAMED in SECURITY.md: say what it needs, and what it costs here", false
		}
		if !stands {
			failed++
		}
		fmt.Fprintf(out, "%s, %s: %s: %s\n", a.id, a.module, summaries[a.id], verdict)
	}
	fmt.Fprintf(out, "%d advisories concern the modules of the server; SECURITY.md names %d flaws\n",
		len(all), len(known)/2)
	if failed > 0 {
		return fmt.Errorf("%d advisories must not stand", failed)
	}
	return nil
}
