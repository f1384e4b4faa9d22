// Package block is Halyard's suballocator: best fit with immediate coalescing over
// the memory of the layer below.
//
// There is one arena a heap. Where the base has virtual memory for the heap
// ([allocator.VirtualMemory]) the arena is one contiguous range of addresses whose
// pages are mapped as they are needed and moved where they are needed; otherwise it
// is any number of slabs.
//
//	b, err := block.New(source, env, block.Config{})
//	if err != nil {
//		return err
//	}
//	mem, after, outcome := b.Allocate(request)
//
// # State machine of a piece of memory
//
// Pieces tile a slab, or the range: each begins where its neighbour below ends.
//
//	                      Allocate
//	          ┌────────────────────────────────┐
//	 slab     │                                ▼
//	──────► free ◄────────── Free ─────────── live
//	◄──────  │ ▲                               ▲
//	 slab    │ │ operation failed, or done     │ growth done
//	         ▼ │                               │
//	        aside ─────────────────────────────┤    range only, base being called:
//	         │                                 │    aside   mapped: part of a place,
//	         │ page moved away, given back     │            or pages that leave
//	         ▼                                 │    coming  unmapped: part of a place
//	       hollow ──────────► coming ──────────┘
//	         ▲                  │
//	         └──────────────────┘ growth failed
//
// Free is mapped and nobody's; hollow is unmapped whole pages. Hollow neighbours are
// one piece, and so are free neighbours that are ready at the same time (see Time). A
// page is mapped if any part of it is free, live or aside:
//
//	page        0       1       2       3       4       5       6 …
//	        ┌───────┬───────┬───────┬───────┬───────┬───────┬───────
//	mapped  │■■■■■■■│■■■■■■■│       │■■■■■■■│■■■■■■■│■■■■■■■│
//	        └───────┴───────┴───────┴───────┴───────┴───────┴───────
//	pieces  │ live    │free │hollow │free│ live     │brink  │ tail …
//	                  └──── a hole ──────┘          └ last hole …
//
// # Time
//
// Every free piece has a frontier, and is handed out only where
// [allocator.Request.Reuse] allows it. Splitting copies the frontier to both halves,
// merging joins it.
//
// Neighbours merge at once if that makes neither wait for the other: both are free
// after the same point, after points of one queue, or reached. Otherwise they stay
// apart by a seam: merged, all free memory under load on several queues would become
// one piece that is never ready, and every request would grow. A seam is closed by
// one of the next calls once both sides are reached, and before anything is taken
// from the base all seams are closed between pieces that the request may have.
//
// A piece that isn't ready never hides one that is: the search
// goes on past a few of them at once, and past all of them before anything is taken
// from the base. Hollow pages have no frontier; what is unmapped, moved or given
// back is always reached.
//
// # Placement
//
// In a slab: the smallest piece that fits, then the lowest address. In the range, of
// the first few pieces that fit without mapping anything, in the order of best fit:
// the one where the fewest whole free pages are broken, at its low or its high end,
// then the smallest, then the lowest. The brink, next to the tail of pages that were
// never mapped, counts as infinitely large, so a second pass of the same requests
// finds every place where the first one did, and mapped. If nothing mapped serves,
// a hole is chosen in which the fewest whole pages are taken (those that could be
// moved elsewhere count first), then the fewest have to be mapped, then the tightest,
// then the lowest; its missing pages are made, or taken from where whole pages are
// free when the device has no more.
//
// # Concurrency and lock order
//
// All methods may be called from any goroutine. An arena has one lock, and so has each
// of sixteen shards, which mint the handles of the queues that belong to them:
//
//	shard.mu → arena.mu → leaves of hal/queue (Join, Reached, Usable)
//
// Queues that stand in each other's way use magazines: a shard that found the arena's
// lock taken keeps, for its next 1,024 frees, the last few pieces as they are, and
// serves requests of the same size from them. They can't merge meanwhile, so they go
// to their arena before anything is taken from the base or given back to it. Without
// contention there are none, and a replay makes the same places each time. (The idea
// is that of the magazines of Bonwick and Adams, USENIX 2001, with a switch.)
//
// No lock is held while the base is called. What a call is about is taken out of the
// arena's books before it (slabs) or put aside in them (pages), and the result is
// entered after it, so growers run side by side and never touch each other's memory.
//
// # Cost
//
// A hit takes a shard's lock and mostly the arena's, once each, and allocates nothing: bitmaps over size classes
// and a short list for a few hundred free pieces, O(log n) for a million. A piece
// costs 64 bytes of Go memory and its handle, while it is live, as many; there are no
// pointers in them, so the collector skips them.
package block
