package allocator

import (
	"encoding/json"
	"fmt"
	"math/bits"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Allocator is one layer of a stack. Implementations are safe for concurrent use.
//
// Every layer keeps these rules:
//
//   - No driver call, user function or log line under a lock, and no waiting at all.
//   - What it frees to its base it frees with the block's frontier. A layer that
//     loses it passes the zero Frontier, which is slow but never wrong.
//   - A failure leaves every count and list as it was. Free never fails for want of
//     memory.
//   - Sizes are never adjusted silently: a block is at least what was asked, its
//     Size is what was granted, and statistics and limits count granted bytes.
//   - It never closes its base; the stack closes the layers, outermost first.
type Allocator interface {
	// Allocate returns a block of at least r.Size bytes at r's alignment, and the
	// frontier after which it may be touched: usable by r.Queue ([Request.Reuse]
	// says so) unless the layer keeps no account of time, or its base gave fresh memory
	// that isn't: the stack waits for it then. With another outcome than
	// OK nothing was taken. r.Size is positive; the stack has checked r.
	Allocate(r Request) (Block, queue.Frontier, Outcome)
	// Free takes back what Allocate returned: nothing touches it after the frontier.
	// It is OK, or Stale, Foreign or Busy, and then nothing happened.
	Free(b Block, after queue.Frontier) Outcome
	// Trim gives idle memory of this layer back to its base until at most keep bytes
	// stay idle, and returns how much it gave. It doesn't trim its base.
	Trim(keep memory.Bytes) memory.Bytes
	// Stats returns the layer's figures at one moment.
	Stats() Stats
	// Close gives all idle memory back. What is live stays the holder's to free.
	Close() error
}

// Outcome is the answer of the hot path. It is not an error: the stack makes one
// where a caller must be told.
type Outcome uint8

// The outcomes.
const (
	OK          Outcome = iota
	NeedsWait           // memory that would serve is pending: after the frontier returned, ask again
	OverLimit           // a limit stands in the way
	Exhausted           // the device has no room
	TooLarge            // no device of this kind could serve it: size and alignment overflow or pass a maximum
	Unsupported         // the heap or the usage is not served here
	Stale               // the handle was released before
	Foreign             // the handle isn't this stack's
	Busy                // the block is mapped or otherwise pinned
	Lost                // the device is lost
)

var outcomeNames = [...]string{"ok", "needs wait", "over limit", "exhausted", "too large", "unsupported", "stale", "foreign", "busy", "lost"}

func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return fmt.Sprintf("outcome(%d)", uint8(o))
}

// Request is what is asked of an allocator: a plain value of four words, handed
// down the stack as it is or with one field changed.
type Request struct {
	Size memory.Bytes
	Kind Kind
	Who  Who
	Pass uint64 // the scope's pass the request belongs to, or 0
}

// Who says on whose behalf a request is made.
type Who struct {
	Queue queue.ID // the queue whose next operation gets the memory; 0: the host, at once
	Tag   Tag
}

// Tag is an interned label of a buffer's purpose or owner; 0 is no tag. See
// [InternTag].
type Tag uint32

// Kind is a request's heap, alignment, usage, access and flags in one word.
//
//	bits  0-3  heap     4-9  log2 of the alignment   10-33 usage
//	     34-41 access  42-63 flags
type Kind uint64

// Flags of a Kind: which reuse of memory still in flight the request allows
// beyond that of its own queue's.
const (
	NoOrdered  Kind = 1 << (42 + iota) // not what its queue is known to come after
	NoPolled                           // not what a poll finds to be reached
	MayWait                            // also with a wait added to its operation
	NoSubAlloc                         // a block of its own, not part of a larger one
	NoSame                             // not even what its own queue freed, unless that is over
)

// ReuseFlags are the flags that say which memory still in flight may be handed out: a
// layer that asks its base on behalf of a request passes them on.
const ReuseFlags = NoSame | NoOrdered | NoPolled | MayWait

const (
	alignShift, usageShift, accessShift = 4, 10, 34
	heapMask, alignMask                 = 1<<4 - 1, 1<<6 - 1
	usageMask, accessMask               = 1<<24 - 1, 1<<8 - 1
	// MaxHeaps is how many heaps a device can have.
	MaxHeaps = 16
)

// MakeKind packs a kind. align must be a power of two.
func MakeKind(heap int, align memory.Bytes, usage memory.Usage, access memory.Access, flags Kind) Kind {
	log := Kind(bits.TrailingZeros64(uint64(align))) & alignMask
	return Kind(heap)&heapMask | log<<alignShift | (Kind(usage)&usageMask)<<usageShift | (Kind(access)&accessMask)<<accessShift | flags
}

// Heap is the index of the heap.
func (k Kind) Heap() int { return int(k & heapMask) }

// Align is the alignment, a power of two.
func (k Kind) Align() memory.Bytes { return 1 << (k >> alignShift & alignMask) }

// Usage is what the memory will be used for.
func (k Kind) Usage() memory.Usage { return memory.Usage(k >> usageShift & usageMask) }

// Access is how the memory will be accessed.
func (k Kind) Access() memory.Access { return memory.Access(k >> accessShift & accessMask) }

// Reuse says on what ground a free block may be handed to a request.
type Reuse uint8

// The grounds, best first.
const (
	ReuseSame    Reuse = iota // freed on the request's own queue, or never used
	ReuseOrdered              // the queue is known to come after its uses
	ReusePolled               // its uses are reached
	ReuseWait                 // not yet: a wait must be added, which the request allows
	ReuseNo                   // not now
)

// Reuse says whether memory guarded by f may be handed to r, and why. The common
// case, the same queue, is a comparison. It polls no driver: what it knows of
// other queues is what the last poll found.
func (r *Request) Reuse(f queue.Frontier) Reuse {
	if f.On(r.Who.Queue) && r.Kind&NoSame == 0 || f == queue.ReadyNow() {
		return ReuseSame
	}
	return r.reuse(f)
}

func (r *Request) reuse(f queue.Frontier) Reuse {
	switch {
	case f.On(r.Who.Queue): // and NoSame
		if r.Kind&NoPolled == 0 && f.Reached() {
			return ReusePolled
		}
		return ReuseNo
	case r.Kind&NoOrdered == 0 && queue.Ordered(r.Who.Queue, f):
		return ReuseOrdered
	case r.Who.Queue == 0 || r.Kind&(NoPolled|NoOrdered) == 0:
		if queue.Usable(r.Who.Queue, f) { // parts ordered, parts reached
			return ReusePolled
		}
	case r.Kind&NoPolled == 0:
		if f.Reached() {
			return ReusePolled
		}
	}
	if r.Kind&MayWait != 0 && r.Who.Queue != 0 && f.Waitable() {
		return ReuseWait
	}
	return ReuseNo
}

// Block is a piece of device memory as layers trade it: a plain value of four words.
type Block struct {
	Addr   uint64
	Size   memory.Bytes // granted
	Keeper *Keeper      // what minted it; nil for a block of no bytes
	ID     uint64       // which of the keeper's, and which of its lives
}

// Keeper is what mints blocks: one a layer or a shard of a layer, never one a block.
type Keeper struct {
	Owner  any // what the environment of the stack was given: the device
	Index  uint32
	Ledger Ledger
}

// Ledger answers for the blocks that a keeper minted, by ID. [Slots] is one.
type Ledger interface {
	// Use records that what is done up to after touches the block. The handle from
	// before a claim still counts: an operation submitted with it may be issued after.
	Use(id uint64, after queue.Frontier) Outcome
	// Info describes a live block.
	Info(id uint64) (Info, Outcome)
	// Pin adds n (1 or -1) to the count of what keeps the block from being released.
	Pin(id uint64, n int) Outcome
	// Claim makes the handle stale in favour of the one returned, for a release that
	// takes effect later. Busy if the block is pinned.
	Claim(id uint64) (uint64, Outcome)
	// Unclaim makes the handle before Claim good again.
	Unclaim(id uint64)
}

// Info is what a keeper knows of a live block.
type Info struct {
	Asked memory.Bytes // as requested
	Kind  Kind
	Tag   Tag
	Pins  int
	Uses  queue.Frontier // after what is known to touch it
}

// Stats are the figures of one layer. Bytes are granted bytes. A count covers the
// layer's whole life; nothing goes below zero.
type Stats struct {
	Allocs uint64 `json:"allocs"` // requests served
	Frees  uint64 `json:"frees"`  // blocks taken back
	// Failed counts how often the layer was asked in vain. The ladder asks again after
	// each rung, so one request that fails, or that is served late, counts several times.
	Failed uint64 `json:"failed"`

	Live        memory.Bytes `json:"live_bytes"` // handed out
	PeakLive    memory.Bytes `json:"peak_live_bytes"`
	Held        memory.Bytes `json:"held_bytes"` // taken from below: live and idle
	PeakHeld    memory.Bytes `json:"peak_held_bytes"`
	Idle        memory.Bytes `json:"idle_bytes"`         // held for later requests
	Pending     memory.Bytes `json:"pending_bytes"`      // the part of idle, or of what is to be given back, that is still in use by the device
	LargestFree memory.Bytes `json:"largest_free_bytes"` // largest request that idle memory could serve if it were ready
	Blocks      uint64       `json:"blocks"`             // pieces of idle memory

	Hits    uint64  `json:"hits"`    // served from idle memory
	Misses  uint64  `json:"misses"`  // served from below
	Evicted uint64  `json:"evicted"` // idle blocks given back for want of room
	Reused  Grounds `json:"reused"`  // hits by ground

	// Driver calls, of sources only. A source whose pages a layer maps by itself (vmm
	// under block) counts these and the bytes, and no blocks of its own.
	SourceAllocs uint64 `json:"source_allocs"` // that take memory
	SourceFrees  uint64 `json:"source_frees"`  // that give memory back
	Maps         uint64 `json:"maps"`
	Unmaps       uint64 `json:"unmaps"`
	Created      uint64 `json:"pages_created"`
	Released     uint64 `json:"pages_released"`
}

// Grounds counts hits by the ground on which the memory was free to be handed out,
// a [Reuse] as index: freed on the request's own queue; known by its queue to be over
// when its next operation runs; found to be over; with a wait added.
type Grounds [4]uint64

type groundsJSON struct {
	Same    uint64 `json:"same_queue"`
	Ordered uint64 `json:"ordered"`
	Polled  uint64 `json:"polled"`
	Waited  uint64 `json:"waited"`
}

// MarshalJSON names the grounds.
func (g Grounds) MarshalJSON() ([]byte, error) {
	return json.Marshal(groundsJSON{g[ReuseSame], g[ReuseOrdered], g[ReusePolled], g[ReuseWait]})
}

// UnmarshalJSON reads what MarshalJSON writes.
func (g *Grounds) UnmarshalJSON(text []byte) error {
	var j groundsJSON
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	*g = Grounds{ReuseSame: j.Same, ReuseOrdered: j.Ordered, ReusePolled: j.Polled, ReuseWait: j.Waited}
	return nil
}

// Idler is the capability of a layer whose idle memory may still be pending.
type Idler interface {
	// Pending yields idle memory that waits for its frontier, oldest first, until
	// yield returns false. yield must not call back into the layer.
	Pending(yield func(after queue.Frontier, size memory.Bytes) bool)
}

// LiveLister is the capability of listing what a layer has handed out, for the
// report of leaks and to free them. [Slots.Live] does it.
type LiveLister interface {
	// Live yields the handles that are out until yield returns false. yield may call
	// back into the layer.
	Live(yield func(b Block, i Info) bool)
}

// Checker is the capability of verifying a layer's own structures: every list, index
// and count against each other. It takes the layer's locks and walks everything.
type Checker interface{ Check() error }

// PeakResetter is the capability of resetting peaks to the present values.
type PeakResetter interface{ ResetPeaks() }

// Reserver is the capability of setting bytes aside for later requests with a tag on a
// heap: they draw on it first, and nobody else can. release gives back what was not
// drawn. The outcome is OK, or OverLimit, and then nothing was set aside.
type Reserver interface {
	Reserve(heap int, tag Tag, n memory.Bytes) (release func(), o Outcome)
}

// Policy is the capability of a layer that adds flags to every request: the stack and
// the device go by them too, since what a layer hands out is judged by the request.
type Policy interface{ Grounds() Kind }

// Passer is implemented by a layer that lets capabilities of its base through.
// A layer without it hides them all, which is right for any layer that counts or
// changes memory.
type Passer interface {
	// Pass returns the allocator to ask next for the capability, given as a nil
	// pointer to its interface type, or nil to hide it:
	//
	//	switch capability.(type) {
	//	case *allocator.VirtualMemory: return nil // memory would go past this layer
	//	default: return l.base
	//	}
	Pass(capability any) Allocator
}

// As finds the outermost layer from a inwards that provides capability T, asking
// each layer on the way whether it lets the question through.
func As[T any](a Allocator) (T, bool) {
	for a != nil {
		if v, ok := a.(T); ok {
			return v, true
		}
		p, ok := a.(Passer)
		if !ok {
			break
		}
		a = p.Pass((*T)(nil))
	}
	var none T
	return none, false
}
