//go:build mutants

package mutant

import "os"

var planted = Name(os.Getenv("HALYARD_MUTANT"))

// Is reports whether the fault is planted.
func Is(n Name) bool { return planted == n }
