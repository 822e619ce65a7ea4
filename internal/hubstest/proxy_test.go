package hubstest

import (
	"bufio"
	"io"
	"net"
	"testing"
	"time"
)

// echo starts a server that answers each line with the same line, and returns what it hears.
func echo(t *testing.T) (addr string, heard chan string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	heard = make(chan string, 10)
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				lines := bufio.NewReader(conn)
				for {
					line, err := lines.ReadString('\n')
					if err != nil {
						return
					}
					heard <- line
					io.WriteString(conn, line)
				}
			}()
		}
	}()
	return ln.Addr().String(), heard
}

func TestProxy(t *testing.T) {
	t.Parallel()
	addr, heard := echo(t)
	p := NewProxy(t, addr)
	conn := Dial(t, p.Addr)
	say := func(line string) { io.WriteString(conn, line) }
	want := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: got %q, want %q", what, got, want)
		}
	}
	answer := func() string {
		line, _ := conn.In.ReadString('\n')
		return line
	}
	say("one\n")
	want("passes", answer(), "one\n")
	want("passes", <-heard, "one\n")

	p.Hang()
	say("two\n")
	p.Resume()
	want("resumes", answer(), "two\n")
	want("resumes", <-heard, "two\n")

	p.When("three", p.DropReplies)
	say("three\n")
	want("drops the reply only", <-heard, "three\n")
	conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	want("drops the reply", answer(), "")
	p.Resume()
	conn.SetReadDeadline(time.Now().Add(Patience))
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("a connection that has lost a reply: got data, want its end")
	}

	conn = Dial(t, p.Addr)
	p.When("four", p.Cut)
	say("four\n")
	want("cut", answer(), "")
	if len(heard) > 0 {
		t.Errorf("cut: the server heard %q", <-heard)
	}
	WaitUntil(t, "two connections, both closed", func() bool {
		open, total := p.Connections()
		return open == 0 && total == 2
	})
}
