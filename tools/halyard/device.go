package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/halyard-go/halyard/hal/spec"
)

// queuesOption is the option of a device that says how many queues it opens.
const queuesOption = "queues"

// deviceSpec is the value of --device, parsed.
type deviceSpec struct {
	text   string
	values *spec.Values
	queues bool // it, or --queues, says how many
}

// parseDevice reads --device. Asking for help is an error of type helpText.
func (a *app) parseDevice(text string) (*deviceSpec, error) {
	if strings.TrimSpace(text) == "help" {
		return nil, a.devicesHelp()
	}
	items, err := spec.Split(text)
	if err != nil {
		return nil, fmt.Errorf("--device: %w", err)
	}
	it := items[0]
	if len(items) > 1 {
		return nil, fmt.Errorf("--device: %w", &spec.Error{Text: text, Column: items[1].Column, Width: len(items[1].Name), Msg: "one device at a time"})
	}
	d, ok := a.drivers.Get(it.Name)
	if !ok {
		names := a.drivers.Names()
		return nil, fmt.Errorf("--device: %w", &spec.Error{Text: text, Column: it.Column, Width: len(it.Name),
			Msg: fmt.Sprintf("unknown device %q", it.Name), Valid: names, Nearest: spec.Nearest(it.Name, names)})
	}
	values, err := d.Table().ParseAt(text, it)
	if errors.Is(err, spec.ErrHelp) {
		var b strings.Builder
		_ = d.Table().Help(&b) // a strings.Builder doesn't fail
		return nil, helpText(strings.TrimRight(b.String(), "\n"))
	}
	if err != nil {
		return nil, fmt.Errorf("--device: %w", err)
	}
	ds := &deviceSpec{text: strings.TrimSpace(text), values: values}
	for option := range strings.SplitSeq(it.Options, ",") {
		name, _, _ := strings.Cut(option, "=")
		ds.queues = ds.queues || strings.TrimSpace(name) == queuesOption
	}
	return ds, nil
}

func (a *app) devicesHelp() helpText {
	g := grid{indent: "  "}
	for _, name := range a.drivers.Names() {
		d, _ := a.drivers.Get(name)
		g.row(name, d.Table().Summary)
	}
	var b strings.Builder
	b.WriteString("--device=NAME[:OPTIONS]\n\n")
	g.write(&b)
	b.WriteString("\nNAME:help shows a device's options; \"halyard devices\" lists what is there.")
	return helpText(b.String())
}

// hasQueues reports whether the device can be told how many queues to open.
func (d *deviceSpec) hasQueues() bool {
	for _, o := range d.values.Table().Options {
		if o.Name == queuesOption && o.Kind == spec.Count {
			return true
		}
	}
	return false
}

// setQueues merges --queues into the spec.
func (d *deviceSpec) setQueues(c *cobra.Command, n int) error {
	switch {
	case d.queues:
		return usage(c.CommandPath(), "--queues=%d and --device=%s both say how many queues to open: leave one out", n, d.text)
	case !d.hasQueues():
		return usage(c.CommandPath(), "--queues=%d: device %s has no option %q", n, d.values.Table().Name, queuesOption)
	}
	if err := d.set(n); err != nil {
		return fmt.Errorf("--queues=%d: %w", n, err)
	}
	d.queues = true
	return nil
}

func (d *deviceSpec) set(n int) error {
	if err := d.values.Set(queuesOption, fmt.Sprint(n)); err != nil {
		return err
	}
	if err := d.values.Validate(); err != nil {
		return err
	}
	d.text = d.values.String()
	return nil
}

// forStreams is the spec to open for a trace with that many streams: with a queue
// for each, unless somebody said how many, or the device can't.
func (d *deviceSpec) forStreams(streams int) string {
	if d.queues || !d.hasQueues() || d.values.Count(queuesOption) >= int64(streams) {
		return d.values.String()
	}
	more := *d
	settings := *d.values
	more.values = &settings
	if more.set(streams) != nil {
		return d.values.String() // streams share queues then
	}
	return more.text
}
