package main

import (
	"slices"
	"strings"
	"testing"
)

// I1: No text from a client becomes part of the text of a list's statement. The test makes the
// query itself, so this holds even if the validation of the fields let every text pass.
func TestListStatementHasNoTextOfAClient(t *testing.T) {
	t.Parallel()
	const limit, offset = 20, 40
	plain := "name"
	hostile := "a'); drop table hubs; -- $1 %s"
	query := func(filter, order string) statement {
		q := hubQuery{
			limit:          limit,
			offset:         offset,
			orderBy:        order,
			orderDirection: order,
			name:           &filter,
			status:         &filter,
		}
		return q.listStatement()
	}

	got := query(hostile, plain)
	if want := query(plain, plain).text; got.text != want {
		t.Errorf("filtered by %q: got the text\n%s\nwant\n%s", hostile, got.text, want)
	}
	want := []any{limit + 1, offset, hostile, hostile} // one row more than the page, for HasMore
	if !slices.Equal(got.args, want) {
		t.Errorf("filtered by %q: got the arguments %v, want %v", hostile, got.args, want)
	}
	if got := query(plain, hostile); strings.Contains(got.text, "drop") {
		t.Errorf("ordered by %q: got the text\n%s\nwant no drop in it", hostile, got.text)
	}
}
