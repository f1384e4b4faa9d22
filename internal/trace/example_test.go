package trace_test

import (
	"fmt"
	"os"
	"strings"

	"github.com/halyard-go/halyard/internal/trace"
)

func ExampleRead() {
	t, err := trace.Read("step.trace", strings.NewReader(`# unit: bytes
a 31 4096
a 32 1024 1
f 31 1
`))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(t.Name, len(t.Events), "events, peak", t.PeakLive, "left over", t.Leftover())

	_, err = trace.Read("step.trace", strings.NewReader("a 31 4096\nf 32\n"))
	fmt.Println(err)
	// Output:
	// step 3 events, peak 5120 left over [1]
	// step.trace:2: id 32 freed but not allocated before
}

func ExampleBuilder() {
	b := trace.Builder{Name: "step", Comments: []string{"unit: bytes"}}
	x, err := b.Alloc(4096, 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := b.Free(x, 2); err != nil {
		fmt.Println(err)
		return
	}
	t, err := b.Trace()
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := trace.Write(os.Stdout, t); err != nil {
		fmt.Println(err)
	}
	// Output:
	// # unit: bytes
	// a 0 4096
	// f 0 2
}
