package main

import (
	"errors"
	"testing"
)

// A removal is proven only by a failure at a line of the file that has the test.
func TestOnlyTheTestsOwnFailureProves(t *testing.T) {
	failed := errors.New("exit status 1")
	for _, test := range []struct {
		name   string
		output string
		err    error
		want   string
	}{
		{"a failure", "--- FAIL: TestX\n    x_test.go:7: got 1, want 2\nFAIL\n", failed, proven},
		{"a pass", "PASS\n", nil, survives},
		{"a failure of the harness", "--- FAIL: TestX\n    server.go:7: no server\nFAIL\n", failed, broken},
		{"a file of a longer name", "--- FAIL: TestX\n    my_x_test.go:7: got 1\nFAIL\n", failed, broken},
		{"a panic", "panic: x\n\ngoroutine 1:\n\tx_test.go:7 +0x1\n", failed, broken},
		{"an exit without a word", "", failed, broken},
	} {
		got, said := judge("x_test.go", []byte(test.output), test.err)
		if got != test.want {
			t.Errorf("%s: got %s (%s), want %s", test.name, got, said, test.want)
		}
	}
}
