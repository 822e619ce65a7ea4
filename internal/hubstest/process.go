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

// FreeAddr returns an address where nobody listens, for a process that can't choose its own.
func FreeAddr(t testing.TB) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// WaitListening waits until somebody listens there.
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

// Memory returns a size from /proc/PID/status in bytes: "VmRSS" is what a process has in memory,
// "VmHWM" the most that it ever had there. It is 0 on a system without /proc.
func Memory(pid int, name string) (bytes int) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), name+":")
	fmt.Sscan(rest, &bytes)
	return bytes << 10
}

// CPU is the time that a process, and its children that have ended, have used so far.
// /proc/PID/stat counts it in hundredths of a second.
func CPU(pid int) (sum time.Duration) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return 0 // it has just ended
	}
	for _, field := range fields[11:15] {
		ticks, _ := strconv.Atoi(field)
		sum += time.Duration(ticks) * 10 * time.Millisecond
	}
	return sum
}
