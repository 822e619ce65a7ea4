package browser

import (
	"maps"
	"strconv"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// What the page says that the server did, stored and counted is what the server did: in its tables,
// its folder of files, its log and its limits.
func TestPageSaysWhatTheServerDid(t *testing.T) {
	t.Parallel()
	l := newLearner(t)
	l.open(l.srv.Base + "/")
	l.step("codes", l.compareCodes)
	l.step("stored", l.compareStored)
	l.step("the token", l.takeTokenApart)
	l.step("a suspended user's code", l.compareSuspension)
	l.step("counted", l.compareCounts)
	l.step("no answer", l.compareOutage)
}

// stored returns the number of rows in each table, and of files in FILES_DIR.
func (l *learner) stored() map[string]int {
	all := map[string]int{"FILES_DIR": len(l.srv.FilesIn(l.t))}
	for _, table := range hubstest.Tables(l.t) {
		all[table] = hubstest.Query[int](l.t, l.srv.Database, "select count(*) from "+table)
	}
	return all
}

// part returns a part of the last exchange on the page, by its title.
func (l *learner) part(title string) string {
	l.t.Helper()
	return script[string](l.browser, `return [...document.querySelectorAll('#exchange > :first-child h3')]
		.find(part => part.textContent === arguments[0]).nextElementSibling.textContent`, title)
}

// wantStored does what sends a request. The page must say what the request stored: this sentence,
// which names the tables that have changed, and no other.
func (l *learner) wantStored(sentence string, act func()) {
	l.t.Helper()
	before := l.stored()
	l.sending(act)
	after := l.stored()
	l.waitText("#exchange", sentence)
	l.wantEqual("what the page says was stored", l.part("Stored"), sentence)
	for place := range maps.Keys(after) {
		isChanged := after[place] != before[place]
		l.wantEqual(sentence+" names "+place, strings.Contains(sentence, place), isChanged)
	}
}

// wantLogged requires that the server has logged a line about the last exchange, with these parts.
func (l *learner) wantLogged(parts ...string) {
	l.t.Helper()
	id := l.part("Sent headers")[len("x-request-id: "):][:len("00000000-0000-0000-0000-000000000000")]
	l.srv.Log.WaitFor(l.t, append(parts, `"requestId":"`+id+`"`)...)
}

const (
	onlyCounters = "Nothing but the counters of the limits."
	codeStored   = "For an active user who has none: a code, in the memory of the server, until it is used, " +
		"replaced or expired."
)

// compareCodes asks for a code three times, and once for an address that nobody has. The sentence is
// the same each time, and each time it is true. It ends with the code in hand.
func (l *learner) compareCodes() {
	ask := func(email string) {
		l.t.Helper()
		l.wantStored(codeStored, func() { l.keys("#email", email+enterKey) })
		l.waitText("#message-request", l.codeIsSent())
		l.waitText("#message-request", "a new one now, or the one that it showed before")
	}
	ask(hubstest.NewEmail())
	l.wantLogged("code not sent: no active user")
	ask(l.email)
	l.wantLogged("code sent")
	first := l.srv.Code(l.t, l.email)
	ask(l.email)
	l.wantLogged("code not sent", "too young")
	l.wantStored("The cookie, in the browser, until expiresAt. The server forgets the code and stores nothing of the session.",
		func() { l.keys("#code", first+enterKey) })
	l.waitText("#message-validate", "You are signed in")
	l.wantLogged("signed in")
	ask(l.email) // a code that was used is replaced at once
	l.wantLogged("code sent")
	l.wantEqual("the second code is the first", l.srv.Code(l.t, l.email) == first, false)
}

// compareStored sends the other requests of the page, with success and without.
func (l *learner) compareStored() {
	l.wantStored("The counters of the limits. A code in force counts wrong guesses, too.",
		func() { l.keys("#code", "000000"+enterKey) })
	l.waitRefused("#message-validate", "401 invalid_code")
	l.wantLogged("refused", "invalid_code")
	l.wantStored(onlyCounters, func() { l.click("#try-hubs") })
	l.waitRefused("#message-terms-gate", "403 terms_not_accepted")
	l.wantLogged("refused", "terms_not_accepted")
	l.wantStored("A row in terms_acceptances. Accepting twice keeps the first time.",
		func() { l.click("#terms-accept") })
	l.waitText("#hubs-summary", "Hubs 1 to 5.")
	l.wantStored(onlyCounters, func() { l.click("#list-hubs") })
	l.wantEqual("lines about the list in the log of a local server", l.srv.Log.Count(`"route":"/hubs"`, `"status":200`), 0)
	l.chooseFile("note.txt", "A note.")
	l.wantStored("The bytes in FILES_DIR, then a row in the table files.", func() { l.click("#upload") })
	l.waitText("#exchange", "Nothing. The browser must not keep a copy either (no-store).")
	l.waitText("#exchange", "cache-control: private, no-store")
	l.wantStored(onlyCounters, func() { l.keys("#new-hub-name", "Mine"+enterKey) })
	l.waitRefused("#message-member-writes", "403 forbidden")
	l.exec("update users set permission = 'admin'")
	l.wantStored("A row in the table hubs.", func() { l.keys("#new-hub-name", "Mine"+enterKey) })
	l.waitText("#message-member-writes", "was made")
}

// takeTokenApart pastes the token, as a learner does from the developer tools. The page shows its
// parts. With a letter changed in any part, the server refuses it; as it was, the server takes it.
func (l *learner) takeTokenApart() {
	cookie := l.cookies()[0]
	parts := strings.Split(cookie.Value, ".")
	_, claims := hubstest.ReadToken(l.t, cookie.Value)
	before := script[int](l.browser, "return "+exchanges)
	l.keys("#token", cookie.Value)
	l.waitText("#token-header", `{"alg":"HS256","typ":"JWT"}`)
	for _, claim := range []string{claims["email"].(string), claims["userId"].(string), `"iat":`, `"exp":`} {
		l.waitText("#token-payload", claim)
	}
	l.wantEqual("claims", len(claims), 4)
	l.waitText("#token-signature", "32 bytes, as 43 letters: "+parts[2])
	stores := script[string](l.browser, "return JSON.stringify([localStorage, sessionStorage])")
	l.wantEqual("the page keeps the token", strings.Contains(stores, parts[1]), false)
	l.wantEqual("requests because of the token", script[int](l.browser, "return "+exchanges)-before, 0)

	for i := range parts {
		changed := strings.Split(cookie.Value, ".")
		changed[i] = changed[i][:8] + otherLetter(changed[i][8]) + changed[i][9:]
		l.setCookie(cookie, strings.Join(changed, "."))
		l.press("#check-session")
		l.waitRefused("#message-session", "401 unauthenticated")
		l.wantLogged("refused", "forged")
		l.setCookie(cookie, cookie.Value)
		l.press("#check-session")
		l.waitText("#message-session", "The session is good.")
	}
	l.showAgain()
	l.wantEqual("the token when the page is shown again", script[string](l.browser, "return document.querySelector('#token').value"), "")
}

func otherLetter(letter byte) string {
	if letter == 'A' {
		return "B"
	}
	return "A"
}

// setCookie gives a cookie another value, as the developer tools can.
func (b *browser) setCookie(cookie browserCookie, value string) {
	b.t.Helper()
	b.devTools("Network.setCookie", params{
		"url":      script[string](b, "return location.href"),
		"name":     cookie.Name,
		"value":    value,
		"httpOnly": true,
		"sameSite": "Lax",
		"expires":  cookie.Expiry,
	})
}

// compareSuspension presents the right code of a suspended user. The code is used up, as the page
// says: it is no good after the suspension either.
func (l *learner) compareSuspension() {
	l.press("#sign-out")
	other, _ := l.srv.NewUser(l.t, "member")
	l.enter("#email", other)
	code := l.srv.Code(l.t, other)
	l.exec("update users set suspended = true")
	l.wantStored("The counters of the limits. The server forgets the code: it was right.",
		func() { l.keys("#code", code+enterKey) })
	l.waitRefused("#message-validate", "403 account_suspended")
	l.exec("update users set suspended = false")
	l.enter("#code", code)
	l.waitRefused("#message-validate", "401 invalid_code")
	l.messages = append(l.messages, "a status of 401") // the page has asked for the session before
}

// compareCounts presents codes until the server refuses. The number that the page gives for the last
// attempt that passes is that of the limit. A code of five digits counts, and an address without an @
// does not.
func (l *learner) compareCounts() {
	limit := hubstest.LimitOf(l.t, "POST /auth/otp/validate").Requests
	l.keys("#email", "nobody.example.com")
	l.enter("#code", "12345")
	l.waitRefused("#message-validate", "400 invalid_request")
	l.waitText("#exchange", "Not counted for an address: there is no valid one.")
	l.keys("#email", hubstest.NewEmail())
	for n := 1; n <= limit; n++ {
		l.enter("#code", "12345")
		l.waitText("#exchange", "This was number "+strconv.Itoa(n)+" for this address from this page.")
		l.waitRefused("#message-validate", "400 invalid_request")
	}
	l.enter("#code", "12345")
	l.waitRefused("#message-validate", "429 rate_limited")
	l.wantEqual("what the page says was stored", l.part("Stored"), onlyCounters)
	l.wantLogged("refused", "rate_limited")
}

// compareOutage stops the server. Of what it then did, an answer that does not come says nothing.
func (l *learner) compareOutage() {
	l.srv.Stop(l.t)
	l.enter("#email", l.email)
	l.waitText("#message-request", "No answer came. Is ./dev.sh run still running?")
	l.wantEqual("what the page says was stored", l.part("Stored"), "This answer does not tell.")
	l.wantEqual("what the page says was counted", l.part("Limits counted"), "Unknown: no answer came.")
	l.messages = []string{"ERR_CONNECTION_REFUSED"}
}
