package vmem

import "errors"

// Errors from wrong arguments: nothing was done.
var (
	// ErrMisaligned is an offset or a size which is not a multiple of
	// [PageSize], or one that cuts through a page of a [Pages].
	ErrMisaligned = errors.New("not aligned to the page size")

	// ErrRange is a range that is negative, or does not lie inside its region,
	// or a size that is not possible at all.
	ErrRange = errors.New("out of range")

	// ErrForeignHandle is a handle that this Pages never made; the zero
	// Handle is one.
	ErrForeignHandle = errors.New("handle is not of these pages")
)

// Errors from the state of the place or of the handle: nothing was done.
var (
	// ErrReleased comes from every call on a region after its Release.
	ErrReleased = errors.New("region is released")

	// ErrClosed comes from calls on a Pages after its Close.
	ErrClosed = errors.New("pages are closed")

	// ErrNotCommitted is a view of memory that is neither committed nor mapped.
	ErrNotCommitted = errors.New("memory is not committed")

	// ErrCommitted is a Map over committed memory: Decommit it first.
	ErrCommitted = errors.New("memory is committed")

	// ErrMapped is a Map, Commit or Decommit over mapped pages: Unmap them
	// first.
	ErrMapped = errors.New("memory is mapped")

	// ErrNotMapped is an Unmap of a place where no page of that Pages is
	// mapped.
	ErrNotMapped = errors.New("memory is not mapped")

	// ErrDoubleFree is a Free of a handle that was freed before.
	ErrDoubleFree = errors.New("handle was freed before")

	// ErrFreedHandle is a Map of a handle that was freed.
	ErrFreedHandle = errors.New("handle is freed")
)

// Errors from a lack of something: nothing was done, and the call may work
// later.
var (
	// ErrExhausted is a Create when the whole capacity is in use. A page that
	// was freed but is still mapped somewhere is in use.
	ErrExhausted = errors.New("capacity is exhausted")

	// ErrTooManyMappings is the kernel's refusal to make one more mapping when
	// the process is at the limit vm.max_map_count. It stays until there is
	// room for some 200 of them, which are kept for the Go runtime.
	ErrTooManyMappings = errors.New("too many memory mappings")
)
