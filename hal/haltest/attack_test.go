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

// TestSoak runs histories for as long as -soak says, and says now and then how far
// it got. A failure prints how to run that history again.
func TestSoak(t *testing.T) {
	if *soak == 0 {
		t.Skip("no -soak=DURATION")
	}
	const round = 500
	if err := flag.Set("rapid.checks", strconv.Itoa(round)); err != nil {
		t.Fatal(err)
	}
	start, said := time.Now(), time.Now()
	for n := 0; time.Since(start) < *soak && !t.Failed(); n += round {
		rapid.Check(t, func(t *rapid.T) { haltest.Attack(t, haltest.Setup{}) })
		rapid.Check(t, func(t *rapid.T) { haltest.Progress(t, haltest.Setup{}) })
		if time.Since(said) > 10*time.Second {
			said = time.Now()
			fmt.Printf("soak: %d histories and as many programs in %v\n", n+round, time.Since(start).Round(time.Second))
		}
	}
}
