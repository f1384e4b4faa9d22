package hal_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stacks are compositions that every test of behaviour runs on.
var stacks = []string{"", "raw", "pool", "vmm", "raw+block", "pool+block", "caching", "vmm+block+caching", "pool+caching+block", "raw+caching+caching"}

func onEveryStack(t *testing.T, device string, f func(t *testing.T, d *hal.Device)) {
	for _, s := range stacks {
		name := s
		if s == "" {
			name = "default"
		}
		t.Run(name, func(t *testing.T) { f(t, open(t, device, s)) })
	}
}

func open(t testing.TB, device, stack string) *hal.Device {
	var opts []hal.Option
	if stack != "" {
		opts = append(opts, hal.WithAllocator(stack))
	}
	d, err := hal.Open(device, opts...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		require.NoError(t, d.Close(ctx))
	})
	return d
}

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func alloc(t testing.TB, d *hal.Device, n hal.Bytes) hal.Buffer {
	b, err := d.Allocate(context.Background(), hal.Params{Size: n})
	require.NoError(t, err)
	return b
}

// emptied checks that nothing is held once everything idle is given back.
func emptied(t testing.TB, d *hal.Device) {
	require.NoError(t, d.Check())
	_, err := d.TrimWait(soon(t), 0)
	require.NoError(t, err)
	require.NoError(t, d.Check())
	for _, l := range d.Stats().Layers {
		require.Zero(t, l.Live, l.Layer)
		require.Zero(t, l.Held, l.Layer)
		require.Zero(t, l.Idle, l.Layer)
		require.Zero(t, l.Pending, l.Layer)
	}
}

func TestHandles(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB,queues=2", func(t *testing.T, d *hal.Device) {
		other := open(t, "host:capacity=1MiB", "raw")
		q := d.Queue(0)
		b := alloc(t, d, 1000)
		require.EqualValues(t, 1000, b.Size())
		require.GreaterOrEqual(t, b.Granted(), b.Size())
		require.Same(t, d, b.Device())
		require.True(t, b.Valid())
		require.ErrorIs(t, other.Queue(0).Release(b), hal.ErrForeign)
		require.ErrorIs(t, other.Queue(0).Dealloca(b, nil, nil), hal.ErrForeign)
		require.ErrorIs(t, other.Queue(0).Fill(b.All(), []byte{1}, nil, nil), hal.ErrForeign)
		require.NoError(t, b.Release())
		c := alloc(t, d, 1000) // most likely the same memory
		for what, err := range map[string]error{
			"release":   b.Release(),
			"q release": q.Release(b),
			"dealloca":  q.Dealloca(b, nil, nil),
			"fill":      q.Fill(b.All(), []byte{1}, nil, nil),
			"copy":      q.Copy(c.All(), b.All(), nil, nil),
			"used":      b.UsedUntil(q.Issued()),
		} {
			require.ErrorIs(t, err, hal.ErrReleased, what)
		}
		_, err := b.Map(soon(t))
		require.ErrorIs(t, err, hal.ErrReleased)
		_, err = b.Export()
		require.ErrorIs(t, err, hal.ErrReleased)
		require.Zero(t, b.Size())
		require.False(t, b.Valid())
		require.NoError(t, c.Release())
		require.ErrorIs(t, hal.Buffer{}.Release(), hal.ErrForeign)
		require.ErrorIs(t, q.Dealloca(hal.Buffer{}, nil, nil), hal.ErrForeign)
		emptied(t, d)
	})
}

func TestZeroBytes(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB", func(t *testing.T, d *hal.Device) {
		a, b := alloc(t, d, 0), alloc(t, d, 0)
		require.NotEqual(t, a, b)
		require.Zero(t, a.Size())
		require.NoError(t, d.Queue(0).Fill(a.All(), []byte{1}, nil, nil))
		require.NoError(t, a.Release())
		require.ErrorIs(t, a.Release(), hal.ErrReleased)
		require.NoError(t, d.Queue(0).Dealloca(b, nil, nil))
		require.ErrorIs(t, b.Release(), hal.ErrReleased)
		c, err := d.Queue(1).Alloca(soon(t), hal.Params{}, nil, nil)
		require.NoError(t, err)
		require.NoError(t, c.Release())
	})
}

func TestBadRequestsAreNamedAndLoseNothing(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB", func(t *testing.T, d *hal.Device) {
		ctx := soon(t)
		for _, c := range []struct {
			p    hal.Params
			want error
		}{
			{hal.Params{Size: -1}, hal.ErrInvalid},
			{hal.Params{Size: math.MinInt64}, hal.ErrInvalid},
			{hal.Params{Size: 1, Align: 3}, hal.ErrInvalid},
			{hal.Params{Size: 1, Align: -4096}, hal.ErrInvalid},
			{hal.Params{Size: 1, Type: hal.DeviceLocal | hal.HostLocal}, hal.ErrUnsupported},
			{hal.Params{Size: math.MaxInt64}, hal.ErrTooLarge},
			{hal.Params{Size: math.MaxInt64 - 255}, hal.ErrTooLarge},
			{hal.Params{Size: 1, Align: 1 << 62}, nil},
			{hal.Params{Size: 65 * hal.MiB}, nil},
			{hal.Params{Size: 1 << 60}, nil},
		} {
			_, err := d.Allocate(ctx, c.p)
			require.Error(t, err, "%+v", c.p)
			if c.want != nil {
				require.ErrorIs(t, err, c.want, "%+v", c.p)
			}
			_, err = d.Queue(0).Alloca(ctx, c.p, nil, nil)
			require.Error(t, err, "%+v", c.p)
		}
		//lint:ignore SA1012 that is the point
		_, err := d.Allocate(nil, hal.Params{Size: 1})
		require.ErrorIs(t, err, hal.ErrInvalid)
		emptied(t, d)
		b := alloc(t, d, hal.MiB)
		q := d.Queue(0)
		for what, err := range map[string]error{
			"span before":  q.Fill(b.Span(-1, 2), []byte{1}, nil, nil),
			"span after":   q.Fill(b.Span(hal.MiB-1, 2), []byte{1}, nil, nil),
			"span size":    q.Fill(b.Span(0, -1), []byte{1}, nil, nil),
			"span wraps":   q.Fill(b.Span(math.MaxInt64, 2), []byte{1}, nil, nil),
			"pattern":      q.Fill(b.All(), []byte{1, 2, 3}, nil, nil),
			"no pattern":   q.Fill(b.All(), nil, nil, nil),
			"odd fill":     q.Fill(b.Span(0, 3), []byte{1, 2}, nil, nil),
			"copy sizes":   q.Copy(b.Span(0, 4), b.Span(8, 5), nil, nil),
			"upload size":  q.Upload(b.Span(0, 4), make([]byte, 5), nil, nil),
			"download":     q.Download(make([]byte, 5), b.Span(0, 4), nil, nil),
			"nil function": q.Call(nil, nil, nil),
		} {
			require.ErrorIs(t, err, hal.ErrInvalid, what)
		}
		require.Error(t, q.Barrier(hal.Fence{{}}, nil), "a fence of a nil semaphore")
		require.NoError(t, b.Release())
		emptied(t, d)
	})
}

func TestAlignmentHoldsOnFirstUseAndOnReuse(t *testing.T) {
	onEveryStack(t, "host:capacity=256MiB", func(t *testing.T, d *hal.Device) {
		var live []hal.Buffer
		for round := range 3 {
			for _, align := range []hal.Bytes{1, 256, 512, 4096, 64 * hal.KiB, hal.MiB} {
				for _, size := range []hal.Bytes{1, 100, 4096, 300 * hal.KiB} {
					b, err := d.Allocate(soon(t), hal.Params{Size: size, Align: align})
					require.NoError(t, err)
					require.Zero(t, b.Address()%uint64(align), "round %d size %v align %v", round, size, align)
					live = append(live, b)
				}
			}
			for i, b := range live {
				if (i+round)%2 == 0 {
					require.NoError(t, b.Release())
				}
			}
			kept := live[:0]
			for _, b := range live {
				if b.Valid() {
					kept = append(kept, b)
				}
			}
			live = kept
		}
		for _, b := range live {
			require.NoError(t, b.Release())
		}
		emptied(t, d)
	})
}

func TestContentsTravelInQueueOrder(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB", func(t *testing.T, d *hal.Device) {
		ctx := soon(t)
		q0, q1 := d.Queue(0), d.Queue(1)
		s, done := hal.NewSemaphore(0), hal.NewSemaphore(0)
		a, err := q0.Alloca(ctx, hal.Params{Size: hal.MiB}, nil, nil)
		require.NoError(t, err)
		b, err := q1.Alloca(ctx, hal.Params{Size: hal.MiB}, nil, nil)
		require.NoError(t, err)
		word := binary.LittleEndian.AppendUint32(nil, 0xdeadbeef)
		require.NoError(t, q0.Fill(a.All(), word, nil, nil))
		require.NoError(t, q0.Upload(a.Span(4, 5), []byte("hello"), nil, s.At(1)))
		require.NoError(t, q1.Copy(b.Span(0, 4*hal.KiB), a.Span(0, 4*hal.KiB), s.At(1), nil))
		got := make([]byte, 16)
		require.NoError(t, q1.Download(got, b.Span(0, 16), nil, done.At(1)))
		require.NoError(t, q0.Dealloca(a, done.At(1), nil))
		require.NoError(t, q1.Dealloca(b, nil, done.At(2)))
		require.NoError(t, done.Wait(ctx, 2))
		require.Equal(t, append(append(word, "hello"...), 0xde, 0xef, 0xbe, 0xad, 0xde, 0xef, 0xbe)[:9], got[:9])
		require.NoError(t, q0.Drain(ctx))
		emptied(t, d)
	})
}

func TestADeallocaWhoseWaitFailsDidNotHappen(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB", func(t *testing.T, d *hal.Device) {
		q := d.Queue(0)
		s, done := hal.NewSemaphore(0), hal.NewSemaphore(0)
		b, err := q.Alloca(soon(t), hal.Params{Size: 4096}, nil, nil)
		require.NoError(t, err)
		require.NoError(t, q.Dealloca(b, s.At(1), done.At(1)))
		require.ErrorIs(t, b.Release(), hal.ErrReleased, "claimed by the dealloca")
		require.ErrorIs(t, q.Dealloca(b, nil, nil), hal.ErrReleased)
		cause := errors.New("upstream")
		s.Fail(cause)
		require.ErrorIs(t, done.Wait(soon(t), 1), cause)
		require.True(t, b.Valid(), "still owned")
		require.NoError(t, q.Dealloca(b, nil, done.At(1)))
		require.NoError(t, q.Drain(soon(t)))
		require.False(t, b.Valid())
		emptied(t, d)
	})
}

func TestMemoryIsNotFreeBeforeItsDeallocaIsIssued(t *testing.T) {
	onEveryStack(t, "host:capacity=8MiB,granularity=64KiB", func(t *testing.T, d *hal.Device) {
		ctx := soon(t)
		q0, q1 := d.Queue(0), d.Queue(1)
		s, done := hal.NewSemaphore(0), hal.NewSemaphore(0)
		b, err := q0.Alloca(ctx, hal.Params{Size: 6 * hal.MiB}, nil, nil)
		require.NoError(t, err)
		require.NoError(t, q0.Dealloca(b, s.At(1), done.At(1)))
		_, err = q1.Alloca(ctx, hal.Params{Size: 6 * hal.MiB}, nil, nil)
		oom, ok := errors.AsType[*hal.OOMError](err)
		require.True(t, ok, "%v", err)
		require.EqualValues(t, 6*hal.MiB, oom.Unsignalled)
		require.Contains(t, oom.Advice, "signals that were not submitted")
		require.NoError(t, s.Signal(1))
		require.NoError(t, done.Wait(ctx, 1))
		b, err = q1.Alloca(ctx, hal.Params{Size: 6 * hal.MiB}, nil, nil)
		require.NoError(t, err, "free for whoever waited for the dealloca")
		require.NoError(t, q1.Dealloca(b, nil, nil))
		require.NoError(t, q1.Drain(ctx))
		emptied(t, d)
	})
}

// A use on one queue, a free on another without a wait: the memory is not handed
// out before the use is over.
func TestABufferIsFreeAfterItsUsesOnEveryQueue(t *testing.T) {
	onEveryStack(t, "host:capacity=8MiB,granularity=64KiB", func(t *testing.T, d *hal.Device) {
		ctx := soon(t)
		q0, q1 := d.Queue(0), d.Queue(1)
		gate := make(chan struct{})
		b, err := q0.Alloca(ctx, hal.Params{Size: 6 * hal.MiB}, nil, nil)
		require.NoError(t, err)
		require.NoError(t, q1.Call(func() error { <-gate; return nil }, nil, nil))
		require.NoError(t, q1.Fill(b.All(), []byte{7}, nil, nil)) // behind the gate
		require.NoError(t, q0.Dealloca(b, nil, nil))
		short, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
		defer cancel()
		_, err = q0.Alloca(short, hal.Params{Size: 6 * hal.MiB}, nil, nil)
		require.ErrorIs(t, err, hal.ErrOutOfMemory)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		go func() { time.Sleep(2 * time.Millisecond); close(gate) }()
		c, err := q0.Alloca(ctx, hal.Params{Size: 6 * hal.MiB}, nil, nil)
		require.NoError(t, err, "waited for what is issued")
		require.NoError(t, q0.Dealloca(c, nil, nil))
		require.NoError(t, q0.Drain(ctx))
		emptied(t, d)
	})
}

func TestAnExportedBufferIsFreeAfterEverythingIssued(t *testing.T) {
	onEveryStack(t, "host:capacity=8MiB,granularity=64KiB", func(t *testing.T, d *hal.Device) {
		ctx := soon(t)
		gate := make(chan struct{})
		b := alloc(t, d, 6*hal.MiB)
		_, err := b.Export()
		require.NoError(t, err)
		require.NoError(t, d.Queue(1).Call(func() error { <-gate; return nil }, nil, nil))
		require.NoError(t, b.Release())
		short, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
		defer cancel()
		_, err = d.Allocate(short, hal.Params{Size: 6 * hal.MiB})
		require.ErrorIs(t, err, hal.ErrOutOfMemory)
		close(gate)
		b, err = d.Allocate(ctx, hal.Params{Size: 6 * hal.MiB})
		require.NoError(t, err)
		require.NoError(t, b.Release())
		emptied(t, d)
	})
}

func TestMap(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB", func(t *testing.T, d *hal.Device) {
		ctx := soon(t)
		b, err := d.Allocate(ctx, hal.Params{Size: 1000, Type: hal.HostVisible, Usage: hal.Mapping})
		require.NoError(t, err)
		m, err := b.Map(ctx)
		require.NoError(t, err)
		require.Len(t, m, 1000)
		copy(m, "abc")
		require.ErrorIs(t, b.Release(), hal.ErrMapped)
		require.ErrorIs(t, d.Queue(0).Dealloca(b, nil, nil), hal.ErrMapped)
		require.NoError(t, b.Unmap())
		require.ErrorIs(t, b.Unmap(), hal.ErrNotMapped)
		done := hal.NewSemaphore(0)
		got := make([]byte, 3)
		require.NoError(t, d.Queue(0).Download(got, b.Span(0, 3), nil, done.At(1)))
		require.NoError(t, done.Wait(ctx, 1))
		require.Equal(t, "abc", string(got))
		gate := make(chan struct{})
		require.NoError(t, d.Queue(0).Call(func() error { <-gate; return nil }, nil, nil))
		require.NoError(t, d.Queue(0).Fill(b.All(), []byte("z"), nil, nil))
		short, cancel := context.WithTimeout(ctx, 2*time.Millisecond)
		defer cancel()
		_, err = b.Map(short)
		require.ErrorIs(t, err, context.DeadlineExceeded, "the device is not done with it")
		close(gate)
		m, err = b.Map(ctx)
		require.NoError(t, err)
		require.Equal(t, "zzz", string(m[:3]))
		require.NoError(t, b.Unmap())
		require.NoError(t, b.Release())
		b = alloc(t, d, 10)
		_, err = b.Map(ctx)
		require.ErrorIs(t, err, hal.ErrUnsupported, "device-local memory is not mapped")
		require.NoError(t, b.Release())
		emptied(t, d)
	})
}

func TestImport(t *testing.T) {
	d := open(t, "host:capacity=1MiB", "")
	mem := bytes.Repeat([]byte{1}, 4096)
	released := make(chan struct{})
	b, err := d.Import(uintptr(unsafe.Pointer(&mem[0])), 4096, func() { close(released) })
	require.NoError(t, err)
	gate := make(chan struct{})
	require.NoError(t, d.Queue(0).Call(func() error { <-gate; return nil }, nil, nil))
	require.NoError(t, d.Queue(0).Fill(b.Span(0, 8), []byte{9}, nil, nil))
	require.NoError(t, b.Release())
	require.ErrorIs(t, b.Release(), hal.ErrReleased)
	select {
	case <-released:
		t.Fatal("released while in use")
	case <-time.After(2 * time.Millisecond):
	}
	close(gate)
	<-released
	require.Equal(t, []byte{9, 9, 9, 9, 9, 9, 9, 9, 1}, mem[:9])
	_, err = d.Import(0, 1, nil)
	require.ErrorIs(t, err, hal.ErrInvalid)
	require.Zero(t, d.Stats().Source().Allocs, "imported memory never enters the stack")
}

func TestCloseReportsLeaksByTagAndFreesThem(t *testing.T) {
	for _, s := range stacks {
		var opts []hal.Option
		if s != "" {
			opts = append(opts, hal.WithAllocator(s))
		}
		d, err := hal.Open("host:capacity=64MiB", opts...)
		require.NoError(t, err)
		for range 3 {
			_, err = d.Allocate(soon(t), hal.Params{Size: 1000, Tag: hal.InternTag("kv")})
			require.NoError(t, err)
		}
		alloc(t, d, 10)
		b := alloc(t, d, 10)
		require.NoError(t, b.Release())
		err = d.Close(soon(t))
		leak, ok := errors.AsType[*hal.LeakError](err)
		require.True(t, ok, "%s: %v", s, err)
		require.Equal(t, 4, leak.Buffers)
		require.EqualValues(t, 3010, leak.Bytes)
		require.Equal(t, hal.TagLeak{Tag: "kv", Buffers: 3, Bytes: 3000}, leak.ByTag[0])
		require.Equal(t, "hal: not released before Close: 4 buffers, 2.94 KiB; kv: 3 buffers, 2.93 KiB; untagged: 1 buffer, 10 B", err.Error(), s)
		require.NoError(t, d.Close(soon(t)), "idempotent")
		_, err = d.Allocate(soon(t), hal.Params{Size: 1})
		require.ErrorIs(t, err, hal.ErrClosed)
		require.ErrorIs(t, d.Queue(0).Barrier(nil, nil), hal.ErrClosed)
	}
}

func TestCloseFailsWhatNobodyWillSignal(t *testing.T) {
	d, err := hal.Open("host:capacity=1MiB,queues=2")
	require.NoError(t, err)
	never, a, b, c := hal.NewSemaphore(0), hal.NewSemaphore(0), hal.NewSemaphore(0), hal.NewSemaphore(0)
	q0, q1 := d.Queue(0), d.Queue(1)
	gate := make(chan struct{})
	require.NoError(t, q0.Call(func() error { <-gate; return nil }, nil, a.At(1)))
	require.NoError(t, q0.Barrier(nil, a.At(2)))
	require.NoError(t, q1.Barrier(a.At(1), b.At(1)))
	require.NoError(t, q1.Barrier(never.At(1), c.At(1)))
	short, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, d.Close(short), context.DeadlineExceeded, "work is running")
	close(gate)
	require.NoError(t, d.Close(soon(t)))
	require.NoError(t, b.Wait(soon(t), 1), "what was issued completed")
	require.ErrorIs(t, c.Wait(soon(t), 1), hal.ErrFailed)
}

func TestALostDeviceFailsEveryWaitAndCloses(t *testing.T) {
	for _, s := range stacks {
		drv, err := host.Open(host.Config{Capacity: 64 * hal.MiB, Queues: 2})
		require.NoError(t, err)
		var opts []hal.Option
		if s != "" {
			opts = append(opts, hal.WithAllocator(s))
		}
		d, err := hal.OpenDriver(drv, opts...)
		require.NoError(t, err)
		ctx := soon(t)
		b, err := d.Queue(0).Alloca(ctx, hal.Params{Size: 4096}, nil, nil)
		require.NoError(t, err)
		never, done := hal.NewSemaphore(0), hal.NewSemaphore(0)
		require.NoError(t, d.Queue(1).Barrier(never.At(1), done.At(1)))
		cause := errors.New("fell off the bus")
		drv.Lose(cause)
		require.ErrorIs(t, done.Wait(ctx, 1), cause)
		require.ErrorIs(t, d.Queue(0).Barrier(nil, nil), hal.ErrLost)
		err = d.Queue(0).Dealloca(b, nil, nil)
		require.ErrorIs(t, err, cause)
		require.NoError(t, b.Release(), "frees become bookkeeping")
		_, err = d.Allocate(ctx, hal.Params{Size: 32 * hal.MiB})
		require.Error(t, err)
		require.NoError(t, d.Close(ctx), s)
	}
}

func TestAQueueThatIsClosedLeavesItsMemoryToAll(t *testing.T) {
	onEveryStack(t, "host:capacity=8MiB,granularity=64KiB", func(t *testing.T, d *hal.Device) {
		ctx := soon(t)
		for range 50 {
			q, err := d.NewQueue()
			require.NoError(t, err)
			b, err := q.Alloca(ctx, hal.Params{Size: 6 * hal.MiB}, nil, nil)
			require.NoError(t, err)
			require.NoError(t, q.Fill(b.All(), []byte{1}, nil, nil))
			require.NoError(t, q.Dealloca(b, nil, nil))
			q.Close()
			require.ErrorIs(t, q.Barrier(nil, nil), hal.ErrClosed)
		}
		require.Len(t, d.Queues(), 4)
		require.NoError(t, d.Queue(0).Drain(ctx))
		emptied(t, d)
	})
}

func TestTheHotPathAllocatesNoGoMemory(t *testing.T) {
	for _, s := range []string{"", "caching", "vmm+block+caching"} {
		d := open(t, "host:capacity=64MiB", s)
		q := d.Queue(0)
		ctx := context.Background()
		done := hal.NewSemaphore(0)
		var v uint64
		warm := alloc(t, d, 4096)
		require.NoError(t, warm.Release())
		require.Zero(t, testing.AllocsPerRun(200, func() {
			b, _ := q.Allocate(ctx, hal.Params{Size: 4096})
			_ = q.Release(b)
		}), "allocate and release on %q", s)
		require.Zero(t, testing.AllocsPerRun(200, func() {
			v++
			b, _ := q.Alloca(ctx, hal.Params{Size: 4096}, nil, nil)
			_ = q.Dealloca(b, nil, done.At(v))
		}), "alloca and dealloca on %q", s)
	}
}

func TestTagsTravelInTheContext(t *testing.T) {
	d, err := hal.Open("host:capacity=1MiB")
	require.NoError(t, err)
	ctx := hal.WithTag(soon(t), hal.InternTag("tenant a"))
	_, err = d.Allocate(ctx, hal.Params{Size: 10})
	require.NoError(t, err)
	leak, ok := errors.AsType[*hal.LeakError](d.Close(ctx))
	require.True(t, ok)
	require.Equal(t, "tenant a", leak.ByTag[0].Tag)
}

func TestCompatible(t *testing.T) {
	d := open(t, "host:capacity=1MiB", "")
	c, err := d.Compatible(hal.Params{Size: 1})
	require.NoError(t, err)
	require.Equal(t, hal.Compatibility{Heap: 0, Align: 256, Importable: true}, c)
	c, err = d.Compatible(hal.Params{Size: 2 * hal.MiB, Align: 4096, Usage: hal.Mapping})
	require.NoError(t, err)
	require.Equal(t, hal.Compatibility{Heap: 1, Align: 4096, Importable: true, Mappable: true, TooLarge: true}, c)
	_, err = d.Compatible(hal.Params{Size: 1, Align: 7})
	require.ErrorIs(t, err, hal.ErrInvalid)
}

func TestOpenErrorsSayWhat(t *testing.T) {
	for text, want := range map[string]string{
		"hots":                  `did you mean "host"`,
		"host:capacity=x":       "^",
		"host:queues=0":         "^",
		"host:granularity=3MiB": "granularity",
		"host+host":             "one device at a time",
		"":                      "empty",
	} {
		_, err := hal.Open(text)
		require.ErrorContains(t, err, want, text)
	}
	_, err := hal.Open("host", hal.WithDrivers(&driver.Registry{}))
	require.ErrorContains(t, err, "unknown device")
	found, unusable := hal.Devices()
	require.NotEmpty(t, found)
	require.Empty(t, unusable)
}

// The mixed load: 16 goroutines on 8 queues, on every kind of call, each buffer
// stamped and checked.
func TestMixedLoad(t *testing.T) {
	total := 1_000_000
	if testing.Short() {
		total /= 10
	}
	for _, s := range []string{"", "vmm+block+caching", "pool+block+caching:device_local=1MiB;32MiB;256"} {
		t.Run("stack "+s, func(t *testing.T) { mixedLoad(t, s, total) })
	}
}

func mixedLoad(t *testing.T, stack string, total int) {
	const workers, queues = 16, 8
	d := open(t, "host:capacity=4GiB,queues=8", stack)
	ctx := context.Background()
	var bad, ops atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 1))
			type held struct {
				b  hal.Buffer
				on *hal.Queue
			}
			var live []held
			stamp := make([]byte, 8)
			q := d.Queue(w % queues)
			sem := hal.NewSemaphore(0)
			var v uint64
			for ops.Add(1) <= int64(total) {
				switch n := rnd.IntN(100); {
				case n < 45 || len(live) == 0:
					if len(live) > 64 {
						continue
					}
					p := hal.Params{Size: hal.Bytes(16 + rnd.IntN(1<<uint(4+rnd.IntN(14))))}
					var b hal.Buffer
					var err error
					if rnd.IntN(2) == 0 {
						b, err = q.Alloca(ctx, p, nil, nil)
					} else {
						b, err = q.Allocate(ctx, p)
					}
					if err != nil {
						bad.Add(1)
						continue
					}
					binary.LittleEndian.PutUint64(stamp, b.Address())
					if q.Fill(b.Span(0, 8), stamp, nil, nil) != nil {
						bad.Add(1)
					}
					live = append(live, held{b, q})
				default:
					i := rnd.IntN(len(live))
					h := live[i]
					live[i] = live[len(live)-1]
					live = live[:len(live)-1]
					if n < 60 { // check the stamp, on the queue that wrote it
						v++
						got := make([]byte, 8)
						if h.on.Download(got, h.b.Span(0, 8), nil, sem.At(v)) != nil || sem.Wait(ctx, v) != nil ||
							binary.LittleEndian.Uint64(got) != h.b.Address() {
							bad.Add(1)
						}
					}
					var err error
					switch {
					case n < 75:
						err = h.on.Dealloca(h.b, nil, nil)
					case n < 85: // freed on another queue, ordered after
						v++
						err = errors.Join(h.on.Barrier(nil, sem.At(v)), d.Queue(rnd.IntN(queues)).Dealloca(h.b, sem.At(v), nil))
					case n < 95:
						err = h.on.Release(h.b)
					default:
						err = h.b.Release()
					}
					if err != nil {
						bad.Add(1)
					}
				}
				if rnd.IntN(5000) == 0 {
					d.Trim(hal.MiB)
				}
			}
			for _, h := range live {
				if h.b.Release() != nil {
					bad.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, bad.Load())
	for _, q := range d.Queues() {
		require.NoError(t, q.Drain(soon(t)))
	}
	emptied(t, d)
}

func BenchmarkAllocateRelease(b *testing.B) {
	for _, s := range []string{"", "caching"} {
		b.Run("stack="+s, func(b *testing.B) {
			d := open(b, "host", s)
			q := d.Queue(0)
			ctx := context.Background()
			for b.Loop() {
				x, _ := q.Allocate(ctx, hal.Params{Size: 4096})
				_ = q.Release(x)
			}
		})
	}
}

func BenchmarkAllocaDealloca(b *testing.B) {
	for _, s := range []string{"", "caching"} {
		b.Run("stack="+s, func(b *testing.B) {
			d := open(b, "host", s)
			q := d.Queue(0)
			ctx := context.Background()
			for b.Loop() {
				x, _ := q.Alloca(ctx, hal.Params{Size: 4096}, nil, nil)
				_ = q.Dealloca(x, nil, nil)
			}
		})
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

// Frees on other queues than the uses, at a quarter of the capacity: no request
// fails, and what is held stays near what is live.
func TestUnorderedFreesAcrossQueuesDontStarveAnyone(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB,queues=4", func(t *testing.T, d *hal.Device) {
		ctx := soon(t)
		var failed atomic.Int64
		var wg sync.WaitGroup
		for g := range 4 {
			wg.Go(func() {
				for i := range 100 {
					b, err := d.Queue(g).Alloca(ctx, hal.Params{Size: hal.Bytes(1+(i+g)%4) * hal.MiB}, nil, nil)
					if err != nil {
						if failed.Add(1) == 1 {
							t.Log(err)
						}
						continue
					}
					done := hal.NewSemaphore(0)
					if d.Queue(g).Fill(b.All(), []byte{1}, nil, done.At(1)) != nil ||
						d.Queue((g+i)%4).Dealloca(b, nil, nil) != nil || done.Wait(ctx, 1) != nil {
						failed.Add(1)
					}
				}
			})
		}
		wg.Wait()
		require.Zero(t, failed.Load())
		for _, q := range d.Queues() {
			require.NoError(t, q.Drain(ctx))
		}
		emptied(t, d)
	})
}

// An operation that waits to be issued when its buffer's dealloca is submitted behind
// it is carried out all the same: it was there first.
func TestADeallocaBehindADeferredOperationLetsItRun(t *testing.T) {
	for _, other := range []bool{false, true} {
		d := open(t, "host:capacity=64MiB,queues=2", "")
		ctx := soon(t)
		q, last := d.Queue(0), d.Queue(0)
		if other {
			last = d.Queue(1)
		}
		gate, filled := hal.NewSemaphore(0), hal.NewSemaphore(0)
		b, err := q.Alloca(ctx, hal.Params{Size: 64}, nil, nil)
		require.NoError(t, err)
		got := make([]byte, 64)
		require.NoError(t, q.Fill(b.All(), []byte{7}, gate.At(1), nil))
		require.NoError(t, q.Download(got, b.All(), nil, filled.At(1)))
		require.NoError(t, last.Dealloca(b, filled.At(1), filled.At(2)))
		require.ErrorIs(t, b.UsedUntil(q.Issued()), hal.ErrReleased, "the handle has ended all the same")
		require.NoError(t, gate.Signal(1))
		require.NoError(t, filled.Wait(ctx, 2))
		require.Equal(t, bytes.Repeat([]byte{7}, 64), got)
	}
}

// A queue that was closed with work in flight is still the device's to wait for, and
// to let go of if the device is lost.
func TestCloseWaitsForTheWorkOfClosedQueues(t *testing.T) {
	for _, lost := range []bool{false, true} {
		drv, err := host.Open(host.Config{Capacity: 64 << 20, Queues: 2})
		require.NoError(t, err)
		d, err := hal.OpenDriver(drv)
		require.NoError(t, err)
		q, started, gate := d.Queue(0), make(chan struct{}), make(chan struct{})
		b, err := q.Alloca(soon(t), hal.Params{Size: 1 << 20}, nil, nil)
		require.NoError(t, err)
		require.NoError(t, q.Call(func() error { close(started); <-gate; return nil }, nil, nil))
		require.NoError(t, q.Fill(b.All(), []byte{1}, nil, nil))
		require.NoError(t, q.Dealloca(b, nil, nil))
		<-started
		q.Close()
		if lost {
			drv.Lose(errors.New("pulled out"))
			close(gate)
			_ = d.Close(soon(t)) // a function may still be running
			require.True(t, q.Issued().Reached(), "nothing waits for a lost queue once the device is closed")
			continue
		}
		short, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		require.ErrorIs(t, d.Close(short), context.DeadlineExceeded)
		cancel()
		close(gate)
		require.NoError(t, d.Close(soon(t)))
	}
}

// A failure that no signal list carries is the next Drain's to report, once.
func TestAFailureThatNobodyWaitsForReachesDrain(t *testing.T) {
	d := open(t, "host:capacity=64MiB,queues=2", "")
	q, cause := d.Queue(0), errors.New("kernel")
	require.NoError(t, q.Call(func() error { return cause }, nil, nil))
	require.NoError(t, q.Barrier(nil, nil))
	require.ErrorIs(t, q.Drain(soon(t)), cause)
	require.NoError(t, q.Drain(soon(t)), "it has been told")

	heard := hal.NewSemaphore(0)
	require.NoError(t, q.Call(func() error { return cause }, nil, heard.At(1)))
	require.ErrorIs(t, heard.Wait(soon(t), 1), cause)
	require.NoError(t, q.Drain(soon(t)), "the semaphore has told")

	failed := hal.NewSemaphore(0)
	failed.Fail(cause)
	require.NoError(t, q.Barrier(failed.At(1), nil))
	require.ErrorIs(t, q.Drain(soon(t)), cause, "one that failed before it was issued")
}

func TestReadAndWriteWait(t *testing.T) {
	d := open(t, "host:capacity=64MiB", "")
	b, got := alloc(t, d, 4), make([]byte, 4)
	require.NoError(t, d.Queue(0).Write(soon(t), b.All(), []byte("data")))
	require.NoError(t, d.Queue(1).Read(soon(t), got, b.All()))
	require.Equal(t, "data", string(got))
	require.ErrorIs(t, d.Queue(0).Write(soon(t), b.All(), nil), hal.ErrInvalid)

	gate := make(chan struct{})
	require.NoError(t, d.Queue(0).Call(func() error { <-gate; return nil }, nil, nil))
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, d.Queue(0).Read(ended, got, b.All()), context.Canceled)
	close(gate)
	require.NoError(t, d.Queue(0).Drain(soon(t)))
	require.NoError(t, b.Release())
}

func TestAnIdleDeviceClosesWhateverTheContextSays(t *testing.T) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for range 50 {
		d, err := hal.Open("host:capacity=64MiB")
		require.NoError(t, err)
		require.NoError(t, d.Close(ended))
		_, err = d.Allocate(soon(t), hal.Params{Size: 1})
		require.ErrorIs(t, err, hal.ErrClosed)
	}
}

func TestWorkThatACloseFailedSaysSo(t *testing.T) {
	d, err := hal.Open("host:capacity=64MiB")
	require.NoError(t, err)
	never, out := hal.NewSemaphore(0), hal.NewSemaphore(0)
	require.NoError(t, d.Queue(0).Barrier(never.At(1), out.At(1)))
	require.NoError(t, d.Close(soon(t)))
	require.ErrorIs(t, out.Wait(soon(t), 1), hal.ErrClosed)
	require.ErrorIs(t, d.Queue(0).Barrier(nil, nil), hal.ErrClosed)
}

func TestQueuesKeepTheirNumbers(t *testing.T) {
	d := open(t, "host:capacity=64MiB,queues=2", "")
	a, b := d.Queue(0), d.Queue(1)
	a.Close()
	require.Same(t, a, d.Queue(0))
	require.Same(t, b, d.Queue(1))
	require.PanicsWithValue(t, "hal: queue 2 of device host, which was opened with 2", func() { d.Queue(2) })
	require.Equal(t, []*hal.Queue{b}, d.Queues())
}

// More than a heap could ever give is refused without asking anybody.
func TestMoreThanTheHeapAsksNobody(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB", func(t *testing.T, d *hal.Device) {
		_, err := d.Queue(0).Alloca(soon(t), hal.Params{Size: 65 * hal.MiB}, nil, nil)
		require.ErrorIs(t, err, hal.ErrOutOfMemory)
		require.ErrorIs(t, err, hal.ErrTooLarge)
		require.ErrorContains(t, err, "65 MiB asked of heap device of host for queue 0")
		require.ErrorContains(t, err, "larger than the device: 65 MiB of 64 MiB")
		st := d.Stats()
		require.Zero(t, st.Source().SourceAllocs)
		require.Zero(t, st.Source().PeakHeld)
		require.EqualValues(t, 1, st.OutOfMemory)
	})
}

// Whoever is asked for room may have only a little at a time, and may give it by a
// dealloca on a queue that is busy.
func TestPressureIsPutOnAgainAsLongAsItHelps(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB", func(t *testing.T, d *hal.Device) {
		q := d.Queue(0)
		var blocks []hal.Buffer
		for range 16 {
			b, err := q.Alloca(soon(t), hal.Params{Size: 4 * hal.MiB}, nil, nil)
			require.NoError(t, err)
			blocks = append(blocks, b)
		}
		asked := 0
		remove := d.OnPressure(func(_ context.Context, want hal.Bytes) hal.Bytes {
			require.Equal(t, 24*hal.MiB, want)
			if len(blocks) == 0 {
				return 0
			}
			asked++
			b := blocks[0]
			blocks = blocks[1:]
			require.NoError(t, d.Queue(1).Call(func() error { time.Sleep(time.Millisecond); return nil }, nil, nil))
			require.NoError(t, d.Queue(1).Dealloca(b, nil, nil))
			return 4 * hal.MiB
		})
		defer remove()
		b, err := q.Alloca(soon(t), hal.Params{Size: 24 * hal.MiB}, nil, nil)
		require.NoError(t, err)
		require.GreaterOrEqual(t, asked, 6)
		require.Zero(t, d.Stats().OutOfMemory)
		require.NoError(t, b.Release())
		for _, b := range blocks {
			require.NoError(t, b.Release())
		}
	})
}

// Close fails what nobody will signal even while work of other queues runs, which may
// itself be waiting for that failure.
func TestCloseFailsWhatNobodyWillSignalWhileOtherWorkRuns(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB,queues=2", func(t *testing.T, d *hal.Device) {
		never, out := hal.NewSemaphore(0), hal.NewSemaphore(0)
		require.NoError(t, d.Queue(0).Barrier(never.At(1), out.At(1)))
		started := make(chan struct{})
		var got error
		require.NoError(t, d.Queue(1).Call(func() error {
			close(started)
			got = out.Wait(context.Background(), 1)
			return nil
		}, nil, nil))
		<-started
		require.NoError(t, d.Close(soon(t)))
		require.ErrorIs(t, got, hal.ErrClosed)
	})
}

// What an issued operation is going to signal is waited for.
func TestCloseWaitsForSignalsThatAreOnTheirWay(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB,queues=3", func(t *testing.T, d *hal.Device) {
		s, out := hal.NewSemaphore(0), hal.NewSemaphore(0)
		slow := func() error { time.Sleep(20 * time.Millisecond); return nil }
		require.NoError(t, d.Queue(0).Call(slow, nil, s.At(1)))
		require.NoError(t, d.Queue(1).Call(slow, nil, s.At(2))) // two producers: the wait is deferred
		require.NoError(t, d.Queue(2).Barrier(s.At(2), out.At(1)))
		require.NoError(t, d.Close(soon(t)))
		require.NoError(t, out.Wait(soon(t), 1))
	})
}

// When the time is up, whoever waits is told, whatever is still running.
func TestCloseTellsWaitersWhenItsTimeIsUp(t *testing.T) {
	d, err := hal.Open("host:capacity=64MiB,queues=2")
	require.NoError(t, err)
	s, never, out, gate := hal.NewSemaphore(0), hal.NewSemaphore(0), hal.NewSemaphore(0), make(chan struct{})
	require.NoError(t, d.Queue(0).Call(func() error { <-gate; return nil }, nil, s.At(1)))
	require.NoError(t, d.Queue(1).Barrier(never.At(1), out.At(1)))
	short, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, d.Close(short), context.DeadlineExceeded)
	require.ErrorIs(t, out.Wait(soon(t), 1), hal.ErrClosed)
	close(gate)
	require.NoError(t, d.Close(soon(t)))
	require.NoError(t, s.Wait(soon(t), 1), "what was issued completed")
}

func TestPresetsStandForStacks(t *testing.T) {
	for _, p := range hal.Allocators.Presets() {
		d := open(t, "host:capacity=64MiB", "preset:"+p.Name)
		require.Contains(t, d.Allocator(), strings.Split(p.Spec, ":")[0])
		b := alloc(t, d, hal.MiB)
		require.NoError(t, b.Release())
	}
	d := open(t, "host:capacity=64MiB", "pool+preset:benchmark+scope")
	require.Equal(t, "pool+block+caching+scope", d.Allocator())
	for text, want := range map[string]string{
		"preset":                     "preset of what name?",
		"preset:fast":                `unknown preset "fast" (valid: benchmark, server, edge)`,
		"preset:benchmrk":            `did you mean "benchmark"`,
		"block+preset:server+preset": "preset of what name?",
	} {
		_, err := hal.Open("host", hal.WithAllocator(text))
		require.ErrorContains(t, err, want, text)
	}
	_, err := hal.Open("host", hal.WithAllocator("preset:help"))
	var help *hal.HelpRequest
	require.ErrorAs(t, err, &help)
	require.Contains(t, help.Text, "preset:server")
	require.ErrorContains(t, hal.Allocators.RegisterPreset(allocator.Preset{Name: "edge", Spec: "raw"}), "registered already")
	require.ErrorContains(t, hal.Allocators.RegisterPreset(allocator.Preset{Name: "x", Spec: "rwa"}), "unknown allocator")
	require.Error(t, hal.Allocators.RegisterPreset(allocator.Preset{Name: "X y", Spec: "raw"}))
}

func TestAnOOMNamesWhoHasTheMemory(t *testing.T) {
	onEveryStack(t, "host:capacity=64MiB", func(t *testing.T, d *hal.Device) {
		kv, act := hal.InternTag("kv"), hal.InternTag("activations")
		var live []hal.Buffer
		for i := range 6 {
			p := hal.Params{Size: 8 * hal.MiB, Tag: kv}
			if i > 3 {
				p.Tag = act
			}
			b, err := d.Allocate(soon(t), p)
			require.NoError(t, err)
			live = append(live, b)
		}
		live = append(live, alloc(t, d, hal.MiB))
		_, err := d.Allocate(soon(t), hal.Params{Size: 20 * hal.MiB, Tag: act})
		var oom *hal.OOMError
		require.ErrorAs(t, err, &oom)
		require.Equal(t, "activations", oom.Tag)
		require.Len(t, oom.TopTags, 3)
		require.ErrorContains(t, err, "live by tag: kv 32 MiB in 4, activations 16 MiB in 2, untagged 1 MiB in 1\n")
		for _, b := range live {
			require.NoError(t, b.Release())
		}
	})
}

// Nothing is handed out after the loss of the device, not even what a layer has idle:
// work that never ends may still touch it.
func TestNothingIsHandedOutAfterALoss(t *testing.T) {
	for _, stack := range stacks {
		drv, err := host.Open(host.Config{Capacity: 64 << 20, Queues: 2})
		require.NoError(t, err)
		var opts []hal.Option
		if stack != "" {
			opts = append(opts, hal.WithAllocator(stack))
		}
		d, err := hal.OpenDriver(drv, opts...)
		require.NoError(t, err)
		q := d.Queue(0)
		b, err := q.Alloca(soon(t), hal.Params{Size: hal.MiB}, nil, nil)
		require.NoError(t, err)
		require.NoError(t, q.Dealloca(b, nil, nil))
		kept := alloc(t, d, hal.MiB)
		cause := errors.New("pulled out")
		drv.Lose(cause)
		for _, size := range []hal.Bytes{0, 1, hal.MiB} {
			_, err := d.Allocate(soon(t), hal.Params{Size: size})
			require.ErrorIs(t, err, hal.ErrLost, stack)
			require.ErrorIs(t, err, cause, stack)
			_, err = q.Alloca(soon(t), hal.Params{Size: size}, nil, nil)
			require.ErrorIs(t, err, hal.ErrLost, stack)
			_, err = q.Allocate(soon(t), hal.Params{Size: size})
			require.ErrorIs(t, err, hal.ErrLost, stack)
		}
		require.NoError(t, kept.Release(), "frees are bookkeeping")
		require.NoError(t, d.Close(soon(t)))
	}
}
