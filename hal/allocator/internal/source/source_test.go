package source_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/pool"
	"github.com/halyard-go/halyard/hal/allocator/raw"
	"github.com/halyard-go/halyard/hal/allocator/vmm"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const page = 64 * memory.KiB

var layers = []allocator.Layer{raw.Layer, pool.Layer, vmm.Layer}

// flaky is a host device whose calls can be made to fail: fail is asked before each
// call that may.
type flaky struct {
	*host.Device
	fail func(call string) error
}

func (f *flaky) do(call string, do func() error) error {
	if f.fail != nil {
		if err := f.fail(call); err != nil {
			return err
		}
	}
	return do()
}

func (f *flaky) Alloc(heap int, size, align memory.Bytes) (addr uint64, taken memory.Bytes, err error) {
	err = f.do("Alloc", func() (err error) { addr, taken, err = f.Device.Alloc(heap, size, align); return err })
	return addr, taken, err
}

func (f *flaky) Free(heap int, addr uint64) error {
	return f.do("Free", func() error { return f.Device.Free(heap, addr) })
}

func (f *flaky) PoolAlloc(heap int, size, align memory.Bytes) (addr uint64, taken memory.Bytes, valid queue.Frontier, err error) {
	err = f.do("PoolAlloc", func() (err error) { addr, taken, valid, err = f.Device.PoolAlloc(heap, size, align); return err })
	return addr, taken, valid, err
}

func (f *flaky) PoolFree(heap int, addr uint64, after queue.Frontier) error {
	return f.do("PoolFree", func() error { return f.Device.PoolFree(heap, addr, after) })
}

func (f *flaky) SetPoolThreshold(heap int, keep memory.Bytes) error {
	return f.do("SetPoolThreshold", func() error { return f.Device.SetPoolThreshold(heap, keep) })
}

func (f *flaky) PoolTrim(heap int, keep memory.Bytes) (n memory.Bytes, err error) {
	err = f.do("PoolTrim", func() (err error) { n, err = f.Device.PoolTrim(heap, keep); return err })
	return n, err
}

func (f *flaky) PoolHeld(heap int) (n memory.Bytes, err error) {
	err = f.do("PoolHeld", func() (err error) { n, err = f.Device.PoolHeld(heap); return err })
	return n, err
}

func (f *flaky) Create(heap int) (p driver.Page, err error) {
	err = f.do("Create", func() (err error) { p, err = f.Device.Create(heap); return err })
	return p, err
}

func (f *flaky) Release(heap int, p driver.Page) error {
	return f.do("Release", func() error { return f.Device.Release(heap, p) })
}

func (f *flaky) Reserve(heap int, size memory.Bytes) (addr uint64, err error) {
	err = f.do("Reserve", func() (err error) { addr, err = f.Device.Reserve(heap, size); return err })
	return addr, err
}

func (f *flaky) Unreserve(heap int, addr uint64, size memory.Bytes) error {
	return f.do("Unreserve", func() error { return f.Device.Unreserve(heap, addr, size) })
}

func (f *flaky) Map(heap int, addr uint64, pages []driver.Page) error {
	return f.do("Map", func() error { return f.Device.Map(heap, addr, pages) })
}

func (f *flaky) Unmap(heap int, addr uint64, n int) error {
	return f.do("Unmap", func() error { return f.Device.Unmap(heap, addr, n) })
}

// bench is one source on one device.
type bench struct {
	t      testing.TB
	dev    *flaky
	env    *allocator.Env
	src    allocator.Allocator
	log    *observer.ObservedLogs
	q      *queue.Queue
	step   func() bool
	closed bool
}

const capacity = 4 * memory.MiB

// owner is what keepers carry.
var owner = new(int)

func newBench(t testing.TB, l allocator.Layer) *bench {
	t.Helper()
	d, err := host.Open(host.Config{Capacity: capacity, Granularity: page})
	require.NoError(t, err)
	b := &bench{t: t, dev: &flaky{Device: d}}
	core, logs := observer.New(zap.WarnLevel)
	b.log = logs
	b.env = &allocator.Env{Owner: owner, Heaps: d.Info().Heaps, Device: b.dev, Now: time.Now, Log: zap.New(core)}
	v, err := l.Table.Parse("")
	require.NoError(t, err)
	b.src, err = l.New(nil, b.env, v)
	if l.Table.Name == "vmm" && d.Granularity(0) == 0 {
		require.ErrorIs(t, err, driver.ErrUnsupported)
		require.NoError(t, d.Close())
		t.Skip("no pages here")
	}
	require.NoError(t, err)
	b.q, b.step = manual(t)
	t.Cleanup(b.close)
	return b
}

// close checks that the device ends empty.
func (b *bench) close() {
	if b.closed {
		return
	}
	b.closed = true
	for b.step() {
	}
	require.NoError(b.t, b.src.Close())
	st := b.src.Stats()
	require.Zero(b.t, st.Live)
	require.Zero(b.t, st.Held)
	require.Zero(b.t, st.Pending)
	require.Zero(b.t, st.Idle)
	require.Equal(b.t, st.Allocs, st.Frees)
	require.Equal(b.t, st.SourceAllocs, st.SourceFrees)
	require.Equal(b.t, st.Created, st.Released)
	require.NoError(b.t, b.dev.Close())
}

func (b *bench) check() {
	b.t.Helper()
	st := b.src.Stats()
	require.Equal(b.t, st.Held, st.Live+st.Idle+st.Pending)
	require.LessOrEqual(b.t, st.Live, st.PeakLive)
	require.LessOrEqual(b.t, st.Held, st.PeakHeld)
	for _, x := range []memory.Bytes{st.Live, st.Held, st.Pending, st.Idle} {
		require.GreaterOrEqual(b.t, x, memory.Bytes(0))
	}
	if b.dev.fail == nil {
		require.Equal(b.t, st.Held, b.used(0)+b.used(1), "what is held is what the device says")
	}
}

func (b *bench) used(heap int) memory.Bytes {
	free, total, err := b.dev.MemInfo(heap)
	require.NoError(b.t, err)
	return total - free
}

func request(heap int, size memory.Bytes) allocator.Request {
	return allocator.Request{Size: size, Kind: allocator.MakeKind(heap, 256, 0, 0, 0)}
}

func (b *bench) alloc(heap int, size memory.Bytes) allocator.Block {
	b.t.Helper()
	x, f, o := b.src.Allocate(request(heap, size))
	require.Equal(b.t, allocator.OK, o)
	require.True(b.t, f.Reached())
	require.GreaterOrEqual(b.t, x.Size, size)
	require.Equal(b.t, any(owner), x.Keeper.Owner)
	b.check()
	return x
}

func (b *bench) free(x allocator.Block, after queue.Frontier) {
	b.t.Helper()
	require.Equal(b.t, allocator.OK, b.src.Free(x, after))
	b.check()
}

// point submits work to the manual queue and returns its frontier.
func (b *bench) point() queue.Frontier {
	at, issued, err := b.q.Submit(&queue.Op{}, nil, nil)
	require.NoError(b.t, err)
	require.True(b.t, issued)
	return queue.After(at)
}

type nothing struct{}

func (nothing) Run(*queue.Op) error  { return nil }
func (nothing) Quick(*queue.Op) bool { return true }

func manual(t testing.TB) (*queue.Queue, func() bool) {
	var w *queue.Worker
	q := queue.New(queue.Options{Executor: func(q *queue.Queue) queue.Executor {
		w = queue.NewWorker(q, nothing{}, true)
		return w
	}})
	t.Cleanup(func() {
		q.Close()
		for w.Step() {
		}
	})
	return q, w.Step
}

// each runs a test for the three sources.
func each(t *testing.T, f func(t *testing.T, b *bench)) {
	for _, l := range layers {
		t.Run(l.Table.Name, func(t *testing.T) { f(t, newBench(t, l)) })
	}
}

func TestTables(t *testing.T) {
	for _, l := range layers {
		require.NoError(t, l.Table.Check())
		require.True(t, l.Source)
		require.True(t, l.Mints)
		var r allocator.Registry
		require.NoError(t, r.Register(l))
	}
}

func TestASourceHasNoLayerBelow(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		for _, l := range layers {
			v, err := l.Table.Parse("")
			require.NoError(t, err)
			_, err = l.New(b.src, b.env, v)
			require.ErrorContains(t, err, "is a source")
			_, err = l.New(nil, &allocator.Env{}, v)
			require.ErrorContains(t, err, "needs a device")
		}
	})
}

// plain is a device that has nothing but queues.
type plain struct{ driver.Device }

func TestADeviceThatLacksTheAbility(t *testing.T) {
	b := newBench(t, raw.Layer)
	env := *b.env
	env.Device = plain{b.dev.Device}
	for _, l := range layers {
		v, err := l.Table.Parse("")
		require.NoError(t, err)
		_, err = l.New(nil, &env, v)
		require.ErrorIs(t, err, driver.ErrUnsupported)
		require.ErrorContains(t, err, "device host has no "+l.Table.Name)
	}
}

func TestAllocateAndFree(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		var blocks []allocator.Block
		for heap := range 2 {
			for _, size := range []memory.Bytes{1, 256, 1000, page, page + 1} {
				blocks = append(blocks, b.alloc(heap, size))
			}
		}
		st := b.src.Stats()
		require.EqualValues(t, 10, st.Allocs)
		require.Equal(t, st.Live, st.Held)
		ids := map[uint64]bool{}
		for _, x := range blocks {
			require.False(t, ids[x.ID])
			ids[x.ID] = true
			b.free(x, queue.ReadyNow())
		}
		require.Zero(t, b.src.Stats().Live)
		require.Equal(t, st.PeakLive, b.src.Stats().PeakLive)
		b.src.Trim(0)
		require.Zero(t, b.used(0)+b.used(1))
		b.src.(allocator.PeakResetter).ResetPeaks()
		require.Zero(t, b.src.Stats().PeakLive)
		require.Zero(t, b.src.Stats().PeakHeld)
		require.EqualValues(t, 10, b.src.Stats().Allocs, "a peak reset touches only peaks")
	})
}

func TestMisuseHasDistinctOutcomes(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		other := newBench(t, raw.Layer)
		x := b.alloc(0, 1000)
		require.Equal(t, allocator.Foreign, other.src.Free(x, queue.ReadyNow()))
		require.Equal(t, allocator.Foreign, b.src.Free(allocator.Block{}, queue.ReadyNow()))
		require.Equal(t, allocator.OK, x.Keeper.Ledger.Pin(x.ID, 1))
		require.Equal(t, allocator.Busy, b.src.Free(x, queue.ReadyNow()))
		require.Equal(t, allocator.OK, x.Keeper.Ledger.Pin(x.ID, -1))
		b.free(x, queue.ReadyNow())
		require.Equal(t, allocator.Stale, b.src.Free(x, queue.ReadyNow()))
		y := b.alloc(0, 1000) // may have the slot and the address
		require.Equal(t, allocator.Stale, b.src.Free(x, queue.ReadyNow()))
		b.free(y, queue.ReadyNow())
		require.EqualValues(t, 2, b.src.Stats().Frees)
	})
}

func TestRefusals(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		for want, reqs := range map[allocator.Outcome][]allocator.Request{
			allocator.Unsupported: {request(3, 1), request(15, 1)},
			allocator.TooLarge:    {request(0, memory.MaxBytes), request(0, memory.MaxBytes-255)},
			allocator.Exhausted:   {request(0, capacity+1), request(1, capacity+1), {Size: 256, Kind: allocator.MakeKind(0, 1<<62, 0, 0, 0)}},
		} {
			for _, r := range reqs {
				_, _, o := b.src.Allocate(r)
				require.Equal(t, want, o, "%v", r)
			}
		}
		require.EqualValues(t, 7, b.src.Stats().Failed)
		require.ErrorIs(t, b.src.(allocator.LastErrorer).LastError(), driver.ErrOutOfMemory)
		b.env.Heaps[0].MaxAllocation = page
		_, _, o := b.src.Allocate(request(0, page+1))
		require.Equal(t, allocator.TooLarge, o)
		b.free(b.alloc(0, page), queue.ReadyNow())
		require.Zero(t, b.log.Len(), "a full device is nothing to log")
	})
}

func TestAlignment(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		for _, align := range []memory.Bytes{1, 256, 4096, page, 4 * page, 16 * memory.MiB} {
			x, _, o := b.src.Allocate(allocator.Request{Size: 300, Kind: allocator.MakeKind(0, align, 0, 0, 0)})
			require.Equal(t, allocator.OK, o)
			require.Zero(t, x.Addr%uint64(max(align, 256)))
			b.free(x, queue.ReadyNow())
		}
	})
}

func TestMemoryStaysWithItsFrontier(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		x, y := b.alloc(0, page), b.alloc(0, 2*page)
		fx, fy := b.point(), b.point()
		b.free(y, fy)
		b.free(x, fx)
		require.Equal(t, 3*page, b.used(0), "not before it is reached")
		require.Equal(t, 3*page, b.src.Stats().Pending)
		require.Zero(t, b.src.Trim(0), "not even trimmed")
		var sizes []memory.Bytes
		b.src.(allocator.Idler).Pending(func(f queue.Frontier, n memory.Bytes) bool {
			require.False(t, f.Reached())
			sizes = append(sizes, n)
			return true
		})
		require.Equal(t, []memory.Bytes{2 * page, page}, sizes, "oldest first")
		b.src.(allocator.Idler).Pending(func(queue.Frontier, memory.Bytes) bool { sizes = nil; return false })
		require.Nil(t, sizes)

		require.True(t, b.step())
		require.Equal(t, 3*page, b.used(0))
		b.free(b.alloc(1, 256), queue.ReadyNow()) // any call drains
		require.Equal(t, 2*page, b.src.Stats().Pending, "what is reached goes, though it was freed later")
		require.True(t, b.step())
		b.src.Trim(0)
		require.Zero(t, b.used(0))
	})
}

func TestUsesAreWaitedForToo(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		x := b.alloc(0, page)
		require.Equal(t, allocator.OK, x.Keeper.Ledger.Use(x.ID, b.point()))
		b.free(x, queue.ReadyNow())
		require.Equal(t, page, b.src.Stats().Pending)
		y := b.alloc(0, page)
		b.point()
		b.free(y, queue.Frontier{}) // unknown: after everything issued
		require.Equal(t, 2*page, b.src.Stats().Pending)
		require.True(t, b.step())
		b.src.Trim(0)
		require.Equal(t, page, b.src.Stats().Pending)
		require.True(t, b.step())
		b.src.Trim(0)
		require.Zero(t, b.src.Stats().Pending)
	})
}

func TestAFullDeviceNeedsAWait(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		x, y := b.alloc(0, capacity/2), b.alloc(0, capacity/2)
		_, _, o := b.src.Allocate(request(0, page))
		require.Equal(t, allocator.Exhausted, o, "nothing is pending")
		fx, fy := b.point(), b.point()
		b.free(x, fx)
		b.free(y, fy)
		_, f, o := b.src.Allocate(request(0, page))
		require.Equal(t, allocator.NeedsWait, o)
		require.Equal(t, fx, f, "the oldest")
		z := b.alloc(1, page) // the other heap has room
		b.free(z, queue.ReadyNow())
		require.True(t, b.step())
		z = b.alloc(0, page)
		require.True(t, b.step())
		b.free(z, queue.ReadyNow())
	})
}

func TestFullHeapsAreTheirOwn(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		x, y := b.alloc(0, capacity), b.alloc(1, page)
		b.free(y, b.point())
		_, _, o := b.src.Allocate(request(0, page))
		require.Equal(t, allocator.Exhausted, o, "what another heap has pending doesn't help")
		b.free(x, queue.ReadyNow())
	})
}

func TestManyPendingFrees(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		stuck, _ := manual(t)
		at, _, err := stuck.Submit(&queue.Op{}, nil, nil)
		require.NoError(t, err)
		var kept []allocator.Block
		for range 200 {
			x, _, o := b.src.Allocate(request(1, 256))
			require.Equal(t, allocator.OK, o)
			kept = append(kept, x)
		}
		f := b.point()
		for i, x := range kept {
			after := f
			if i%2 == 0 {
				after = queue.After(at)
			}
			require.Equal(t, allocator.OK, b.src.Free(x, after))
		}
		require.EqualValues(t, 200*256, b.src.Stats().Pending)
		require.True(t, b.step())
		b.src.Trim(0)
		require.EqualValues(t, 100*256, b.src.Stats().Pending)
		err = b.src.Close()
		require.ErrorContains(t, err, "25KiB can't be given back: still in use by the device")
		stuck.Close()
		stuck.Retire(at.Value, nil)
	})
}

// errBroken is no lack of memory.
var errBroken = errors.New("broken")

// program is a workload that survives refusals. It frees all that it got.
func program(b *bench) {
	var live []allocator.Block
	get := func(heap int, size memory.Bytes) {
		if x, _, o := b.src.Allocate(request(heap, size)); o == allocator.OK {
			live = append(live, x)
		} else {
			require.Contains(b.t, []allocator.Outcome{allocator.Exhausted, allocator.NeedsWait}, o)
		}
		b.check()
	}
	drop := func(after queue.Frontier) {
		if len(live) > 0 {
			b.free(live[0], after)
			live = live[1:]
		}
	}
	get(0, 3*page)
	get(0, page/2)
	get(1, 1000)
	drop(b.point())
	get(0, 2*page)
	b.step()
	drop(queue.ReadyNow())
	get(0, page)
	b.src.Trim(page)
	if vm, ok := b.src.(allocator.VirtualMemory); ok {
		virtualProgram(b, vm.Virtual(0))
	}
	for len(live) > 0 {
		drop(queue.ReadyNow())
	}
	b.src.Trim(0)
}

func virtualProgram(b *bench, v allocator.Virtual) {
	addr, o := v.Reserve(16 * page)
	if o != allocator.OK {
		return
	}
	at := func(i int) uint64 { return addr + uint64(i)*uint64(page) }
	if v.Grow(at(0), 4) == allocator.OK {
		b.check()
		second := 0
		if v.Move(at(2), at(8), 2) == allocator.OK {
			second = 8
		} else {
			second = 2
		}
		b.check()
		for _, i := range []int{0, second} {
			for v.Shrink(at(i), 2) != allocator.OK {
				b.check()
			}
		}
	}
	b.check()
	v.Unreserve(addr, 16*page)
}

func TestTheNthCallFails(t *testing.T) {
	for _, l := range layers {
		t.Run(l.Table.Name, func(t *testing.T) {
			count := 0
			b := newBench(t, l)
			b.dev.fail = func(string) error { count++; return nil }
			program(b)
			b.dev.fail = nil
			b.close()
			require.GreaterOrEqual(t, count, 10)
			for _, cause := range []error{driver.ErrOutOfMemory, errBroken} {
				for n := 1; n <= count; n++ {
					b := newBench(t, l)
					calls, failed := 0, ""
					injected := fmt.Errorf("call %d: %w", n, cause)
					b.dev.fail = func(call string) error {
						if calls++; calls == n {
							failed = call
							return injected
						}
						return nil
					}
					program(b)
					b.dev.fail = nil
					b.src.Trim(0)
					require.Zero(t, b.used(0)+b.used(1), "call %d, %s: no leak", n, failed)
					require.Zero(t, b.src.Stats().Live, "call %d, %s", n, failed)
					x := b.alloc(0, 3*page)
					b.free(x, queue.ReadyNow())
					if failed != "PoolHeld" { // a figure that couldn't be read
						require.ErrorIs(t, b.src.(allocator.LastErrorer).LastError(), injected, "call %d, %s", n, failed)
					}
					b.close()
				}
			}
		})
	}
}

func TestADriverThatRefusesAFreeIsAskedAgain(t *testing.T) {
	for _, tt := range []struct {
		layer allocator.Layer
		call  string
	}{{raw.Layer, "Free"}, {pool.Layer, "PoolFree"}, {vmm.Layer, "Unmap"}, {vmm.Layer, "Release"}, {vmm.Layer, "Unreserve"}} {
		t.Run(tt.call, func(t *testing.T) {
			b := newBench(t, tt.layer)
			x := b.alloc(0, page)
			b.dev.fail = func(call string) error {
				if call == tt.call {
					return errBroken
				}
				return nil
			}
			b.free(x, queue.ReadyNow())
			require.Zero(t, b.src.Stats().Live)
			if tt.call != "Unreserve" {
				require.Equal(t, page, b.used(0))
				_, _, o := b.src.Allocate(request(0, capacity))
				require.Equal(t, allocator.Exhausted, o, "no wait would help")
			}
			require.ErrorIs(t, b.src.Close(), errBroken)
			require.NotZero(t, b.log.FilterMessage("the driver failed").Len())
			b.dev.fail = nil
			b.src.Trim(0)
			require.Zero(t, b.used(0))
		})
	}
}

func TestLoss(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		b.closed = true // the device ends another way
		cause := errors.New("fell off the bus")
		x, y, z := b.alloc(0, page), b.alloc(0, page), b.alloc(1, 1000)
		b.free(z, b.point())
		idle := b.alloc(0, page)
		b.free(idle, queue.ReadyNow())
		calls := 0
		b.dev.Lose(cause)
		b.free2(x, queue.ReadyNow())
		_, _, o := b.src.Allocate(request(0, 1))
		require.Equal(t, allocator.Lost, o)
		require.ErrorIs(t, b.src.(allocator.LastErrorer).LastError(), cause)
		b.dev.fail = func(call string) error {
			if call != "PoolHeld" && call != "PoolTrim" {
				calls++
			}
			return nil
		}
		b.free2(y, b.point())
		_, _, o = b.src.Allocate(request(0, 1))
		require.Equal(t, allocator.Lost, o)
		require.Zero(t, calls, "frees are bookkeeping")
		require.NoError(t, b.src.Close())
		st := b.src.Stats()
		require.Zero(t, st.Live+st.Held+st.Pending+st.Idle)
		require.EqualValues(t, 4, st.Frees)
		require.Equal(t, 1, b.log.FilterMessage("device lost").Len(), "said once")
		require.NoError(t, b.dev.Close())
	})
}

// free2 frees on a device whose figures can't be asked for any more.
func (b *bench) free2(x allocator.Block, after queue.Frontier) {
	b.t.Helper()
	require.Equal(b.t, allocator.OK, b.src.Free(x, after))
}

func TestALossIsSeenAtClose(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		b.closed = true
		x := b.alloc(0, page)
		b.free(x, b.point())
		b.dev.Lose(errBroken)
		require.NoError(t, b.src.Close(), "what will never be reached is no leak")
		require.Zero(t, b.src.Stats().Held)
		require.NoError(t, b.dev.Close())
	})
}

// TestMemoryOnItsWayBackIsWaitedFor allocates while another goroutine is in the
// middle of giving memory back.
func TestMemoryOnItsWayBackIsWaitedFor(t *testing.T) {
	b := newBench(t, raw.Layer)
	x := b.alloc(0, capacity)
	entered, leave := make(chan struct{}), make(chan struct{})
	b.dev.fail = func(call string) error {
		if call == "Free" {
			close(entered)
			<-leave
		}
		return nil
	}
	done := make(chan allocator.Outcome)
	go func() { done <- b.src.Free(x, queue.ReadyNow()) }()
	<-entered
	_, f, o := b.src.Allocate(request(0, page))
	require.Equal(t, allocator.NeedsWait, o)
	require.Equal(t, queue.ReadyNow(), f, "ask again at once")
	close(leave)
	require.Equal(t, allocator.OK, <-done)
	b.dev.fail = nil
	b.free(b.alloc(0, capacity), queue.ReadyNow())
}

// TestMemoryGivenBackMeanwhileIsFound has another goroutine free all memory between
// the driver's refusal and the source's look at its list.
func TestMemoryGivenBackMeanwhileIsFound(t *testing.T) {
	b := newBench(t, raw.Layer)
	x := b.alloc(0, capacity)
	first := true
	b.dev.fail = func(call string) error {
		if call == "Alloc" && first {
			first = false
			done := make(chan allocator.Outcome)
			go func() { done <- b.src.Free(x, queue.ReadyNow()) }()
			require.Equal(t, allocator.OK, <-done)
			return fmt.Errorf("full a moment ago: %w", driver.ErrOutOfMemory)
		}
		return nil
	}
	y, _, o := b.src.Allocate(request(0, page))
	require.Equal(t, allocator.OK, o)
	b.dev.fail = nil
	b.free(y, queue.ReadyNow())
}

func TestConcurrentUse(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		var qs []*queue.Queue
		for range 2 {
			q, err := b.dev.NewQueue(nil)
			require.NoError(t, err)
			qs = append(qs, q)
		}
		var wg sync.WaitGroup
		for g := range 4 {
			wg.Go(func() {
				q := qs[g%2]
				for i := range 100 {
					x, f, o := b.src.Allocate(request(i%2, memory.Bytes(1+i)*512))
					if o != allocator.OK {
						t.Errorf("outcome %v", o)
						return
					}
					op := queue.Op{Kind: queue.Fill, Dst: x.Addr, Size: int64(x.Size), Pattern: uint64(g), PatternSize: 1, After: f}
					at, _, err := q.Submit(&op, nil, nil)
					if err != nil {
						t.Error(err)
					}
					if o := b.src.Free(x, queue.After(at)); o != allocator.OK {
						t.Errorf("free: %v", o)
					}
				}
			})
		}
		wg.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		for _, q := range qs {
			require.NoError(t, q.Drain(ctx))
			q.Close()
		}
		b.src.Trim(0)
		b.check()
		st := b.src.Stats()
		require.EqualValues(t, 400, st.Allocs)
		require.EqualValues(t, 400, st.Frees)
		require.Zero(t, st.Held)
	})
}

func TestLiveListsTheHandles(t *testing.T) {
	each(t, func(t *testing.T, b *bench) {
		x, y := b.alloc(0, 100), b.alloc(0, 200)
		b.free(x, queue.ReadyNow())
		n := 0
		b.src.(allocator.LiveLister).Live(func(l allocator.Block, i allocator.Info) bool {
			n++
			require.Equal(t, y.ID, l.ID)
			require.EqualValues(t, 200, i.Asked)
			return b.src.Free(l, queue.ReadyNow()) == allocator.OK
		})
		require.Equal(t, 1, n)
	})
}
