// Package caching is a layer that keeps the blocks freed to it and hands them out
// again, so that the layer below, and in the end the driver, is seldom asked.
//
//	--device_allocator=caching                               every heap, no limit
//	--device_allocator=caching:device_local=1GiB;4GiB;64     blocks to 1 GiB, 4 GiB and 64 of them idle
//	--device_allocator='caching:device_local=*;256MiB;64,host_local=*;*;32'
//	--device_allocator=caching:waste=1.05,idle=30s
//
//	cache, err := caching.New(base, env, caching.Config{
//		Pools: []caching.Pool{{Heap: key, Capacity: 4 * memory.GiB}},
//	})
//
// Use it over a source whose calls are dear. It doesn't split blocks: over memory
// that is mixed and never the same twice, the block suballocator serves better.
//
// # Pools
//
// A [Pool] bounds what is kept of the heaps that its key matches. Pools are tried
// in order and the first whose key matches the heap of a request is the one that
// counts, whatever its limits; several heaps may share a pool. A request that no
// pool matches, or that is larger than its pool could keep, passes through: its
// block comes from below and goes back there. So do requests for memory that is
// exported, replicated or immutable: such memory doesn't return to general use.
// Without any pool everything is kept, without limit.
//
// What is idle never exceeds the limits of its pool. Where a block that is freed
// would, those that have been idle longest make room, and go back to the base with
// their frontier.
//
// # What serves a request
//
// Blocks are kept by heap and size class, eight classes a power of two. A request
// takes the most recently freed block that fits: of its heap, at its alignment, as
// large as asked and at most waste times as large, and usable by its queue (see
// [allocator.Request.Reuse]). Sizes are rounded up to the heap's alignment first,
// and what the base itself added to a block when it was made for a request is no
// waste when it serves a request of that size again. In each class the first depth
// blocks are looked at, closer sizes before larger ones. Blocks that were asked for
// with [allocator.NoSubAlloc] are kept apart from those that were not.
//
// A cache holds more than is live, by what is idle and by what is wasted. A ratio near
// 1 wastes nothing and keeps more idle: sizes that are never quite the same pile up
// beside each other. That is the larger loss. Where sizes only ever rise, bound the
// capacity too: without limit nothing goes back but on Trim.
//
// If all that is found is still in use by the device, the devices are polled once
// and everything that fits is looked at, the longest idle first: a block that isn't
// ready never hides one that is. Only then the base is asked; and if it has no
// room either, the outcome is NeedsWait with the frontier of a block that will do.
//
// # Concurrency and lock order
//
// Shards are chosen by the queue of the request, so that runs replay. Each has a
// lock, the lists under it, and a lease of its pools' limits, so that limits hold
// in sum. A block returns to the shard that first handed it out; on a miss the
// other shards are searched too, one lock at a time. The order in which blocks go
// back is exact within a shard. The base, a poll, the clock and the logger are
// called without a lock.
//
//	shard.mu, by rising index where several are held (Stats, checks)
//	  → pool.mu, total.mu → leaves of hal/queue
//
// One shard, the default, is right unless many goroutines allocate all the time.
//
// # Cost
//
// A hit and the free before it take one uncontended lock each, no other atomic
// operation and no Go allocation; with an idle time a free also reads the clock. A
// kept or live block takes 128 bytes without pointers. A search among blocks in use by
// other queues looks at all that fit, once for each miss; Stats and Pending look at
// every idle block.
package caching
