package memory

import (
	"errors"
	"fmt"
	"strings"
)

// Heap describes one kind of memory that a device offers.
type Heap struct {
	Name  string // for people and reports
	Type  Type   // the properties of all memory of this heap
	Usage Usage  // what buffers of this heap may be used for

	Capacity      Bytes // total size; 0 is unknown
	MaxAllocation Bytes // largest single allocation; 0 is no limit
	MinAlignment  Bytes // alignment that every allocation has; 0 is none promised
}

// String returns one line for people; figures that are unknown or absent are
// left out.
func (h Heap) String() string {
	var b strings.Builder
	if h.Name != "" {
		b.WriteString(h.Name + ": ")
	}
	fmt.Fprintf(&b, "%v, usage %v", h.Type, h.Usage)
	if h.Capacity != 0 {
		fmt.Fprintf(&b, ", capacity %v", h.Capacity)
	}
	if h.MaxAllocation != 0 {
		fmt.Fprintf(&b, ", max allocation %v", h.MaxAllocation)
	}
	if h.MinAlignment != 0 {
		fmt.Fprintf(&b, ", alignment %v", h.MinAlignment)
	}
	return b.String()
}

// Heaps are the heaps of a device, in order of preference.
type Heaps []Heap

// Find returns the index of the first heap that has all bits of t and allows
// all of u.
//
// [Optimal] is a hint and never required of a heap. With it the other bits of t
// are preferred, not demanded: if no heap has them all, the first one that
// allows u is the answer.
func (hs Heaps) Find(t Type, u Usage) (int, bool) {
	want := t &^ Optimal
	for i, h := range hs {
		if h.Type.Has(want) && h.Usage.Has(u) {
			return i, true
		}
	}
	if t.Has(Optimal) {
		for i, h := range hs {
			if h.Usage.Has(u) {
				return i, true
			}
		}
	}
	return 0, false
}

// HeapKey selects heaps by what they have: IREE's heap key. Its text is a memory
// type or "*" for any, and optionally ';' and a usage:
//
//	device_local
//	device_local|host_visible;transfer
//	*
//	*;transfer
//
// A key is comparable; keys that are read by [ParseHeapKey] are equal if and
// only if their texts are.
type HeapKey struct {
	Type    Type  // bits that a heap must have; 0 if AnyType is set
	Usage   Usage // uses that a heap must allow; 0 is any
	AnyType bool  // every memory type will do
}

// ParseHeapKey reads the text of a key. Case doesn't matter. A usage of "*" or
// "none" is the same as leaving it out.
func ParseHeapKey(s string) (HeapKey, error) {
	var k HeapKey
	typeText, usageText, hasUsage := strings.Cut(s, ";")
	if strings.TrimSpace(typeText) == "*" {
		k.AnyType = true
	} else {
		t, err := ParseType(typeText)
		if err != nil {
			return HeapKey{}, within(err, s, 0)
		}
		k.Type = t
	}
	if hasUsage && strings.TrimSpace(usageText) != "*" {
		u, err := ParseUsage(usageText)
		if err != nil {
			return HeapKey{}, within(err, s, len(typeText)+1)
		}
		k.Usage = u
	}
	return k, nil
}

// within turns an error about a part of a heap key into one about the key.
func within(err error, whole string, offset int) error {
	e, ok := errors.AsType[*ParseError](err)
	if !ok {
		return err
	}
	return &ParseError{
		What: "heap key", Text: whole, Offset: offset + e.Offset, Width: e.Width,
		Reason: e.Reason, Valid: append(e.Valid, "*"),
	}
}

// String returns the text that [ParseHeapKey] reads back to k.
func (k HeapKey) String() string {
	text := "*"
	if !k.AnyType {
		text = k.Type.String()
	}
	if k.Usage != 0 {
		text += ";" + k.Usage.String()
	}
	return text
}

// Matches reports whether h has all bits of the key. [Optimal] is ignored: it is
// a hint, which no heap has.
func (k HeapKey) Matches(h Heap) bool {
	return (k.AnyType || h.Type.Has(k.Type&^Optimal)) && h.Usage.Has(k.Usage)
}

// MarshalText returns the text of [HeapKey.String].
func (k HeapKey) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads what [ParseHeapKey] reads.
func (k *HeapKey) UnmarshalText(text []byte) error { return unmarshal(k, text, ParseHeapKey) }
