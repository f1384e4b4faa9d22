package workload

import (
	"bytes"
	"encoding/binary"
	"hash/fnv"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/internal/trace"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// hash is the FNV-1a of all events.
func hash(t *trace.Trace) uint64 {
	h := fnv.New64a()
	for _, e := range t.Events {
		var b [17]byte
		binary.LittleEndian.PutUint64(b[0:], uint64(e.Bytes))
		binary.LittleEndian.PutUint32(b[8:], uint32(e.ID))
		binary.LittleEndian.PutUint32(b[12:], uint32(e.Stream))
		if e.Free {
			b[16] = 1
		}
		h.Write(b[:])
	}
	return h.Sum64()
}

func generate(t testing.TB, name string, o Options) *trace.Trace {
	t.Helper()
	w, ok := Get(name)
	require.True(t, ok)
	return w.Generate(o)
}

// Results of different days and machines are compared, so what a name and a
// seed mean must not drift. Change a hash only with the generator it belongs to.
func TestGolden(t *testing.T) {
	for _, tt := range []struct {
		name             string
		events           int
		peak             int64
		hash             uint64
		leftover         int
		streams          int
		least, most      int   // events at the default scale, other seeds too
		leastPeak, limit int64 // peak, other seeds too
	}{
		{"llama3-8b", 94736, 17633656300, 0xdc17b5cfe7b05d93, 196, 3, 60_000, 120_000, 15 * gib, 20 * gib},
		{"resnet50-train", 57789, 5773283464, 0xf14a4d213641ccc2, 481, 2, 40_000, 80_000, 4 * gib, 8 * gib},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tr := generate(t, tt.name, Options{Seed: 1})
			require.Equal(t, tt.events, len(tr.Events))
			require.Equal(t, tt.peak, tr.PeakLive)
			require.Equal(t, tt.hash, hash(tr), "hash %#x", hash(tr))

			require.Equal(t, tr, generate(t, tt.name, Options{Seed: 1, Scale: 1}), "scale 0 means 1")
			for seed := range uint64(4) {
				tr := generate(t, tt.name, Options{Seed: seed})
				require.Equal(t, seed == 1, hash(tr) == tt.hash, "seed %d", seed)
				require.Equal(t, tt.streams, tr.Streams)
				require.Len(t, tr.Leftover(), tt.leftover)
				require.Equal(t, int32(tt.leftover-1), tr.Leftover()[tt.leftover-1], "what stays comes first")
				require.True(t, tt.least <= len(tr.Events) && len(tr.Events) <= tt.most, "seed %d: %d events", seed, len(tr.Events))
				require.True(t, tt.leastPeak <= tr.PeakLive && tr.PeakLive <= tt.limit, "seed %d: peak %d", seed, tr.PeakLive)
			}
		})
	}
}

// What a workload generates is a trace by the rules of the file format.
func TestRoundTrip(t *testing.T) {
	for _, w := range List() {
		t.Run(w.Name, func(t *testing.T) {
			want := w.Generate(Options{Seed: 7, Scale: 2})
			var buf bytes.Buffer
			require.NoError(t, trace.Write(&buf, want))
			got, err := trace.Read(w.Name, &buf)
			require.NoError(t, err)
			require.Equal(t, want, got)
			require.Contains(t, got.Comments, "workload "+w.Name+", seed 7, scale 2")
			require.True(t, slices.ContainsFunc(got.Comments, func(c string) bool {
				return strings.HasPrefix(c, "SYNTHETIC")
			}), "generated traces say so")
		})
	}
}

// Scale makes a run longer and leaves the model alone.
func TestScale(t *testing.T) {
	for _, w := range List() {
		one, three := w.Generate(Options{Seed: 3}), w.Generate(Options{Seed: 3, Scale: 3})
		require.Greater(t, len(three.Events), 2*len(one.Events), w.Name)
		require.Equal(t, one.Leftover(), three.Leftover(), w.Name)
		require.InEpsilon(t, one.PeakLive, three.PeakLive, 0.25, w.Name)
	}
}

func TestOptions(t *testing.T) {
	require.NoError(t, Options{}.Validate())
	require.NoError(t, Options{Seed: 1<<64 - 1, Scale: MaxScale}.Validate())
	require.EqualError(t, Options{Scale: -1}.Validate(), "workload: scale -1 is outside 0 to 256")
	require.EqualError(t, Options{Scale: MaxScale + 1}.Validate(), "workload: scale 257 is outside 0 to 256")
	for _, w := range List() {
		require.Panics(t, func() { w.Generate(Options{Scale: -1}) })
	}
	for _, w := range List() {
		events := len(w.Generate(Options{}).Events)
		require.Less(t, events*MaxScale, trace.MaxEvents, "%s at the largest scale", w.Name)
	}
}

func TestListAndGet(t *testing.T) {
	list := List()
	require.True(t, slices.IsSortedFunc(list, func(a, b Workload) int { return strings.Compare(a.Name, b.Name) }))
	for _, w := range list {
		got, ok := Get(w.Name)
		require.True(t, ok)
		require.Equal(t, w.Name, got.Name)
		require.Equal(t, w.Name, w.Generate(Options{}).Name)
		require.NotEmpty(t, w.Summary)
		require.NotContains(t, w.Summary+w.Source, "\n")
		require.NotEmpty(t, w.Source)
	}
	for _, name := range []string{"", "llama", "LLAMA3-8B", "zzz"} {
		_, ok := Get(name)
		require.False(t, ok, name)
	}

	list[0].Name = "changed"
	_, ok := Get("llama3-8b")
	require.True(t, ok, "the list is the caller's own")
}

func TestConcurrent(t *testing.T) {
	w, _ := Get("resnet50-train")
	want := hash(w.Generate(Options{Seed: 5}))
	var wg sync.WaitGroup
	got := make([]uint64, 4)
	for i := range got {
		wg.Go(func() { got[i] = hash(w.Generate(Options{Seed: 5})) })
	}
	wg.Wait()
	for _, h := range got {
		require.Equal(t, want, h)
	}
}

// Each octave is as likely as another, and nothing lies outside.
func TestRollOctave(t *testing.T) {
	g := newGen(1)
	const rolls = 14_000
	var seen [7]int
	for range rolls {
		n := g.rollOctave(16, 7)
		require.True(t, 16 <= n && n < 2048, n)
		octave := 0
		for n >= 32 {
			n /= 2
			octave++
		}
		seen[octave]++
	}
	for octave, n := range seen {
		require.InDelta(t, rolls/7, n, 200, "octave %d", octave)
	}
}

// buffer is the life of one id.
type buffer struct {
	bytes       int64
	alloc, free int32 // streams; free is -1 for what stays
	at, until   int   // events
}

func buffers(t *trace.Trace) []buffer {
	all := make([]buffer, t.Allocs)
	for i, e := range t.Events {
		if e.Free {
			all[e.ID].free, all[e.ID].until = e.Stream, i
		} else {
			all[e.ID] = buffer{bytes: e.Bytes, alloc: e.Stream, free: -1, at: i, until: len(t.Events)}
		}
	}
	return all
}

func TestLlama(t *testing.T) {
	require.EqualValues(t, 2*mib, llamaBlockBytes)
	tr := generate(t, "llama3-8b", Options{Seed: 1})
	all := buffers(tr)

	var weights int64
	for _, id := range tr.Leftover() {
		weights += all[id].bytes
	}
	const parameters = 8_030_261_248 // as published
	require.Equal(t, int64(parameters*fp16+2*mib), weights, "and the rotary table")

	// Events by the streams of a buffer's life: staging crosses from 1 to 0,
	// logits from 0 to 2, the rest stays where it was allocated.
	lives := map[[2]int32]int{}
	for _, b := range all {
		if b.free >= 0 {
			lives[[2]int32{b.alloc, b.free}]++
		}
	}
	logits := lives[[2]int32{0, 2}] // one a step
	require.Greater(t, logits, 100)
	require.Equal(t, 5*logits, lives[[2]int32{1, 0}])
	require.Equal(t, 4*logits, lives[[2]int32{2, 2}])
	require.Greater(t, lives[[2]int32{0, 0}], 32*9*logits)
	require.Len(t, lives, 4)

	// Blocks of the cache come and go, never more than a full batch can use.
	// (An activation of prompts may have their size by chance, but lives short.)
	live, most, total := 0, 0, 0
	for _, e := range tr.Events {
		b := all[e.ID]
		if b.bytes != llamaBlockBytes || b.free < 0 || b.until-b.at < 600 {
			continue
		}
		if e.Free {
			live--
			continue
		}
		live++
		total++
		most = max(most, live)
	}
	require.Zero(t, live)
	require.Greater(t, total, most, "blocks are given back on the way")
	require.True(t, 100 < most && most <= llamaBatch*(2048+128)/llamaBlock, "%d blocks", most)
}

func TestResnet(t *testing.T) {
	// As published: 53 convolutions and 25.6 million parameters.
	run := &resnetTrainer{gen: newGen(1)}
	run.stem, run.blocks = resnetModel()
	run.persistent()
	convs := 0
	run.convs(func(*resnetConv) { convs++ })
	require.Equal(t, 53, convs)
	require.Len(t, run.blocks, 16)
	var parameters int64
	for _, bytes := range run.params {
		parameters += bytes / fp32
	}
	require.EqualValues(t, 25_557_032, parameters)

	// Side by side the shapes fit: what one block puts out the next takes in.
	channels, side := run.stem.out, run.stem.outSide/2
	for i, b := range run.blocks {
		require.Equal(t, []int64{channels, side}, []int64{b.convs[0].in, b.convs[0].inSide}, "block %d", i)
		require.Equal(t, i == 0 || b.convs[1].stride == 2, b.down != nil, "block %d", i)
		channels, side = b.convs[2].out, b.convs[2].outSide
	}
	require.Equal(t, []int64{2048, 7}, []int64{channels, side})

	tr := generate(t, "resnet50-train", Options{Seed: 1, Scale: 2})
	all := buffers(tr)
	labels := map[int64]int{}
	for _, b := range all {
		switch {
		case b.alloc == resnetUpload && b.free == resnetCompute && b.bytes < 1<<10:
			labels[b.bytes]++
		case b.alloc == resnetUpload && b.free == resnetUpload, b.alloc == resnetUpload && b.free == resnetCompute:
			n := b.bytes / (resnetColours * resnetImage * resnetImage)
			require.Contains(t, []int64{64, 40, 64 * 4, 40 * 4}, n)
		default:
			require.Equal(t, int32(resnetCompute), b.alloc)
			require.Contains(t, []int32{-1, resnetCompute}, b.free)
		}
	}
	require.Equal(t, map[int64]int{64 * 8: 61, 40 * 8: 3}, labels, "every 20th of 64 batches is small")
}

// What the forward pass keeps is freed in reverse: a result of the first stage
// outlives one of the last.
func TestResnetBackwardOrder(t *testing.T) {
	run := &resnetTrainer{gen: newGen(1)}
	run.stem, run.blocks = resnetModel()
	run.persistent()
	start := len(run.params)*2 + 53*3
	run.train(run.upload(0), 1, false)
	tr, err := run.b.Trace()
	require.NoError(t, err)
	require.Len(t, tr.Leftover(), start)

	all := buffers(tr)[start:]
	loss := all[slices.IndexFunc(all, func(b buffer) bool { return b.bytes == fp32 })]
	var kept []buffer // results that wait for the way back, in order of allocation
	for _, b := range all {
		if b.alloc == resnetCompute && b.at < loss.at && b.until > loss.at {
			kept = append(kept, b)
		}
	}
	require.Greater(t, len(kept), 4*53-4)
	inverted, pairs := 0, 0
	for i := range kept {
		for j := i + 1; j < len(kept); j++ {
			pairs++
			if kept[j].until > kept[i].until {
				inverted++
			}
		}
	}
	require.Less(t, inverted*20, pairs, "%d of %d pairs are not freed in reverse", inverted, pairs)
}

func TestCandidates(t *testing.T) {
	stem, blocks := resnetModel()
	require.Len(t, stem.candidates(1), 2)
	require.Len(t, blocks[0].convs[0].candidates(1), 1)
	c := blocks[0].convs[1] // 3x3, 64 channels, 56 pixels a side
	image := int64(64 * 56 * 56 * 4)
	require.Equal(t, []int64{
		9 * 56 * 56 * 4,
		9 * image,
		2*2*image*4 + 64*64*16*4,
		2*2*image*9/4 + 64*64*36*4,
	}, c.candidates(2))
}

func BenchmarkGenerate(b *testing.B) {
	for _, w := range List() {
		b.Run(w.Name, func(b *testing.B) {
			b.ReportAllocs()
			events := 0
			for b.Loop() {
				events = len(w.Generate(Options{Seed: 1}).Events)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(events), "ns/event")
		})
	}
}
