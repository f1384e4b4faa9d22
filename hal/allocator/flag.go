package allocator

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/halyard-go/halyard/hal/spec"
)

// EnvironmentVariable names the stack where no flag does.
const EnvironmentVariable = "HALYARD_DEVICE_ALLOCATOR"

// Flag is the --device_allocator flag: a repeatable flag.Value, and pflag.Value,
// of allocator specs, innermost first. Make it with [Registry.Flag].
type Flag struct {
	registry *Registry
	specs    []string
	help     *HelpRequest
}

// Flag returns a flag whose values are checked against r when they are set.
func (r *Registry) Flag() *Flag { return &Flag{registry: r} }

// Set adds a spec. The values help and NAME:help are accepted here, because the
// flag package makes text of an error; [Flag.Specs] then returns the [*HelpRequest].
func (f *Flag) Set(text string) error {
	_, err := f.registry.parse(text)
	if help, ok := errors.AsType[*HelpRequest](err); ok {
		f.help = help
		return nil
	}
	if err != nil {
		return err
	}
	f.specs = append(f.specs, text)
	return nil
}

// String is the specs joined.
func (f *Flag) String() string {
	if f == nil {
		return ""
	}
	return strings.Join(f.specs, "+")
}

// Type is the type's name in help.
func (f *Flag) Type() string { return "spec" }

// Get returns the specs; it makes Flag a flag.Getter.
func (f *Flag) Get() any { return f.specs }

// Usage is a line of help for the flag.
func (f *Flag) Usage() string {
	return "allocator stack, innermost first, as NAME[:OPTIONS]; repeatable, or joined by '+'; \"help\" lists them (environment: " + EnvironmentVariable + ")"
}

// Specs returns the stack asked for: the flag's, else that of the environment
// variable HALYARD_DEVICE_ALLOCATOR if it isn't empty, else none, which means the
// default. It returns a [*HelpRequest] where help was asked for, and an error where
// the layers can't be put together in this order. This is the only place where
// Halyard reads the environment.
func (f *Flag) Specs() ([]string, error) {
	if f.help != nil {
		return nil, f.help
	}
	if len(f.specs) > 0 {
		if _, err := f.registry.parse(f.specs...); err != nil {
			return nil, err
		}
		return slices.Clone(f.specs), nil
	}
	text := os.Getenv(EnvironmentVariable)
	if text == "" {
		return nil, nil
	}
	if _, err := f.registry.parse(text); err != nil {
		if errors.Is(err, spec.ErrHelp) {
			return nil, err
		}
		return nil, fmt.Errorf("%s: %w", EnvironmentVariable, err)
	}
	return []string{text}, nil
}

// HelpRequest is the error of a spec that asks for help: its text is what was asked
// for, without a newline at the end. A program that offers the flag prints it and
// exits 0.
type HelpRequest = spec.HelpRequest

func (r *Registry) help(layer string) *HelpRequest {
	var b strings.Builder
	if l, ok := r.Get(layer); ok {
		_ = l.Table.Help(&b) // a strings.Builder takes everything
	} else {
		r.Help(&b)
	}
	return &HelpRequest{Text: strings.TrimRight(b.String(), "\n")}
}

// Help lists the layers, a line each, and the grammar.
func (r *Registry) Help(w io.Writer) {
	fmt.Fprintln(w, "--device_allocator=NAME[:OPTIONS], repeatable, innermost first; or one value NAME[:OPTIONS]+NAME[:OPTIONS]…")
	fmt.Fprintln(w, "The first may be a source; without one the device's best is used. Default: block.")
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, l := range r.Layers() {
		kind := "layer"
		if l.Source {
			kind = "source"
		}
		fmt.Fprintf(tw, "  %s\t%s\t%s\n", l.Table.Name, kind, l.Table.Summary)
	}
	_ = tw.Flush()
	fmt.Fprintln(w, "\nNAME:help shows a layer's options.")
	presets := r.Presets()
	if len(presets) == 0 {
		return
	}
	fmt.Fprintln(w, "\nOr a preset, which stands for a stack:")
	fmt.Fprintln(w)
	for _, p := range presets {
		fmt.Fprintf(tw, "  preset:%s\t%s\t%s\n", p.Name, p.Summary, p.Spec)
	}
	_ = tw.Flush()
	fmt.Fprintln(w)
}
