package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// grid is a table in plain text: columns two spaces apart, a rule under the
// header. The last column may be as long as it likes.
type grid struct {
	indent string
	header []string
	right  bool // all columns but the first are figures
	rows   [][]string
}

func (g *grid) row(cells ...string) { g.rows = append(g.rows, cells) }

func (g *grid) write(w io.Writer) {
	var widths []int
	fit := func(cells []string) {
		for i, c := range cells {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	fit(g.header)
	for _, r := range g.rows {
		fit(r)
	}
	var b strings.Builder
	line := func(cells []string) {
		b.WriteString(g.indent)
		for i, c := range cells {
			space := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c))
			if i > 0 {
				b.WriteString("  ")
			}
			switch {
			case g.right && i > 0:
				b.WriteString(space + c)
			case i == len(cells)-1:
				b.WriteString(c)
			default:
				b.WriteString(c + space)
			}
		}
		b.WriteByte('\n')
	}
	if g.header != nil {
		total := 2 * (len(widths) - 1)
		for _, n := range widths {
			total += n
		}
		line(g.header)
		b.WriteString(g.indent + strings.Repeat("─", total) + "\n")
	}
	for _, r := range g.rows {
		line(r)
	}
	_, _ = io.WriteString(w, b.String()) // app.run asks the writer whether all went well
}

// thousands writes n with separators.
func thousands[T int | int64 | uint64](n T) string {
	text, negative := strings.CutPrefix(fmt.Sprint(n), "-")
	sign := ""
	if negative {
		sign = "-"
	}
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return sign + text
}
