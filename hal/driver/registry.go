package driver

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/halyard-go/halyard/hal/spec"
)

// Registry finds drivers by name. Make one's own for tests; hal has the default.
// Safe for concurrent use.
type Registry struct {
	mu      sync.RWMutex
	drivers map[string]Driver
}

// Register adds a driver. A nil one, one without a name and a name already taken
// are errors.
func (r *Registry) Register(d Driver) error {
	if d == nil {
		return fmt.Errorf("driver: Register of a nil driver")
	}
	if err := d.Table().Check(); err != nil {
		return fmt.Errorf("driver: %w", err)
	}
	name := d.Table().Name
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, taken := r.drivers[name]; taken {
		return fmt.Errorf("driver: %q is registered already", name)
	}
	if r.drivers == nil {
		r.drivers = map[string]Driver{}
	}
	r.drivers[name] = d
	return nil
}

// Names lists the drivers, sorted.
func (r *Registry) Names() []string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	names := make([]string, 0, len(r.drivers))
	for n := range r.drivers {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Get returns the driver called name.
func (r *Registry) Get(name string) (Driver, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	d, ok := r.drivers[name]
	return d, ok
}

// help lists the drivers, a line each.
func (r *Registry) help() *spec.HelpRequest {
	lines := []string{"--device=NAME[:OPTIONS]; NAME:help shows a device's options"}
	for _, n := range r.Names() {
		d, _ := r.Get(n)
		lines = append(lines, fmt.Sprintf("  %s  %s", n, d.Table().Summary))
	}
	return &spec.HelpRequest{Text: strings.Join(lines, "\n")}
}

// Open opens the device that text names: NAME or NAME:OPTIONS. For help and NAME:help
// it returns a [*spec.HelpRequest].
func (r *Registry) Open(text string) (Device, error) {
	items, err := spec.Split(text)
	if err != nil {
		return nil, err
	}
	it := items[0]
	if len(items) > 1 {
		return nil, &spec.Error{Text: text, Column: items[1].Column, Width: len(items[1].Name), Msg: "one device at a time"}
	}
	d, ok := r.Get(it.Name)
	if it.Name == "help" && !ok {
		return nil, r.help()
	}
	if !ok {
		names := r.Names()
		return nil, &spec.Error{Text: text, Column: it.Column, Width: len(it.Name), Msg: fmt.Sprintf("unknown device %q", it.Name),
			Valid: names, Nearest: spec.Nearest(it.Name, names)}
	}
	values, err := d.Table().ParseAt(text, it)
	if errors.Is(err, spec.ErrHelp) {
		var b strings.Builder
		_ = d.Table().Help(&b) // a strings.Builder takes everything
		return nil, &spec.HelpRequest{Text: strings.TrimRight(b.String(), "\n")}
	}
	if err != nil {
		return nil, err
	}
	return d.Open(values)
}
