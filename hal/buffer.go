package hal

import (
	"context"
	"fmt"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Buffer is a handle of device memory: a plain value of four words, comparable,
// good until its release. A handle used after that is ErrReleased, also when its
// memory is somebody else's. The zero Buffer belongs to nobody (ErrForeign).
// Methods are safe for concurrent use; of several releases one succeeds.
type Buffer struct{ block allocator.Block }

// Device returns the buffer's device, or nil for the zero Buffer.
func (b Buffer) Device() *Device {
	if b.block.Keeper == nil {
		return nil
	}
	d, _ := b.block.Keeper.Owner.(*Device)
	return d
}

// owns checks that b is d's.
func (d *Device) owns(b Buffer) error {
	if k := b.block.Keeper; k == nil || k.Owner != any(d) {
		return fmt.Errorf("hal: %w", ErrForeign)
	}
	return nil
}

func (b Buffer) info() (allocator.Info, error) {
	if b.block.Keeper == nil {
		return allocator.Info{}, fmt.Errorf("hal: %w", ErrForeign)
	}
	i, o := b.block.Keeper.Ledger.Info(b.block.ID)
	if o != allocator.OK {
		return i, fmt.Errorf("hal: %w", o.Err())
	}
	return i, nil
}

// Size is how many bytes were asked for, or 0 if b was released.
func (b Buffer) Size() Bytes {
	i, err := b.info()
	if err != nil {
		return 0
	}
	return i.Asked
}

// Granted is how many bytes b occupies, at least its size.
func (b Buffer) Granted() Bytes { return b.block.Size }

// Valid reports whether b has not been released.
func (b Buffer) Valid() bool {
	_, err := b.info()
	return err == nil
}

// String names the buffer for people.
func (b Buffer) String() string {
	if b.block.Keeper == nil {
		return "buffer(none)"
	}
	i, err := b.info()
	if err != nil {
		return fmt.Sprintf("buffer(%#x, released)", b.block.Addr)
	}
	return fmt.Sprintf("buffer(%#x, %v)", b.block.Addr, i.Asked)
}

// All is the span of the whole buffer.
func (b Buffer) All() Span { return Span{buffer: b, whole: true} }

// Span is the part of the buffer of size bytes from offset. Its bounds are checked
// where it is used. A span can't be released.
func (b Buffer) Span(offset, size Bytes) Span { return Span{buffer: b, off: offset, size: size} }

// Span is a part of a buffer.
type Span struct {
	buffer    Buffer
	off, size Bytes
	whole     bool
}

// Buffer is what the span is a part of.
func (s Span) Buffer() Buffer { return s.buffer }

// Offset is where the span begins in its buffer.
func (s Span) Offset() Bytes { return s.off }

// Size is the span's size.
func (s Span) Size() Bytes {
	if s.whole {
		return s.buffer.Size()
	}
	return s.size
}

// Release releases b from the host: the memory is free after everything issued on
// it so far. It never waits. Errors: ErrReleased, ErrForeign, ErrMapped.
func (b Buffer) Release() error { return b.ReleaseAfter(queue.ReadyNow()) }

// ReleaseAfter is Release after f as well, and after every recorded use: for work
// that Halyard doesn't see.
func (b Buffer) ReleaseAfter(f Frontier) error {
	d := b.Device()
	if d == nil {
		return fmt.Errorf("hal: %w", ErrForeign)
	}
	return d.free(b.block, f)
}

// UsedUntil records that work which Halyard didn't submit uses b until p, so that b
// is not free before.
func (b Buffer) UsedUntil(p Point) error { return b.use(queue.After(p)) }

func (b Buffer) use(f Frontier) error {
	if _, err := b.info(); err != nil {
		return err
	}
	if o := b.block.Keeper.Ledger.Use(b.block.ID, f); o != allocator.OK {
		return fmt.Errorf("hal: %w", o.Err())
	}
	return nil
}

// Address is where the buffer lies in the device's address space. To hand it to
// code outside Halyard use [Buffer.Export], which takes that code into account.
func (b Buffer) Address() uint64 { return b.block.Addr }

// Block is b as the layer that minted it knows it: for tests and tools that tell
// buffers apart by identity. It is not the caller's to free.
func (b Buffer) Block() allocator.Block { return b.block }

// Export returns the raw device pointer for work outside Halyard. From then on b
// may be in use by work that nobody declares: once released it is free after
// everything issued in the process until its release. Owners who know better
// declare with [Buffer.UsedUntil] and take [Buffer.Address].
func (b Buffer) Export() (uintptr, error) {
	if err := b.use(queue.Frontier{}); err != nil {
		return 0, err
	}
	return uintptr(b.block.Addr), nil
}

// Map returns b's bytes, for memory that is host-visible. It waits, until ctx is
// done, for everything issued on b, also meanwhile; the caller keeps operations
// issued later and its own accesses apart. While b is mapped it can't be released. Each Map
// wants an [Buffer.Unmap].
func (b Buffer) Map(ctx context.Context) ([]byte, error) {
	d := b.Device()
	if d == nil {
		return nil, fmt.Errorf("hal: map: %w", ErrForeign)
	}
	k := b.block.Keeper
	if o := k.Ledger.Pin(b.block.ID, 1); o != allocator.OK {
		return nil, fmt.Errorf("hal: map: %w", o.Err())
	}
	bytes, err := d.view(ctx, b)
	if err != nil {
		k.Ledger.Pin(b.block.ID, -1)
		return nil, fmt.Errorf("hal: map: %w", err)
	}
	return bytes, nil
}

func (d *Device) view(ctx context.Context, b Buffer) ([]byte, error) {
	i, err := b.info()
	if err != nil {
		return nil, err
	}
	if h := d.info.Heaps[i.Kind.Heap()]; !h.Type.Has(memory.HostVisible) {
		return nil, fmt.Errorf("%w: heap %s is %v, not host_visible", ErrUnsupported, h.Name, h.Type)
	}
	for !i.Uses.Reached() { // while it waits, what was deferred may have been issued
		if err := i.Uses.Wait(ctx); err != nil {
			return nil, err
		}
		if i, err = b.info(); err != nil {
			return nil, err
		}
	}
	if i.Asked == 0 {
		return []byte{}, nil
	}
	return d.driver.View(b.block.Addr, i.Asked)
}

// Unmap ends a Map. The slice must not be used after it.
func (b Buffer) Unmap() error {
	i, err := b.info()
	if err != nil {
		return err
	}
	if i.Pins == 0 {
		return fmt.Errorf("hal: unmap: %w", ErrNotMapped)
	}
	if o := b.block.Keeper.Ledger.Pin(b.block.ID, -1); o != allocator.OK {
		return fmt.Errorf("hal: unmap: %w", o.Err())
	}
	return nil
}
