package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/spec"
)

func (a *app) allocatorsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "allocators [NAME]",
		Short: "List the allocator layers, or show one's options",
		Long: `allocators lists the layers that --device_allocator composes and how it is
written. With NAME it shows the layer's options: type, default, range and help.

With --format=json each layer is one object a line.`,
		Example: `  halyard allocators
  halyard allocators caching`,
	}
	f := formatFlag(c, "text for people, or json")
	c.RunE = func(c *cobra.Command, args []string) error {
		layers := a.allocators.Layers()
		switch {
		case len(args) > 1:
			return usage(c.CommandPath(), "one NAME at a time, got %q too", args[1])
		case len(args) == 1:
			l, ok := a.allocators.Get(args[0])
			if !ok {
				names := layerNames(layers)
				return usage(c.CommandPath(), "unknown allocator %q (valid: %s)%s", args[0], strings.Join(names, ", "), didYouMean(args[0], "", names))
			}
			layers = []allocator.Layer{l}
		}
		switch {
		case *f == formatJSON:
			return a.layersJSON(layers)
		case len(args) == 1:
			return layers[0].Table.Help(a.stdout)
		}
		a.allocators.Help(a.stdout)
		fmt.Fprintf(a.stdout, "Without the flag the environment variable %s is read; the flag wins.\n", allocator.EnvironmentVariable)
		return nil
	}
	return c
}

func layerNames(layers []allocator.Layer) []string {
	names := make([]string, len(layers))
	for i, l := range layers {
		names[i] = l.Table.Name
	}
	return names
}

func (a *app) layersJSON(layers []allocator.Layer) error {
	for _, l := range layers {
		if err := a.printJSON(struct {
			Source bool `json:"source"`
			*spec.Table
		}{l.Source, l.Table}); err != nil {
			return err
		}
	}
	return nil
}
