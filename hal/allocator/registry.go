package allocator

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"unicode/utf8"

	"github.com/halyard-go/halyard/hal/spec"
)

// Layer describes a kind of layer to a [Registry].
type Layer struct {
	// Table names it and its options: the only source of parsing, help and docs.
	Table *spec.Table
	// Source says that it takes memory from the driver: it is innermost, and its base is nil.
	Source bool
	// Mints says that each block it hands out is a new handle: it mints them itself,
	// or passes on what its base handed out for this very request. A layer that keeps
	// blocks and hands them out again with the handles they had must not say so; the
	// stack then mints above it.
	Mints bool
	// Slabs says that it takes memory in large pieces and hands out parts. Right above
	// the source it decides which source is the default: see [Registry.Build].
	Slabs bool
	// Pages says that it lets a layer above have the pages of a source below, or counts
	// them itself: the default source is chosen as if it were not there.
	Pages bool
	// Last says that no layer can stand above it: it takes back handles by itself, and
	// one above would have given out others.
	Last bool
	// New makes the layer. It takes nothing from the device yet.
	New func(base Allocator, env *Env, options *spec.Values) (Allocator, error)
}

// Registry finds layers by name. Safe for concurrent use. The zero value is empty;
// make one's own for tests, or take hal's default one.
type Registry struct {
	mu      sync.RWMutex
	layers  map[string]Layer
	presets []Preset
}

// Preset is a stack with a name: preset:NAME stands for it in a spec.
type Preset struct {
	Name, Summary, Spec string
}

// RegisterPreset adds a preset. Its spec must be one that the registry reads.
func (r *Registry) RegisterPreset(p Preset) error {
	if !spec.ValidName(p.Name) {
		return fmt.Errorf("allocator: %q can't name a preset", p.Name)
	}
	if _, err := r.parse(p.Spec); err != nil {
		return fmt.Errorf("allocator: preset %s: %w", p.Name, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.ContainsFunc(r.presets, func(q Preset) bool { return q.Name == p.Name }) {
		return fmt.Errorf("allocator: preset %q is registered already", p.Name)
	}
	r.presets = append(r.presets, p)
	return nil
}

// Presets lists the presets in the order in which they were registered.
func (r *Registry) Presets() []Preset {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Clone(r.presets)
}

// expand returns the layers of the preset that an item names.
func (r *Registry) expand(text string, it spec.Item) ([]parsedLayer, error) {
	var names []string
	for _, p := range r.Presets() {
		if p.Name == it.Options {
			return r.parse(p.Spec)
		}
		names = append(names, p.Name)
	}
	if it.Options == "help" {
		return nil, r.help("")
	}
	e := &spec.Error{Text: text, Column: it.Column, Width: utf8.RuneCountInString(it.String()), Msg: fmt.Sprintf("unknown preset %q", it.Options),
		Valid: names, Nearest: spec.Nearest(it.Options, names)}
	if it.Options == "" {
		e.Msg = "preset of what name?"
	}
	return nil, e
}

// Register adds a kind of layer. A missing table, name or constructor and a name
// already taken are errors.
func (r *Registry) Register(l Layer) error {
	if l.Table == nil || l.Table.Name == "" || l.New == nil {
		return errors.New("allocator: Register of a layer without a table, a name or a constructor")
	}
	if err := l.Table.Check(); err != nil {
		return fmt.Errorf("allocator: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, taken := r.layers[l.Table.Name]; taken {
		return fmt.Errorf("allocator: %q is registered already", l.Table.Name)
	}
	if r.layers == nil {
		r.layers = map[string]Layer{}
	}
	r.layers[l.Table.Name] = l
	return nil
}

// MustRegister is Register for program start-up: it panics on an error.
func (r *Registry) MustRegister(layers ...Layer) {
	for _, l := range layers {
		if err := r.Register(l); err != nil {
			panic(err)
		}
	}
}

// Layers lists what is registered, sources first, then by name.
func (r *Registry) Layers() []Layer {
	r.mu.RLock()
	defer r.mu.RUnlock()
	list := make([]Layer, 0, len(r.layers))
	for _, l := range r.layers {
		list = append(list, l)
	}
	slices.SortFunc(list, func(a, b Layer) int {
		switch {
		case a.Source != b.Source && a.Source:
			return -1
		case a.Source != b.Source:
			return 1
		case a.Table.Name < b.Table.Name:
			return -1
		}
		return 1
	})
	return list
}

// Get returns the layer called name.
func (r *Registry) Get(name string) (Layer, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	l, ok := r.layers[name]
	return l, ok
}

func (r *Registry) names() []string {
	var names []string
	for _, l := range r.Layers() {
		names = append(names, l.Table.Name)
	}
	return names
}
