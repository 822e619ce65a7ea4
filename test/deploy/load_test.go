package deploy

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"hubs/internal/hubstest"
)

// A load is a loop of clients that read and write with one session. Each request has a connection and
// a client address of its own. A http.Client does not repeat a request on a new connection.
type load struct {
	stop                func()
	successes, failures atomic.Int64
	first               atomic.Value // of the failures
}

// startLoad starts clients with the session of the user. addr returns the address for the next request.
func startLoad(t *testing.T, user *hubstest.Client, addr func() string) *load {
	t.Helper()
	l := &load{}
	cookie := sessionCookie + "=" + user.Token()
	version := user.Get("/auth/session").Must(t, 200).Field(t, "terms.version")
	acceptance := fmt.Sprintf(`{"version":%q}`, version)
	ended := make(chan struct{})
	var clients sync.WaitGroup
	client := http.Client{
		Transport: &http.Transport{DisableKeepAlives: true},
		Timeout:   hubstest.Patience,
	}
	for n := range 4 {
		clients.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-ended:
					return
				default:
				}
				err := sendOne(&client, addr(), cookie, []string{"", acceptance}[(i+n)%2])
				if err == nil {
					l.successes.Add(1)
				} else if l.failures.Add(1) == 1 {
					l.first.Store(time.Now().Format("15:04:05.000 ") + err.Error())
				}
			}
		})
	}
	l.stop = sync.OnceFunc(func() { close(ended); clients.Wait() })
	t.Cleanup(l.stop)
	return l
}

// sessionCookie is the name of the cookie with the settings of production.env.
const sessionCookie = "__Secure-hubs_auth_production"

// sendOne stores an acceptance of the terms or, without one, reads the list of hubs.
func sendOne(client *http.Client, addr, cookie, acceptance string) error {
	method, path := "POST", "/terms/acceptance"
	if acceptance == "" {
		method, path = "GET", "/hubs"
	}
	request, _ := http.NewRequest(method, "http://"+addr+path, strings.NewReader(acceptance)) // well-formed
	request.Header.Set("Cookie", cookie)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("X-Forwarded-For", hubstest.NewIP())
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != 200 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, answer.Status, text)
	}
	return err
}

func (l *load) waitForSuccesses(t *testing.T, more int64) {
	t.Helper()
	from := l.successes.Load()
	hubstest.WaitUntil(t, "more requests succeed", func() bool {
		return l.successes.Load() >= from+more || l.failures.Load() > 1000
	})
}

// wantNoFailure stops the load.
func (l *load) wantNoFailure(t *testing.T) {
	t.Helper()
	l.stop()
	if l.failures.Load() > 0 {
		t.Errorf("got %d requests that failed and %d that did not, want none that failed; the first: %v",
			l.failures.Load(), l.successes.Load(), l.first.Load())
	}
	t.Logf("%d requests, %d failed", l.successes.Load()+l.failures.Load(), l.failures.Load())
}
