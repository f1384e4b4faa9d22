package workload

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/halyard-go/halyard/internal/trace"
)

// MaxScale is the largest [Options.Scale]; it keeps every workload well within
// [trace.MaxEvents].
const MaxScale = 256

// Options choose one trace among those of a workload. The zero value is valid.
type Options struct {
	// Seed is the only source of chance. Any value is as good as another.
	Seed uint64
	// Scale multiplies the length of the run (the requests served, the batches
	// trained on), not the size of the model. 0 means 1.
	Scale int
}

// Validate reports a scale outside 0 to [MaxScale].
func (o Options) Validate() error {
	if o.Scale < 0 || o.Scale > MaxScale {
		return fmt.Errorf("workload: scale %d is outside 0 to %d", o.Scale, MaxScale)
	}
	return nil
}

// Workload is one entry of the table.
type Workload struct {
	Name    string // as given to [Get]
	Summary string // one line: what runs, and on which streams
	Source  string // where the shapes are published

	// Generate returns the trace for the options. It panics if they are not
	// valid: whoever takes them from outside calls [Options.Validate] first.
	Generate func(Options) *trace.Trace
}

// table holds the workloads in order of name.
var table = []Workload{
	define("llama3-8b",
		"Llama-3-8B fp16 serving: continuous batching, paged KV cache; streams 0 compute, 1 input staging, 2 sampling",
		"Llama 3 model configuration (Meta, 2024); KV cache in blocks after PagedAttention (Kwon et al., SOSP 2023)",
		llama),
	define("resnet50-train",
		"ResNet-50 fp32 training: batches of 64 with every 20th of 40; streams 0 compute, 1 input upload",
		"Deep Residual Learning for Image Recognition, table 1 (He et al., CVPR 2016); stride in the 3x3 convolution",
		resnet),
}

// List returns all workloads in order of name.
func List() []Workload { return slices.Clone(table) }

// Get returns the workload called name.
func Get(name string) (Workload, bool) {
	i, ok := slices.BinarySearchFunc(table, name, func(w Workload, name string) int {
		return strings.Compare(w.Name, name)
	})
	if !ok {
		return Workload{}, false
	}
	return table[i], true
}

// define makes a table entry of a function that adds the events of a run.
func define(name, summary, source string, run func(g *gen, scale int)) Workload {
	return Workload{Name: name, Summary: summary, Source: source, Generate: func(o Options) *trace.Trace {
		if err := o.Validate(); err != nil {
			panic(err)
		}
		scale := max(o.Scale, 1)
		g := newGen(o.Seed)
		g.b.Name = name
		g.b.Comments = []string{
			"source: generated from published model shapes: " + source,
			"licence: own work",
			"unit: bytes; " + summary,
			"SYNTHETIC: shapes are published, the sequence is generated",
			fmt.Sprintf("workload %s, seed %d, scale %d", name, o.Seed, scale),
		}
		run(g, scale)
		t, err := g.b.Trace()
		if err != nil {
			panic(err)
		}
		return t
	}}
}

// Sizes of an element, in bytes.
const (
	fp16      = 2
	fp32      = 4
	int32Size = 4
	int64Size = 8
)

// gen is what a generator works with: a trace in the making and its dice. An
// event that the trace refuses is a mistake of the generator, hence a panic.
type gen struct {
	b   trace.Builder
	rng *rand.Rand
}

// id names a buffer.
type id = int32

func newGen(seed uint64) *gen {
	return &gen{rng: rand.New(rand.NewPCG(seed, 0x48616c79617264))}
}

// alloc allocates bytes on a stream.
func (g *gen) alloc(bytes int64, stream int32) id {
	x, err := g.b.Alloc(bytes, stream)
	if err != nil {
		panic(err)
	}
	return x
}

// free frees buffers, in the order given, on a stream.
func (g *gen) free(stream int32, buffers ...id) {
	for _, x := range buffers {
		if err := g.b.Free(x, stream); err != nil {
			panic(err)
		}
	}
}

// roll returns a number from 0 to n-1.
func (g *gen) roll(n int64) int64 { return int64(g.rng.Uint64N(uint64(n))) }

// rollOctave returns a number from least to least<<octaves - 1 that falls into
// each of the octaves equally often: a log-uniform distribution in steps, which
// needs no floating point and so is the same everywhere.
func (g *gen) rollOctave(least int64, octaves int64) int64 {
	low := least << g.roll(octaves)
	return low + g.roll(low)
}
