//go:build !linux

package vmem

import (
	"errors"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPagesAreUnsupported(t *testing.T) {
	_, err := NewPages(16*pageSize, pageSize)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, runtime.GOOS)
}
