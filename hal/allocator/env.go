package allocator

import (
	"time"

	"go.uber.org/zap"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Env is what a layer's constructor gets, so that a layer that needs a time, a
// fill or the capacity has it without knowing the device.
type Env struct {
	// Owner goes into every [Keeper]: how a handle finds its device.
	Owner any
	// Heaps are the device's; a request names one by index.
	Heaps memory.Heaps
	// Device is for sources. Other layers have no business with it.
	Device driver.Device
	// Now is the time, for idle times and statistics.
	Now func() time.Time
	// Log is for what a person should know: never on a hit, never under a lock.
	Log *zap.Logger
	// Fill queues a fill of size bytes at addr with pattern, after f, and returns the
	// frontier after it, or an error.
	Fill func(addr uint64, size memory.Bytes, pattern byte, f queue.Frontier) (queue.Frontier, error)
}

// Capacity is the size of a heap, or 0 if it isn't known.
func (e *Env) Capacity(heap int) memory.Bytes {
	if heap < 0 || heap >= len(e.Heaps) {
		return 0
	}
	return e.Heaps[heap].Capacity
}

// VirtualMemory is the capability of a source whose memory comes in pages that can
// be mapped anywhere: what block builds its one contiguous range on. What a layer
// does through it the source counts.
type VirtualMemory interface {
	// Virtual returns the pages and addresses of a heap, or nil if it has none.
	Virtual(heap int) Virtual
}

// Virtual is a heap's pages and addresses, counted by the source. Calls must not be
// made under a lock; outcomes are OK, Exhausted, Lost, or OverLimit from a layer
// between.
type Virtual interface {
	// Granularity is the size of a page.
	Granularity() memory.Bytes
	// Reserve and Unreserve take and give address space.
	Reserve(size memory.Bytes) (addr uint64, o Outcome)
	Unreserve(addr uint64, size memory.Bytes)
	// Grow takes n pages from the driver and maps them side by side at addr. On another
	// outcome than OK nothing was taken or mapped.
	Grow(addr uint64, n int) Outcome
	// Shrink unmaps the n pages at addr, which nothing may still touch, and gives them
	// back to the driver.
	Shrink(addr uint64, n int) Outcome
	// Move unmaps the n pages at from, which nothing may still touch, and maps them at
	// to, on either side in one run. On another outcome than OK all is as it was.
	Move(from, to uint64, n int) Outcome
}
