package hal

import (
	"context"
	"fmt"

	"github.com/halyard-go/halyard/hal/allocator/scope"
)

// Scope is the memory of one piece of code that runs again and again, such as a
// training step. Do runs it as a pass: what is allocated with the context that it gets
// is taken back when it returns, and the next pass gets it again. See package
// hal/allocator/scope.
type Scope = scope.Cache

// ScopeOptions are those of a [Scope]. The zero value keeps everything.
type ScopeOptions = scope.Options

// NewScope returns an empty scope for code that allocates on the devices, whose stacks
// must have a scope layer (as in "block+scope"): otherwise nothing would be taken back,
// so that is an error. Forgotten, it is freed by the garbage collector.
func NewScope(o ScopeOptions, devices ...*Device) (*Scope, error) {
	if len(devices) == 0 {
		return nil, invalid("a scope for no device")
	}
	for _, d := range devices {
		if !d.scoped {
			return nil, fmt.Errorf("hal: scope: %w by the stack %s: add scope to it, as %s+scope", ErrUnsupported, d.stack, d.stack)
		}
	}
	return scope.New(o), nil
}

// WithoutScope returns a context for results that outlive the pass: allocations made
// with it belong to none.
func WithoutScope(ctx context.Context) context.Context { return scope.Without(ctx) }
