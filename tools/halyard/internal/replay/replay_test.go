package replay

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal"
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/raw"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
	"github.com/halyard-go/halyard/internal/trace"
)

// opener opens the same device again and again.
func opener(device string, options ...hal.Option) func() (*hal.Device, error) {
	return func() (*hal.Device, error) { return hal.Open(device, options...) }
}

func replay(t testing.TB, tr *trace.Trace, c Config) *Result {
	t.Helper()
	r, err := Run(t.Context(), tr, c)
	require.NoError(t, err)
	return r
}

// handMade has a peak of 5000 bytes live after its fourth event, a buffer of no
// bytes, and two that are never freed.
const handMade = "a 0 1000\na 1 3000 1\nf 0 1\na 2 2000\nf 1\na 3 0\n"

func TestCountsAreExact(t *testing.T) {
	for _, verify := range []bool{false, true} {
		r := replay(t, parse(t, handMade), Config{Open: opener("host:queues=2", hal.WithAllocator("raw")), Passes: 3, Verify: verify})
		require.True(t, r.OK(), "%v %v", r.FirstError, r.Problems)
		require.Equal(t, "raw", r.Allocator)
		require.Equal(t, 2, r.Queues)
		require.Equal(t, int64(18), r.Events)
		require.Equal(t, uint64(12), r.Allocs)
		require.Equal(t, uint64(12), r.Frees, "what is left at the end of a pass is released")
		require.Equal(t, uint64(18), r.Direct, "a buffer of no bytes costs no driver call")
		require.Equal(t, hal.Bytes(5000), r.PeakLive)
		require.Equal(t, hal.Bytes(3072+2048), r.PeakHeld, "multiples of 256")
		require.InDelta(t, 5120.0/5000, r.HeldOverLive(), 1e-12)
		require.Equal(t, uint64(9), r.Source().SourceAllocs)
		require.Equal(t, []uint64{3, 3, 3}, r.SourceAllocsByPass)
		require.Zero(t, r.Retained)
		require.Positive(t, r.NSPerEvent)
		require.Positive(t, r.QueueNSPerEvent)
	}
}

func TestWarmPassOfACacheMakesNoDriverCall(t *testing.T) {
	r := replay(t, parse(t, handMade), Config{Open: opener("host", hal.WithAllocator("raw+caching")), Passes: 2})
	require.True(t, r.OK(), "%v", r.Problems)
	require.Equal(t, []uint64{3, 0}, r.SourceAllocsByPass)
	require.Equal(t, []uint64{3, 0}, r.DriverCallsByPass)
	require.Equal(t, "caching", r.Cache().Layer)
	require.Equal(t, uint64(3), r.Cache().Hits)
	require.Equal(t, uint64(3), r.Cache().Misses)
	require.Equal(t, hal.Bytes(1024+3072+2048), r.Retained)
}

func TestRefusedRequestSkipsItsFree(t *testing.T) {
	tr := parse(t, "a 0 5000\na 1 5000 1\nf 1\na 2 2000 1\nf 0\nf 2\n")
	r := replay(t, tr, Config{Open: opener("host:capacity=8KiB", hal.WithAllocator("raw")), Passes: 2, Verify: true})
	require.Equal(t, uint64(4), r.Allocs)
	require.Equal(t, uint64(4), r.Frees)
	require.Equal(t, [runCount]uint64{2, 2, 2, 2}, r.FailedByRun)
	require.Equal(t, uint64(2), r.Failed())
	require.Equal(t, hal.Bytes(7000), r.PeakLive)
	require.ErrorIs(t, r.FirstError, hal.ErrOutOfMemory)
	require.Empty(t, r.Problems)
	require.False(t, r.OK())
}

func TestBuffersFreedOnOtherQueues(t *testing.T) {
	var text strings.Builder
	for i := range 3000 {
		s := i % 3
		fmt.Fprintf(&text, "a %d %d %d\n", i, 1+(i*i)%70_000, s)
		if i >= 10 {
			fmt.Fprintf(&text, "f %d %d\n", i-10, (s+i/7)%3)
		}
	}
	for _, stack := range []string{"pool", "block", "block+caching"} {
		r := replay(t, parse(t, text.String()), Config{Open: opener("host:queues=3", hal.WithAllocator(stack)), Passes: 2, Verify: true})
		require.True(t, r.OK(), "%s: %v %v", stack, r.FirstError, r.Problems)
		require.Equal(t, uint64(6000), r.Allocs)
		require.Equal(t, uint64(6000), r.Frees)
	}
}

func TestProgressEndsAtTheTotal(t *testing.T) {
	var done, total int64
	replay(t, parse(t, handMade), Config{Open: opener("host"), Passes: 2, Verify: true, Progress: func(d, n int64) {
		require.Greater(t, d, done)
		done, total = d, n
	}})
	require.Equal(t, int64(4*2*6), total)
	require.Equal(t, total, done)
}

func TestInterrupt(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	opened := 0
	_, err := Run(ctx, parse(t, handMade), Config{
		Passes: 1000,
		Open: func() (*hal.Device, error) {
			opened++
			return hal.Open("host")
		},
		Progress: func(done, _ int64) {
			if done > 100 {
				cancel()
			}
		},
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 1, opened)
}

func TestDeviceThatCannotBeOpened(t *testing.T) {
	_, err := Run(t.Context(), parse(t, handMade), Config{Passes: 1, Open: opener("host:capacity=1B")})
	require.ErrorContains(t, err, "capacity")
}

// broken is a layer with a planted fault, in the third request it serves.
type broken struct {
	base  allocator.Allocator
	env   *allocator.Env
	fault string
	n     int
	first allocator.Block
	kept  []allocator.Block
}

var brokenLayer = allocator.Layer{
	Table: &spec.Table{Name: "broken", Summary: "has a fault", Options: []spec.Option{
		{Name: "fault", Kind: spec.Enum, Default: "overlap", Enum: []string{"overlap", "corrupt", "corrupt_head", "crooked", "leak"}, Help: "which fault"},
	}},
	New: func(base allocator.Allocator, env *allocator.Env, v *spec.Values) (allocator.Allocator, error) {
		return &broken{base: base, env: env, fault: v.Text("fault")}, nil
	},
}

func (l *broken) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	b, f, o := l.base.Allocate(r)
	l.n++
	if l.n == 1 {
		l.first = b
	}
	if l.n != 3 {
		return b, f, o
	}
	switch l.fault {
	case "overlap":
		b.Addr = l.first.Addr + 256
	case "crooked":
		b.Addr += 16
	case "corrupt":
		l.fill(l.first.Addr + 4095)
	case "corrupt_head":
		l.fill(l.first.Addr)
	}
	return b, f, o
}

// fill changes a byte, twice, as it might have been either by chance.
func (l *broken) fill(addr uint64) {
	for _, pattern := range []byte{0x00, 0xa5} {
		if _, err := l.env.Fill(addr, 1, pattern, queue.ReadyNow()); err != nil {
			panic(err)
		}
	}
}

func (l *broken) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	if l.fault == "leak" {
		l.kept = append(l.kept, b)
		return allocator.OK
	}
	return l.base.Free(b, after)
}

func (l *broken) Trim(memory.Bytes) memory.Bytes { return 0 }
func (l *broken) Stats() allocator.Stats         { return allocator.Stats{} }

func (l *broken) Close() error {
	for _, b := range l.kept {
		l.base.Free(b, queue.ReadyNow())
	}
	return nil
}

func TestVerifyFindsPlantedFaults(t *testing.T) {
	registry := &allocator.Registry{}
	registry.MustRegister(raw.Layer, brokenLayer, allocator.Mint)
	tr := parse(t, "a 0 4096\na 1 4096\na 2 1000\na 3 64\nf 1\nf 2\nf 3\n")
	for _, test := range []struct {
		fault                     string
		overlaps, lost, misplaced uint64
		says                      string
	}{
		{"overlap", 2, 0, 0, "counted run: overlap: allocation 2 at 0x"},
		{"corrupt", 0, 2, 0, "counted run: lost bytes: allocation 0 of 4096 bytes has 1 of its 32 marked bytes changed, the first at 4095"},
		{"corrupt_head", 0, 2, 0, "queue-verified run: lost bytes: allocation 0 of 4096 bytes has 1 of its 32 marked bytes changed, the first at 0"},
		{"crooked", 0, 0, 2, "asked for 1000 bytes at a multiple of 256 and got 1024 at 0x"},
		{"leak", 0, 0, 0, "counted run: raw still holds 9472 bytes after everything was released and trimmed"},
	} {
		t.Run(test.fault, func(t *testing.T) {
			r := replay(t, tr, Config{
				Open:   opener("host", hal.WithAllocators(registry), hal.WithAllocator("raw+broken:fault="+test.fault)),
				Passes: 1, Verify: true,
			})
			require.False(t, r.OK())
			require.Zero(t, r.Failed(), "%v", r.FirstError)
			require.Equal(t, test.overlaps, r.Overlaps)
			require.Equal(t, test.lost, r.LostBytes, "%v", r.Problems)
			require.Equal(t, test.misplaced, r.Misplaced)
			require.Contains(t, strings.Join(r.Problems, "\n"), test.says)
		})
	}
	t.Run("not asked", func(t *testing.T) {
		r := replay(t, tr, Config{Open: opener("host", hal.WithAllocators(registry), hal.WithAllocator("raw+broken")), Passes: 1})
		require.True(t, r.OK(), "without Verify nobody looks: %v", r.Problems)
	})
}

func TestProblemsAreBounded(t *testing.T) {
	r := &runner{result: &Result{}}
	for range mostProblems + 3 {
		r.problem("again")
	}
	require.Len(t, r.result.Problems, mostProblems)
	require.Equal(t, 3, r.result.Unlisted)
}

func TestOverlapsOnEitherSide(t *testing.T) {
	// The map is asked about pictures of addresses, so no device is needed.
	for _, test := range []struct {
		lo, hi uint64
		over   bool
	}{
		{0, 256, false}, {0, 257, true}, {256, 512, true}, {300, 301, true}, {511, 600, true}, {512, 600, false}, {0, 1000, true},
	} {
		a := newAuditor(&runner{result: &Result{}}, 2, 1)
		require.Nil(t, a.over(interval{256, 512, 0}))
		a.live.ReplaceOrInsert(interval{256, 512, 0})
		require.Equal(t, test.over, a.over(interval{test.lo, test.hi, 1}) != nil, "%v", test)
	}
}

func TestEnds(t *testing.T) {
	for size, want := range map[hal.Bytes][2]hal.Bytes{0: {}, 1: {1, 0}, 32: {32, 0}, 33: {16, 16}, hal.GiB: {16, 16}} {
		head, tail := ends(size)
		require.Equal(t, want, [2]hal.Bytes{head, tail}, "%v", size)
	}
}

func TestMutexNS(t *testing.T) {
	require.Positive(t, MutexNS())
}
