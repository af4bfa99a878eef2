package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"afluente/db"
)

// traced is an event or an audit row of a request, with what it brought about.
type traced struct {
	Kind      string    `json:"kind"` // event or audit
	ID        string    `json:"id"`
	CreatedAt time.Time `json:"created_at"`
	Name      string    `json:"name"` // event type or action
	Status    string    `json:"status,omitempty"`
	Who       string    `json:"who,omitempty"` // source or actor
	Causes    []*traced `json:"causes,omitempty"`
}

func newEventsTrace(load func() (Config, error)) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "trace REQUEST_ID",
		Short: "Show what a request brought about: its events, those of their consumers, and the audit rows",
		Args:  usage(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withPool(cmd.Context(), load, func(pool *pgxpool.Pool) error {
				rows, err := db.New(pool).ListRequest(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("list request: %w", err)
				}
				if len(rows) == 0 {
					return fmt.Errorf("nothing carries the request id %q", args[0])
				}
				tree := growTree(rows)
				if asJSON {
					return printJSON(cmd.OutOrStdout(), tree)
				}
				return printTree(cmd.OutOrStdout(), tree)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// growTree hangs each event under the one that caused it. One whose cause is
// not there, or lies in a circle, which an emitter may make up, is a root.
func growTree(rows []db.ListRequestRow) []*traced {
	nodes := make(map[string]*traced, len(rows))
	causes := make(map[string]string, len(rows))
	for _, row := range rows {
		nodes[row.ID] = &traced{
			Kind: row.Kind, ID: row.ID, CreatedAt: row.CreatedAt.UTC(), Name: row.Name, Status: row.State, Who: row.Who,
		}
		causes[row.ID] = row.CausationID
	}
	circular := func(id string) bool {
		cause := causes[id]
		for range rows {
			if cause == id {
				return true
			}
			cause = causes[cause]
		}
		return false
	}
	var roots []*traced
	for _, row := range rows {
		if cause, ok := nodes[row.CausationID]; ok && !circular(row.ID) {
			cause.Causes = append(cause.Causes, nodes[row.ID])
		} else {
			roots = append(roots, nodes[row.ID])
		}
	}
	return roots
}

func printTree(w io.Writer, roots []*traced) error {
	var rows [][]string
	var add func(nodes []*traced, depth int)
	add = func(nodes []*traced, depth int) {
		for _, n := range nodes {
			indent := ""
			if depth > 0 {
				indent = strings.Repeat("   ", depth-1) + "└─ "
			}
			rows = append(rows, []string{
				n.CreatedAt.Format("2006-01-02T15:04:05.000Z"), n.Kind, indent + n.Name, orDash(n.Status), orDash(n.Who), n.ID,
			})
			add(n.Causes, depth+1)
		}
	}
	add(roots, 0)
	return printTable(w, []string{"TIME", "KIND", "NAME", "STATUS", "SOURCE OR ACTOR", "ID"}, rows)
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
