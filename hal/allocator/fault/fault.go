// Package fault is the layer that fails on purpose: to see how a program, or the layers
// above, take it. It counts requests that reach it and decides for each.
//
//	vmm+fault:nth=100+block      the 100th request to the source fails, once
//	block+fault:every=1000       every 1,000th request of the program fails
//	block+fault:percent=1%,seed=7
//	raw+fault:cap=1GiB+block     as on a device of 1 GiB
//	block+fault:lost=5000        the device is lost at the 5,000th request
//
// A request that fails is as one that the driver refuses: the ladder is walked, and
// each time it asks again counts as a request. Frees never fail. Pages that a layer
// above maps for itself are requests too.
//
// Safe for concurrent use; one lock, a leaf.
package fault

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// Layer describes the layer to a registry.
var Layer = allocator.Layer{
	Table: Table,
	Mints: true,
	Pages: true,
	New: func(base allocator.Allocator, _ *allocator.Env, v *spec.Values) (allocator.Allocator, error) {
		return New(base, FromValues(v))
	},
}

// Table holds the options.
var Table = &spec.Table{
	Name:    "fault",
	Summary: "fails on purpose, for tests",
	Doc: `Counts the requests that reach it and fails some, as a driver that has no memory.
What the ladder asks again counts too. Frees never fail.`,
	Options: []spec.Option{
		{Name: "nth", Kind: spec.Count, Default: "0", Help: "the request that fails, once; 0 is none"},
		{Name: "every", Kind: spec.Count, Default: "0", Help: "each request whose number is a multiple of this fails; 0 is none"},
		{Name: "percent", Kind: spec.Percent, Default: "0%", Max: "100%", Help: "how likely a request is to fail"},
		{Name: "seed", Kind: spec.Count, Default: "0", Help: "of the chances"},
		{Name: "cap", Kind: spec.Size, Default: "*", Unlimited: true, Help: "requests beyond this many bytes out at a time fail"},
		{Name: "delay", Kind: spec.Duration, Default: "0s", Help: "how long each request takes at least"},
		{Name: "lost", Kind: spec.Count, Default: "0", Help: "the request from which on the device is lost; 0 is never"},
	},
	Validate: func(v *spec.Values) error {
		if (FromValues(v) == Config{Seed: FromValues(v).Seed, Cap: spec.UnlimitedSize}) {
			return errors.New("nothing is to fail, so it can't act (want nth, every, percent, cap, delay or lost)")
		}
		return nil
	},
}

// Config says what fails. Counts are of requests, from 1; 0 is never.
type Config struct {
	Nth, Every, Lost uint64
	Percent          float64
	Seed             uint64
	Cap              memory.Bytes // [spec.UnlimitedSize]: none
	Delay            time.Duration
}

// FromValues returns the configuration that parsed options stand for.
func FromValues(v *spec.Values) Config {
	return Config{
		Nth: uint64(v.Count("nth")), Every: uint64(v.Count("every")), Lost: uint64(v.Count("lost")),
		Percent: v.Percent("percent"), Seed: uint64(v.Count("seed")), Cap: v.Size("cap"), Delay: v.Duration("delay"),
	}
}

// Allocator is the layer. Safe for concurrent use.
type Allocator struct {
	allocator.Forward
	config Config

	mu    sync.Mutex
	rng   *rand.Rand
	calls uint64
	out   memory.Bytes // granted and not freed; counted only with a cap
	last  error
	stats allocator.Stats
}

var (
	_ allocator.Allocator     = (*Allocator)(nil)
	_ allocator.VirtualMemory = (*Allocator)(nil)
	_ allocator.LastErrorer   = (*Allocator)(nil)
)

// New returns the layer over base.
func New(base allocator.Allocator, c Config) (*Allocator, error) {
	if base == nil {
		return nil, errors.New("fault: no base to take memory from")
	}
	return &Allocator{Forward: allocator.Forward{Base: base}, config: c, rng: rand.New(rand.NewPCG(c.Seed, 0x6661756c74))}, nil
}

// ErrOnPurpose matches the error of every request that was made to fail.
var ErrOnPurpose = errors.New("failed on purpose")

// decide counts a request for size bytes and says how it goes. OK leaves size counted
// as out.
func (a *Allocator) decide(size memory.Bytes) allocator.Outcome {
	if a.config.Delay > 0 {
		time.Sleep(a.config.Delay)
	}
	c := &a.config
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls++
	n := a.calls
	chance := c.Percent > 0 && a.rng.Float64()*100 < c.Percent
	switch {
	case c.Lost > 0 && n >= c.Lost:
		a.stats.Failed++
		a.last = fmt.Errorf("fault: %w at request %d of %v: %w", ErrOnPurpose, n, size, queue.ErrLost)
		return allocator.Lost
	case n == c.Nth, c.Every > 0 && n%c.Every == 0, chance:
	case c.Cap != spec.UnlimitedSize && size > c.Cap-a.out:
	default:
		a.out += size
		return allocator.OK
	}
	a.stats.Failed++
	a.last = fmt.Errorf("fault: request %d, of %v, %w", n, size, ErrOnPurpose)
	return allocator.Exhausted
}

// returned counts size bytes back.
func (a *Allocator) returned(size memory.Bytes) {
	a.mu.Lock()
	a.out -= size
	a.mu.Unlock()
}

// Allocate implements [allocator.Allocator].
func (a *Allocator) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	if o := a.decide(r.Size); o != allocator.OK {
		return allocator.Block{}, queue.Frontier{}, o
	}
	b, f, o := a.Base.Allocate(r)
	if o != allocator.OK {
		a.returned(r.Size)
	}
	return b, f, o
}

// Free implements [allocator.Allocator]. What was asked for is what the cap counts.
func (a *Allocator) Free(b allocator.Block, after queue.Frontier) allocator.Outcome {
	size := memory.Bytes(0)
	if a.config.Cap != spec.UnlimitedSize && b.Keeper != nil {
		if i, o := b.Keeper.Ledger.Info(b.ID); o == allocator.OK {
			size = i.Asked
		}
	}
	o := a.Base.Free(b, after)
	if o == allocator.OK {
		a.returned(size)
	}
	return o
}

// Stats implements [allocator.Allocator]: what failed on purpose.
func (a *Allocator) Stats() allocator.Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stats
}

// LastError implements [allocator.LastErrorer].
func (a *Allocator) LastError() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last
}

// Virtual implements [allocator.VirtualMemory]: the base's, if it has any, whose
// growth is a request too.
func (a *Allocator) Virtual(heap int) allocator.Virtual {
	base, ok := allocator.As[allocator.VirtualMemory](a.Base)
	if !ok {
		return nil
	}
	v := base.Virtual(heap)
	if v == nil {
		return nil
	}
	return &virtual{v, a}
}

type virtual struct {
	allocator.Virtual
	fault *Allocator
}

// Grow implements [allocator.Virtual].
func (v *virtual) Grow(addr uint64, n int) allocator.Outcome {
	size := memory.Bytes(n) * v.Granularity()
	if o := v.fault.decide(size); o != allocator.OK {
		return o
	}
	o := v.Virtual.Grow(addr, n)
	if o != allocator.OK {
		v.fault.returned(size)
	}
	return o
}

// Shrink implements [allocator.Virtual].
func (v *virtual) Shrink(addr uint64, n int) allocator.Outcome {
	o := v.Virtual.Shrink(addr, n)
	if o == allocator.OK {
		v.fault.returned(memory.Bytes(n) * v.Granularity())
	}
	return o
}
