//go:build darwin || freebsd

package vmem

import (
	"os"
	"unsafe"
)

// These systems have no limit on mappings that a program meets, and replace
// a mapping in one step.

func adding(f func() error) error { return f() }

func removing(f func() error) error { return f() }

func fillHole(unsafe.Pointer, uintptr) bool { return false }

func systemError(call string, err error) error { return os.NewSyscallError(call, err) }
