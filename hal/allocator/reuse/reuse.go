// Package reuse is the layer that decides, for a whole stack, on which grounds memory
// that issued work may still use is handed out again. It holds no memory and no lock;
// it says what each request allows, and the layers that keep memory, the ladder and
// the device go by that (see [allocator.Request.Reuse]).
//
//	block+reuse:wait=on          add a wait before taking more from the driver
//	block+reuse:ordered=off      only what the queue itself freed, or what is over
//
// A request that names grounds of its own (hal.Params.Reuse) can only narrow same,
// ordered and polled further; where wait is on, every request of a queue may wait.
package reuse

import (
	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

// Layer describes the layer to a registry.
var Layer = allocator.Layer{
	Table: &spec.Table{
		Name:    "reuse",
		Summary: "decides on which grounds memory still in use is handed out again",
		Doc: "Applies to the whole stack, wherever it stands; put it last. Memory in use that no ground\n" +
			"covers is passed over for other memory, or for more from the driver.",
		Options: []spec.Option{
			{Name: "same", Kind: spec.Bool, Default: "on", Help: "memory freed on the request's own queue"},
			{Name: "ordered", Kind: spec.Bool, Default: "on", Help: "memory whose uses the queue comes after, through semaphores"},
			{Name: "polled", Kind: spec.Bool, Default: "on", Help: "memory whose uses have been found to be over"},
			{Name: "wait", Kind: spec.Bool, Default: "off", Help: "memory in use elsewhere, with a wait added to the alloca"},
		},
	},
	Mints: true,
	Pages: true,
	New: func(base allocator.Allocator, _ *allocator.Env, v *spec.Values) (allocator.Allocator, error) {
		return New(base, Policy{
			NoSame: !v.Bool("same"), NoOrdered: !v.Bool("ordered"), NoPolled: !v.Bool("polled"), Wait: v.Bool("wait"),
		}), nil
	},
}

// Policy says which grounds are switched off, and whether waits may be added.
type Policy struct{ NoSame, NoOrdered, NoPolled, Wait bool }

// New makes the layer over base.
func New(base allocator.Allocator, p Policy) allocator.Allocator {
	l := &layer{Forward: allocator.Forward{Base: base}}
	for _, f := range []struct {
		on   bool
		flag allocator.Kind
	}{{p.NoSame, allocator.NoSame}, {p.NoOrdered, allocator.NoOrdered}, {p.NoPolled, allocator.NoPolled}, {p.Wait, allocator.MayWait}} {
		if f.on {
			l.flags |= f.flag
		}
	}
	return l
}

// layer narrows the grounds of each request. That waits may be added it leaves to the
// stack and the device, which know whether there is an operation to add one to.
type layer struct {
	allocator.Forward
	flags allocator.Kind
}

// Allocate implements [allocator.Allocator].
func (l *layer) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	r.Kind |= l.flags &^ allocator.MayWait // which only who can add a wait may ask for
	return l.Base.Allocate(r)
}

// Grounds implements [allocator.Policy].
func (l *layer) Grounds() allocator.Kind { return l.flags }
