// Package replay runs a trace through a device and says what it took.
//
//	r, err := replay.Run(ctx, t, replay.Config{
//		Open:   func() (*hal.Device, error) { return hal.Open("host:queues=3") },
//		Passes: 2,
//		Verify: true,
//	})
//
// # Runs
//
// Each run has a device of its own, so that none profits from another's caches:
//
//	counted         Queue.Allocate and Queue.Release on queue 0; gives every count,
//	                peak and statistic; with Verify each buffer is audited
//	timed           the same events; the last pass is timed
//	queued          Queue.Alloca and Queue.Dealloca, stream s on queue s mod N; the
//	                last pass is timed until the queues have drained
//	queue-verified  the same operations, audited; with Verify only
//
// A pass is the whole trace. At its end what is still live is released, so passes
// repeat; that part is not timed. A request that fails takes its free with it.
//
// A buffer that is freed on another queue than it was allocated on waits there
// for a timeline semaphore of the first queue, which the alloca signals (when
// verifying, the upload after it).
//
// After a run everything is trimmed: a source that still holds memory is a
// problem of the result, and so is whatever Device.Close reports.
//
// # What an audit sees
//
// Buffers that are live together must not share a byte: an interval map of what
// was granted, kept here, says so. A buffer carries known bytes at both ends from
// its allocation to its release, written and read back by queue operations: what
// has changed is a lost byte. A grant must be as large and as aligned as asked.
// Among queues the order of submission counts: a dealloca ends a buffer's life.
package replay
