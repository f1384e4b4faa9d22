//go:build !linux && !darwin && !freebsd && !windows

package vmem

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// errNoMemory is what every call gets: there are no regions here, because
// reserveSpace makes none.
var errNoMemory = fmt.Errorf("address space cannot be reserved on %s: %w", runtime.GOOS, errors.ErrUnsupported)

func reserveSpace(uintptr) (unsafe.Pointer, error) { return nil, errNoMemory }

func commitPages(unsafe.Pointer, uintptr) error { return errNoMemory }

func decommitPages(unsafe.Pointer, uintptr) error { return errNoMemory }

func releaseSpace(unsafe.Pointer, uintptr) error { return errNoMemory }
