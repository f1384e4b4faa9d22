package allocator

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

var (
	// ErrOutOfMemory matches every [*OOMError].
	ErrOutOfMemory = errors.New("out of memory")
	// ErrTooLarge says that no device of this kind could serve the size at the alignment.
	ErrTooLarge = errors.New("request too large")
	// ErrUnsupported says that the heap or the usage is not served.
	ErrUnsupported = errors.New("not supported")
	// ErrReleased is what a handle gets that was released before.
	ErrReleased = errors.New("buffer was released")
	// ErrForeign is what a handle gets that belongs to another device or to none.
	ErrForeign = errors.New("buffer belongs to another device, or is the zero Buffer")
	// ErrBusy is what a release gets while the buffer is mapped or otherwise pinned.
	ErrBusy = errors.New("buffer is in use by the host (mapped)")
	// ErrLost matches errors after the loss of the device.
	ErrLost = queue.ErrLost
	// ErrClosed is what a closed stack returns.
	ErrClosed = queue.ErrClosed
)

// Err is the error that o stands for, or nil for OK. It is for callers at the
// edge; a failed allocation has an [*OOMError] instead.
func (o Outcome) Err() error {
	switch o {
	case OK:
		return nil
	case NeedsWait, OverLimit, Exhausted:
		return ErrOutOfMemory
	case TooLarge:
		return ErrTooLarge
	case Unsupported:
		return ErrUnsupported
	case Stale:
		return ErrReleased
	case Foreign:
		return ErrForeign
	case Busy:
		return ErrBusy
	case Lost:
		return ErrLost
	}
	return fmt.Errorf("allocator: unknown %v", o)
}

// Unknown is a figure of an [OOMError] that could not be read.
const Unknown memory.Bytes = -1

// OOMError says why an allocation failed, with the figures at that moment. It
// matches [ErrOutOfMemory] and unwraps to the driver's error, or the context's, if
// one had a part in it.
type OOMError struct {
	Device string       `json:"device"`
	Heap   string       `json:"heap"`
	Queue  queue.ID     `json:"queue"`        // 0: the host
	On     string       `json:"on,omitempty"` // the queue in words, where the device has them
	Tag    string       `json:"tag,omitempty"`
	Asked  memory.Bytes `json:"asked_bytes"`
	Align  memory.Bytes `json:"align_bytes"`

	Live        memory.Bytes `json:"live_bytes"`         // handed out by the outermost layer
	Cached      memory.Bytes `json:"cached_bytes"`       // held from the driver, not handed out, ready
	Pending     memory.Bytes `json:"pending_bytes"`      // not handed out, still in use by issued work
	Unsignalled memory.Bytes `json:"unsignalled_bytes"`  // released behind work that nobody has signalled
	LargestFree memory.Bytes `json:"largest_free_bytes"` // largest piece of idle memory
	Held        memory.Bytes `json:"held_bytes"`         // taken from the driver

	DriverFree  memory.Bytes `json:"driver_free_bytes"`  // Unknown if it could not be read
	DriverTotal memory.Bytes `json:"driver_total_bytes"` // Unknown if it could not be read

	TopTags []TagBytes `json:"top_tags"` // who has most of what is live, at most five

	StoppedBy string `json:"stopped_by"` // the limit or the driver
	Rungs     []Rung `json:"rungs"`      // what was tried, and what it gained
	Stack     string `json:"stack"`      // the effective stack
	Advice    string `json:"advice"`
	Cause     error  `json:"-"`

	tooLarge bool
}

// TagBytes is what is live under one tag.
type TagBytes struct {
	Tag     string       `json:"tag"` // empty: none
	Bytes   memory.Bytes `json:"bytes"`
	Buffers int          `json:"buffers"`
}

func (t TagBytes) String() string {
	name := t.Tag
	if name == "" {
		name = "untagged"
	}
	return fmt.Sprintf("%s %s in %d", name, t.Bytes.Human(), t.Buffers)
}

// topTags bounds how many tags a report names, and maxCounted how many buffers it
// looks at: a report is made while somebody waits.
const (
	topTags    = 5
	maxCounted = 1 << 16
)

// tags sums up what is live by tag, largest first.
func (s *Stack) tags() []TagBytes {
	by := map[Tag]*TagBytes{}
	for _, l := range slices.Backward(s.layers) {
		lister, ok := l.Allocator.(LiveLister)
		if !ok {
			continue
		}
		n := 0
		lister.Live(func(_ Block, i Info) bool {
			t := by[i.Tag]
			if t == nil {
				t = &TagBytes{Tag: i.Tag.String()}
				by[i.Tag] = t
			}
			t.Bytes += i.Asked
			t.Buffers++
			n++
			return n < maxCounted
		})
		break // what layers below have out is this one's
	}
	list := make([]TagBytes, 0, len(by))
	for _, t := range by {
		list = append(list, *t)
	}
	slices.SortFunc(list, func(a, b TagBytes) int { return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Tag, b.Tag)) })
	return list[:min(len(list), topTags)]
}

// Is makes every OOMError match [ErrOutOfMemory], and one for more than the device
// could ever give [ErrTooLarge] too.
func (e *OOMError) Is(target error) bool {
	return target == ErrOutOfMemory || target == ErrTooLarge && e.tooLarge
}

func (e *OOMError) Unwrap() error { return e.Cause }

// Error fits one screen; its last line is advice.
func (e *OOMError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "out of memory: %s asked of heap %s of %s", e.Asked.Human(), e.Heap, e.Device)
	switch {
	case e.On != "":
		fmt.Fprintf(&b, " for %s", e.On)
	case e.Queue != 0:
		fmt.Fprintf(&b, " for queue %d", e.Queue)
	}
	if e.Tag != "" {
		fmt.Fprintf(&b, " by %q", e.Tag)
	}
	if e.Align > 256 {
		fmt.Fprintf(&b, ", aligned to %v", e.Align)
	}
	fmt.Fprintf(&b, "\n  live %s, held %s: cached %s, pending %s, largest free %s",
		e.Live.Human(), e.Held.Human(), e.Cached.Human(), e.Pending.Human(), e.LargestFree.Human())
	if len(e.TopTags) > 1 || len(e.TopTags) == 1 && e.TopTags[0].Tag != "" {
		parts := make([]string, len(e.TopTags))
		for i, t := range e.TopTags {
			parts[i] = t.String()
		}
		fmt.Fprintf(&b, "\n  live by tag: %s", strings.Join(parts, ", "))
	}
	if e.Unsignalled > 0 {
		fmt.Fprintf(&b, "\n  %s behind unsignalled work: its release was submitted but waits for a signal that nobody has submitted", e.Unsignalled.Human())
	}
	fmt.Fprintf(&b, "\n  driver: %s free of %s", orUnknown(e.DriverFree), orUnknown(e.DriverTotal))
	fmt.Fprintf(&b, "\n  stopped by %s", e.StoppedBy)
	if e.Cause != nil {
		fmt.Fprintf(&b, ": %v", e.Cause)
	}
	b.WriteString("\n  tried:")
	if len(e.Rungs) == 0 {
		b.WriteString(" nothing")
	}
	for _, r := range e.Rungs {
		fmt.Fprintf(&b, " %s (gained %s, %v)", r.Name, r.Gained.Human(), r.Took.Round(time.Microsecond))
	}
	fmt.Fprintf(&b, "\n  stack %s", e.Stack)
	fmt.Fprintf(&b, "\n  advice: %s", e.Advice)
	return b.String()
}

func orUnknown(n memory.Bytes) string {
	if n == Unknown {
		return "unknown"
	}
	return n.Human()
}

// LastErrorer is the capability of a layer that can say what its last refusal was
// about: the driver's own error, or the limit that was hit.
type LastErrorer interface{ LastError() error }

// LimitErrorer is the capability of a layer with a limit to say what its last refusal
// was about.
type LimitErrorer interface{ LimitError() error }

func (s *Stack) limitError() error {
	for i := len(s.layers) - 1; i >= 0; i-- {
		if l, ok := s.layers[i].Allocator.(LimitErrorer); ok {
			if err := l.LimitError(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Most is the size of the largest request that heap could serve if nothing else were
// there, or 0 if that isn't known.
func (s *Stack) Most(heap int) memory.Bytes {
	if heap >= len(s.env.Heaps) {
		return 0
	}
	h := s.env.Heaps[heap]
	if h.MaxAllocation > 0 && (h.Capacity == 0 || h.MaxAllocation < h.Capacity) {
		return h.MaxAllocation
	}
	return h.Capacity
}

// refusal is the error of a request that no amount of memory would serve.
func (s *Stack) refusal(r Request, o Outcome) error {
	if most := s.Most(r.Kind.Heap()); o == TooLarge && most > 0 && r.Size > most && r.Size <= memory.MaxBytes-r.Kind.Align() {
		e := s.oom(&ladder{Stack: s, r: r, outcome: o})
		e.tooLarge, e.Cause = true, nil
		e.StoppedBy = fmt.Sprintf("the size of heap %s: one allocation can have %s", e.Heap, most.Human())
		return e
	}
	err := o.Err()
	if o == Lost {
		if cause := s.lastError(); cause != nil {
			return cause
		}
	}
	return fmt.Errorf("%v at alignment %v of heap %s: %w", r.Size, r.Kind.Align(), s.heapName(r), err)
}

func (s *Stack) heapName(r Request) string {
	if i := r.Kind.Heap(); i < len(s.env.Heaps) {
		return s.env.Heaps[i].Name
	}
	return fmt.Sprintf("#%d", r.Kind.Heap())
}

func (s *Stack) lastError() error {
	for i := len(s.layers) - 1; i >= 0; i-- {
		if l, ok := s.layers[i].Allocator.(LastErrorer); ok {
			if err := l.LastError(); err != nil {
				return err
			}
		}
	}
	return nil
}

// oom gathers the figures of a failure. A figure that can't be read is unknown
// and never breaks the report.
func (s *Stack) oom(l *ladder) *OOMError {
	e := &OOMError{
		Device: s.env.Device.Info().Name, Heap: s.heapName(l.r), Queue: l.r.Who.Queue, Tag: l.r.Who.Tag.String(),
		Asked: l.r.Size, Align: l.r.Kind.Align(),
		Unsignalled: s.unsent(), DriverFree: Unknown, DriverTotal: Unknown,
		Rungs: l.rungs, Stack: s.String(), Cause: l.cause, TopTags: s.tags(),
	}
	counted := false
	for _, st := range s.Stats() { // outermost first
		if !counted && st.Allocs > 0 { // the outermost that counts
			e.Live, counted = st.Live, true
		}
		e.Pending += st.Pending
		e.LargestFree = max(e.LargestFree, st.LargestFree)
		e.Held = st.Held
	}
	e.Cached = max(0, e.Held-e.Live-e.Pending)
	if free, total, err := s.env.Device.MemInfo(l.r.Kind.Heap()); err == nil {
		e.DriverFree, e.DriverTotal = free, total
	}
	e.StoppedBy = "the driver"
	if l.outcome == OverLimit {
		e.StoppedBy = "a limit"
		if e.Cause == nil {
			e.Cause = s.limitError()
		}
	}
	if e.Cause == nil {
		e.Cause = s.lastError()
	}
	if l.cause != nil {
		e.StoppedBy = "the caller's context, while waiting for pending frees"
	}
	e.Advice = advice(e, l.outcome)
	if v, ok := s.layers[0].Allocator.(VirtualMemory); ok && l.outcome != OverLimit && l.cause == nil && e.Asked <= e.DriverTotal {
		if pages := v.Virtual(l.r.Kind.Heap()); pages != nil && e.DriverTotal < 16*pages.Granularity() {
			e.Advice = fmt.Sprintf("pages of %v are large for a heap of %s, and partly used ones can't be shared out: smaller pages (on host: granularity=64KiB), or block over another source", pages.Granularity(), e.DriverTotal.Human())
		}
	}
	return e
}

// advice chooses one line from the figures.
func advice(e *OOMError, o Outcome) string {
	switch {
	case e.Unsignalled >= e.Asked:
		return "memory enough was released behind signals that were not submitted: submit them before allocating, or free earlier"
	case o == OverLimit:
		return fmt.Sprintf("capped: raise the limit in %q, or release memory", e.Stack)
	case o == TooLarge && e.DriverTotal != Unknown && e.Asked <= e.DriverTotal:
		return "the request is larger than one allocation of this heap can be: divide it"
	case e.DriverTotal != Unknown && e.Asked > e.DriverTotal:
		return fmt.Sprintf("the request is larger than the device: %s of %s", e.Asked.Human(), e.DriverTotal.Human())
	case e.Align > memory.GiB && e.Held == 0 && e.DriverFree >= e.Asked:
		return fmt.Sprintf("the driver has room, and no address at a multiple of %v: ask for a smaller alignment", e.Align)
	case e.Pending >= e.Asked:
		return "memory enough is pending: allow a longer wait (context), or let queues finish before allocating"
	case e.Cached+max(0, e.DriverFree) >= e.Asked && e.LargestFree < e.Asked:
		if strings.Contains(e.Stack, "vmm+block") {
			return "fragmented: enough is free but not in one piece, in pages that are partly in use; release some buffer of about this size, or allocate long-lived buffers first"
		}
		return "fragmented: enough is free but not in one piece; use block over vmm (pages can move), or allocate long-lived buffers first"
	case e.DriverTotal != Unknown && e.DriverFree != Unknown && e.DriverTotal-e.DriverFree-e.Held >= e.Asked:
		return fmt.Sprintf("held by others: %s of the device is in use outside this stack", (e.DriverTotal - e.DriverFree - e.Held).Human())
	}
	return "full: release buffers, use smaller batches, or a larger device"
}
