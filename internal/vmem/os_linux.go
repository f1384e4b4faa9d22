package vmem

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const mapNoReserve = unix.MAP_NORESERVE

// systemError returns the error of a system call. When the kernel refuses for
// want of memory and the process is close to the limit on mappings, it says
// that this is the likely cause.
func systemError(call string, err error) error {
	err = os.NewSyscallError(call, err)
	if !errors.Is(err, unix.ENOMEM) {
		return err
	}
	limit, ok := mappingLimit()
	if !ok {
		return err
	}
	return mappingError(err, countMappings(), limit)
}

// mappingError is err itself when count is not close to the limit. It need not
// be at the limit exactly: the spares were given up, and other threads may have
// unmapped something in the meantime.
func mappingError(err error, count, limit int) error {
	if count < limit-limit/64-2*sparePages {
		return err
	}
	return fmt.Errorf("%w: the process has %d and vm.max_map_count allows %d (sysctl -w vm.max_map_count=%d raises it): %w",
		ErrTooManyMappings, count, limit, 4*limit, err)
}

func mappingLimit() (limit int, ok bool) {
	text, err := os.ReadFile("/proc/sys/vm/max_map_count")
	if err != nil {
		return 0, false
	}
	limit, err = strconv.Atoi(string(bytes.TrimSpace(text)))
	return limit, err == nil
}

// countMappings returns the number of the process's mappings, 0 when it is not
// to be had.
func countMappings() int {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return 0
	}
	defer f.Close()
	count := 0
	buf := make([]byte, 16<<10)
	for {
		n, err := f.Read(buf)
		count += bytes.Count(buf[:n], []byte{'\n'})
		if err != nil {
			return count
		}
	}
}

// fillHole reserves the place again when it is a hole, and reports whether it
// was one. Kernels before 6.12 unmap the old mapping before they make the new
// one, and leave a hole when that fails. Any other mmap of the process could
// land in it.
func fillHole(p unsafe.Pointer, n uintptr) bool {
	got, err := unix.MmapPtr(-1, 0, p, n, unix.PROT_NONE, reserveFlags|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		return false
	}
	if got != p { // Linux before 4.17 takes the address as a hint
		_ = unix.MunmapPtr(got, n)
		return false
	}
	return true
}

// spares are mappings that nobody needs, held so that they can be given up.
//
// At the limit on mappings the kernel refuses mmap, even one that would lower
// their number, so Decommit and Unmap would not work just when they are the way
// out; and the Go runtime, when its own mmap is refused, ends the program. So
// the spares are given up when the kernel refuses a mapping: those calls work
// again, and the runtime has some room. Nothing new is mapped before there is
// room for the spares, and for some more: else the next call would take them
// back and leave the runtime nothing.
//
// They are pages of two kinds in turn, which the kernel cannot join to one
// mapping. Made all of one kind, they become one.
var spares struct {
	held atomic.Bool // written under mu

	mu sync.Mutex
	// +checklocks:mu
	base unsafe.Pointer // nil: not to be had, and done without
}

const (
	sparePages = 129 // one mapping each when held
	roomPages  = 64  // as many must be to be had besides, to take them
)

// takeSparesLocked takes the spares and reports whether there is room for them.
//
// +checklocks:spares.mu
func takeSparesLocked() bool {
	if spares.held.Load() {
		return true
	}
	size := uintptr((sparePages + roomPages) * pageSize)
	if spares.base == nil {
		p, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_NONE, reserveFlags)
		if err != nil {
			return true
		}
		spares.base = p
	}
	all := unsafe.Slice((*byte)(spares.base), size)
	for i := int64(1); i < sparePages+roomPages; i += 2 {
		if err := unix.Mprotect(all[i*pageSize:(i+1)*pageSize], unix.PROT_READ); err != nil {
			_ = unix.Mprotect(all, unix.PROT_NONE)
			return false
		}
	}
	_ = unix.Mprotect(all[sparePages*pageSize:], unix.PROT_NONE)
	spares.held.Store(true)
	return true
}

// giveUpSparesLocked gives the spares up if they are held.
//
// +checklocks:spares.mu
func giveUpSparesLocked() {
	if spares.held.Load() {
		_ = unix.Mprotect(unsafe.Slice((*byte)(spares.base), sparePages*pageSize), unix.PROT_NONE)
		spares.held.Store(false)
	}
}

// adding calls f, which may add mappings. It refuses, as the kernel would,
// while there is no room for the spares.
func adding(f func() error) error {
	if !spares.held.Load() {
		spares.mu.Lock()
		room := takeSparesLocked()
		spares.mu.Unlock()
		if !room {
			return unix.ENOMEM
		}
	}
	err := f()
	if err == unix.ENOMEM {
		spares.mu.Lock()
		giveUpSparesLocked()
		spares.mu.Unlock()
	}
	return err
}

// removing calls f, which takes mappings away, and once more without the
// spares when it finds no memory.
func removing(f func() error) error {
	err := f()
	if err == unix.ENOMEM {
		spares.mu.Lock()
		defer spares.mu.Unlock()
		giveUpSparesLocked()
		err = f()
		takeSparesLocked()
	}
	return err
}

// A memfd is a file in memory, sparse: only what is touched uses memory.
type memfd struct{ fd int }

func newStore(size int64) (store, error) {
	fd, err := unix.MemfdCreate("halyard", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // Linux before 6.3
		fd, err = unix.MemfdCreate("halyard", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	if err := retry(func() error { return unix.Ftruncate(fd, size) }); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("ftruncate", err)
	}
	return memfd{fd}, nil
}

func (m memfd) mapAt(r *Region, off, n, from int64) error {
	p := r.pointer(off)
	err := adding(func() error {
		_, err := unix.MmapPtr(m.fd, from, p, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_SHARED|unix.MAP_FIXED|unix.MAP_NORESERVE)
		return err
	})
	if err != nil {
		fillHole(p, uintptr(n))
		return systemError("mmap", err)
	}
	return nil
}

func (m memfd) punch(off, n int64) error {
	err := retry(func() error {
		return unix.Fallocate(m.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	})
	if err != nil {
		return fmt.Errorf("%d bytes of memory are not given back: %w", n, os.NewSyscallError("fallocate", err))
	}
	return nil
}

func (m memfd) close() error { return os.NewSyscallError("close", unix.Close(m.fd)) }

// retry calls f until no signal interrupts it.
func retry(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}
