//go:build linux || darwin || freebsd

package vmem

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const reserveFlags = unix.MAP_ANON | unix.MAP_PRIVATE | mapNoReserve

func reserveSpace(n uintptr) (unsafe.Pointer, error) {
	var p unsafe.Pointer
	err := adding(func() (err error) {
		p, err = unix.MmapPtr(-1, 0, nil, n, unix.PROT_NONE, reserveFlags)
		return err
	})
	if err != nil {
		return nil, systemError("mmap", err)
	}
	return p, nil
}

// commitPages makes reserved memory accessible, or leaves it as it is.
func commitPages(p unsafe.Pointer, n uintptr) error {
	b := unsafe.Slice((*byte)(p), n)
	err := adding(func() error { return unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE) })
	if err != nil {
		// The kernel may have done a part of it. This way back makes no new
		// mappings, so that the limit on them cannot stop it.
		_ = unix.Mprotect(b, unix.PROT_NONE)
		return systemError("mprotect", err)
	}
	return nil
}

// decommitPages makes memory reserved again, whatever it was, or leaves it as
// it is.
//
// A new mapping in the place of the old one is one system call where madvise
// and mprotect are two, and is no slower. It also leaves nothing of the old
// mapping behind which would keep the kernel from joining it to its neighbours
// (the anon_vma of Linux), or charged to the process (overcommit_memory=2).
func decommitPages(p unsafe.Pointer, n uintptr) error {
	err := removing(func() error {
		_, err := unix.MmapPtr(-1, 0, p, n, unix.PROT_NONE, reserveFlags|unix.MAP_FIXED)
		return err
	})
	if err == nil || fillHole(p, n) {
		return nil
	}
	return systemError("mmap", err)
}

func releaseSpace(p unsafe.Pointer, n uintptr) error {
	if err := removing(func() error { return unix.MunmapPtr(p, n) }); err != nil {
		return systemError("munmap", err)
	}
	return nil
}
