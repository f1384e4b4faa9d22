//go:build !mutants

package mutant

// Is reports whether the fault is planted.
func Is(Name) bool { return false }
