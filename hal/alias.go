package hal

import (
	"context"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// What an embedder needs of the packages below, under one import.
type (
	// Bytes is a size.
	Bytes = memory.Bytes
	// MemoryType, Usage and Access say what memory is wanted for.
	MemoryType = memory.Type
	Usage      = memory.Usage
	Access     = memory.Access
	// Heap is a kind of memory that a device has.
	Heap = memory.Heap

	// Semaphore is a timeline semaphore, At one value of one, Fence a list of them.
	Semaphore = queue.Semaphore
	At        = queue.At
	Fence     = queue.Fence
	// Point is a place on a queue's timeline, Frontier a set of them.
	Point    = queue.Point
	Frontier = queue.Frontier

	// Tag is an interned label of a buffer's purpose or owner.
	Tag = allocator.Tag
	// OOMError says why an allocation failed. LayerStats are a layer's figures.
	OOMError   = allocator.OOMError
	LayerStats = allocator.LayerStats
	// HelpRequest is the error of a flag or spec that asks for help: print it.
	HelpRequest = allocator.HelpRequest
	// DeviceInfo describes a device.
	DeviceInfo = driver.Info
)

// Units of [Bytes].
const (
	KiB = memory.KiB
	MiB = memory.MiB
	GiB = memory.GiB
	TiB = memory.TiB
)

// Memory types; see package hal/memory for each.
const (
	DeviceLocal  = memory.DeviceLocal
	HostLocal    = memory.HostLocal
	HostVisible  = memory.HostVisible
	HostCoherent = memory.HostCoherent
)

// Usages; see package hal/memory for each.
const (
	Transfer        = memory.Transfer
	DispatchStorage = memory.DispatchStorage
	Mapping         = memory.Mapping
)

// NewSemaphore returns a semaphore at value.
func NewSemaphore(value uint64) *Semaphore { return queue.NewSemaphore(value) }

// After is the frontier of a point; ReadyNow that of memory nothing touches.
func After(p Point) Frontier { return queue.After(p) }

// ReadyNow is the frontier of memory that nothing may still touch.
func ReadyNow() Frontier { return queue.ReadyNow() }

// InternTag returns the tag of a label. Keep it: the look-up takes a lock.
func InternTag(label string) Tag { return allocator.InternTag(label) }

// WithTag returns a context whose allocations carry the tag.
func WithTag(ctx context.Context, t Tag) context.Context { return allocator.WithTag(ctx, t) }

// FenceOf is the fence of one value of s, as s.At(value). It also makes the compiler
// carry At's body along in this package, so that callers of either get the fence on
// their stack.
func FenceOf(s *Semaphore, value uint64) Fence { return s.At(value) }
