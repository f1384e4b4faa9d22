package spec

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// heapKeyHelp explains heap keys, for people who read [Table.Help].
const heapKeyHelp = "HEAP is a memory type, such as device_local or host_local, or TYPE;USAGE; names are joined by '|', and '*' is any."

// Help writes the name, the summary, the doc and the options of the table as
// text for a terminal. It returns the first error of w.
func (t *Table) Help(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n", t.Name, t.Summary)
	if t.Doc != "" {
		fmt.Fprintf(&b, "\n%s\n", strings.TrimSpace(t.Doc))
	}
	switch {
	case len(t.Options) > 0:
		fmt.Fprintf(&b, "\nOptions, as %s:OPTION=VALUE,...\n\n", t.Name)
		tabulate(&b, "OPTION", t.Options)
	case t.Heaps == nil:
		b.WriteString("\nNo options.\n")
	}
	if h := t.Heaps; h != nil {
		fmt.Fprintf(&b, "\nHeaps, as %s:%s,...\n", t.Name, h.usage("HEAP"))
		fmt.Fprintf(&b, "or by name, as %s:%s,...\n\n%s\n%s\n\n", t.Name, h.named(), strings.TrimSpace(h.Help), heapKeyHelp)
		tabulate(&b, "FIELD", h.Fields)
	}
	if notes := t.notes(); len(notes) > 0 {
		fmt.Fprintf(&b, "\n%s\n", strings.Join(notes, "\n"))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// named returns how an item with named fields looks, with their defaults.
func (h *HeapOption) named() string {
	fields := make([]string, len(h.Fields))
	for i := range h.Fields {
		f := &h.Fields[i]
		fields[i] = f.Name + ":" + canonical(f, f.Default)
	}
	return "HEAP=" + strings.Join(fields, "/")
}

// notes explains the syntax of those kinds that occur and need it.
func (t *Table) notes() []string {
	options := t.Options
	if t.Heaps != nil {
		options = append(options[:len(options):len(options)], t.Heaps.Fields...)
	}
	var size, star bool
	for _, o := range options {
		size = size || o.Kind == Size
		star = star || o.Unlimited
	}
	var notes []string
	if size {
		notes = append(notes, "Sizes: K, KiB, M, MiB, ... are powers of 1024, KB, MB, ... of 1000; case doesn't matter.")
	}
	if star {
		notes = append(notes, "'*' is no limit.")
	}
	return notes
}

// row returns the cells of an option.
func (o *Option) row() [5]string {
	def := canonical(o, o.Default)
	if def == "" {
		def = "-"
	}
	return [5]string{o.Name, o.Kind.String(), def, o.Range(), strings.Join(strings.Fields(o.Help), " ")}
}

func tabulate(w io.Writer, title string, options []Option) {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintf(tw, "  %s\tTYPE\tDEFAULT\tRANGE\tHELP\n", title)
	for i := range options {
		r := options[i].row()
		fmt.Fprintf(tw, "  %s\n", strings.Join(r[:], "\t"))
	}
	tw.Flush() // a strings.Builder doesn't fail
}

// Markdown writes what [Table.Help] does as a section of a Markdown document.
func (t *Table) Markdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "## `%s`\n\n%s\n", t.Name, t.Summary)
	if t.Doc != "" {
		fmt.Fprintf(&b, "\n%s\n", strings.TrimSpace(t.Doc))
	}
	switch {
	case len(t.Options) > 0:
		markdownTable(&b, "Option", t.Options)
	case t.Heaps == nil:
		b.WriteString("\nNo options.\n")
	}
	if h := t.Heaps; h != nil {
		fmt.Fprintf(&b, "\nHeaps: `%s:%s,...`, or by name `%s:%s,...`\n", t.Name, h.usage("HEAP"), t.Name, h.named())
		fmt.Fprintf(&b, "\n%s\n%s\n", strings.TrimSpace(h.Help), heapKeyHelp)
		markdownTable(&b, "Field", h.Fields)
	}
	if notes := t.notes(); len(notes) > 0 {
		fmt.Fprintf(&b, "\n%s\n", strings.Join(notes, "\n"))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func markdownTable(b *strings.Builder, title string, options []Option) {
	fmt.Fprintf(b, "\n| %s | Type | Default | Range | Help |\n|---|---|---|---|---|\n", title)
	escape := strings.NewReplacer("|", `\|`)
	for i := range options {
		r := options[i].row()
		fmt.Fprintf(b, "| `%s` | %s | %s | %s | %s |\n",
			r[0], r[1], code(escape.Replace(r[2])), code(escape.Replace(r[3])), escape.Replace(r[4]))
	}
}

// code sets a cell as code unless it's a word of ours.
func code(cell string) string {
	if cell == "-" || cell == "any" {
		return cell
	}
	return "`" + cell + "`"
}
