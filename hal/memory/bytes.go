package memory

import (
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"strconv"
	"strings"
)

// Bytes is a size, or a difference of sizes, in bytes.
//
// It is signed so that a check such as n > limit-used is ordinary arithmetic.
// [ParseBytes] yields only sizes ≥ 0.
type Bytes int64

// Binary units. Text also knows the decimal units KB, MB, GB, ... (powers of
// 1000); code has no constants for those because no allocator deals in them.
const (
	KiB Bytes = 1 << (10 * (iota + 1))
	MiB
	GiB
	TiB
	PiB
	EiB
)

// MaxBytes is the largest size that fits.
const MaxBytes Bytes = math.MaxInt64

// binaryUnits are the units in which sizes are printed, smallest first.
var binaryUnits = [...]struct {
	name string
	size uint64
}{
	{"B", 1},
	{"KiB", uint64(KiB)},
	{"MiB", uint64(MiB)},
	{"GiB", uint64(GiB)},
	{"TiB", uint64(TiB)},
	{"PiB", uint64(PiB)},
	{"EiB", uint64(EiB)},
}

// split returns the sign of b as text, and its magnitude.
func (b Bytes) split() (sign string, magnitude uint64) {
	if b < 0 {
		return "-", -uint64(b) // right for the smallest value too
	}
	return "", uint64(b)
}

// String returns b exactly, in the largest unit in which at most two decimals
// are needed: "0B", "1234B", "2MiB", "1.5GiB", "-4KiB". For b ≥ 0 the text is
// read back by [ParseBytes] to the same value.
func (b Bytes) String() string {
	sign, n := b.split()
	for i := len(binaryUnits) - 1; i > 0; i-- {
		u := binaryUnits[i]
		if n < u.size || n%(u.size/4) != 0 {
			continue
		}
		quarters := [...]string{"", ".25", ".5", ".75"}
		return sign + strconv.FormatUint(n/u.size, 10) + quarters[n%u.size/(u.size/4)] + u.name
	}
	return sign + strconv.FormatUint(n, 10) + "B"
}

// Human returns b rounded to three significant digits for people: "512 B",
// "1.23 GiB", "80 GiB". Whole units up to 1023 are written out. Halves are
// rounded away from zero. The text says how big something is; use [Bytes.String]
// for what is to be read back.
func (b Bytes) Human() string {
	sign, n := b.split()
	unit := 0
	for unit+1 < len(binaryUnits) && n >= binaryUnits[unit+1].size {
		unit++
	}
	size := binaryUnits[unit].size
	whole, rest := n/size, n%size
	decimals := 0
	switch {
	case rest == 0 || whole >= 100:
	case whole >= 10:
		decimals = 1
	default:
		decimals = 2
	}
	scale := [...]uint64{1, 10, 100}[decimals]
	hi, lo := bits.Mul64(rest, scale)
	lo, carry := bits.Add64(lo, size/2, 0)
	part, _ := bits.Div64(hi+carry, lo, size) // rest < size, so the quotient fits
	scaled := whole*scale + part
	if scaled >= 1024*scale && unit+1 < len(binaryUnits) {
		unit, scaled, decimals = unit+1, 100, 2 // 1023.7 KiB is 1.00 MiB
	} else if decimals > 0 && scaled >= 1000 {
		scaled, decimals = scaled/10, decimals-1 // 9.999 is 10.0
	}
	text := strconv.FormatUint(scaled, 10)
	if decimals > 0 {
		text = text[:len(text)-decimals] + "." + text[len(text)-decimals:]
	}
	return sign + text + " " + binaryUnits[unit].name
}

// unitNames lists the accepted suffixes for error messages; case is ignored.
var unitNames = []string{
	"B",
	"K", "Ki", "KiB", "KB",
	"M", "Mi", "MiB", "MB",
	"G", "Gi", "GiB", "GB",
	"T", "Ti", "TiB", "TB",
	"P", "Pi", "PiB", "PB",
	"E", "Ei", "EiB", "EB",
}

// unitSize returns the size of the unit called name in any case; "" is bytes.
func unitSize(name string) (uint64, bool) {
	name = strings.ToLower(name)
	if name == "" || name == "b" {
		return 1, true
	}
	exp := strings.IndexByte("kmgtpe", name[0]) + 1
	if exp == 0 {
		return 0, false
	}
	switch name[1:] {
	case "", "i", "ib":
		return 1 << (10 * exp), true
	case "b":
		size := uint64(1)
		for range exp {
			size *= 1000
		}
		return size, true
	}
	return 0, false
}

// ParseBytes reads a size: an integer or a decimal fraction, optional spaces,
// and an optional unit in any case. K, Ki, KiB (and M, G, T, P, E alike) are
// powers of 1024, KB, MB, ... are powers of 1000, B or nothing is bytes.
//
// The value is exact. A fraction is accepted only where it names a whole number
// of bytes ("1.5GiB" does, "0.3B" doesn't). Signs, values above [MaxBytes],
// empty text and anything left over are errors of type [*ParseError].
func ParseBytes(s string) (Bytes, error) {
	fail := func(offset, width int, reason string) (Bytes, error) {
		return 0, &ParseError{What: "size", Text: s, Offset: offset, Width: width, Reason: reason}
	}
	body := strings.TrimSpace(s)
	start := strings.Index(s, body)
	if body == "" {
		return fail(0, len(s), "empty size")
	}
	if body[0] == '-' {
		return fail(start, len(body), "negative size")
	}

	whole := body[:digits(body)]
	if whole == "" {
		return fail(start, len(body), "not a size (want a number and a unit, such as 64MiB)")
	}
	end := len(whole)
	var frac string
	if rest := body[end:]; strings.HasPrefix(rest, ".") {
		frac = rest[1 : 1+digits(rest[1:])]
		if frac == "" {
			return fail(start+end, 1, "no digits after the decimal point")
		}
		end += 1 + len(frac)
	}

	unit := strings.TrimLeft(body[end:], " \t")
	size, ok := unitSize(unit)
	if !ok {
		return 0, &ParseError{
			What: "size", Text: s, Offset: start + len(body) - len(unit), Width: len(unit),
			Reason: fmt.Sprintf("unknown unit %q", unit), Valid: unitNames,
		}
	}

	whole = strings.TrimLeft(whole, "0")
	frac = strings.TrimRight(frac, "0")
	const tooBig = "does not fit (the largest size is 9223372036854775807B, just under 8EiB)"
	if len(whole) > 19 {
		return fail(start, len(body), tooBig)
	}
	n := uint64(0)
	if whole != "" {
		n, _ = strconv.ParseUint(whole, 10, 64) // 19 digits fit
	}
	if n > math.MaxInt64/size {
		return fail(start, len(body), tooBig)
	}
	n *= size
	if frac != "" {
		part, exact := fraction(frac, size)
		if !exact {
			return fail(start, len(body), "not a whole number of bytes")
		}
		n += part // below size, so the sum can't wrap
	}
	if n > math.MaxInt64 {
		return fail(start, len(body), tooBig)
	}
	return Bytes(n), nil
}

// digits returns how many bytes at the start of s are decimal digits.
func digits(s string) int {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return i
		}
	}
	return len(s)
}

// fraction returns 0.frac × size and whether that is a whole number. frac has no
// trailing zeros.
func fraction(frac string, size uint64) (uint64, bool) {
	// Without trailing zeros, k decimals need a factor 2^k or 5^k in the size;
	// no unit has more than 2^60. This also bounds the work below.
	if len(frac) > 60 {
		return 0, false
	}
	num, _ := new(big.Int).SetString(frac, 10)
	den := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(len(frac))), nil)
	num.Mul(num, new(big.Int).SetUint64(size))
	quo, rem := num.QuoRem(num, den, new(big.Int))
	return quo.Uint64(), rem.Sign() == 0
}

// Set parses s into b. With String and Type it makes *Bytes a flag value for
// both the standard flag package and pflag.
func (b *Bytes) Set(s string) error {
	n, err := ParseBytes(s)
	if err != nil {
		return err
	}
	*b = n
	return nil
}

// Type names the kind of value in the help text of a flag.
func (Bytes) Type() string { return "size" }

// MarshalText returns the text of [Bytes.String]. A negative value is written
// for people: [Bytes.UnmarshalText] refuses it.
func (b Bytes) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// MarshalJSON writes the number of bytes: what reads it is a machine.
func (b Bytes) MarshalJSON() ([]byte, error) { return strconv.AppendInt(nil, int64(b), 10), nil }

// UnmarshalJSON reads a number of bytes, or a string as [ParseBytes] does.
func (b *Bytes) UnmarshalJSON(text []byte) error {
	s := string(text)
	switch {
	case s == "null":
		return nil
	case strings.HasPrefix(s, `"`):
		var err error
		if s, err = strconv.Unquote(s); err != nil {
			return fmt.Errorf("memory: size %s: %w", text, err)
		}
	}
	return b.Set(s)
}

// UnmarshalText reads what [ParseBytes] reads.
func (b *Bytes) UnmarshalText(text []byte) error { return b.Set(string(text)) }

// IsPowerOfTwo reports whether n is a positive power of two, 1 included.
func IsPowerOfTwo(n Bytes) bool { return n > 0 && n&(n-1) == 0 }

// AlignUp returns the smallest multiple of a that is at least n. It returns
// (0, false) if n is negative, if a isn't a power of two, or if that multiple
// doesn't fit; the check comes before any rounding, so nothing ever wraps.
func AlignUp(n, a Bytes) (Bytes, bool) {
	if n < 0 || !IsPowerOfTwo(a) {
		return 0, false
	}
	rest := n & (a - 1)
	if rest == 0 {
		return n, true
	}
	if n > MaxBytes-(a-rest) {
		return 0, false
	}
	return n + (a - rest), true
}
