// Package vmem is the operating system's memory behind a device that plays a
// GPU on the host: it reserves address space, commits and decommits parts of
// it, and maps pages that can be moved from one address to another.
//
// A [Region] is reserved address space. It costs no memory, whatever its size:
// a region of 1 TiB works on a laptop. [Region.Commit] makes a part readable
// and writable, filled with zeros; memory is used when a page is first
// touched. [Region.Decommit] gives it back. This works on Linux, macOS,
// FreeBSD and Windows.
//
// [Pages] is memory that has no address of its own until it is mapped, as
// cuMemCreate and cuMemMap have it: one page can be mapped in several places,
// and it keeps its contents while it moves. Only Linux has it; elsewhere
// [NewPages] returns an error that matches [errors.ErrUnsupported].
//
//	r, err := vmem.Reserve(1 << 40)
//	...
//	defer r.Release()
//	pages, err := vmem.NewPages(16<<30, 2<<20)
//	...
//	defer pages.Close()
//	h, err := pages.Create()
//	err = pages.Map(r, 0, h)
//	b, err := r.Bytes(0, 2<<20) // the page
//	err = pages.Unmap(r, 0, 2<<20)
//	err = pages.Map(r, 64<<20, h) // the same bytes at another address
//
// # State of a page of address space
//
//	             Commit                 Pages.Map
//	committed <---------- reserved ------------------> mapped
//	          ---------->          <------------------
//	            Decommit               Pages.Unmap
//
// Reserved memory faults when it is touched, and Go ends the program for that.
// [Region.Bytes] and [Region.At] check the state, so a view is good when it is
// handed out; it is the caller's part not to use it past Decommit, Unmap or
// Release. After Release the same addresses may come back as anything, even as
// a part of the Go heap: keep no views.
//
// The garbage collector does not look into this memory. Store no Go pointers
// in it.
//
// # Concurrency
//
// All methods may be called at the same time from any goroutine. Calls on
// disjoint ranges do not disturb each other; of two calls on the same range one
// comes first, and the other finds what it left. The bytes themselves are not
// guarded by anything, as with any slice.
//
// A region's lock is held during its system calls (the kernel takes its own
// lock on the whole address space there), so a view taken during a large
// Decommit waits for it. The order of the locks is
//
//	Region.mu  before  Pages.mu  before  the package's spare mappings
//
// and no two regions or two Pages are ever locked together.
//
// # Cost
//
// Measured on 2 cores of an AMD EPYC, Linux 6.18, in a virtual machine; the
// benchmarks print them for yours. What costs is that pages are touched for the
// first time and given back (1.6 µs for each 4 KiB of committed memory, 3 µs
// of a [Pages]), not the calls.
//
//	                                     4 KiB     2 MiB
//	Commit + Decommit, untouched          6 µs      6 µs
//	Commit + touch + Decommit            10 µs    830 µs
//	Create + Map + Unmap + Free          11 µs     10 µs
//	Create + Map + touch + Unmap + Free  16 µs    1.6 ms
//	Map elsewhere + Unmap                 9 µs      8 µs
//	  the same, touched each time        11 µs    750 µs
//	Create + Free, never mapped          1.3 µs
//	Bytes or At, of 4,096 extents       135 ns, no allocation
//
// The first Reserve takes some 0.3 ms more, for the mappings to spare.
//
// # Limits
//
// Linux allows a process 65,530 mappings unless vm.max_map_count says
// otherwise. Neighbours of the same kind count as one, so do consecutive pages
// at consecutive addresses; that is why [Pages.Create] hands out the lowest
// free page. At the limit Commit, Map and Reserve fail with
// [ErrTooManyMappings] and leave everything as it was; Decommit, Unmap and
// Release go on working. (A Decommit or Unmap in the middle of a mapping makes
// one more of it, so it too can fail in the end.)
//
// The Go runtime needs mappings as well, and ends the program when it gets none.
// So the package holds 128 mappings to spare, gives them up when the kernel
// refuses one, and maps nothing more until there is room for them and some more:
// treat the error as a reason to unmap or to release something, not to try
// again.
package vmem
