// Package limit is the layer with a hard cap: on all that passes through it, on each
// heap, and on what carries a tag. It counts granted bytes.
//
//	block+limit:percent=80%                       leave a fifth of each heap to others
//	block+limit:device_local=20GiB,tags=kv:12GiB  at most 20 GiB, of which the KV cache may have 12
//
// Where it stands says what is capped. Outermost it caps what the program has, next
// to the source what is taken from the driver, caches included; there the ladder makes
// room by trimming them.
//
// # How concurrent requests stay within
//
// A request is counted before the base is asked, and corrected to what was granted:
//
//	        counted          asked of the base          granted
//	idle ──────────► claimed ──────────────► corrected ────────► live ──► freed
//	          │                  │ failed         │ no room for the rest
//	          ▼                  ▼                ▼
//	      over limit         not counted      given back, over limit
//
// So two requests that fit one by one never pass the limit together.
//
// # Reservations
//
// [Allocator.Reserve] sets bytes aside for requests of one heap and tag, for a
// scheduler that decides before it loads. They count against the limits at once; the
// requests draw on them first, and nobody else can.
//
// # Concurrency and cost
//
// One lock, a leaf, taken twice a request and once a free; the base is called without
// it. No Go allocation but for the handles, in chunks.
package limit

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// Layer describes the limit to a registry.
var Layer = allocator.Layer{
	Table: Table,
	Mints: true,
	Pages: true,
	New: func(base allocator.Allocator, env *allocator.Env, v *spec.Values) (allocator.Allocator, error) {
		c, err := FromValues(v)
		if err != nil {
			return nil, err
		}
		return New(base, env, c)
	},
}

// Table holds the options of the limit.
var Table = &spec.Table{
	Name:    "limit",
	Summary: "a hard cap on what passes through, on each heap and on each tag",
	Doc: `Counts granted bytes. A request that would pass a limit walks the ladder, as one
that the driver refuses, and fails with an out-of-memory error that says which limit
it was. Outermost it caps what the program has; next to the source, what is taken
from the driver.`,
	Options: []spec.Option{
		{Name: "max", Kind: spec.Size, Default: "*", Unlimited: true, Help: "bytes of all heaps together"},
		{Name: "percent", Kind: spec.Percent, Default: "100%", Max: "100%", Help: "of each heap's capacity, where that is known"},
		{Name: "tags", Kind: spec.Text, Help: "bytes of a tag, over all heaps: LABEL:SIZE, several joined by ';'"},
	},
	Heaps: &spec.HeapOption{
		Help: "The cap of each heap that HEAP matches; of several items the first.",
		Fields: []spec.Option{
			{Name: "max", Kind: spec.Size, Default: "*", Unlimited: true, Help: "bytes"},
			{Name: "percent", Kind: spec.Percent, Default: "100%", Max: "100%", Help: "of its capacity"},
		},
	},
	Validate: func(v *spec.Values) error {
		if _, err := parseTags(v.Text("tags")); err != nil {
			return v.Errorf("tags", "%w", err)
		}
		c, _ := FromValues(v)
		if c.idle() {
			return errors.New("no limit is given, so it can't act (want max=SIZE, percent=PERCENT, HEAP=SIZE or tags=LABEL:SIZE)")
		}
		return nil
	},
}

// Config says what is capped. A size of [spec.UnlimitedSize] and 100 percent are no cap.
type Config struct {
	Max     memory.Bytes
	Percent float64
	Heaps   []Heap
	Tags    []Tag
}

// Heap is the cap of the heaps that Key matches.
type Heap struct {
	Key     memory.HeapKey
	Max     memory.Bytes
	Percent float64
}

// Tag is the cap of what carries a tag.
type Tag struct {
	Tag allocator.Tag
	Max memory.Bytes
}

func (c Config) idle() bool {
	return c.Max == spec.UnlimitedSize && c.Percent >= 100 && len(c.Heaps) == 0 && len(c.Tags) == 0
}

// FromValues returns the configuration that parsed options stand for.
func FromValues(v *spec.Values) (Config, error) {
	c := Config{Max: v.Size("max"), Percent: v.Percent("percent")}
	for _, h := range v.Heaps() {
		c.Heaps = append(c.Heaps, Heap{h.Key, h.Size("max"), h.Percent("percent")})
	}
	var err error
	c.Tags, err = parseTags(v.Text("tags"))
	return c, err
}

func parseTags(text string) ([]Tag, error) {
	if text == "" {
		return nil, nil
	}
	var out []Tag
	seen := map[string]bool{}
	for part := range strings.SplitSeq(text, ";") {
		label, size, ok := strings.Cut(strings.TrimSpace(part), ":")
		if !ok || label == "" {
			return nil, fmt.Errorf("%q is not LABEL:SIZE", part)
		}
		n, err := memory.ParseBytes(size)
		if err != nil {
			return nil, err
		}
		if seen[label] {
			return nil, fmt.Errorf("tag %q is given twice", label)
		}
		seen[label] = true
		out = append(out, Tag{allocator.InternTag(label), n})
	}
	return out, nil
}

// Allocator is the layer. Safe for concurrent use.
type Allocator struct {
	base  allocator.Allocator
	heaps memory.Heaps

	mu    sync.Mutex
	slots allocator.Slots[held]
	inner []*allocator.Keeper // of the base's blocks, by index
	total budget
	heap  [allocator.MaxHeaps]budget
	tag   map[allocator.Tag]*budget
	aside map[key]memory.Bytes // reserved and not drawn
	stats allocator.Stats
	last  refusal
}

// budget is what one cap allows and what is used of it: handed out, claimed or reserved.
type budget struct{ max, used memory.Bytes }

func (b *budget) room() memory.Bytes { return b.max - b.used }

// key is what a reservation is for.
type key struct {
	heap int
	tag  allocator.Tag
}

// held is what is kept with a block.
type held struct {
	addr  uint64
	size  memory.Bytes
	id    uint64
	inner int32
}

// refusal is the latest request that a cap stood in the way of.
type refusal struct {
	what        string // "heap device", "tag kv"
	asked       memory.Bytes
	used, limit memory.Bytes
}

var (
	_ allocator.Allocator    = (*Allocator)(nil)
	_ allocator.Passer       = (*Allocator)(nil)
	_ allocator.LiveLister   = (*Allocator)(nil)
	_ allocator.PeakResetter = (*Allocator)(nil)
	_ allocator.Reserver     = (*Allocator)(nil)

	_ allocator.VirtualMemory = (*Allocator)(nil)
	_ allocator.Checker       = (*Allocator)(nil)
)

// New returns a limit over base.
func New(base allocator.Allocator, env *allocator.Env, c Config) (*Allocator, error) {
	if base == nil {
		return nil, errors.New("limit: no base to take memory from")
	}
	a := &Allocator{
		base: base, heaps: env.Heaps, total: budget{max: cap(c.Max)},
		tag: map[allocator.Tag]*budget{}, aside: map[key]memory.Bytes{},
	}
	a.slots.Init(&a.mu, env.Owner, 0)
	for i := range a.heap {
		a.heap[i].max = memory.MaxBytes
	}
	for i, h := range env.Heaps {
		a.heap[i].max = least(h.Capacity, memory.MaxBytes, c.Percent)
		for _, x := range c.Heaps {
			if x.Key.Matches(h) {
				a.heap[i].max = min(a.heap[i].max, least(h.Capacity, cap(x.Max), x.Percent))
				break
			}
		}
	}
	for _, t := range c.Tags {
		a.tag[t.Tag] = &budget{max: cap(t.Max)}
	}
	return a, nil
}

// cap is a size as a maximum.
func cap(n memory.Bytes) memory.Bytes {
	if n == spec.UnlimitedSize {
		return memory.MaxBytes
	}
	return n
}

// least is the smaller of most and of percent of a capacity, if that is known.
func least(capacity, most memory.Bytes, percent float64) memory.Bytes {
	if capacity <= 0 || percent >= 100 {
		return most
	}
	return min(most, memory.Bytes(float64(capacity)*percent/100))
}

// claimLocked counts n more bytes, and says how many of them were drawn from what is
// set aside for such requests. It is false, and nothing is counted, if a cap stands in
// the way.
func (a *Allocator) claimLocked(k key, n memory.Bytes) (drawn memory.Bytes, ok bool) {
	drawn = min(n, a.aside[k])
	rest := n - drawn
	t := a.tag[k.tag]
	switch {
	case rest > a.total.room():
		a.last = refusal{"all heaps", n, a.total.used, a.total.max}
		return 0, false
	case rest > a.heap[k.heap].room():
		a.last = refusal{"heap", n, a.heap[k.heap].used, a.heap[k.heap].max}
		if k.heap < len(a.heaps) {
			a.last.what = "heap " + a.heaps[k.heap].Name
		}
		return 0, false
	case t != nil && rest > t.room():
		a.last = refusal{fmt.Sprintf("tag %q", k.tag.String()), n, t.used, t.max}
		return 0, false
	}
	if drawn > 0 {
		a.aside[k] -= drawn
	}
	a.countLocked(k, rest)
	return drawn, true
}

// unclaimLocked takes a claim of n bytes back.
func (a *Allocator) unclaimLocked(k key, n, drawn memory.Bytes) {
	if drawn > 0 {
		a.aside[k] += drawn
	}
	a.countLocked(k, drawn-n)
}

// countLocked changes what is used of every cap that concerns k.
func (a *Allocator) countLocked(k key, n memory.Bytes) {
	a.total.used += n
	a.heap[k.heap].used += n
	if t := a.tag[k.tag]; t != nil {
		t.used += n
	}
}

// Allocate implements [allocator.Allocator].
func (a *Allocator) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	k := key{r.Kind.Heap(), r.Who.Tag}
	a.mu.Lock()
	drawn, ok := a.claimLocked(k, r.Size)
	if !ok {
		a.stats.Failed++
		a.mu.Unlock()
		return allocator.Block{}, queue.Frontier{}, allocator.OverLimit
	}
	a.mu.Unlock()

	b, f, o := a.base.Allocate(r)

	a.mu.Lock()
	if o != allocator.OK {
		a.unclaimLocked(k, r.Size, drawn)
		a.stats.Failed++
		a.mu.Unlock()
		return b, f, o
	}
	i, o := uint32(0), allocator.OverLimit
	more := max(0, b.Size-r.Size) // a block is at least what was asked
	extra, ok := a.claimLocked(k, more)
	if ok {
		if i = a.slots.NewLocked(); i == 0 {
			o = allocator.Exhausted
			a.unclaimLocked(k, more, extra)
		}
	} else { // without what this request has claimed itself
		a.last.asked, a.last.used = b.Size, a.last.used-(r.Size-drawn)
	}
	if i == 0 {
		a.unclaimLocked(k, r.Size, drawn)
		a.stats.Failed++
		a.mu.Unlock()
		a.base.Free(b, f)
		return allocator.Block{}, queue.Frontier{}, o
	}
	a.slots.At(i).Value = held{b.Addr, b.Size, b.ID, a.keeperLocked(b.Keeper)}
	out := a.slots.MintLocked(i, b.Addr, b.Size, &r, f)
	a.stats.Allocs++
	a.stats.Live += b.Size
	a.stats.PeakLive = max(a.stats.PeakLive, a.stats.Live)
	a.mu.Unlock()
	return out, f, allocator.OK
}

func (a *Allocator) keeperLocked(k *allocator.Keeper) int32 {
	for i, have := range a.inner {
		if have == k {
			return int32(i)
		}
	}
	a.inner = append(a.inner, k)
	return int32(len(a.inner) - 1)
}

// Free implements [allocator.Allocator].
func (a *Allocator) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	a.mu.Lock()
	i, f, o := a.slots.TakeLocked(b, after)
	if o != allocator.OK {
		a.mu.Unlock()
		return o
	}
	v, info := a.slots.At(i).Value, a.slots.AskedLocked(i)
	a.slots.DropLocked(i)
	a.countLocked(key{info.Kind.Heap(), info.Tag}, -v.size)
	a.stats.Frees++
	a.stats.Live -= v.size
	inner := allocator.Block{Addr: v.addr, Size: v.size, Keeper: a.inner[v.inner], ID: v.id}
	a.mu.Unlock()
	return a.base.Free(inner, f)
}

// Reserve implements [allocator.Reserver].
func (a *Allocator) Reserve(heap int, tag allocator.Tag, n memory.Bytes) (release func(), o allocator.Outcome) {
	if n < 0 || heap < 0 || heap >= allocator.MaxHeaps {
		return nil, allocator.Unsupported
	}
	k := key{heap, tag}
	a.mu.Lock()
	defer a.mu.Unlock()
	had := a.aside[k]
	a.aside[k] = 0 // what others set aside is theirs
	_, ok := a.claimLocked(k, n)
	a.aside[k] = had
	if !ok {
		return nil, allocator.OverLimit
	}
	a.aside[k] += n
	var once sync.Once
	return func() {
		once.Do(func() {
			a.mu.Lock()
			defer a.mu.Unlock()
			left := min(n, a.aside[k])
			a.countLocked(k, -left)
			if a.aside[k] -= left; a.aside[k] == 0 {
				delete(a.aside, k)
			}
		})
	}, allocator.OK
}

// LimitError implements [allocator.LimitErrorer].
func (a *Allocator) LimitError() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last.what == "" {
		return nil
	}
	r := a.last
	return fmt.Errorf("limit of %s for %s: %s used, %s more asked", r.limit.Human(), r.what, r.used.Human(), r.asked.Human())
}

// Trim implements [allocator.Allocator]: the layer keeps nothing.
func (a *Allocator) Trim(memory.Bytes) memory.Bytes { return 0 }

// Close implements [allocator.Allocator].
func (a *Allocator) Close() error { return nil }

// Live implements [allocator.LiveLister].
func (a *Allocator) Live(yield func(allocator.Block, allocator.Info) bool) { a.slots.Live(yield) }

// Pass implements [allocator.Passer].
func (a *Allocator) Pass(any) allocator.Allocator { return a.base }

// Virtual implements [allocator.VirtualMemory]: the base's, if it has any, whose pages
// count.
func (a *Allocator) Virtual(heap int) allocator.Virtual {
	base, ok := allocator.As[allocator.VirtualMemory](a.base)
	if !ok {
		return nil
	}
	v := base.Virtual(heap)
	if v == nil {
		return nil
	}
	return &virtual{v, a, key{heap: heap}}
}

// virtual counts the pages that a layer above maps for itself.
type virtual struct {
	allocator.Virtual
	limit *Allocator
	key   key
}

// Grow implements [allocator.Virtual].
func (v *virtual) Grow(addr uint64, n int) allocator.Outcome {
	a, size := v.limit, memory.Bytes(n)*v.Granularity()
	a.mu.Lock()
	drawn, ok := a.claimLocked(v.key, size)
	if !ok {
		a.stats.Failed++
		a.mu.Unlock()
		return allocator.OverLimit
	}
	a.mu.Unlock()
	o := v.Virtual.Grow(addr, n)
	a.mu.Lock()
	defer a.mu.Unlock()
	if o != allocator.OK {
		a.unclaimLocked(v.key, size, drawn)
		a.stats.Failed++
		return o
	}
	a.stats.Live += size
	a.stats.PeakLive = max(a.stats.PeakLive, a.stats.Live)
	return o
}

// Shrink implements [allocator.Virtual].
func (v *virtual) Shrink(addr uint64, n int) allocator.Outcome {
	o := v.Virtual.Shrink(addr, n)
	if o == allocator.OK {
		size := memory.Bytes(n) * v.Granularity()
		v.limit.mu.Lock()
		v.limit.countLocked(v.key, -size)
		v.limit.stats.Live -= size
		v.limit.mu.Unlock()
	}
	return o
}

// Stats implements [allocator.Allocator].
func (a *Allocator) Stats() allocator.Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	st := a.stats
	st.Held, st.PeakHeld = st.Live, st.PeakLive
	return st
}

// ResetPeaks implements [allocator.PeakResetter].
func (a *Allocator) ResetPeaks() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stats.PeakLive = a.stats.Live
}

// Check implements [allocator.Checker]: no cap is passed, and what the heaps use is
// what all use.
func (a *Allocator) Check() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	sum := memory.Bytes(0)
	for i := range a.heap {
		h := &a.heap[i]
		sum += h.used
		if h.used < 0 || h.used > h.max {
			return fmt.Errorf("limit: heap %d uses %d of %d", i, h.used, h.max)
		}
	}
	for t, b := range a.tag {
		if b.used < 0 || b.used > b.max {
			return fmt.Errorf("limit: tag %q uses %d of %d", t, b.used, b.max)
		}
	}
	if sum != a.total.used || a.total.used > a.total.max {
		return fmt.Errorf("limit: heaps use %d, all %d of %d", sum, a.total.used, a.total.max)
	}
	return nil
}
