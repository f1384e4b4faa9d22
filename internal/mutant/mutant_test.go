//go:build mutants

package mutant_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/halyard-go/halyard/internal/mutant"
)

// suites are what hunts for planted faults, in the order in which they do.
var suites = []struct {
	name, dir string
	args      []string
}{
	{"programs", "hal/haltest", []string{"-test.run=^TestProgress$", "-rapid.checks=1500", "-rapid.shrinktime=1s", "-rapid.nofailfile"}},
	{"histories", "hal/haltest", []string{"-test.run=^TestAttack$", "-rapid.checks=4000", "-rapid.shrinktime=1s", "-rapid.nofailfile"}},
	{"queue", "hal/queue", nil},
	{"caching", "hal/allocator/caching", []string{"-rapid.shrinktime=1s", "-rapid.nofailfile"}},
	{"block", "hal/allocator/block", []string{"-rapid.shrinktime=1s", "-rapid.nofailfile"}},
}

// budget bounds the hunt for one fault by one suite.
const budget = 60 * time.Second

// TestEveryMutantIsCaught plants each fault in turn and wants some suite to fail.
// Without a fault all of them must pass.
func TestEveryMutantIsCaught(t *testing.T) {
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	bin := t.TempDir()
	for _, s := range suites {
		build := exec.Command("go", "test", "-c", "-tags", "mutants", "-o", filepath.Join(bin, s.name), "./"+s.dir)
		build.Dir = root
		out, err := build.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	hunt := func(i int, n mutant.Name) (failed bool, took time.Duration, why string) {
		s := suites[i]
		ctx, cancel := context.WithTimeout(context.Background(), budget)
		defer cancel()
		cmd := exec.CommandContext(ctx, filepath.Join(bin, s.name), append([]string{"-test.timeout=50s"}, s.args...)...)
		cmd.Dir = filepath.Join(root, s.dir)
		cmd.Env = append(os.Environ(), "HALYARD_MUTANT="+string(n))
		start := time.Now()
		out, err := cmd.CombinedOutput()
		return err != nil, time.Since(start), string(out)
	}
	for i, s := range suites {
		failed, _, why := hunt(i, "")
		require.False(t, failed, "%s fails without a fault:\n%s", s.name, why)
	}
	for _, n := range mutant.All {
		t.Run(string(n), func(t *testing.T) {
			for i, s := range suites {
				if failed, took, why := hunt(i, n); failed {
					fmt.Printf("%-24s caught by %-9s in %v: %s\n", n, s.name, took.Round(10*time.Millisecond), reason(why))
					return
				}
			}
			t.Fatal("no suite finds it")
		})
	}
}

// reason is the line of a test's output that says what was wrong.
func reason(out string) string {
	lines := strings.Split(out, "\n")
	for i, l := range lines {
		if strings.Contains(l, "[rapid] failed") || strings.Contains(l, "[rapid] panic") {
			if i+1 < len(lines) && strings.Contains(l, "violations") {
				return strings.TrimSpace(lines[i+1])
			}
			_, l, _ = strings.Cut(l, "tests: ")
			return strings.TrimSpace(l)
		}
	}
	for _, l := range lines {
		if strings.HasPrefix(strings.TrimSpace(l), "--- FAIL") || strings.HasPrefix(l, "panic") {
			return strings.TrimSpace(l)
		}
	}
	return strings.TrimSpace(lines[0])
}
