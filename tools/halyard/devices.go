package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/memory"
)

func (a *app) devicesCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "devices",
		Short: "List the devices, and the drivers that can't be used",
		Long: `devices lists what --device can open, with its heaps, its sources of memory (the
best to suballocate from first) and the queues it opens by default, and the
drivers that can't be used here, with the reason. What a heap may be used for is
in the JSON.

"halyard run --device=NAME:help" shows a device's options.
With --format=json each device, and each unusable driver, is one object a line;
sizes are in bytes, 0 where unknown or unlimited.`,
		Args: noArguments,
	}
	f := formatFlag(c, "text for people, or json")
	c.RunE = func(*cobra.Command, []string) error {
		if *f == formatJSON {
			return a.devicesJSON()
		}
		a.devicesText()
		return nil
	}
	return c
}

// noArguments refuses arguments of a command that takes none.
func noArguments(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usage(c.CommandPath(), "%s takes no arguments, got %q", c.Name(), args[0])
	}
	return nil
}

// found is what one driver has to offer, or why it has nothing.
type found struct {
	driver  string
	summary string
	devices []driver.Info
	err     error
}

func (a *app) find() []found {
	var list []found
	for _, name := range a.drivers.Names() {
		d, _ := a.drivers.Get(name)
		infos, err := d.Devices()
		list = append(list, found{name, d.Table().Summary, infos, err})
	}
	return list
}

func (a *app) devicesText() {
	for i, f := range a.find() {
		if i > 0 {
			fmt.Fprintln(a.stdout)
		}
		if f.err != nil {
			fmt.Fprintf(a.stdout, "%s  can't be used here: %v\n", f.driver, f.err)
			continue
		}
		for _, d := range f.devices {
			fmt.Fprintf(a.stdout, "%s  %s\n", d.Name, d.Description)
			g := grid{indent: "  "}
			for j, h := range d.Heaps {
				g.row(heading(j == 0, "heaps"), heapLine(h))
			}
			direct := d.Direct
			if direct == "" {
				direct = "raw"
			}
			g.row("sources", strings.Join(d.Sources, ", ")+"; without a suballocator "+direct)
			g.row("queues", thousands(d.Queues)+" by default")
			if d.Modelled != "" {
				g.row("modelled", d.Modelled)
			}
			g.write(a.stdout)
		}
	}
}

func heading(first bool, text string) string {
	if first {
		return text
	}
	return ""
}

// heapLine describes a heap with its sizes rounded.
func heapLine(h memory.Heap) string {
	line := h.Name + ": "
	if h.Capacity != 0 {
		line += h.Capacity.Human() + " "
	}
	line += h.Type.String()
	if h.MaxAllocation != 0 && h.MaxAllocation != h.Capacity {
		line += ", at most " + h.MaxAllocation.Human() + " at once"
	}
	return line
}

// deviceJSON is one line of devices --format=json.
type deviceJSON struct {
	Driver      string     `json:"driver"`
	Usable      bool       `json:"usable"`
	Reason      string     `json:"reason,omitempty"`
	Name        string     `json:"name,omitempty"`
	Description string     `json:"description,omitempty"`
	Heaps       []heapJSON `json:"heaps,omitempty"`
	Sources     []string   `json:"sources,omitempty"`
	Direct      string     `json:"direct,omitempty"`
	Queues      int        `json:"queues,omitempty"`
	Modelled    string     `json:"modelled,omitempty"`
}

type heapJSON struct {
	Name          string `json:"name"`
	Type          string `json:"type"`
	Usage         string `json:"usage"`
	Capacity      int64  `json:"capacity_bytes"`
	MaxAllocation int64  `json:"max_allocation_bytes"`
	MinAlignment  int64  `json:"min_alignment_bytes"`
}

func (a *app) devicesJSON() error {
	for _, f := range a.find() {
		if f.err != nil {
			if err := a.printJSON(deviceJSON{Driver: f.driver, Description: f.summary, Reason: f.err.Error()}); err != nil {
				return err
			}
		}
		for _, d := range f.devices {
			j := deviceJSON{Driver: f.driver, Usable: true, Name: d.Name, Description: d.Description, Sources: d.Sources,
				Direct: d.Direct, Queues: d.Queues, Modelled: d.Modelled}
			for _, h := range d.Heaps {
				j.Heaps = append(j.Heaps, heapJSON{h.Name, h.Type.String(), h.Usage.String(),
					int64(h.Capacity), int64(h.MaxAllocation), int64(h.MinAlignment)})
			}
			if err := a.printJSON(j); err != nil {
				return err
			}
		}
	}
	return nil
}
