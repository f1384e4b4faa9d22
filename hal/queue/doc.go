// Package queue is Halyard's model of time: which device work comes after
// which, and when it is over.
//
// A [Queue] runs operations in order on a timeline of its own that only rises.
// A [Point] is a place on one timeline; it is reached when the work up to there
// has retired, well or badly. A [Frontier] is a set of points, at most one a
// queue: "after all of these". A [Semaphore] is a timeline of the user's own,
// raised by queue operations and by the host; it also carries failure. A
// [Fence] is a list of semaphore values, to wait for or to signal.
//
// # Submitted, issued, reached
//
// A call that returns an error was never submitted. An operation is issued when
// each of its waits names a value already reached or one that an operation
// already issued will signal. Issued work therefore never depends on work that
// was not issued, so it always completes; what can't be issued yet waits in the
// queue's software FIFO, and its successors with it. A wait before anybody has
// signalled is legal.
//
//	Submit ──► deferred (FIFO) ──► issued (Point) ──► reached
//	   │            │                   │
//	   │            └── wait failed,    └── failed: its signal list fails,
//	   └── error        queue closed:       its point is reached all the same
//	       (nothing     its signal list
//	       happened)    fails, no Point
//
// An issued wait is bound to the one operation that will signal it and waits
// for that operation's point: what the queue learns by the wait is true from
// then on, whoever else raises the semaphore meanwhile. Where several queues
// have signals pending on one semaphore the wait is not bound but deferred until
// the value is reached. Host signals and failures teach nothing.
//
// # Two questions
//
// "Ordered after" ([Usable]) is enough to hand memory to a queue operation.
// Whatever acts at once (driver free, unmap, host access) needs
// [Frontier.Reached].
//
// # Concurrency and lock order
//
// Everything here may be used from any goroutine. Locks are taken in this order
// and never the other way round:
//
//	Queue.mu (the issue lock) → Worker.mu → Semaphore.mu
//	Queue.mu → locks of allocator layers (through Hook.Use)
//	any of these → leaves: Queue.reachMu, clock.mu, joins.mu, registry.mu
//
// No user function runs under a lock, and a queue's lock is never taken under
// another queue's: what one operation sets off elsewhere (a deferred queue to
// look at again, a worker to kick) is collected and run after unlocking.
//
// # Cost
//
// An operation whose waits are reached on an idle queue takes one uncontended
// lock and no Go allocation; waking a goroutine is avoided unless the operation
// is long or runs user code. The same-queue test of a frontier is a comparison;
// another queue's point costs a table look-up and one atomic load.
package queue
