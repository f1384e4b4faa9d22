package spec

import (
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/halyard-go/halyard/hal/memory"
)

// settings are the values of a list of options; it carries the typed getters of
// [Values] and [HeapValues]. A getter panics if there is no option of that name
// and kind: that is a fault in the program, not in what its user wrote.
type settings struct {
	owner    string // for panics
	options  []Option
	values   []value
	defaults []value
}

// newSettings returns the defaults of options.
func newSettings(owner string, options []Option) settings {
	s := settings{owner: owner, options: options, defaults: make([]value, len(options))}
	for i := range options {
		o := &options[i]
		if o.Default == "" {
			continue
		}
		v, p := o.parse(o.Default)
		if p != nil {
			panic(fmt.Sprintf("spec: %s: default of %q: %s", owner, o.Name, p.msg))
		}
		s.defaults[i] = v
	}
	s.values = slices.Clone(s.defaults)
	return s
}

// index returns the index of the option called name, of one of the kinds if any
// are listed.
func (s settings) index(name string, kinds ...Kind) int {
	i := find(s.options, name)
	if i < 0 {
		panic(fmt.Sprintf("spec: %s has no option %q (valid: %s)", s.owner, name, strings.Join(names(s.options), ", ")))
	}
	if len(kinds) > 0 && !slices.Contains(kinds, s.options[i].Kind) {
		panic(fmt.Sprintf("spec: option %q of %s is of kind %v, not %v", name, s.owner, s.options[i].Kind, kinds[0]))
	}
	return i
}

// Size returns the value of a [Size]; [UnlimitedSize] for no limit.
func (s settings) Size(name string) memory.Bytes {
	return memory.Bytes(s.values[s.index(name, Size)].n)
}

// Count returns the value of a [Count]; [UnlimitedCount] for no limit.
func (s settings) Count(name string) int64 { return s.values[s.index(name, Count)].n }

// Percent returns the value of a [Percent]: 50 for "50%", +Inf for no limit.
func (s settings) Percent(name string) float64 { return s.values[s.index(name, Percent)].f }

// PercentOf returns the named [Percent] of total, exactly, rounded down. It is
// [UnlimitedSize] for no limit, and where the result doesn't fit.
func (s settings) PercentOf(name string, total memory.Bytes) memory.Bytes {
	v := s.values[s.index(name, Percent)]
	if math.IsInf(v.f, 1) {
		return UnlimitedSize
	}
	r, ok := new(big.Rat).SetString(strings.TrimSuffix(v.text, "%"))
	if !ok {
		return 0 // no value and no default
	}
	r.Mul(r, big.NewRat(int64(total), 100))
	n := new(big.Int).Div(r.Num(), r.Denom())
	if !n.IsInt64() {
		return UnlimitedSize
	}
	return memory.Bytes(n.Int64())
}

// Ratio returns the value of a [Ratio]; +Inf for no limit.
func (s settings) Ratio(name string) float64 { return s.values[s.index(name, Ratio)].f }

// Duration returns the value of a [Duration]; [UnlimitedDuration] for no limit.
func (s settings) Duration(name string) time.Duration {
	return time.Duration(s.values[s.index(name, Duration)].n)
}

// Bool returns the value of a [Bool].
func (s settings) Bool(name string) bool { return s.values[s.index(name, Bool)].n != 0 }

// Text returns the value of a [Text] or an [Enum], the latter as the table
// spells it.
func (s settings) Text(name string) string { return s.values[s.index(name, Text, Enum)].text }

// IsUnlimited reports whether the value of an option of any kind is "*", no
// limit.
func (s settings) IsUnlimited(name string) bool { return s.values[s.index(name)] == unlimited }

// IsSet reports whether the value of an option differs from its default, which
// is when it is printed. Writing the default out is the same as leaving the
// option out. For an option without a default any value counts.
func (s settings) IsSet(name string) bool {
	i := s.index(name)
	return s.values[i] != s.defaults[i]
}

// equal reports whether both have the same values.
func (s settings) equal(o settings) bool { return slices.Equal(s.values, o.values) }

// HeapValues are the values of one heap item. It has the same getters as
// [Values], for the fields of the item.
type HeapValues struct {
	Key memory.HeapKey
	settings
}

// String returns the item in canonical form: HEAPKEY=NAME:VALUE/NAME:VALUE, with
// the fields that differ from the defaults, or the first field if none does.
func (h HeapValues) String() string {
	var fields []string
	for i, o := range h.options {
		if h.values[i] != h.defaults[i] {
			fields = append(fields, o.Name+":"+h.values[i].text)
		}
	}
	if len(fields) == 0 {
		fields = append(fields, h.options[0].Name+":"+h.values[0].text)
	}
	return h.Key.String() + "=" + strings.Join(fields, "/")
}

// Values are the values of all options of a [Table].
type Values struct {
	settings
	table *Table
	heaps []HeapValues

	text  string          // what was parsed; empty after a Set
	all   span            // the item in text
	where map[string]span // the option or canonical heap key in text
}

// defaults returns the values of a table when nothing is given.
func (t *Table) defaults() *Values {
	return &Values{settings: newSettings(t.Name, t.Options), table: t, where: map[string]span{}}
}

// Table returns the table that the values belong to.
func (v *Values) Table() *Table { return v.table }

// Heaps returns the heap items in the order in which they were given.
func (v *Values) Heaps() []HeapValues { return slices.Clone(v.heaps) }

// Equal reports whether both have the same values for a table of the same name.
func (v *Values) Equal(o *Values) bool {
	return v.table.Name == o.table.Name && v.settings.equal(o.settings) &&
		slices.EqualFunc(v.heaps, o.heaps, func(a, b HeapValues) bool {
			return a.Key == b.Key && a.settings.equal(b.settings)
		})
}

// Set changes an option, or a heap item if name is a heap key: that heap is
// replaced in its place, or added at the end. On error nothing is changed.
//
// The combination isn't checked, so that several options can be changed one by
// one; call [Values.Validate] after the last.
func (v *Values) Set(name, value string) error {
	w := &Values{
		settings: v.settings, table: v.table,
		text: name + "=" + value, where: map[string]span{},
	}
	w.values = slices.Clone(v.values)
	if strings.ContainsRune(name, '=') {
		return errorAt(w.text, span{0, len(name)}, "%q is not a name", name)
	}
	if i := strings.IndexByte(value, ','); i >= 0 {
		return errorAt(w.text, span{len(name) + 1 + i, 1}, "a value can't contain ','")
	}
	if err := w.item(trim(w.text, 0)); err != nil {
		return err
	}
	v.values = w.values
	for _, h := range w.heaps {
		same := func(o HeapValues) bool { return o.Key == h.Key }
		heaps := slices.Clone(v.heaps)
		if i := slices.IndexFunc(heaps, same); i >= 0 {
			heaps[i] = h
		} else {
			heaps = append(heaps, h)
		}
		v.heaps = heaps
	}
	v.text, v.all, v.where = "", span{}, map[string]span{}
	return nil
}

// Validate runs the Validate hook of the table. Parsing does so already.
func (v *Values) Validate() error {
	if v.table.Validate == nil {
		return nil
	}
	err := v.table.Validate(v)
	if err == nil {
		return nil
	}
	if e, ok := err.(*Error); ok {
		return e
	}
	e := v.Errorf("", "%s: %w", v.table.Name, err)
	return e
}

// Errorf returns an error for [Table.Validate] that points at an option, given
// by name, or at a heap item, given by the text of its key. If that isn't in the
// text that was parsed, or name is empty, it points at the whole item. The format
// may contain %w.
func (v *Values) Errorf(name, format string, args ...any) *Error {
	cause := fmt.Errorf(format, args...)
	text, at := v.text, v.all
	if text == "" {
		text = v.String()
		at = span{0, len(text)}
	} else if w, ok := v.where[name]; ok {
		at = w
	}
	e := errorAt(text, at, "%s", cause.Error())
	if u, ok := cause.(interface{ Unwrap() error }); ok {
		e.Err = u.Unwrap()
	} else if _, ok := cause.(interface{ Unwrap() []error }); ok {
		e.Err = cause
	}
	return e
}

// Options returns what [Values.String] has after the colon.
func (v *Values) Options() string {
	var items []string
	for i, o := range v.options {
		if v.values[i] != v.defaults[i] {
			items = append(items, o.Name+"="+v.values[i].text)
		}
	}
	for _, h := range v.heaps {
		items = append(items, h.String())
	}
	return strings.Join(items, ",")
}

// String returns the canonical form NAME[:OPTIONS]: what differs from the
// defaults in the order of the table, then the heap items in their own order.
// Reading it gives equal values, and printing those the same text.
func (v *Values) String() string {
	return Item{Name: v.table.Name, Options: v.Options()}.String()
}

// MarshalText returns the text of [Values.String].
func (v *Values) MarshalText() ([]byte, error) { return []byte(v.String()), nil }
