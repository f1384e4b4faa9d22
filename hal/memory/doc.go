// Package memory holds the values that describe memory: how much ([Bytes]),
// what kind ([Type]), what for ([Usage]), in which way ([Access]), and the heaps
// of a device that offer it ([Heap], [Heaps], [HeapKey]).
//
// Everything here is a plain value with a text form that reads back to the same
// value, so flags, logs, traces and reports agree with each other:
//
//	n, err := memory.ParseBytes("1.5GiB")        // exact, never a float
//	t, err := memory.ParseType("device_local|host_visible")
//	k, err := memory.ParseHeapKey("*;transfer")
//	if i, ok := heaps.Find(t, memory.Transfer); ok {
//		fmt.Println(heaps[i], "holds", n)
//	}
//
// The names of the bits are those of IREE's HAL in lower case (parsing ignores
// case), so a spec string written for IREE names the same memory here.
//
// # Errors
//
// Every parser returns a [*ParseError], which says what was being parsed, where
// the offending part lies, and, for names, which names are valid. Nothing is
// rounded, clamped or defaulted: a size that isn't a whole number of bytes, or
// that doesn't fit in 63 bits, is an error.
//
// # Concurrency and cost
//
// The package has no state; its values may be copied and shared freely. [Bytes]
// is signed so that differences and checks before rounding are plain arithmetic;
// the bit sets are small integers ([Usage] fits in [UsageBits] bits, [Access] in
// [AccessBits]) meant to be packed into requests. Only parsing and printing
// allocate.
package memory
