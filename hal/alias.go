package hal

import (
	"context"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// What an embedder needs of the packages below, under one import. go doc of the type
// named on the right shows its fields and methods.
type (
	// Bytes is a size; it prints as 1.5GiB, and %d or int64 give the number. Multiply
	// units by a Bytes: hal.Bytes(n) * hal.MiB. JSON has it as a number.
	Bytes = memory.Bytes
	// MemoryType are bits that say what kind of memory a heap is, such as [DeviceLocal].
	MemoryType = memory.Type
	// Usage are bits that say what memory will be used for, such as [Transfer].
	Usage = memory.Usage
	// Access are bits that say how memory will be accessed, such as [ReadAccess].
	Access = memory.Access
	// Heap is a kind of memory that a device has, with its capacity.
	Heap = memory.Heap

	// Semaphore is a timeline semaphore: a value that only rises, or fails once.
	// s.At(v) is the fence of a value; Query, Signal, Fail and Wait(ctx, v) are the host's.
	Semaphore = queue.Semaphore
	// Fence is a list of semaphore values, to wait for or to signal: a.At(1) is one,
	// a.At(1).And(b.At(2)) two, and f.Add(s, v) grows one. It has Wait(ctx) and Query.
	Fence = queue.Fence
	// Point is a place on a queue's timeline. It has Reached and Wait(ctx).
	Point = queue.Point
	// Frontier is a set of points, of several queues: after all of these. It has
	// Reached and Wait(ctx). See [After], [ReadyNow] and [Join].
	Frontier = queue.Frontier
	// QueueID names a queue; it is never used again in the process.
	QueueID = queue.ID

	// Tag is an interned label of a buffer's purpose or owner. See [InternTag].
	Tag = allocator.Tag
	// OOMError says why an allocation failed: what was asked, the figures at that
	// moment, what was tried, and one line of advice.
	OOMError = allocator.OOMError
	// LayerStats are a layer's name, its spec and its [AllocatorStats].
	LayerStats = allocator.LayerStats
	// AllocatorStats are the figures of one layer.
	AllocatorStats = allocator.Stats
	// Block is a piece of memory as layers trade it; see [Buffer.Block].
	Block = allocator.Block
	// HelpRequest is the error of a flag or spec that asks for help: print it.
	HelpRequest = allocator.HelpRequest
	// SpecError is the error of a flag or spec that can't be read. It shows the place.
	SpecError = spec.Error
	// CallPanic is the cause with which a [Queue.Call] fails whose function panicked.
	CallPanic = host.PanicError
	// DeviceInfo describes a device: its heaps, queues and sources of memory.
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
	DeviceLocal   = memory.DeviceLocal
	DeviceVisible = memory.DeviceVisible
	HostLocal     = memory.HostLocal
	HostVisible   = memory.HostVisible
	HostCoherent  = memory.HostCoherent
	HostCached    = memory.HostCached
)

// Usages; see package hal/memory for each.
const (
	Transfer        = memory.Transfer
	DispatchStorage = memory.DispatchStorage
	Mapping         = memory.Mapping
	DefaultUsage    = memory.Default
)

// Accesses; see package hal/memory for each.
const (
	ReadAccess  = memory.Read
	WriteAccess = memory.Write
)

// ErrNotIncreasing is what [Semaphore.Signal] returns for a value that isn't above the
// present one.
var ErrNotIncreasing = queue.ErrNotIncreasing

// ParseBytes reads a size: 4096, 64KiB, 1.5GiB. See package hal/memory.
func ParseBytes(s string) (Bytes, error) { return memory.ParseBytes(s) }

// NewSemaphore returns a semaphore at value.
func NewSemaphore(value uint64) *Semaphore { return queue.NewSemaphore(value) }

// After is the frontier of a point.
func After(p Point) Frontier { return queue.After(p) }

// ReadyNow is the frontier of memory that nothing may still touch.
func ReadyNow() Frontier { return queue.ReadyNow() }

// Join is the frontier after both a and b.
func Join(a, b Frontier) Frontier { return queue.Join(a, b) }

// InternTag returns the tag of a label. Keep it: the look-up takes a lock.
func InternTag(label string) Tag { return allocator.InternTag(label) }

// WithTag returns a context whose allocations carry the tag.
func WithTag(ctx context.Context, t Tag) context.Context { return allocator.WithTag(ctx, t) }

// FenceOf is the fence of one value of s, as s.At(value). It also makes the compiler
// carry At's body along in this package, so that callers of either get the fence on
// their stack.
func FenceOf(s *Semaphore, value uint64) Fence { return s.At(value) }
