package allocator

import (
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/queue"
)

// nopRunner carries out nothing.
type nopRunner struct{}

func (nopRunner) Run(*queue.Op) error  { return nil }
func (nopRunner) Quick(*queue.Op) bool { return true }

// manualQueue is a queue whose operations retire one by one, by step.
func manualQueue(t testing.TB) (q *queue.Queue, step func() bool) {
	var w *queue.Worker
	q = queue.New(queue.Options{Executor: func(q *queue.Queue) queue.Executor {
		w = queue.NewWorker(q, nopRunner{}, true)
		return w
	}})
	t.Cleanup(func() {
		q.Close()
		for w.Step() {
		}
	})
	return q, w.Step
}

func submit(t testing.TB, q *queue.Queue) queue.Point {
	at, issued, err := q.Submit(&queue.Op{}, nil, nil)
	require.NoError(t, err)
	require.True(t, issued)
	return at
}

func TestHotValuesAreFourWords(t *testing.T) {
	require.LessOrEqual(t, unsafe.Sizeof(Block{}), uintptr(32))
	require.LessOrEqual(t, unsafe.Sizeof(Request{}), uintptr(32))
	require.LessOrEqual(t, unsafe.Sizeof(queue.Frontier{}), uintptr(16))
	require.LessOrEqual(t, unsafe.Sizeof(Slot[struct{}]{}), uintptr(64))
}

func newSlots() (*Slots[int], *sync.Mutex) {
	mu := new(sync.Mutex)
	s := new(Slots[int])
	s.Init(mu, "owner", 3)
	return s, mu
}

func mint(s *Slots[int], mu *sync.Mutex, f queue.Frontier) Block {
	mu.Lock()
	defer mu.Unlock()
	i := s.NewLocked()
	return s.MintLocked(i, 0x1000, 64, &Request{Size: 10, Kind: MakeKind(2, 64, 0, 0, 0), Who: Who{Tag: 9}}, f)
}

func take(s *Slots[int], mu *sync.Mutex, b Block, f queue.Frontier) (queue.Frontier, Outcome) {
	mu.Lock()
	defer mu.Unlock()
	i, f, o := s.TakeLocked(b, f)
	if o == OK {
		s.DropLocked(i)
	}
	return f, o
}

func TestAHandleIsGoodUntilItsReleaseAndNeverAgain(t *testing.T) {
	s, mu := newSlots()
	a := mint(s, mu, queue.ReadyNow())
	info, o := a.Keeper.Ledger.Info(a.ID)
	require.Equal(t, OK, o)
	require.EqualValues(t, 10, info.Asked)
	require.EqualValues(t, 9, info.Tag)
	require.Equal(t, 2, info.Kind.Heap())
	require.EqualValues(t, 64, info.Kind.Align())
	_, o = take(s, mu, a, queue.ReadyNow())
	require.Equal(t, OK, o)
	b := mint(s, mu, queue.ReadyNow())
	require.Equal(t, SlotOf(a), SlotOf(b), "the slot is used again")
	for _, use := range []func() Outcome{
		func() Outcome { _, o := take(s, mu, a, queue.ReadyNow()); return o },
		func() Outcome { return s.Use(a.ID, queue.ReadyNow()) },
		func() Outcome { _, o := s.Info(a.ID); return o },
		func() Outcome { return s.Pin(a.ID, 1) },
		func() Outcome { _, o := s.Claim(a.ID); return o },
	} {
		require.Equal(t, Stale, use())
	}
	_, o = take(s, mu, Block{}, queue.ReadyNow())
	require.Equal(t, Foreign, o)
	other, otherMu := newSlots()
	_, o = take(other, otherMu, b, queue.ReadyNow())
	require.Equal(t, Foreign, o)
	_, o = s.Info(uint64(77)<<genBits | 1)
	require.Equal(t, Foreign, o)
}

func TestAClaimMovesTheHandleAndCanBeUndone(t *testing.T) {
	s, mu := newSlots()
	a := mint(s, mu, queue.ReadyNow())
	id, o := s.Claim(a.ID)
	require.Equal(t, OK, o)
	_, o = s.Claim(a.ID)
	require.Equal(t, Stale, o, "a second release is an error")
	s.Unclaim(id)
	_, o = s.Info(a.ID)
	require.Equal(t, OK, o, "the dealloca did not happen: the handle is good")
	s.Unclaim(a.ID)
	_, o = s.Info(a.ID)
	require.Equal(t, OK, o, "Unclaim of what isn't claimed does nothing")
	id, _ = s.Claim(a.ID)
	b := a
	b.ID = id
	_, o = take(s, mu, b, queue.ReadyNow())
	require.Equal(t, OK, o)
}

func TestAPinnedBlockIsNotReleased(t *testing.T) {
	s, mu := newSlots()
	a := mint(s, mu, queue.ReadyNow())
	require.Equal(t, OK, s.Pin(a.ID, 1))
	_, o := take(s, mu, a, queue.ReadyNow())
	require.Equal(t, Busy, o)
	_, o = s.Claim(a.ID)
	require.Equal(t, Busy, o)
	require.Equal(t, OK, s.Pin(a.ID, -1))
	require.Equal(t, Busy, s.Pin(a.ID, -1), "never below zero")
	_, o = take(s, mu, a, queue.ReadyNow())
	require.Equal(t, OK, o)
}

func TestABlockIsFreeAfterAllItsUses(t *testing.T) {
	s, mu := newSlots()
	q1, step1 := manualQueue(t)
	q2, step2 := manualQueue(t)
	use, free := submit(t, q1), submit(t, q2)
	a := mint(s, mu, queue.ReadyNow())
	require.Equal(t, OK, s.Use(a.ID, queue.After(use)))
	f, o := take(s, mu, a, queue.After(free))
	require.Equal(t, OK, o)
	require.Equal(t, queue.Join(queue.After(use), queue.After(free)), f)

	b := mint(s, mu, queue.After(use))
	f, _ = take(s, mu, b, queue.ReadyNow())
	require.Equal(t, queue.After(use), f, "never used: still after its last owner")

	c := mint(s, mu, queue.ReadyNow())
	require.Equal(t, OK, s.Use(c.ID, queue.Frontier{}))
	f, _ = take(s, mu, c, queue.ReadyNow())
	require.False(t, f.Unknown(), "unknown becomes everything issued when it is freed")
	require.False(t, f.Reached())
	step1()
	require.False(t, f.Reached())
	step2()
	require.True(t, f.Reached())
}

func TestASlotRetiresWhenItsGenerationWraps(t *testing.T) {
	s, mu := newSlots()
	a := mint(s, mu, queue.ReadyNow())
	i := SlotOf(a)
	mu.Lock()
	s.At(i).gen = genMask - 4
	mu.Unlock()
	b := Block{Keeper: a.Keeper, ID: uint64(i)<<genBits | (genMask - 4)}
	_, o := take(s, mu, b, queue.ReadyNow())
	require.Equal(t, OK, o)
	c := mint(s, mu, queue.ReadyNow())
	require.Equal(t, i, SlotOf(c))
	_, o = take(s, mu, c, queue.ReadyNow())
	require.Equal(t, OK, o)
	require.NotEqual(t, i, SlotOf(mint(s, mu, queue.ReadyNow())))
}

func TestLiveListsWhatIsOut(t *testing.T) {
	s, mu := newSlots()
	var want []Block
	for i := range 2*slotChunk + 5 {
		b := mint(s, mu, queue.ReadyNow())
		if i%3 == 0 {
			take(s, mu, b, queue.ReadyNow())
			continue
		}
		want = append(want, b)
	}
	n := 0
	s.Live(func(b Block, i Info) bool {
		n++
		_, o := take(s, mu, b, queue.ReadyNow())
		require.Equal(t, OK, o, "yield may call back, and the handle is good")
		require.EqualValues(t, 10, i.Asked)
		return true
	})
	require.Positive(t, n)
	require.GreaterOrEqual(t, n, len(want)-slotChunk)
	s.Live(func(Block, Info) bool { t.Fatal("nothing is live"); return false })
}

func TestOfManyReleasesOneSucceeds(t *testing.T) {
	s, mu := newSlots()
	for range 200 {
		a := mint(s, mu, queue.ReadyNow())
		var wg sync.WaitGroup
		won := make(chan Outcome, 8)
		for i := range 8 {
			wg.Go(func() {
				if i%2 == 0 {
					_, o := take(s, mu, a, queue.ReadyNow())
					won <- o
					return
				}
				id, o := s.Claim(a.ID)
				if o == OK {
					b := a
					b.ID = id
					_, o = take(s, mu, b, queue.ReadyNow())
				}
				won <- o
			})
		}
		wg.Wait()
		close(won)
		n := 0
		for o := range won {
			if o == OK {
				n++
			}
		}
		require.Equal(t, 1, n)
	}
}

func TestKindPacksWhatItIsGiven(t *testing.T) {
	k := MakeKind(15, 1<<40, 1<<24-1, 1<<8-1, MayWait|NoSubAlloc)
	require.Equal(t, 15, k.Heap())
	require.EqualValues(t, 1<<40, k.Align())
	require.EqualValues(t, 1<<24-1, k.Usage())
	require.EqualValues(t, 1<<8-1, k.Access())
	require.NotZero(t, k&MayWait)
	require.Zero(t, k&NoPolled)
}

func TestReuseSaysOnWhatGround(t *testing.T) {
	q1, step1 := manualQueue(t)
	q2, _ := manualQueue(t)
	t.Cleanup(func() {
		for step1() { // before q2 is drained: it waits for q1
		}
	})
	p := submit(t, q1)
	f := queue.After(p)
	r := Request{Size: 1, Who: Who{Queue: q1.ID()}}
	require.Equal(t, ReuseSame, r.Reuse(f))
	require.Equal(t, ReuseSame, r.Reuse(queue.ReadyNow()))
	r.Who.Queue = q2.ID()
	require.Equal(t, ReuseNo, r.Reuse(f))
	r.Kind = MayWait
	require.Equal(t, ReuseWait, r.Reuse(f))
	require.Equal(t, ReuseNo, r.Reuse(queue.Frontier{}), "nobody waits for the unknown")
	s := queue.NewSemaphore(0)
	q1.Submit(&queue.Op{}, nil, s.At(1))
	q2.Submit(&queue.Op{}, s.At(1), nil)
	require.Equal(t, ReuseOrdered, r.Reuse(f))
	r.Kind = NoOrdered
	require.Equal(t, ReuseNo, r.Reuse(f))
	step1()
	require.Equal(t, ReusePolled, r.Reuse(f))
	r.Kind = NoOrdered | NoPolled
	require.Equal(t, ReuseNo, r.Reuse(f))
	r = Request{Size: 1}
	require.Equal(t, ReusePolled, r.Reuse(f), "the host acts at once")
}

func TestTags(t *testing.T) {
	require.Zero(t, InternTag(""))
	a := InternTag("weights")
	require.Equal(t, a, InternTag("weights"))
	require.NotEqual(t, a, InternTag("kv"))
	require.Equal(t, "weights", a.String())
	require.Equal(t, "", Tag(0).String())
	ctx := WithTag(t.Context(), a)
	require.Equal(t, a, TagOf(ctx))
	require.Zero(t, TagOf(t.Context()))
}
