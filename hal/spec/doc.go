// Package spec is the grammar of devices and allocator layers on a command line,
// and the option tables behind it.
//
//	NAME[:OPTIONS]            one layer:  block:growth=5%
//	NAME[:OPTIONS]+NAME...    a stack:    vmm+block+caching:waste=1.25
//
// OPTIONS is a list of NAME=VALUE separated by commas. A layer may also take
// heap items, HEAPKEY=FIELDS, where FIELDS are values by position separated by
// ';' or '/', or NAME:VALUE in any order, or the first kind and then the second:
//
//	caching:device_local=1GiB;4GiB;64,host_local=*;*;32
//	caching:device_local=max_alloc:1GiB/capacity:4GiB/count:64
//
// The strings that IREE takes for its caching allocator are among these. Heap
// keys are those of [memory.ParseHeapKey] and may contain a ';' of their own, so
// an item is divided at its first '='. A '*' as value means no limit.
//
// # Tables
//
// Every option stands in one [Table], which parses, prints, checks and documents
// it, so that the four can't drift apart:
//
//	var table = &spec.Table{
//		Name:    "quota", // of a program of your own
//		Summary: "refuses what would exceed a cap",
//		Options: []spec.Option{{
//			Name: "max", Kind: spec.Size, Default: "*", Min: "1B", Unlimited: true,
//			Help: "bytes that may be live at once",
//		}},
//	}
//
//	v, err := table.Parse("max=16gib")
//	v.Size("max") // 16 GiB
//	v.String()    // "quota:max=16GiB"
//
// For every text that a table accepts, parsing what [Values.String] prints gives
// the same values, and printing those gives the same text.
//
// # Errors
//
// Nothing is guessed, clamped or ignored: what can't be understood is an [*Error]
// with the column, a caret, the valid names and the nearest one. The option text
// "help" yields [ErrHelp], so that a program can print [Table.Help].
//
// # Concurrency and cost
//
// A Table is read only once it is in use and may be shared. [Values] may be read
// concurrently; [Values.Set] needs exclusive access. This is start-up code: it
// allocates freely and nothing of it belongs on a hot path.
package spec
