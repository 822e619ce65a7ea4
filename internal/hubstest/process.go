package hubstest

import (
	"fmt"
	"os"
	"strings"
)

// Memory returns a size from /proc/PID/status in bytes: "VmRSS" is the memory that the process uses
// now, "VmHWM" the most that it has used so far. Without such a file, Memory returns 0.
func Memory(pid int, name string) (bytes int) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), name+":")
	fmt.Sscan(rest, &bytes)
	return bytes << 10 // the file counts in kB
}
