package workload_test

import (
	"fmt"

	"github.com/halyard-go/halyard/internal/workload"
)

func Example() {
	for _, w := range workload.List() {
		t := w.Generate(workload.Options{Seed: 1})
		fmt.Printf("%s: %d streams, %d buffers stay\n", w.Name, t.Streams, len(t.Leftover()))
	}
	// Output:
	// llama3-8b: 3 streams, 196 buffers stay
	// resnet50-train: 2 streams, 481 buffers stay
}
