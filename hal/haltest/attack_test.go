package haltest_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal/haltest"
)

func TestAttack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { haltest.Attack(t, haltest.Setup{}) })
}
