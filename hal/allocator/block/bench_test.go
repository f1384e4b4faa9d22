package block

import (
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/internal/trace"
)

// mutexPair is the time of an uncontended lock and unlock on this machine.
func mutexPair() float64 {
	best := time.Duration(1 << 62)
	const n = 1 << 20
	for range 5 {
		var mu sync.Mutex
		start := time.Now()
		for range n {
			mu.Lock()
			//lint:ignore SA2001 the pair is what is measured
			mu.Unlock()
		}
		best = min(best, time.Since(start))
	}
	return float64(best.Nanoseconds()) / n
}

func benchmarkTraces(b *testing.B) []*trace.Trace {
	if os.Getenv("HALYARD_TRACES") == "" {
		return generated(b)
	}
	return recorded(b)
}

// BenchmarkReplay replays traces warm: ns/event, the same as a ratio to a mutex
// pair, and bytes held over peak live bytes.
func BenchmarkReplay(b *testing.B) {
	pair := mutexPair()
	for _, mode := range []string{"pages", "slabs", "slabs-keep0"} {
		for _, tr := range benchmarkTraces(b) {
			b.Run(fmt.Sprintf("%s/%s", mode, tr.Name), func(b *testing.B) {
				var base allocator.Allocator
				c := Config{}
				switch mode {
				case "pages":
					base = newFakeVirtual(b, pageOf(tr), 0)
				case "slabs-keep0":
					c.Keep = -1
					fallthrough
				default:
					base = newFakeBase(b, 0)
				}
				a := newBlock(b, base, c)
				q := newTestQueue(b)
				p := newPlayer(a, tr)
				p.q = q.ID()
				require.Equal(b, -1, p.pass())
				b.ReportAllocs()
				for b.Loop() {
					p.pass()
				}
				event := float64(b.Elapsed().Nanoseconds()) / float64(b.N) / float64(len(tr.Events)+len(p.left))
				b.ReportMetric(event, "ns/event")
				b.ReportMetric(event/pair, "mutexes/event")
				b.ReportMetric(float64(a.Stats().PeakHeld)/float64(tr.PeakLive), "held/live")
			})
		}
	}
}

// BenchmarkMillion allocates and frees in an arena with a million live blocks and
// half a million free ones of mixed sizes.
func BenchmarkMillion(b *testing.B) {
	pair := mutexPair()
	a := newBlock(b, newFakeBase(b, 0), Config{})
	rng := rand.New(rand.NewPCG(1, 2))
	size := func() memory.Bytes { return memory.Bytes(256 * (1 + rng.IntN(200))) }
	blocks := make([]allocator.Block, 1<<20)
	for i := range blocks {
		blocks[i], _, _ = a.Allocate(request(size(), nil))
	}
	for i := 0; i < len(blocks); i += 2 {
		a.Free(blocks[i], queue.ReadyNow())
	}
	b.ReportAllocs()
	k := 0
	for b.Loop() {
		blk, _, _ := a.Allocate(request(size(), nil))
		a.Free(blocks[k|1], queue.ReadyNow())
		blocks[k|1] = blk
		k = (k + 7919*2) & (len(blocks) - 1)
	}
	event := float64(b.Elapsed().Nanoseconds()) / float64(b.N) / 2
	b.ReportMetric(event, "ns/event")
	b.ReportMetric(event/pair, "mutexes/event")
}
