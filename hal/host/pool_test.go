package host_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func poolAlloc(t testing.TB, d *host.Device, size memory.Bytes) uint64 {
	t.Helper()
	addr, taken, valid, err := d.PoolAlloc(deviceHeap, size, 256)
	require.NoError(t, err)
	require.GreaterOrEqual(t, taken, size)
	require.True(t, valid.Reached())
	require.NotEqual(t, queue.ReadyNow(), valid, "a point on the service queue")
	return addr
}

func held(t testing.TB, d *host.Device) memory.Bytes {
	t.Helper()
	n, err := d.PoolHeld(deviceHeap)
	require.NoError(t, err)
	require.Equal(t, d.Info().Heaps[deviceHeap].Capacity-n, free(t, d, deviceHeap))
	return n
}

func TestThePoolKeepsNothingUnlessItIsTold(t *testing.T) {
	d := open(t, host.Config{})
	a := poolAlloc(t, d, memory.MiB)
	require.Equal(t, memory.MiB, held(t, d))
	require.NoError(t, d.PoolFree(deviceHeap, a, queue.ReadyNow()))
	require.Zero(t, held(t, d))
}

func TestThePoolKeepsUpToItsThreshold(t *testing.T) {
	d := open(t, host.Config{})
	require.NoError(t, d.SetPoolThreshold(deviceHeap, 2*memory.MiB))
	a, b, c := poolAlloc(t, d, memory.MiB), poolAlloc(t, d, memory.MiB), poolAlloc(t, d, memory.MiB)
	for _, x := range []uint64{a, b, c} {
		require.NoError(t, d.PoolFree(deviceHeap, x, queue.ReadyNow()))
	}
	require.Equal(t, 2*memory.MiB, held(t, d))
	require.Equal(t, c, poolAlloc(t, d, memory.MiB), "the block freed last serves first")
	require.Equal(t, b, poolAlloc(t, d, memory.MiB-4096), "the one freed first was given back")
	require.Equal(t, 2*memory.MiB, held(t, d))
	require.NoError(t, d.PoolFree(deviceHeap, b, queue.ReadyNow()))
	require.NotEqual(t, b, poolAlloc(t, d, memory.MiB/2), "a block far larger than asked isn't wasted")
	given, err := d.PoolTrim(deviceHeap, 0)
	require.NoError(t, err)
	require.Equal(t, memory.MiB, given)
	require.Equal(t, memory.MiB+memory.MiB/2, held(t, d))
	require.ErrorContains(t, d.Close(), "1.5MiB in 2 pool allocations")
}

func TestThePoolWaitsForTheFrontier(t *testing.T) {
	d := open(t, host.Config{})
	q, step := manualQueue(t)
	a := poolAlloc(t, d, memory.MiB)
	at := submit(t, q, queue.Op{}, nil, nil)
	require.NoError(t, d.PoolFree(deviceHeap, a, queue.After(at)))
	require.Equal(t, memory.MiB, held(t, d), "in use: neither given back")
	b := poolAlloc(t, d, memory.MiB)
	require.NotEqual(t, a, b, "nor handed out again")
	given, err := d.PoolTrim(deviceHeap, 0)
	require.NoError(t, err)
	require.Zero(t, given, "nor trimmed")
	require.True(t, step())
	require.Equal(t, a, poolAlloc(t, d, memory.MiB))
	for _, x := range []uint64{a, b} {
		require.NoError(t, d.PoolFree(deviceHeap, x, queue.ReadyNow()))
	}
	require.Zero(t, held(t, d))
}

func TestThePoolGivesIdleMemoryBackBeforeItFails(t *testing.T) {
	d := open(t, host.Config{Capacity: 4 * memory.MiB})
	require.NoError(t, d.SetPoolThreshold(deviceHeap, memory.GiB))
	for range 4 {
		a := poolAlloc(t, d, memory.MiB)
		require.NoError(t, d.PoolFree(deviceHeap, a, queue.ReadyNow()))
	}
	a := poolAlloc(t, d, 4*memory.MiB)
	_, _, _, err := d.PoolAlloc(deviceHeap, 1, 1)
	require.ErrorIs(t, err, driver.ErrOutOfMemory)
	require.NoError(t, d.PoolFree(deviceHeap, a, queue.ReadyNow()))
	_, _, _, err = d.PoolAlloc(deviceHeap, -1, 1)
	require.ErrorContains(t, err, "positive")
}

func TestThePoolKeepsWhileTheDeviceWorks(t *testing.T) {
	d := open(t, host.Config{})
	q := newQueue(t, d)
	a := poolAlloc(t, d, memory.MiB)
	hold := make(chan struct{})
	at := submit(t, q, queue.Op{Kind: queue.Call, Func: func() error { <-hold; return nil }}, nil, nil)
	require.NoError(t, d.PoolFree(deviceHeap, a, queue.ReadyNow()))
	require.Equal(t, memory.MiB, held(t, d), "the threshold counts when the device is idle")
	require.Equal(t, a, poolAlloc(t, d, memory.MiB))
	require.NoError(t, d.PoolFree(deviceHeap, a, queue.ReadyNow()))
	close(hold)
	require.NoError(t, at.Wait(soon(t)))
	require.Zero(t, held(t, d))
}
