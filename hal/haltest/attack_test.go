package haltest_test

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/halyard-go/halyard/hal/haltest"
)

var soak = flag.Duration("soak", 0, "how long TestSoak runs random histories")

// TestMain runs more and longer histories than rapid does by itself, unless told
// how many.
func TestMain(m *testing.M) {
	flag.Parse()
	set := map[string]bool{}
	flag.Visit(func(f *flag.Flag) { set[f.Name] = true })
	checks := "1000"
	if testing.Short() {
		checks = "200"
	}
	for name, value := range map[string]string{"rapid.checks": checks, "rapid.steps": "60"} {
		if !set[name] {
			_ = flag.Set(name, value) // both exist
		}
	}
	os.Exit(m.Run())
}

func TestAttack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { haltest.Attack(t, haltest.Setup{}) })
}

func TestProgress(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { haltest.Progress(t, haltest.Setup{}) })
}

func FuzzAttack(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) { haltest.Attack(t, haltest.Setup{}) }))
}

func FuzzProgress(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) { haltest.Progress(t, haltest.Setup{}) }))
}

// TestSoak and TestSoakProgress run histories, and programs, for as long as -soak says
// together, and say now and then how far they got. A failure prints how to run that
// history again.
func TestSoak(t *testing.T) {
	soakFor(t, *soak/2, "histories", func(t *rapid.T) { haltest.Attack(t, haltest.Setup{}) })
}

func TestSoakProgress(t *testing.T) {
	soakFor(t, *soak/2, "programs", func(t *rapid.T) { haltest.Progress(t, haltest.Setup{}) })
}

func soakFor(t *testing.T, d time.Duration, what string, f func(*rapid.T)) {
	again := false // what a failure printed: one history
	flag.Visit(func(f *flag.Flag) { again = again || f.Name == "rapid.failfile" || f.Name == "rapid.seed" })
	switch {
	case again:
		rapid.Check(t, f)
		return
	case d == 0:
		t.Skip("no -soak=DURATION")
	}
	const round = 500
	if err := flag.Set("rapid.checks", strconv.Itoa(round)); err != nil {
		t.Fatal(err)
	}
	start, said := time.Now(), time.Now()
	for n := round; time.Since(start) < d; n += round {
		rapid.Check(t, f)
		if time.Since(said) > 10*time.Second {
			said = time.Now()
			fmt.Printf("soak: %d %s in %v\n", n, what, time.Since(start).Round(time.Second))
		}
	}
}
