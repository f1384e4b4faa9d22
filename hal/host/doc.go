// Package host is the device that is always there: host memory played as device
// memory, with real asynchronous queues. It needs no GPU, no driver and no cgo,
// and is what tests, examples and replays run on.
//
//	d, err := host.Open(host.Config{Capacity: 80 * memory.GiB})
//	...
//	defer d.Close()
//	q, err := d.NewQueue(nil)
//
// Most programs open it by name through hal: "host", or
// "host:capacity=24GiB,queues=2". "host:help" lists the options.
//
// # Heaps
//
//	0  device  device_local                    raw, pool and (Linux) pages
//	1  host    host_local, coherent, cached,   raw and pool; View works
//	           device_visible
//	2  shared  device_local, host_visible,     raw and pool; View works
//	           coherent
//
// All are ordinary memory of the process; the device heap can't be viewed, so
// that a program that forgets to stage its data fails here as it would on a GPU.
//
// A heap's capacity is a number: address space is reserved as it is needed, and
// memory is used when a page of it is first touched. A device of many TiB opens
// on a laptop. Raw allocations, the pool and pages draw from the one capacity of
// their heap together.
//
// What is taken from the capacity is the size rounded up to [Alignment] (256
// bytes), exactly: no figure contains the waste of a system page. Behind it each
// allocation has system pages of its own, which it shares with nobody. They are
// made inaccessible when it is freed, so a late use is a fault; memory read
// before it is written is zero, except where the pool hands out again what was
// freed to it.
//
// # The pool
//
// The pool keeps whole blocks. PoolFree accepts at once; a block serves again when
// its frontier is reached, for a request of its size or up to an eighth less. When
// no free is waiting for its frontier and all the device's queues have run dry,
// the next call of the pool gives free blocks beyond the threshold back, those
// freed first. The threshold is 0 until it is set, as in CUDA. Before it fails for
// want of capacity it gives back all that is free.
//
// # Pages
//
// On Linux the device heap has pages of [Config.Granularity] that can be mapped
// anywhere and moved with their contents (package vmem). Map and Unmap refuse what
// isn't inside one reservation. Elsewhere, and where the capacity is less than one
// page, Granularity is 0 and vmm isn't among the sources.
//
// # Operations
//
// Fills, copies, uploads and downloads of at most 64 KiB are quick: on an idle
// queue they run inline. Addresses are looked up in what is committed, mapped or
// imported: an operation on anything else fails with an error that names the
// address, and so does one that loses its memory while it runs. A Call runs on a
// goroutine of its own; a panic in it becomes the operation's error, a
// [*PanicError].
//
// # Modelled cost
//
// The host's memory calls take microseconds, a GPU driver's many times that.
// [Config.AllocCost] and [Config.FreeCost] make each call that takes or gives
// memory or a mapping last longer: the last milliseconds are spent in a loop, since
// a sleep is that late on many systems. [driver.Info] says in Modelled that these times aren't measured.
//
// # Concurrency and locks
//
// All methods are safe for concurrent use. The locks are leaves: nothing of
// hal/queue that takes a queue's lock is called under them. In order:
//
//	heap.shedding → heap.mu → Device.mu, and heap.mu → locks of internal/vmem
//	runner.mu → locks of internal/vmem
//
// System calls that commit or decommit run without heap.mu.
package host
