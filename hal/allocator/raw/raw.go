// Package raw is the source that makes one plain call of the driver for each
// allocation and each free: cuMemAlloc and cuMemFree, say.
//
// Use it where requests are few and large, as under a suballocator, or to see what
// the other sources are better than. On most devices a plain allocation is slow and
// a plain free waits for all work.
//
//	--device_allocator=raw
//
// It has no options. Memory goes back to the driver when its frontier is reached,
// not before; until then it is pending. The frontier of a fresh block is
// [queue.ReadyNow]. A block's Size is what the driver took for it.
package raw

import (
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/internal/source"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/spec"
)

// Source takes memory with plain driver calls. Safe for concurrent use.
type Source struct{ source.Source }

var _ allocator.Allocator = (*Source)(nil)

// Layer describes the source to a registry.
var Layer = allocator.Layer{
	Table: &spec.Table{
		Name:    "raw",
		Summary: "one plain driver call for each allocation and each free",
		Doc:     "Simple and exact, and slow on most devices. Best under a layer that takes memory in large pieces.",
	},
	Source: true,
	Mints:  true,
	New: func(base allocator.Allocator, env *allocator.Env, _ *spec.Values) (allocator.Allocator, error) {
		d, err := source.Device[driver.Raw](base, env, "raw")
		if err != nil {
			return nil, err
		}
		return open(env, d), nil
	},
}

// New makes the source. The environment's device must be a [driver.Raw].
func New(env *allocator.Env) (*Source, error) {
	d, err := source.Device[driver.Raw](nil, env, "raw")
	if err != nil {
		return nil, err
	}
	return open(env, d), nil
}

func open(env *allocator.Env, d driver.Raw) *Source {
	s := &Source{}
	source.Init(&s.Source, env, source.Raw{Source: &s.Source, Driver: d})
	return s
}
