package spec

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// ErrHelp is returned for the options "help": the user asks for [Table.Help].
var ErrHelp = errors.New("spec: help requested")

// HelpRequest is the error of a spec that asks for help. Its text is the help: a
// program prints it and exits 0. It matches [ErrHelp].
type HelpRequest struct{ Text string }

// Error returns the help, which ends without a newline.
func (h *HelpRequest) Error() string { return h.Text }

// Is makes it match [ErrHelp].
func (h *HelpRequest) Is(target error) bool { return target == ErrHelp }

// Error reports what is wrong with a specification, and where.
type Error struct {
	Text    string   // the whole text; empty if there is none to show
	Column  int      // where the offending part begins in Text, in runes from 1
	Width   int      // the length of the offending part in runes, at least 1
	Msg     string   // what is wrong, without the package prefix
	Valid   []string // the names that would do, if a name was expected
	Nearest string   // the valid name that was probably meant, if any
	Err     error    // the cause, if another package found the fault
}

// Error returns the message, the text, and a caret under the offending part, with its
// column:
//
//	spec: unknown option "capacty" (valid: capacity, count, max_alloc); did you mean "capacity"?
//	  caching:capacty=1GiB
//	          ^~~~~~~ column 9
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("spec: ")
	b.WriteString(e.Msg)
	if len(e.Valid) > 0 {
		fmt.Fprintf(&b, " (valid: %s)", strings.Join(e.Valid, ", "))
	}
	if e.Nearest != "" {
		fmt.Fprintf(&b, "; did you mean %q?", e.Nearest)
	}
	if e.Text != "" {
		b.WriteString("\n  ")
		b.WriteString(printable(e.Text))
		b.WriteString("\n  ")
		b.WriteString(strings.Repeat(" ", max(0, e.Column-1)))
		b.WriteByte('^')
		b.WriteString(strings.Repeat("~", max(0, e.Width-1)))
		fmt.Fprintf(&b, " column %d", e.Column)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// printable replaces what would break the line or move the caret, rune by rune.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return utf8.RuneError
		}
		return r
	}, s)
}

// span is a part of a text, in bytes.
type span struct{ off, width int }

// errorAt returns an error that points at a part of text. A part without width
// is pointed at by a single caret, which may lie just past the end.
func errorAt(text string, at span, format string, args ...any) *Error {
	end := min(at.off+at.width, len(text))
	return &Error{
		Text:   text,
		Column: utf8.RuneCountInString(text[:at.off]) + 1,
		Width:  max(1, utf8.RuneCountInString(text[at.off:end])),
		Msg:    fmt.Sprintf(format, args...),
	}
}

// among adds the valid names, and the nearest of them to name.
func (e *Error) among(name string, valid []string) *Error {
	e.Valid, e.Nearest = valid, Nearest(name, valid)
	return e
}

// Nearest returns the valid name that name was probably meant to be: the one
// with the fewest letters to insert, delete or replace (at most two, and fewer
// than either has, and ignoring case), else the first that begins with name or
// that name begins with. It returns "" if there is none.
func Nearest(name string, valid []string) string {
	if name == "" {
		return ""
	}
	lower := []rune(strings.ToLower(name))
	best, bestDistance := "", 3
	for _, v := range valid {
		other := []rune(strings.ToLower(v))
		limit := min(bestDistance, len(lower), len(other))
		if d := distance(lower, other, limit); d < limit {
			best, bestDistance = v, d
		}
	}
	if best != "" {
		return best
	}
	for _, v := range valid {
		v2, n2 := strings.ToLower(v), string(lower)
		if strings.HasPrefix(v2, n2) || len(v2) > 1 && strings.HasPrefix(n2, v2) {
			return v
		}
	}
	return ""
}

// distance returns the Levenshtein distance of a and b, or anything ≥ limit if
// it isn't below limit.
func distance(a, b []rune, limit int) int {
	if len(a)-len(b) >= limit || len(b)-len(a) >= limit {
		return limit
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range a {
		diagonal := row[0]
		row[0] = i + 1
		for j := range b {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, diagonal+1, row[j]+1)
		}
	}
	return row[len(b)]
}
