package memory_test

import (
	"fmt"

	"github.com/halyard-go/halyard/hal/memory"
)

func ExampleParseBytes() {
	for _, text := range []string{"64 MiB", "1.5gib", "10MB", "0.3B", "8EiB"} {
		n, err := memory.ParseBytes(text)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Printf("%s is %d bytes, prints %v, about %s\n", text, int64(n), n, n.Human())
	}
	// Output:
	// 64 MiB is 67108864 bytes, prints 64MiB, about 64 MiB
	// 1.5gib is 1610612736 bytes, prints 1.5GiB, about 1.50 GiB
	// 10MB is 10000000 bytes, prints 10000000B, about 9.54 MiB
	// memory: size "0.3B": not a whole number of bytes
	// memory: size "8EiB": does not fit (the largest size is 9223372036854775807B, just under 8EiB)
}

func ExampleHeaps_Find() {
	heaps := memory.Heaps{
		{Name: "vram", Type: memory.DeviceLocal, Usage: memory.Default},
		{Name: "pinned", Type: memory.HostLocal | memory.DeviceVisible, Usage: memory.Transfer | memory.Mapping},
	}
	for _, want := range []memory.Type{
		memory.DeviceLocal,
		memory.DeviceLocal | memory.HostVisible,
		memory.DeviceLocal | memory.Optimal,
	} {
		if i, ok := heaps.Find(want, memory.Mapping); ok {
			fmt.Printf("%v for mapping: %s\n", want, heaps[i].Name)
		} else {
			fmt.Printf("%v for mapping: no such heap\n", want)
		}
	}
	// Output:
	// device_local for mapping: no such heap
	// device_local|host_visible for mapping: no such heap
	// device_local|optimal for mapping: pinned
}

func ExampleParseHeapKey() {
	k, err := memory.ParseHeapKey("HOST_VISIBLE|DEVICE_LOCAL;TRANSFER")
	fmt.Println(k, err)
	fmt.Println(k.Matches(memory.Heap{Type: memory.DeviceLocal, Usage: memory.Default}))
	// Output:
	// device_local|host_visible;transfer <nil>
	// false
}

func ExampleAlignUp() {
	fmt.Println(memory.AlignUp(1000, 256))
	fmt.Println(memory.AlignUp(memory.MaxBytes, 256))
	// Output:
	// 1KiB true
	// 0B false
}
