package hubstest

import "testing"

// The proxy passes a mail, passes it later after Hang, passes it without telling the sender after
// DropReplies, and loses it after Cut. A sender that is not told gets an error.
func TestProxy(t *testing.T) {
	t.Parallel()
	m := NewMailServer(t, MailOptions{NoStartTLS: true})
	p, proxyURL := ProxyURL(t, m.URL)
	results := make(chan error, 1)
	begin := func() {
		go func() { results <- send(proxyURL, "") }()
	}
	want := func(what string, mails int, isTold bool) {
		t.Helper()
		if err := <-results; isTold != (err == nil) {
			t.Errorf("%s: the sender got the error %v, want no error: %t", what, err, isTold)
		}
		if n := len(m.Received()); n != mails {
			t.Errorf("%s: the mail server got %d mails so far, want %d", what, n, mails)
		}
	}
	begin()
	want("passes", 1, true)

	p.Hang()
	begin()
	WaitUntil(t, "a connection to the proxy", func() bool { return p.Connections() > 0 })
	p.Resume()
	want("resumes", 2, true)

	p.When("Subject:", p.DropReplies)
	begin()
	WaitUntil(t, "a dropped reply", p.isTainted)
	p.Resume()
	want("drops replies", 3, false)

	p.When("Subject:", p.Cut)
	begin()
	want("cut", 3, false)
}

// isTainted reports whether a connection has lost a reply.
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
