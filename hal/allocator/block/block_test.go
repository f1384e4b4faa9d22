package block

import (
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// The tests below picture an arena with one letter a unit of 256 bytes: a live
// block by its name, '.' free, ':' free but not reached, '_' unmapped. Four units
// are a page, set off by '|'; slabs are set off by a space. The tail is left out.
const (
	unit = 256
	page = 4 * unit
)

// stage is an arena that rows of the table act on.
type stage struct {
	*Allocator
	t      *testing.T
	base   *fakeBase
	paged  *fakeVirtual // nil: slabs
	blocks map[string]allocator.Block
	queues map[string]*testQueue
}

func newStage(t *testing.T, paged bool, capacity memory.Bytes, c Config) *stage {
	s := &stage{t: t, blocks: map[string]allocator.Block{}, queues: map[string]*testQueue{}}
	if paged {
		s.paged = newFakeVirtual(t, page, capacity)
		s.base = s.paged.fakeBase
		s.Allocator = newBlock(t, s.paged, c)
	} else {
		s.base = newFakeBase(t, capacity)
		s.base.gap = 64 * unit
		s.Allocator = newBlock(t, s.base, c)
	}
	s.base.record = true
	return s
}

func (s *stage) queue(name string) *testQueue {
	if name == "" {
		return nil
	}
	if s.queues[name] == nil {
		s.queues[name] = newTestQueue(s.t)
	}
	return s.queues[name]
}

// set makes the picture: everything is allocated in order, then what is to be
// unmapped is freed and given back, then what is to be free is freed.
func (s *stage) set(picture string) {
	var holes []allocator.Block
	var hollows []allocator.Block
	for _, part := range strings.Fields(picture) {
		text := strings.ReplaceAll(part, "|", "")
		if s.paged == nil { // a slab of just this size
			b := mustAlloc(s.t, s.Allocator, request(memory.Bytes(len(text))*unit, nil))
			mustFree(s.t, s.Allocator, b, queue.ReadyNow())
		}
		var fill []allocator.Block
		for i := 0; i < len(text); {
			j := i
			for j < len(text) && text[j] == text[i] {
				j++
			}
			b := mustAlloc(s.t, s.Allocator, request(memory.Bytes(j-i)*unit, nil))
			switch text[i] {
			case '.':
				fill = append(fill, b)
			case '_':
				hollows = append(hollows, b)
			default:
				s.blocks[text[i:i+1]] = b
			}
			i = j
		}
		holes = append(holes, fill...)
	}
	for _, b := range hollows {
		mustFree(s.t, s.Allocator, b, queue.ReadyNow())
	}
	if len(hollows) > 0 {
		s.Trim(0)
	}
	for _, b := range holes {
		mustFree(s.t, s.Allocator, b, queue.ReadyNow())
	}
	s.base.log = nil
}

// picture shows the arena.
func (s *stage) picture() string {
	ar := s.arenas[0].Load()
	if ar == nil {
		return ""
	}
	ar.mu.Lock()
	defer ar.mu.Unlock()
	names := map[uint64]string{}
	for name, b := range s.blocks {
		names[b.Addr] = name
	}
	draw := func(first uint32) string {
		var b strings.Builder
		for i := first; i != 0; {
			n := ar.node(i)
			letter := names[n.addr]
			switch {
			case n.state == hollow:
				letter = "_"
				if n.next == 0 {
					i = 0
					continue
				}
			case n.state == free && ar.pieces.ready(i).Reached():
				letter = "."
			case n.state == free:
				letter = ":"
			}
			for range n.size / unit {
				b.WriteString(letter)
				if n.slab == 0 && (b.Len()+1)%5 == 0 {
					b.WriteByte('|')
				}
			}
			i = n.next
		}
		return strings.TrimSuffix(b.String(), "|")
	}
	if s.paged != nil {
		return draw(ar.pages.first)
	}
	var slabs []string
	for id := range ar.slabs {
		if first := ar.slabs[id].first; first != 0 {
			slabs = append(slabs, draw(first))
		}
	}
	return strings.Join(slabs, " ")
}

// do carries out a line of operations, separated by commas:
//
//	c=3 q1 align 4    allocate three units for queue q1 at a multiple of four
//	c=3 q1 wait       … that may be made to wait
//	-c q1             free c after work issued on q1
//	step q1           carry out what was issued on q1
//	trim 4            down to four idle units
//
// It returns the outcome of the last.
func (s *stage) do(line string) string {
	out := "ok"
	for op := range strings.SplitSeq(line, ",") {
		f := strings.Fields(op)
		name, size, alloc := strings.Cut(f[0], "=")
		switch {
		case alloc:
			n, err := strconv.Atoi(size)
			require.NoError(s.t, err)
			r := request(memory.Bytes(n)*unit, nil)
			for k := 1; k < len(f); k++ {
				switch f[k] {
				case "align":
					k++
					a, err := strconv.Atoi(f[k])
					require.NoError(s.t, err)
					r.Kind = allocator.MakeKind(0, memory.Bytes(a)*unit, 0, 0, 0)
				case "wait":
					r.Kind |= allocator.MayWait
				case "own":
					r.Kind |= allocator.NoSubAlloc
				default:
					r.Who.Queue = s.queue(f[k]).ID()
				}
			}
			b, after, o := s.Allocate(r)
			if out = o.String(); o == allocator.OK {
				s.blocks[name] = b
				require.NotEqual(s.t, allocator.ReuseNo, r.Reuse(after))
			}
		case f[0] == "step":
			s.queue(f[1]).drain()
		case f[0] == "trim":
			n, err := strconv.Atoi(f[1])
			require.NoError(s.t, err)
			s.Trim(memory.Bytes(n) * unit)
		default:
			after := queue.ReadyNow()
			if len(f) > 1 {
				after = s.queue(f[1]).issue(s.t)
			}
			name := f[0][1:]
			out = s.Free(s.blocks[name], after).String()
			delete(s.blocks, name)
		}
		check(s.t, s.Allocator)
	}
	return out
}

type row struct {
	name, before, do, after string
	outcome                 string // of the last operation; "" is ok
	calls                   string // of the base; "" is none
	capacity                int    // units; 0: any
}

func (r row) run(t *testing.T, paged bool, c Config) {
	t.Run(r.name, func(t *testing.T) {
		s := newStage(t, paged, memory.Bytes(r.capacity)*unit, c)
		s.set(r.before)
		require.Equal(t, r.before, s.picture(), "before")
		out := s.do(r.do)
		if r.outcome == "" {
			r.outcome = "ok"
		}
		assert.Equal(t, r.outcome, out)
		assert.Equal(t, r.after, s.picture(), "after %s", r.do)
		assert.Equal(t, r.calls, strings.Join(s.base.log, ", "))
	})
}

func TestSlabs(t *testing.T) {
	c := Config{MinSlab: unit, Growth: -1}
	for _, r := range []row{
		{name: "the first request makes a slab", before: "", do: "a=3", after: "aaa", calls: "alloc 768"},
		{name: "the tightest hole is taken", before: "....a..b...c", do: "x=2", after: "....axxb...c"},
		{name: "the lowest of equal holes is taken", before: "a..b..c..d", do: "x=2", after: "axxb..c..d"},
		{name: "a hole is split at its low end", before: "a....b", do: "x=1", after: "ax...b"},
		{name: "an exact fit leaves nothing", before: "a..b", do: "x=2", after: "axxb"},
		{name: "free merges with nothing", before: "abc", do: "-b", after: "a.c"},
		{name: "free merges below", before: "..bc", do: "-b,x=3", after: "xxxc"},
		{name: "free merges above", before: "ab..c", do: "-b,x=3", after: "axxxc"},
		{name: "free merges on both sides", before: "a.b.c", do: "-b,x=3", after: "axxxc"},
		{name: "alignment leaves a free front", before: "a.......", do: "x=2 align 4", after: "a...xx.."},
		{name: "the front is used again", before: "a.......", do: "x=2 align 4,y=3", after: "ayyyxx.."},
		{name: "alignment on reuse", before: "abbbcccc", do: "-b,-c,x=4 align 4", after: "a...xxxx"},
		{name: "a hole too small for the alignment is passed over", before: "a...b......c", do: "x=3 align 4", after: "a...b...xxxc"},
		{name: "any slab is searched", before: "aaa. bb.. cc...", do: "x=3", after: "aaa. bb.. ccxxx"},
		{name: "slabs never merge", before: "aabb cc", do: "-a,-b,-c,x=5", after: ".... .. xxxxx", calls: "alloc 1280"},
		{name: "pending memory of the same queue is used", before: "ab..c", do: "-b q1,x=3 q1", after: "axxxc"},
		{name: "pending memory doesn't hide what is ready", before: "ab.c...d", do: "-b q1,x=2 q2", after: "a:.cxx.d"},
		{name: "pending memory that is reached is used", before: "abbc", do: "-b q1,step q1,x=2 q2", after: "axxc"},
		{name: "pending memory makes a slab", before: "abbc", do: "-b q1,x=2 q2", after: "a::c xx", calls: "alloc 512"},
		{name: "pending memory is waited for if the base has no more", before: "abbc", do: "-b q1,x=2 q2", after: "a::c", outcome: "needs wait", calls: "alloc 512", capacity: 4},
		{name: "pending memory is handed out with a wait where that is allowed", before: "abbc", do: "-b q1,x=2 q2 wait", after: "axxc"},
		{name: "ready memory is better than a wait", before: "abbc...d", do: "-b q1,x=2 q2 wait", after: "a::cxx.d"},
		{name: "the host waits for what is reached", before: "abbc", do: "-b q1,x=2", after: "a::c", outcome: "needs wait", calls: "alloc 512", capacity: 4},
		{name: "both halves of a split stay pending", before: "abbbc", do: "-b q1,x=1 q1,y=2 q2", after: "ax::c", outcome: "needs wait", calls: "alloc 512", capacity: 5},
		{name: "a free slab goes back before a request fails", before: "aa bb", do: "-a,-b,x=4", after: "xxxx", calls: "alloc 1024, free 512, free 512, alloc 1024", capacity: 4},
		{name: "a pending slab is waited for", before: "aa bb", do: "-a q1,-b q1,x=4 q2", after: ":: ::", outcome: "needs wait", calls: "alloc 1024", capacity: 4},
		{name: "what live blocks hold is not to be had", before: "aa bb", do: "-a,x=3", after: "bb", outcome: "exhausted", calls: "alloc 768, free 512, alloc 768", capacity: 4},
		{name: "trim takes the highest first", before: "aa bb cc", do: "-a,-b,-c,trim 4", after: ".. ..", calls: "free 512"},
		{name: "trim leaves what is pending", before: "aa bb", do: "-a q1,-b,trim 0", after: "::", calls: "free 512"},
		{name: "a block of its own", before: "a...", do: "x=2 own", after: "a... xx", calls: "alloc 512"},
		{name: "a block of its own goes back at once", before: "a...", do: "x=2 own,-x q1", after: "a...", calls: "alloc 512, free 512"},
	} {
		r.run(t, false, c)
	}
}

func TestPages(t *testing.T) {
	for _, r := range []row{
		{name: "the first request maps pages", before: "", do: "a=5", after: "aaaa|a...", calls: "grow 0+2"},
		{name: "the rest of a page is used", before: "aaaa|a...", do: "b=3", after: "aaaa|abbb"},
		{name: "the last hole grows", before: "aaaa|a...", do: "b=5", after: "aaaa|abbb|bb..", calls: "grow 2+1"},
		{name: "the low end breaks fewer pages", before: "a...|....|bbbb", do: "x=3", after: "axxx|....|bbbb"},
		{name: "the high end breaks fewer pages", before: "a...|....|..bb", do: "x=2", after: "axx.|....|..bb"},
		{name: "a whole page is spared at the high end", before: "aaaa|....|..bb", do: "x=2", after: "aaaa|....|xxbb"},
		{name: "a looser hole is taken to spare a page", before: "aaaa|....|bb..|.ccc", do: "x=2", after: "aaaa|....|bbxx|.ccc"},
		{name: "a page is broken rather than one mapped", before: "aaaa|....|bbbb", do: "x=3", after: "aaaa|xxx.|bbbb"},
		{name: "the last hole is the loosest", before: "aaaa|....|bb..", do: "x=2", after: "aaaa|xx..|bb.."},
		{name: "what is mapped goes before what is not", before: "aaaa|____|bbbb|....|cccc", do: "x=4", after: "aaaa|____|bbbb|xxxx|cccc"},
		{name: "an unmapped hole is used", before: "aaaa|____|bbbb", do: "x=4", after: "aaaa|xxxx|bbbb", calls: "grow 1+1"},
		{name: "a hole is free and unmapped", before: "aa..|____|..bb", do: "x=8", after: "aaxx|xxxx|xxbb", calls: "grow 1+1"},
		{name: "only the pages that are touched are mapped", before: "aa..|____|____|bbbb", do: "x=3", after: "aaxx|x...|____|bbbb", calls: "grow 1+1"},
		{name: "a free page moves when the driver has no more", before: "aaaa|....|bbbb|cc..", do: "x=6", after: "aaaa|____|bbbb|ccxx|xxxx", calls: "grow 4+1, move 1→4+1", capacity: 16},
		{name: "the smallest runs move first", before: "aaaa|....|....|bbbb|....|cccc", do: "x=10", after: "aaaa|____|____|bbbb|____|cccc|xxxx|xxxx|xx..", calls: "grow 6+3, move 4→6+1, move 1→7+2", capacity: 24},
		{name: "part of a run moves from its high end", before: "aaaa|....|....|bbbb|....|ccc.", do: "x=9", after: "aaaa|....|____|bbbb|____|cccx|xxxx|xxxx", calls: "grow 6+2, move 4→6+1, move 2→7+1", capacity: 24},
		{name: "pending pages stay", before: "aaaa|bbbb|cccc", do: "-b q1,x=5 q2", after: "aaaa|::::|cccc", outcome: "exhausted", calls: "grow 3+2, grow 3+2", capacity: 12},
		{name: "pending pages are waited for", before: "aaaa|bbbb|bbbb|cccc", do: "-b q1,x=5 q2", after: "aaaa|::::|::::|cccc", outcome: "needs wait", calls: "grow 4+2, grow 4+2", capacity: 16},
		{name: "pending pages move when they are reached", before: "aaaa|bbbb|cc..", do: "-b q1,step q1,x=6 q2", after: "aaaa|____|ccxx|xxxx", calls: "grow 3+1, move 1→3+1", capacity: 12},
		{name: "pending memory below the tail is left alone", before: "aaaa|b...", do: "-b q1,x=5 q2", after: "aaaa|:xxx|xx..", calls: "grow 2+1"},
		{name: "pending memory of the same queue grows", before: "aaaa|b...", do: "-b q1,x=5 q1", after: "aaaa|xxxx|x:::", calls: "grow 2+1"},
		{name: "a page partly under a live block doesn't move", before: "aaa.|...b|....|cccc", do: "x=8", after: "aaa.|...b|....|cccc", outcome: "exhausted", calls: "grow 4+2, grow 4+1", capacity: 16},
		{name: "trim takes the highest first", before: "....|....|aaaa|....|bbbb", do: "trim 8", after: "....|....|aaaa|____|bbbb", calls: "shrink 3+1"},
		{name: "trim leaves parts of pages", before: "....|..aa|aa..|....", do: "trim 0", after: "____|..aa|aa..", calls: "shrink 3+1, shrink 0+1"},
		{name: "trim leaves what is pending", before: "aaaa|bbbb|cccc", do: "-a q1,-c,trim 0", after: "::::|bbbb", calls: "shrink 2+1"},
		{name: "alignment of a page", before: "aa..|....|bbbb", do: "x=4 align 4", after: "aa..|xxxx|bbbb"},
		{name: "a block of its own", before: "aa..", do: "x=2 own", after: "aa..", calls: "alloc 512"},
	} {
		r.run(t, true, Config{})
	}
}

func TestWholePagesMoveButGrowthComesFirst(t *testing.T) {
	s := newStage(t, true, 24*unit, Config{}) // six pages
	s.set("aaaa|....|bbbb|cccc|....")
	require.Equal(t, "ok", s.do("x=12"), "one page under the last hole, one made, one moved")
	require.Equal(t, "aaaa|____|bbbb|cccc|xxxx|xxxx|xxxx", s.picture())
	require.Equal(t, []string{"grow 5+2", "grow 5+1", "move 1→6+1"}, s.base.log)
}

func TestPagesThatCannotMoveYetAreTakenFirst(t *testing.T) {
	// x could take eight whole pages, or nine of which one is missing. Those under b
	// are in use by x's own queue: good enough for x, but not to be moved to where
	// more are missing.
	s := newStage(t, true, 0, Config{})
	s.set("zzz.|bbbb|bbbb|bbbb|bbbb|bbbb|bbbb|bbbb|bbbb|____|____|____|..cc|ddd.|...e")
	s.base.capacity = s.base.held
	require.Equal(t, "ok", s.do("-d,-b q1"))
	require.Equal(t, "ok", s.do("x=33 q1 align 4"))
	require.Equal(t, "zzz.|xxxx|xxxx|xxxx|xxxx|xxxx|xxxx|xxxx|xxxx|x:::|____|____|..cc|____|...e", s.picture())
}

func TestGivingBackAndMakingAnewIsTheLastResort(t *testing.T) {
	s := newStage(t, true, 12*unit, Config{})
	s.set("aaaa|....|bb..")
	s.paged.noMove = true
	require.Equal(t, "ok", s.do("x=6"))
	require.Equal(t, "aaaa|____|bbxx|xxxx", s.picture())
	require.Equal(t, []string{"grow 3+1", "move 1→3+1", "shrink 1+1", "grow 3+1"}, s.base.log)
}

func TestSizeAndAlignmentAreCheckedBeforeRounding(t *testing.T) { // faults 67
	for _, paged := range []bool{false, true} {
		s := newStage(t, paged, 0, Config{})
		for _, r := range []allocator.Request{
			request(math.MaxInt64, nil),
			request(math.MaxInt64-255, nil),
			request(-1, nil),
			aligned(1, 1<<62, nil),
			aligned(math.MaxInt64/2+2, 1<<62, nil),
			{Size: 1, Kind: allocator.Kind(63) << 4},
		} {
			if !paged && r.Size == 1 && r.Kind.Align() == 1<<62 {
				continue // the base's to judge
			}
			_, _, o := s.Allocate(r)
			require.Equal(t, allocator.TooLarge, o, "%d aligned to %d", r.Size, r.Kind.Align())
		}
		st := s.Stats()
		require.Zero(t, st.Live)
		require.Zero(t, st.Allocs)
	}
}

func TestMoreThanTheRangeIsTooLarge(t *testing.T) {
	v := newFakeVirtual(t, page, 0)
	v.maxRange = 64 * page
	a := newBlock(t, v, Config{})
	_, _, o := a.Allocate(request(65*page, nil))
	require.Equal(t, allocator.TooLarge, o)
	_, _, o = a.Allocate(aligned(64*page-unit, page, nil))
	require.Equal(t, allocator.TooLarge, o)
	mustAlloc(t, a, request(64*page, nil))
	_, _, o = a.Allocate(request(1, nil))
	require.Equal(t, allocator.Exhausted, o, "no addresses are left")
}

func TestTheRangeStepsDownWhereAddressesAreRefused(t *testing.T) {
	v := newFakeVirtual(t, page, 0)
	v.maxRange = 3 * memory.GiB
	a := newBlockOf(t, v, Config{}, 8*memory.TiB)
	mustAlloc(t, a, request(1, nil))
	require.Equal(t, 2*memory.GiB, v.reserved)
	require.NoError(t, a.Close())
}

func TestSlabsStepDownStrictlyAndEndAtTheNeed(t *testing.T) { // faults 40
	b := newFakeBase(t, 0)
	b.record = true
	b.limit = 1
	a := newBlock(t, b, Config{})
	_, _, o := a.Allocate(request(2304, nil))
	require.Equal(t, allocator.OverLimit, o)
	last := memory.Bytes(math.MaxInt64)
	for _, r := range b.requests {
		require.Less(t, r.Size, last)
		last = r.Size
	}
	require.EqualValues(t, 2304, last)
	require.LessOrEqual(t, len(b.requests), stepsDown+1)
	require.EqualValues(t, 1, a.Stats().Failed)
}

func TestSlabsKeepToTheLargestAllocationOfTheHeap(t *testing.T) {
	b := newFakeBase(t, 0)
	b.record = true
	heaps := memory.Heaps{{MaxAllocation: 3 * memory.MiB, Usage: memory.Transfer}}
	a, err := New(b, &allocator.Env{Heaps: heaps}, Config{MinSlab: 16 * memory.MiB})
	require.NoError(t, err)
	mustAlloc(t, a, request(1, nil))
	mustAlloc(t, a, request(4*memory.MiB, nil))
	require.Equal(t, []string{"alloc 3145728", "alloc 4194304"}, b.log)
	require.Equal(t, memory.Transfer, b.requests[0].Kind.Usage())
}

func TestARefusedRangeIsCounted(t *testing.T) {
	v := newFakeVirtual(t, page, 0)
	v.maxRange = 1
	a := newBlock(t, v, Config{})
	_, _, o := a.Allocate(request(1, nil))
	require.Equal(t, allocator.Exhausted, o)
	require.EqualValues(t, 1, a.Stats().Failed)
}

func TestACappedPoolReachesItsCap(t *testing.T) { // faults 8
	b := newFakeBase(t, 1024*memory.MiB)
	a := newBlock(t, b, Config{MinSlab: 256 * memory.MiB})
	mustFree(t, a, mustAlloc(t, a, request(1, nil)), queue.ReadyNow())
	require.Equal(t, 256*memory.MiB, a.Stats().Held)
	mustFree(t, a, mustAlloc(t, a, request(1024*memory.MiB, nil)), queue.ReadyNow())
	require.EqualValues(t, 1, a.Stats().Evicted)
	emptied(t, a, &b.fakeDriver)
}

func TestGrownMemoryIsUsedAgain(t *testing.T) { // faults 12
	for _, keep := range []memory.Bytes{0, -1} {
		b := newFakeBase(t, 0)
		a := newBlock(t, b, Config{MaxSlab: 64 * memory.MiB, Keep: keep})
		for range 100 {
			x := mustAlloc(t, a, request(100*memory.MiB, nil))
			y := mustAlloc(t, a, request(90*memory.MiB, nil))
			mustFree(t, a, x, queue.ReadyNow())
			mustFree(t, a, y, queue.ReadyNow())
		}
		require.LessOrEqual(t, a.Stats().PeakHeld, 200*memory.MiB)
	}
}

func TestIdlePagesMakeRoomForALargeBlock(t *testing.T) { // faults 1
	v := newFakeVirtual(t, 2*memory.MiB, 40*memory.MiB)
	a := newBlock(t, v, Config{})
	x := mustAlloc(t, a, request(20*memory.MiB, nil))
	y := mustAlloc(t, a, request(20*memory.MiB, nil))
	mustFree(t, a, x, queue.ReadyNow())
	z := mustAlloc(t, a, request(2*memory.MiB, nil))
	mustFree(t, a, y, queue.ReadyNow())
	require.Equal(t, 38*memory.MiB, a.Stats().LargestFree)
	mustFree(t, a, mustAlloc(t, a, request(30*memory.MiB, nil)), queue.ReadyNow())
	mustFree(t, a, z, queue.ReadyNow())
	emptied(t, a, &v.fakeDriver)
}

func TestFiguresTellFragmentedFromFull(t *testing.T) { // faults 1, without pages
	b := newFakeBase(t, 40*memory.MiB)
	a := newBlock(t, b, Config{})
	x := mustAlloc(t, a, request(20*memory.MiB, nil))
	y := mustAlloc(t, a, request(20*memory.MiB, nil))
	mustFree(t, a, x, queue.ReadyNow())
	z := mustAlloc(t, a, request(2*memory.MiB, nil))
	w := mustAlloc(t, a, request(2*memory.MiB, nil))
	mustFree(t, a, y, queue.ReadyNow())
	y = mustAlloc(t, a, request(19*memory.MiB, nil))
	_, _, o := a.Allocate(request(17*memory.MiB, nil))
	require.Equal(t, allocator.Exhausted, o)
	st := a.Stats()
	require.GreaterOrEqual(t, st.Idle, 17*memory.MiB)
	require.Less(t, st.LargestFree, 17*memory.MiB)
	for _, b := range []allocator.Block{y, z, w} {
		mustFree(t, a, b, queue.ReadyNow())
	}
	emptied(t, a, &b.fakeDriver)
}

func TestThePoolIsSearchedAgainAfterAWait(t *testing.T) { // faults 29
	for _, paged := range []bool{false, true} {
		s := newStage(t, paged, 4*unit, Config{MinSlab: unit})
		q1, q2 := newTestQueue(t), newTestQueue(t)
		r := request(4*unit, q1)
		b, _, o := s.Allocate(r)
		require.Equal(t, allocator.OK, o)
		require.Equal(t, allocator.OK, b.Keeper.Ledger.Use(b.ID, q2.issue(t)))
		require.Equal(t, allocator.OK, s.Free(b, q1.issue(t)))
		_, after, o := s.Allocate(r)
		require.Equal(t, allocator.NeedsWait, o)
		require.False(t, after.Reached())
		q1.drain()
		require.False(t, after.Reached(), "the other queue still uses it")
		q2.drain()
		require.True(t, after.Reached())
		mustAlloc(t, s.Allocator, r)
	}
}

func TestMergedMemoryWaitsForAllOfItsUses(t *testing.T) { // faults 44
	s := newStage(t, false, 0, Config{MinSlab: unit, Growth: -1})
	s.set("aabbcc")
	require.Equal(t, "ok", s.do("-a q1,-b q2,x=4 q3"))
	require.Equal(t, "::::cc xxxx", s.picture(), "neither queue is known to q3")
	require.Equal(t, "ok", s.do("step q1,y=4 q2"))
	require.Equal(t, "yyyycc xxxx", s.picture(), "q1 is reached, q2 is the request's own")
}

func TestTheRestOfASplitKeepsItsFrontier(t *testing.T) { // faults 53
	s := newStage(t, false, 8*unit, Config{MinSlab: unit, Growth: -1})
	s.set("aaaabbbb")
	require.Equal(t, "ok", s.do("-a q1,x=1 q1"))
	require.Equal(t, "needs wait", s.do("y=3 q3"))
	require.Equal(t, "ok", s.do("step q1,y=3 q3"))
	require.Equal(t, "xyyybbbb", s.picture())
}

func TestAQueueThatIsOrderedAfterTheUsesNeedsNoWait(t *testing.T) {
	s := newStage(t, false, 4*unit, Config{MinSlab: unit})
	s.set("aaaa")
	q1, q2 := s.queue("q1"), s.queue("q2")
	require.Equal(t, allocator.OK, s.Free(s.blocks["a"], q1.issue(t)))
	q2.after(t, q1)
	mustAlloc(t, s.Allocator, request(4*unit, q2))
	require.EqualValues(t, 1, s.Stats().Reused[allocator.ReuseOrdered])
	q1.drain()
	q2.drain()
}

func TestMappedPagesGoBackIfTheRestCantBeMapped(t *testing.T) { // faults 64
	s := newStage(t, true, 0, Config{})
	v := s.paged
	s.set("aaaa|____|....|____|bbbb")
	held := s.Stats().Held
	before := s.picture()
	v.capacity = 4 * page
	require.Equal(t, "exhausted", s.do("x=12"))
	require.Equal(t, []string{"grow 1+1", "grow 3+1", "shrink 1+1", "grow 1+1"}, v.log[:4])
	require.Equal(t, "shrink 1+1", v.log[len(v.log)-1])
	require.Equal(t, held, s.Stats().Held)
	require.Equal(t, before, s.picture())
	v.capacity = 5 * page
	require.Equal(t, "ok", s.do("x=12"))
	require.Equal(t, "aaaa|xxxx|xxxx|xxxx|bbbb", s.picture())
}

func TestAlignmentIsHonouredOnReuseAndAfterSplits(t *testing.T) { // faults 72
	for _, paged := range []bool{false, true} {
		s := newStage(t, paged, 0, Config{})
		var blocks []allocator.Block
		for round := range 4 {
			for k := range 13 {
				align := memory.Bytes(1) << k
				blocks = append(blocks, mustAlloc(t, s.Allocator, aligned(100*memory.Bytes(round*7+k+1), align, nil)))
			}
			for len(blocks) > 20 {
				mustFree(t, s.Allocator, blocks[round], queue.ReadyNow())
				blocks = append(blocks[:round], blocks[round+1:]...)
			}
		}
	}
}

func TestClassesHoldEverySize(t *testing.T) { // faults 121
	for _, u := range []memory.Bytes{minUnit, 256, maxMinBlock} {
		var x index
		var p pieces
		x.init(&p, u)
		last := -1
		for size := u; size > 0 && size <= memory.MaxBytes-u; size += max(u, size/97/u*u) {
			c := x.classOf(size)
			require.GreaterOrEqual(t, c, last)
			require.Less(t, c, classes)
			last = c
		}
		require.Less(t, x.classOf(memory.MaxBytes), classes)
	}
	for _, paged := range []bool{false, true} {
		s := newStage(t, paged, 0, Config{MinSlab: 50331648})
		a := mustAlloc(t, s.Allocator, aligned(576, 2, nil))
		b := mustAlloc(t, s.Allocator, aligned(648, 2, nil))
		mustFree(t, s.Allocator, a, queue.ReadyNow())
		for size := memory.Bytes(720); size < 1<<25; size += size / 3 {
			mustAlloc(t, s.Allocator, aligned(size, 2, nil))
		}
		mustFree(t, s.Allocator, b, queue.ReadyNow())
	}
}

func TestNothingIsLostWhenNeighboursMerge(t *testing.T) { // faults 124
	b := newFakeBase(t, 1024)
	a := newBlock(t, b, Config{MinBlock: 16, MinSlab: 1024})
	mustFree(t, a, mustAlloc(t, a, request(176, nil)), queue.ReadyNow())
	mustFree(t, a, mustAlloc(t, a, request(144, nil)), queue.ReadyNow())
	x := mustAlloc(t, a, request(16, nil))
	y := mustAlloc(t, a, request(96, nil))
	mustFree(t, a, x, queue.ReadyNow())
	z := mustAlloc(t, a, request(144, nil))
	w := mustAlloc(t, a, request(96, nil))
	for _, b := range []allocator.Block{y, z, w} {
		mustFree(t, a, b, queue.ReadyNow())
	}
	require.EqualValues(t, 1024, a.Stats().LargestFree)
	emptied(t, a, &b.fakeDriver)
}

func TestWrongFreesAreToldApart(t *testing.T) { // faults 126
	s := newStage(t, false, 0, Config{})
	other := newBlock(t, newFakeBase(t, 0), Config{})
	b := mustAlloc(t, s.Allocator, request(1024, nil))
	require.Equal(t, allocator.Foreign, other.Free(b, queue.ReadyNow()))
	o := mustAlloc(t, other, request(1024, nil))
	require.Equal(t, allocator.Foreign, s.Free(o, queue.ReadyNow()))
	require.Equal(t, allocator.Foreign, s.Free(allocator.Block{Addr: b.Addr, Size: b.Size}, queue.ReadyNow()))
	bad := b
	bad.ID = 1 << 60
	require.Equal(t, allocator.Foreign, s.Free(bad, queue.ReadyNow()))
	require.Equal(t, allocator.OK, b.Keeper.Ledger.Pin(b.ID, 1))
	require.Equal(t, allocator.Busy, s.Free(b, queue.ReadyNow()))
	require.Equal(t, allocator.OK, b.Keeper.Ledger.Pin(b.ID, -1))
	mustFree(t, s.Allocator, b, queue.ReadyNow())
	require.Equal(t, allocator.Stale, s.Free(b, queue.ReadyNow()))
	c := mustAlloc(t, s.Allocator, request(1024, nil))
	require.Equal(t, b.Addr, c.Addr)
	require.Equal(t, allocator.Stale, s.Free(b, queue.ReadyNow()), "the memory is somebody else's now")
	mustFree(t, s.Allocator, c, queue.ReadyNow())
	st := s.Stats()
	require.EqualValues(t, 2, st.Allocs)
	require.EqualValues(t, 2, st.Frees)
	require.Zero(t, st.Live)
}

func TestAnUnknownFrontierIsEverythingIssued(t *testing.T) {
	s := newStage(t, false, 4*unit, Config{MinSlab: unit})
	q := newTestQueue(t)
	b := mustAlloc(t, s.Allocator, request(4*unit, nil))
	q.issue(t)
	mustFree(t, s.Allocator, b, queue.Frontier{})
	_, _, o := s.Allocate(request(4*unit, nil))
	require.Equal(t, allocator.NeedsWait, o)
	q.drain()
	mustAlloc(t, s.Allocator, request(4*unit, nil))
}

func TestFreshMemoryHasTheFrontierOfTheBase(t *testing.T) {
	b := newFakeBase(t, 0)
	q1, q2 := newTestQueue(t), newTestQueue(t)
	a := newBlock(t, b, Config{})
	b.ready = q1.issue(t)
	_, f, o := a.Allocate(request(unit, q1))
	require.Equal(t, allocator.OK, o)
	require.Equal(t, b.ready, f)
	_, f, o = a.Allocate(request(unit, q2))
	require.Equal(t, allocator.OK, o, "another queue, and a base that promised too much: the stack will see to it")
	require.Equal(t, b.ready, f)
	held := a.Stats().Held
	q1.drain()
	mustAlloc(t, a, request(unit, q2))
	require.Equal(t, held, a.Stats().Held, "the slab was kept")
}

func TestMemoryGoesBackWithItsFrontier(t *testing.T) {
	b := newFakeBase(t, 0)
	q := newTestQueue(t)
	a := newBlock(t, b, Config{})
	x := mustAlloc(t, a, request(unit, q))
	f := q.issue(t)
	mustFree(t, a, x, f)
	require.NoError(t, a.Close())
	require.Equal(t, []queue.Frontier{f}, b.pending)
	require.Zero(t, b.held)
}

func TestCloseGivesBackWhatIsIdleAndLaterWhatWasLive(t *testing.T) {
	for _, paged := range []bool{false, true} {
		s := newStage(t, paged, 0, Config{})
		x := mustAlloc(t, s.Allocator, request(3*memory.MiB, nil))
		y := mustAlloc(t, s.Allocator, request(3*memory.MiB, nil))
		mustFree(t, s.Allocator, x, queue.ReadyNow())
		require.NoError(t, s.Close())
		require.NoError(t, s.Close())
		require.LessOrEqual(t, s.base.held, 4*memory.MiB)
		_, _, o := s.Allocate(request(1, nil))
		require.Equal(t, allocator.Unsupported, o)
		seen := 0
		s.Live(func(b allocator.Block, i allocator.Info) bool {
			seen++
			require.Equal(t, 3*memory.MiB, i.Asked)
			require.Equal(t, y.ID, b.ID)
			return true
		})
		require.Equal(t, 1, seen)
		mustFree(t, s.Allocator, y, queue.ReadyNow())
		require.Zero(t, s.base.held)
		if paged {
			require.Zero(t, s.paged.reserved)
		}
	}
}

func TestCloseTellsOfPagesStillInUse(t *testing.T) {
	s := newStage(t, true, 0, Config{})
	q := newTestQueue(t)
	b := mustAlloc(t, s.Allocator, request(4*page, q))
	mustFree(t, s.Allocator, b, q.issue(t))
	require.ErrorContains(t, s.Close(), "4KiB")
	q.drain()
	require.NoError(t, s.Close())
	require.Zero(t, s.paged.reserved)
}

func TestPendingMemoryIsListedOldestFirst(t *testing.T) {
	s := newStage(t, false, 0, Config{MinSlab: unit})
	s.set("abcdef")
	s.do("-e q1,-a q2,-c q1")
	var sizes []memory.Bytes
	var fs []queue.Frontier
	s.Pending(func(f queue.Frontier, size memory.Bytes) bool {
		fs = append(fs, f)
		sizes = append(sizes, size)
		return true
	})
	require.Equal(t, []memory.Bytes{unit, unit, unit}, sizes)
	require.True(t, fs[0].On(s.queue("q1").ID()) && fs[1].On(s.queue("q2").ID()) && fs[2].On(s.queue("q1").ID()))
	require.EqualValues(t, 3*unit, s.Stats().Pending)
	s.queue("q1").drain()
	require.EqualValues(t, unit, s.Stats().Pending)
}

func TestFigures(t *testing.T) {
	b := newFakeBase(t, 0)
	a := newBlock(t, b, Config{})
	x := mustAlloc(t, a, request(1000, nil))
	y := mustAlloc(t, a, request(1, nil))
	mustFree(t, a, x, queue.ReadyNow())
	st := a.Stats()
	require.Equal(t, allocator.Stats{
		Allocs: 2, Frees: 1, Live: 256, PeakLive: 1280, Held: 2 * memory.MiB, PeakHeld: 2 * memory.MiB,
		Idle: 2*memory.MiB - 256, LargestFree: 2*memory.MiB - 1280, Blocks: 2, Hits: 1, Misses: 1,
		Reused: allocator.Grounds{1},
	}, st)
	a.ResetPeaks()
	require.EqualValues(t, 256, a.Stats().PeakLive)
	require.EqualValues(t, 2, a.Stats().Allocs)
	mustFree(t, a, y, queue.ReadyNow())
	emptied(t, a, &b.fakeDriver)
}

func TestPassHidesVirtualMemoryAlone(t *testing.T) {
	v := newFakeVirtual(t, page, 0)
	a := newBlock(t, v, Config{})
	_, ok := allocator.As[allocator.VirtualMemory](a)
	require.False(t, ok)
	_, ok = allocator.As[interface {
		isMapped(uint64, memory.Bytes) bool
	}](a)
	require.True(t, ok)
}

func TestOptionsAndConfigAgree(t *testing.T) {
	require.NoError(t, Table.Check())
	v, err := Table.Parse("")
	require.NoError(t, err)
	require.Equal(t, Config{}.withDefaults(), FromValues(v).withDefaults())
	v, err = Table.Parse("growth=0%,keep=0,min_block=512,min_slab=8MiB,max_slab=16MiB,magazine=0")
	require.NoError(t, err)
	require.Equal(t, Config{MinBlock: 512, MinSlab: 8 << 20, MaxSlab: 16 << 20, Growth: -1, Keep: -1, Magazine: -1}, FromValues(v))
	for _, bad := range []string{"min_block=300", "min_slab=1GiB,max_slab=1MiB", "growth=101%", "magazine=17", "min_block=1MiB,min_slab=4KiB"} {
		_, err := Table.Parse(bad)
		require.Error(t, err, bad)
	}
	for _, c := range []Config{{MinBlock: 8}, {MinBlock: 300}, {MinSlab: 4096, MaxSlab: 1024}, {Growth: math.NaN()}, {MinSlab: 16}, {Magazine: 17}} {
		_, err := New(newFakeBase(t, 0), &allocator.Env{}, c)
		require.Error(t, err, "%+v", c)
	}
	_, err = New(nil, &allocator.Env{}, Config{})
	require.Error(t, err)
	a, err := Layer.New(newFakeBase(t, 0), &allocator.Env{}, v)
	require.NoError(t, err)
	require.EqualValues(t, 512, a.(*Allocator).config.MinBlock)
}

func TestNoLockIsHeldWhileTheBaseIsCalled(t *testing.T) {
	for _, paged := range []bool{false, true} {
		s := newStage(t, paged, 12*page, Config{MinSlab: unit})
		s.base.onCall = func() {
			if ar := s.arenas[0].Load(); ar != nil {
				require.True(t, ar.mu.TryLock(), "the arena is locked")
				ar.mu.Unlock()
			}
		}
		s.set("aaaa|....|bbbb|....|cccc")
		s.do("x=40,y=20,-a,-b,-c,z=20,trim 0,o=4 own,-o")
		require.NoError(t, s.Close())
	}
}

func TestHitsAllocateNoGoMemory(t *testing.T) {
	for _, paged := range []bool{false, true} {
		s := newStage(t, paged, 0, Config{})
		s.base.record = false
		q := newTestQueue(t)
		var blocks []allocator.Block
		for i := range 4000 { // equal holes enough to make trees
			blocks = append(blocks, mustAllocQuick(t, s.Allocator, request(memory.Bytes(1+i%7)*unit, q)))
		}
		for i := 0; i < len(blocks); i += 2 {
			s.Free(blocks[i], queue.ReadyNow())
		}
		f := q.issue(t)
		k := memory.Bytes(0)
		allocs := testing.AllocsPerRun(2000, func() {
			k++
			b, _, _ := s.Allocate(request(k%9*unit+1, q))
			s.Free(b, f)
		})
		require.Zero(t, allocs)
	}
}

func mustAllocQuick(t testing.TB, a *Allocator, r allocator.Request) allocator.Block {
	b, _, o := a.Allocate(r)
	require.Equal(t, allocator.OK, o)
	return b
}

func TestAMillionBlocksCostLittleGoMemory(t *testing.T) {
	if testing.Short() || invariants {
		t.Skip("a million blocks take a while")
	}
	v := newFakeVirtual(t, 2*memory.MiB, 0)
	a := newBlock(t, v, Config{})
	const n = 1 << 20
	var before, after runtime.MemStats
	blocks := make([]allocator.Block, n)
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range blocks {
		blocks[i] = mustAllocQuick(t, a, request(unit*memory.Bytes(1+i%3), nil))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	each := float64(after.HeapAlloc-before.HeapAlloc) / n
	require.Less(t, each, 128.0)
	check(t, a)
	for i := 0; i < n; i += 2 {
		a.Free(blocks[i], queue.ReadyNow())
	}
	check(t, a)
	for i := 1; i < n; i += 2 {
		a.Free(blocks[i], queue.ReadyNow())
	}
	emptied(t, a, &v.fakeDriver)
	runtime.KeepAlive(blocks)
}

func TestEightGoroutines(t *testing.T) {
	for _, paged := range []bool{false, true} {
		for _, capacity := range []memory.Bytes{0, 12 * memory.MiB} {
			t.Run(fmt.Sprintf("paged=%v,capacity=%v", paged, capacity), func(t *testing.T) {
				s := newStage(t, paged, capacity, Config{MinSlab: 64 * memory.KiB})
				s.base.record = false
				var wg sync.WaitGroup
				for g := range 8 {
					q := newTestQueue(t)
					wg.Go(func() {
						var blocks []allocator.Block
						x := uint64(g + 1)
						for range 3000 {
							x = x*6364136223846793005 + 1442695040888963407
							size := memory.Bytes(1+x>>33%64) * 1000
							if len(blocks) > 20 || x>>60 < 6 && len(blocks) > 0 {
								k := int(x>>20) % len(blocks)
								at, _, err := q.Submit(&queue.Op{Kind: queue.Barrier}, nil, nil)
								if err != nil || s.Free(blocks[k], queue.After(at)) != allocator.OK {
									t.Errorf("free failed")
									return
								}
								blocks = append(blocks[:k], blocks[k+1:]...)
								if x>>58&3 == 0 {
									q.drain()
								}
								continue
							}
							b, _, o := s.Allocate(request(size, q))
							switch o {
							case allocator.OK:
								blocks = append(blocks, b)
							case allocator.Exhausted, allocator.NeedsWait:
								q.drain()
								s.Trim(0)
							default:
								t.Errorf("outcome %v", o)
							}
						}
						for _, b := range blocks {
							s.Free(b, queue.ReadyNow())
						}
						q.drain()
					})
				}
				wg.Wait()
				check(t, s.Allocator)
				emptied(t, s.Allocator, &s.base.fakeDriver)
			})
		}
	}
}

func TestGrowersTogetherTakeAboutWhatOneWould(t *testing.T) {
	b := newFakeBase(t, 0)
	a := newBlock(t, b, Config{Growth: 50})
	mustAlloc(t, a, request(100*memory.MiB, nil))
	start := make(chan struct{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			<-start
			if _, _, o := a.Allocate(request(memory.MiB, nil)); o != allocator.OK {
				t.Error(o)
			}
		})
	}
	close(start)
	wg.Wait()
	require.LessOrEqual(t, a.Stats().Held, 100*memory.MiB+50*memory.MiB+8*2*memory.MiB)
}

// TestAnyCallMayFail lets each call of the base fail in turn: nothing leaks and the
// arena goes on.
func TestAnyCallMayFail(t *testing.T) {
	run := func(paged bool, failAt int, with allocator.Outcome) int {
		s := newStage(t, paged, 24*unit, Config{MinSlab: 2 * unit})
		s.base.failAt, s.base.failWith = failAt, with
		var blocks []allocator.Block
		for k, n := range []memory.Bytes{4, 1, 8, 2, 3, 6, 1, 9, 12, 5, 10} {
			b, _, o := s.Allocate(request(n*unit, nil))
			if o == allocator.OK {
				blocks = append(blocks, b)
			}
			check(t, s.Allocator)
			if k%2 == 1 && len(blocks) > 1 {
				mustFree(t, s.Allocator, blocks[0], queue.ReadyNow())
				blocks = blocks[1:]
			}
			if k == 6 {
				s.Trim(4 * unit)
				check(t, s.Allocator)
			}
			require.Equal(t, s.base.held, s.Stats().Held)
		}
		for _, b := range blocks {
			mustFree(t, s.Allocator, b, queue.ReadyNow())
		}
		calls := s.base.calls
		s.base.failAt = 0
		mustFree(t, s.Allocator, mustAlloc(t, s.Allocator, request(24*unit, nil)), queue.ReadyNow())
		emptied(t, s.Allocator, &s.base.fakeDriver)
		require.NoError(t, s.Close())
		return calls
	}
	for _, paged := range []bool{false, true} {
		calls := run(paged, 0, allocator.OK)
		require.Greater(t, calls, 8)
		for n := 1; n <= calls+2; n++ {
			for _, o := range []allocator.Outcome{allocator.Exhausted, allocator.Lost} {
				run(paged, n, o)
			}
		}
	}
}

// A shard that was held up keeps what it frees as it is, for the same size again; what
// is kept goes to the arena before anything is taken from the base.
func TestAMagazineServesTheSameSizeAndIsEmptiedBeforeGrowth(t *testing.T) {
	for _, paged := range []bool{false, true} {
		s := newStage(t, paged, 8*page, Config{MinSlab: unit, Magazine: 2})
		a := s.Allocator
		q1, q2 := newTestQueue(t), newTestQueue(t)
		sh := &a.shards[uint32(q1.ID())&shardMask]
		blocks := make([]allocator.Block, 8)
		for i := range blocks {
			blocks[i] = mustAlloc(t, a, request(page, q1))
		}
		sh.hot = hotFrees
		before := a.Stats()
		f := q1.issue(t)
		mustFree(t, a, blocks[0], f)
		mustFree(t, a, blocks[1], f)
		require.Equal(t, allocator.Stale, a.Free(blocks[1], f))
		require.Equal(t, 2, sh.n)
		st := a.Stats()
		require.Equal(t, before.Live-2*page, st.Live)
		require.Equal(t, before.Idle+2*page, st.Idle)
		require.EqualValues(t, 2*page, st.Pending)
		require.EqualValues(t, 2, st.Frees)

		b := mustAlloc(t, a, request(page, q1))
		require.Equal(t, blocks[1].Addr, b.Addr, "the last one freed")
		require.Equal(t, allocator.Stale, a.Free(blocks[1], f), "another handle")
		require.EqualValues(t, before.Hits+1, a.Stats().Hits)

		// Two pages that lie side by side serve one request, once they are merged.
		mustFree(t, a, b, f)
		q1.drain()
		if paged {
			c := mustAlloc(t, a, request(2*page, q2))
			require.Zero(t, sh.n)
			require.Equal(t, blocks[0].Addr, c.Addr)
			require.Equal(t, before.Held, a.Stats().Held, "nothing was taken from the base")
			mustFree(t, a, c, queue.ReadyNow())
		}
		for _, b := range blocks[2:] {
			mustFree(t, a, b, queue.ReadyNow())
		}
		require.LessOrEqual(t, sh.n, 2)
		check(t, a)
		require.NoError(t, a.Check())
		require.NoError(t, a.Close())
		require.Zero(t, a.Stats().Held)
	}
}
