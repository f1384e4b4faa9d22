package vmem

import (
	"math"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// newRegion reserves pages pages, released at the end of the test.
func newRegion(t testing.TB, pages int64) *Region {
	t.Helper()
	r, err := Reserve(pages * pageSize)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Release()) })
	return r
}

func bytesAt(t testing.TB, r *Region, off, n int64) []byte {
	t.Helper()
	b, err := r.Bytes(off, n)
	require.NoError(t, err)
	require.Len(t, b, int(n))
	require.Equal(t, int(n), cap(b))
	return b
}

func requireFilled(t testing.TB, b []byte, with byte) {
	t.Helper()
	for i, x := range b {
		if x != with {
			t.Fatalf("byte %d is %#x, want %#x", i, x, with)
		}
	}
}

func fill(b []byte, with byte) {
	for i := range b {
		b[i] = with
	}
}

func TestReserveATebibyte(t *testing.T) {
	if math.MaxInt == math.MaxInt32 {
		t.Skip("the address space is too small")
	}
	r, err := Reserve(1 << 40)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Release()) }()
	require.Equal(t, int64(1<<40), r.Size())
	for _, off := range []int64{0, 1 << 39, 1<<40 - pageSize} {
		require.NoError(t, r.Commit(off, pageSize))
		fill(bytesAt(t, r, off, pageSize), 7)
		b, err := r.At(uint64(r.Base())+uint64(off), pageSize)
		require.NoError(t, err)
		requireFilled(t, b, 7)
	}
	require.Equal(t, RegionStats{Committed: 3 * pageSize, Extents: 3}, r.Stats())
}

func TestReserveErrors(t *testing.T) {
	for _, c := range []struct {
		size int64
		want error
	}{
		{0, ErrRange},
		{-pageSize, ErrRange},
		{math.MinInt64, ErrRange},
		{pageSize + 1, ErrMisaligned},
		{pageSize / 2, ErrMisaligned},
	} {
		_, err := Reserve(c.size)
		require.ErrorIs(t, err, c.want, "size %d", c.size)
	}
	_, err := Reserve(math.MaxInt64 &^ (pageSize - 1)) // more than there is
	require.Error(t, err)
}

func TestCommitZeroes(t *testing.T) {
	r := newRegion(t, 16)
	require.NoError(t, r.Commit(2*pageSize, 4*pageSize))
	b := bytesAt(t, r, 2*pageSize, 4*pageSize)
	require.Equal(t, r.Base()+uintptr(2*pageSize), uintptr(unsafe.Pointer(&b[0])))
	requireFilled(t, b, 0)
	fill(b, 0xaa)

	// Committing again keeps what is there and zeroes what is new.
	require.NoError(t, r.Commit(0, 16*pageSize))
	requireFilled(t, bytesAt(t, r, 0, 2*pageSize), 0)
	requireFilled(t, bytesAt(t, r, 2*pageSize, 4*pageSize), 0xaa)
	requireFilled(t, bytesAt(t, r, 6*pageSize, 10*pageSize), 0)
	require.Equal(t, RegionStats{Committed: 16 * pageSize, Extents: 1}, r.Stats())

	// What was decommitted is gone.
	require.NoError(t, r.Decommit(3*pageSize, pageSize))
	_, err := r.Bytes(2*pageSize, 4*pageSize)
	require.ErrorIs(t, err, ErrNotCommitted)
	require.NoError(t, r.Commit(3*pageSize, pageSize))
	requireFilled(t, bytesAt(t, r, 2*pageSize, pageSize), 0xaa)
	requireFilled(t, bytesAt(t, r, 3*pageSize, pageSize), 0)
	requireFilled(t, bytesAt(t, r, 4*pageSize, 2*pageSize), 0xaa)

	// Decommitting what is not committed does nothing, twice.
	require.NoError(t, r.Decommit(0, 16*pageSize))
	require.NoError(t, r.Decommit(0, 16*pageSize))
	require.Zero(t, r.Stats())
}

func TestRangeErrors(t *testing.T) {
	r := newRegion(t, 8)
	calls := map[string]func(off, n int64) error{
		"Commit":   r.Commit,
		"Decommit": r.Decommit,
	}
	for name, call := range calls {
		for _, c := range []struct {
			off, n int64
			want   error
		}{
			{0, 0, nil},
			{8 * pageSize, 0, nil},
			{1, pageSize, ErrMisaligned},
			{0, pageSize - 1, ErrMisaligned},
			{-pageSize, pageSize, ErrRange},
			{0, -pageSize, ErrRange},
			{0, 9 * pageSize, ErrRange},
			{8 * pageSize, pageSize, ErrRange},
			{9 * pageSize, 0, ErrRange},
			{pageSize, math.MaxInt64 &^ (pageSize - 1), ErrRange},
			{math.MaxInt64 &^ (pageSize - 1), pageSize, ErrRange},
			{math.MinInt64, math.MinInt64, ErrRange},
		} {
			err := call(c.off, c.n)
			if c.want == nil {
				require.NoError(t, err, "%s(%d, %d)", name, c.off, c.n)
			} else {
				require.ErrorIs(t, err, c.want, "%s(%d, %d)", name, c.off, c.n)
			}
		}
	}
	require.Zero(t, r.Stats())
}

func TestViews(t *testing.T) {
	r := newRegion(t, 8)
	base := uint64(r.Base())
	require.NoError(t, r.Commit(pageSize, 2*pageSize))

	bytesAt(t, r, pageSize+3, 2*pageSize-3) // no alignment needed
	require.NotNil(t, bytesAt(t, r, 0, 0))
	for _, c := range []struct {
		off, n int64
		want   error
	}{
		{pageSize - 1, 2, ErrNotCommitted},
		{3*pageSize - 1, 2, ErrNotCommitted},
		{5 * pageSize, 1, ErrNotCommitted},
		{8*pageSize - 1, 2, ErrRange},
		{-1, 1, ErrRange},
		{pageSize, -1, ErrRange},
		{pageSize, math.MaxInt64, ErrRange},
	} {
		_, err := r.Bytes(c.off, c.n)
		require.ErrorIs(t, err, c.want, "Bytes(%d, %d)", c.off, c.n)
		_, err = r.At(base+uint64(c.off), c.n)
		require.ErrorIs(t, err, c.want, "At(%d, %d)", c.off, c.n)
	}
	_, err := r.At(0, 1)
	require.ErrorIs(t, err, ErrRange)
	_, err = r.At(math.MaxUint64, 1)
	require.ErrorIs(t, err, ErrRange)

	require.True(t, r.Contains(base))
	require.True(t, r.Contains(base+uint64(r.Size())-1))
	require.False(t, r.Contains(base-1))
	require.False(t, r.Contains(base+uint64(r.Size())))
	require.False(t, r.Contains(0))

	require.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := r.At(base+uint64(pageSize), pageSize); err != nil {
			t.Error(err)
		}
	}))
}

func TestReleased(t *testing.T) {
	r, err := Reserve(4 * pageSize)
	require.NoError(t, err)
	require.NoError(t, r.Commit(0, pageSize))
	base := uint64(r.Base())
	require.NoError(t, r.Release())
	require.NoError(t, r.Release())

	require.ErrorIs(t, r.Commit(0, pageSize), ErrReleased)
	require.ErrorIs(t, r.Decommit(-1, 3), ErrReleased)
	_, err = r.Bytes(0, 1)
	require.ErrorIs(t, err, ErrReleased)
	_, err = r.At(base, 1)
	require.ErrorIs(t, err, ErrReleased)
	require.False(t, r.Contains(base))
	require.Zero(t, r.Stats())
}

func TestConcurrentRegion(t *testing.T) {
	const workers, each = 4, 8
	r := newRegion(t, workers*each)
	var wg sync.WaitGroup
	for w := range int64(workers) {
		wg.Go(func() {
			off := w * each * pageSize
			for i := range int64(100) {
				n := (1 + i%each) * pageSize
				if err := r.Commit(off, n); err != nil {
					t.Error(err)
					return
				}
				b, err := r.Bytes(off, n)
				if err != nil {
					t.Error(err)
					return
				}
				for j := int64(0); j < n; j += pageSize {
					if b[j] != 0 {
						t.Errorf("page %d is not zero", j/pageSize)
					}
					b[j] = byte(w + 1)
				}
				runtime.Gosched()
				if b[0] != byte(w+1) || b[n-pageSize] != byte(w+1) {
					t.Error("contents changed")
				}
				if err := r.Decommit(off, n); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, r.Stats())
}

func TestReleaseDuringUse(t *testing.T) {
	r, err := Reserve(64 * pageSize)
	require.NoError(t, err)
	var wg sync.WaitGroup
	for w := range int64(4) {
		wg.Go(func() {
			for {
				err := r.Commit(w*pageSize, pageSize)
				if err == nil {
					err = r.Decommit(w*pageSize, pageSize)
				}
				if err != nil {
					if !r.Contains(uint64(r.Base())) {
						return
					}
					t.Error(err)
				}
			}
		})
	}
	runtime.Gosched()
	require.NoError(t, r.Release())
	wg.Wait()
}

// TestTable pictures the extents of a region before and after one set: one
// letter a page, '.' reserved, 'c' committed, a digit a mapped page of that
// index. The extents after are given as the lengths of the runs.
func TestTable(t *testing.T) {
	p := &Pages{granularity: 1}
	extentOf := func(off int64, c byte) extent {
		switch c {
		case '.':
			return extent{off: off, n: 1}
		case 'c':
			return extent{off: off, n: 1, kind: committed}
		}
		return extent{off: off, n: 1, kind: mapped, pages: p, index: uint32(c - '0')}
	}
	for _, c := range []struct {
		before string
		set    extent
		after  string
		runs   []int64
	}{
		{"........", extent{off: 2, n: 3, kind: committed}, "..ccc...", []int64{3}},
		{"cc...ccc", extent{off: 2, n: 3, kind: committed}, "cccccccc", []int64{8}},
		{"cccccccc", extent{off: 2, n: 3}, "cc...ccc", []int64{2, 3}},
		{"cc.c.c.c", extent{off: 1, n: 5}, "c......c", []int64{1, 1}},
		{"..0123..", extent{off: 3, n: 2}, "..0..3..", []int64{1, 1}},
		{"..0..3..", extent{off: 3, n: 2, kind: mapped, pages: p, index: 1}, "..0123..", []int64{4}},
		{"..0..3..", extent{off: 3, n: 2, kind: mapped, pages: p, index: 4}, "..0453..", []int64{1, 2, 1}},
		{"cc01c...", extent{off: 4, n: 2}, "cc01....", []int64{2, 2}},
		{"cc1.1ccc", extent{off: 3, n: 1, kind: committed}, "cc1c1ccc", []int64{2, 1, 1, 1, 3}},
	} {
		tab := newTable()
		for i := range c.before {
			tab.set(extentOf(int64(i), c.before[i]))
		}
		tab.set(c.set)
		got := make([]byte, len(c.before))
		for _, e := range tab.overlapping(0, int64(len(got))) {
			for i := range e.n {
				switch e.kind {
				case reserved:
					got[e.off+i] = '.'
				case committed:
					got[e.off+i] = 'c'
				case mapped:
					got[e.off+i] = byte('0' + e.index + uint32(i))
				}
			}
		}
		require.Equal(t, c.after, string(got), "%s", c.before)
		var runs []int64
		tab.tree.Ascend(func(e extent) bool { runs = append(runs, e.n); return true })
		require.Equal(t, c.runs, runs, "%s", c.before)
	}
}

func TestMinHeap(t *testing.T) {
	var h minHeap
	_, ok := h.pop()
	require.False(t, ok)
	const n = 101 // prime, so that the multiples of 37 are a permutation
	for i := range uint32(n) {
		h.push(i * 37 % n)
	}
	for i := range uint32(n) {
		x, ok := h.pop()
		require.True(t, ok)
		require.Equal(t, i, x)
	}
	require.Empty(t, h)
}

func BenchmarkCommitDecommit(b *testing.B) {
	for _, c := range []struct {
		name  string
		n     int64
		touch bool
	}{
		{"4KiB/untouched", 4 << 10, false},
		{"4KiB/touched", 4 << 10, true},
		{"2MiB/untouched", 2 << 20, false},
		{"2MiB/touched", 2 << 20, true},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			n := (c.n + pageSize - 1) &^ (pageSize - 1)
			r := newRegion(b, 3*n/pageSize)
			for b.Loop() {
				require.NoError(b, r.Commit(n, n))
				if c.touch {
					touch(b, r, n, n)
				}
				require.NoError(b, r.Decommit(n, n))
			}
		})
	}
}

func touch(b *testing.B, r *Region, off, n int64) {
	s, err := r.Bytes(off, n)
	require.NoError(b, err)
	for i := int64(0); i < n; i += pageSize {
		s[i] = 1
	}
}

func BenchmarkAt(b *testing.B) {
	r := newRegion(b, 8192)
	for i := int64(0); i < 8192; i += 2 {
		require.NoError(b, r.Commit(i*pageSize, pageSize))
	}
	addr := uint64(r.Base()) + uint64(4000*pageSize)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.At(addr, 64); err != nil {
			b.Fatal(err)
		}
	}
}
