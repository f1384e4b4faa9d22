// Package driver is what a device implements: small interfaces, each for one
// ability. Everything else (handles, recorded uses, the ladder, errors, the order
// of closing) is written once, in hal and hal/allocator, and shared by all devices.
//
// A [Driver] finds and opens devices. A [Device] has heaps, queues and at least
// the [Raw] way to get memory; [Pool] and [Virtual] are asked for by type. The
// allocator stack's sources are written against these interfaces.
//
// Unless a method says otherwise it is safe for concurrent use, may block and may
// be slow: it is called without any lock held, except that an executor's Start is
// called under its queue's issue lock (see hal/queue).
package driver

import (
	"errors"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

var (
	// ErrOutOfMemory is what an allocation returns when the device has no room.
	// Other errors of an allocation mean that something is broken.
	ErrOutOfMemory = errors.New("driver: out of memory")
	// ErrUnsupported says that the device, or this system, can't do it; the text says why.
	ErrUnsupported = errors.New("driver: not supported")
)

// Driver finds and opens devices of one kind. It is registered by name.
type Driver interface {
	// Table names the driver and its options: --device=NAME:OPTIONS.
	Table() *spec.Table
	// Devices describes what Open would find, with default options. A driver whose
	// hardware or library is missing returns an error that says so.
	Devices() ([]Info, error)
	// Open opens a device. The options were parsed by Table.
	Open(options *spec.Values) (Device, error)
}

// Info describes a device.
type Info struct {
	Name        string       `json:"name"`               // as Open takes it, such as host or cuda:1
	Description string       `json:"description"`        // for people
	Heaps       memory.Heaps `json:"heaps"`              // in order of preference
	Sources     []string     `json:"sources"`            // sources of memory that work here, the best to suballocate from first
	Direct      string       `json:"direct"`             // the source for requests as they come; empty is raw
	Queues      int          `json:"queues"`             // queues opened by default
	Modelled    string       `json:"modelled,omitempty"` // what is modelled and not measured, or empty
}

// Device is an open device.
type Device interface {
	Info() Info
	// NewQueue makes a queue with an executor of this device.
	NewQueue(hook queue.Hook) (*queue.Queue, error)
	// MemInfo asks the driver what is free, and how much there is, of a heap.
	MemInfo(heap int) (free, total memory.Bytes, err error)
	// View returns memory of a host-visible heap as bytes.
	View(addr uint64, size memory.Bytes) ([]byte, error)
	// Close gives everything back. Queues have been closed and have drained, or the
	// device is lost. An error says what was still allocated.
	Close() error
}

// Raw is the driver's plain way to get memory. Every device has it.
type Raw interface {
	// Alloc returns at least size bytes at a multiple of align (a power of two), and
	// how many bytes were taken from the heap.
	Alloc(heap int, size, align memory.Bytes) (addr uint64, taken memory.Bytes, err error)
	// Free gives back what Alloc returned. Nothing may still touch it.
	Free(heap int, addr uint64) error
}

// Pool is a stream-ordered pool: the driver keeps what is freed, up to a threshold.
type Pool interface {
	// PoolAlloc is as Raw.Alloc; the memory may be used by what comes after valid.
	PoolAlloc(heap int, size, align memory.Bytes) (addr uint64, taken memory.Bytes, valid queue.Frontier, err error)
	// PoolFree gives back what PoolAlloc returned, once after is reached, without blocking.
	PoolFree(heap int, addr uint64, after queue.Frontier) error
	// SetPoolThreshold sets how many free bytes the pool keeps when the device is idle.
	SetPoolThreshold(heap int, keep memory.Bytes) error
	// PoolTrim gives free memory beyond keep back and returns how much that was.
	PoolTrim(heap int, keep memory.Bytes) (memory.Bytes, error)
	// PoolHeld is what the pool has taken from the heap.
	PoolHeld(heap int) (memory.Bytes, error)
}

// Page names a page of physical memory.
type Page uint64

// Pages are physical memory in pages of one size, without addresses.
type Pages interface {
	// Granularity is the size of a page of heap, a power of two, or 0 if the heap
	// has no pages.
	Granularity(heap int) memory.Bytes
	// Create takes a page from the heap.
	Create(heap int) (Page, error)
	// Release gives a page back; its memory goes when it is mapped nowhere.
	Release(heap int, p Page) error
}

// Addresses are address space without memory.
type Addresses interface {
	// Reserve reserves size bytes (a multiple of the granularity) of addresses.
	Reserve(heap int, size memory.Bytes) (addr uint64, err error)
	// Unreserve gives a whole reservation back; nothing may be mapped in it.
	Unreserve(heap int, addr uint64, size memory.Bytes) error
	// Map maps pages side by side at addr and lets the device access them. A page may
	// be mapped at several places. On an error nothing is mapped.
	Map(heap int, addr uint64, pages []Page) error
	// Unmap takes n pages away from addr. Nothing may still touch them there.
	Unmap(heap int, addr uint64, n int) error
}

// Virtual is memory whose pages and addresses are taken apart, so that pages can move.
type Virtual interface {
	Pages
	Addresses
}

// Importer takes memory that somebody else allocated.
type Importer interface {
	// Import makes memory at host or device address addr usable by the device and
	// returns the address it has there, and its heap.
	Import(addr uintptr, size memory.Bytes) (device uint64, heap int, err error)
	// Unimport ends that.
	Unimport(device uint64, size memory.Bytes) error
}
