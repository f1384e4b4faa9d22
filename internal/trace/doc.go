// Package trace reads and writes recorded allocation workloads.
//
// A trace is the history of what a program asked a device allocator for, one
// event a line, in the order in which it was submitted:
//
//	# comment: source, licence, unit, notes
//	a ID BYTES [STREAM]     allocate
//	f ID [STREAM]           free
//
// An ID is any number that fits in 64 bits and is allocated at most once. A
// stream is the queue that an event belongs to, 0 when absent; a buffer may be
// freed on another stream than it was allocated on. What is never freed stays
// live to the end. Zero-byte allocations are valid.
//
// [Read] renumbers IDs densely in order of allocation, so that a replayer
// keeps its buffers in a slice:
//
//	t, err := trace.Open("serving.trace.gz")
//	if err != nil {
//		return err
//	}
//	live := make([]Buffer, t.Allocs)
//	for _, e := range t.Events {
//		if e.Free {
//			release(live[e.ID], e.Stream)
//		} else {
//			live[e.ID] = allocate(e.Bytes, e.Stream)
//		}
//	}
//	for _, id := range t.Leftover() {
//		release(live[id], 0)
//	}
//
// A [Builder] makes a trace from a program instead of a file, under the same
// rules.
//
// # What is tolerated and what is not
//
// Text and gzip are told apart by content, never by name. A byte order mark,
// blank lines, carriage returns, and extra spaces and tabs are accepted.
// Anything else that the format does not describe is an [*Error] that names
// the file, the line and the reason; a file without a single event is one that
// matches [ErrEmpty]. Nothing is corrected, guessed or dropped. Only the place
// of a comment is lost: they are collected, and [Write] puts them first.
//
// # Limits
//
// Input is untrusted. A line is at most [MaxLine] bytes, a file [MaxSize]
// bytes after decompression, its comments [MaxComments] bytes in all, a trace
// [MaxEvents] events, a stream [MaxStream]. The sum of live bytes must fit in
// an int64. So memory is bounded, at worst by some GiB; what counts is the text
// as it unpacks, not what a gzip header claims.
//
// # Cost and concurrency
//
// Parsing costs about a hundred nanoseconds an event (a file whose IDs aren't
// dense, or that is compressed, twice that) and allocates nothing per event but
// the 24 bytes that are kept and their share of growing slices. A [Trace] is
// plain data that any number of goroutines may read; a [Builder] belongs to one.
package trace
