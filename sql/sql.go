// Package sql carries the SQL files that the program needs at run time.
package sql

import (
	"embed"
	"io/fs"
)

//go:embed migrations/*.sql
var migrations embed.FS

//go:embed demo.sql
var demo string

// Migrations returns the goose migrations, one file each at its root.
func Migrations() (fs.FS, error) { return fs.Sub(migrations, "migrations") }

// Demo returns the statements that set up the demo tenant of `afluente dev`.
// They may run any number of times.
func Demo() string { return demo }
