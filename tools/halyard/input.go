package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/halyard-go/halyard/internal/trace"
	"github.com/halyard-go/halyard/internal/workload"
)

// input is what is replayed.
type input struct {
	name      string // as on the command line
	trace     *trace.Trace
	generated string // with which options, for a built-in workload
}

func workloadNames() []string {
	var names []string
	for _, w := range workload.List() {
		names = append(names, w.Name)
	}
	return names
}

// load reads all inputs. It goes on after a bad one, so that all are named at once.
func (a *app) load(ctx context.Context, names []string, o workload.Options) ([]input, error) {
	var inputs []input
	var errs []error
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		in, err := a.loadOne(name, o)
		if err != nil {
			errs = append(errs, err)
		}
		inputs = append(inputs, in)
	}
	return inputs, errors.Join(errs...)
}

func (a *app) loadOne(name string, o workload.Options) (input, error) {
	if w, ok := workload.Get(name); ok {
		return input{name, w.Generate(o), fmt.Sprintf("seed %d, scale %d", o.Seed, o.Scale)}, nil
	}
	if name == "-" {
		t, err := trace.Read("standard input", a.stdin)
		return input{name: name, trace: t}, err
	}
	if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
		names := workloadNames()
		return input{}, fmt.Errorf("%q is neither a file nor a built-in workload (%s)%s", name, strings.Join(names, ", "), didYouMean(name, "", names))
	}
	t, err := trace.Open(name)
	return input{name: name, trace: t}, err
}
