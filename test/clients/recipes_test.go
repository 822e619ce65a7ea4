package clients

import (
	"context"
	"encoding/json"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"hubs/internal/hubstest"
)

// recipe returns the one part of docs/clients.md that the group of a pattern matches.
func recipe(t *testing.T, pattern string) string {
	t.Helper()
	found := hubstest.Matches(t, "docs/clients.md", pattern)
	if len(found) != 1 {
		t.Fatalf("docs/clients.md: got %d matches of %s, want 1", len(found), pattern)
	}
	return found[0]
}

// The fetch wrapper of docs/clients.md and the loop that reads the whole list compile strictly, and
// read each hub once, in the order of the list.
func TestWholeListRecipe(t *testing.T) {
	t.Parallel()
	node := hubstest.Need(t, "node", "nodejs")
	dir := hubstest.Packages(t, "../browser/testdata/example")
	wrapper := recipe(t, "(?s)```ts\n(async function call.*?)```")
	loop := recipe(t, "(?s)```ts\n(async function allHubs.*?)```")
	source := wrapper + loop + "allHubs().then(hubs => console.log(JSON.stringify(hubs.map(hub => hub.name))));"
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	hubstest.Exec(t, s.Database, `insert into hubs (name, created_at)
		select 'Hub ' || n, now() + n * interval '1 s' from generate_series(1, 250) n`)

	hubstest.WriteFile(t, dir+"/list.ts", strings.Replace(source, "http://localhost:8080", s.Base, 1))
	tool(t, dir, dir+"/node_modules/.bin/tsc", "--strict", "--target", "es2022", "--module", "commonjs",
		"--lib", "es2022,dom,dom.iterable", "list.ts")
	// A browser would send the cookie. The fetch of Node.js keeps none.
	hubstest.WriteFile(t, dir+"/cookie.js", `const send = fetch;
		fetch = (url, init) => send(url, {...init, headers: {...init.headers, cookie: process.argv[2]}})`)
	ctx, cancel := context.WithTimeout(t.Context(), 2*hubstest.Patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, node, "-r", dir+"/cookie.js", dir+"/list.js",
		s.CookieName()+"="+c.Token()).CombinedOutput()

	var names []string
	if err != nil || json.Unmarshal(out, &names) != nil {
		t.Fatalf("%v: got %.1000s, want the names of all hubs", err, out)
	}
	want := hubstest.Query[string](t, s.Database, "select string_agg(name, ',' order by created_at) from hubs")
	hubstest.WantEqual(t, "names", strings.Join(names, ","), want)
}

// wget does not find the cookie in curl's jar, but it does in the jar that the recipe of
// docs/clients.md makes of it.
func TestCookieJarRecipe(t *testing.T) {
	t.Parallel()
	hubstest.Need(t, "curl", "curl")
	hubstest.Need(t, "wget", "wget")
	s := hubstest.Start(t)
	guest := s.NewGuest(t)
	dir := t.TempDir()
	shell := func(script string) {
		t.Helper()
		tool(t, dir, "sh", "-ec", "API=$1 EMAIL=$2 CODE=$3 FILE=/auth/session\n"+script, "sh",
			s.Base, guest.Email, guest.Code)
	}
	shell(`curl -fsS -H 'Content-Type: application/json' -d "{\"email\":\"$EMAIL\",\"code\":\"$CODE\"}" \
		-c cookies "$API/auth/otp/validate"`)
	shell(`! wget -q --load-cookies cookies "$API$FILE"`)
	shell(recipe(t, "(?s)<!-- wget -->\n```sh\n(.*?)```"))
	shell(`grep "$EMAIL" session`)
}

// What docs/clients.md says of each kind of file is what the server does with it.
func TestContentTypesInDocuments(t *testing.T) {
	t.Parallel()
	s := hubstest.Start(t)
	c, _ := s.Member(t, "member")
	table := recipe(t, "(?s)\\| file \\| `contentType` \\| in a tab \\|\n\\|---\\|---\\|---\\|\n(.*?)\n\n")
	var kinds []string
	for row := range strings.SplitSeq(table, "\n") {
		cells := strings.Split(strings.Trim(row, "| "), " | ")
		files := strings.Split(cells[0], ", ")
		types := regexp.MustCompile("`[^`]+`").FindAllString(cells[1], -1)
		for i, kind := range files {
			kinds = append(kinds, kind)
			content, ok := contents[kind]
			if !ok {
				t.Errorf("docs/clients.md has the kind %q, want one with a content in this test", kind)
				continue
			}
			stored := c.Elsewhere().Upload("file", []byte(content)).Must(t, 201)
			want := types[min(i, len(types)-1)]
			hubstest.WantEqual(t, "type of "+kind, "`"+stored.Field(t, "contentType")+"`", want)
			header := c.Elsewhere().Get(stored.Field(t, "path")).Must(t, 200).Header
			isInline := strings.HasPrefix(header.Get("Content-Disposition"), "inline")
			hubstest.WantEqual(t, kind+" is shown in a tab", isInline, cells[2] == "shown")
		}
	}
	for kind := range contents {
		if !slices.Contains(kinds, kind) {
			t.Errorf("docs/clients.md does not have the kind %q", kind)
		}
	}
}

// contents has the beginning of a file of each kind.
var contents = map[string]string{
	"PNG":                            "\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
	"JPEG":                           "\xff\xd8\xff\xe0\x00\x10JFIF\x00",
	"GIF":                            "GIF89a\x01\x00\x01\x00",
	"WebP":                           "RIFF\x24\x00\x00\x00WEBPVP8 ",
	"text in UTF-8":                  "Fährhaus: 文件\n",
	"CSV":                            "name,status\nNorth,active\n",
	"JSON":                           `{"name":"North"}`,
	"Markdown":                       "# North\n\n- *active*\n",
	"an empty file":                  "",
	"text with a `<` in these bytes": strings.Repeat("a", 511) + "<",
	"HTML":                           "<!doctype html><title>North</title>",
	"XML":                            `<?xml version="1.0"?><hub/>`,
	"SVG":                            `<svg xmlns="http://www.w3.org/2000/svg"/>`,
	"text in UTF-16":                 "\xff\xfeN\x00o\x00r\x00t\x00h\x00",
	"text with a letter of Latin-1 such as é in these bytes": "caf\xe9 au lait",
	"HEIC": "\x00\x00\x00\x24ftypheic\x00\x00\x00\x00mif1MiHEmiafheic",
	"AVIF": "\x00\x00\x00\x20ftypavif\x00\x00\x00\x00avifmif1miafMA1B",
	"MOV":  "\x00\x00\x00\x14ftypqt  \x00\x00\x02\x00qt  ",
	"BMP":  "BM\x3a\x00\x00\x00\x00\x00\x00\x00",
	"ICO":  "\x00\x00\x01\x00\x01\x00\x10\x10",
	"PDF":  "%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
	"docx": "PK\x03\x04\x14\x00\x06\x00\x08\x00\x00\x00!\x00[Content_Types].xml",
	"xlsx": "PK\x03\x04\x14\x00\x06\x00\x08\x00\x00\x00!\x00[Content_Types].xml",
	"ZIP":  "PK\x03\x04\x0a\x00\x00\x00",
	"MP4 or m4a that names a brand such as `mp42`": "\x00\x00\x00\x20ftypisom\x00\x00\x02\x00isomiso2avc1mp42",
	"MP4 or m4a that names none":                   "\x00\x00\x00\x18ftypM4A \x00\x00\x00\x00M4A isom",
	"WebM":                                         "\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x84webm",
	"Matroska":                                     "\x1aE\xdf\xa3\xa3B\x86\x81\x01B\x82\x88matroska",
	"MP3 that begins with an ID3 tag":              "ID3\x04\x00\x00\x00\x00\x00\x23TSSE",
	"MP3 without one":                              "\xff\xfb\x90\x64\x00\x0f\xf0\x00",
	"AAC":                                          "\xff\xf1\x50\x80\x02\x1f\xfc\xde",
	"FLAC":                                         "fLaC\x00\x00\x00\x22\x12\x00\x12\x00",
	"WAV":                                          "RIFF\x24\x00\x00\x00WAVEfmt ",
	"Ogg":                                          "OggS\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00",
}
