package browser

import (
	"os"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// readAxe returns axe-core. .ci/run fetches it, because the project does not depend on it. Without
// it, the test is skipped.
func readAxe(t *testing.T) string {
	t.Helper()
	axe, err := os.ReadFile(os.Getenv("AXE_JS"))
	if err != nil {
		hubstest.Skip(t, "AXE_JS, the path of axe-core's axe.min.js: "+err.Error())
	}
	return string(axe)
}

// After each step of the learner's page, nothing is wider than the screen, and axe-core finds no
// fault.
func TestPageIsAccessible(t *testing.T) {
	t.Parallel()
	axe := readAxe(t)
	l := newLearner(t)
	l.axe = axe
	l.takeAllSteps()
}

// The same holds for the example.
func TestExampleIsAccessible(t *testing.T) {
	t.Parallel()
	axe := readAxe(t)
	e := newExampleUser(t, exampleSite(t))
	hubstest.Exec(t, e.srv.Database, "insert into hubs (name) select repeat('Hub', 30) from generate_series(1, 12)")
	email, _ := e.srv.NewUser(t, "member")
	e.begin(e.page)
	e.wantAccessible(axe, "the first form")
	e.keys("#email", email+enterKey)
	e.waitFor(isVisible, "#present")
	e.wantAccessible(axe, "the form for a code")
	e.keys("#code", e.srv.Code(t, email)+enterKey)
	e.waitFor(isVisible, "#accept")
	e.wantAccessible(axe, "the terms")
	e.click("#accept button")
	e.waitText("#list", "Hub")
	e.chooseFile(strings.Repeat("long", 30)+".png", picture())
	e.click("#upload button")
	e.waitFor("document.querySelector('#uploaded img')?.naturalWidth === 300")
	e.wantAccessible(axe, "hubs and a file")
}

// wantAccessible checks the page on a wide screen in light colors, and on a narrow one in dark
// colors. 320 pixels are a screen of 1,280, enlarged four times. step names the page's state in
// failure messages.
func (b *browser) wantAccessible(axe, step string) {
	b.t.Helper()
	for scheme, width := range map[string]int{"light": 1280, "dark": 320} {
		b.resize(width, 900)
		colors := params{"name": "prefers-color-scheme", "value": scheme}
		b.devTools("Emulation.setEmulatedMedia", params{"features": []params{colors}})
		for _, finding := range script[[]string](b, axe+findFaults, width) {
			b.t.Errorf("%s, %s, %d px: got %s, want no finding", step, scheme, width, finding)
		}
	}
	b.devTools("Emulation.clearDeviceMetricsOverride", params{})
	b.console() // what axe-core causes is not the page's
}

// findFaults is a script that returns what axe-core finds in the page, and whether the page is
// wider than the screen.
const findFaults = `;
	const rules = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];
	const [width] = arguments, wide = document.documentElement.scrollWidth;
	return axe.run(document, {runOnly: rules}).then(found => {
		if (found.passes.length < 10) throw Error('axe-core: fewer than 10 rules passed');
		return found.violations.map(v => v.id + ' at ' + v.nodes.map(n => n.target.join(' ')))
			.concat(wide > width ? ['a page ' + wide + ' px wide'] : []);
	})`
