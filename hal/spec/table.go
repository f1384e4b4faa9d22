package spec

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/halyard-go/halyard/hal/memory"
)

// Kind is the type of an option's value.
type Kind uint8

// Kinds of values. None of them takes a sign.
const (
	_        Kind = iota
	Size          // bytes, by [memory.ParseBytes]: 64MiB, 1.5GiB, 4096
	Count         // a whole number: 64
	Percent       // a decimal and a percent sign: 50%, 2.5%
	Ratio         // a decimal: 1.25
	Duration      // numbers with units: 200ms, 1m30s
	Bool          // true or false; also on, off, yes, no, 1, 0
	Text          // any printable text without ',' and '+'
	Enum          // one of a list of words, in any case
)

var kindNames = [...]string{
	Size: "size", Count: "count", Percent: "percent", Ratio: "ratio",
	Duration: "duration", Bool: "bool", Text: "text", Enum: "enum",
}

// String returns the name of the kind in lower case.
func (k Kind) String() string {
	if k == 0 || int(k) >= len(kindNames) {
		return fmt.Sprintf("kind(%d)", uint8(k))
	}
	return kindNames[k]
}

// MarshalText returns the name of the kind.
func (k Kind) MarshalText() ([]byte, error) {
	if k == 0 || int(k) >= len(kindNames) {
		return nil, fmt.Errorf("spec: no kind %d", uint8(k))
	}
	return []byte(k.String()), nil
}

// UnmarshalText reads the name of a kind.
func (k *Kind) UnmarshalText(text []byte) error {
	for i, name := range kindNames {
		if i > 0 && name == string(text) {
			*k = Kind(i)
			return nil
		}
	}
	return fmt.Errorf("spec: unknown kind %q (valid: %s)", text, strings.Join(kindNames[1:], ", "))
}

// ordered reports whether values of the kind have a minimum and a maximum.
func (k Kind) ordered() bool { return k >= Size && k <= Duration }

// Option describes one option, or one field of a heap item.
type Option struct {
	Name string `json:"name"` // by [ValidName]; "help" is taken
	Kind Kind   `json:"kind"`

	// Default is the value of an option that isn't given, in the option's own
	// syntax. Empty means none: the getter returns zero.
	Default string `json:"default,omitempty"`

	// Min and Max bound the value, inclusive; empty is no bound. Kinds without
	// an order have none. Unlimited is not subject to them.
	Min string `json:"min,omitempty"`
	Max string `json:"max,omitempty"`

	Enum      []string `json:"enum,omitempty"`      // the words of an Enum
	Unlimited bool     `json:"unlimited,omitempty"` // '*' is accepted: no limit
	Help      string   `json:"help"`                // what it does, one line
}

// HeapOption describes the heap items of a table: HEAPKEY=FIELDS, any number of
// them, each heap key once, in an order that the layer may give a meaning.
type HeapOption struct {
	Help string `json:"help"` // what an item does

	// Fields are the values of an item in positional order. Each needs a
	// default, and none may be Text.
	Fields []Option `json:"fields"`
}

// Table describes a device or a layer: its name, and everything it can be told.
// It marshals to JSON with all that [Table.Help] prints.
type Table struct {
	Name    string      `json:"name"`    // by [ValidName]
	Summary string      `json:"summary"` // what it is, one line
	Doc     string      `json:"doc,omitempty"`
	Options []Option    `json:"options,omitempty"`
	Heaps   *HeapOption `json:"heaps,omitempty"` // nil: takes no heap items

	// Validate, if set, refuses combinations of values that can't act. It is
	// called with every option parsed and in range. An error made with
	// [Values.Errorf] points at an option; any other points at the whole item.
	Validate func(*Values) error `json:"-"`
}

// Check reports every fault of the table itself: names that can't be written,
// defaults that don't parse or are out of range, options without help, and so
// on. Parsing with a faulty table panics, so whoever registers tables of others
// calls Check first, and a layer calls it in a test.
func (t *Table) Check() error {
	var errs []error
	fault := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("spec: table %q: "+format, append([]any{t.Name}, args...)...))
	}
	if !ValidName(t.Name) {
		fault("not a valid name")
	}
	if t.Summary == "" {
		fault("no summary")
	}
	checkOptions(t.Options, "option", fault)
	if t.Heaps == nil {
		return errors.Join(errs...)
	}
	for _, o := range t.Options {
		if _, err := memory.ParseHeapKey(o.Name); err == nil {
			fault("option %q is also a heap key", o.Name)
		}
	}
	if t.Heaps.Help == "" {
		fault("heap items have no help")
	}
	if len(t.Heaps.Fields) == 0 {
		fault("heap items have no fields")
	}
	checkOptions(t.Heaps.Fields, "field", fault)
	for _, o := range t.Heaps.Fields {
		if o.Kind == Text {
			fault("field %q can't be text", o.Name)
		}
		if o.Default == "" {
			fault("field %q has no default", o.Name)
		}
	}
	return errors.Join(errs...)
}

func checkOptions(options []Option, what string, fault func(string, ...any)) {
	seen := map[string]bool{}
	for i := range options {
		o := &options[i]
		bad := func(format string, args ...any) {
			fault("%s %q: "+format, append([]any{what, o.Name}, args...)...)
		}
		if !ValidName(o.Name) {
			bad("not a valid name")
		}
		if o.Name == "help" {
			bad("the name is taken")
		}
		if seen[o.Name] {
			bad("declared twice")
		}
		seen[o.Name] = true
		if o.Help == "" {
			bad("no help")
		}
		if o.Kind == 0 || int(o.Kind) >= len(kindNames) {
			bad("no such kind: %v", o.Kind)
			continue
		}
		if !o.Kind.ordered() && (o.Min != "" || o.Max != "" || o.Unlimited) {
			bad("%v values have no order, so neither bounds nor unlimited", o.Kind)
			continue
		}
		if (o.Kind == Enum) != (len(o.Enum) > 0) {
			bad("an enum needs words, and nothing else has them")
		}
		checkWords(o.Enum, bad)
		lo, hi, ok := o.bounds(bad)
		if ok && o.Min != "" && o.Max != "" && lo.compare(hi) > 0 {
			bad("the minimum %s is above the maximum %s", o.Min, o.Max)
			ok = false
		}
		if ok && o.Default != "" {
			if _, p := o.parse(o.Default); p != nil {
				bad("default %q: %s", o.Default, p.msg)
			}
		}
	}
}

// checkWords reports words of an enum that could not be written or told apart.
func checkWords(words []string, bad func(string, ...any)) {
	seen := map[string]bool{}
	for _, w := range words {
		plain := func(r rune) bool {
			return r < 0x80 && (r == '.' || r == '_' || r == '-' || '0' <= r && r <= '9' || 'a' <= r|0x20 && r|0x20 <= 'z')
		}
		if w == "" || strings.ContainsFunc(w, func(r rune) bool { return !plain(r) }) {
			bad("enum word %q isn't made of letters, digits, '.', '_' and '-'", w)
		}
		if seen[strings.ToLower(w)] {
			bad("enum word %q occurs twice", w)
		}
		seen[strings.ToLower(w)] = true
	}
}

// bounds parses Min and Max; an empty one is the zero value.
func (o *Option) bounds(bad func(string, ...any)) (lo, hi value, ok bool) {
	ok = true
	parse := func(text, what string) value {
		if text == "" {
			return value{}
		}
		v, p := o.scan(text)
		if p != nil {
			ok = false
			bad("%s %q: %s", what, text, p.msg)
		}
		return v
	}
	lo, hi = parse(o.Min, "minimum"), parse(o.Max, "maximum")
	return lo, hi, ok
}

// Range returns what values the option takes besides being of its kind, for
// people: "1..64", ">= 4KiB or *", "lru|fifo", or "any".
func (o *Option) Range() string {
	lo, hi := canonical(o, o.Min), canonical(o, o.Max)
	text := "any"
	switch {
	case o.Kind == Enum:
		text = strings.Join(o.Enum, "|")
	case o.Kind == Bool:
		text = "true|false"
	case lo != "" && hi != "":
		text = lo + ".." + hi
	case lo != "":
		text = ">= " + lo
	case hi != "":
		text = "<= " + hi
	}
	if o.Unlimited {
		text += " or *"
	}
	return text
}

// canonical returns text as the option prints it, or as it is if it's wrong.
func canonical(o *Option, text string) string {
	if text == "" {
		return ""
	}
	if o.Unlimited && text == "*" {
		return text
	}
	v, p := o.scan(text)
	if p != nil {
		return text
	}
	return v.text
}

// names returns the names of options, sorted.
func names(options []Option) []string {
	list := make([]string, len(options))
	for i := range options {
		list[i] = options[i].Name
	}
	slices.Sort(list)
	return list
}

// find returns the index of the option called name, or -1.
func find(options []Option, name string) int {
	return slices.IndexFunc(options, func(o Option) bool { return o.Name == name })
}
