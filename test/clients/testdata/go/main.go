// The flow of flow.ts with a client that ogen has made. The client compares each answer with the
// contract: types, required members, lengths, patterns and enums.
package main

import (
	"context"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	api "clients/ogen-client"

	ht "github.com/ogen-go/ogen/http"
)

// must panics if a step failed, and if its answer is not of the type T. It returns the answer.
func must[T any](answer any, err error) T {
	if err != nil {
		panic(err)
	}
	return answer.(T)
}

// want panics unless a value is as it should be.
func want[T comparable](what string, got, want T) {
	if got != want {
		panic(what)
	}
}

// A token is the session cookie's value.
type token struct{ value string }

func (t *token) Session(context.Context, api.OperationName) (api.Session, error) {
	return api.Session{APIKey: t.value}, nil
}

func main() {
	base, email := os.Args[1], api.Email(os.Args[2])
	ctx := context.Background()
	session := &token{}
	c, err := api.NewClient(base, session)
	if err != nil {
		panic(err)
	}

	asked := must[*api.CodeAnswerHeaders](c.RequestCode(ctx, &api.CodeRequest{Email: email}, api.RequestCodeParams{}))
	code, _ := io.ReadAll(os.Stdin)
	want("length of the code", len(code), asked.Response.CodeLength)
	guess := &api.Guess{Email: email, Code: string(code)}
	signedIn := must[*api.SessionViewHeaders](c.ValidateCode(ctx, guess, api.ValidateCodeParams{}))
	want("address", signedIn.Response.User.Email, email)
	cookie, err := http.ParseSetCookie(signedIn.SetCookie.Value)
	if err != nil {
		panic(err)
	}
	session.value = cookie.Value
	view := must[*api.GetSessionOKHeaders](c.GetSession(ctx, api.GetSessionParams{})).Response
	want("session lasts", time.Time(view.ExpiresAt).After(time.Now()), true)
	acceptance := &api.Acceptance{Version: view.Terms.Version}
	accepted := must[*api.AcceptanceViewHeaders](c.AcceptTerms(ctx, acceptance, api.AcceptTermsParams{}))
	want("accepted version", accepted.Response.Version, view.Terms.Version)

	filter := api.ListHubsParams{FiltersName: api.NewOptHubName("harbour")}
	hubs := must[*api.HubPageHeaders](c.ListHubs(ctx, filter)).Response
	want("hubs", len(hubs.Items), 1)
	want("hub", hubs.Items[0].Name+" "+api.HubName(hubs.Items[0].Status), "North Harbour active")

	form := &api.UploadFormMultipart{File: ht.MultipartFile{
		Name: "ships.txt",
		File: strings.NewReader("Ships and ferries."),
	}}
	stored := must[*api.StoredFileHeaders](c.UploadFile(ctx, form, api.UploadFileParams{})).Response
	want("size", stored.Size, 18)
	named := api.GetFileParams{FileId: stored.FileId, Name: stored.Name}
	file := must[*api.GetFileOKHeaders](c.GetFile(ctx, named))
	content, err := io.ReadAll(file.Response)
	want("file", string(content), "Ships and ferries.")

	must[*api.SignOutNoContent](c.SignOut(ctx, api.SignOutParams{}))
	session.value = ""
	after := must[*api.UnauthenticatedHeaders](c.GetSession(ctx, api.GetSessionParams{}))
	want("after sign-out", after.Response.Code, "unauthenticated")
}
