package browser

import (
	"fmt"
	"testing"

	"hubs/internal/hubstest"
)

// After each step of the learner's page, what has the focus, the message and the last exchange are
// in the window: on a laptop and on a telephone, for a keyboard and for a pointer.
func TestPageStaysInView(t *testing.T) {
	t.Parallel()
	for _, screen := range []struct{ width, height int }{{1280, 720}, {390, 667}} {
		for _, hand := range []string{"keyboard", "pointer"} {
			t.Run(fmt.Sprintf("%d x %d, %s", screen.width, screen.height, hand), func(t *testing.T) {
				t.Parallel()
				w := walker{newLearner(t), hand == "keyboard"}
				w.resize(screen.width, screen.height)
				w.open(w.srv.Base + "/")
				w.walk()
			})
		}
	}
}

// A walker is a learner who uses either the keyboard alone, or a pointer to choose what to type in
// or to press.
type walker struct {
	*learner
	hasKeyboard bool
}

// walk takes all nine steps.
func (w walker) walk() {
	w.enterThere("#email", w.email, "POST /auth/otp/request → 200", "request", "code")
	code := w.srv.Code(w.t, w.email)
	w.enterThere("#code", hubstest.OtherCode(code, 1), "POST /auth/otp/validate → 401", "validate", "code")
	w.enterThere("#code", code, "POST /auth/otp/validate → 200", "validate", "code")
	w.pressThere("#check-session", "GET /auth/session → 200", "session", "check-session")
	w.pressThere("#try-hubs", "GET /hubs → 403", "terms-gate", "try-hubs")
	w.pressThere("#terms-accept", "POST /terms/acceptance → 200", "terms", "h-terms")
	w.pressThere("#list-hubs", "&offset=0", "hubs", "list-hubs")
	w.pressThere("#next", "&offset=5", "hubs", "next")
	w.pressThere("#next", "&offset=10", "hubs", "hubs-summary")
	w.pressThere("#previous", "&offset=5", "hubs", "previous")
	w.chooseFile("note.txt", "A note.")
	w.pressThere("#upload", "POST /files/upload → 201", "upload", "upload")
	w.openFile()
	w.pressThere("#sign-out", "POST /auth/logout → 204", "logout", "h-logout")
	w.pressThere("#try-session", "GET /auth/session → 401", "no-session", "try-session")
	w.enterThere("#new-hub-name", "Mine", "POST /hubs → 401", "member-writes", "new-hub-name")
	w.pressThere("#try-suspended", "GET /auth/session → 401", "suspended", "try-suspended")
	w.pressThere("#try-signed-out", "GET /auth/session → 401", "signed-out-everywhere", "try-signed-out")
	w.reach("#start-over")
	w.activate("#start-over")
	w.waitInView("GET /auth/session → 401", "request", "email")
}

// enterThere types text into an input and sends it with the enter key. It waits for an exchange,
// and for it, the message of a place and what then has the focus to be in the window.
func (w walker) enterThere(input, text, exchange, place, focus string) {
	w.t.Helper()
	w.sending(func() {
		w.reach(input)
		script[any](w.browser, "document.activeElement.select()")
		w.typeKeys(text + enterKey)
	})
	w.waitInView(exchange, place, focus)
}

// pressThere is enterThere for a button.
func (w walker) pressThere(button, exchange, place, focus string) {
	w.t.Helper()
	w.sending(func() {
		w.reach(button)
		w.activate(button)
	})
	w.waitInView(exchange, place, focus)
}

// openFile opens the file of step 7 in a tab, reads it and closes the tab. The page is in view as
// before.
func (w walker) openFile() {
	w.waitText("#preview a", "Open it in a new tab")
	page := w.tab()
	script[any](w.browser, "document.querySelector('#preview a').id = 'file-link'")
	w.reach("#preview a")
	w.activate("#preview a")
	hubstest.WaitFor(w.t, "tabs", 2, func() int { return len(w.tabs()) })
	for _, tab := range w.tabs() {
		if tab != page {
			w.switchTo(tab)
			w.waitText("pre", "A note.")
			w.command("DELETE", "/window", nil, nil)
		}
	}
	w.switchTo(page)
	w.waitInView("POST /files/upload → 201", "file", "file-link")
}

const tabKey, shiftKey = "\uE004", "\uE008"

// reach moves the focus to an element: with the tab key, or by a click, which also presses a button.
// So a pointer leaves buttons to activate.
func (w walker) reach(selector string) {
	w.t.Helper()
	if !w.hasKeyboard {
		if script[bool](w.browser, "return document.querySelector(arguments[0]).matches('input')", selector) {
			w.click(selector)
		}
		return
	}
	const towards = `const to = document.querySelector(arguments[0]), from = document.activeElement;
		return from === to ? 0 : from.compareDocumentPosition(to) & Node.DOCUMENT_POSITION_PRECEDING ? -1 : 1`
	for range 200 {
		switch script[int](w.browser, towards, selector) {
		case 0:
			return
		case 1:
			w.typeKeys(tabKey)
		case -1:
			w.typeKeys(shiftKey + tabKey)
		}
	}
	w.t.Fatalf("the tab key does not reach %s", selector)
}

// activate presses a button or follows a link.
func (w walker) activate(selector string) {
	w.t.Helper()
	if w.hasKeyboard {
		w.typeKeys(enterKey)
	} else {
		w.click(selector)
	}
}

// typeKeys presses keys one after the other, and then releases them all.
func (w walker) typeKeys(keys string) {
	w.t.Helper()
	var presses []params
	for _, key := range keys {
		presses = append(presses, params{"type": "keyDown", "value": string(key)})
		if string(key) != shiftKey {
			presses = append(presses, params{"type": "keyUp", "value": string(key)})
		}
	}
	keyboard := params{"type": "key", "id": "keyboard", "actions": presses}
	w.post("/actions", params{"actions": []params{keyboard}})
	w.command("DELETE", "/actions", nil, nil)
}

// waitInView waits until the last exchange has a title with this text, and its title, the message of
// a place and what has the focus are in the window, and nothing covers them.
func (w walker) waitInView(exchange, place, focus string) {
	w.t.Helper()
	w.waitText("#exchange > :first-child > summary", exchange)
	seen := func() string {
		return script[string](w.browser, findHidden, "message-"+place)
	}
	hubstest.WaitFor(w.t, "after "+exchange+": the focus, and what is not in view", focus+": ", seen)
}

// findHidden is a script that returns the id of what has the focus, and then the ids of those
// elements that are not in the window, or that something covers.
const findHidden = `
	const title = document.querySelector('#exchange > :first-child > summary');
	const message = document.getElementById(arguments[0]), focused = document.activeElement;
	const isInView = element => {
		const {top, bottom, left, right} = element.getBoundingClientRect(), middle = (left + right) / 2;
		const isThere = y => element.contains(document.elementFromPoint(middle, y));
		return top >= 0 && bottom <= innerHeight && left >= 0 && right <= innerWidth &&
			isThere(top + 2) && isThere(bottom - 2);
	};
	const shown = message.textContent ? [title, message, focused] : [title, focused];
	const hidden = shown.filter(e => !isInView(e));
	return focused.id + ': ' + hidden.map(e => e.id || e.tagName)`
