package spec_test

import (
	"fmt"
	"os"

	"github.com/halyard-go/halyard/hal/spec"
)

// A layer declares its options once; the table does the rest.
func Example() {
	table := &spec.Table{
		Name:    "limit",
		Summary: "refuses what would exceed a cap",
		Options: []spec.Option{
			{Name: "max", Kind: spec.Size, Default: "*", Min: "1B", Unlimited: true, Help: "bytes that may be live at once"},
			{Name: "strict", Kind: spec.Bool, Default: "false", Help: "count what is cached, too"},
		},
	}
	v, err := table.Parse("max=16 gib")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(v)
	fmt.Println(v.Size("max"), v.Bool("strict"))

	_, err = table.Parse("mx=16GiB")
	fmt.Println(err)
	// Output:
	// limit:max=16GiB
	// 16GiB false
	// spec: unknown option "mx" (valid: max, strict); did you mean "max"?
	//   limit:mx=16GiB
	//         ^~ column 7
}

// A stack is parsed item by item; errors point into the whole text.
func ExampleSplit() {
	tables := map[string]*spec.Table{"raw": raw(), "caching": caching(), "host": host()}
	text := "raw+caching:device_local=1gib;4gib,depth=0"
	items, err := spec.Split(text)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, item := range items {
		v, err := tables[item.Name].ParseAt(text, item)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(v)
	}
	// Output:
	// raw
	// spec: option "depth": 0 is out of range (want 1..1024)
	//   raw+caching:device_local=1gib;4gib,depth=0
	//                                            ^ column 42
}

// Heap items keep their order, and have getters of their own.
func ExampleValues_Heaps() {
	v, err := caching().Parse("device_local=*;256mib;64,*;transfer=*;*;4")
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, h := range v.Heaps() {
		fmt.Printf("%v: %d blocks, unlimited capacity: %v\n", h.Key, h.Count("count"), h.IsUnlimited("capacity"))
	}
	fmt.Println(v)
	// Output:
	// device_local: 64 blocks, unlimited capacity: false
	// *;transfer: 4 blocks, unlimited capacity: true
	// caching:device_local=capacity:256MiB,*;transfer=count:4
}

func ExampleTable_Help() {
	if err := host().Help(os.Stdout); err != nil {
		fmt.Println(err)
	}
	// Output:
	// host: host memory as device memory
	//
	// Options, as host:OPTION=VALUE,...
	//
	//   OPTION    TYPE   DEFAULT  RANGE  HELP
	//   capacity  size   1GiB     >= 1B  size of the heap
	//   queues    count  1        1..64  number of queues
	//
	// Sizes: K, KiB, M, MiB, ... are powers of 1024, KB, MB, ... of 1000; case doesn't matter.
}

func ExampleNearest() {
	fmt.Println(spec.Nearest("cahcing", []string{"block", "caching", "limit"}))
	// Output: caching
}
