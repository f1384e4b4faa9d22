package memory

import (
	"fmt"
	"strconv"
	"strings"
)

// bitName names a set of bits. In a table, larger sets come before the sets
// that they contain, so that the greedy printer finds the shortest text.
type bitName struct {
	bits uint32
	name string
}

// noBits is the text of the empty set.
const noBits = "none"

// formatBits prints x with the names of table, and what has no name as one
// hexadecimal number at the end.
func formatBits(x uint32, table []bitName) string {
	if x == 0 {
		return noBits
	}
	var b strings.Builder
	for _, n := range table {
		if x&n.bits != n.bits {
			continue
		}
		if b.Len() > 0 {
			b.WriteByte('|')
		}
		b.WriteString(n.name)
		x &^= n.bits
	}
	if x != 0 {
		if b.Len() > 0 {
			b.WriteByte('|')
		}
		b.WriteString("0x")
		b.WriteString(strconv.FormatUint(uint64(x), 16))
	}
	return b.String()
}

// bitNames returns the names of table, and "none".
func bitNames(table []bitName) []string {
	names := make([]string, 0, len(table)+1)
	for _, n := range table {
		names = append(names, n.name)
	}
	return append(names, noBits)
}

// parseBits reads names of table and hexadecimal numbers joined by '|'. Case and
// spaces around a name don't matter; a name given twice is harmless.
func parseBits(what, s string, table []bitName) (uint32, error) {
	if strings.EqualFold(strings.TrimSpace(s), noBits) {
		return 0, nil
	}
	x, offset := uint32(0), 0
	for part := range strings.SplitSeq(s, "|") {
		name := strings.TrimSpace(part)
		bits, reason := parseBit(name, table)
		if reason != "" {
			at := offset
			if name != "" {
				at += strings.Index(part, name)
			}
			return 0, &ParseError{What: what, Text: s, Offset: at, Width: len(name), Reason: reason, Valid: bitNames(table)}
		}
		x |= bits
		offset += len(part) + 1
	}
	return x, nil
}

func parseBit(name string, table []bitName) (bits uint32, reason string) {
	if name == "" {
		return 0, "empty name"
	}
	for _, n := range table {
		if strings.EqualFold(name, n.name) {
			return n.bits, ""
		}
	}
	if len(name) > 2 && name[0] == '0' && (name[1] == 'x' || name[1] == 'X') {
		x, err := strconv.ParseUint(name[2:], 16, 32)
		if err != nil {
			return 0, fmt.Sprintf("%q is not a 32-bit hexadecimal number", name)
		}
		return uint32(x), ""
	}
	if strings.EqualFold(name, noBits) {
		return 0, fmt.Sprintf("%q stands alone, it can't be joined with other names", name)
	}
	return 0, fmt.Sprintf("unknown name %q", name)
}

// Type is a set of properties of memory: who sees it, at what distance, and
// whether host and device agree on its contents without help.
type Type uint32

// Properties of memory. Local memory is visible memory that is also near: the
// local names contain the bit of the visible ones, plus one of their own.
const (
	// Optimal asks for whichever memory suits the usage best; the other bits
	// become wishes. It is a hint in a request, not a property of a heap.
	Optimal Type = 1 << 0

	// HostVisible memory can be mapped into the address space of the host.
	HostVisible Type = 1 << 1

	// HostCoherent memory needs no flush after a host write and no invalidate
	// before a host read.
	HostCoherent Type = 1 << 2

	// HostCached memory goes through the caches of the host: host reads are
	// fast, and without HostCoherent they may be stale until invalidated.
	HostCached Type = 1 << 3

	// DeviceVisible memory can be used by work on the device, near or far.
	DeviceVisible Type = 1 << 4

	// DeviceLocal memory is the device's own: the fastest for its work. The
	// host sees it only if HostVisible is there too.
	DeviceLocal = DeviceVisible | 1<<5

	// HostLocal memory is the host's own: ordinary memory, fast for the host.
	// The device sees it only if DeviceVisible is there too.
	HostLocal = HostVisible | 1<<6
)

var typeNames = []bitName{
	{uint32(DeviceLocal), "device_local"},
	{uint32(HostLocal), "host_local"},
	{uint32(Optimal), "optimal"},
	{uint32(DeviceVisible), "device_visible"},
	{uint32(HostVisible), "host_visible"},
	{uint32(HostCoherent), "host_coherent"},
	{uint32(HostCached), "host_cached"},
}

// ParseType reads names joined by '|', such as "device_local|host_visible", in
// any case; "none" is no bits, and 0x… gives bits without a name.
func ParseType(s string) (Type, error) {
	x, err := parseBits("memory type", s, typeNames)
	return Type(x), err
}

// Has reports whether t has all of bits.
func (t Type) Has(bits Type) bool { return t&bits == bits }

// String returns the shortest text that [ParseType] reads back to t.
func (t Type) String() string { return formatBits(uint32(t), typeNames) }

// MarshalText returns the text of [Type.String].
func (t Type) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads what [ParseType] reads.
func (t *Type) UnmarshalText(text []byte) error { return unmarshal(t, text, ParseType) }

// Usage is a set of things that a buffer may be used for. A heap lists what it
// allows; a request, what it needs.
type Usage uint32

// UsageBits is the number of bits that named usages fit in.
const UsageBits = 24

// Uses of a buffer.
const (
	// TransferSource: fills, copies and updates read from it.
	TransferSource Usage = 1 << 0

	// TransferTarget: fills, copies and updates write to it.
	TransferTarget Usage = 1 << 1

	// Transfer is both directions.
	Transfer = TransferSource | TransferTarget

	// DispatchIndirectParameters: the device reads the size of a dispatch
	// from it.
	DispatchIndirectParameters Usage = 1 << 4

	// DispatchUniformRead: kernels read it as a small block of constants.
	DispatchUniformRead Usage = 1 << 5

	// DispatchStorageRead: kernels read it as general storage.
	DispatchStorageRead Usage = 1 << 6

	// DispatchStorageWrite: kernels write it as general storage.
	DispatchStorageWrite Usage = 1 << 7

	// DispatchStorage is storage read and written.
	DispatchStorage = DispatchStorageRead | DispatchStorageWrite

	// Dispatch is everything that kernels do with a buffer. (IREE's bit set
	// of this name has image access too, which Halyard doesn't have.)
	Dispatch = DispatchIndirectParameters | DispatchUniformRead | DispatchStorage

	// SharingExport: it can be handed out of the process or to another API.
	SharingExport Usage = 1 << 12

	// SharingReplicate: devices may each keep a copy instead of sharing one.
	SharingReplicate Usage = 1 << 13

	// SharingConcurrent: several devices or queues use it at the same time.
	SharingConcurrent Usage = 1 << 14

	// SharingImmutable: once filled it is only read.
	SharingImmutable Usage = 1 << 15

	// MappingScoped: the host maps it for a while and unmaps it again.
	MappingScoped Usage = 1 << 16

	// MappingPersistent: the host keeps it mapped while the device uses it.
	MappingPersistent Usage = 1 << 17

	// Mapping is scoped and persistent mapping.
	Mapping = MappingScoped | MappingPersistent

	// Default is what most buffers need: storage for kernels, and transfers.
	Default = DispatchStorage | Transfer
)

var usageNames = []bitName{
	{uint32(Dispatch), "dispatch"},
	{uint32(Default), "default"},
	{uint32(Transfer), "transfer"},
	{uint32(DispatchStorage), "dispatch_storage"},
	{uint32(Mapping), "mapping"},
	{uint32(TransferSource), "transfer_source"},
	{uint32(TransferTarget), "transfer_target"},
	{uint32(DispatchIndirectParameters), "dispatch_indirect_parameters"},
	{uint32(DispatchUniformRead), "dispatch_uniform_read"},
	{uint32(DispatchStorageRead), "dispatch_storage_read"},
	{uint32(DispatchStorageWrite), "dispatch_storage_write"},
	{uint32(SharingExport), "sharing_export"},
	{uint32(SharingReplicate), "sharing_replicate"},
	{uint32(SharingConcurrent), "sharing_concurrent"},
	{uint32(SharingImmutable), "sharing_immutable"},
	{uint32(MappingScoped), "mapping_scoped"},
	{uint32(MappingPersistent), "mapping_persistent"},
}

// ParseUsage reads names joined by '|', such as "transfer|mapping_scoped", in
// any case; "none" is no bits, and 0x… gives bits without a name.
func ParseUsage(s string) (Usage, error) {
	x, err := parseBits("usage", s, usageNames)
	return Usage(x), err
}

// Has reports whether u has all of bits.
func (u Usage) Has(bits Usage) bool { return u&bits == bits }

// String returns the shortest text that [ParseUsage] reads back to u.
func (u Usage) String() string { return formatBits(uint32(u), usageNames) }

// MarshalText returns the text of [Usage.String].
func (u Usage) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText reads what [ParseUsage] reads.
func (u *Usage) UnmarshalText(text []byte) error { return unmarshal(u, text, ParseUsage) }

// Access is a set of ways in which a mapping or an operation touches memory.
type Access uint32

// AccessBits is the number of bits that named accesses fit in.
const AccessBits = 8

// Ways to touch memory.
const (
	// Read sees what is there.
	Read Access = 1 << 0

	// Write changes what is there.
	Write Access = 1 << 1

	// Discard says that what was there before may be lost: nothing needs to be
	// brought in first.
	Discard Access = 1 << 2

	// ReadWrite sees and changes; its text is "read|write".
	ReadWrite = Read | Write

	// All is every way at once.
	All = Read | Write | Discard
)

var accessNames = []bitName{
	{uint32(All), "all"},
	{uint32(Read), "read"},
	{uint32(Write), "write"},
	{uint32(Discard), "discard"},
}

// ParseAccess reads names joined by '|', such as "write|discard", in any case;
// "none" is no bits, and 0x… gives bits without a name.
func ParseAccess(s string) (Access, error) {
	x, err := parseBits("access", s, accessNames)
	return Access(x), err
}

// Has reports whether a has all of bits.
func (a Access) Has(bits Access) bool { return a&bits == bits }

// String returns the shortest text that [ParseAccess] reads back to a.
func (a Access) String() string { return formatBits(uint32(a), accessNames) }

// MarshalText returns the text of [Access.String].
func (a Access) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText reads what [ParseAccess] reads.
func (a *Access) UnmarshalText(text []byte) error { return unmarshal(a, text, ParseAccess) }

// unmarshal stores what parse makes of text in p; on error p is left alone.
func unmarshal[T any](p *T, text []byte, parse func(string) (T, error)) error {
	x, err := parse(string(text))
	if err != nil {
		return err
	}
	*p = x
	return nil
}
