package allocator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// Stack is the layers of one device, innermost first, and the ladder that is
// walked when they have no memory. Safe for concurrent use.
type Stack struct {
	env    *Env
	layers []namedLayer
	top    Allocator
	policy Kind // flags that layers add to every request
	unsent func() memory.Bytes

	reclaimers  atomic.Pointer[[]*Reclaimer]
	reclaiming  atomic.Bool
	closed      atomic.Bool
	rungsWalked [rungCount]atomic.Uint64
}

type namedLayer struct {
	name string
	text string // canonical spec
	Allocator
}

// Build makes the stack that specs describe, innermost first. Each spec is one
// layer or several joined by '+'. Without any, the stack is block over the
// device's best source. A list that doesn't begin with a source gets one put
// under it: the device's best to suballocate from if the innermost layer (but for
// those that let pages through) takes slabs, else its best for requests as they come.
//
// Errors are [*spec.Error], which show the place, or of a layer's constructor.
func (r *Registry) Build(env *Env, specs ...string) (*Stack, error) {
	if len(specs) == 0 {
		specs = []string{"block"}
	}
	parsed, err := r.parse(specs...)
	if err != nil {
		return nil, err
	}
	info := env.Device.Info()
	if !parsed[0].layer.Source {
		name := info.Direct
		first := slices.IndexFunc(parsed, func(p parsedLayer) bool { return !p.layer.Pages })
		if first >= 0 && parsed[first].layer.Slabs && len(info.Sources) > 0 {
			name = info.Sources[0]
		}
		if name == "" {
			name = "raw"
		}
		source, err := r.parse(name)
		if err != nil {
			return nil, fmt.Errorf("allocator: the device's source: %w", err)
		}
		parsed = append(source, parsed...)
	}
	if name := parsed[0].layer.Table.Name; !slices.Contains(info.Sources, name) && len(info.Sources) > 0 && slices.Contains(standardSources, name) {
		return nil, &spec.Error{Text: parsed[0].text, Column: parsed[0].item.Column, Width: len(name),
			Msg: fmt.Sprintf("device %s has no source %q", info.Name, name), Valid: info.Sources}
	}
	s := &Stack{env: env, unsent: func() memory.Bytes { return 0 }}
	for _, p := range parsed {
		if err := s.add(p.layer, p.values, env); err != nil {
			_ = s.Close()
			return nil, fmt.Errorf("allocator: %s: %w", p.layer.Table.Name, err)
		}
	}
	if last := parsed[len(parsed)-1].layer; !last.Mints {
		if err := s.add(Mint, mustParse(Mint.Table, ""), env); err != nil {
			return nil, err
		}
	}
	return s, nil
}

var standardSources = []string{"raw", "pool", "vmm"}

func mustParse(t *spec.Table, options string) *spec.Values {
	v, err := t.Parse(options)
	if err != nil {
		panic(err)
	}
	return v
}

func (s *Stack) add(l Layer, v *spec.Values, env *Env) error {
	a, err := l.New(s.top, env, v)
	if err != nil {
		return err
	}
	s.layers = append(s.layers, namedLayer{l.Table.Name, v.String(), a})
	s.top = a
	if p, ok := a.(Policy); ok {
		s.policy |= p.Grounds()
	}
	return nil
}

type parsedLayer struct {
	text   string
	item   spec.Item
	layer  Layer
	values *spec.Values
}

// parse reads specs without making anything. They are read as one text, so that an
// error shows the whole stack.
func (r *Registry) parse(specs ...string) ([]parsedLayer, error) {
	text := strings.Join(specs, "+")
	items, err := spec.Split(text)
	if err != nil {
		return nil, err
	}
	var out []parsedLayer
	for i, it := range items {
		l, ok := r.Get(it.Name)
		if it.Name == "preset" && !ok && len(r.Presets()) > 0 {
			layers, err := r.expand(text, it)
			if err != nil {
				return nil, err
			}
			if layers[0].layer.Source && len(out) > 0 {
				return nil, &spec.Error{Text: text, Column: it.Column, Width: len(it.Name),
					Msg: fmt.Sprintf("preset:%s begins with a source: it must be the first item", it.Options)}
			}
			out = append(out, layers...)
			continue
		}
		if it.Name == "help" && !ok {
			return nil, r.help("")
		}
		if !ok {
			names := r.names()
			return nil, &spec.Error{Text: text, Column: it.Column, Width: len(it.Name),
				Msg: fmt.Sprintf("unknown allocator %q", it.Name), Valid: names, Nearest: spec.Nearest(it.Name, names)}
		}
		v, err := l.Table.ParseAt(text, it)
		if errors.Is(err, spec.ErrHelp) {
			return nil, r.help(it.Name)
		}
		if err != nil {
			return nil, err
		}
		if l.Source && len(out) > 0 {
			return nil, &spec.Error{Text: text, Column: it.Column, Width: len(it.Name),
				Msg: fmt.Sprintf("%s is a source: it must be the first layer", it.Name)}
		}
		if l.Last && i < len(items)-1 {
			return nil, &spec.Error{Text: text, Column: it.Column, Width: len(it.Name),
				Msg: fmt.Sprintf("%s must be the last layer: it takes handles back, and %s above it would have given out others", it.Name, items[i+1].Name)}
		}
		out = append(out, parsedLayer{text, it, l, v})
	}
	return out, nil
}

// String is the effective stack as a spec: what Build would read to the same effect.
func (s *Stack) String() string {
	parts := make([]string, len(s.layers))
	for i, l := range s.layers {
		parts[i] = l.text
	}
	return strings.Join(parts, "+")
}

// Policy is the flags that layers of the stack add to every request. Who calls
// [Stack.Top] by itself adds them first.
func (s *Stack) Policy() Kind { return s.policy }

// Top is the outermost layer: what the hot path calls.
func (s *Stack) Top() Allocator { return s.top }

// SetUnsent tells the stack how to ask for the bytes whose release was submitted
// but waits for what nobody has signalled yet, for its reports.
func (s *Stack) SetUnsent(f func() memory.Bytes) { s.unsent = f }

// LayerStats are one layer's name, its spec in full, and its figures.
type LayerStats struct {
	Layer string `json:"layer"`
	Spec  string `json:"spec"`
	Stats
}

// Stats returns the figures of every layer, outermost first.
func (s *Stack) Stats() []LayerStats {
	out := make([]LayerStats, 0, len(s.layers))
	for _, l := range slices.Backward(s.layers) {
		out = append(out, LayerStats{l.name, l.text, l.Stats()})
	}
	return out
}

// Source returns the figures of the innermost layer: what the driver was asked.
func (s *Stack) Source() Stats { return s.layers[0].Stats() }

// ResetPeaks sets every layer's peaks to its present values.
func (s *Stack) ResetPeaks() {
	for _, l := range s.layers {
		if p, ok := l.Allocator.(PeakResetter); ok {
			p.ResetPeaks()
		}
	}
}

// Check verifies the structures of every layer that can ([Checker]): for tests, and
// for a report of something strange. Its cost is a walk over every block.
func (s *Stack) Check() error {
	var errs []error
	for _, l := range slices.Backward(s.layers) {
		if c, ok := l.Allocator.(Checker); ok {
			if err := c.Check(); err != nil {
				errs = append(errs, fmt.Errorf("allocator: %s: %w", l.text, err))
			}
		}
	}
	return errors.Join(errs...)
}

// Trim gives idle memory back to the driver, outermost layer first, until at most
// keep bytes are idle in each layer, and returns how much the driver got. With
// wait it first waits for what is idle but still in use by issued work, until ctx
// is done.
func (s *Stack) Trim(ctx context.Context, keep memory.Bytes, wait bool) (memory.Bytes, error) {
	before := s.Source().Held
	s.trim(keep)
	var err error
	for wait && err == nil {
		pending := s.pending()
		for _, p := range pending {
			if err = p.after.Wait(ctx); err != nil {
				break
			}
		}
		s.trim(keep) // also where nothing is pending any more: it was, a moment ago
		if len(pending) == 0 {
			break
		}
	}
	return max(0, before-s.Source().Held), err
}

// trim trims every layer, outermost first, and returns what they gave in all.
func (s *Stack) trim(keep memory.Bytes) (gave memory.Bytes) {
	for _, l := range slices.Backward(s.layers) {
		gave += l.Trim(keep)
	}
	return gave
}

// Close gives all idle memory back and closes the layers, outermost first. What is
// live stays its holder's to free. Idempotent.
func (s *Stack) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	var errs []error
	for _, l := range slices.Backward(s.layers) {
		if err := l.Close(); err != nil {
			errs = append(errs, fmt.Errorf("allocator: closing %s: %w", l.text, err))
		}
	}
	return errors.Join(errs...)
}

type pendingBytes struct {
	after queue.Frontier
	size  memory.Bytes
}

// maxPending bounds how many pending frees one rung looks at.
const maxPending = 1024

// pending lists idle memory that waits for issued work, oldest first within a layer.
func (s *Stack) pending() []pendingBytes {
	var out []pendingBytes
	for _, l := range s.layers {
		if p, ok := l.Allocator.(Idler); ok {
			n := 0
			p.Pending(func(f queue.Frontier, size memory.Bytes) bool {
				out = append(out, pendingBytes{f, size})
				n++
				return n < maxPending
			})
		}
	}
	return out
}

// FreeLive frees everything that is still handed out, outermost layer first, so
// that a layer's own idle blocks are not taken for leaks of the one below. each is
// told of a block before it is freed.
func (s *Stack) FreeLive(each func(b Block, i Info)) {
	for _, l := range slices.Backward(s.layers) {
		lister, ok := l.Allocator.(LiveLister)
		if ok {
			lister.Live(func(b Block, i Info) bool {
				each(b, i)
				s.top.Free(b, queue.ReadyNow())
				return true
			})
		}
		l.Trim(0)
	}
}
