package spec

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/halyard-go/halyard/hal/memory"
)

// What the getters return for "*", no limit: the largest value of the type, so
// that n > limit needs no special case. For [Percent] and [Ratio] it is +Inf.
const (
	UnlimitedSize     = memory.MaxBytes
	UnlimitedCount    = int64(math.MaxInt64)
	UnlimitedDuration = time.Duration(math.MaxInt64)
)

// value is a parsed value. The zero value is an option that has none.
type value struct {
	text string  // canonical; equal values of one option have equal texts
	n    int64   // Size, Count, Duration in nanoseconds, Bool as 0 or 1
	f    float64 // Percent (50 is 50%), Ratio
}

// compare orders values of one kind.
func (v value) compare(w value) int {
	return cmp.Or(cmp.Compare(v.n, w.n), cmp.Compare(v.f, w.f))
}

// problem says what is wrong with the text of a value, and with which part.
type problem struct {
	at    span
	msg   string
	valid []string
	near  string
	err   error
}

// unlimited is the value of "*".
var unlimited = value{text: "*", n: math.MaxInt64, f: math.Inf(1)}

// parse reads a value that is given for the option: of its kind and in range.
// raw has no spaces around it.
func (o *Option) parse(raw string) (value, *problem) {
	if raw == "*" && o.Unlimited {
		return unlimited, nil
	}
	v, p := o.scan(raw)
	if p != nil {
		return value{}, p
	}
	lo, hi, _ := o.bounds(func(string, ...any) {})
	if o.Min != "" && v.compare(lo) < 0 || o.Max != "" && v.compare(hi) > 0 {
		return value{}, whole(raw, "%s is out of range (want %s)", v.text, o.Range())
	}
	if o.Unlimited && (o.Kind == Size || o.Kind == Count || o.Kind == Duration) && v.n == math.MaxInt64 {
		return unlimited, nil // the two are the same to a getter
	}
	return v, nil
}

func whole(raw, format string, args ...any) *problem {
	return &problem{at: span{0, len(raw)}, msg: fmt.Sprintf(format, args...)}
}

// scan reads a value of the option's kind, in any range.
func (o *Option) scan(raw string) (value, *problem) {
	if raw == "*" && o.Kind.ordered() {
		return value{}, whole(raw, "'*' (no limit) is not accepted here, want a %v", o.Kind)
	}
	switch o.Kind {
	case Size:
		n, err := memory.ParseBytes(raw)
		if err != nil {
			return value{}, sizeProblem(raw, err)
		}
		return value{text: n.String(), n: int64(n)}, nil
	case Count:
		return scanCount(raw)
	case Percent:
		number, ok := strings.CutSuffix(raw, "%")
		if !ok {
			return value{}, whole(raw, "a percentage ends in '%%', such as 50%%")
		}
		f, p := scanDecimal(strings.TrimSpace(number), raw)
		if p != nil {
			return value{}, p
		}
		return value{text: formatDecimal(f) + "%", f: f}, nil
	case Ratio:
		f, p := scanDecimal(raw, raw)
		if p != nil {
			return value{}, p
		}
		return value{text: formatDecimal(f), f: f}, nil
	case Duration:
		return scanDuration(raw)
	case Bool:
		switch strings.ToLower(raw) {
		case "true", "on", "yes", "1":
			return value{text: "true", n: 1}, nil
		case "false", "off", "no", "0":
			return value{text: "false"}, nil
		}
		return value{}, word(raw, []string{"true", "false", "on", "off", "yes", "no", "1", "0"})
	case Enum:
		for _, w := range o.Enum {
			if strings.EqualFold(w, raw) {
				return value{text: w}, nil
			}
		}
		return value{}, word(raw, o.Enum)
	case Text:
		return scanText(raw)
	}
	return value{}, whole(raw, "no such kind: %v", o.Kind)
}

// word is the problem of a word that isn't in a list.
func word(raw string, valid []string) *problem {
	p := whole(raw, "unknown value %q", raw)
	p.valid, p.near = valid, Nearest(raw, valid)
	return p
}

func sizeProblem(raw string, err error) *problem {
	e, ok := errors.AsType[*memory.ParseError](err)
	if !ok {
		return whole(raw, "%v", err)
	}
	return &problem{at: span{e.Offset, e.Width}, msg: e.Reason, valid: e.Valid, err: err}
}

func scanCount(raw string) (value, *problem) {
	if strings.HasPrefix(raw, "-") {
		return value{}, whole(raw, "negative count")
	}
	if raw == "" || strings.Trim(raw, "0123456789") != "" {
		return value{}, whole(raw, "%q is not a whole number", raw)
	}
	n, err := strconv.ParseInt(raw, 10, 64)
	if err != nil {
		return value{}, whole(raw, "does not fit (the largest count is %d)", int64(math.MaxInt64))
	}
	return value{text: strconv.FormatInt(n, 10), n: n}, nil
}

// decimalLen returns how many bytes at the start of s form a decimal: digits,
// and optionally a point and more digits.
func decimalLen(s string) int {
	n := len(s) - len(strings.TrimLeft(s, "0123456789"))
	if n == 0 || n == len(s) || s[n] != '.' {
		return n
	}
	frac := s[n+1:]
	if m := len(frac) - len(strings.TrimLeft(frac, "0123456789")); m > 0 {
		return n + 1 + m
	}
	return n
}

// scanDecimal reads number, which is raw or the start of it.
func scanDecimal(number, raw string) (float64, *problem) {
	if strings.HasPrefix(number, "-") {
		return 0, whole(raw, "negative number")
	}
	if number == "" || decimalLen(number) != len(number) {
		return 0, whole(raw, "%q is not a decimal number", number)
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil || math.IsInf(f, 0) {
		return 0, whole(raw, "does not fit (the number is too large)")
	}
	return f, nil
}

// formatDecimal returns the shortest decimal that reads back to f.
func formatDecimal(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

// durationUnits are those of [time.ParseDuration]; longer names come first.
var durationUnits = []struct {
	name string
	size time.Duration
}{
	{"ns", time.Nanosecond},
	{"us", time.Microsecond},
	{"µs", time.Microsecond}, // U+00B5, micro
	{"μs", time.Microsecond}, // U+03BC, mu
	{"ms", time.Millisecond},
	{"s", time.Second},
	{"m", time.Minute},
	{"h", time.Hour},
}

// scanDuration reads what time.ParseDuration reads, but exactly: what isn't a
// whole number of nanoseconds is refused, not cut off.
func scanDuration(raw string) (value, *problem) {
	if strings.HasPrefix(raw, "-") {
		return value{}, whole(raw, "negative duration")
	}
	total := new(big.Rat)
	for rest := raw; rest != ""; {
		n := decimalLen(rest)
		if n == 0 || n > 64 {
			return value{}, whole(raw, "%q is not a duration (want numbers with units, such as 200ms or 1m30s)", raw)
		}
		part, _ := new(big.Rat).SetString(rest[:n])
		if part.Sign() == 0 && raw == "0" {
			break
		}
		rest = rest[n:]
		size := time.Duration(0)
		for _, u := range durationUnits {
			if after, ok := strings.CutPrefix(rest, u.name); ok {
				rest, size = after, u.size
				break
			}
		}
		if size == 0 {
			unit := rest[:len(rest)-len(strings.TrimLeftFunc(rest, unicode.IsLetter))]
			p := &problem{at: span{len(raw) - len(rest), len(unit)}, msg: "the duration lacks a unit"}
			if unit != "" {
				p.msg = fmt.Sprintf("unknown unit %q", unit)
			}
			p.valid = []string{"ns", "us", "ms", "s", "m", "h"}
			return value{}, p
		}
		total.Add(total, part.Mul(part, new(big.Rat).SetInt64(int64(size))))
	}
	if !total.IsInt() {
		return value{}, whole(raw, "not a whole number of nanoseconds")
	}
	if !total.Num().IsInt64() {
		return value{}, whole(raw, "does not fit (the longest duration is about 292 years)")
	}
	d := time.Duration(total.Num().Int64())
	return value{text: formatDuration(d), n: int64(d)}, nil
}

// formatDuration is d.String without the zeros of "1m0s" and "1h0m0s".
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func scanText(raw string) (value, *problem) {
	if !utf8.ValidString(raw) {
		return value{}, whole(raw, "not valid UTF-8")
	}
	for i, r := range raw {
		at := span{i, utf8.RuneLen(r)}
		switch {
		case r == ',' || r == '+':
			return value{}, &problem{at: at, msg: fmt.Sprintf("a text can't contain %q, which separates options or layers", r)}
		case !unicode.IsPrint(r):
			return value{}, &problem{at: at, msg: fmt.Sprintf("a text can't contain %q, which doesn't print", r)}
		}
	}
	return value{text: raw}, nil
}
