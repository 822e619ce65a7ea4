package main

import (
	"go/parser"
	"go/token"
	"slices"
	"testing"
)

const source = `package p

func f(n int, ok bool) (err error) {
	for n < 3 && !ok {
		n++
		g(true)
		n = 0x10 + n
	}
	defer g(false)
	return err
}
`

// A change is of one operator, number, word or statement, and leaves what the parser takes.
func TestChanges(t *testing.T) {
	all, err := changesIn("p.go", []byte(source))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range all {
		got = append(got, string(c.src[c.start:c.end])+"→"+c.new)
		if _, err := parser.ParseFile(token.NewFileSet(), "p.go", c.apply(), 0); err != nil {
			t.Errorf("%v: %v", c, err)
		}
	}
	want := []string{"&&→||", "<→<=", "3→4", "!→", "n++→", "g(true)→", "true→false", "n = 0x10 + n→",
		"+→-", "0x10→17", "defer g(false)→", "false→true", "err→nil"}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}
