package trace

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
)

// Limits on what is accepted, by [Read] and by [Builder] alike where they apply
// to both.
const (
	// MaxStream is the highest stream number.
	MaxStream = 4095
	// MaxEvents is the number of events that a trace can hold.
	MaxEvents = 64 << 20
	// MaxLine is the length of a line in bytes, its line feed included.
	MaxLine = 64 << 10
	// MaxSize is the length of a file in bytes after decompression.
	MaxSize int64 = 4 << 30
	// MaxComments bounds the memory of the comments of a file, in bytes, each
	// counted with 16 bytes for itself.
	MaxComments = 16 << 20
)

// ErrEmpty is matched by the error for a trace without events.
var ErrEmpty = errors.New("empty trace: no events")

// Error says what is wrong with a trace, and where.
type Error struct {
	File   string // as given to [Read], [Open] or [Builder]; may be empty
	Line   int64  // counted from 1; 0 where no line is to blame
	Reason string // one sentence without a stop
	Err    error  // what caused it, or nil
}

// Error returns "file:line: reason", without the line if there is none.
func (e *Error) Error() string {
	file := e.File
	if file == "" {
		file = "trace"
	}
	if e.Line == 0 {
		return file + ": " + e.Reason
	}
	return fmt.Sprintf("%s:%d: %s", file, e.Line, e.Reason)
}

// Unwrap returns the cause: [ErrEmpty], an error of the file system, of the
// reader or of the decompressor, or nil.
func (e *Error) Unwrap() error { return e.Err }

// Event is one allocation or one free.
type Event struct {
	Bytes  int64 // size asked for, 0 or more; always 0 for a free
	ID     int32 // place among the allocations of the trace, from 0
	Stream int32 // queue that the event belongs to, 0 to MaxStream
	Free   bool  // a free of ID rather than its allocation
}

// Trace is a whole workload. It is made by [Read], [Open] or a [Builder],
// which see to it that in Events each allocation has the next ID, that a free
// names an allocation before it that is still live, and that the totals are
// those of the events. Treat it as read-only.
type Trace struct {
	Name     string   // base name of the file without .trace and .gz
	Comments []string // without the number sign and the space after it
	Events   []Event  // in order of submission; never empty
	Allocs   int      // number of allocations, so also one more than the highest ID
	Frees    int      // number of frees, at most Allocs
	PeakLive int64    // highest sum of the sizes of live allocations
	Streams  int      // highest stream plus one
}

// Leftover returns the IDs that are never freed, in rising order. A replayer
// that runs a trace more than once frees these between passes.
func (t *Trace) Leftover() []int32 {
	if t.Allocs == t.Frees {
		return nil
	}
	freed := make([]bool, t.Allocs)
	for i := range t.Events {
		if e := &t.Events[i]; e.Free {
			freed[e.ID] = true
		}
	}
	left := make([]int32, 0, t.Allocs-t.Frees)
	for id, f := range freed {
		if !f {
			left = append(left, int32(id))
		}
	}
	return left
}

// Builder makes a [Trace] event by event. The zero value is ready for use.
//
// Its errors are [*Error] values without a line. A call that returns an error
// changes nothing.
type Builder struct {
	Name     string   // becomes [Trace.Name]
	Comments []string // becomes [Trace.Comments]

	events []Event
	alloc  []int32 // by ID: index of the allocation in events, or freed
	frees  int
	live   int64
	peak   int64
	stream int32 // highest so far
	limit  int   // MaxEvents unless set
}

// freed stands in Builder.alloc for an ID that is no longer live.
const freed = -1

// Alloc adds an allocation of bytes on stream and returns its ID.
func (b *Builder) Alloc(bytes int64, stream int32) (int32, error) {
	switch {
	case bytes < 0:
		return 0, b.errorf("size %d is negative", bytes)
	case bytes > math.MaxInt64-b.live:
		return 0, b.errorf("size %d does not fit: with %d bytes live the sum would pass %d", bytes, b.live, int64(math.MaxInt64))
	}
	if err := b.check(stream); err != nil {
		return 0, err
	}
	id := int32(len(b.alloc))
	b.alloc = append(b.alloc, int32(len(b.events)))
	b.events = append(b.events, Event{Bytes: bytes, ID: id, Stream: stream})
	b.live += bytes
	b.peak = max(b.peak, b.live)
	b.stream = max(b.stream, stream)
	return id, nil
}

// Free adds a free of id on stream.
func (b *Builder) Free(id, stream int32) error {
	switch {
	case id < 0 || int(id) >= len(b.alloc):
		return b.errorf("id %d freed but never allocated", id)
	case b.alloc[id] == freed:
		return b.errorf("id %d freed twice", id)
	}
	if err := b.check(stream); err != nil {
		return err
	}
	b.live -= b.events[b.alloc[id]].Bytes
	b.alloc[id] = freed
	b.frees++
	b.events = append(b.events, Event{ID: id, Stream: stream, Free: true})
	b.stream = max(b.stream, stream)
	return nil
}

// check refuses a stream out of range, and any event too many.
func (b *Builder) check(stream int32) error {
	if stream < 0 || stream > MaxStream {
		return b.errorf("stream %d is outside 0 to %d", stream, MaxStream)
	}
	limit := b.limit
	if limit == 0 {
		limit = MaxEvents
	}
	if len(b.events) >= limit {
		return b.errorf("more than %d events", limit)
	}
	return nil
}

// Trace returns what was added, or an error that matches [ErrEmpty] if that is
// nothing. The builder is as good as new afterwards.
func (b *Builder) Trace() (*Trace, error) {
	if len(b.events) == 0 {
		return nil, &Error{File: b.Name, Reason: ErrEmpty.Error(), Err: ErrEmpty}
	}
	t := &Trace{
		Name:     b.Name,
		Comments: b.Comments,
		Events:   b.events,
		Allocs:   len(b.alloc),
		Frees:    b.frees,
		PeakLive: b.peak,
		Streams:  int(b.stream) + 1,
	}
	*b = Builder{}
	return t, nil
}

func (b *Builder) errorf(format string, args ...any) error {
	return &Error{File: b.Name, Reason: fmt.Sprintf(format, args...)}
}

// baseName returns what a trace read from file is called.
func baseName(file string) string {
	if file == "" {
		return ""
	}
	return strings.TrimSuffix(strings.TrimSuffix(filepath.Base(file), ".gz"), ".trace")
}
