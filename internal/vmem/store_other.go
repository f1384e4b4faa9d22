//go:build !linux

package vmem

import (
	"errors"
	"fmt"
	"runtime"
)

func newStore(int64) (store, error) {
	return nil, fmt.Errorf("pages that can be moved need memfd_create, which %s does not have: %w",
		runtime.GOOS, errors.ErrUnsupported)
}
