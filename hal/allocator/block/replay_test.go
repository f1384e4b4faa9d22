package block

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/trace"
	"github.com/halyard-go/halyard/internal/workload"
)

// recorded returns the traces in HALYARD_TRACES, or skips.
func recorded(t testing.TB) []*trace.Trace {
	dir := os.Getenv("HALYARD_TRACES")
	if dir == "" {
		t.Skip("HALYARD_TRACES names no folder of recorded traces")
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.trace*"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	var list []*trace.Trace
	for _, f := range files {
		tr, err := trace.Open(f)
		require.NoError(t, err)
		list = append(list, tr)
	}
	return list
}

// generated returns the workloads that need no file.
func generated(testing.TB) []*trace.Trace {
	var list []*trace.Trace
	for _, w := range workload.List() {
		list = append(list, w.Generate(workload.Options{Seed: 1}))
	}
	return list
}

// player replays a trace on one queue that is always up to date.
type player struct {
	a      *Allocator
	tr     *trace.Trace
	q      queue.ID
	left   []int32
	blocks []allocator.Block
	kind   allocator.Kind
}

func newPlayer(a *Allocator, tr *trace.Trace) *player {
	return &player{a: a, tr: tr, left: tr.Leftover(), blocks: make([]allocator.Block, tr.Allocs), kind: allocator.MakeKind(0, 256, 0, 0, 0)}
}

// pass replays the trace once and frees what is left over. It returns the event at
// which a request failed, or -1.
func (p *player) pass() int {
	ready := queue.ReadyNow()
	for k := range p.tr.Events {
		e := &p.tr.Events[k]
		if e.Free {
			if b := &p.blocks[e.ID]; b.Keeper != nil {
				if o := p.a.Free(*b, ready); o != allocator.OK {
					panic(o)
				}
			}
			continue
		}
		if e.Bytes == 0 {
			continue // the stack serves these
		}
		r := allocator.Request{Size: memory.Bytes(e.Bytes), Kind: p.kind, Who: allocator.Who{Queue: p.q}}
		b, _, o := p.a.Allocate(r)
		if o != allocator.OK {
			return k
		}
		p.blocks[e.ID] = b
	}
	for _, id := range p.left {
		if b := &p.blocks[id]; b.Keeper != nil {
			p.a.Free(*b, ready)
		}
	}
	return -1
}

// pageOf is the page size that suits a trace: small ones need small pages.
func pageOf(tr *trace.Trace) memory.Bytes {
	if tr.PeakLive < int64(64*memory.MiB) {
		return 4 * memory.KiB
	}
	return 2 * memory.MiB
}

func testSecondPass(t *testing.T, list []*trace.Trace) {
	for _, tr := range list {
		t.Run(tr.Name, func(t *testing.T) {
			v := newFakeVirtual(t, pageOf(tr), 0)
			a := newBlock(t, v, Config{})
			p := newPlayer(a, tr)
			require.Equal(t, -1, p.pass())
			check(t, a)
			calls := v.calls
			first := append([]allocator.Block(nil), p.blocks...)
			require.Equal(t, -1, p.pass())
			require.Equal(t, calls, v.calls, "calls of the driver in the second pass")
			for id := range first {
				if first[id].Addr != p.blocks[id].Addr {
					t.Fatalf("block %d was at %#x and is at %#x", id, first[id].Addr, p.blocks[id].Addr)
				}
			}
			st := a.Stats()
			t.Logf("held/live %.4f, %d calls", float64(st.PeakHeld)/float64(tr.PeakLive), calls)
			emptied(t, a, &v.fakeDriver)
		})
	}
}

func TestASecondPassMakesTheSamePlacesAndCallsNoDriver(t *testing.T) { testSecondPass(t, generated(t)) }

func TestASecondPassOfRecordedTracesCallsNoDriver(t *testing.T) { testSecondPass(t, recorded(t)) }

func testTight(t *testing.T, list []*trace.Trace) {
	for _, tr := range list {
		t.Run(tr.Name, func(t *testing.T) {
			page := pageOf(tr)
			capacity := memory.Bytes(float64(tr.PeakLive) * 1.25)
			if page < 2*memory.MiB {
				capacity = memory.Bytes(float64(tr.PeakLive) * 2.1)
			}
			v := newFakeVirtual(t, page, capacity&^(page-1))
			a := newBlockOf(t, v, Config{}, capacity)
			p := newPlayer(a, tr)
			for range 3 {
				require.Equal(t, -1, p.pass(), "event that failed, of %d", len(tr.Events))
				check(t, a)
			}
			emptied(t, a, &v.fakeDriver)
		})
	}
}

func TestAQuarterMoreThanThePeakIsEnough(t *testing.T) { testTight(t, generated(t)) }

func TestAQuarterMoreThanThePeakIsEnoughForRecordedTraces(t *testing.T) { testTight(t, recorded(t)) }
