package host_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func TestFillPatterns(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	addr := alloc(t, d, deviceHeap, memory.MiB)
	const pattern = 0x8877665544332211
	for _, n := range []int{1, 2, 4, 8} {
		for _, size := range []int{n, 24, 40, 4096, 100 << 10, 1 << 20} {
			require.NoError(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr, Size: int64(size), Pattern: pattern, PatternSize: uint8(n)}))
			one := binary.LittleEndian.AppendUint64(nil, pattern)[:n]
			require.True(t, bytes.Equal(bytes.Repeat(one, size/n), download(t, q, addr, size)), "%d bytes of a pattern of %d", size, n)
		}
	}
	require.NoError(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr, Size: 8, PatternSize: 8}))
	require.Equal(t, make([]byte, 8), download(t, q, addr, 8))
	require.NoError(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr, PatternSize: 4}), "nothing to fill")
	require.ErrorContains(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr, Size: 6, PatternSize: 4}), "6 bytes with a pattern of 4")
	require.ErrorContains(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr, Size: 6, PatternSize: 3}), "1, 2, 4 or 8")
}

func TestCopiesMayOverlap(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	addr := alloc(t, d, hostHeap, memory.MiB)
	view, err := d.View(addr, memory.MiB)
	require.NoError(t, err)
	for _, n := range []int64{1000, 400 << 10} {
		for i := range view {
			view[i] = byte(i * 7)
		}
		want := bytes.Clone(view)
		copy(want[13:], want[:n])
		require.NoError(t, run(t, q, queue.Op{Kind: queue.Copy, Dst: addr + 13, Src: addr, Size: n}))
		require.True(t, bytes.Equal(want, view))
	}
}

func TestUploadAndDownload(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	addr := alloc(t, d, deviceHeap, memory.MiB)
	for _, n := range []int{0, 1, 1000, 1 << 20} {
		data := bytes.Repeat([]byte{1, 2, 3, 5, 7}, n)[:n]
		require.NoError(t, run(t, q, queue.Op{Kind: queue.Upload, Dst: addr, Host: data}))
		require.True(t, bytes.Equal(data, download(t, q, addr, n)))
	}
}

func TestAFaultIsAnErrorThatNamesTheAddress(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	addr, _, err := d.Alloc(deviceHeap, 8192, 1)
	require.NoError(t, err)
	for what, op := range map[string]queue.Op{
		"no memory of the device at 0x10": {Kind: queue.Fill, Dst: 0x10, Size: 1, PatternSize: 1},
		"memory is not committed":         {Kind: queue.Copy, Dst: addr, Src: addr + 4096, Size: 8192},
		"reach beyond its memory":         {Kind: queue.Fill, Dst: addr, Size: 1 << 60, PatternSize: 1},
		"negative size":                   {Kind: queue.Fill, Dst: addr, Size: -1, PatternSize: 1},
		"unknown operation":               {Kind: 99, Dst: addr},
	} {
		require.ErrorContains(t, run(t, q, op), what)
	}
	require.NoError(t, d.Free(deviceHeap, addr))
	require.ErrorContains(t, run(t, q, queue.Op{Kind: queue.Download, Src: addr, Host: make([]byte, 1)}), "memory is not committed",
		"a use after the free")
	require.NoError(t, run(t, q, queue.Op{Kind: queue.Barrier}), "the queue goes on")
}

func TestAViewThatLostItsMemoryFaultsInACall(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	addr, _, err := d.Alloc(hostHeap, 4096, 1)
	require.NoError(t, err)
	view, err := d.View(addr, 4096)
	require.NoError(t, err)
	require.NoError(t, d.Free(hostHeap, addr))
	err = run(t, q, queue.Op{Kind: queue.Call, Func: func() error { view[0] = 1; return nil }})
	var p *host.PanicError
	require.ErrorAs(t, err, &p, "the process lives")
}

func TestACallCantEndItsWorker(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	cause := errors.New("cause")
	err := run(t, q, queue.Op{Kind: queue.Call, Func: func() error { panic(cause) }})
	var p *host.PanicError
	require.ErrorAs(t, err, &p)
	require.ErrorIs(t, err, cause)
	require.ErrorContains(t, err, "host: call panicked: cause")
	require.ErrorContains(t, err, "TestACallCantEndItsWorker", "with the stack")
	require.NoError(t, (&host.PanicError{Value: "text"}).Unwrap())

	require.ErrorContains(t, run(t, q, queue.Op{Kind: queue.Call, Func: func() error { runtime.Goexit(); return nil }}), "Goexit")
	require.ErrorIs(t, run(t, q, queue.Op{Kind: queue.Call, Func: func() error { return cause }}), cause)
	require.ErrorContains(t, run(t, q, queue.Op{Kind: queue.Call}), "without a function")
	require.NoError(t, run(t, q, queue.Op{Kind: queue.Call, Func: func() error { return nil }}))
}

func TestQuickOperationsRunInline(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	addr := alloc(t, d, deviceHeap, memory.MiB)
	require.True(t, submit(t, q, queue.Op{Kind: queue.Fill, Dst: addr, Size: 64 << 10, PatternSize: 1}, nil, nil).Reached())
	require.True(t, submit(t, q, queue.Op{Kind: queue.Copy, Dst: addr, Src: addr + 4096, Size: 64 << 10}, nil, nil).Reached())
	gate := make(chan struct{})
	at := submit(t, q, queue.Op{Kind: queue.Call, Func: func() error { <-gate; return nil }}, nil, nil)
	require.False(t, at.Reached(), "a user's function never runs inline")
	close(gate)
	require.NoError(t, at.Wait(soon(t)))
}

// TestContentsThroughFourQueues passes a block from queue to queue; each adds its
// step, with semaphores in between.
func TestContentsThroughFourQueues(t *testing.T) {
	d := open(t, host.Config{})
	var qs []*queue.Queue
	for range 4 {
		qs = append(qs, newQueue(t, d))
	}
	for _, size := range []int64{4096, 256 << 10} { // inline, and on workers
		const rounds = 20
		src, dst := alloc(t, d, deviceHeap, memory.Bytes(size)), alloc(t, d, deviceHeap, memory.Bytes(size))
		s := queue.NewSemaphore(0)
		step := uint64(0)
		next := func(op queue.Op) {
			q := qs[step%uint64(len(qs))]
			submit(t, q, op, s.At(step), s.At(step+1))
			step++
		}
		got := make([][]byte, rounds)
		for i := range rounds {
			got[i] = make([]byte, size)
			next(queue.Op{Kind: queue.Fill, Dst: src, Size: size, Pattern: uint64(i + 1), PatternSize: 4})
			next(queue.Op{Kind: queue.Copy, Dst: dst, Src: src, Size: size})
			next(queue.Op{Kind: queue.Fill, Dst: src, Size: size, Pattern: 0xff, PatternSize: 1})
			next(queue.Op{Kind: queue.Download, Src: dst, Host: got[i]})
		}
		require.NoError(t, s.Wait(soon(t), step))
		for i := range rounds {
			want := bytes.Repeat([]byte{byte(i + 1), 0, 0, 0}, int(size/4))
			require.True(t, bytes.Equal(want, got[i]), "round %d", i)
		}
	}
}

func TestImport(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	data := make([]byte, 4096)
	base := uintptr(unsafe.Pointer(&data[0]))
	addr, heap, err := d.Import(base, 4096)
	require.NoError(t, err)
	require.Equal(t, hostHeap, heap)
	require.Equal(t, 64*memory.GiB, free(t, d, hostHeap), "it counts against no capacity")
	require.NoError(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr + 8, Size: 8, Pattern: 9, PatternSize: 1}))
	require.Equal(t, []byte{0, 9}, data[7:9], "used in place")
	view, err := d.View(addr, 16)
	require.NoError(t, err)
	require.Same(t, &data[0], &view[0])
	require.ErrorContains(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr + 4090, Size: 8, PatternSize: 1}), "reach beyond")

	_, _, err = d.Import(base+100, 10)
	require.ErrorContains(t, err, "overlaps")
	_, _, err = d.Import(base-10, 4096)
	require.ErrorContains(t, err, "overlaps")
	_, _, err = d.Import(uintptr(alloc(t, d, hostHeap, 4096)), 10)
	require.ErrorContains(t, err, "overlaps")
	for _, bad := range []struct {
		addr uintptr
		size memory.Bytes
	}{{0, 1}, {base, 0}, {base, -1}, {^uintptr(0), 10}} {
		_, _, err = d.Import(bad.addr, bad.size)
		require.ErrorContains(t, err, "not a range of addresses")
	}
	require.ErrorIs(t, d.Unimport(addr, 10), host.ErrBadAddress)
	require.NoError(t, d.Unimport(addr, 4096))
	require.ErrorIs(t, d.Unimport(addr, 4096), host.ErrBadAddress)
	require.ErrorContains(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr, Size: 8, PatternSize: 1}), "no memory of the device")
	runtime.KeepAlive(data)
}

func TestCloseReportsImports(t *testing.T) {
	d, err := host.Open(host.Config{})
	require.NoError(t, err)
	data := make([]byte, 4096)
	_, _, err = d.Import(uintptr(unsafe.Pointer(&data[0])), 4096)
	require.NoError(t, err)
	require.ErrorContains(t, d.Close(), "imports: 4KiB in 1")
	runtime.KeepAlive(data)
}
