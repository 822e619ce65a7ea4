package deploy

import (
	"bytes"
	"context"
	"fmt"
	"image"
	"image/png"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// A page with 40 pictures of 300 kB shows all of them. A browser asks for all of them at the same
// time, on one connection by HTTP/2.
func TestPageShowsManyPictures(t *testing.T) {
	const pictures = 40
	forEachProxy(t, func(t *testing.T, engine string) {
		s := hubstest.Start(t, productionEnv(t))
		p := startProxy(t, engine, s.Addr)
		c := p.member(s, "member")
		var images strings.Builder
		for range pictures {
			r := c.Upload("noise.png", noise()).Must(t, 201)
			fmt.Fprintf(&images, "<img src='%s'>\n", s.Base+r.Header.Get("Location"))
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
		dom := loadPage(t, "https://app.example.com/", map[string]string{
			"app.example.com": page.Listener.Addr().String(),
			"api.example.com": p.addr,
		})

		want := fmt.Sprintf("<p>%d shown</p>", pictures)
		if !strings.Contains(dom, want) {
			t.Errorf("got a page that ends in %q, want %s", dom[max(0, len(dom)-300):], want)
		}
	})
}

// noise returns a PNG of about 300 kB, which differs from all others and can't be compressed.
func noise() []byte {
	picture := image.NewGray(image.Rect(0, 0, 550, 550))
	for i := range picture.Pix {
		picture.Pix[i] = byte(rand.Uint32())
	}
	var content bytes.Buffer
	png.Encode(&content, picture) // a bytes.Buffer takes everything
	return content.Bytes()
}

// countShown is a script that says in the page how many pictures it shows, once each picture was
// loaded or refused.
const countShown = `<p></p><script>onload = () => {
	const isShown = picture => picture.naturalWidth === 550;
	document.querySelector('p').textContent = [...document.images].filter(isShown).length + ' shown';
}</script>`

// loadPage opens a page in Chromium and returns its elements after the page was loaded. addrs has the
// address of each host name.
func loadPage(t *testing.T, url string, addrs map[string]string) (dom string) {
	t.Helper()
	var rules []string
	for name, addr := range addrs {
		rules = append(rules, "MAP "+name+":443 "+addr)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*hubstest.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, hubstest.Need(t, "chromium", "chromium"),
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--ignore-certificate-errors",
		"--user-data-dir="+t.TempDir(), "--host-resolver-rules="+strings.Join(rules, ","),
		"--dump-dom", url)
	out, err := cmd.Output()
	hubstest.Must(t, err)
	return string(out)
}
