package vmm_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/vmm"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What the three sources have in common is tested in internal/source.

const (
	page     = 64 * memory.KiB
	capacity = 32 * page
)

func env(d driver.Device) *allocator.Env { return &allocator.Env{Device: d, Heaps: d.Info().Heaps} }

func open(t testing.TB, wrap func(*host.Device) driver.Device) (*vmm.Source, *host.Device) {
	d, err := host.Open(host.Config{Capacity: capacity, Granularity: page})
	require.NoError(t, err)
	if d.Granularity(0) == 0 {
		require.NoError(t, d.Close())
		t.Skip("no pages here")
	}
	s, err := vmm.New(env(wrap(d)))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		st := s.Stats()
		require.Zero(t, st.Live+st.Held+st.Idle+st.Pending)
		require.NoError(t, d.Close())
	})
	return s, d
}

func itself(d *host.Device) driver.Device { return d }

func used(t testing.TB, d *host.Device) memory.Bytes {
	free, total, err := d.MemInfo(0)
	require.NoError(t, err)
	return total - free
}

// do carries out operations in order and waits for the last.
func do(t testing.TB, q *queue.Queue, ops ...queue.Op) {
	t.Helper()
	s := queue.NewSemaphore(0)
	for i, op := range ops {
		_, _, err := q.Submit(&op, nil, s.At(uint64(i+1)))
		require.NoError(t, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, s.Wait(ctx, uint64(len(ops))))
}

func TestAnAllocationIsItsOwnMapping(t *testing.T) {
	s, d := open(t, itself)
	b, f, o := s.Allocate(allocator.Request{Size: page + 1})
	require.Equal(t, allocator.OK, o)
	require.Equal(t, queue.ReadyNow(), f)
	require.Equal(t, 2*page, b.Size, "whole pages are granted")
	require.Equal(t, 2*page, used(t, d))
	h, _, o := s.Allocate(allocator.Request{Size: 100, Kind: allocator.MakeKind(1, 1, 0, 0, 0)})
	require.Equal(t, allocator.OK, o)
	require.EqualValues(t, 256, h.Size, "the host heap has no pages and is served plainly")
	st := s.Stats()
	require.EqualValues(t, 3, st.SourceAllocs)
	require.EqualValues(t, 2, st.Created)
	require.EqualValues(t, 1, st.Maps)
	require.Equal(t, allocator.OK, s.Free(b, queue.ReadyNow()))
	require.Equal(t, allocator.OK, s.Free(h, queue.ReadyNow()))
	st = s.Stats()
	require.EqualValues(t, 3, st.SourceFrees)
	require.EqualValues(t, 2, st.Released)
	require.EqualValues(t, 1, st.Unmaps)
	require.Nil(t, s.Virtual(1))
	require.Nil(t, s.Virtual(-1))
	require.Nil(t, s.Virtual(99))
}

func TestMoveKeepsContents(t *testing.T) {
	s, d := open(t, itself)
	q, err := d.NewQueue(nil)
	require.NoError(t, err)
	defer q.Close()
	vm, ok := allocator.As[allocator.VirtualMemory](s)
	require.True(t, ok)
	v := vm.Virtual(0)
	require.Equal(t, page, v.Granularity())
	base, o := v.Reserve(capacity * 2)
	require.Equal(t, allocator.OK, o)
	at := func(i int) uint64 { return base + uint64(i)*uint64(page) }
	require.Equal(t, allocator.OK, v.Grow(at(0), 4))
	require.Equal(t, 4*page, s.Stats().Live)
	for i := range 4 {
		do(t, q, queue.Op{Kind: queue.Fill, Dst: at(i), Size: int64(page), Pattern: uint64(i + 1), PatternSize: 1})
	}
	before := s.Stats()
	require.Equal(t, allocator.OK, v.Move(at(1), at(40), 2))
	st := s.Stats()
	require.Equal(t, before.Maps+1, st.Maps, "one run")
	require.Equal(t, before.Unmaps+1, st.Unmaps)
	require.Equal(t, before.SourceAllocs, st.SourceAllocs)
	require.Equal(t, before.Held, st.Held)
	out := make([]byte, page)
	for i, where := range []int{0, 40, 41, 3} {
		do(t, q, queue.Op{Kind: queue.Download, Src: at(where), Host: out})
		require.Equal(t, byte(i+1), out[0])
		require.Equal(t, byte(i+1), out[page-1])
	}
	require.Equal(t, allocator.OK, v.Grow(at(1), 2), "the old addresses can be used again")

	require.Equal(t, allocator.Exhausted, v.Move(at(0), at(40), 1), "onto what is mapped")
	require.Equal(t, allocator.Exhausted, v.Move(at(10), at(20), 1), "from where nothing is")
	require.Equal(t, allocator.Exhausted, v.Shrink(at(3), 2), "not all of it is mapped")
	require.Equal(t, allocator.Exhausted, v.Grow(at(3), 1))
	require.Equal(t, allocator.Exhausted, v.Grow(at(5), 0))
	require.Equal(t, allocator.Exhausted, v.Grow(at(5), int(capacity/page)), "more than there is")
	require.Equal(t, 6*page, used(t, d), "none of that took anything")
	require.Equal(t, 6*page, s.Stats().Held)

	require.Equal(t, allocator.OK, v.Shrink(at(0), 4))
	require.Equal(t, allocator.OK, v.Shrink(at(40), 2))
	v.Unreserve(base, capacity*2)
	require.Zero(t, used(t, d))
}

// failing fails the calls that fail names.
type failing struct {
	*host.Device
	fail func(call string) error
}

func (f failing) Create(heap int) (driver.Page, error) {
	if err := f.fail("create"); err != nil {
		return 0, err
	}
	return f.Device.Create(heap)
}

func (f failing) Map(heap int, addr uint64, pages []driver.Page) error {
	if err := f.fail("map"); err != nil {
		return err
	}
	return f.Device.Map(heap, addr, pages)
}

func (f failing) Unmap(heap int, addr uint64, n int) error {
	if err := f.fail("unmap"); err != nil {
		return err
	}
	return f.Device.Unmap(heap, addr, n)
}

func TestGrowRollsBack(t *testing.T) {
	var fail func(string) error
	s, d := open(t, func(d *host.Device) driver.Device { return failing{d, func(c string) error { return fail(c) }} })
	broken := errors.New("broken")
	v := s.Virtual(0)
	fail = func(string) error { return nil }
	base, o := v.Reserve(capacity)
	require.Equal(t, allocator.OK, o)
	created := 0
	fail = func(call string) error {
		if call == "create" {
			if created++; created == 5 {
				return broken
			}
		}
		return nil
	}
	require.Equal(t, allocator.Exhausted, v.Grow(base, 8), "the fifth of eight pages fails")
	require.ErrorIs(t, s.LastError(), broken)
	require.Zero(t, used(t, d))
	require.EqualValues(t, 4, s.Stats().SourceAllocs)
	require.EqualValues(t, 4, s.Stats().SourceFrees)
	fail = func(call string) error {
		if call == "map" {
			return broken
		}
		return nil
	}
	require.Equal(t, allocator.Exhausted, v.Grow(base, 8), "the pages are there, but not the mapping")
	require.Zero(t, used(t, d))
	require.Zero(t, s.Stats().Live)

	fail = func(string) error { return nil }
	require.Equal(t, allocator.OK, v.Grow(base, 2))
	fail = func(call string) error {
		if call == "unmap" {
			return broken
		}
		return nil
	}
	to := base + 8*uint64(page)
	require.Equal(t, allocator.Exhausted, v.Move(base, to, 2), "the pages can't leave, and can't come back either")
	fail = func(string) error { return nil }
	require.Equal(t, allocator.OK, v.Move(base, to, 2), "what was left over is cleaned up first")
	require.Equal(t, allocator.OK, v.Shrink(to, 2))
	v.Unreserve(base, capacity)
}

func TestLossOfPages(t *testing.T) {
	d, err := host.Open(host.Config{Capacity: capacity, Granularity: page})
	require.NoError(t, err)
	if d.Granularity(0) == 0 {
		t.Skip("no pages here")
	}
	s, err := vmm.New(env(d))
	require.NoError(t, err)
	v := s.Virtual(0)
	base, o := v.Reserve(capacity)
	require.Equal(t, allocator.OK, o)
	require.Equal(t, allocator.OK, v.Grow(base, 4))
	d.Lose(errors.New("gone"))
	require.Equal(t, allocator.Lost, v.Grow(base+4*uint64(page), 1))
	require.Equal(t, allocator.Lost, v.Move(base, base+8*uint64(page), 1))
	_, o = v.Reserve(page)
	require.Equal(t, allocator.Lost, o)
	require.Equal(t, allocator.OK, v.Shrink(base, 4), "bookkeeping")
	v.Unreserve(base, capacity)
	require.Zero(t, s.Stats().Held)
	require.Zero(t, s.Stats().Live)
	require.NoError(t, s.Close())
	require.NoError(t, d.Close())
}

func TestPagesAreFoundBehindPendingFrees(t *testing.T) {
	s, _ := open(t, itself)
	b, _, o := s.Allocate(allocator.Request{Size: capacity})
	require.Equal(t, allocator.OK, o)
	var w *queue.Worker
	q := queue.New(queue.Options{Executor: func(q *queue.Queue) queue.Executor { w = queue.NewWorker(q, nil, true); return w }})
	defer q.Close()
	at, _, err := q.Submit(&queue.Op{}, nil, nil)
	require.NoError(t, err)
	require.Equal(t, allocator.OK, s.Free(b, queue.After(at)))
	v := s.Virtual(0)
	base, o := v.Reserve(capacity)
	require.Equal(t, allocator.OK, o)
	require.Equal(t, allocator.Exhausted, v.Grow(base, 1))
	require.True(t, w.Step())
	require.Equal(t, allocator.OK, v.Grow(base, 1), "what is reached goes back first")
	require.Equal(t, allocator.OK, v.Shrink(base, 1))
	v.Unreserve(base, capacity)
}
