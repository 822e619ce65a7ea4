package deploy

import (
	"bytes"
	"context"
	"fmt"
	"image"
	"image/png"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"hubs/internal/hubstest"
)

// Two users behind one address open a page with 120 pictures of 300 kB at the same time, and both see
// all of them. A browser would ask for all at once, on one connection by HTTP/2. The proxies take 40
// requests of a connection, so the browsers hold the others back, and the address does not reach its
// bound.
func TestPageShowsManyPictures(t *testing.T) {
	const pictures = 120
	chromium := hubstest.Need(t, "chromium", "chromium")
	forEachProxy(t, func(t *testing.T, engine string) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxy(t, engine, s.Addr)
		c := p.member(s, "member")
		path := c.Upload("big.png", bigPicture()).Must(t, 201).Header.Get("Location")
		var images strings.Builder
		for n := range pictures {
			fmt.Fprintf(&images, "<img src='%s%s?%d'>\n", s.Base, path, n)
		}
		page := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			http.SetCookie(w, &http.Cookie{
				Name:   s.CookieName(),
				Value:  c.Token(),
				Domain: "example.com",
				Secure: true,
			})
			io.WriteString(w, "<!doctype html><link rel=icon href='data:,'>"+images.String()+countShown)
		}))
		t.Cleanup(page.Close)

		want := fmt.Sprintf("<p>%d shown</p>", pictures)
		var users sync.WaitGroup
		for range 2 {
			users.Go(func() {
				dom := loadPage(t, chromium, page.Listener.Addr().String(), p.addr)
				if !strings.Contains(dom, want) {
					t.Errorf("got a page that ends in %q, want %s", dom[max(0, len(dom)-300):], want)
				}
			})
		}
		users.Wait()
	})
}

// bigPicture returns a PNG of about 300 kB.
func bigPicture() []byte {
	var content bytes.Buffer
	plain := png.Encoder{CompressionLevel: png.NoCompression}
	plain.Encode(&content, image.NewGray(image.Rect(0, 0, 550, 550))) // a bytes.Buffer takes everything
	return content.Bytes()
}

// countShown is a script that says in the page how many pictures it shows, once each picture was
// loaded or refused.
const countShown = `<p></p><script>onload = () => {
	const isShown = picture => picture.naturalWidth === 550;
	document.querySelector('p').textContent = [...document.images].filter(isShown).length + ' shown';
}</script>`

// loadPage opens https://app.example.com/ in Chromium and returns its elements after the page was
// loaded. app and api are the addresses of these hosts.
func loadPage(t *testing.T, chromium, app, api string) (dom string) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*hubstest.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, chromium,
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--ignore-certificate-errors",
		"--user-data-dir="+t.TempDir(),
		"--host-resolver-rules=MAP app.example.com:443 "+app+", MAP api.example.com:443 "+api,
		"--dump-dom", "https://app.example.com/")
	out, err := cmd.Output()
	if err != nil {
		t.Error("setup: Chromium: ", err)
	}
	return string(out)
}
