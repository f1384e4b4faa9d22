package memory_test

import (
	"encoding/json"
	"flag"
	"io"
	"math"
	"math/big"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal/memory"
)

var (
	_ flag.Value  = (*memory.Bytes)(nil)
	_ pflag.Value = (*memory.Bytes)(nil)
)

func TestParseBytes(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want memory.Bytes
	}{
		{"0", 0},
		{"0B", 0},
		{"0.0", 0},
		{"00000000000000000000000000000000012", 12},
		{"1234", 1234},
		{"1234b", 1234},
		{"1k", 1024},
		{"1K", 1024},
		{"1Ki", 1024},
		{"1kib", 1024},
		{"1KB", 1000},
		{"1 kB", 1000},
		{"  64 \t MiB ", 64 * memory.MiB},
		{"1gib", memory.GiB},
		{"1G", memory.GiB},
		{"1GB", 1e9},
		{"80gib", 80 * memory.GiB},
		{"1.5GiB", memory.GiB + memory.GiB/2},
		{"1.50000GiB", memory.GiB + memory.GiB/2},
		{"0.5k", 512},
		{"0.0009765625KiB", 1},
		{"0.001KB", 1},
		{"1.000000000000000000EB", 1e18},
		{"2.5TB", 2.5e12},
		{"1P", memory.PiB},
		{"7E", 7 * memory.EiB},
		{"9PB", 9e15},
		{"7.5e", 7*memory.EiB + memory.EiB/2},
		{"9223372036854775807", math.MaxInt64},
		{"9223372036854775807.0B", math.MaxInt64},
		{"9.223372036854775807EB", math.MaxInt64},
		{"0." + "000000000000000000867361737988403547205962240695953369140625" + "E", 1},
	} {
		got, err := memory.ParseBytes(tt.in)
		if assert.NoError(t, err, tt.in) {
			assert.Equal(t, tt.want, got, tt.in)
		}
	}
}

func TestParseBytesErrors(t *testing.T) {
	for _, tt := range []struct {
		in            string
		reason        string
		offset, width int
	}{
		{"", "empty size", 0, 0},
		{"   ", "empty size", 0, 3},
		{"-1", "negative size", 0, 2},
		{" -1GiB", "negative size", 1, 5},
		{"+1", "not a size", 0, 2},
		{"GiB", "not a size", 0, 3},
		{".5GiB", "not a size", 0, 5},
		{"1.GiB", "no digits after the decimal point", 1, 1},
		{"1..5", "no digits after the decimal point", 1, 1},
		{"1.5.5", `unknown unit ".5"`, 3, 2},
		{"12 xib", `unknown unit "xib"`, 3, 3},
		{"1kibb", `unknown unit "kibb"`, 1, 4},
		{"1e3", `unknown unit "e3"`, 1, 2},
		{"0x10", `unknown unit "x10"`, 1, 3},
		{"1_000", `unknown unit "_000"`, 1, 4},
		{"1GiB 2", `unknown unit "GiB 2"`, 1, 5},
		{"0.3B", "not a whole number of bytes", 0, 4},
		{"1.1GiB", "not a whole number of bytes", 0, 6},
		{"0.0001KB", "not a whole number of bytes", 0, 8},
		{"0." + strings.Repeat("0", 100) + "1E", "not a whole number of bytes", 0, 104},
		{"9223372036854775808", "does not fit", 0, 19},
		{"18446744073709551616", "does not fit", 0, 20},
		{"99999999999999999999999999", "does not fit", 0, 26},
		{"8E", "does not fit", 0, 2},
		{"7.9999E", "not a whole number of bytes", 0, 7},
		{"10EB", "does not fit", 0, 4},
		{"9.223372036854775808EB", "does not fit", 0, 22},
	} {
		got, err := memory.ParseBytes(tt.in)
		var e *memory.ParseError
		if !assert.ErrorAs(t, err, &e, tt.in) {
			continue
		}
		assert.Zero(t, got, tt.in)
		assert.Contains(t, e.Reason, tt.reason, tt.in)
		assert.Equal(t, tt.offset, e.Offset, tt.in)
		assert.Equal(t, tt.width, e.Width, tt.in)
		assert.Contains(t, err.Error(), "memory: size ", tt.in)
	}
	_, err := memory.ParseBytes("1x")
	assert.ErrorContains(t, err, `memory: size "1x": unknown unit "x" (valid: B, K, Ki, KiB, KB, M,`)
}

func TestBytesString(t *testing.T) {
	for _, tt := range []struct {
		n           memory.Bytes
		text, human string
	}{
		{0, "0B", "0 B"},
		{1, "1B", "1 B"},
		{1023, "1023B", "1023 B"},
		{1024, "1KiB", "1 KiB"},
		{1234, "1234B", "1.21 KiB"},
		{1280, "1.25KiB", "1.25 KiB"},
		{1536, "1.5KiB", "1.50 KiB"},
		{1792, "1.75KiB", "1.75 KiB"},
		{10*memory.KiB - 1, "10239B", "10.0 KiB"},
		{100*memory.KiB - 1, "102399B", "100 KiB"},
		{1000*memory.KiB - 1, "1023999B", "1000 KiB"},
		{memory.MiB - 1, "1048575B", "1.00 MiB"},
		{2 * memory.MiB, "2MiB", "2 MiB"},
		{memory.GiB + memory.MiB, "1025MiB", "1.00 GiB"},
		{memory.GiB + memory.GiB/2, "1.5GiB", "1.50 GiB"},
		{1320702444, "1320702444B", "1.23 GiB"},
		{80 * memory.GiB, "80GiB", "80 GiB"},
		{1000 * memory.GiB, "1000GiB", "1000 GiB"},
		{3 * memory.TiB, "3TiB", "3 TiB"},
		{memory.PiB, "1PiB", "1 PiB"},
		{memory.EiB, "1EiB", "1 EiB"},
		{memory.EiB + memory.EiB/8, "1152PiB", "1.13 EiB"},
		{math.MaxInt64, "9223372036854775807B", "8.00 EiB"},
		{-1, "-1B", "-1 B"},
		{-1536, "-1.5KiB", "-1.50 KiB"},
		{-4 * memory.MiB, "-4MiB", "-4 MiB"},
		{math.MinInt64, "-8EiB", "-8 EiB"},
	} {
		assert.Equal(t, tt.text, tt.n.String(), "%d", int64(tt.n))
		assert.Equal(t, tt.human, tt.n.Human(), "%d", int64(tt.n))
	}
}

// sizes draws sizes at every magnitude, round ones included.
func sizes() *rapid.Generator[memory.Bytes] {
	return rapid.Custom(func(t *rapid.T) memory.Bytes {
		n := rapid.Int64Range(0, math.MaxInt64).Draw(t, "n")
		n >>= rapid.IntRange(0, 62).Draw(t, "right")
		low := rapid.IntRange(0, 62).Draw(t, "clear")
		return memory.Bytes(n >> low << low)
	})
}

func TestBytesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := sizes().Draw(t, "size")
		got, err := memory.ParseBytes(n.String())
		if err != nil || got != n {
			t.Fatalf("ParseBytes(%q) = %d, %v; want %d", n.String(), int64(got), err, int64(n))
		}
		if want := "-" + n.String(); n > 0 && (-n).String() != want {
			t.Fatalf("String of -%d = %q, want %q", int64(n), (-n).String(), want)
		}
	})
}

// TestHumanIsClose checks the rounding against exact rational arithmetic.
func TestHumanIsClose(t *testing.T) {
	units := map[string]memory.Bytes{
		"B": 1, "KiB": memory.KiB, "MiB": memory.MiB, "GiB": memory.GiB,
		"TiB": memory.TiB, "PiB": memory.PiB, "EiB": memory.EiB,
	}
	rapid.Check(t, func(t *rapid.T) {
		n := sizes().Draw(t, "size")
		number, unit, ok := strings.Cut(n.Human(), " ")
		v, ok2 := new(big.Rat).SetString(number)
		if !ok || !ok2 || units[unit] == 0 {
			t.Fatalf("%d prints %q", int64(n), n.Human())
		}
		if strings.Count(strings.TrimLeft(number, "0."), "")-1 > 4 {
			t.Fatalf("%d prints %q: too long", int64(n), n.Human())
		}
		v.Mul(v, new(big.Rat).SetInt64(int64(units[unit])))
		diff := v.Sub(v, new(big.Rat).SetInt64(int64(n)))
		diff.Abs(diff)
		// Three digits: off by at most half a percent of the value.
		if diff.Mul(diff, big.NewRat(200, 1)).Cmp(new(big.Rat).SetInt64(int64(n))) > 0 {
			t.Fatalf("%d prints %q: too far off", int64(n), n.Human())
		}
	})
}

func TestBytesFlagAndText(t *testing.T) {
	var n memory.Bytes
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Var(&n, "capacity", "size of the heap")
	require.NoError(t, fs.Parse([]string{"--capacity=1.5gib"}))
	assert.Equal(t, memory.GiB+memory.GiB/2, n)
	assert.Contains(t, fs.FlagUsages(), "--capacity size")
	assert.ErrorContains(t, fs.Parse([]string{"--capacity=-1"}), "negative size")
	assert.Equal(t, memory.GiB+memory.GiB/2, n, "a failed Set leaves the value alone")

	type config struct{ Limit memory.Bytes }
	text, err := json.Marshal(config{2 * memory.MiB})
	require.NoError(t, err)
	assert.JSONEq(t, `{"Limit":2097152}`, string(text), "a number, for machines")
	var c config
	require.NoError(t, json.Unmarshal(text, &c))
	assert.Equal(t, 2*memory.MiB, c.Limit)
	require.NoError(t, json.Unmarshal([]byte(`{"Limit":"2MiB"}`), &c), "and what a person wrote")
	assert.Equal(t, 2*memory.MiB, c.Limit)
	assert.ErrorContains(t, json.Unmarshal([]byte(`{"Limit":"9EiB"}`), &c), "does not fit")
}

func TestAlignUp(t *testing.T) {
	const top = memory.MaxBytes
	for _, tt := range []struct {
		n, a, want memory.Bytes
		ok         bool
	}{
		{0, 1, 0, true},
		{0, 256, 0, true},
		{1, 256, 256, true},
		{256, 256, 256, true},
		{257, 256, 512, true},
		{12345, 1, 12345, true},
		{top, 1, top, true},
		{top - 1, 2, top - 1, true},
		{top, 2, 0, false},
		{top - 255, 256, top - 255, true},
		{top - 254, 256, 0, false},
		{1, 1 << 62, 1 << 62, true},
		{1<<62 + 1, 1 << 62, 0, false},
		{-1, 256, 0, false},
		{1, 0, 0, false},
		{1, -256, 0, false},
		{1, 3, 0, false},
		{1, math.MinInt64, 0, false},
	} {
		got, ok := memory.AlignUp(tt.n, tt.a)
		assert.Equal(t, tt.ok, ok, "AlignUp(%d, %d)", int64(tt.n), int64(tt.a))
		assert.Equal(t, int64(tt.want), int64(got), "AlignUp(%d, %d)", int64(tt.n), int64(tt.a))
	}
	rapid.Check(t, func(t *rapid.T) {
		n, a := sizes().Draw(t, "n"), memory.Bytes(1)<<rapid.IntRange(0, 62).Draw(t, "log a")
		got, ok := memory.AlignUp(n, a)
		// The same with numbers that have no end.
		want := new(big.Int).Add(big.NewInt(int64(n)), big.NewInt(int64(a-1)))
		want.Div(want, big.NewInt(int64(a))).Mul(want, big.NewInt(int64(a)))
		if ok != want.IsInt64() || ok && int64(got) != want.Int64() {
			t.Fatalf("AlignUp(%d, %d) = %d, %v; want %v", int64(n), int64(a), int64(got), ok, want)
		}
	})
}

func TestIsPowerOfTwo(t *testing.T) {
	for n, want := range map[memory.Bytes]bool{
		0: false, 1: true, 2: true, 3: false, 4: true, 6: false, 1 << 62: true,
		math.MaxInt64: false, -1: false, -2: false, math.MinInt64: false,
	} {
		assert.Equal(t, want, memory.IsPowerOfTwo(n), "%d", int64(n))
	}
}

func FuzzParseBytes(f *testing.F) {
	for _, s := range []string{
		"", "0", "1234", "1.5GiB", "0.3B", "64 MiB", "9223372036854775807", "8E", "1kb",
		"-1", "+1", "1.", ".5", "1e3", "7.999999999999999999E", "0.0009765625K", " 1\tk ",
		"\u00a01k", "1\u212a", "999999999999999999999999T",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := memory.ParseBytes(s)
		if err != nil {
			e, ok := err.(*memory.ParseError)
			if !ok || n != 0 {
				t.Fatalf("ParseBytes(%q) = %d, %v", s, int64(n), err)
			}
			if e.Offset < 0 || e.Width < 0 || e.Offset+e.Width > len(s) || e.Reason == "" {
				t.Fatalf("ParseBytes(%q): bad position in %#v", s, e)
			}
			return
		}
		if n < 0 {
			t.Fatalf("ParseBytes(%q) = %d", s, int64(n))
		}
		again, err := memory.ParseBytes(n.String())
		if err != nil || again != n {
			t.Fatalf("ParseBytes(%q) = %d, but %q reads as %d, %v", s, int64(n), n, int64(again), err)
		}
		// Bare numbers must agree with the obvious reading.
		if v, ok := new(big.Rat).SetString(s); ok && !strings.ContainsAny(s, "eEpPxXoObB_/") && v.Cmp(new(big.Rat).SetInt64(int64(n))) != 0 {
			t.Fatalf("ParseBytes(%q) = %d", s, int64(n))
		}
	})
}
