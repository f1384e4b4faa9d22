package queue

import (
	"fmt"
	"github.com/halyard-go/halyard/internal/mutant"
	"slices"
	"strings"
	"sync"
)

// ID names a queue. IDs start at 1 and are never reused in the process, so a
// point of a destroyed queue can't be taken for one of its successor's. 0 is no
// queue: a request of the host, which acts at once.
type ID uint32

// Point is a place on one queue's timeline. It is reached when every operation
// up to and including Value has retired, well or badly.
type Point struct {
	Queue ID
	Value uint64
}

// Reached reports whether the work up to p has retired. Points of queues that
// were destroyed (and so drained) are reached. It never blocks and asks no driver.
func (p Point) Reached() bool {
	q, known := lookup(p.Queue)
	if q == nil {
		return known
	}
	return q.reached.Load() >= p.Value
}

// String formats p as q3@17.
func (p Point) String() string { return fmt.Sprintf("q%d@%d", p.Queue, p.Value) }

// Frontier is a set of points, at most one a queue: after all of these. It is a
// plain value of two words. One point is stored inline; larger sets are interned
// (see [Join]).
//
// The zero Frontier is unknown: after everything submitted so far. It is what a
// layer that keeps no account of time passes on, and it is never usable at once.
type Frontier struct {
	value uint64
	queue ID
	set   uint32
}

// What a Frontier's set field says about its value.
const (
	setPoint  uint32 = iota // one point, or unknown if queue is 0
	setReady                // nothing to come after
	setJoin                 // value is the number of an interned set
	setCoarse               // the same, of the shared overflow set: poll it, never wait on it
)

// ReadyNow is the frontier of memory that nothing may still touch.
func ReadyNow() Frontier { return Frontier{set: setReady} }

// After is the frontier of one point.
func After(p Point) Frontier { return Frontier{value: p.Value, queue: p.Queue} }

// Unknown reports whether f is the zero Frontier.
func (f Frontier) Unknown() bool { return f == Frontier{} }

// On reports whether f is exactly one point of queue q: ordered before whatever
// q is given next. This is the common case of reuse, two comparisons.
func (f Frontier) On(q ID) bool { return f.set == setPoint && f.queue == q && q != 0 }

// Queue returns the queue of a frontier of exactly one point, else 0.
func (f Frontier) Queue() ID {
	if f.set != setPoint {
		return 0
	}
	return f.queue
}

// Waitable reports whether an operation may be made to wait for f: its points
// are known and exact. Unknown frontiers and the overflow set are polled only.
func (f Frontier) Waitable() bool {
	return f.set != setCoarse && !f.Unknown()
}

// Points appends the points of f that are not reached to buf. It appends
// nothing for an unknown frontier.
func (f Frontier) Points(buf []Point) []Point {
	switch {
	case f.set == setReady, f.Unknown():
	case f.set == setPoint:
		if p := (Point{f.queue, f.value}); !p.Reached() {
			buf = append(buf, p)
		}
	default:
		buf = joins.points(f.value, buf)
	}
	return buf
}

// Reached reports whether nothing can still touch what f guards. An unknown
// frontier is not reached until everything issued in the process is.
func (f Frontier) Reached() bool {
	switch f.set {
	case setReady:
		return true
	case setPoint:
		if f.queue == 0 {
			if mutant.Is(mutant.ZeroIsReady) {
				return true
			}
			return Everything().set == setReady
		}
		return Point{f.queue, f.value}.Reached()
	}
	return joins.reached(f.value)
}

// String formats f as ready, unknown, q3@17 or {q1@4 q3@17}; reached points of
// a set are left out.
func (f Frontier) String() string {
	switch {
	case f.Unknown():
		return "unknown"
	case f.set == setReady:
		return "ready"
	case f.set == setPoint:
		return Point{f.queue, f.value}.String()
	}
	var b strings.Builder
	for i, p := range f.Points(nil) {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(p.String())
	}
	return "{" + b.String() + "}"
}

// Usable reports whether memory guarded by f may be handed to the next operation
// of queue q: each point of f is on q, or is something that q is ordered after
// through waits already issued, or is reached. With q = 0 (the host, which acts
// at once) it asks whether f is reached.
func Usable(q ID, f Frontier) bool {
	if f.On(q) {
		return true
	}
	return usable(q, f)
}

func usable(q ID, f Frontier) bool {
	if q == 0 || f.set == setReady || f.Unknown() {
		return f.Reached()
	}
	self, _ := lookup(q)
	if f.set == setPoint {
		return self.orderedAfter(Point{f.queue, f.value})
	}
	var buf [8]Point
	for _, p := range joins.points(f.value, buf[:0]) {
		if p.Queue != q && !self.orderedAfter(p) {
			return false
		}
	}
	return true
}

// Ordered reports whether memory guarded by f may be handed to queue q by what
// is known of order alone, without looking at what has been reached.
func Ordered(q ID, f Frontier) bool {
	if q == 0 || f.Unknown() {
		return false
	}
	if f.set == setReady || f.On(q) {
		return true
	}
	self, _ := lookup(q)
	if self == nil {
		return false
	}
	if f.set == setPoint {
		return self.know.covers(Point{f.queue, f.value}, ^uint64(0))
	}
	var buf [8]Point
	for _, p := range joins.points(f.value, buf[:0]) {
		if p.Queue != q && !self.know.covers(p, ^uint64(0)) {
			return false
		}
	}
	return true
}

// Join returns the frontier after both a and b. Points already reached are
// dropped, and so is what the other's point is known to come after, so frontiers
// stay small: two points of one queue make one point, and a buffer that was used
// on several queues whose owner ordered its release after them is free after one
// point. An unknown frontier makes the result unknown.
//
// Sets of several points are interned: equal sets share one entry, and an entry
// goes when it is reached. At most [MaxJoins] distinct sets are kept; beyond that
// sets fall back to one shared set of the issued values of the queues concerned,
// which is later than asked for, never earlier. Joining points of one queue
// allocates nothing.
func Join(a, b Frontier) Frontier {
	switch {
	case a.Unknown() || b.Unknown():
		return Frontier{}
	case a.set == setReady || a == b:
		return b
	case b.set == setReady:
		return a
	case a.set == setPoint && b.set == setPoint && a.queue == b.queue:
		return Frontier{value: max(a.value, b.value), queue: a.queue}
	case a.Reached():
		return b
	case b.Reached():
		return a
	}
	var buf [16]Point
	pts := b.Points(a.Points(buf[:0]))
	return joinPoints(pts, a.set == setCoarse || b.set == setCoarse)
}

// joinPoints makes a frontier of unreached points; pts is reordered.
func joinPoints(pts []Point, coarse bool) Frontier {
	slices.SortFunc(pts, func(x, y Point) int {
		if x.Queue != y.Queue {
			return int(x.Queue) - int(y.Queue)
		}
		if x.Value > y.Value {
			return -1
		}
		return 1
	})
	pts = slices.CompactFunc(pts, func(x, y Point) bool { return x.Queue == y.Queue })
	if !coarse && len(pts) > 1 {
		pts = dropKnown(pts)
	}
	switch len(pts) {
	case 0:
		return ReadyNow()
	case 1:
		return After(pts[0])
	}
	return joins.intern(pts, coarse)
}

// dropKnown leaves out points that another point of pts comes after. A queue's
// clock says since which of its own operations it has been ordered after what,
// so that a point older than the lesson doesn't claim it.
func dropKnown(pts []Point) []Point {
	kept := pts[:0:len(pts)]
	var drop [16]bool
	if len(pts) > len(drop) {
		return pts
	}
	for i, p := range pts {
		for j, by := range pts {
			if i == j || drop[j] {
				continue
			}
			if q, _ := lookup(by.Queue); q != nil && q.know.covers(p, by.Value) {
				drop[i] = true
				break
			}
		}
	}
	for i, p := range pts {
		if !drop[i] {
			kept = append(kept, p)
		}
	}
	return kept
}

// Everything is the frontier after all that has been issued so far on every
// queue of the process. It is what an unknown frontier stands for at the moment
// a block is freed: uses are issued before their block is.
func Everything() Frontier {
	var buf [16]Point
	pts := buf[:0]
	registry.mu.Lock()
	for _, q := range registry.live {
		if v := q.issued.Load(); v > q.reached.Load() {
			pts = append(pts, Point{q.id, v})
		}
	}
	registry.mu.Unlock()
	return joinPoints(pts, false)
}

// MaxJoins bounds the distinct frontiers of several points kept at a time.
const MaxJoins = 1 << 16

type joinTable struct {
	mu     sync.Mutex
	last   uint64
	sets   map[uint64][]Point // by number; a number that is absent is reached
	byHash map[uint64]uint64
	sweep  int    // sweep when len(sets) gets here
	coarse uint64 // number of the overflow set, if present in sets
}

var joins = joinTable{sets: map[uint64][]Point{}, byHash: map[uint64]uint64{}, sweep: 64}

func hashPoints(pts []Point) uint64 {
	h := uint64(14695981039346656037) // FNV-1a over words
	for _, p := range pts {
		h = (h ^ uint64(p.Queue)) * 1099511628211
		h = (h ^ p.Value) * 1099511628211
	}
	return h
}

func (t *joinTable) intern(pts []Point, coarse bool) Frontier {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := hashPoints(pts)
	if n, ok := t.byHash[h]; ok && !coarse && slices.Equal(t.sets[n], pts) {
		return Frontier{value: n, set: setJoin}
	}
	if len(t.sets) >= t.sweep {
		t.sweepLocked()
	}
	if coarse || len(t.sets) >= MaxJoins {
		return t.coarseLocked(pts)
	}
	t.last++
	t.sets[t.last] = slices.Clone(pts)
	t.byHash[h] = t.last
	return Frontier{value: t.last, set: setJoin}
}

// coarseLocked raises the overflow set to the issued values of pts' queues.
func (t *joinTable) coarseLocked(pts []Point) Frontier {
	set, ok := t.sets[t.coarse]
	if !ok {
		t.last++
		t.coarse = t.last
	}
	for _, p := range pts {
		if q, _ := lookup(p.Queue); q != nil {
			p.Value = max(p.Value, q.issued.Load())
			if mutant.Is(mutant.CoarseFromSubmitted) {
				p.Value += uint64(q.fifo.n)
			}
		}
		i, found := slices.BinarySearchFunc(set, p, func(a, b Point) int { return int(a.Queue) - int(b.Queue) })
		if found {
			set[i].Value = max(set[i].Value, p.Value)
		} else {
			set = slices.Insert(set, i, p)
		}
	}
	t.sets[t.coarse] = set
	return Frontier{value: t.coarse, set: setCoarse}
}

func (t *joinTable) sweepLocked() {
	for n, pts := range t.sets {
		if allReached(pts) {
			t.dropLocked(n, pts)
		}
	}
	t.sweep = min(2*len(t.sets)+64, MaxJoins)
}

func (t *joinTable) dropLocked(n uint64, pts []Point) {
	delete(t.sets, n)
	if h := hashPoints(pts); t.byHash[h] == n {
		delete(t.byHash, h)
	}
}

func allReached(pts []Point) bool {
	for _, p := range pts {
		if !p.Reached() {
			return false
		}
	}
	return true
}

func (t *joinTable) reached(n uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	pts, ok := t.sets[n]
	if !ok {
		return true
	}
	if !allReached(pts) {
		return false
	}
	t.dropLocked(n, pts)
	return true
}

// points appends the unreached points of set n.
func (t *joinTable) points(n uint64, buf []Point) []Point {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.sets[n] {
		if !p.Reached() {
			buf = append(buf, p)
		}
	}
	return buf
}

// clock is what a queue's next operation is ordered after on other queues.
type clock struct {
	mu      sync.Mutex
	entries []lesson
}

// lesson says: operations from At on come after Point.
type lesson struct {
	Point
	At uint64
}

// learn records that operations of the clock's queue from at on come after p.
func (c *clock) learn(p Point, at uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.entries {
		if e := &c.entries[i]; e.Queue == p.Queue {
			if p.Value > e.Value {
				e.Value, e.At = p.Value, at
			}
			return
		}
	}
	if len(c.entries) >= 16 { // forget what is common knowledge
		c.entries = slices.DeleteFunc(c.entries, func(e lesson) bool { return e.Reached() })
	}
	c.entries = append(c.entries, lesson{p, at})
}

// covers reports whether the operation numbered at comes after p.
func (c *clock) covers(p Point, at uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.entries {
		if e := &c.entries[i]; e.Queue == p.Queue {
			return p.Value <= e.Value && at >= e.At
		}
	}
	return false
}

// snapshot appends all that the clock knows to buf.
func (c *clock) snapshot(buf []Point) []Point {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.entries {
		buf = append(buf, c.entries[i].Point)
	}
	return buf
}
