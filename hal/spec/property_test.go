package spec_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal/spec"
)

// texts returns a generator of values for an option, in many spellings, most of
// which are accepted.
func texts(o spec.Option) *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		n := rapid.Int64Min(0).Draw(t, "n") >> rapid.IntRange(0, 62).Draw(t, "shift")
		text := fmt.Sprint(n)
		switch o.Kind {
		case spec.Size:
			text += rapid.SampledFrom([]string{"", "B", "k", " KiB", "mb", "Gi", ".5GiB", ".25 k", "T"}).Draw(t, "unit")
		case spec.Percent:
			text = fmt.Sprint(n%101) + rapid.SampledFrom([]string{"%", ".5%", ".0625 %"}).Draw(t, "unit")
		case spec.Ratio:
			text += rapid.SampledFrom([]string{"", ".5", ".10", ".3333333333333333333"}).Draw(t, "fraction")
		case spec.Duration:
			text += rapid.SampledFrom([]string{"ns", "us", "µs", "ms", "s", "m", "h", "h1.5s", ".5m"}).Draw(t, "unit")
		case spec.Bool:
			text = rapid.SampledFrom([]string{"true", "False", "ON", "off", "yes", "no", "1", "0"}).Draw(t, "bool")
		case spec.Enum:
			text = rapid.SampledFrom(o.Enum).Draw(t, "word")
			if rapid.Bool().Draw(t, "upper") {
				text = strings.ToUpper(text)
			}
		case spec.Text:
			text = rapid.StringMatching(`[a-zA-Z0-9 =:;/*|é-]{1,8}`).Draw(t, "text")
		}
		if o.Unlimited && rapid.IntRange(0, 3).Draw(t, "star") == 0 {
			text = "*"
		}
		return text
	})
}

// spaces surrounds s with spaces now and then.
func spaces(t *rapid.T, s string) string {
	return rapid.SampledFrom([]string{"", "", "", " ", "\t"}).Draw(t, "before") + s +
		rapid.SampledFrom([]string{"", "", "", " "}).Draw(t, "after")
}

// optionLists returns a generator of options for a table, in any order and
// spelling.
func optionLists(table *spec.Table) *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		var items []string
		for _, o := range table.Options {
			if rapid.Bool().Draw(t, o.Name) {
				items = append(items, spaces(t, o.Name)+"="+spaces(t, texts(o).Draw(t, "value")))
			}
		}
		keys := []string{"*", "device_local", "HOST_LOCAL", "*;transfer", "host_visible|device_local", "0x80;none"}
		for _, key := range keys {
			if !rapid.Bool().Draw(t, key) {
				continue
			}
			var fields []string
			fs := table.Heaps.Fields
			positional := rapid.IntRange(0, len(fs)).Draw(t, "positional")
			for _, f := range fs[:positional] {
				fields = append(fields, spaces(t, rapid.OneOf(rapid.Just(""), texts(f)).Draw(t, "field")))
			}
			rest := rapid.Permutation(fs[positional:]).Draw(t, "rest")
			for _, f := range rest[:rapid.IntRange(0, len(rest)).Draw(t, "named")] {
				fields = append(fields, spaces(t, f.Name)+":"+spaces(t, texts(f).Draw(t, "field")))
			}
			items = append(items, key+"="+strings.Join(fields, rapid.SampledFrom([]string{";", "/"}).Draw(t, "separator")))
		}
		return strings.Join(rapid.Permutation(items).Draw(t, "items"), ",")
	})
}

type failer interface {
	Helper()
	Fatalf(string, ...any)
}

// checkRoundTrip checks what must hold for every text that a table accepts.
func checkRoundTrip(t failer, table *spec.Table, text string, v *spec.Values) {
	t.Helper()
	printed := v.String()
	items, err := spec.Split(printed)
	if err != nil || len(items) != 1 {
		t.Fatalf("%q prints %q, which splits into %v, %v", text, printed, items, err)
	}
	w, err := table.ParseAt(printed, items[0])
	if err != nil {
		t.Fatalf("%q prints %q, which is refused: %v", text, printed, err)
	}
	if !v.Equal(w) || !w.Equal(v) {
		t.Fatalf("%q prints %q, which is something else: %v", text, printed, w)
	}
	if w.String() != printed {
		t.Fatalf("%q prints %q, which prints %q", text, printed, w.String())
	}
	for _, o := range table.Options {
		if v.IsSet(o.Name) != w.IsSet(o.Name) || get(v, o) != get(w, o) {
			t.Fatalf("%q: %s is %v, and %v when read back from %q", text, o.Name, get(v, o), get(w, o), printed)
		}
	}
	for i, h := range v.Heaps() {
		for _, o := range table.Heaps.Fields {
			if x, y := get(h, o), get(w.Heaps()[i], o); x != y {
				t.Fatalf("%q: %v %s is %v, and %v when read back from %q", text, h.Key, o.Name, x, y, printed)
			}
		}
	}
}

// get reads an option by the getter of its kind.
func get(v interface{ IsUnlimited(string) bool }, o spec.Option) any {
	type getters interface {
		Text(string) string
		Percent(string) float64
		Ratio(string) float64
		Bool(string) bool
		Count(string) int64
	}
	g := v.(getters)
	switch o.Kind {
	case spec.Count:
		return g.Count(o.Name)
	case spec.Percent:
		return g.Percent(o.Name)
	case spec.Ratio:
		return g.Ratio(o.Name)
	case spec.Bool:
		return g.Bool(o.Name)
	case spec.Text, spec.Enum:
		return g.Text(o.Name)
	}
	switch v := v.(type) {
	case *spec.Values:
		if o.Kind == spec.Size {
			return v.Size(o.Name)
		}
		return v.Duration(o.Name)
	case spec.HeapValues:
		return v.Size(o.Name)
	}
	return nil
}

func TestRoundTrip(t *testing.T) {
	table := caching()
	accepted := 0
	rapid.Check(t, func(t *rapid.T) {
		text := optionLists(table).Draw(t, "options")
		v, err := table.Parse(text)
		if err != nil {
			if _, ok := err.(*spec.Error); !ok {
				t.Fatalf("%q: %T %v", text, err, err)
			}
			t.Skip("refused")
		}
		accepted++
		checkRoundTrip(t, table, text, v)
	})
	if accepted == 0 {
		t.Error("no text was accepted: the property was not tested")
	}
}

// TestSetAgreesWithParse checks that setting options one by one gives what
// parsing them at once does.
func TestSetAgreesWithParse(t *testing.T) {
	table := caching()
	rapid.Check(t, func(t *rapid.T) {
		text := optionLists(table).Draw(t, "options")
		v, err := table.Parse(text)
		if err != nil {
			t.Skip("refused")
		}
		w, err := table.Parse("")
		if err != nil {
			t.Fatal(err)
		}
		for item := range strings.SplitSeq(text, ",") {
			if name, value, ok := strings.Cut(item, "="); ok {
				if err := w.Set(name, value); err != nil {
					t.Fatalf("Set(%q, %q): %v", name, value, err)
				}
			}
		}
		if !v.Equal(w) {
			t.Fatalf("%q parses as %v, set one by one gives %v", text, v, w)
		}
	})
}

func FuzzSpec(f *testing.F) {
	for _, s := range []string{
		"caching",
		"caching:device_local=1gib;1gib;8",
		"caching:device_local=*;256mib;64,host_local=*;*;32",
		"caching:*;transfer=*;*;4",
		"caching:device_local|host_visible=1mib",
		"caching:device_local=max_alloc:1GiB/capacity:4GiB/count:64",
		"raw+caching:max_bytes=2gib,depth=12,keep=12.5%,waste=2,idle=90s,shared=off,label=a b=c,evict=fifo",
		"caching:depth=9,,", "caching:help", "caching:label=é,dpth=1", "caching:device_local=;;;;", "a:=+b",
		"caching:idle=1h1ns,waste=0.1", "caching:label=\xff", "caching:*;*=count:*",
	} {
		f.Add(s)
	}
	table := caching()
	f.Fuzz(func(t *testing.T, text string) {
		items, err := spec.Split(text)
		if err != nil {
			checkError(t, text, err)
			return
		}
		for _, item := range items {
			v, err := table.ParseAt(text, item)
			if errors.Is(err, spec.ErrHelp) {
				continue
			}
			if err != nil {
				checkError(t, text, err)
				continue
			}
			checkRoundTrip(t, table, text, v)
		}
	})
}
