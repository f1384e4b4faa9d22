package allocator

import (
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
)

// Forward is a layer that changes nothing: embed it, with Base set, and write only
// the methods that your decorator changes. It holds no memory of its own, so Trim
// and Close have nothing to do (the stack trims and closes the base itself) and
// Stats says nothing. It passes on the handles of its base, so a layer made of it
// may say [Layer].Mints as long as it doesn't keep blocks.
//
// It lets every capability of its base through. A decorator that counts memory, or
// changes it, must not be walked past: give it a Pass method that returns nil.
type Forward struct{ Base Allocator }

// Allocate implements [Allocator].
func (f Forward) Allocate(r Request) (Block, queue.Frontier, Outcome) { return f.Base.Allocate(r) }

// Free implements [Allocator].
func (f Forward) Free(b Block, after queue.Frontier) Outcome { return f.Base.Free(b, after) }

// Trim implements [Allocator].
func (f Forward) Trim(memory.Bytes) memory.Bytes { return 0 }

// Stats implements [Allocator].
func (f Forward) Stats() Stats { return Stats{} }

// Close implements [Allocator].
func (f Forward) Close() error { return nil }

// Pass implements [Passer].
func (f Forward) Pass(any) Allocator { return f.Base }
