// Package hal is Halyard's front: open a device, allocate memory on its queues,
// free it, and see what happened. An embedder imports this package alone.
//
//	dev, err := hal.Open("host:capacity=24GiB", hal.WithAllocator("block+caching"))
//	q := dev.Queue(0)
//	buf, err := q.Alloca(ctx, hal.Params{Size: 8 * hal.MiB}, nil, nil)
//	err = q.Fill(buf.All(), []byte{0}, nil, nil)
//	err = q.Dealloca(buf, nil, nil)
//	err = q.Drain(ctx) // and tells of operations that failed
//	err = dev.Close(ctx)
//
// # Devices, queues, buffers
//
// A [Device] has heaps and queues. A [Queue] carries out operations in order and
// asynchronously; each takes a list of semaphore values to wait for and one to
// signal. A [Buffer] is a handle: a plain value, good until its release, and an
// error after that even if its memory is somebody else's by then.
//
// Memory is allocated in two ways through one stack. [Queue.Alloca] and
// [Queue.Dealloca] are queue operations: memory freed on a queue is reused by what
// comes after on that queue without waiting for anything. [Device.Allocate] and
// [Buffer.Release] are for the host, which acts at once: memory is handed out when
// nothing can touch it any more. [Queue.Allocate] and [Queue.Release] are between:
// memory for a queue's use, without an operation.
//
// # Time
//
// Placement happens when Alloca is called: the buffer's address is known and an
// [OOMError] is returned at once. Its contents may be touched by what is ordered
// after the alloca. A buffer is freed when its dealloca is issued, that is when
// everything it waits for is at least on its way, and it is reused after all that
// touched it. See package hal/queue for the model.
//
// # Errors
//
// A call that returns an error has done nothing and signalled nothing: if somebody
// waits for what it was to signal, tell them with [Semaphore.Fail]. An operation that
// was accepted and fails later fails its signal list with the cause, so nobody waits
// forever, and one without a signal list is reported by the next [Queue.Drain]. So
// signal the operations whose failure somebody must act on: a failure does not stop
// the operations behind it. Conditions are told apart with errors.Is, and
// [OOMError] and [LeakError] are found with errors.As: they may be wrapped or joined.
//
// # Concurrency
//
// Everything is safe for concurrent use. The cost of an allocation is that of the
// stack's outermost layer: one uncontended lock on a hit.
package hal
