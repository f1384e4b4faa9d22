package spec

import (
	"strings"
	"unicode/utf8"
)

// Item is one NAME[:OPTIONS] of a specification.
type Item struct {
	Name    string // the name, by [ValidName]
	Options string // the text after the colon; empty if there is none
	Column  int    // where the name begins in the whole text, in runes from 1
}

// String returns NAME or NAME:OPTIONS.
func (it Item) String() string {
	if it.Options == "" {
		return it.Name
	}
	return it.Name + ":" + it.Options
}

// ValidName reports whether s can name a device, a layer or an option: a letter
// a-z, then letters a-z, digits, '_' and '-'.
func ValidName(s string) bool { return s != "" && nameLen(s) == len(s) }

// nameLen returns how many bytes at the start of s form a valid name.
func nameLen(s string) int {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z':
		case i > 0 && ('0' <= c && c <= '9' || c == '_' || c == '-'):
		default:
			return i
		}
	}
	return len(s)
}

// Split divides a specification into its items, in the order in which they
// stand: for allocators, innermost first. Items are separated by '+', with
// spaces around it allowed. Only names are checked here; the options are
// checked by [Table.ParseAt]. Errors are of type [*Error].
func Split(text string) ([]Item, error) {
	if strings.TrimSpace(text) == "" {
		return nil, errorAt(text, span{0, len(text)}, "empty specification (want NAME[:OPTIONS])")
	}
	var items []Item
	offset := 0
	for raw := range strings.SplitSeq(text, "+") {
		body := strings.TrimSpace(raw)
		next := offset + len(raw) + 1
		if body == "" {
			if next > len(text) {
				return nil, errorAt(text, span{offset - 1, 1}, "nothing after '+'")
			}
			return nil, errorAt(text, span{next - 1, 1}, "nothing before '+'")
		}
		start := offset + strings.Index(raw, body)
		name, options, hasOptions := strings.Cut(body, ":")
		colon := span{start + len(name), 1}
		switch {
		case name == "":
			return nil, errorAt(text, colon, "no name before ':'")
		case !ValidName(name):
			return nil, badName(text, start, name)
		case hasOptions && strings.TrimSpace(options) == "":
			return nil, errorAt(text, colon, "nothing after ':'")
		}
		items = append(items, Item{
			Name:    name,
			Options: options,
			Column:  utf8.RuneCountInString(text[:start]) + 1,
		})
		offset = next
	}
	return items, nil
}

// badName explains why name, at start in text, isn't valid.
func badName(text string, start int, name string) *Error {
	e := errorAt(text, span{start, len(name)},
		"%q is not a name (want a letter a-z, then letters a-z, digits, '_' or '-')", name)
	if lower := strings.ToLower(strings.TrimSpace(name)); ValidName(lower) {
		e.Nearest = lower
	}
	return e
}
