package spec

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/halyard-go/halyard/hal/memory"
)

// Parse reads the options of one item, the text after NAME and the colon.
// Empty options give the defaults; the options "help" give [ErrHelp]. Columns
// of errors count from the beginning of NAME:OPTIONS.
//
// Parse panics if the table itself is faulty; see [Table.Check].
func (t *Table) Parse(options string) (*Values, error) {
	return t.ParseAt("", Item{Name: t.Name, Options: options, Column: 1})
}

// ParseAt is Parse for an item of a longer text, as [Split] returns it: columns
// of errors count from the beginning of that text. The name of the item is not
// compared with the table's, so that a table may serve under several names.
func (t *Table) ParseAt(text string, item Item) (*Values, error) {
	start := runeOffset(text, item.Column)
	if start < 0 || !strings.HasPrefix(text[start:], item.String()) {
		text, start = item.String(), 0
	}
	v := t.defaults()
	v.text, v.all = text, span{start, len(item.String())}
	if err := v.parse(start+len(item.Name)+1, item.Options); err != nil {
		return nil, err
	}
	if err := v.Validate(); err != nil {
		return nil, err
	}
	return v, nil
}

// runeOffset returns the byte offset of a column, or -1 if text has none such.
func runeOffset(text string, column int) int {
	offset := 0
	for ; column > 1 && offset < len(text); column-- {
		_, n := utf8.DecodeRuneInString(text[offset:])
		offset += n
	}
	if column != 1 {
		return -1
	}
	return offset
}

// part is a piece of a text, with spaces trimmed off.
type part struct {
	text string
	off  int // byte offset in the whole text
}

// trim returns the part of raw, which begins at off, without spaces around it.
func trim(raw string, off int) part {
	left := strings.TrimLeftFunc(raw, unicode.IsSpace)
	return part{strings.TrimRightFunc(left, unicode.IsSpace), off + len(raw) - len(left)}
}

func (p part) span() span { return span{p.off, len(p.text)} }

// cut divides p at the first sep.
func (p part) cut(sep string) (before, after part, ok bool) {
	a, b, ok := strings.Cut(p.text, sep)
	return trim(a, p.off), trim(b, p.off+len(a)+len(sep)), ok
}

// parse reads a list of options that begins at off in v.text.
func (v *Values) parse(off int, options string) error {
	switch strings.TrimSpace(options) {
	case "":
		return nil
	case "help":
		return ErrHelp
	}
	end := off + len(options)
	for raw := range strings.SplitSeq(options, ",") {
		item := trim(raw, off)
		next := off + len(raw) + 1
		switch {
		case item.text != "":
			if err := v.item(item); err != nil {
				return err
			}
		case next > end:
			return errorAt(v.text, span{off - 1, 1}, "trailing comma")
		default:
			return errorAt(v.text, span{next - 1, 1}, "nothing before the comma")
		}
		off = next
	}
	return nil
}

// item reads KEY=VALUE.
func (v *Values) item(item part) error {
	key, val, ok := item.cut("=")
	if ok && key.text == "" {
		return errorAt(v.text, span{key.off, 1}, "no name before '='")
	}
	i, heap, err := v.lookup(key)
	if err != nil {
		return err
	}
	label := fmt.Sprintf("option %q", key.text)
	if i < 0 {
		label = fmt.Sprintf("heap %q", key.text)
	}
	switch {
	case !ok && i < 0:
		return errorAt(v.text, key.span(), "%s has no fields (want %s)", label, v.table.Heaps.usage(key.text))
	case !ok:
		return errorAt(v.text, key.span(), "%s has no value (want %s=%s)", label, key.text, strings.ToUpper(v.options[i].Kind.String()))
	case val.text == "":
		return errorAt(v.text, span{val.off, 0}, "%s has an empty value", label)
	}
	if i < 0 {
		return v.heapItem(heap, key, val, label)
	}
	if _, dup := v.where[key.text]; dup {
		return errorAt(v.text, key.span(), "%s is given twice", label)
	}
	x, p := v.options[i].parse(val.text)
	if p != nil {
		return v.problem(p, val, label)
	}
	v.values[i] = x
	v.where[key.text] = item.span()
	return nil
}

// lookup finds what key names: the option with index i, or if i < 0 the heap.
func (v *Values) lookup(key part) (i int, heap memory.HeapKey, err error) {
	t := v.table
	if i = find(t.Options, key.text); i >= 0 {
		return i, heap, nil
	}
	if t.Heaps == nil {
		if len(t.Options) == 0 {
			return 0, heap, errorAt(v.text, key.span(), "%s takes no options", t.Name)
		}
		return 0, heap, errorAt(v.text, key.span(), "unknown option %q", key.text).among(key.text, names(t.Options))
	}
	heap, err = memory.ParseHeapKey(key.text)
	if err == nil {
		return -1, heap, nil
	}
	e, ok := errors.AsType[*memory.ParseError](err)
	if !ok {
		return 0, heap, errorAt(v.text, key.span(), "heap %q: %v", key.text, err)
	}
	if strings.ContainsAny(key.text, ";|") {
		bad := key.text[e.Offset : e.Offset+e.Width]
		out := errorAt(v.text, span{key.off + e.Offset, e.Width}, "heap %q: %s", key.text, e.Reason).among(bad, e.Valid)
		out.Err = err
		return 0, heap, out
	}
	if len(t.Options) == 0 {
		return 0, heap, errorAt(v.text, key.span(), "unknown heap %q", key.text).among(key.text, e.Valid)
	}
	if f := Nearest(key.text, names(t.Heaps.Fields)); f != "" {
		return 0, heap, errorAt(v.text, key.span(), "%s is set for a heap: %s:*=%s:… or another heap for the *", f, t.Name, f)
	}
	return 0, heap, errorAt(v.text, key.span(), "unknown option or heap %q", key.text).
		among(key.text, slices.Concat(names(t.Options), e.Valid))
}

// problem turns a problem of a value, val, into an error.
func (v *Values) problem(p *problem, val part, label string) *Error {
	e := errorAt(v.text, span{val.off + p.at.off, p.at.width}, "%s: %s", label, p.msg)
	e.Valid, e.Nearest, e.Err = p.valid, p.near, p.err
	return e
}

// usage returns how an item for key may be written.
func (h *HeapOption) usage(key string) string {
	var b strings.Builder
	for i, f := range h.Fields {
		if i > 0 {
			b.WriteByte(';')
		}
		b.WriteString(strings.ToUpper(f.Name))
	}
	return key + "=" + b.String()
}

// heapItem reads the fields of a heap.
func (v *Values) heapItem(heap memory.HeapKey, key, val part, label string) error {
	name := heap.String()
	if _, dup := v.where[name]; dup {
		return errorAt(v.text, key.span(), "%s is given twice", label)
	}
	fields := v.table.Heaps.Fields
	hv := HeapValues{Key: heap, settings: newSettings(v.table.Name+" "+name, fields)}
	given := make([]bool, len(fields))
	named := false
	position := 0
	for rest, more := val, true; more; position++ {
		var f part
		if f, rest, more = rest.cutAny(";/"); f.text == "" && !named {
			if position >= len(fields) {
				return tooMany(v.text, f, label, len(fields))
			}
			continue // an empty place keeps its default
		}
		i := position
		x := f
		if fieldName, after, ok := f.cut(":"); ok {
			named = true
			if i = find(fields, fieldName.text); i < 0 {
				return errorAt(v.text, fieldName.span(), "%s: unknown field %q", label, fieldName.text).
					among(fieldName.text, names(fields))
			}
			if x = after; x.text == "" {
				return errorAt(v.text, span{x.off, 0}, "%s: field %q has an empty value", label, fieldName.text)
			}
		} else if named {
			if f.text == "" {
				return errorAt(v.text, span{max(f.off-1, val.off), 1}, "%s: nothing where a field is expected", label)
			}
			return errorAt(v.text, f.span(), "%s: a field without a name can't follow one with a name", label)
		} else if i >= len(fields) {
			return tooMany(v.text, f, label, len(fields))
		}
		if given[i] {
			return errorAt(v.text, f.span(), "%s: field %q is given twice", label, fields[i].Name)
		}
		given[i] = true
		y, p := fields[i].parse(x.text)
		if p != nil {
			return v.problem(p, x, fmt.Sprintf("%s: field %q", label, fields[i].Name))
		}
		hv.values[i] = y
	}
	v.heaps = append(v.heaps, hv)
	v.where[name] = span{key.off, val.off + len(val.text) - key.off}
	return nil
}

func tooMany(text string, f part, label string, n int) *Error {
	return errorAt(text, f.span(), "%s has too many fields (at most %d)", label, n)
}

// cutAny divides p at the first byte that is in separators.
func (p part) cutAny(separators string) (before, after part, ok bool) {
	if i := strings.IndexAny(p.text, separators); i >= 0 {
		return trim(p.text[:i], p.off), trim(p.text[i+1:], p.off+i+1), true
	}
	return p, part{"", p.off + len(p.text)}, false
}
