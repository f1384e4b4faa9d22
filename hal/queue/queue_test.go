package queue

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// callRunner runs user functions and takes everything else as quick.
type callRunner struct{}

func (callRunner) Run(op *Op) error {
	if op.Kind == Call {
		return op.Func()
	}
	return nil
}
func (callRunner) Quick(op *Op) bool { return op.Kind != Call }

func newQueue(t testing.TB, hook Hook) *Queue {
	q := New(Options{
		Executor: func(q *Queue) Executor { return NewWorker(q, callRunner{}, false) },
		Hook:     hook,
	})
	t.Cleanup(func() {
		q.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(t, q.Drain(ctx))
	})
	return q
}

// manualWorkers are those of the running test: queues wait for each other, so they
// are drained together.
var manualWorkers []*Worker

func manualQueue(t testing.TB, hook Hook) (*Queue, *Worker) {
	var w *Worker
	q := New(Options{
		Executor: func(q *Queue) Executor { w = NewWorker(q, callRunner{}, true); return w },
		Hook:     hook,
	})
	manualWorkers = append(manualWorkers, w)
	t.Cleanup(func() {
		q.Close()
		for moved := true; moved; {
			moved = false
			for _, w := range manualWorkers {
				moved = w.Step() || moved
			}
		}
	})
	return q, w
}

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func submit(t testing.TB, q *Queue, op Op, wait, signal Fence) (Point, bool) {
	t.Helper()
	at, issued, err := q.Submit(&op, wait, signal)
	require.NoError(t, err)
	return at, issued
}

func TestAnIdleQueueCompletesInline(t *testing.T) {
	q := newQueue(t, nil)
	s := NewSemaphore(0)
	at, issued := submit(t, q, Op{Kind: Barrier}, nil, s.At(7))
	require.True(t, issued)
	require.True(t, at.Reached())
	v, err := s.Query()
	require.NoError(t, err)
	require.EqualValues(t, 7, v)
}

func TestWaitBeforeSignalIsDeferredAndHoldsItsSuccessors(t *testing.T) {
	q := newQueue(t, nil)
	s, done := NewSemaphore(0), NewSemaphore(0)
	_, issued := submit(t, q, Op{Kind: Barrier}, s.At(1), nil)
	require.False(t, issued)
	_, issued = submit(t, q, Op{Kind: Barrier}, nil, done.At(1))
	require.False(t, issued, "a successor of a deferred operation is deferred")
	require.Equal(t, 2, q.Deferred())
	require.NoError(t, s.Signal(1))
	require.NoError(t, done.Wait(soon(t), 1))
	require.Zero(t, q.Deferred())
}

func TestAWaitOnIssuedWorkIsIssuedAtOnceAndTeaches(t *testing.T) {
	q1, w1 := manualQueue(t, nil)
	q2, w2 := manualQueue(t, nil)
	q3, _ := manualQueue(t, nil)
	s, u := NewSemaphore(0), NewSemaphore(0)
	p1, _ := submit(t, q1, Op{}, nil, s.At(1))
	require.False(t, Usable(q2.ID(), After(p1)))
	p2, issued := submit(t, q2, Op{}, s.At(1), u.At(1))
	require.True(t, issued)
	require.True(t, Usable(q2.ID(), After(p1)), "ordered after what it waits for")
	require.False(t, Usable(q3.ID(), After(p1)))
	submit(t, q3, Op{}, u.At(1), nil)
	require.True(t, Usable(q3.ID(), After(p1)), "and so is whoever waits for it, transitively")
	require.False(t, After(p1).Reached())
	require.False(t, w2.Step(), "q2 can't run before q1")
	require.True(t, w1.Step())
	require.True(t, w2.Step())
	require.True(t, p2.Reached())
}

func TestAHostSignalTeachesNothing(t *testing.T) {
	q1, _ := manualQueue(t, nil)
	q2, _ := manualQueue(t, nil)
	s := NewSemaphore(0)
	p1, _ := submit(t, q1, Op{}, nil, nil)
	require.NoError(t, s.Signal(1))
	submit(t, q2, Op{}, s.At(1), nil)
	require.False(t, Usable(q2.ID(), After(p1)))
}

func TestSeveralProducersAreNotBound(t *testing.T) {
	q1, w1 := manualQueue(t, nil)
	q2, w2 := manualQueue(t, nil)
	q3, _ := manualQueue(t, nil)
	s := NewSemaphore(0)
	p1, _ := submit(t, q1, Op{}, nil, s.At(1))
	p2, _ := submit(t, q2, Op{}, nil, s.At(2))
	_, issued := submit(t, q3, Op{}, s.At(1), nil)
	require.False(t, issued, "either may reach the value first")
	require.True(t, w2.Step())
	require.Zero(t, q3.Deferred())
	require.True(t, Usable(q3.ID(), After(p2)))
	require.False(t, Usable(q3.ID(), After(p1)), "the signal that satisfied it didn't come after q1")
	require.True(t, w1.Step())
	v, err := s.Query()
	require.NoError(t, err)
	require.EqualValues(t, 2, v, "the late lower signal changes nothing")
}

func TestFailureTravelsBySemaphoresNotByPoints(t *testing.T) {
	q := newQueue(t, nil)
	cause := errors.New("boom")
	a, b := NewSemaphore(0), NewSemaphore(0)
	p1, _ := submit(t, q, Op{Kind: Call, Func: func() error { return cause }}, nil, a.At(1))
	ran := false
	q2 := newQueue(t, nil)
	submit(t, q2, Op{Kind: Call, Func: func() error { ran = true; return nil }}, a.At(1), b.At(1))
	require.ErrorIs(t, b.Wait(soon(t), 1), cause)
	require.ErrorIs(t, b.Wait(soon(t), 1), ErrFailed)
	require.False(t, ran)
	require.NoError(t, p1.Wait(soon(t)))
	p3, _ := submit(t, q, Op{}, nil, nil)
	require.NoError(t, p3.Wait(soon(t)), "the queue goes on")
}

func TestTheFirstFailureWins(t *testing.T) {
	s := NewSemaphore(3)
	first := errors.New("first")
	errs := make(chan error, 4)
	for range 4 {
		go func() { errs <- s.Wait(context.Background(), 5) }()
	}
	time.Sleep(time.Millisecond)
	s.Fail(first)
	s.Fail(errors.New("second"))
	for range 4 {
		require.ErrorIs(t, <-errs, first)
	}
	require.NoError(t, s.Wait(context.Background(), 3), "what was reached stays reached")
	require.ErrorIs(t, s.Signal(4), first)
}

func TestSignalMustRise(t *testing.T) {
	s := NewSemaphore(3)
	require.ErrorIs(t, s.Signal(3), ErrNotIncreasing)
	require.NoError(t, s.Signal(4))
}

func TestWaitEndsWithItsContext(t *testing.T) {
	s := NewSemaphore(0)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, s.Wait(ctx, 1), context.Canceled)
	q, _ := manualQueue(t, nil)
	p, _ := submit(t, q, Op{}, nil, nil)
	require.ErrorIs(t, p.Wait(ctx), context.Canceled)
}

func TestClosingFailsWhatIsNotIssued(t *testing.T) {
	q, w := manualQueue(t, nil)
	never, out, in := NewSemaphore(0), NewSemaphore(0), NewSemaphore(0)
	p, _ := submit(t, q, Op{}, nil, in.At(1))
	submit(t, q, Op{}, never.At(1), out.At(1))
	q.Close()
	require.ErrorIs(t, out.Wait(soon(t), 1), ErrClosed)
	require.False(t, p.Reached())
	_, _, err := q.Submit(&Op{}, nil, nil)
	require.ErrorIs(t, err, ErrClosed)
	require.True(t, w.Step(), "what is issued completes")
	require.True(t, p.Reached())
	require.NoError(t, in.Wait(soon(t), 1))
	require.Nil(t, Lookup(q.ID()))
	require.True(t, p.Reached(), "points outlive their queue")
}

func TestALostQueueFailsEverythingAndReachesNothing(t *testing.T) {
	q, w := manualQueue(t, nil)
	q2 := newQueue(t, nil)
	cause := errors.New("xid 79")
	s, u, never := NewSemaphore(0), NewSemaphore(0), NewSemaphore(0)
	p, _ := submit(t, q, Op{}, nil, s.At(1))
	submit(t, q, Op{}, never.At(1), nil)
	p2, _ := submit(t, q2, Op{}, s.At(1), u.At(1))
	q.Lose(cause)
	for w.Step() {
	}
	require.ErrorIs(t, s.Wait(soon(t), 1), cause)
	require.ErrorIs(t, u.Wait(soon(t), 1), cause)
	require.False(t, p.Reached())
	require.ErrorIs(t, p.Wait(soon(t)), cause)
	require.ErrorIs(t, q.Lost(), ErrLost)
	require.NoError(t, p2.Wait(soon(t)))
	_, _, err := q.Submit(&Op{}, nil, nil)
	require.ErrorIs(t, err, cause)
	q.Abandon()
	require.True(t, p.Reached())
}

// freeHook records what it is told.
type freeHook struct {
	mu    sync.Mutex
	freed []Point
	kept  []error
	used  []Point
	deny  error
}

func (h *freeHook) Use(op *Op, at Point) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.used = append(h.used, at)
	return h.deny
}

func (h *freeHook) Free(ref Ref, at Point) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if at.Reached() {
		panic("freed too late")
	}
	h.freed = append(h.freed, at)
}

func (h *freeHook) Keep(ref Ref, cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.kept = append(h.kept, cause)
}

func TestADeallocaIsFreedWhenIssuedAndBeforeItsPointIsReached(t *testing.T) {
	h := &freeHook{}
	q := newQueue(t, h)
	s, u := NewSemaphore(0), NewSemaphore(0)
	op := Op{Kind: Dealloca, Refs: [2]Ref{{Keeper: h}}}
	at, issued := submit(t, q, op, nil, s.At(1))
	require.True(t, issued)
	require.Equal(t, []Point{at}, h.freed)
	require.True(t, at.Reached())
	require.NoError(t, s.Wait(soon(t), 1))

	submit(t, q, op, u.At(1), s.At(2))
	require.Len(t, h.freed, 1, "not freed while deferred")
	require.NoError(t, u.Signal(1))
	require.NoError(t, s.Wait(soon(t), 2))
	require.Len(t, h.freed, 2)

	cause := errors.New("no")
	u.Fail(cause)
	submit(t, q, op, u.At(5), s.At(3))
	require.Len(t, h.kept, 1, "a dealloca whose wait failed did not happen")
	require.ErrorIs(t, h.kept[0], cause)
	require.ErrorIs(t, s.Wait(soon(t), 3), cause)
	require.Len(t, h.freed, 2)
}

func TestAnOperationOnReleasedMemoryFails(t *testing.T) {
	h := &freeHook{deny: errors.New("released")}
	q := newQueue(t, h)
	s := NewSemaphore(0)
	submit(t, q, Op{Kind: Fill, Refs: [2]Ref{{Keeper: h}}}, nil, s.At(1))
	require.ErrorIs(t, s.Wait(soon(t), 1), h.deny)
}

func TestFrontiers(t *testing.T) {
	q1, w1 := manualQueue(t, nil)
	q2, w2 := manualQueue(t, nil)
	p1, _ := submit(t, q1, Op{}, nil, nil)
	p1b, _ := submit(t, q1, Op{}, nil, nil)
	p2, _ := submit(t, q2, Op{}, nil, nil)
	require.True(t, Frontier{}.Unknown())
	require.False(t, Usable(q1.ID(), Frontier{}), "unknown is not ready")
	require.Equal(t, After(p1b), Join(After(p1), After(p1b)))
	require.Equal(t, After(p1), Join(ReadyNow(), After(p1)))
	require.True(t, Join(Frontier{}, After(p1)).Unknown())
	both := Join(After(p1), After(p2))
	require.Equal(t, both, Join(After(p2), After(p1)), "sets are interned")
	require.False(t, both.Reached())
	require.False(t, Usable(q1.ID(), both))
	require.Equal(t, "{"+p1.String()+" "+p2.String()+"}", both.String())
	require.True(t, w2.Step())
	require.True(t, Usable(q1.ID(), both), "q2's part is reached, q1's is in order")
	require.False(t, Usable(0, both))
	require.True(t, w1.Step())
	require.True(t, both.Reached())
	require.True(t, w1.Step())
	require.True(t, Frontier{}.Reached(), "unknown is reached when all that was issued is")
}

func TestAJoinDropsWhatTheOtherPointComesAfter(t *testing.T) {
	q1, _ := manualQueue(t, nil)
	q2, _ := manualQueue(t, nil)
	s := NewSemaphore(0)
	early, _ := submit(t, q2, Op{}, nil, nil)
	use, _ := submit(t, q1, Op{}, nil, s.At(1))
	free, _ := submit(t, q2, Op{}, s.At(1), nil)
	require.Equal(t, After(free), Join(After(use), After(free)))
	require.NotEqual(t, After(early), Join(After(use), After(early)), "what came before the lesson is not covered")
}

func TestJoinsOverflowToLaterNeverEarlier(t *testing.T) {
	sets := func() int { // but those of other tests, which may hold queues for good
		joins.mu.Lock()
		defer joins.mu.Unlock()
		joins.sweepLocked()
		return len(joins.sets)
	}
	before := sets()
	q1, w1 := manualQueue(t, nil)
	q2, w2 := manualQueue(t, nil)
	p1, _ := submit(t, q1, Op{}, nil, nil)
	var last Frontier
	n := 0
	for range MaxJoins + 10 {
		p2, _ := submit(t, q2, Op{}, nil, nil)
		last = Join(After(p1), After(p2))
		n++
	}
	require.False(t, last.Waitable())
	require.False(t, last.Reached())
	require.LessOrEqual(t, len(joins.sets), MaxJoins+1)
	require.True(t, w1.Step())
	require.False(t, last.Reached())
	for w2.Step() {
		n--
	}
	require.Zero(t, n)
	require.True(t, last.Reached())
	require.LessOrEqual(t, sets(), before)
}

func TestIDsAreNeverReused(t *testing.T) {
	seen := map[ID]bool{}
	for range 2 * chunkSize {
		q := New(Options{Executor: func(q *Queue) Executor { return NewWorker(q, callRunner{}, false) }})
		require.False(t, seen[q.ID()])
		seen[q.ID()] = true
		q.Close()
	}
	require.False(t, Point{registry.nextForTest(), 1}.Reached(), "a queue that never was is not reached")
}

func (t *registryTable) nextForTest() ID { return ID(t.last.Load() + 1000000) }

func TestPumpsAreAskedByWhoeverWaits(t *testing.T) {
	q, w := manualQueue(t, nil)
	defer AddPump(w.Step)()
	s := NewSemaphore(0)
	submit(t, q, Op{}, nil, nil)
	submit(t, q, Op{Kind: Call, Func: func() error { return nil }}, nil, s.At(1))
	require.NoError(t, s.Wait(soon(t), 1))
}

func TestLongChainsUseNoStack(t *testing.T) {
	q1, q2 := newQueue(t, nil), newQueue(t, nil)
	s := NewSemaphore(0)
	const n = 100_000
	for i := uint64(1); i <= n; i++ {
		q := q1
		if i%2 == 0 {
			q = q2
		}
		submit(t, q, Op{}, s.At(i), s.At(i+1))
	}
	require.NoError(t, s.Signal(1))
	require.NoError(t, s.Wait(soon(t), n+1))
}

func TestTheHotPathAllocatesNothing(t *testing.T) {
	h := &nopHook{}
	q := newQueue(t, h)
	s := NewSemaphore(0)
	var v uint64
	op := Op{Kind: Dealloca, Refs: [2]Ref{{Keeper: h}}}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		v++
		at, _, _ := q.Submit(&Op{Kind: Alloca}, nil, nil)
		q.Submit(&op, nil, s.At(v))
		if Join(After(at), After(q.Issued())).Unknown() || !Usable(q.ID(), After(at)) {
			panic("no")
		}
	}))
}

type nopHook struct{}

func (*nopHook) Use(*Op, Point) error { return nil }
func (*nopHook) Free(Ref, Point)      {}
func (*nopHook) Keep(Ref, error)      {}

// Many goroutines, many queues, semaphores crossing: every operation runs once,
// in order, after what it waits for.
func TestManyQueuesUnderLoad(t *testing.T) {
	const queues, ops = 8, 5000
	var qs [queues]*Queue
	var sems [queues]*Semaphore
	var count [queues]atomic.Uint64
	for i := range qs {
		qs[i], sems[i] = newQueue(t, nil), NewSemaphore(0)
	}
	var wg sync.WaitGroup
	for i := range qs {
		wg.Go(func() {
			for n := uint64(1); n <= ops; n++ {
				var wait Fence
				peer := (i + 1) % queues
				if n%7 == 0 && n > 7 {
					wait = sems[peer].At(n - 7)
				}
				op := Op{Kind: Barrier}
				if n%16 == 0 {
					op = Op{Kind: Call, Func: func() error {
						if wait != nil && sems[peer].value.Load() < wait[0].Value {
							return errors.New("ran before its wait")
						}
						count[i].Add(1)
						return nil
					}}
				}
				if _, _, err := qs[i].Submit(&op, wait, sems[i].At(n)); err != nil {
					panic(err)
				}
			}
		})
	}
	wg.Wait()
	for i := range sems {
		require.NoError(t, sems[i].Wait(soon(t), ops))
		require.EqualValues(t, ops/16, count[i].Load())
	}
}

func BenchmarkAllocaDeallocaMarkers(b *testing.B) {
	h := &nopHook{}
	q := newQueue(b, h)
	for b.Loop() {
		q.Submit(&Op{Kind: Alloca}, nil, nil)
		q.Submit(&Op{Kind: Dealloca, Refs: [2]Ref{{Keeper: h}}}, nil, nil)
	}
}
func BenchmarkMutex(b *testing.B) {
	var m sync.Mutex
	for b.Loop() {
		m.Lock()
		//lint:ignore SA2001 the reference pair
		m.Unlock()
	}
}

// What a signal teaches is what its operation came after, and not what its queue has
// learned by the time it is over.
func TestASignalTeachesNothingThatItsQueueLearnedLater(t *testing.T) {
	q1, _ := manualQueue(t, nil)
	q2, w2 := manualQueue(t, nil)
	q3, _ := manualQueue(t, nil)
	early, late := NewSemaphore(0), NewSemaphore(0)
	p1, _ := submit(t, q1, Op{}, nil, late.At(1))
	submit(t, q2, Op{}, nil, early.At(1)) // comes after nothing
	submit(t, q2, Op{}, late.At(1), nil)  // teaches q2 that it comes after p1
	require.True(t, Usable(q2.ID(), After(p1)))
	require.True(t, w2.Step())
	submit(t, q3, Op{}, early.At(1), nil)
	require.False(t, Usable(q3.ID(), After(p1)), "the early operation did not come after it")
}

// An alloca that got memory in use elsewhere, by a wait added to it, may fail for a
// wait of its own. What follows on its queue may touch the memory all the same, so
// the wait stands.
func TestTheWaitAddedToAnOperationOutlivesItsFailure(t *testing.T) {
	q1, w1 := manualQueue(t, nil)
	q2, w2 := manualQueue(t, nil)
	s, done := NewSemaphore(0), NewSemaphore(0)
	p1, _ := submit(t, q1, Op{}, nil, nil)
	_, issued := submit(t, q2, Op{Kind: Alloca, After: After(p1)}, s.At(1), done.At(1))
	require.False(t, issued)
	submit(t, q2, Op{}, nil, nil)
	s.Fail(errors.New("no"))
	_, err := done.Query()
	require.ErrorIs(t, err, ErrFailed)
	require.True(t, Usable(q2.ID(), After(p1)))
	require.False(t, w2.Step(), "q2 goes on after p1")
	require.True(t, w1.Step())
	require.True(t, w2.Step())
	require.True(t, w2.Step())
}

// The overflow set is made of what was issued, which always completes, and never of
// what was only submitted.
func TestTheOverflowSetHoldsWhatIsIssuedOnly(t *testing.T) {
	q1, w1 := manualQueue(t, nil)
	q2, w2 := manualQueue(t, nil)
	never := NewSemaphore(0)
	p1, _ := submit(t, q1, Op{}, nil, nil)
	p2, _ := submit(t, q2, Op{}, nil, nil)
	submit(t, q1, Op{}, never.At(1), nil) // deferred for good
	joins.mu.Lock()
	f := joins.coarseLocked([]Point{p1, p2})
	joins.mu.Unlock()
	require.False(t, f.Waitable())
	require.False(t, f.Reached())
	require.True(t, w1.Step())
	require.True(t, w2.Step())
	require.True(t, f.Reached(), "%v", f)
}

func TestALimitedPumpAsksSeldom(t *testing.T) {
	asked := 0
	pump := Limited(time.Hour, func() bool { asked++; return true })
	require.True(t, pump())
	for range 1000 {
		require.False(t, pump())
	}
	require.Equal(t, 1, asked)
	often := Limited(0, func() bool { asked++; return true })
	require.True(t, often())
	require.True(t, often())
	require.Equal(t, 3, asked)
}
