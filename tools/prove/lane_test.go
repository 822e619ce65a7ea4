package main

import (
	"errors"
	"testing"
)

// A removal is proven only by an assertion that fails, not by a step of the set-up or a side effect.
func TestOnlyAnAssertionProves(t *testing.T) {
	failed := errors.New("exit status 1")
	for _, test := range []struct {
		name   string
		output string
		err    error
		want   string
	}{
		{"a failure", "--- FAIL: TestX\n    x_test.go:7: got 1, want 2\nFAIL\n", failed, proven},
		{"a pass", "PASS\n", nil, survives},
		{"a failed step", "--- FAIL: TestX\n    x_test.go:7: setup: no server\nFAIL\n", failed, broken},
		{"a step and a failure", "    x_test.go:7: setup: no\n    x_test.go:8: got 1\n", failed, proven},
		{"a side effect", "--- FAIL: TestX\n    log.go:7: side effect: EOF\nFAIL\n", failed, broken},
		{"a panic", "panic: x\n\ngoroutine 1:\n\tx_test.go:7 +0x1\n", failed, broken},
		{"an exit without a word", "", failed, broken},
	} {
		got, said := judge([]byte(test.output), test.err)
		if got != test.want {
			t.Errorf("%s: got %s (%s), want %s", test.name, got, said, test.want)
		}
	}
}
