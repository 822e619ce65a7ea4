package hubstest

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// FreeAddr returns an address, host:port, at which no process listens. It is for a program that
// can't choose a free port itself.
func FreeAddr(t testing.TB) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// WaitListening waits until a process accepts connections at addr.
func WaitListening(t testing.TB, addr string) {
	WaitUntil(t, "a process that listens at "+addr, func() bool {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			return false
		}
		conn.Close()
		return true
	})
}

// Memory returns a size from /proc/PID/status in bytes: "VmRSS" is the memory that the process uses
// now, "VmHWM" the most that it has used so far. Without such a file, Memory returns 0.
func Memory(pid int, name string) (bytes int) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), name+":")
	fmt.Sscan(rest, &bytes)
	return bytes << 10 // the file counts in kB
}

// CPU returns the processor time used so far by a process and by those of its children that have
// ended. /proc/PID/stat counts in ticks of 10 ms. Without such a file, CPU returns 0.
func CPU(pid int) (sum time.Duration) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return 0 // the process has just ended
	}
	// After the name of the program, these are utime, stime, cutime and cstime; see proc(5).
	for _, field := range fields[11:15] {
		ticks, _ := strconv.Atoi(field)
		sum += time.Duration(ticks) * 10 * time.Millisecond
	}
	return sum
}
