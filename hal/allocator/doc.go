// Package allocator is what a decorator author imports: the contract between the
// layers of a stack ([Allocator]), the values that pass between them ([Request],
// [Block], [Outcome]), a helper that mints handles ([Slots]), the registry that a
// --device_allocator flag chooses from, and the stack with its ladder.
//
// # Layers
//
// A stack is a list of layers over a source. The source (raw, pool, vmm) talks to
// the driver; each other layer wraps the one below it and knows nothing else: not
// the device, not the other layers. Layers trade in blocks. A block that is freed
// goes down with a frontier: the moment after which it may be touched. A request
// says which queue it is for, so a layer may hand out a free block that this queue
// comes after anyway ([Request.Reuse]).
//
// # Lock order
//
// outer layer → inner layer → leaves of hal/queue. A layer may be called with the
// issue lock of a queue held (a use is recorded under it), so it must never call
// into a queue's operations while holding its own lock, and takes no lock at all
// while it calls the driver, a user's function or a logger. A layer calls its base
// without holding its own lock wherever the base may reach the driver: Allocate
// and Free of a base count as that.
//
// # State machine of a block
//
//	          Allocate                    Claim (dealloca submitted)
//	free ───────────────► live ──────────────────────► claimed
//	 ▲ ▲                   │ ▲                          │  │
//	 │ │       Free        │ └──────── Unclaim ─────────┘  │ Free
//	 │ └───────────────────┘     (its wait failed)         │ (dealloca issued)
//	 └─────────────────────────────────────────────────────┘
//
// Each arrow but Unclaim makes every older handle of the block stale. A free
// block carries its frontier: what its freer said joined with the uses recorded
// while it was live.
package allocator
