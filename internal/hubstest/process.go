package hubstest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Memory returns a size from /proc/PID/status in bytes: "VmRSS" is the memory that the process uses
// now, "VmHWM" the most that it has used so far. Without such a file, Memory returns 0.
func Memory(pid int, name string) (bytes int) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), name+":")
	fmt.Sscan(rest, &bytes)
	return bytes << 10 // the file counts in kB
}

// CPU returns the CPU time that the threads of a process have used so far, without the threads that
// have ended. It reads the first number of each schedstat, in nanoseconds. Without such files, CPU
// returns 0.
func CPU(pid int) (sum time.Duration) {
	// The pattern is well formed, so Glob returns no error.
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, thread := range threads {
		text, _ := os.ReadFile(thread) // an error means that the thread has just ended
		var ran time.Duration
		fmt.Sscan(string(text), &ran)
		sum += ran
	}
	return sum
}
