package spec_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/spec"
)

func TestCheck(t *testing.T) {
	for _, table := range []*spec.Table{caching(), host(), raw()} {
		assert.NoError(t, table.Check())
	}
	size := func(o spec.Option) spec.Option {
		if o.Name == "" {
			o.Name = "x"
		}
		if o.Kind == 0 {
			o.Kind = spec.Size
		}
		o.Help = "h"
		return o
	}
	for _, tt := range []struct {
		option spec.Option
		want   string
	}{
		{size(spec.Option{Name: "X"}), `option "X": not a valid name`},
		{size(spec.Option{Name: "help"}), `option "help": the name is taken`},
		{size(spec.Option{Name: "y"}), `option "y": declared twice`},
		{size(spec.Option{Name: "optimal"}), `option "optimal" is also a heap key`},
		{spec.Option{Name: "x", Kind: spec.Size}, `option "x": no help`},
		{spec.Option{Name: "x", Help: "h"}, `option "x": no such kind: kind(0)`},
		{size(spec.Option{Kind: 99}), `option "x": no such kind: kind(99)`},
		{size(spec.Option{Default: "1x"}), `option "x": default "1x": unknown unit "x"`},
		{size(spec.Option{Default: "*"}), `option "x": default "*": '*' (no limit) is not accepted here`},
		{size(spec.Option{Min: "*"}), `option "x": minimum "*": '*' (no limit) is not accepted here`},
		{size(spec.Option{Max: "-1"}), `option "x": maximum "-1": negative size`},
		{size(spec.Option{Min: "2k", Max: "1k"}), `option "x": the minimum 2k is above the maximum 1k`},
		{size(spec.Option{Min: "2k", Default: "1k"}), `option "x": default "1k": 1KiB is out of range (want >= 2KiB)`},
		{size(spec.Option{Kind: spec.Bool, Min: "false"}), `option "x": bool values have no order`},
		{size(spec.Option{Kind: spec.Text, Unlimited: true}), `option "x": text values have no order`},
		{size(spec.Option{Kind: spec.Enum}), `option "x": an enum needs words`},
		{size(spec.Option{Enum: []string{"a"}}), `option "x": an enum needs words, and nothing else has them`},
		{size(spec.Option{Kind: spec.Enum, Enum: []string{"a b"}}), `option "x": enum word "a b" isn't made of`},
		{size(spec.Option{Kind: spec.Enum, Enum: []string{"a", "A"}}), `option "x": enum word "A" occurs twice`},
		{size(spec.Option{Kind: spec.Enum, Enum: []string{"a"}, Default: "b"}), `option "x": default "b": unknown value "b"`},
	} {
		table := caching()
		table.Options = []spec.Option{{Name: "y", Kind: spec.Bool, Help: "h"}, tt.option}
		assert.ErrorContains(t, table.Check(), `spec: table "caching": `+tt.want)
	}

	bad := &spec.Table{Name: "No", Heaps: &spec.HeapOption{}}
	err := bad.Check()
	for _, want := range []string{"not a valid name", "no summary", "heap items have no help", "heap items have no fields"} {
		assert.ErrorContains(t, err, want)
	}
	bad = caching()
	bad.Heaps.Fields = []spec.Option{{Name: "t", Kind: spec.Text, Help: "h"}}
	assert.ErrorContains(t, bad.Check(), `field "t" can't be text`)
	assert.ErrorContains(t, bad.Check(), `field "t" has no default`)
}

func TestFaultyTablePanics(t *testing.T) {
	table := host()
	table.Options[0].Default = "much"
	assert.PanicsWithValue(t, `spec: host: default of "capacity": not a size (want a number and a unit, such as 64MiB)`,
		func() { _, _ = table.Parse("") })
}

func TestRange(t *testing.T) {
	for want, o := range map[string]spec.Option{
		"any":                {Kind: spec.Size},
		"any or *":           {Kind: spec.Count, Unlimited: true},
		">= 1KiB":            {Kind: spec.Size, Min: "1024"},
		"<= 100%":            {Kind: spec.Percent, Max: "100.0%"},
		"1s..1m or *":        {Kind: spec.Duration, Min: "1000ms", Max: "60s", Unlimited: true},
		"lru|fifo":           {Kind: spec.Enum, Enum: []string{"lru", "fifo"}},
		"true|false":         {Kind: spec.Bool},
		"not a size..1.5GiB": {Kind: spec.Size, Min: "not a size", Max: "1.5gib"},
	} {
		assert.Equal(t, want, o.Range())
	}
}

func TestHelp(t *testing.T) {
	var b strings.Builder
	require.NoError(t, caching().Help(&b))
	assert.Equal(t, `caching: keeps freed blocks for the next request

Blocks are kept by heap and size,
most recently used first.

Options, as caching:OPTION=VALUE,...

  OPTION     TYPE      DEFAULT  RANGE             HELP
  max_bytes  size      *        1KiB..1TiB or *   bytes kept
  depth      count     8        1..1024           free blocks looked at in a bin
  keep       percent   -        <= 100%           share of the heap that may be kept
  waste      ratio     1.25     >= 1 or *         how much larger a reused block may be
  idle       duration  *        any or *          time after which a block is returned
  shared     bool      true     true|false        queues share their blocks
  label      text      -        any               name in reports
  evict      enum      lru      lru|Largest|fifo  what goes first | order

Heaps, as caching:HEAP=MAX_ALLOC;CAPACITY;COUNT,...
or by name, as caching:HEAP=max_alloc:*/capacity:*/count:64,...

A pool for one heap; pools are tried in order, and what matches none isn't cached.
HEAP is a memory type, such as device_local or host_local, or TYPE;USAGE; names are joined by '|', and '*' is any.

  FIELD      TYPE   DEFAULT  RANGE     HELP
  max_alloc  size   *        any or *  largest allocation kept
  capacity   size   *        any or *  bytes kept
  count      count  64       any or *  blocks kept

Sizes: K, KiB, M, MiB, ... are powers of 1024, KB, MB, ... of 1000; case doesn't matter.
'*' is no limit.
`, b.String())

	b.Reset()
	require.NoError(t, raw().Help(&b))
	assert.Equal(t, "raw: the driver's own allocate and free\n\nNo options.\n", b.String())
}

func TestMarkdown(t *testing.T) {
	var b strings.Builder
	require.NoError(t, caching().Markdown(&b))
	for _, line := range []string{
		"## `caching`\n\nkeeps freed blocks for the next request\n\nBlocks are kept",
		"\n| Option | Type | Default | Range | Help |\n|---|---|---|---|---|\n| `max_bytes` | size | `*` | `1KiB..1TiB or *` | bytes kept |\n",
		"\n| `label` | text | - | any | name in reports |\n",
		"\n| `evict` | enum | `lru` | `lru\\|Largest\\|fifo` | what goes first \\| order |\n",
		"\nHeaps: `caching:HEAP=MAX_ALLOC;CAPACITY;COUNT,...`, or by name `caching:HEAP=max_alloc:*/capacity:*/count:64,...`\n",
		"\n| Field | Type | Default | Range | Help |\n",
		"\n| `count` | count | `64` | `any or *` | blocks kept |\n",
	} {
		assert.Contains(t, b.String(), line)
	}
	b.Reset()
	require.NoError(t, raw().Markdown(&b))
	assert.Equal(t, "## `raw`\n\nthe driver's own allocate and free\n\nNo options.\n", b.String())
}

// brokenWriter fails on every write.
type brokenWriter struct{}

var errBroken = errors.New("broken")

func (brokenWriter) Write([]byte) (int, error) { return 0, errBroken }

func TestHelpReportsWriteErrors(t *testing.T) {
	assert.ErrorIs(t, caching().Help(brokenWriter{}), errBroken)
	assert.ErrorIs(t, caching().Markdown(brokenWriter{}), errBroken)
}

func TestJSON(t *testing.T) {
	text, err := json.Marshal(host())
	require.NoError(t, err)
	assert.JSONEq(t, `{
		"name": "host", "summary": "host memory as device memory",
		"options": [
			{"name": "capacity", "kind": "size", "default": "1GiB", "min": "1B", "help": "size of the heap"},
			{"name": "queues", "kind": "count", "default": "1", "min": "1", "max": "64", "help": "number of queues"}
		]}`, string(text))
	for _, table := range []*spec.Table{caching(), host(), raw()} {
		text, err := json.Marshal(table)
		require.NoError(t, err)
		var got spec.Table
		require.NoError(t, json.Unmarshal(text, &got))
		assert.Equal(t, table, &got)
	}
	_, err = json.Marshal(spec.Option{Name: "x"})
	assert.ErrorContains(t, err, "spec: no kind 0")
	var k spec.Kind
	assert.ErrorContains(t, k.UnmarshalText([]byte("number")), `spec: unknown kind "number" (valid: size, count,`)
	assert.Error(t, k.UnmarshalText(nil))
}

func TestNearest(t *testing.T) {
	valid := []string{"capacity", "count", "max_alloc", "max_bytes", "x"}
	for name, want := range map[string]string{
		"":                        "",
		"capacty":                 "capacity",
		"CAPACITY":                "capacity",
		"cuont":                   "count",
		"cnt":                     "count",
		"cou":                     "count",
		"max":                     "max_alloc", // the first of two that begin so
		"max_":                    "max_alloc",
		"max_byte":                "max_bytes",
		"count_of_blocks":         "count",
		"c":                       "capacity",
		"y":                       "", // one letter off is all of it
		"xy":                      "",
		"zzz":                     "",
		"colour":                  "",
		strings.Repeat("a", 1000): "",
	} {
		assert.Equal(t, want, spec.Nearest(name, valid), name)
	}
	assert.Empty(t, spec.Nearest("a", nil))
}
