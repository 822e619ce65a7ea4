// Peer is PocketBase, as a program of one's own is made from it, with a collection like our table of
// hubs. tools/bench.sh builds it in a folder of its own: this module does not require it.
//
//	peer load DIR <HUBS >HEADERS    fills a new folder: each line, a JSON object, becomes a hub;
//	                                prints the header of each user that may list them
//	peer serve --dir=DIR            listens at the address in the variable ADDR
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/pocketbase/dbx"
	"github.com/pocketbase/pocketbase"
	"github.com/pocketbase/pocketbase/core"
	"github.com/pocketbase/pocketbase/tools/types"
)

const users = 1000

func main() {
	var err error
	if len(os.Args) == 3 && os.Args[1] == "load" {
		err = load(os.Args[2])
	} else {
		os.Args = append(os.Args, "--http="+os.Getenv("ADDR"))
		err = pocketbase.New().Start()
	}
	if err != nil {
		log.Fatal(err)
	}
}

func load(dir string) error {
	app := pocketbase.NewWithConfig(pocketbase.Config{DefaultDataDir: dir})
	if err := app.Bootstrap(); err != nil {
		return err
	}
	if err := app.RunAllMigrations(); err != nil {
		return err
	}
	hubs := core.NewBaseCollection("hubs")
	hubs.ListRule = types.Pointer(`@request.auth.id != ""`)
	hubs.Fields.Add(
		&core.TextField{Name: "name", Required: true, Max: 100},
		&core.TextField{Name: "description", Max: 2000},
		&core.SelectField{Name: "status", Values: []string{"active", "archived"}},
		&core.DateField{Name: "created"},
		&core.DateField{Name: "updated"},
	)
	// As our table has them for the orders and filters that are measured.
	hubs.AddIndex("hubs_name", false, "name, id", "")
	hubs.AddIndex("hubs_status_name", false, "status, name, id", "")
	if err := app.Save(hubs); err != nil {
		return err
	}
	return app.RunInTransaction(func(tx core.App) error {
		if err := loadUsers(tx); err != nil {
			return err
		}
		for lines := json.NewDecoder(os.Stdin); ; {
			var hub dbx.Params
			err := lines.Decode(&hub)
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err == nil {
				_, err = tx.DB().Insert("hubs", hub).Execute()
			}
			if err != nil {
				return err
			}
		}
	})
}

// loadUsers inserts rows, since Save would take a second for each ten passwords.
func loadUsers(app core.App) error {
	for i := range users {
		user := dbx.Params{
			"id":       fmt.Sprintf("user%011d", i),
			"email":    fmt.Sprintf("user%d@example.com", i),
			"tokenKey": fmt.Sprintf("%050d", i),
			"password": "none",
			"verified": true,
		}
		if _, err := app.DB().Insert("users", user).Execute(); err != nil {
			return err
		}
	}
	records, err := app.FindAllRecords("users")
	if err != nil {
		return err
	}
	for _, record := range records {
		token, err := record.NewAuthToken()
		if err != nil {
			return err
		}
		fmt.Println("Authorization: " + token)
	}
	return nil
}
