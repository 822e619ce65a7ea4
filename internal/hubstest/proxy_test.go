package hubstest

import "testing"

func TestProxy(t *testing.T) {
	t.Parallel()
	m := NewMailServer(t, MailOptions{NoStartTLS: true})
	p, through := ProxyURL(t, m.URL)
	told := make(chan error, 1)
	begin := func() {
		go func() { told <- send(through, "") }()
	}
	want := func(what string, mails int, isTold bool) {
		t.Helper()
		if err := <-told; isTold != (err == nil) {
			t.Errorf("%s: the sender got %v", what, err)
		}
		if n := len(m.Received()); n != mails {
			t.Errorf("%s: got %d mails, want %d", what, n, mails)
		}
	}
	begin()
	want("passes", 1, true)

	p.Hang()
	begin()
	WaitUntil(t, "a connection", func() bool { return p.Connections() > 0 })
	p.Resume()
	want("resumes", 2, true)

	p.When("Subject:", p.DropReplies)
	begin()
	WaitUntil(t, "a lost reply", p.isTainted)
	p.Resume()
	want("drops replies", 3, false)

	p.When("Subject:", p.Cut)
	begin()
	want("cut", 3, false)
}

func (p *Proxy) isTainted() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for pair := range p.pairs {
		if pair.tainted {
			return true
		}
	}
	return false
}
