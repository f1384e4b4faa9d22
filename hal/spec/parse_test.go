package spec_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/spec"
)

// parse splits a text of one item and parses it with the table.
func parse(t *spec.Table, text string) (*spec.Values, error) {
	items, err := spec.Split(text)
	if err != nil {
		return nil, err
	}
	return t.ParseAt(text, items[0])
}

func TestDefaults(t *testing.T) {
	v, err := caching().Parse("")
	require.NoError(t, err)
	assert.Equal(t, spec.UnlimitedSize, v.Size("max_bytes"))
	assert.True(t, v.IsUnlimited("max_bytes"))
	assert.Equal(t, int64(8), v.Count("depth"))
	assert.False(t, v.IsUnlimited("depth"))
	assert.Zero(t, v.Percent("keep"))
	assert.Equal(t, 1.25, v.Ratio("waste"))
	assert.Equal(t, spec.UnlimitedDuration, v.Duration("idle"))
	assert.True(t, v.Bool("shared"))
	assert.Empty(t, v.Text("label"))
	assert.Equal(t, "lru", v.Text("evict"))
	assert.Empty(t, v.Heaps())
	assert.Equal(t, "caching", v.String())
	assert.Empty(t, v.Options())
	for _, o := range v.Table().Options {
		assert.False(t, v.IsSet(o.Name), o.Name)
	}
}

func TestValues(t *testing.T) {
	v, err := caching().Parse(" label = a:b=c d ,max_bytes=2gib,depth=0012,keep=12.50 %,waste=2,idle=90s,shared=off,evict=LARGEST")
	require.NoError(t, err)
	assert.Equal(t, 2*memory.GiB, v.Size("max_bytes"))
	assert.Equal(t, int64(12), v.Count("depth"))
	assert.Equal(t, 12.5, v.Percent("keep"))
	assert.Equal(t, 10*memory.GiB, v.PercentOf("keep", 80*memory.GiB))
	assert.Equal(t, memory.Bytes(1), v.PercentOf("keep", 15), "rounded down")
	assert.Equal(t, 2.0, v.Ratio("waste"))
	assert.Equal(t, 90*time.Second, v.Duration("idle"))
	assert.False(t, v.Bool("shared"))
	assert.Equal(t, "a:b=c d", v.Text("label"))
	assert.Equal(t, "Largest", v.Text("evict"))
	for _, o := range v.Table().Options {
		assert.True(t, v.IsSet(o.Name), o.Name)
	}
	assert.Equal(t, "caching:max_bytes=2GiB,depth=12,keep=12.5%,waste=2,idle=1m30s,shared=false,label=a:b=c d,evict=Largest", v.String())

	// What is the default isn't printed, also if it was given.
	v, err = caching().Parse("depth=8,max_bytes=*,idle=9223372036854775807ns,waste=1.250")
	require.NoError(t, err)
	assert.Equal(t, "caching", v.String())
	assert.False(t, v.IsSet("depth"))

	// For an option without a default, every value is worth printing.
	v, err = caching().Parse("keep=0%")
	require.NoError(t, err)
	assert.True(t, v.IsSet("keep"))
	assert.Equal(t, "caching:keep=0%", v.String())

	v, err = caching().Parse("waste=*")
	require.NoError(t, err)
	assert.True(t, math.IsInf(v.Ratio("waste"), 1))
	assert.Equal(t, "caching:waste=*", v.String())
}

func TestPercentOf(t *testing.T) {
	table := &spec.Table{Name: "t", Summary: "s", Options: []spec.Option{
		{Name: "p", Kind: spec.Percent, Unlimited: true, Help: "h"},
	}}
	for text, want := range map[string]memory.Bytes{
		"":            0,
		"p=*":         spec.UnlimitedSize,
		"p=100%":      memory.MaxBytes,
		"p=200%":      spec.UnlimitedSize,
		"p=0.1%":      9223372036854775,
		"p=33.3333%":  3074454271160912984,
		"p=99.99999%": 9223371114517572121,
	} {
		v, err := table.Parse(text)
		require.NoError(t, err)
		assert.Equal(t, int64(want), int64(v.PercentOf("p", memory.MaxBytes)), text)
	}
}

func TestHeapItems(t *testing.T) {
	type pool struct {
		key                 string
		maxAlloc, capacity  memory.Bytes
		count               int64
		unlimited           string // initials of the fields without limit
		allocSet, countsSet bool
	}
	const no = spec.UnlimitedSize
	dev := func(a, c memory.Bytes, n int64, unlimited string) pool {
		return pool{key: "device_local", maxAlloc: a, capacity: c, count: n, unlimited: unlimited, allocSet: a != no, countsSet: n != 64}
	}
	for _, tt := range []struct {
		in      string
		printed string
		pools   []pool
	}{
		// IREE's own forms.
		{"caching", "caching", nil},
		{
			"caching:device_local=1gib;1gib;8", "caching:device_local=max_alloc:1GiB/capacity:1GiB/count:8",
			[]pool{dev(memory.GiB, memory.GiB, 8, "")},
		},
		{
			"caching:device_local=*;256mib;64,host_local=*;*;32", "caching:device_local=capacity:256MiB,host_local=count:32",
			[]pool{
				dev(no, 256*memory.MiB, 64, "m"),
				{key: "host_local", maxAlloc: no, capacity: no, count: 32, unlimited: "mc", countsSet: true},
			},
		},
		{
			"caching:*;transfer=*;*;4", "caching:*;transfer=count:4",
			[]pool{{key: "*;transfer", maxAlloc: no, capacity: no, count: 4, unlimited: "mc", countsSet: true}},
		},
		{
			"caching:device_local|host_visible=1mib", "caching:device_local|host_visible=max_alloc:1MiB",
			[]pool{{key: "device_local|host_visible", maxAlloc: memory.MiB, capacity: no, count: 64, unlimited: "c", allocSet: true}},
		},
		{
			"caching:DEVICE_LOCAL=1GIB", "caching:device_local=max_alloc:1GiB",
			[]pool{dev(memory.GiB, no, 64, "c")},
		},
		// Separators, empty places, names.
		{"caching:device_local=1gib/4gib/64", "caching:device_local=max_alloc:1GiB/capacity:4GiB", []pool{dev(memory.GiB, 4*memory.GiB, 64, "")}},
		{"caching:device_local=1gib/4gib;9", "caching:device_local=max_alloc:1GiB/capacity:4GiB/count:9", []pool{dev(memory.GiB, 4*memory.GiB, 9, "")}},
		{"caching:device_local=;;9", "caching:device_local=count:9", []pool{dev(no, no, 9, "mc")}},
		{"caching:device_local=;4gib;", "caching:device_local=capacity:4GiB", []pool{dev(no, 4*memory.GiB, 64, "m")}},
		{"caching:device_local=;", "caching:device_local=max_alloc:*", []pool{dev(no, no, 64, "mc")}},
		{"caching:device_local=*", "caching:device_local=max_alloc:*", []pool{dev(no, no, 64, "mc")}},
		{"caching:device_local=*;*;64", "caching:device_local=max_alloc:*", []pool{dev(no, no, 64, "mc")}},
		{
			"caching:device_local=max_alloc:1GiB/capacity:4GiB/count:63", "caching:device_local=max_alloc:1GiB/capacity:4GiB/count:63",
			[]pool{dev(memory.GiB, 4*memory.GiB, 63, "")},
		},
		{"caching:device_local = count : 9 ; max_alloc : 1 GiB ", "caching:device_local=max_alloc:1GiB/count:9", []pool{dev(memory.GiB, no, 9, "c")}},
		{"caching:device_local=1GiB/count:9", "caching:device_local=max_alloc:1GiB/count:9", []pool{dev(memory.GiB, no, 9, "c")}},
		{"caching:device_local=;4GiB/max_alloc:1GiB", "caching:device_local=max_alloc:1GiB/capacity:4GiB", []pool{dev(memory.GiB, 4*memory.GiB, 64, "")}},
		{"caching:device_local=count:*", "caching:device_local=count:*", []pool{dev(no, no, spec.UnlimitedCount, "mcc")}},
		// Options and heaps together; heaps keep their order and come last.
		{
			"caching:host_local=1k,depth=9,device_local=2k", "caching:depth=9,host_local=max_alloc:1KiB,device_local=max_alloc:2KiB",
			[]pool{
				{key: "host_local", maxAlloc: 1024, capacity: no, count: 64, unlimited: "c", allocSet: true},
				dev(2048, no, 64, "c"),
			},
		},
	} {
		t.Run(tt.in, func(t *testing.T) {
			v, err := parse(caching(), tt.in)
			require.NoError(t, err)
			assert.Equal(t, tt.printed, v.String())
			require.Len(t, v.Heaps(), len(tt.pools))
			for i, h := range v.Heaps() {
				want := tt.pools[i]
				assert.Equal(t, want.key, h.Key.String())
				assert.Equal(t, want.maxAlloc, h.Size("max_alloc"))
				assert.Equal(t, want.capacity, h.Size("capacity"))
				assert.Equal(t, want.count, h.Count("count"))
				assert.Equal(t, want.allocSet, h.IsSet("max_alloc"))
				assert.Equal(t, want.countsSet, h.IsSet("count"))
				var unlimited string
				for _, f := range []string{"max_alloc", "capacity", "count"} {
					if h.IsUnlimited(f) {
						unlimited += f[:1]
					}
				}
				assert.Equal(t, want.unlimited, unlimited)
				assert.Contains(t, tt.printed, h.String())
			}
		})
	}
}

// TestErrors holds the whole text of errors: message, line and caret.
func TestErrors(t *testing.T) {
	tables := map[string]*spec.Table{"caching": caching(), "host": host(), "raw": raw()}
	const heaps = "device_local, host_local, optimal, device_visible, host_visible, host_coherent, host_cached, none, *"
	const options = "depth, evict, idle, keep, label, max_bytes, shared, waste"
	const units = "B, K, Ki, KiB, KB, M, Mi, MiB, MB, G, Gi, GiB, GB, T, Ti, TiB, TB, P, Pi, PiB, PB, E, Ei, EiB, EB"
	for _, tt := range []struct{ in, msg, caret string }{
		// Names.
		{
			"host:capacty=1GiB",
			`unknown option "capacty" (valid: capacity, queues); did you mean "capacity"?`,
			"     ^~~~~~~",
		},
		{"host:cap=1GiB", `unknown option "cap" (valid: capacity, queues); did you mean "capacity"?`, "     ^~~"},
		{"host:Queues=1", `unknown option "Queues" (valid: capacity, queues); did you mean "queues"?`, "     ^~~~~~"},
		{"host:device_local=1GiB", `unknown option "device_local" (valid: capacity, queues)`, "     ^~~~~~~~~~~~"},
		{"host:queues=2,colour=red", `unknown option "colour" (valid: capacity, queues)`, "              ^~~~~~"},
		{"raw:x=1", `raw takes no options`, "    ^"},
		{"caching:device_locl=1k", `unknown option or heap "device_locl" (valid: ` + options + `, ` + heaps + `); did you mean "device_local"?`, "        ^~~~~~~~~~~"},
		{"caching:dept=1k", `unknown option or heap "dept" (valid: ` + options + `, ` + heaps + `); did you mean "depth"?`, "        ^~~~"},
		{"caching:host_local|hots_visible=1k", `heap "host_local|hots_visible": unknown name "hots_visible" (valid: ` + heaps + `); did you mean "host_visible"?`, "                   ^~~~~~~~~~~~"},
		{"caching:*;=1k", `heap "*;": empty name (valid: dispatch, default, transfer, dispatch_storage, mapping, transfer_source, transfer_target, dispatch_indirect_parameters, dispatch_uniform_read, dispatch_storage_read, dispatch_storage_write, sharing_export, sharing_replicate, sharing_concurrent, sharing_immutable, mapping_scoped, mapping_persistent, none, *)`, "          ^"},
		// Shape.
		{"host:queues", `option "queues" has no value (want queues=COUNT)`, "     ^~~~~~"},
		{"host:queues=", `option "queues" has an empty value`, "            ^"},
		{"host:queues= ,capacity=1k", `option "queues" has an empty value`, "            ^"},
		{"host:=2", `no name before '='`, "     ^"},
		{"host:queues=2,", `trailing comma`, "             ^"},
		{"host:queues=2, ", `trailing comma`, "             ^"},
		{"host:,queues=2", `nothing before the comma`, "     ^"},
		{"host:queues=2,,capacity=1k", `nothing before the comma`, "              ^"},
		{"host:,", `nothing before the comma`, "     ^"},
		{"host:queues=2,queues=2", `option "queues" is given twice`, "              ^~~~~~"},
		{"host:help,queues=2", `unknown option "help" (valid: capacity, queues)`, "     ^~~~"},
		{"caching:*;transfer", `heap "*;transfer" has no fields (want *;transfer=MAX_ALLOC;CAPACITY;COUNT)`, "        ^~~~~~~~~~"},
		{"caching:device_local=", `heap "device_local" has an empty value`, "                     ^"},
		{"caching:device_local=1k,*=2k,DEVICE_LOCAL=3k", `heap "DEVICE_LOCAL" is given twice`, "                             ^~~~~~~~~~~~"},
		// Values.
		{"host:queues=65", `option "queues": 65 is out of range (want 1..64)`, "            ^~"},
		{"host:queues=0", `option "queues": 0 is out of range (want 1..64)`, "            ^"},
		{"host:queues=-1", `option "queues": negative count`, "            ^~"},
		{"host:queues=two", `option "queues": "two" is not a whole number`, "            ^~~"},
		{"host:queues=1.5", `option "queues": "1.5" is not a whole number`, "            ^~~"},
		{"host:queues=9223372036854775808", `option "queues": does not fit (the largest count is 9223372036854775807)`, "            ^~~~~~~~~~~~~~~~~~~"},
		{"host:queues=*", `option "queues": '*' (no limit) is not accepted here, want a count`, "            ^"},
		{"host:capacity=0", `option "capacity": 0B is out of range (want >= 1B)`, "              ^"},
		{"host:capacity=0.3B", `option "capacity": not a whole number of bytes`, "              ^~~~"},
		{"host:capacity=80 gibs", `option "capacity": unknown unit "gibs" (valid: ` + units + `)`, "                 ^~~~"},
		{"host:capacity=-1GiB", `option "capacity": negative size`, "              ^~~~~"},
		{"host:capacity=8EiB", `option "capacity": does not fit (the largest size is 9223372036854775807B, just under 8EiB)`, "              ^~~~"},
		{"caching:max_bytes=1", `option "max_bytes": 1B is out of range (want 1KiB..1TiB or *)`, "                  ^"},
		{"caching:max_bytes=2TiB", `option "max_bytes": 2TiB is out of range (want 1KiB..1TiB or *)`, "                  ^~~~"},
		{"caching:keep=50", `option "keep": a percentage ends in '%', such as 50%`, "             ^~"},
		{"caching:keep=x%", `option "keep": "x" is not a decimal number`, "             ^~"},
		{"caching:keep=-5%", `option "keep": negative number`, "             ^~~"},
		{"caching:keep=100.5%", `option "keep": 100.5% is out of range (want <= 100%)`, "             ^~~~~~"},
		{"caching:waste=1e3", `option "waste": "1e3" is not a decimal number`, "              ^~~"},
		{"caching:waste=.5", `option "waste": ".5" is not a decimal number`, "              ^~"},
		{"caching:waste=0.5", `option "waste": 0.5 is out of range (want >= 1 or *)`, "              ^~~"},
		{"caching:waste=1" + strings.Repeat("0", 309), `option "waste": does not fit (the number is too large)`, "              ^" + strings.Repeat("~", 309)},
		{"caching:idle=5", `option "idle": the duration lacks a unit (valid: ns, us, ms, s, m, h)`, "              ^"},
		{"caching:idle=1m5d", `option "idle": unknown unit "d" (valid: ns, us, ms, s, m, h)`, "                ^"},
		{"caching:idle=soon", `option "idle": "soon" is not a duration (want numbers with units, such as 200ms or 1m30s)`, "             ^~~~"},
		{"caching:idle=-5s", `option "idle": negative duration`, "             ^~~"},
		{"caching:idle=0.5ns", `option "idle": not a whole number of nanoseconds`, "             ^~~~~"},
		{"caching:idle=9999999h", `option "idle": does not fit (the longest duration is about 292 years)`, "             ^~~~~~~~"},
		{"caching:shared=maybe", `option "shared": unknown value "maybe" (valid: true, false, on, off, yes, no, 1, 0)`, "               ^~~~~"},
		{"caching:shared=ture", `option "shared": unknown value "ture" (valid: true, false, on, off, yes, no, 1, 0); did you mean "true"?`, "               ^~~~"},
		{"caching:evict=lur", `option "evict": unknown value "lur" (valid: lru, Largest, fifo); did you mean "lru"?`, "              ^~~"},
		{"caching:evict=*", `option "evict": unknown value "*" (valid: lru, Largest, fifo)`, "              ^"},
		{"caching:label=a\x01b", `option "label": a text can't contain '\x01', which doesn't print`, "               ^"},
		{"caching:label=a\xffb", `option "label": not valid UTF-8`, "              ^~~"},
		// Runes, not bytes.
		{"caching:label=é…ß,dpth=1", `unknown option or heap "dpth" (valid: ` + options + `, ` + heaps + `); did you mean "depth"?`, "                  ^~~~"},
		// Fields.
		{"caching:device_local=1k;2k;3;4", `heap "device_local" has too many fields (at most 3)`, "                             ^"},
		{"caching:device_local=1k;2k;3;", `heap "device_local" has too many fields (at most 3)`, "                             ^"},
		{"caching:device_local=count:3/1k", `heap "device_local": a field without a name can't follow one with a name`, "                             ^~"},
		{"caching:device_local=count:3/", `heap "device_local": nothing where a field is expected`, "                            ^"},
		{"caching:device_local=count:3//max_alloc:1k", `heap "device_local": nothing where a field is expected`, "                            ^"},
		{"caching:device_local=count:", `heap "device_local": field "count" has an empty value`, "                           ^"},
		{"caching:device_local=cuont:3", `heap "device_local": unknown field "cuont" (valid: capacity, count, max_alloc); did you mean "count"?`, "                     ^~~~~"},
		{"caching:device_local=count:3/count:4", `heap "device_local": field "count" is given twice`, "                             ^~~~~~~"},
		{"caching:device_local=1k/max_alloc:1k", `heap "device_local": field "max_alloc" is given twice`, "                        ^~~~~~~~~~~~"},
		{"caching:device_local=1k;x", `heap "device_local": field "capacity": not a size (want a number and a unit, such as 64MiB)`, "                        ^"},
		{"caching:device_local=1k;2k;1 k", `heap "device_local": field "count": "1 k" is not a whole number`, "                           ^~~"},
		{"caching:device_local=1k;2k;max", `heap "device_local": field "count": "max" is not a whole number`, "                           ^~~"},
	} {
		t.Run(tt.in, func(t *testing.T) {
			name, _, _ := strings.Cut(tt.in, ":")
			v, err := parse(tables[name], tt.in)
			require.Error(t, err)
			assert.Nil(t, v)
			line := strings.NewReplacer("\x01", "\ufffd", "\xff", "\ufffd").Replace(tt.in)
			assert.Equal(t, "spec: "+tt.msg+"\n  "+line+"\n  "+tt.caret+fmt.Sprintf(" column %d", strings.Index(tt.caret, "^")+1), err.Error())
		})
	}
}

func TestErrorsKeepTheirColumnInALongerText(t *testing.T) {
	text := " raw + host:queues=2+caching:device_local=1k;zz , depth=9 "
	items, err := spec.Split(text)
	require.NoError(t, err)
	require.Len(t, items, 3)
	_, err = host().ParseAt(text, items[1])
	require.NoError(t, err)
	_, err = caching().ParseAt(text, items[2])
	var e *spec.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, text, e.Text)
	assert.Equal(t, strings.Index(text, "zz")+1, e.Column)
	assert.Equal(t, 2, e.Width)

	// An item that isn't at its place in the text is shown by itself.
	for _, column := range []int{-1, 0, 2, 1000} {
		_, err = host().ParseAt(text, spec.Item{Name: "host", Options: "queues=x", Column: column})
		require.ErrorAs(t, err, &e)
		assert.Equal(t, "host:queues=x", e.Text)
		assert.Equal(t, 13, e.Column)
	}
}

func TestErrorWrapsCause(t *testing.T) {
	_, err := host().Parse("capacity=1x")
	var cause *memory.ParseError
	require.ErrorAs(t, err, &cause)
	assert.Equal(t, "1x", cause.Text)
	_, err = caching().Parse("*;x|y=1k")
	require.ErrorAs(t, err, &cause)
	assert.Equal(t, "heap key", cause.What)
}

func TestHelpRequest(t *testing.T) {
	for _, table := range []*spec.Table{caching(), host(), raw()} {
		_, err := table.Parse(" help ")
		assert.ErrorIs(t, err, spec.ErrHelp)
	}
}

var errClash = errors.New("clash")

func TestValidate(t *testing.T) {
	table := caching()
	table.Validate = func(v *spec.Values) error {
		for _, h := range v.Heaps() {
			if h.Size("max_alloc") > h.Size("capacity") {
				return v.Errorf(h.Key.String(), "max_alloc can't exceed the capacity")
			}
		}
		if v.IsSet("keep") && v.IsSet("max_bytes") {
			return v.Errorf("keep", "keep and max_bytes exclude each other: %w", errClash)
		}
		if v.Text("label") == "bad" {
			return errClash
		}
		return nil
	}
	_, err := table.Parse("depth=9,keep=5%,max_bytes=1k")
	assert.ErrorIs(t, err, errClash)
	assert.EqualError(t, err, `spec: keep and max_bytes exclude each other: clash
  caching:depth=9,keep=5%,max_bytes=1k
                  ^~~~~~~ column 17`)
	_, err = table.Parse("depth=9,DEVICE_LOCAL=*;1k")
	assert.EqualError(t, err, `spec: max_alloc can't exceed the capacity
  caching:depth=9,DEVICE_LOCAL=*;1k
                  ^~~~~~~~~~~~~~~~~ column 17`)
	_, err = table.Parse("label=bad")
	assert.ErrorIs(t, err, errClash)
	assert.EqualError(t, err, `spec: caching: clash
  caching:label=bad
  ^~~~~~~~~~~~~~~~~ column 1`)

	// After a change by Set the error shows the values, not the stale text.
	v, err := table.Parse("keep=5%")
	require.NoError(t, err)
	require.NoError(t, v.Set("max_bytes", "1k"))
	assert.EqualError(t, v.Validate(), `spec: keep and max_bytes exclude each other: clash
  caching:max_bytes=1KiB,keep=5%
  ^~~~~~~~~~~~~~~~~~~~~~~~~~~~~~ column 1`)
}

func TestSet(t *testing.T) {
	v, err := caching().Parse("device_local=1k,host_local=2k,depth=9")
	require.NoError(t, err)
	before, heaps := v.String(), v.Heaps()

	for _, tt := range []struct{ name, value, msg string }{
		{"dpth", "1", "spec: unknown option or heap \"dpth\""},
		{"depth", "", "spec: option \"depth\" has an empty value\n  depth=\n        ^"},
		{"depth", "x", "spec: option \"depth\": \"x\" is not a whole number\n  depth=x\n        ^"},
		{"depth", "5000", "spec: option \"depth\": 5000 is out of range (want 1..1024)"},
		{"depth", "1,waste=2", "spec: a value can't contain ','\n  depth=1,waste=2\n         ^"},
		{"label", "a+b", "spec: option \"label\": a text can't contain '+', which separates options or layers\n  label=a+b\n         ^"},
		{"depth=1", "2", "spec: \"depth=1\" is not a name"},
		{"", "2", "spec: no name before '='"},
		{"device_local", "1k;2k;3;4", "spec: heap \"device_local\" has too many fields"},
	} {
		assert.ErrorContains(t, v.Set(tt.name, tt.value), tt.msg)
		assert.Equal(t, before, v.String(), "a failed Set changes nothing")
	}

	require.NoError(t, v.Set("depth", "10"))
	require.NoError(t, v.Set("label", "x=y"))
	require.NoError(t, v.Set("DEVICE_LOCAL", "count:3"))
	require.NoError(t, v.Set("*;transfer", ";4k"))
	assert.Equal(t, "caching:depth=10,label=x=y,device_local=count:3,host_local=max_alloc:2KiB,*;transfer=capacity:4KiB", v.String())
	assert.Equal(t, memory.Bytes(1024), heaps[0].Size("max_alloc"), "what was handed out stays as it was")
	require.NoError(t, v.Set("depth", "8"))
	assert.False(t, v.IsSet("depth"))
}

func TestGettersPanic(t *testing.T) {
	v, err := caching().Parse("device_local=1k")
	require.NoError(t, err)
	assert.PanicsWithValue(t, `spec: caching has no option "dpth" (valid: depth, evict, idle, keep, label, max_bytes, shared, waste)`,
		func() { v.Count("dpth") })
	assert.PanicsWithValue(t, `spec: option "depth" of caching is of kind count, not size`, func() { v.Size("depth") })
	assert.PanicsWithValue(t, `spec: caching device_local has no option "depth" (valid: capacity, count, max_alloc)`,
		func() { v.Heaps()[0].Count("depth") })
	for _, f := range []func(){
		func() { v.IsSet("x") },
		func() { v.IsUnlimited("x") },
		func() { v.Percent("waste") },
		func() { v.PercentOf("waste", 1) },
		func() { v.Ratio("keep") },
		func() { v.Duration("depth") },
		func() { v.Bool("depth") },
		func() { v.Text("depth") },
	} {
		assert.Panics(t, f)
	}
}

func TestEqual(t *testing.T) {
	get := func(table *spec.Table, text string) *spec.Values {
		v, err := table.Parse(text)
		require.NoError(t, err)
		return v
	}
	a := get(caching(), "depth=9,*=1k")
	assert.True(t, a.Equal(get(caching(), "*=max_alloc:1024,depth=09,shared=yes")))
	assert.False(t, a.Equal(get(caching(), "depth=9")))
	assert.False(t, a.Equal(get(caching(), "depth=9,*=2k")))
	assert.False(t, a.Equal(get(caching(), "depth=9,host_local=1k")))
	assert.False(t, a.Equal(get(caching(), "*=1k")))
	assert.False(t, get(host(), "").Equal(get(raw(), "")))
	text, err := a.MarshalText()
	require.NoError(t, err)
	assert.Equal(t, "caching:depth=9,*=max_alloc:1KiB", string(text))
}
