package vmem

import (
	"os"
	"unsafe"

	"golang.org/x/sys/windows"
)

func reserveSpace(n uintptr) (unsafe.Pointer, error) {
	addr, err := windows.VirtualAlloc(0, n, windows.MEM_RESERVE, windows.PAGE_NOACCESS)
	if err != nil {
		return nil, os.NewSyscallError("VirtualAlloc", err)
	}
	// The address is not of the Go heap, so it may be read as a pointer: the
	// one way from the number to it that vet does not take for a mistake.
	return *(*unsafe.Pointer)(unsafe.Pointer(&addr)), nil
}

// commitPages makes reserved memory accessible, or leaves it as it is.
func commitPages(p unsafe.Pointer, n uintptr) error {
	_, err := windows.VirtualAlloc(uintptr(p), n, windows.MEM_COMMIT, windows.PAGE_READWRITE)
	return os.NewSyscallError("VirtualAlloc", err)
}

// decommitPages makes memory reserved again.
func decommitPages(p unsafe.Pointer, n uintptr) error {
	return os.NewSyscallError("VirtualFree", windows.VirtualFree(uintptr(p), n, windows.MEM_DECOMMIT))
}

// releaseSpace releases a whole reservation; Windows knows its size.
func releaseSpace(p unsafe.Pointer, _ uintptr) error {
	return os.NewSyscallError("VirtualFree", windows.VirtualFree(uintptr(p), 0, windows.MEM_RELEASE))
}
