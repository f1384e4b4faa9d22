package memory

import (
	"fmt"
	"strings"
)

// ParseError reports a text that isn't a size, a bit set or a heap key.
type ParseError struct {
	What   string // what was expected: "size", "memory type", "heap key", ...
	Text   string // the whole text that was given
	Offset int    // where the offending part begins in Text, in bytes
	Width  int    // the length of the offending part in bytes; 0 at the end of Text
	Reason string // what is wrong, without the package prefix

	// Valid lists the names that would have been accepted at Offset, in the
	// order in which they are documented; empty where no name was expected.
	Valid []string
}

// Error returns one line: the package, what was expected, the text, the reason.
func (e *ParseError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "memory: %s %q: %s", e.What, e.Text, e.Reason)
	if len(e.Valid) > 0 {
		fmt.Fprintf(&b, " (valid: %s)", strings.Join(e.Valid, ", "))
	}
	return b.String()
}
