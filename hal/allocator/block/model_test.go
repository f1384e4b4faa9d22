package block

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// model is the slow and obvious account of an arena: what is live, and for each
// unit of address space the points of queues that may still touch it.
type model struct {
	*Allocator
	base   *fakeBase
	paged  *fakeVirtual // nil: slabs
	queues []*testQueue
	live   []held
	uses   map[uint64][]queue.Point // by unit
	last   map[*testQueue]clock     // of the newest operation
	clocks map[queue.Point]clock
	fail   func(format string, args ...any)
}

type held struct {
	block allocator.Block
	asked memory.Bytes
	uses  []queue.Point
}

func newModel(rt *rapid.T) *model {
	m := &model{uses: map[uint64][]queue.Point{}, last: map[*testQueue]clock{}, clocks: map[queue.Point]clock{}, fail: rt.Fatalf}
	capacity := memory.Bytes(rapid.IntRange(8, 64).Draw(rt, "capacity")) * page
	c := Config{
		MinSlab: memory.Bytes(rapid.SampledFrom([]int{unit, page, 4 * page}).Draw(rt, "min_slab")),
		Growth:  rapid.SampledFrom([]float64{-1, 4, 50}).Draw(rt, "growth"),
		Keep:    rapid.SampledFrom([]memory.Bytes{0, -1, page}).Draw(rt, "keep"),

		Magazine: rapid.IntRange(-1, 3).Draw(rt, "magazine"), // used after "contention"
	}
	var base allocator.Allocator
	if rapid.Bool().Draw(rt, "paged") {
		v := &modelVirtual{newFakeVirtual(rt, page, capacity), m}
		m.base, m.paged, base = v.fakeBase, v.fakeVirtual, v
	} else {
		m.base = newFakeBase(rt, capacity)
		m.base.gap = uint64(rapid.SampledFrom([]int{0, unit}).Draw(rt, "gap"))
		base = m.base
	}
	m.Allocator = newBlock(rt, base, c)
	for range 3 {
		m.queues = append(m.queues, newTestQueue(rt))
	}
	return m
}

// modelVirtual checks that what is unmapped may be.
type modelVirtual struct {
	*fakeVirtual
	model *model
}

func (v *modelVirtual) Virtual(int) allocator.Virtual { return v }

func (v *modelVirtual) Shrink(addr uint64, n int) allocator.Outcome {
	v.model.untouched(addr, n)
	return v.fakeVirtual.Shrink(addr, n)
}

func (v *modelVirtual) Move(from, to uint64, n int) allocator.Outcome {
	v.model.untouched(from, n)
	return v.fakeVirtual.Move(from, to, n)
}

func (m *model) untouched(addr uint64, n int) {
	end := addr + uint64(n*page)
	for _, h := range m.live {
		if h.block.Addr < end && addr < h.block.Addr+uint64(h.block.Size) {
			m.fail("pages at %#x are unmapped under the live block at %#x", addr, h.block.Addr)
		}
	}
	for u := addr / unit; u < end/unit; u++ {
		for _, p := range m.uses[u] {
			if !p.Reached() {
				m.fail("pages at %#x are unmapped before %v", addr, p)
			}
		}
	}
}

// queue draws a queue, or nil for the host.
func (m *model) queue(rt *rapid.T) *testQueue {
	if k := rapid.IntRange(-1, len(m.queues)-1).Draw(rt, "queue"); k >= 0 {
		return m.queues[k]
	}
	return nil
}

func (m *model) request(rt *rapid.T) allocator.Request {
	r := request(memory.Bytes(rapid.OneOf(rapid.IntRange(1, 3*unit), rapid.IntRange(1, 10*page)).Draw(rt, "size")), m.queue(rt))
	align := memory.Bytes(1) << rapid.SampledFrom([]int{0, 0, 0, 8, 9, 10, 12}).Draw(rt, "align")
	flags := rapid.SampledFrom([]allocator.Kind{0, 0, 0, allocator.MayWait, allocator.NoOrdered, allocator.NoPolled, allocator.NoOrdered | allocator.NoPolled, allocator.NoSubAlloc}).Draw(rt, "flags")
	r.Kind = allocator.MakeKind(0, align, 0, 0, flags)
	return r
}

// took checks a block that was handed out.
func (m *model) took(r allocator.Request, b allocator.Block, f queue.Frontier) {
	end := b.Addr + uint64(b.Size)
	if b.Size < r.Size || b.Addr&uint64(r.Kind.Align()-1) != 0 {
		m.fail("%d bytes aligned to %d: got %d at %#x", r.Size, r.Kind.Align(), b.Size, b.Addr)
	}
	for _, h := range m.live {
		if h.block.Addr < end && b.Addr < h.block.Addr+uint64(h.block.Size) {
			m.fail("block at %#x+%d overlaps the one at %#x+%d", b.Addr, b.Size, h.block.Addr, h.block.Size)
		}
	}
	if m.paged != nil && r.Kind&allocator.NoSubAlloc == 0 && !m.paged.isMapped(b.Addr, b.Size) {
		m.fail("block at %#x+%d isn't mapped", b.Addr, b.Size)
	}
	ground := r.Reuse(f)
	if ground == allocator.ReuseNo {
		m.fail("block for queue %d is guarded by %v", r.Who.Queue, f)
	}
	var known clock
	for _, q := range m.queues {
		if q.ID() == r.Who.Queue {
			known = m.last[q]
		}
	}
	for u := b.Addr / unit; u < end/unit; u++ {
		for _, p := range m.uses[u] {
			if p.Reached() || known[p.Queue] >= p.Value {
				continue
			}
			if ground != allocator.ReuseWait || !m.after(f, p) {
				m.fail("block at %#x for queue %d after %v comes before %v", b.Addr, r.Who.Queue, f, p)
			}
		}
	}
	m.live = append(m.live, held{block: b, asked: r.Size})
}

// submit issues work on q and notes what it comes after.
func (m *model) submit(rt *rapid.T, q *testQueue, wait, signal queue.Fence, other *testQueue) queue.Point {
	at, issued, err := q.Submit(&queue.Op{Kind: queue.Barrier}, wait, signal)
	if err != nil || !issued {
		rt.Fatalf("issued %v: %v", issued, err)
	}
	c := clock{}
	if m.last[q] != nil {
		maps.Copy(c, m.last[q])
	}
	if other != nil {
		for id, v := range m.last[other] {
			c[id] = max(c[id], v)
		}
	}
	c[at.Queue] = at.Value
	m.last[q], m.clocks[at] = c, c
	return at
}

// clock is what an operation comes after, itself included.
type clock map[queue.ID]uint64

// after reports whether whoever waits for f has waited for p.
func (m *model) after(f queue.Frontier, p queue.Point) bool {
	return slices.ContainsFunc(f.Points(nil), func(g queue.Point) bool { return m.clocks[g][p.Queue] >= p.Value })
}

// drawLive draws a live block, and false if there is none.
func (m *model) drawLive(rt *rapid.T) (int, bool) {
	if len(m.live) == 0 {
		return 0, false
	}
	return rapid.IntRange(0, len(m.live)-1).Draw(rt, "block"), true
}

func (m *model) release(rt *rapid.T, k int, q *testQueue) {
	h := &m.live[k]
	f := queue.ReadyNow()
	if q != nil {
		at := m.submit(rt, q, nil, nil, nil)
		f = queue.After(at)
		h.uses = append(h.uses, at)
	}
	if o := m.Free(h.block, f); o != allocator.OK {
		rt.Fatalf("free: %v", o)
	}
	if o := m.Free(h.block, f); o != allocator.Stale {
		rt.Fatalf("second free: %v", o)
	}
	for u := h.block.Addr / unit; u < (h.block.Addr+uint64(h.block.Size))/unit; u++ {
		kept := m.uses[u][:0]
		for _, p := range m.uses[u] {
			if !p.Reached() {
				kept = append(kept, p)
			}
		}
		m.uses[u] = append(kept, h.uses...)
	}
	m.live = slices.Delete(m.live, k, k+1)
}

// holds checks what must be true after each step.
func (m *model) holds(rt *rapid.T) {
	for _, ar := range m.opened() {
		ar.mu.Lock()
		if err := ar.checkLocked(); err != nil {
			rt.Fatalf("%v\n%s", err, ar.dumpLocked())
		}
		ar.mu.Unlock()
	}
	sum := memory.Bytes(0)
	for _, h := range m.live {
		sum += h.block.Size
	}
	if err := m.Check(); err != nil {
		rt.Fatal(err)
	}
	st := m.Stats()
	if st.Live != sum || st.Held != m.base.held || st.Idle != st.Held-st.Live || st.Pending > st.Idle || st.LargestFree > st.Idle {
		rt.Fatalf("live %d, base holds %d, figures %+v", sum, m.base.held, st)
	}
}

// history is the machine that tests and the fuzzer drive.
func history(rt *rapid.T) {
	m := newModel(rt)
	rt.Repeat(map[string]func(*rapid.T){
		"": m.holds,
		"alloc": func(rt *rapid.T) {
			r := m.request(rt)
			b, f, o := m.Allocate(r)
			switch o {
			case allocator.OK:
				m.took(r, b, f)
			case allocator.NeedsWait:
				dump0 := fmt.Sprintf("%v for %v\n%s", f, r, m.dump())
				if f.Reached() {
					rt.Fatalf("told to wait for %v", f)
				}
				for _, p := range f.Points(nil) {
					for range 100 {
						for _, q := range m.queues {
							if !p.Reached() {
								q.worker.Step()
							}
						}
					}
				}
				if !f.Reached() {
					rt.Fatalf("%v isn't reached", f)
				}
				b, f, o = m.Allocate(r)
				if o != allocator.OK {
					rt.Fatalf("after the wait: %v\n%s\n before:%s\n %v", o, m.dump(), dump0, f)
				}
				m.took(r, b, f)
			case allocator.Exhausted:
			default:
				rt.Fatalf("outcome %v", o)
			}
		},
		"alloc while a call fails": func(rt *rapid.T) {
			m.base.failAt = m.base.calls + rapid.IntRange(1, 4).Draw(rt, "call")
			r := m.request(rt)
			if b, f, o := m.Allocate(r); o == allocator.OK {
				m.took(r, b, f)
			}
			m.base.failAt = 0
		},
		"free": func(rt *rapid.T) {
			if k, ok := m.drawLive(rt); ok {
				m.release(rt, k, m.queue(rt))
			}
		},
		"use": func(rt *rapid.T) {
			k, ok := m.drawLive(rt)
			q := m.queue(rt)
			if !ok || q == nil {
				return
			}
			h := &m.live[k]
			at := m.submit(rt, q, nil, nil, nil)
			h.uses = append(h.uses, at)
			if o := h.block.Keeper.Ledger.Use(h.block.ID, queue.After(at)); o != allocator.OK {
				rt.Fatalf("use: %v", o)
			}
		},
		"order": func(rt *rapid.T) {
			a, b := m.queue(rt), m.queue(rt)
			if a == nil || b == nil || a == b {
				return
			}
			s := queue.NewSemaphore(0)
			m.submit(rt, b, nil, s.At(1), nil)
			m.submit(rt, a, s.At(1), nil, b)
		},
		"contention": func(rt *rapid.T) {
			for i := range m.shards {
				m.shards[i].hot = rapid.SampledFrom([]int{0, 3, hotFrees}).Draw(rt, "frees")
			}
		},
		"step": func(rt *rapid.T) {
			if q := m.queue(rt); q != nil {
				q.worker.Step()
			}
		},
		"trim": func(rt *rapid.T) {
			keep := memory.Bytes(rapid.IntRange(0, 20*page).Draw(rt, "keep"))
			before := m.Stats()
			gave := m.Trim(keep)
			after := m.Stats()
			if gave != before.Held-after.Held || gave > 0 && before.Idle <= keep {
				rt.Fatalf("trim to %d gave %d: %+v", keep, gave, after)
			}
		},
	})
	for len(m.live) > 0 {
		m.release(rt, 0, m.queue(rt))
	}
	for moved := true; moved; {
		moved = false
		for _, q := range m.queues {
			moved = q.worker.Step() || moved
		}
	}
	m.Trim(0)
	m.holds(rt)
	if m.base.held != 0 || m.Stats().Held != 0 {
		rt.Fatalf("%d bytes are left", m.base.held)
	}
	if err := m.Close(); err != nil {
		rt.Fatal(err)
	}
}

func (m *model) dump() string {
	s := ""
	for _, ar := range m.opened() {
		ar.mu.Lock()
		s += ar.dumpLocked()
		ar.mu.Unlock()
	}
	return fmt.Sprintf("%sbase holds %d of %d", s, m.base.held, m.base.capacity)
}

func TestHistoriesMatchTheModel(t *testing.T) {
	rapid.Check(t, history)
}

func FuzzHistories(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(history))
}
