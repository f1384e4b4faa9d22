package spec_test

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/spec"
)

func TestSplit(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want []spec.Item
	}{
		{"a", []spec.Item{{"a", "", 1}}},
		{"a+b:k=v+c", []spec.Item{{"a", "", 1}, {"b", "k=v", 3}, {"c", "", 9}}},
		{"  a + b:k=v ", []spec.Item{{"a", "", 3}, {"b", "k=v", 7}}},
		{"b-2_x:label=é+c", []spec.Item{{"b-2_x", "label=é", 1}, {"c", "", 15}}},
		{"a:b:c", []spec.Item{{"a", "b:c", 1}}},
		{"a: k=v", []spec.Item{{"a", " k=v", 1}}},
		{"caching:*;transfer=*;*;4", []spec.Item{{"caching", "*;transfer=*;*;4", 1}}},
	} {
		got, err := spec.Split(tt.in)
		require.NoError(t, err, tt.in)
		assert.Equal(t, tt.want, got, tt.in)
	}
}

func TestSplitErrors(t *testing.T) {
	const want = " is not a name (want a letter a-z, then letters a-z, digits, '_' or '-')"
	for _, tt := range []struct{ in, msg, caret string }{
		{" ", "empty specification (want NAME[:OPTIONS])", "^"},
		{"+a", "nothing before '+'", "^"},
		{"a+", "nothing after '+'", " ^"},
		{"a+ ", "nothing after '+'", " ^"},
		{"a++b", "nothing before '+'", "  ^"},
		{":k=v", "no name before ':'", "^"},
		{"a+:k=v", "no name before ':'", "  ^"},
		{"a:", "nothing after ':'", " ^"},
		{"a: +b", "nothing after ':'", " ^"},
		{"a+Block:k=v", `"Block"` + want + `; did you mean "block"?`, "  ^~~~~"},
		{"2a", `"2a"` + want, "^~"},
		{"a,b", `"a,b"` + want, "^~~"},
		{"a b:k=v", `"a b"` + want, "^~~"},
		{"a :k=v", `"a "` + want + `; did you mean "a"?`, "^~"},
		{"a=b", `"a=b"` + want, "^~~"},
		{"é+ü", `"é"` + want, "^"},
	} {
		items, err := spec.Split(tt.in)
		assert.Nil(t, items, tt.in)
		assert.EqualError(t, err, "spec: "+tt.msg+"\n  "+tt.in+"\n  "+tt.caret+fmt.Sprintf(" column %d", strings.Index(tt.caret, "^")+1))
	}
	_, err := spec.Split("")
	assert.EqualError(t, err, "spec: empty specification (want NAME[:OPTIONS])")
}

func TestValidName(t *testing.T) {
	for name, want := range map[string]bool{
		"a": true, "block": true, "a1": true, "a-b_c": true,
		"": false, "A": false, "1a": false, "_a": false, "-a": false, "a b": false, "ä": false, "a:": false,
	} {
		assert.Equal(t, want, spec.ValidName(name), name)
	}
}

func FuzzSplit(f *testing.F) {
	for _, s := range []string{"", "a", "a+b:k=v+c", " a + b ", "a++b", ":", "a:", "é+a", "a:\xff+b", "A", "a:k=v+", "\u2003a\u2003+b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		items, err := spec.Split(text)
		if err != nil {
			checkError(t, text, err)
			return
		}
		runes := []rune(text)
		var parts []string
		for _, it := range items {
			if !spec.ValidName(it.Name) || strings.Contains(it.Options, "+") {
				t.Fatalf("Split(%q): %+v", text, it)
			}
			if utf8.ValidString(text) && !strings.HasPrefix(string(runes[it.Column-1:]), it.String()) {
				t.Fatalf("Split(%q): %v is not in column %d", text, it, it.Column)
			}
			parts = append(parts, it.String())
		}
		again, err := spec.Split(strings.Join(parts, "+"))
		if err != nil || len(again) != len(items) {
			t.Fatalf("Split(%q) = %v, joined and split again %v, %v", text, items, again, err)
		}
		for i := range again {
			if again[i].Name != items[i].Name || again[i].Options != items[i].Options {
				t.Fatalf("Split(%q): item %d becomes %v", text, i, again[i])
			}
		}
	})
}

// checkError checks that an error points into the text and prints on three lines.
func checkError(t *testing.T, text string, err error) {
	t.Helper()
	e, ok := err.(*spec.Error)
	if !ok {
		t.Fatalf("%q: %T %v", text, err, err)
	}
	n := utf8.RuneCountInString(e.Text)
	if e.Text != text || e.Msg == "" || e.Column < 1 || e.Width < 1 || e.Column > n+1 || e.Column+e.Width > n+2 {
		t.Fatalf("%q: bad error %#v", text, e)
	}
	lines := 3
	if text == "" {
		lines = 1
	}
	if got := strings.Count(e.Error(), "\n") + 1; got != lines {
		t.Fatalf("%q: %d lines:\n%v", text, got, e)
	}
}
