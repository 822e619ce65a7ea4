package hubstest

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
)

// FreeAddr returns an address where nobody listens, for a process that can't choose its own.
func FreeAddr(t testing.TB) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// WaitListening waits until somebody listens there.
func WaitListening(t testing.TB, addr string) {
	t.Helper()
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
