package host_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

const (
	deviceHeap = 0
	hostHeap   = 1
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open opens a device that must be empty at the end of the test.
func open(t testing.TB, c host.Config) *host.Device {
	t.Helper()
	d, err := host.Open(c)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// newQueue makes a queue that is closed and drained before the device is closed.
func newQueue(t testing.TB, d *host.Device) *queue.Queue {
	t.Helper()
	q, err := d.NewQueue(nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		q.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if q.Lost() == nil {
			require.NoError(t, q.Drain(ctx))
		}
	})
	return q
}

// nothing runs no operation.
type nothing struct{}

func (nothing) Run(*queue.Op) error  { return nil }
func (nothing) Quick(*queue.Op) bool { return true }

// manualQueue makes a queue that moves only when step is called.
func manualQueue(t testing.TB) (q *queue.Queue, step func() bool) {
	var w *queue.Worker
	q = queue.New(queue.Options{Executor: func(q *queue.Queue) queue.Executor {
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

func submit(t testing.TB, q *queue.Queue, op queue.Op, wait, signal queue.Fence) queue.Point {
	t.Helper()
	at, _, err := q.Submit(&op, wait, signal)
	require.NoError(t, err)
	return at
}

func alloc(t testing.TB, d *host.Device, heap int, size memory.Bytes) uint64 {
	t.Helper()
	addr, taken, err := d.Alloc(heap, size, 1)
	require.NoError(t, err)
	require.GreaterOrEqual(t, taken, size)
	t.Cleanup(func() { _ = d.Free(heap, addr) })
	return addr
}

func free(t testing.TB, d *host.Device, heap int) memory.Bytes {
	t.Helper()
	n, total, err := d.MemInfo(heap)
	require.NoError(t, err)
	require.LessOrEqual(t, n, total)
	return n
}

// run submits op to q and returns how it ended.
func run(t testing.TB, q *queue.Queue, op queue.Op) error {
	t.Helper()
	s := queue.NewSemaphore(0)
	submit(t, q, op, nil, s.At(1))
	return s.Wait(soon(t), 1)
}

func download(t testing.TB, q *queue.Queue, addr uint64, n int) []byte {
	t.Helper()
	out := make([]byte, n)
	require.NoError(t, run(t, q, queue.Op{Kind: queue.Download, Src: addr, Host: out}))
	return out
}
