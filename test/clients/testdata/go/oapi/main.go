// Command oapi is the flow of flow.ts with a client that oapi-codegen has made.
package main

import (
	"bytes"
	"context"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/cookiejar"
	"os"
	"time"

	api "clients/oapi-codegen"
)

// must panics if a step failed. It returns the answer.
func must[T any](answer T, err error) T {
	if err != nil {
		panic(err)
	}
	return answer
}

// want panics unless a value is as it should be.
func want[T comparable](what string, got, want T) {
	if got != want {
		panic(what)
	}
}

func main() {
	base, email := os.Args[1], os.Args[2]
	ctx := context.Background()
	jar, _ := cookiejar.New(nil)
	c := must(api.NewClientWithResponses(base, api.WithHTTPClient(&http.Client{Jar: jar})))

	asked := must(c.RequestCodeWithResponse(ctx, nil, api.CodeRequest{Email: email}))
	code := string(must(io.ReadAll(os.Stdin)))
	want("length of the code", len(code), asked.JSON200.CodeLength)
	guess := api.Guess{Email: email, Code: code}
	signedIn := must(c.ValidateCodeWithResponse(ctx, nil, guess))
	want("address", signedIn.JSON200.User.Email, email)
	session := must(c.GetSessionWithResponse(ctx, nil)).JSON200
	want("session lasts", session.ExpiresAt.After(time.Now()), true)
	acceptance := api.Acceptance{Version: session.Terms.Version}
	accepted := must(c.AcceptTermsWithResponse(ctx, nil, acceptance)).JSON200
	want("accepted version", accepted.Version, session.Terms.Version)

	filter := "harbour"
	hubs := must(c.ListHubsWithResponse(ctx, &api.ListHubsParams{FiltersName: &filter})).JSON200
	want("hubs", len(hubs.Items), 1)
	want("hub", hubs.Items[0].Name+" "+string(hubs.Items[0].Status), "North Harbour active")

	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	part, _ := w.CreateFormFile("file", "ships.txt")
	io.WriteString(part, "Ships and ferries.")
	w.Close()
	uploaded := must(c.UploadFileWithBodyWithResponse(ctx, nil, w.FormDataContentType(), &form))
	stored := uploaded.JSON201
	want("size", stored.Size, 18)
	file := must(c.GetFileWithResponse(ctx, stored.FileId, stored.Name, nil))
	want("file", string(file.Body), "Ships and ferries.")

	must(c.SignOutWithResponse(ctx, nil))
	after := must(c.GetSessionWithResponse(ctx, nil))
	want("after sign-out", after.ApplicationproblemJSON401.Code, api.ProblemCode("unauthenticated"))
}
