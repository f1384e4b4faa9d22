package host_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

func openPages(t testing.TB) (*host.Device, *queue.Queue) {
	d := open(t, host.Config{Capacity: memory.MiB, Granularity: 64 * memory.KiB})
	if d.Granularity(deviceHeap) == 0 {
		t.Skip("no pages here")
	}
	return d, newQueue(t, d)
}

func TestPagesMoveWithTheirContents(t *testing.T) {
	d, q := openPages(t)
	const page = 64 << 10
	var pages []driver.Page
	for range 4 {
		p, err := d.Create(deviceHeap)
		require.NoError(t, err)
		pages = append(pages, p)
	}
	addr, err := d.Reserve(deviceHeap, 16*page)
	require.NoError(t, err)
	require.Zero(t, addr%page)
	require.NoError(t, d.Map(deviceHeap, addr, pages))
	for i := range uint64(4) {
		require.NoError(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr + i*page, Size: page, Pattern: i + 1, PatternSize: 1}))
	}
	// The middle ones appear at a second place, and leave the first.
	there := addr + 8*page
	require.NoError(t, d.Map(deviceHeap, there, pages[1:3]))
	require.Equal(t, byte(2), download(t, q, there, 1)[0], "mapped at both places")
	require.Equal(t, byte(2), download(t, q, addr+page, 1)[0])
	require.NoError(t, d.Unmap(deviceHeap, addr+page, 2))
	require.Equal(t, byte(3), download(t, q, there+2*page-1, 1)[0])
	require.ErrorContains(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr, Size: 4 * page, PatternSize: 1}), "not committed",
		"an operation that runs into the gap fails")

	require.ErrorContains(t, d.Unreserve(deviceHeap, addr, 16*page), "4 pages are mapped in it")
	require.NoError(t, d.Release(deviceHeap, pages[1]))
	require.Equal(t, memory.MiB-4*page, free(t, d, deviceHeap), "a page that is mapped still holds memory")
	require.NoError(t, d.Unmap(deviceHeap, there, 2))
	require.Equal(t, memory.MiB-3*page, free(t, d, deviceHeap))
	require.NoError(t, d.Unmap(deviceHeap, addr, 1))
	require.NoError(t, d.Unmap(deviceHeap, addr+3*page, 1))
	require.NoError(t, d.Unreserve(deviceHeap, addr, 16*page))
	for _, i := range []int{0, 2, 3} {
		require.NoError(t, d.Release(deviceHeap, pages[i]))
	}
	require.Equal(t, memory.MiB, free(t, d, deviceHeap))
}

func TestMisuseOfPages(t *testing.T) {
	d, _ := openPages(t)
	const page = 64 << 10
	p, err := d.Create(deviceHeap)
	require.NoError(t, err)
	addr, err := d.Reserve(deviceHeap, 2*page)
	require.NoError(t, err)
	require.NoError(t, d.Map(deviceHeap, addr, []driver.Page{p}))

	for what, err := range map[string]error{
		"host: map: vmem: map 65536 bytes": d.Map(deviceHeap, addr, []driver.Page{p}),
		"isn't a multiple":                 d.Map(deviceHeap, addr+4096, []driver.Page{p}),
		"don't lie in the reservation":     d.Map(deviceHeap, addr+page, []driver.Page{p, p}),
		"was never created":                d.Map(deviceHeap, addr+page, []driver.Page{p + 100}),
		"isn't reserved":                   d.Map(deviceHeap, addr+2*page, []driver.Page{p}),
		"host: unmap: vmem: unmap":         d.Unmap(deviceHeap, addr+page, 1),
		"0 pages":                          d.Unmap(deviceHeap, addr, 0),
		"the reservation has 128KiB":       d.Unreserve(deviceHeap, addr, page),
		"never handed out":                 d.Unreserve(deviceHeap, addr+page, page),
		"pages of heap host":               d.Unmap(hostHeap, addr, 1),
	} {
		require.ErrorContains(t, err, what)
	}
	_, err = d.Reserve(deviceHeap, page+1)
	require.ErrorContains(t, err, "multiple")
	require.ErrorContains(t, d.Free(deviceHeap, addr), "that is a reservation block")
	require.NoError(t, d.Release(deviceHeap, p))
	require.ErrorContains(t, d.Release(deviceHeap, p), "released before")
	require.ErrorContains(t, d.Map(deviceHeap, addr+page, []driver.Page{p}), "released before")
	require.NoError(t, d.Unmap(deviceHeap, addr, 1))
	require.NoError(t, d.Unreserve(deviceHeap, addr, 2*page))
	require.Equal(t, memory.MiB, free(t, d, deviceHeap), "no failed call left anything behind")
}

func TestPagesAreZeroWhenCreated(t *testing.T) {
	d, q := openPages(t)
	const page = 64 << 10
	addr, err := d.Reserve(deviceHeap, page)
	require.NoError(t, err)
	for range 2 {
		p, err := d.Create(deviceHeap)
		require.NoError(t, err)
		require.NoError(t, d.Map(deviceHeap, addr, []driver.Page{p}))
		require.Equal(t, make([]byte, page), download(t, q, addr, page))
		require.NoError(t, run(t, q, queue.Op{Kind: queue.Fill, Dst: addr, Size: page, Pattern: 1, PatternSize: 1}))
		require.NoError(t, d.Unmap(deviceHeap, addr, 1))
		require.NoError(t, d.Release(deviceHeap, p))
	}
	require.NoError(t, d.Unreserve(deviceHeap, addr, page))
}
