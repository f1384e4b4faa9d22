package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/spec"
)

// Exit codes.
const (
	exitOK          = 0
	exitFailed      = 1   // a request failed, or something was found wrong
	exitUsage       = 2   // nothing was run: usage, an input, a device
	exitInterrupted = 130 // as a shell reports SIGINT
)

// app is the command: what it works on, and where it writes.
type app struct {
	drivers    *driver.Registry
	allocators *allocator.Registry

	stdin          io.Reader
	stdout, stderr io.Writer

	failed bool // something ran and was not as it should be
}

// helpText is the error of arguments that ask for help with a spec: it is printed
// to standard output, and the command succeeds.
type helpText string

func (h helpText) Error() string { return string(h) }

// run carries out a command line and returns the exit code.
func (a *app) run(ctx context.Context, args []string) int {
	out := &faultyWriter{w: a.stdout}
	a.stdout = out
	root := a.root()
	root.SetArgs(append([]string{}, args...)) // nil would stand for the arguments of the process
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)

	err := root.ExecuteContext(ctx)
	if text, ok := asHelp(err); ok {
		fmt.Fprintln(a.stdout, text)
		err = nil
	}
	switch {
	case err != nil && ctx.Err() != nil:
		fmt.Fprintln(a.stderr, "halyard: interrupted")
		return exitInterrupted
	case out.err != nil:
		fmt.Fprintf(a.stderr, "halyard: writing the report: %v\n", out.err)
		return exitFailed
	case err != nil:
		for _, e := range list(err) {
			fmt.Fprintf(a.stderr, "halyard: %v\n", e)
		}
		return exitUsage
	case a.failed:
		return exitFailed
	}
	return exitOK
}

// list takes joined errors apart.
func list(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// asHelp returns the text that err asks to be printed, if it does.
func asHelp(err error) (string, bool) {
	if h, ok := errors.AsType[helpText](err); ok {
		return string(h), true
	}
	if h, ok := errors.AsType[*allocator.HelpRequest](err); ok {
		return h.Error(), true
	}
	return "", false
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "halyard",
		Short: "Device memory: devices, allocators, and what they take",
		Long: `halyard lists devices and allocators, and replays allocation traces and model
workloads through a stack of allocators to say what it takes of memory, of
driver calls and of time.`,
		Example: `  halyard devices
  halyard allocators block
  halyard run llama3-8b
  halyard run --device=host:capacity=24GiB --device_allocator=block+caching serving.trace.gz`,
		Args:                  noCommand,
		RunE:                  func(*cobra.Command, []string) error { return usage("halyard", "no command") },
		SilenceErrors:         true,
		SilenceUsage:          true,
		DisableFlagsInUseLine: true,
		CompletionOptions:     cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.SetFlagErrorFunc(flagError)
	root.SetHelpCommand(&cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Help about a command",
		RunE: func(c *cobra.Command, args []string) error {
			of, _, err := c.Root().Find(args)
			if err != nil || of == c.Root() {
				of = c.Root()
				if err := noCommand(of, args); err != nil {
					return err
				}
			}
			of.InitDefaultHelpFlag()
			return of.Help()
		},
	})
	root.AddCommand(a.devicesCommand(), a.allocatorsCommand(), a.runCommand(), versionCommand())
	return root
}

// noCommand refuses arguments of the root: they are no command.
func noCommand(root *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, c := range root.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return usage("halyard", "unknown command %q (valid: %s)%s", args[0], strings.Join(names, ", "), didYouMean(args[0], "", names))
}

// flagError says what is wrong with a flag: a spec in its own words, an unknown
// flag with the one that was meant.
func flagError(c *cobra.Command, err error) error {
	if _, ok := asHelp(err); ok {
		return err
	}
	if bad, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		if number, ok := errors.AsType[*strconv.NumError](err); ok {
			return usage(c.CommandPath(), "--%s=%s: %w", bad.GetFlag().Name, bad.GetValue(), number.Err)
		}
		return fmt.Errorf("--%s: %w", bad.GetFlag().Name, bad.Unwrap())
	}
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok && unknown.GetSpecifiedShortnames() == "" {
		var names []string
		c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		name := unknown.GetSpecifiedName()
		return usage(c.CommandPath(), "unknown flag --%s%s", name, didYouMean(name, "--", names))
	}
	return usage(c.CommandPath(), "%v", err)
}

// usage is the error of a command line that can't be carried out.
func usage(command, format string, args ...any) error {
	return fmt.Errorf(format+"\nSee \"%s --help\".", append(args, command)...)
}

func didYouMean(name, prefix string, valid []string) string {
	if near := spec.Nearest(name, valid); near != "" {
		return fmt.Sprintf("; did you mean %s%s?", prefix, near)
	}
	return ""
}

// format is the --format flag.
type format string

const (
	formatText format = "text"
	formatJSON format = "json"
)

func (f *format) String() string { return string(*f) }
func (f *format) Type() string   { return "text|json" }
func (f *format) Set(s string) error {
	valid := []string{string(formatText), string(formatJSON)}
	for _, v := range valid {
		if s == v {
			*f = format(s)
			return nil
		}
	}
	return fmt.Errorf("unknown format %q (valid: %s)%s", s, strings.Join(valid, ", "), didYouMean(s, "", valid))
}

// formatFlag adds --format to a command.
func formatFlag(c *cobra.Command, help string) *format {
	f := formatText
	c.Flags().Var(&f, "format", help)
	return &f
}

// printJSON prints one line.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.stdout)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// faultyWriter remembers that writing failed: a report that nobody got is not a
// success.
type faultyWriter struct {
	w   io.Writer
	err error
}

func (f *faultyWriter) Write(p []byte) (int, error) {
	n, err := f.w.Write(p)
	if err != nil && f.err == nil {
		f.err = err
	}
	return n, err
}
