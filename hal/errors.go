package hal

import (
	"errors"
	"fmt"
	"strings"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/queue"
)

// Conditions that callers branch on, with errors.Is.
var (
	// ErrOutOfMemory matches every *OOMError.
	ErrOutOfMemory = allocator.ErrOutOfMemory
	// ErrTooLarge: no device of this kind could serve the size at the alignment.
	ErrTooLarge = allocator.ErrTooLarge
	// ErrUnsupported: no heap has this memory type and usage, or the device can't do it.
	ErrUnsupported = allocator.ErrUnsupported
	// ErrInvalid: an argument that is wrong on any device.
	ErrInvalid = errors.New("invalid argument")

	// ErrReleased: the handle was released before.
	ErrReleased = allocator.ErrReleased
	// ErrForeign: the handle belongs to another device, or is the zero Buffer.
	ErrForeign = allocator.ErrForeign
	// ErrMapped: the buffer is mapped; unmap it first.
	ErrMapped = allocator.ErrBusy
	// ErrNotMapped: Unmap without Map.
	ErrNotMapped = errors.New("buffer is not mapped")

	// ErrClosed: the device, or its queue, is closed.
	ErrClosed = allocator.ErrClosed
	// ErrLost: the device is lost. The cause is wrapped beside it.
	ErrLost = queue.ErrLost
	// ErrFailed: a semaphore failed. The cause is wrapped beside it.
	ErrFailed = queue.ErrFailed
)

// LeakError is what [Device.Close] returns when buffers were still live. They have
// been freed.
type LeakError struct {
	Buffers int       `json:"buffers"`
	Bytes   Bytes     `json:"bytes"`
	ByTag   []TagLeak `json:"by_tag"` // largest first
}

// TagLeak is the part of a leak under one tag.
type TagLeak struct {
	Tag     string `json:"tag"` // empty: none
	Buffers int    `json:"buffers"`
	Bytes   Bytes  `json:"bytes"`
}

func (e *LeakError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "hal: not released before Close: %s, %s", buffers(e.Buffers), e.Bytes.Human())
	for i, t := range e.ByTag {
		if i == 5 {
			fmt.Fprintf(&b, ", and %d more tags", len(e.ByTag)-i)
			break
		}
		name := t.Tag
		if name == "" {
			name = "untagged"
		}
		fmt.Fprintf(&b, "; %s: %s, %s", name, buffers(t.Buffers), t.Bytes.Human())
	}
	return b.String()
}

func buffers(n int) string {
	if n == 1 {
		return "1 buffer"
	}
	return fmt.Sprintf("%d buffers", n)
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("hal: %w: "+format, append([]any{ErrInvalid}, args...)...)
}
