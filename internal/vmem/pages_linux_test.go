package vmem

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

const granules = 2 // pages of the system in a page of newPages

func newPages(t testing.TB, count int64) *Pages {
	t.Helper()
	p, err := NewPages(count*granules*pageSize, granules*pageSize)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

func create(t testing.TB, p *Pages, n int) []Handle {
	t.Helper()
	var hs []Handle
	for range n {
		h, err := p.Create()
		require.NoError(t, err)
		hs = append(hs, h)
	}
	return hs
}

// memoryOf returns the bytes of memory behind the pages, from the kernel.
func memoryOf(t require.TestingT, p *Pages) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.store == nil {
		return 0
	}
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(p.store.(memfd).fd, &st))
	return st.Blocks * 512
}

// A kernelMapping is a line of /proc/self/maps.
type kernelMapping struct {
	off, n int64 // in the region
	perms  string
}

// kernelMappings returns the process's mappings that touch the addresses of r,
// clipped to them: reserved neighbours of other regions may be joined to it.
func kernelMappings(t require.TestingT, r *Region) []kernelMapping {
	f, err := os.Open("/proc/self/maps")
	require.NoError(t, err)
	defer f.Close()
	var list []kernelMapping
	base, size := uint64(r.Base()), uint64(r.Size())
	s := bufio.NewScanner(f)
	for s.Scan() {
		addrs, rest, _ := strings.Cut(s.Text(), " ")
		perms, _, _ := strings.Cut(rest, " ")
		lo, hi, _ := strings.Cut(addrs, "-")
		from, err1 := strconv.ParseUint(lo, 16, 64)
		to, err2 := strconv.ParseUint(hi, 16, 64)
		require.NoError(t, errors.Join(err1, err2))
		from, to = max(from, base), min(to, base+size)
		if from < to {
			list = append(list, kernelMapping{int64(from - base), int64(to - from), perms})
		}
	}
	require.NoError(t, s.Err())
	return list
}

// faults reports whether reading the first byte of b is a fault.
func faults(b []byte) (fault bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { fault = recover() != nil }()
	sink = b[0]
	return false
}

var sink byte

func TestReleaseLeavesNoMapping(t *testing.T) {
	p := newPages(t, 8)
	r, err := Reserve(64 * pageSize)
	require.NoError(t, err)
	require.NoError(t, r.Commit(0, 8*pageSize))
	require.NoError(t, r.Commit(10*pageSize, pageSize))
	fill(bytesAt(t, r, 0, 8*pageSize), 1)
	hs := create(t, p, 3)
	require.NoError(t, p.MapRun(r, 20*pageSize, hs))
	require.NoError(t, p.Free(hs[0]))
	fill(bytesAt(t, r, 20*pageSize, 6*pageSize), 2)
	before := kernelMappings(t, r)
	require.Len(t, before, 6)
	require.Equal(t, PagesStats{Live: 2, Lingering: 1, Mappings: 3}, p.Stats())

	require.NoError(t, r.Release())
	// The Go runtime may have put something of its own there since.
	for _, m := range kernelMappings(t, r) {
		require.NotContains(t, before, m)
	}
	// The handles which are not freed keep their memory.
	require.Equal(t, PagesStats{Live: 2}, p.Stats())
	require.EqualValues(t, 4*pageSize, memoryOf(t, p))
	again := newRegion(t, 8)
	require.NoError(t, p.Map(again, 0, hs[2]))
	requireFilled(t, bytesAt(t, again, 0, 2*pageSize), 2)
}

func TestReservedMemoryFaults(t *testing.T) {
	r := newRegion(t, 8)
	require.NoError(t, r.Commit(0, pageSize))
	b := bytesAt(t, r, 0, pageSize)
	require.False(t, faults(b))
	require.NoError(t, r.Decommit(0, pageSize))
	require.True(t, faults(b))

	p := newPages(t, 1)
	h := create(t, p, 1)[0]
	require.NoError(t, p.Map(r, 0, h))
	require.False(t, faults(b))
	require.NoError(t, p.Unmap(r, 0, granules*pageSize))
	require.True(t, faults(b))
}

func TestDecommitGivesMemoryBack(t *testing.T) {
	r := newRegion(t, 4096)
	resident := func() (pages int64) {
		text, err := os.ReadFile("/proc/self/statm")
		require.NoError(t, err)
		var total int64
		_, err = fmt.Sscan(string(text), &total, &pages)
		require.NoError(t, err)
		return pages
	}
	require.NoError(t, r.Commit(0, 4096*pageSize))
	before := resident()
	fill(bytesAt(t, r, 0, 4096*pageSize), 1)
	require.Greater(t, resident(), before+3000)
	require.NoError(t, r.Decommit(0, 4096*pageSize))
	require.Less(t, resident(), before+1000)
	require.Len(t, kernelMappings(t, r), 1)
}

func TestAliasesSeeTheSameBytes(t *testing.T) {
	p, r, other := newPages(t, 4), newRegion(t, 16), newRegion(t, 16)
	h := create(t, p, 2)[1]
	require.NoError(t, p.Map(r, 0, h))
	require.NoError(t, p.MapRun(r, 5*pageSize, []Handle{h, h}))
	require.NoError(t, p.Map(other, pageSize, h))
	views := [][]byte{
		bytesAt(t, r, 0, 2*pageSize),
		bytesAt(t, r, 5*pageSize, 2*pageSize),
		bytesAt(t, r, 7*pageSize, 2*pageSize),
		bytesAt(t, other, pageSize, 2*pageSize),
	}
	for i, w := range views {
		fill(w, byte(i+1))
		for _, v := range views {
			requireFilled(t, v, byte(i+1))
		}
	}
	require.Equal(t, PagesStats{Live: 2, Mappings: 4}, p.Stats())
	require.EqualValues(t, 2*pageSize, memoryOf(t, p))
}

func TestPagesKeepTheirContentsWhenTheyMove(t *testing.T) {
	p, r := newPages(t, 4), newRegion(t, 64)
	h := create(t, p, 1)[0]
	require.NoError(t, p.Map(r, 0, h))
	requireFilled(t, bytesAt(t, r, 0, 2*pageSize), 0)
	fill(bytesAt(t, r, 0, 2*pageSize), 0x5a)

	// First mapped at the new place, then taken from the old one.
	require.NoError(t, p.Map(r, 40*pageSize, h))
	require.NoError(t, p.Unmap(r, 0, 2*pageSize))
	requireFilled(t, bytesAt(t, r, 40*pageSize, 2*pageSize), 0x5a)

	// Mapped nowhere in between.
	require.NoError(t, p.Unmap(r, 40*pageSize, 2*pageSize))
	require.NoError(t, p.Map(r, 7*pageSize, h))
	requireFilled(t, bytesAt(t, r, 7*pageSize, 2*pageSize), 0x5a)
}

func TestFreedPagesLingerWhileMapped(t *testing.T) {
	p, r := newPages(t, 1), newRegion(t, 16)
	h := create(t, p, 1)[0]
	require.NoError(t, p.MapRun(r, 0, []Handle{h, h}))
	b := bytesAt(t, r, 0, 4*pageSize)
	fill(b, 9)
	require.NoError(t, p.Free(h))
	requireFilled(t, b, 9)
	require.Equal(t, PagesStats{Lingering: 1, Mappings: 2}, p.Stats())

	require.ErrorIs(t, p.Map(r, 8*pageSize, h), ErrFreedHandle)
	require.ErrorIs(t, p.Free(h), ErrDoubleFree)
	_, err := p.Create()
	require.ErrorIs(t, err, ErrExhausted)

	require.NoError(t, p.Unmap(r, 0, 2*pageSize))
	requireFilled(t, bytesAt(t, r, 2*pageSize, 2*pageSize), 9)
	require.NoError(t, p.Unmap(r, 2*pageSize, 2*pageSize))
	require.Zero(t, p.Stats())
	require.Zero(t, memoryOf(t, p))

	// The page comes back as another handle, and zero.
	again := create(t, p, 1)[0]
	require.NotEqual(t, h, again)
	require.NoError(t, p.Map(r, 0, again))
	requireFilled(t, bytesAt(t, r, 0, 2*pageSize), 0)
	require.ErrorIs(t, p.Free(h), ErrDoubleFree)
	require.ErrorIs(t, p.Map(r, 8*pageSize, h), ErrFreedHandle)
}

func TestFreeGivesMemoryBack(t *testing.T) {
	p, r := newPages(t, 8), newRegion(t, 32)
	hs := create(t, p, 8)
	require.NoError(t, p.MapRun(r, 0, hs))
	fill(bytesAt(t, r, 0, 16*pageSize), 3)
	require.EqualValues(t, 16*pageSize, memoryOf(t, p))
	require.NoError(t, p.Unmap(r, 0, 16*pageSize))
	require.EqualValues(t, 16*pageSize, memoryOf(t, p))
	for _, i := range []int{6, 1, 3} {
		require.NoError(t, p.Free(hs[i]))
	}
	require.EqualValues(t, 10*pageSize, memoryOf(t, p))
	// The lowest come first.
	for _, want := range []uint32{1, 3, 6} {
		require.Equal(t, want, create(t, p, 1)[0].index)
	}
}

func TestRunsAreOneMapping(t *testing.T) {
	p, r := newPages(t, 64), newRegion(t, 130)
	hs := create(t, p, 64)
	require.NoError(t, p.MapRun(r, pageSize, hs))
	require.Equal(t, RegionStats{Mapped: 128 * pageSize, Extents: 1}, r.Stats())
	require.Len(t, kernelMappings(t, r), 3)
	require.NoError(t, p.Unmap(r, pageSize, 128*pageSize))

	// One by one it comes to the same.
	for i, h := range hs {
		require.NoError(t, p.Map(r, int64(1+2*i)*pageSize, h))
	}
	require.Equal(t, 1, r.Stats().Extents)
	require.Len(t, kernelMappings(t, r), 3)

	// A hole in the middle, a page of two system pages.
	require.NoError(t, p.Unmap(r, 11*pageSize, 2*pageSize))
	require.Equal(t, RegionStats{Mapped: 126 * pageSize, Extents: 2}, r.Stats())
	require.Equal(t, PagesStats{Live: 64, Mappings: 63}, p.Stats())
}

func TestMisuseOfPages(t *testing.T) {
	p, q, r := newPages(t, 8), newPages(t, 8), newRegion(t, 32)
	hs, foreign := create(t, p, 4), create(t, q, 1)[0]
	require.NoError(t, r.Commit(0, 2*pageSize))
	require.NoError(t, p.MapRun(r, 4*pageSize, hs[:2]))
	require.NoError(t, q.Map(r, 8*pageSize, foreign))
	require.NoError(t, p.Free(hs[3]))
	before, mappings := p.Stats(), kernelMappings(t, r)

	for _, c := range []struct {
		name string
		err  error
		want error
	}{
		{"map over committed", p.Map(r, pageSize, hs[2]), ErrCommitted},
		{"map over mapped", p.Map(r, 3*pageSize, hs[2]), ErrMapped},
		{"map the same again", p.Map(r, 4*pageSize, hs[0]), ErrMapped},
		{"map misaligned", p.Map(r, 1, hs[2]), ErrMisaligned},
		{"map past the end", p.Map(r, 31*pageSize, hs[2]), ErrRange},
		{"map before the beginning", p.Map(r, -2*pageSize, hs[2]), ErrRange},
		{"map far past the end", p.Map(r, math.MaxInt64&^(pageSize-1), hs[2]), ErrRange},
		{"map zero handle", p.Map(r, 16*pageSize, Handle{}), ErrForeignHandle},
		{"map foreign handle", p.Map(r, 16*pageSize, foreign), ErrForeignHandle},
		{"map freed handle", p.Map(r, 16*pageSize, hs[3]), ErrFreedHandle},
		{"map run with freed handle", p.MapRun(r, 16*pageSize, hs), ErrFreedHandle},
		{"map nothing", p.MapRun(r, 0, nil), nil},
		{"unmap reserved", p.Unmap(r, 20*pageSize, 2*pageSize), ErrNotMapped},
		{"unmap committed", p.Unmap(r, 0, 2*pageSize), ErrNotMapped},
		{"unmap too much", p.Unmap(r, 2*pageSize, 4*pageSize), ErrNotMapped},
		{"unmap of others", p.Unmap(r, 8*pageSize, 2*pageSize), ErrNotMapped},
		{"unmap half at the end", p.Unmap(r, 4*pageSize, pageSize), ErrMisaligned},
		{"unmap half at the beginning", p.Unmap(r, 5*pageSize, pageSize), ErrMisaligned},
		{"unmap nothing", p.Unmap(r, 4*pageSize, 0), nil},
		{"commit over mapped", r.Commit(2*pageSize, 4*pageSize), ErrMapped},
		{"decommit over mapped", r.Decommit(0, 6*pageSize), ErrMapped},
		{"free zero handle", p.Free(Handle{}), ErrForeignHandle},
		{"free foreign handle", p.Free(foreign), ErrForeignHandle},
		{"free twice", p.Free(hs[3]), ErrDoubleFree},
	} {
		if c.want == nil {
			require.NoError(t, c.err, c.name)
			continue
		}
		require.ErrorIs(t, c.err, c.want, c.name)
		require.True(t, strings.HasPrefix(c.err.Error(), "vmem: "), "%s: %v", c.name, c.err)
	}
	require.Equal(t, before, p.Stats())
	require.Equal(t, mappings, kernelMappings(t, r))
	bytesAt(t, r, 0, 2*pageSize)

	gone, err := Reserve(4 * pageSize)
	require.NoError(t, err)
	require.NoError(t, gone.Release())
	require.ErrorIs(t, p.Map(gone, 0, hs[2]), ErrReleased)
	require.ErrorIs(t, p.Unmap(gone, 0, 2*pageSize), ErrReleased)

	for _, c := range []struct {
		capacity, granularity int64
		want                  error
	}{
		{0, pageSize, ErrRange},
		{pageSize, 0, ErrRange},
		{pageSize, -pageSize, ErrRange},
		{pageSize, pageSize / 2, ErrMisaligned},
		{3 * pageSize, 2 * pageSize, ErrMisaligned},
		{pageSize << 32, pageSize, ErrRange},
	} {
		_, err := NewPages(c.capacity, c.granularity)
		require.ErrorIs(t, err, c.want, "NewPages(%d, %d)", c.capacity, c.granularity)
	}
}

func TestCloseWaitsForMappings(t *testing.T) {
	p, err := NewPages(8*pageSize, 2*pageSize)
	require.NoError(t, err)
	r, other := newRegion(t, 16), newRegion(t, 16)
	hs := create(t, p, 3)
	require.NoError(t, p.Map(r, 0, hs[1]))
	require.NoError(t, p.Map(other, 0, hs[1]))
	b := bytesAt(t, r, 0, 2*pageSize)
	fill(b, 4)
	fd := p.storeOfPinned().(memfd).fd

	require.NoError(t, p.Close())
	require.NoError(t, p.Close())
	requireFilled(t, b, 4)
	require.Equal(t, PagesStats{Lingering: 1, Mappings: 2}, p.Stats())
	_, err = p.Create()
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, p.Free(hs[0]), ErrClosed)
	require.ErrorIs(t, p.Map(r, 8*pageSize, hs[0]), ErrClosed)

	require.NoError(t, p.Unmap(r, 0, 2*pageSize))
	requireFilled(t, bytesAt(t, other, 0, 2*pageSize), 4)
	require.NoError(t, other.Release())
	require.Zero(t, p.Stats())
	link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	require.False(t, err == nil && strings.Contains(link, "halyard"), "the file is open still: %s", link)
}

func TestPagesLargerThanMemory(t *testing.T) {
	p, err := NewPages(1<<40, 2<<20)
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close()) }()
	require.Equal(t, int64(1<<40), p.Capacity())
	require.EqualValues(t, 2<<20, p.Granularity())
	create(t, p, 1000)
	require.Zero(t, memoryOf(t, p))
}

// setStore changes the store of p.
func setStore(p *Pages, s store) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.store = s
}

// A faultyStore fails when its countdowns reach zero.
type faultyStore struct {
	store
	mapsLeft, punchesLeft int
}

var errFault = errors.New("planned failure")

func (s *faultyStore) mapAt(r *Region, off, n, from int64) error {
	if s.mapsLeft--; s.mapsLeft < 0 {
		return errFault
	}
	return s.store.mapAt(r, off, n, from)
}

func (s *faultyStore) punch(off, n int64) error {
	if s.punchesLeft--; s.punchesLeft < 0 {
		return errFault
	}
	return s.store.punch(off, n)
}

func TestMapRunIsAllOrNothing(t *testing.T) {
	p, r := newPages(t, 8), newRegion(t, 32)
	hs := create(t, p, 8)
	run := []Handle{hs[5], hs[0], hs[1], hs[7], hs[3]} // four calls
	require.NoError(t, p.Map(r, 30*pageSize, hs[5]))
	before := kernelMappings(t, r)
	faulty := &faultyStore{store: p.storeOfPinned()}
	setStore(p, faulty)
	for calls := range 4 {
		faulty.mapsLeft = calls
		require.ErrorIs(t, p.MapRun(r, 4*pageSize, run), errFault)
		require.Equal(t, PagesStats{Live: 8, Mappings: 1}, p.Stats())
		require.Equal(t, RegionStats{Mapped: 2 * pageSize, Extents: 1}, r.Stats())
		require.Equal(t, before, kernelMappings(t, r))
	}
	faulty.mapsLeft = 4
	require.NoError(t, p.MapRun(r, 4*pageSize, run))
	require.Equal(t, 5, r.Stats().Extents)
	setStore(p, faulty.store)
}

func TestFailedPunch(t *testing.T) {
	p, r := newPages(t, 2), newRegion(t, 8)
	hs := create(t, p, 2)
	faulty := &faultyStore{store: p.storeOfPinned(), mapsLeft: 1}
	setStore(p, faulty)

	// Free fails: the handle is good still.
	require.ErrorIs(t, p.Free(hs[0]), errFault)
	require.Equal(t, PagesStats{Live: 2}, p.Stats())
	require.NoError(t, p.Map(r, 0, hs[0]))

	// The last Unmap is done, but its page is not handed out with old bytes.
	require.NoError(t, p.Free(hs[0]))
	require.ErrorIs(t, p.Unmap(r, 0, 2*pageSize), errFault)
	require.Zero(t, r.Stats())
	require.Equal(t, PagesStats{Live: 1, Lingering: 1}, p.Stats())
	_, err := p.Create()
	require.ErrorIs(t, err, ErrExhausted)
	setStore(p, faulty.store)
}

func TestConcurrentPages(t *testing.T) {
	const workers = 4
	p, r := newPages(t, workers*3), newRegion(t, workers*8)
	var wg sync.WaitGroup
	for w := range int64(workers) {
		wg.Go(func() {
			off, n := w*8*pageSize, 2*pageSize
			for range 100 {
				a, err1 := p.Create()
				b, err2 := p.Create()
				err := errors.Join(err1, err2, p.MapRun(r, off, []Handle{a, b}), p.Free(a))
				if err != nil {
					t.Error(err)
					return
				}
				s, err := r.Bytes(off, 2*n)
				if err != nil {
					t.Error(err)
					return
				}
				if s[0] != 0 || s[n] != 0 {
					t.Error("page is not zero")
				}
				s[0], s[n] = byte(w+1), byte(w+11)
				err = errors.Join(p.Map(r, off+2*n, b), p.Unmap(r, off, 2*n))
				if err != nil {
					t.Error(err)
					return
				}
				if s, err = r.Bytes(off+2*n, n); err != nil || s[0] != byte(w+11) {
					t.Error("page lost its contents", err)
				}
				if err := errors.Join(p.Free(b), p.Unmap(r, off+2*n, n)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, p.Stats())
	require.Zero(t, r.Stats())
	require.Zero(t, memoryOf(t, p))
}

func TestMappingError(t *testing.T) {
	err := mappingError(unix.ENOMEM, 65000, 65530)
	require.ErrorIs(t, err, ErrTooManyMappings)
	require.ErrorIs(t, err, unix.ENOMEM)
	require.ErrorContains(t, err, "vm.max_map_count")
	require.NotErrorIs(t, mappingError(unix.ENOMEM, 100, 65530), ErrTooManyMappings)
	require.NotErrorIs(t, systemError("mmap", unix.ENOMEM), ErrTooManyMappings)
	require.Greater(t, countMappings(), 10)
}

// TestMappingLimit drives a process against vm.max_map_count. It is another
// process: at the limit the Go runtime may get no memory either.
func TestMappingLimit(t *testing.T) {
	const env = "VMEM_TEST_MAPPING_LIMIT"
	limit, ok := mappingLimit()
	if !ok || limit > 200_000 || limit < 10_000 {
		t.Skipf("vm.max_map_count is %d", limit)
	}
	if os.Getenv(env) == "" {
		for range 3 {
			cmd := exec.Command(os.Args[0], "-test.run=^TestMappingLimit$", "-test.v")
			cmd.Env = append(os.Environ(), env+"=1", "GOGC=off")
			out, err := cmd.CombinedOutput()
			if err != nil && strings.Contains(string(out), "runtime: cannot allocate memory") {
				continue
			}
			require.NoError(t, err, "%s", out)
			require.Contains(t, string(out), "--- PASS")
			return
		}
		t.Skip("the Go runtime found no memory in any of 3 runs")
	}

	uncounted := 0 // in the list, but not counted by the kernel
	if maps, err := os.ReadFile("/proc/self/maps"); err == nil && strings.Contains(string(maps), "[vsyscall]") {
		uncounted = 1
	}
	pages := int64(limit) + 4000
	r := newRegion(t, pages)
	p, err := NewPages(pages*pageSize, pageSize)
	require.NoError(t, err)
	defer p.Close()
	h := create(t, p, 1)[0]

	// Every other page, which are two mappings each, until the kernel refuses.
	last := int64(0)
	for err == nil {
		last += 2
		require.Less(t, last, pages)
		err = r.Commit(last*pageSize, pageSize)
	}
	require.ErrorIs(t, err, ErrTooManyMappings)
	require.ErrorIs(t, err, unix.ENOMEM)
	require.ErrorContains(t, err, "vm.max_map_count")
	_, err = r.Bytes(last*pageSize, pageSize)
	require.ErrorIs(t, err, ErrNotCommitted)
	want := RegionStats{Committed: (last/2 - 1) * pageSize, Extents: int(last/2 - 1)}
	require.Equal(t, want, r.Stats())

	// It refuses all that may add mappings, and leaves room for the runtime.
	require.Less(t, countMappings(), limit-sparePages/2)
	require.ErrorIs(t, r.Commit((last+20)*pageSize, pageSize), ErrTooManyMappings)
	require.ErrorIs(t, p.Map(r, (last+20)*pageSize, h), ErrTooManyMappings)
	_, err = Reserve(pageSize)
	require.ErrorIs(t, err, ErrTooManyMappings)
	require.Equal(t, PagesStats{Live: 1}, p.Stats())
	require.Equal(t, want, r.Stats())

	// What goes makes room for others.
	first := int64(2)
	makeRoom := func() {
		for end := first + 400; first < end; first += 2 {
			require.NoError(t, r.Decommit(first*pageSize, pageSize))
		}
	}
	makeRoom()
	require.NoError(t, r.Commit(last*pageSize, pageSize))

	// One mapping above the limit, which the kernel allows, mmap is refused
	// whatever it does. Unmap works there too. Map adds two mappings, so the
	// place is reached either at once or after adding a single one.
	reached := 0
	for range 2 {
		makeRoom()
		last += 2
		require.NoError(t, r.Commit(last*pageSize, pageSize)) // takes the spares
		room := limit - countMappings() + uncounted
		for range room / 2 {
			last += 2
			require.NoError(t, r.Commit(last*pageSize, pageSize))
		}
		place := (last + 4) * pageSize
		if err := p.Map(r, place, h); err != nil {
			require.ErrorIs(t, err, ErrTooManyMappings)
		} else {
			reached++
			require.NoError(t, p.Unmap(r, place, pageSize))
		}
		makeRoom()
		require.NoError(t, r.Commit(0, pageSize)) // at the edge it is one more
	}
	require.NotZero(t, reached)

	require.NoError(t, r.Release())
	require.Less(t, countMappings(), 1000)
	require.Equal(t, PagesStats{Live: 1}, p.Stats())
}

// The model of the property test: what each page of the region is, and the
// bytes behind it. One byte stands for all bytes of a page.
type (
	modelPage struct { // one page of the system
		handle Handle // zero: not mapped
		part   int    // which granule of the handle
		bytes  *byte  // nil: reserved
	}
	modelHandle struct {
		bytes [granules]*byte
		maps  int
		freed bool
	}
)

func checkAgainstModel(t *rapid.T) {
	const size, capacity = 24, 5
	r, err := Reserve(size * pageSize)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Release()) }()
	p, err := NewPages(capacity*granules*pageSize, granules*pageSize)
	require.NoError(t, err)
	defer p.Close()

	var place [size]modelPage
	handles := map[Handle]*modelHandle{}
	var order []Handle // all ever created, for drawing
	next := byte(0)

	alive := func() (n int) {
		for _, h := range handles {
			if !h.freed || h.maps > 0 {
				n++
			}
		}
		return n
	}
	drawRange := func(t *rapid.T) (off, n int) {
		off = rapid.IntRange(0, size-1).Draw(t, "off")
		return off, rapid.IntRange(1, min(8, size-off)).Draw(t, "n")
	}
	is := func(off, n int, f func(modelPage) bool) bool { // any
		for _, m := range place[off : off+n] {
			if f(m) {
				return true
			}
		}
		return false
	}
	isMapped := func(m modelPage) bool { return m.handle != Handle{} }
	isCommitted := func(m modelPage) bool { return m.bytes != nil && m.handle == Handle{} }
	want := func(t *rapid.T, err, want error) bool {
		if want == nil {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, want)
		}
		return want == nil
	}

	t.Repeat(map[string]func(*rapid.T){
		"commit": func(t *rapid.T) {
			off, n := drawRange(t)
			var expect error
			if is(off, n, isMapped) {
				expect = ErrMapped
			}
			if !want(t, r.Commit(int64(off)*pageSize, int64(n)*pageSize), expect) {
				return
			}
			for i := off; i < off+n; i++ {
				if place[i].bytes == nil {
					place[i].bytes = new(byte)
				}
			}
		},
		"decommit": func(t *rapid.T) {
			off, n := drawRange(t)
			var expect error
			if is(off, n, isMapped) {
				expect = ErrMapped
			}
			if want(t, r.Decommit(int64(off)*pageSize, int64(n)*pageSize), expect) {
				clear(place[off : off+n])
			}
		},
		"create": func(t *rapid.T) {
			var expect error
			if alive() == capacity {
				expect = ErrExhausted
			}
			h, err := p.Create()
			if want(t, err, expect) {
				require.NotContains(t, handles, h)
				handles[h] = &modelHandle{bytes: [granules]*byte{new(byte), new(byte)}}
				order = append(order, h)
			}
		},
		"free": func(t *rapid.T) {
			if len(order) == 0 {
				return
			}
			h := rapid.SampledFrom(order).Draw(t, "handle")
			var expect error
			if handles[h].freed {
				expect = ErrDoubleFree
			}
			if want(t, p.Free(h), expect) {
				handles[h].freed = true
			}
		},
		"map": func(t *rapid.T) {
			if len(order) == 0 {
				return
			}
			// Mostly of the youngest, which are alive and in a row.
			from := rapid.IntRange(0, len(order)-1).Draw(t, "from")
			run := order[from:min(len(order), from+rapid.IntRange(1, 3).Draw(t, "handles"))]
			off := rapid.IntRange(0, size-1).Draw(t, "off")
			n := len(run) * granules
			var expect error
			switch {
			case off+n > size:
				expect = ErrRange
			case is(off, n, func(m modelPage) bool { return m.bytes != nil }):
				first := off
				for place[first].bytes == nil {
					first++
				}
				expect = ErrMapped
				if isCommitted(place[first]) {
					expect = ErrCommitted
				}
			default:
				for _, h := range run {
					if handles[h].freed {
						expect = ErrFreedHandle
					}
				}
			}
			if !want(t, p.MapRun(r, int64(off)*pageSize, run), expect) {
				return
			}
			for i, h := range run {
				handles[h].maps++
				for g := range granules {
					place[off+i*granules+g] = modelPage{h, g, handles[h].bytes[g]}
				}
			}
		},
		"unmap": func(t *rapid.T) {
			off, n := drawRange(t)
			var expect error
			switch {
			case is(off, n, func(m modelPage) bool { return !isMapped(m) }):
				// The first thing wrong decides: a cut or a page not mapped.
				for i := off; i < off+n && expect == nil; i++ {
					if !isMapped(place[i]) {
						expect = ErrNotMapped
					} else if i == off && place[i].part != 0 {
						expect = ErrMisaligned
					}
				}
			case place[off].part != 0 || place[off+n-1].part != granules-1:
				expect = ErrMisaligned
			}
			if !want(t, p.Unmap(r, int64(off)*pageSize, int64(n)*pageSize), expect) {
				return
			}
			for i := off; i < off+n; i += granules {
				handles[place[i].handle].maps--
			}
			clear(place[off : off+n])
		},
		"write": func(t *rapid.T) {
			off, n := drawRange(t)
			b, err := r.Bytes(int64(off)*pageSize, int64(n)*pageSize)
			var expect error
			if is(off, n, func(m modelPage) bool { return m.bytes == nil }) {
				expect = ErrNotCommitted
			}
			if !want(t, err, expect) {
				return
			}
			for i := range n {
				next++
				*place[off+i].bytes = next
				fill(b[int64(i)*pageSize:int64(i+1)*pageSize], next)
			}
		},
		"": func(t *rapid.T) {
			var perms [size]string
			mappings := kernelMappings(t, r)
			for _, m := range mappings {
				for i := m.off / pageSize; i < (m.off+m.n)/pageSize; i++ {
					perms[i] = m.perms
				}
			}
			var stats RegionStats
			for i, m := range place {
				switch {
				case isMapped(m):
					stats.Mapped += pageSize
					require.Equal(t, "rw-s", perms[i], "page %d", i)
				case isCommitted(m):
					stats.Committed += pageSize
					require.Equal(t, "rw-p", perms[i], "page %d", i)
				default:
					require.Equal(t, "---p", perms[i], "page %d", i)
					continue
				}
				b, err := r.Bytes(int64(i)*pageSize, pageSize)
				require.NoError(t, err)
				for _, at := range []int64{0, pageSize / 2, pageSize - 1} {
					require.Equal(t, *m.bytes, b[at], "page %d", i)
				}
			}
			got := r.Stats()
			require.LessOrEqual(t, got.Extents, len(mappings))
			stats.Extents = got.Extents
			require.Equal(t, stats, got)

			var pstats PagesStats
			for _, h := range handles {
				pstats.Mappings += h.maps
				if !h.freed {
					pstats.Live++
				} else if h.maps > 0 {
					pstats.Lingering++
				}
			}
			require.Equal(t, pstats, p.Stats())
			require.LessOrEqual(t, memoryOf(t, p), int64(alive())*granules*pageSize)
		},
	})
}

func TestAgainstModel(t *testing.T) { rapid.Check(t, checkAgainstModel) }

func FuzzAgainstModel(f *testing.F) { f.Fuzz(rapid.MakeFuzz(checkAgainstModel)) }

func BenchmarkPages(b *testing.B) {
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
		n := (c.n + pageSize - 1) &^ (pageSize - 1)
		// Create+Map and Unmap+Free together; the second benchmark has only
		// Map and Unmap, a move.
		b.Run("CreateMapUnmapFree/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			p, r := benchmarkPages(b, n)
			for b.Loop() {
				h, err := p.Create()
				require.NoError(b, err)
				require.NoError(b, p.Map(r, n, h))
				if c.touch {
					touch(b, r, n, n)
				}
				require.NoError(b, p.Unmap(r, n, n))
				require.NoError(b, p.Free(h))
			}
		})
		b.Run("Move/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			p, r := benchmarkPages(b, n)
			h := create(b, p, 1)[0]
			require.NoError(b, p.Map(r, n, h))
			from, to := n, 3*n
			for b.Loop() {
				if c.touch {
					touch(b, r, from, n)
				}
				require.NoError(b, p.Map(r, to, h))
				require.NoError(b, p.Unmap(r, from, n))
				from, to = to, from
			}
		})
	}
}

func benchmarkPages(b *testing.B, n int64) (*Pages, *Region) {
	p, err := NewPages(8*n, n)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, p.Close()) })
	return p, newRegion(b, 5*n/pageSize)
}

func BenchmarkCreate(b *testing.B) {
	p, err := NewPages(1<<40, 2<<20)
	require.NoError(b, err)
	defer p.Close()
	b.ReportAllocs()
	for b.Loop() {
		h, err := p.Create()
		require.NoError(b, err)
		require.NoError(b, p.Free(h))
	}
}
