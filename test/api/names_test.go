package api

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"unicode"

	"hubs/internal/hubstest"
)

// foundNames returns the names of the hubs that a search finds.
func foundNames(t testing.TB, c *hubstest.Client, search string) []string {
	t.Helper()
	query := "/hubs?limit=100&filters[name]=" + url.QueryEscape(search)
	page := decode[hubPage](t, c.Elsewhere().Get(query).Must(t, 200))
	names := []string{}
	for _, h := range page.Items {
		names = append(names, h.Name)
	}
	return names
}

// A name is found by each of its forms in other letter cases, also if a form has more letters.
func TestNamesAreFoundInEveryCase(t *testing.T) {
	t.Parallel()
	_, admin := start(t, "admin")
	for _, forms := range []string{
		"Straße STRASSE STRAẞE strasse straẞe sTrAsSe",
		"İstanbul istanbul ISTANBUL i\u0307stanbul I\u0307STANBUL Istanbul",
		"ﬁrst first FIRST ﬁRST ﬁrſt",
		"eﬃcient efficient EFFICIENT eﬀicient EﬀICIENT",
		"ΟΔΥΣΣΕΥΣ οδυσσευς οδυσσευσ Οδυσσευς",
		"և եւ ԵՒ Եւ",
		"Ǆaba ǅaba ǆaba",
		"\u212Bngstr\u00F6m \u00E5NGSTR\u00D6M A\u030Angstro\u0308m",
		"\u212Aelvin kelvin KELVIN",
	} {
		names := strings.Fields(forms)
		for _, name := range names {
			admin.Elsewhere().Do("POST /hubs", map[string]string{"name": name}).Must(t, 201)
		}
		slices.Sort(names)
		for _, search := range names {
			wantEqual(t, "hubs found by "+search, foundNames(t, admin, search), names)
		}
	}
	admin.Elsewhere().Do("POST /hubs", map[string]string{"name": "5m² ①"}).Must(t, 201)
	for _, other := range []string{"Strase", "5m2", "1"} { // another letter, digits that only look alike
		wantEqual(t, "hubs found by "+other, foundNames(t, admin, other), []string{})
	}
}

// An operator may write names and descriptions that no request may have. They are shown like all others.
func TestTextsOfOperatorsAreShown(t *testing.T) {
	t.Parallel()
	s, admin := start(t, "admin")
	id := hubstest.Query[string](t, s.Database,
		`insert into hubs (name, description) values (E' \t North\u0007 ', E'a\u001Bb') returning hub_id`)
	for _, path := range []string{"/hubs/" + id, "/hubs?filters[name]=north"} {
		answer := admin.Elsewhere().Get(path).Must(t, 200)
		if !strings.Contains(string(answer.Body), `" \t North\u0007 "`) {
			t.Errorf("GET %s: got %s, want the name", path, answer.Body)
		}
	}
}

// fullFoldings has the letters whose case folding is longer than one character (the status F of
// CaseFolding.txt, Unicode 15), each with what it is folded to.
const fullFoldings = "" +
	"ß=ss İ=i\u0307 ŉ=ʼn ǰ=j\u030c ΐ=ι\u0308\u0301 ΰ=υ\u0308\u0301 և=եւ ẖ=h\u0331 ẗ=t\u0308 " +
	"ẘ=w\u030a ẙ=y\u030a ẚ=aʾ ẞ=ss ὐ=υ\u0313 ὒ=υ\u0313\u0300 ὔ=υ\u0313\u0301 ὖ=υ\u0313\u0342 " +
	"ᾀ=ἀι ᾁ=ἁι ᾂ=ἂι ᾃ=ἃι ᾄ=ἄι ᾅ=ἅι ᾆ=ἆι ᾇ=ἇι ᾈ=ἀι ᾉ=ἁι ᾊ=ἂι ᾋ=ἃι ᾌ=ἄι ᾍ=ἅι ᾎ=ἆι ᾏ=ἇι ᾐ=ἠι " +
	"ᾑ=ἡι ᾒ=ἢι ᾓ=ἣι ᾔ=ἤι ᾕ=ἥι ᾖ=ἦι ᾗ=ἧι ᾘ=ἠι ᾙ=ἡι ᾚ=ἢι ᾛ=ἣι ᾜ=ἤι ᾝ=ἥι ᾞ=ἦι ᾟ=ἧι ᾠ=ὠι ᾡ=ὡι " +
	"ᾢ=ὢι ᾣ=ὣι ᾤ=ὤι ᾥ=ὥι ᾦ=ὦι ᾧ=ὧι ᾨ=ὠι ᾩ=ὡι ᾪ=ὢι ᾫ=ὣι ᾬ=ὤι ᾭ=ὥι ᾮ=ὦι ᾯ=ὧι ᾲ=ὰι ᾳ=αι ᾴ=άι " +
	"ᾶ=α\u0342 ᾷ=α\u0342ι ᾼ=αι ῂ=ὴι ῃ=ηι ῄ=ήι ῆ=η\u0342 ῇ=η\u0342ι ῌ=ηι ῒ=ι\u0308\u0300 " +
	"ΐ=ι\u0308\u0301 ῖ=ι\u0342 ῗ=ι\u0308\u0342 ῢ=υ\u0308\u0300 ΰ=υ\u0308\u0301 ῤ=ρ\u0313 " +
	"ῦ=υ\u0342 ῧ=υ\u0308\u0342 ῲ=ὼι ῳ=ωι ῴ=ώι ῶ=ω\u0342 ῷ=ω\u0342ι ῼ=ωι ﬀ=ff ﬁ=fi ﬂ=fl ﬃ=ffi " +
	"ﬄ=ffl ﬅ=st ﬆ=st ﬓ=մն ﬔ=մե ﬕ=մի ﬖ=վն ﬗ=մխ "

// Every letter up to U+2FFF, and of Deseret, which UTF-16 needs two units for, is found by its other
// cases, and finds them.
func TestEveryLetterIsFoundInItsOtherCases(t *testing.T) {
	t.Parallel()
	_, admin := start(t, "admin")
	var letters, others []string
	add := func(letter rune) {
		if letter >= 'A' && letter <= 0x2FFF || letter >= 0x10400 && letter <= 0x1044F {
			for other := unicode.SimpleFold(letter); other != letter; other = unicode.SimpleFold(other) {
				letters = append(letters, string(letter))
				others = append(others, string(other))
			}
		}
	}
	for letter := range rune(unicode.MaxRune) {
		add(letter)
	}
	for pair := range strings.FieldsSeq(fullFoldings) {
		letter, folded, _ := strings.Cut(pair, "=")
		letters = append(letters, letter, folded, folded)
		others = append(others, folded, letter, strings.ToUpper(folded))
	}
	if len(letters) < 2000 {
		t.Fatalf("setup: got %d pairs of letters, want all", len(letters))
	}
	// A name has many letters, so that there are few requests.
	const together = 20
	for i := 0; i < len(letters); i += together {
		end := min(i+together, len(letters))
		name := fmt.Sprint(i, " ", strings.Join(letters[i:end], "-"))
		search := fmt.Sprint(i, " ", strings.Join(others[i:end], "-"))
		admin.Elsewhere().Do("POST /hubs", map[string]string{"name": name}).Must(t, 201)
		if found := foundNames(t, admin, search); !slices.Equal(found, []string{name}) {
			t.Errorf("hubs found by %+q: got %+q, want %+q", search, found, name)
		}
	}
}

// blanks are the characters with the property White_Space of Unicode, and U+FEFF.
const blanks = "\t\n\v\f\r \u0085\u00A0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007" +
	"\u2008\u2009\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"

// Blanks around a name, and around a part of one that is searched for, do not count, in whatever
// script. Blanks within it stay.
func TestBlanksAroundNamesDoNotCount(t *testing.T) {
	t.Parallel()
	_, admin := start(t, "admin")
	inner := "a\u3000b\u200B" // U+200B is no blank
	made := admin.Do("POST /hubs", map[string]string{"name": inner}).Must(t, 201)
	path := "/hubs/" + made.Field(t, "hubId")
	for _, blank := range blanks {
		around := fmt.Sprintf("%c%s %c", blank, inner, blank)
		what := fmt.Sprintf("U+%04X around it", blank)
		body := map[string]string{"name": around}
		admin.Elsewhere().Do("PATCH "+path, body).WantField(t, "name", inner)
		wantEqual(t, what+", searched", foundNames(t, admin, around), []string{inner})
		created := admin.Elsewhere().Do("POST /hubs", body)
		created.WantField(t, "name", inner)
		admin.Elsewhere().Do("DELETE /hubs/"+created.Field(t, "hubId"), nil)
	}
}

// I6: A name that shows nothing is refused, whatever it consists of. One that shows something may have
// such characters in it.
func TestNamesAreVisible(t *testing.T) {
	t.Parallel()
	_, admin := start(t, "admin")
	made := admin.Do("POST /hubs", `{"name":"North"}`).Must(t, 201)
	path := "/hubs/" + made.Field(t, "hubId")
	for _, name := range []string{
		"\u200B", // zero width space
		"\u200B \u200B",
		"\u00AD",       // soft hyphen
		"\u2060\u2061", // word joiner, invisible function application
		"\u202E",       // right-to-left override
		"\u180E",       // Mongolian vowel separator
		"\u061C\u200F", // Arabic letter mark, right-to-left mark
		"\U000E0001\U000E0041",
		"\uFEFF\u200D\u3000\u200C",
		blanks,
		"",
	} {
		for _, request := range []string{"POST /hubs", "PATCH " + path} {
			r := admin.Elsewhere().Do(request, map[string]string{"name": name})
			if r.Code() != "invalid_request" || !slices.Equal(r.Fields(), []string{"name"}) {
				t.Errorf("%s with the name %+q: got %v, want a 400 about the name", request, name, r)
			}
		}
	}
	for _, name := range []string{
		"\u200Bx",
		"👩\u200D🔧",            // joined by a zero width joiner
		"می\u200Cخواهم",       // Persian needs the zero width non-joiner
		"\u0301",              // an accent alone shows something
		"\U000F0000",          // private use
		"1\u00AD000\u00AD000", // soft hyphens
	} {
		r := admin.Elsewhere().Do("POST /hubs", map[string]string{"name": name})
		r.WantField(t, "name", name)
	}
}
