package haltest_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/block"
	"github.com/halyard-go/halyard/hal/allocator/raw"
	"github.com/halyard-go/halyard/hal/haltest"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// wrong are decorators with a mistake that [haltest.Attack] must find.
var wrong = map[string]func(allocator.Forward) allocator.Allocator{
	"frees-at-once":   func(f allocator.Forward) allocator.Allocator { return hasty{f} },
	"leaks":           func(f allocator.Forward) allocator.Allocator { return &leaky{Forward: f} },
	"hoards":          func(f allocator.Forward) allocator.Allocator { return &hoarder{Forward: f} },
	"misaligns":       func(f allocator.Forward) allocator.Allocator { return misaligned{f} },
	"grants-too-much": func(f allocator.Forward) allocator.Allocator { return generous{f} },
}

// leaky forgets every fifth free.
type leaky struct {
	allocator.Forward
	n int
}

func (l *leaky) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	if l.n++; l.n%5 == 0 {
		return allocator.OK
	}
	return l.Base.Free(b, after)
}

// hoarder keeps one block and hands it out again whatever still uses it.
type hoarder struct {
	allocator.Forward
	mu   sync.Mutex
	kept []allocator.Block
}

func (h *hoarder) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, b := range h.kept {
		if b.Size >= r.Size && b.Addr&uint64(r.Kind.Align()-1) == 0 && r.Kind.Heap() == 0 {
			h.kept = append(h.kept[:i], h.kept[i+1:]...)
			return b, queue.ReadyNow(), allocator.OK
		}
	}
	return h.Base.Allocate(r)
}

func (h *hoarder) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.kept) == 0 && b.Size > 0 {
		h.kept = append(h.kept, b)
		return allocator.OK
	}
	return h.Base.Free(b, after)
}

func (h *hoarder) Trim(memory.Bytes) (gave memory.Bytes) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range h.kept {
		h.Base.Free(b, queue.ReadyNow())
		gave += b.Size
	}
	h.kept = nil
	return gave
}

// misaligned asks for less alignment than it was asked for.
type misaligned struct{ allocator.Forward }

func (m misaligned) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	r.Kind = allocator.MakeKind(r.Kind.Heap(), 16, r.Kind.Usage(), r.Kind.Access(), 0)
	return m.Base.Allocate(r)
}

// generous says that a block is larger than it is.
type generous struct{ allocator.Forward }

func (g generous) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	b, f, o := g.Base.Allocate(r)
	b.Size *= 2
	return b, f, o
}

// counter is a decorator with no mistake: it counts, and passes all else on.
type counter struct {
	allocator.Forward
	mu sync.Mutex
	n  int
}

func (c *counter) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	c.mu.Lock()
	c.n++
	c.mu.Unlock()
	return c.Base.Allocate(r)
}

func TestAttackHasNothingAgainstWhatIsRight(t *testing.T) {
	layers := &allocator.Registry{}
	layers.MustRegister(raw.Layer, block.Layer, allocator.Mint, allocator.Layer{
		Table: &spec.Table{Name: "counter", Summary: "counts requests"},
		New: func(base allocator.Allocator, _ *allocator.Env, _ *spec.Values) (allocator.Allocator, error) {
			return &counter{Forward: allocator.Forward{Base: base}}, nil
		},
	})
	setup := haltest.Setup{Allocators: layers, Stack: func(t *rapid.T) string {
		return rapid.SampledFrom([]string{"raw+counter", "raw+counter+block", "raw+block+counter", "counter"}).Draw(t, "stack")
	}}
	rapid.Check(t, func(t *rapid.T) { haltest.Attack(t, setup) })
}

// The test runs itself once for each wrong decorator, and wants that run to fail.
func TestAttackFindsWhatIsWrong(t *testing.T) {
	if name := os.Getenv("HALTEST_WRONG"); name != "" {
		layers := &allocator.Registry{}
		layers.MustRegister(raw.Layer, block.Layer, allocator.Mint, allocator.Layer{
			Table: &spec.Table{Name: "wrong", Summary: name},
			New: func(base allocator.Allocator, _ *allocator.Env, _ *spec.Values) (allocator.Allocator, error) {
				return wrong[name](allocator.Forward{Base: base}), nil
			},
		})
		setup := haltest.Setup{Allocators: layers, Stack: func(t *rapid.T) string {
			return rapid.SampledFrom([]string{"raw+wrong", "raw+wrong+block", "raw+block+wrong"}).Draw(t, "stack")
		}}
		rapid.Check(t, func(t *rapid.T) { haltest.Attack(t, setup) })
		return
	}
	for name := range wrong {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestAttackFindsWhatIsWrong$", "-rapid.nofailfile", "-rapid.shrinktime=1s", "-rapid.checks=2000")
			cmd.Env = append(os.Environ(), "HALTEST_WRONG="+name)
			out, err := cmd.CombinedOutput()
			require.Error(t, err, "nothing was found:\n%s", out)
			require.Contains(t, string(out), "[rapid]", "%s", out)
			_, why, _ := strings.Cut(string(out), "tests: ")
			first, _, _ := strings.Cut(why, "\n")
			fmt.Printf("%-16s %.120s\n", name, first)
		})
	}
}
