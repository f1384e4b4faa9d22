package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/halyard-go/halyard/hal/allocator"
	"github.com/halyard-go/halyard/hal/allocator/raw"
	"github.com/halyard-go/halyard/hal/driver"
	"github.com/halyard-go/halyard/hal/host"
	"github.com/halyard-go/halyard/hal/memory"
	"github.com/halyard-go/halyard/hal/queue"
	"github.com/halyard-go/halyard/hal/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var update = flag.Bool("update", false, "write the golden files")

// result is what a command line did.
type result struct {
	code        int
	out, errors string
}

func halyard(t testing.TB, args ...string) result {
	t.Helper()
	return halyardWith(t, "", args...)
}

func halyardWith(t testing.TB, stdin string, args ...string) result {
	t.Helper()
	var out, errs bytes.Buffer
	code := run(t.Context(), args, strings.NewReader(stdin), &out, &errs)
	return result{code, out.String(), errs.String()}
}

// file writes a file and returns its path.
func file(t testing.TB, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// handMade has a peak of 5000 bytes live after its fourth event, a buffer of no
// bytes, and two that are never freed.
const handMade = "a 0 1000\na 1 3000 1\nf 0 1\na 2 2000\nf 1\na 3 0\n"

var times = regexp.MustCompile(`\d+\.\d ns( \(\d+\.\d M\))?`)

// golden compares text, times masked, with a file in testdata.
func golden(t *testing.T, name, text string) {
	t.Helper()
	text = times.ReplaceAllString(text, "TIME")
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o750))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), text, "run the test with -update if this is meant")
}

func TestReportForPeople(t *testing.T) {
	for name, args := range map[string][]string{
		"raw.txt":      {"--device_allocator=raw", "--queues=2"},
		"caching.txt":  {"--device_allocator=raw", "--device_allocator=caching", "--passes=2", "--verify"},
		"modelled.txt": {"--device=host:alloc_cost=1us", "--device_allocator=raw+block"},
	} {
		r := halyardWith(t, handMade, append([]string{"run", "-"}, args...)...)
		require.Equal(t, exitOK, r.code, r.errors)
		require.Empty(t, r.errors)
		golden(t, name, r.out)
	}
}

func TestReportOfFailures(t *testing.T) {
	r := halyardWith(t, "a 0 5000\na 1 5000 1\nf 1\n", "run", "-", "--device=host:capacity=8KiB", "--device_allocator=raw")
	require.Equal(t, exitFailed, r.code)
	golden(t, "failed.txt", r.out)
	require.Contains(t, r.errors, "halyard: -: the first request that failed: hal: out of memory: 4.88 KiB asked of heap device of host")
	require.Contains(t, r.errors, "\n  advice: ")
	require.Equal(t, 1, strings.Count(r.errors, "out of memory: 4.88 KiB"), "the first only")
}

func TestReportInJSON(t *testing.T) {
	path := file(t, "hand.trace", handMade)
	r := halyard(t, "run", "--format=json", "--passes=3", "--verify", "--queues=2", "--device_allocator=raw+caching", path, path)
	require.Equal(t, exitOK, r.code, r.errors)
	require.Empty(t, r.errors)
	lines := strings.Split(strings.TrimSuffix(r.out, "\n"), "\n")
	require.Len(t, lines, 2, "one object a line")

	var j map[string]any
	require.NoError(t, json.Unmarshal([]byte(lines[1]), &j))
	for key, want := range map[string]any{
		"ok": true, "input": path, "trace": "hand", "generated": "", "device": "host:queues=2", "device_allocator": "raw+caching",
		"modelled": "", "queues": 2.0, "streams": 2.0, "passes": 3.0, "verified": true,
		"events": 18.0, "allocs": 12.0, "frees": 12.0, "failed": 0.0, "overlaps": 0.0, "lost_bytes": 0.0, "misplaced": 0.0,
		"peak_live_bytes": 5000.0, "peak_held_bytes": 6144.0, "held_over_live": 6144.0 / 5000, "retained_bytes": 6144.0,
		"source_allocs": 3.0, "source_frees": 0.0, "maps": 0.0, "unmaps": 0.0, "pages_created": 0.0, "pages_released": 0.0,
		"driver_calls_avoided": 15.0, "source_allocs_by_pass": []any{3.0, 0.0, 0.0}, "driver_calls_by_pass": []any{3.0, 0.0, 0.0},
		"cache_layer": "caching", "cache_hits": 6.0, "cache_misses": 3.0, "evicted": 0.0,
		"failed_by_run": map[string]any{"counted": 0.0, "timed": 0.0, "queued": 0.0, "queue-verified": 0.0},
		"first_error":   "", "problems": []any{}, "problems_unlisted": 0.0,
	} {
		require.Equal(t, want, j[key], key)
	}
	for _, key := range []string{"ns_per_event", "queue_ns_per_event", "mutex_ns", "seconds"} {
		require.Positive(t, j[key], key)
	}
	layers := j["layers"].([]any)
	require.Len(t, layers, 2)
	require.Equal(t, "caching", layers[0].(map[string]any)["layer"])
	require.Equal(t, 6144.0, layers[0].(map[string]any)["idle_bytes"])
	require.Equal(t, 6144.0, layers[1].(map[string]any)["held_bytes"])
}

func TestFailureInJSON(t *testing.T) {
	r := halyardWith(t, "a 0 5000\na 1 5000 1\nf 1\n", "run", "--format=json", "--device=host:capacity=8KiB,alloc_cost=1us", "--device_allocator=raw", "-")
	require.Equal(t, exitFailed, r.code)
	require.Empty(t, r.errors)
	var j reportJSON
	require.NoError(t, json.Unmarshal([]byte(r.out), &j))
	require.False(t, j.OK)
	require.Equal(t, uint64(1), j.Failed)
	require.Equal(t, uint64(1), j.Allocs)
	require.Equal(t, map[string]uint64{"counted": 1, "timed": 1, "queued": 1}, j.FailedByRun)
	require.Contains(t, j.FirstError, "out of memory")
	require.Contains(t, j.Modelled, "alloc_cost")
}

func TestWorkloads(t *testing.T) {
	r := halyard(t, "run", "--list")
	require.Equal(t, exitOK, r.code)
	require.Regexp(t, `(?m)^llama3-8b +Llama`, r.out)
	require.Regexp(t, `(?m)^resnet50-train +ResNet`, r.out)

	r = halyard(t, "run", "--list", "--format=json")
	require.Equal(t, exitOK, r.code)
	dec := json.NewDecoder(strings.NewReader(r.out))
	var names []string
	for dec.More() {
		var w struct{ Name, Summary, Source string }
		require.NoError(t, dec.Decode(&w))
		require.NotEmpty(t, w.Summary)
		require.NotEmpty(t, w.Source)
		names = append(names, w.Name)
	}
	require.Equal(t, []string{"llama3-8b", "resnet50-train"}, names)

	r = halyard(t, "run", "--format=json", "--seed=7", "llama3-8b", "resnet50-train")
	require.Equal(t, exitOK, r.code, r.errors)
	dec = json.NewDecoder(strings.NewReader(r.out))
	for _, want := range []reportJSON{{Input: "llama3-8b", Streams: 3}, {Input: "resnet50-train", Streams: 2}} {
		var j reportJSON
		require.NoError(t, dec.Decode(&j))
		require.Equal(t, want.Input, j.Input)
		require.Equal(t, want.Streams, j.Streams)
		require.Equal(t, "seed 7, scale 1", j.Generated)
		require.Equal(t, j.Allocs, j.Frees)
	}
}

func TestQueuesFollowTheStreams(t *testing.T) {
	var text strings.Builder
	for _, s := range []string{"0", "3", "8"} {
		text.WriteString("a " + s + " 100 " + s + "\n")
	}
	for _, test := range []struct{ flag, device string }{
		{"--format=json", "host:queues=9"},
		{"--queues=2", "host:queues=2"},
		{"--device=host:queues=3", "host:queues=3"},
		{"--device=host: queues = 4", "host"}, // it says so, although that is the default
	} {
		r := halyardWith(t, text.String(), "run", "--format=json", test.flag, "-")
		require.Equal(t, exitOK, r.code, r.errors)
		var j reportJSON
		require.NoError(t, json.Unmarshal([]byte(r.out), &j))
		require.Equal(t, test.device, j.Device, test.flag)
	}
	r := halyardWith(t, "a 0 1\na 1 1 4000\n", "run", "--format=json", "-")
	require.Equal(t, exitOK, r.code, r.errors)
	require.Contains(t, r.out, `"device":"host","`, "more than the device can open: streams share queues")
}

func TestSeveralInputs(t *testing.T) {
	good, small := file(t, "good.trace", handMade), file(t, "small.trace", "a 0 100\n")
	r := halyard(t, "run", "--device=host:capacity=4KiB", "--device_allocator=raw", good, small)
	require.Equal(t, exitFailed, r.code, "the worst of all")
	require.Contains(t, r.out, good)
	require.Contains(t, r.out, small)
	require.Regexp(t, `(?m)^small\.trace +1 +100 B`, r.out, "a summary")

	r = halyard(t, "run", good, filepath.Join(t.TempDir(), "absent.trace"), file(t, "empty.trace", "# nothing\n"))
	require.Equal(t, exitUsage, r.code)
	require.Empty(t, r.out, "nothing is run")
	require.Regexp(t, `halyard: ".*absent\.trace" is neither a file nor a built-in workload \(llama3-8b, resnet50-train\)\n`, r.errors)
	require.Regexp(t, `halyard: .*empty\.trace: empty trace: no events\n`, r.errors)
}

func TestRelativePathsOfTraces(t *testing.T) {
	path := file(t, "near.trace", handMade)
	t.Chdir(filepath.Dir(path))
	for _, name := range []string{"near.trace", "./near.trace", path} {
		r := halyard(t, "run", name)
		require.Equal(t, exitOK, r.code, r.errors)
	}
}

func TestUsageErrors(t *testing.T) {
	t.Setenv(allocator.EnvironmentVariable, "")
	bad := file(t, "bad.trace", "a 0 5\nf 0\n# fine\nf 0\n")
	for _, test := range []struct {
		args []string
		says string
	}{
		{nil, "halyard: no command\nSee \"halyard --help\".\n"},
		{[]string{"runn"}, "unknown command \"runn\" (valid: allocators, devices, run, version); did you mean run?"},
		{[]string{"help", "devces"}, "did you mean devices?"},
		{[]string{"run"}, "no INPUT: name a trace file or a built-in workload (llama3-8b, resnet50-train)\nSee \"halyard run --help\"."},
		{[]string{"run", "--pases=2", "x"}, "unknown flag --pases; did you mean --passes?"},
		{[]string{"run", "--device-allocator=raw", "x"}, "did you mean --device_allocator?"},
		{[]string{"run", "-x", "x"}, "unknown shorthand flag: 'x' in -x"},
		{[]string{"run", "--passes"}, "flag needs an argument: --passes"},
		{[]string{"run", "--passes=two", "x"}, "--passes=two: invalid syntax"},
		{[]string{"run", "--passes=0", "llama3-8b"}, "--passes=0: at least 1 is wanted"},
		{[]string{"run", "--queues=0", "llama3-8b"}, "--queues=0: at least 1 is wanted"},
		{[]string{"run", "--queues=100000", "llama3-8b"}, "--queues=100000: spec: option \"queues\": 100000 is out of range"},
		{[]string{"run", "--queues=2", "--device=host:queues=3", "llama3-8b"}, "--queues=2 and --device=host:queues=3 both say how many queues to open"},
		{[]string{"run", "--scale=0", "llama3-8b"}, "--scale=0: 1 to 256 is wanted"},
		{[]string{"run", "--format=jsn", "llama3-8b"}, "unknown format \"jsn\" (valid: text, json); did you mean json?"},
		{[]string{"run", "llama3-8"}, "\"llama3-8\" is neither a file nor a built-in workload (llama3-8b, resnet50-train); did you mean llama3-8b?"},
		{[]string{"run", bad}, bad + ":4: id 0 freed twice (first on line 2)\n"},
		{[]string{"run", t.TempDir()}, "is a directory"},
		{[]string{"run", "--device=hots", "llama3-8b"}, "--device: spec: unknown device \"hots\" (valid: host); did you mean \"host\"?\n  hots\n  ^~~~ column 1\n"},
		{[]string{"run", "--device=host+host", "llama3-8b"}, "one device at a time\n  host+host\n       ^~~~ column 6\n"},
		{[]string{"run", "--device=", "llama3-8b"}, "empty specification"},
		{[]string{"run", "--device=host:capcity=1GiB", "llama3-8b"}, "did you mean \"capacity\"?\n  host:capcity=1GiB\n       ^~~~~~~ column 6\n"},
		{[]string{"run", "--device_allocator=cachin", "llama3-8b"}, "--device_allocator: spec: unknown allocator \"cachin\" (valid: pool, raw, vmm, block, caching, fault, limit, mint, reuse, scope); did you mean \"caching\"?\n  cachin\n  ^~~~~~ column 1\n"},
		{[]string{"run", "--device_allocator=block+raw", "llama3-8b"}, "raw is a source: it must be the first layer\n  block+raw\n        ^~~ column 7\n"},
		{[]string{"devices", "host"}, "devices takes no arguments, got \"host\""},
		{[]string{"version", "1"}, "version takes no arguments"},
		{[]string{"allocators", "blok"}, "unknown allocator \"blok\""},
		{[]string{"allocators", "raw", "block"}, "one NAME at a time, got \"block\" too"},
	} {
		r := halyard(t, test.args...)
		require.Equal(t, exitUsage, r.code, "%v", test.args)
		require.Contains(t, r.errors, test.says, "%v", test.args)
		require.True(t, strings.HasPrefix(r.errors, "halyard: "), "%v: %s", test.args, r.errors)
		require.Empty(t, r.out, "%v", test.args)
	}
}

func TestHelp(t *testing.T) {
	for _, test := range []struct {
		args []string
		says string
	}{
		{[]string{"--help"}, "Available Commands:"},
		{[]string{"help"}, "Available Commands:"},
		{[]string{"help", "run"}, "Exit codes: 0"},
		{[]string{"run", "--help"}, allocator.EnvironmentVariable},
		{[]string{"run", "--device_allocator=help"}, "--device_allocator=NAME[:OPTIONS]"},
		{[]string{"run", "--device_allocator=raw", "--device_allocator=block:help", "llama3-8b"}, "block: best-fit"},
		{[]string{"run", "--device=host:help"}, "host: host memory as device memory"},
		{[]string{"run", "--device=help"}, "host memory as device memory"},
		{[]string{"allocators"}, "environment variable " + allocator.EnvironmentVariable},
		{[]string{"allocators", "caching"}, "caching: keeps freed memory"},
		{[]string{"devices"}, "sources  "},
		{[]string{"version"}, "halyard "},
	} {
		r := halyard(t, test.args...)
		require.Equal(t, exitOK, r.code, "%v: %s", test.args, r.errors)
		require.Contains(t, r.out, test.says, "%v", test.args)
		require.Empty(t, r.errors, "%v", test.args)
	}
}

func TestEnvironmentVariable(t *testing.T) {
	t.Setenv(allocator.EnvironmentVariable, "raw+caching")
	r := halyardWith(t, handMade, "run", "-")
	require.Equal(t, exitOK, r.code, r.errors)
	require.Contains(t, r.out, "allocator  raw+caching\n")

	r = halyardWith(t, handMade, "run", "--device_allocator=raw", "-")
	require.Contains(t, r.out, "allocator  raw\n", "the flag wins")

	t.Setenv(allocator.EnvironmentVariable, "bloc")
	r = halyardWith(t, handMade, "run", "-")
	require.Equal(t, exitUsage, r.code)
	require.Contains(t, r.errors, allocator.EnvironmentVariable+": spec: unknown allocator \"bloc\"")

	t.Setenv(allocator.EnvironmentVariable, "help")
	r = halyardWith(t, handMade, "run", "-")
	require.Equal(t, exitOK, r.code)
	require.Contains(t, r.out, "NAME[:OPTIONS]")
}

func TestListsInJSON(t *testing.T) {
	r := halyard(t, "devices", "--format=json")
	require.Equal(t, exitOK, r.code)
	var d deviceJSON
	require.NoError(t, json.NewDecoder(strings.NewReader(r.out)).Decode(&d))
	require.True(t, d.Usable)
	require.Equal(t, "host", d.Name)
	require.NotEmpty(t, d.Sources)
	require.Positive(t, d.Heaps[0].Capacity)
	require.Positive(t, d.Queues)

	r = halyard(t, "allocators", "--format=json", "block")
	require.Equal(t, exitOK, r.code)
	var l struct {
		Source  bool
		Name    string
		Options []spec.Option
	}
	require.NoError(t, json.Unmarshal([]byte(r.out), &l))
	require.Equal(t, "block", l.Name)
	require.False(t, l.Source)
	require.NotEmpty(t, l.Options)

	r = halyard(t, "allocators", "--format=json")
	require.Equal(t, 10, strings.Count(r.out, "\n"))
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errs bytes.Buffer
	require.Equal(t, exitInterrupted, run(ctx, []string{"run", "llama3-8b"}, nil, &out, &errs))
	require.Equal(t, "halyard: interrupted\n", errs.String())
	require.Empty(t, out.String())
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestReportThatCannotBeWritten(t *testing.T) {
	for _, args := range [][]string{{"run", "-"}, {"run", "--format=json", "-"}, {"devices"}, {"version"}} {
		var errs bytes.Buffer
		code := run(t.Context(), args, strings.NewReader(handMade), full{}, &errs)
		require.Equal(t, exitFailed, code, "%v", args)
		require.Equal(t, "halyard: writing the report: no space left\n", errs.String(), "%v", args)
	}
}

// absentDriver is one whose hardware is missing.
type absentDriver struct{}

var absentTable = &spec.Table{Name: "absent", Summary: "never there"}

func (absentDriver) Table() *spec.Table { return absentTable }
func (absentDriver) Devices() ([]driver.Info, error) {
	return nil, errors.New("no library libabsent.so")
}
func (absentDriver) Open(*spec.Values) (driver.Device, error) {
	return nil, errors.New("no library libabsent.so")
}

// overlapLayer hands the third request the memory of the first.
type overlapLayer struct {
	allocator.Allocator
	n     int
	first uint64
}

func (l *overlapLayer) Allocate(r allocator.Request) (allocator.Block, queue.Frontier, allocator.Outcome) {
	b, f, o := l.Allocator.Allocate(r)
	if l.n++; l.n == 1 {
		l.first = b.Addr
	} else if l.n == 3 {
		b.Addr = l.first
	}
	return b, f, o
}

func (l *overlapLayer) Trim(memory.Bytes) memory.Bytes { return 0 }
func (l *overlapLayer) Close() error                   { return nil }

// oddities is a command with a driver that can't be used and a layer that is broken.
func oddities(out, errs io.Writer, stdin string) *app {
	a := &app{drivers: &driver.Registry{}, allocators: &allocator.Registry{}, stdin: strings.NewReader(stdin), stdout: out, stderr: errs}
	if err := errors.Join(a.drivers.Register(host.Driver()), a.drivers.Register(absentDriver{})); err != nil {
		panic(err)
	}
	a.allocators.MustRegister(raw.Layer, allocator.Mint, allocator.Layer{
		Table: &spec.Table{Name: "overlap", Summary: "has a fault"},
		New: func(base allocator.Allocator, _ *allocator.Env, _ *spec.Values) (allocator.Allocator, error) {
			return &overlapLayer{Allocator: base}, nil
		},
	})
	return a
}

func TestUnusableDriver(t *testing.T) {
	var out, errs bytes.Buffer
	require.Equal(t, exitOK, oddities(&out, &errs, "").run(t.Context(), []string{"devices"}))
	require.Contains(t, out.String(), "absent  can't be used here: no library libabsent.so\n")

	out.Reset()
	require.Equal(t, exitOK, oddities(&out, &errs, "").run(t.Context(), []string{"devices", "--format=json"}))
	require.Contains(t, out.String(), `{"driver":"absent","usable":false,"reason":"no library libabsent.so","description":"never there"}`)

	out.Reset()
	require.Equal(t, exitUsage, oddities(&out, &errs, handMade).run(t.Context(), []string{"run", "--device=absent", "-"}))
	require.Contains(t, errs.String(), "no library libabsent.so")

	errs.Reset()
	require.Equal(t, exitUsage, oddities(&out, &errs, handMade).run(t.Context(), []string{"run", "--device=absent", "--queues=2", "-"}))
	require.Contains(t, errs.String(), "--queues=2: device absent has no option \"queues\"")
	require.Empty(t, out.String())
}

func TestVerifyFailsTheCommand(t *testing.T) {
	const text = "a 0 4096\na 1 4096\na 2 4096\nf 0\nf 1\nf 2\n"
	var out, errs bytes.Buffer
	code := oddities(&out, &errs, text).run(t.Context(), []string{"run", "--verify", "--device_allocator=raw+overlap", "-"})
	require.Equal(t, exitFailed, code, errs.String())
	require.Contains(t, errs.String(), "halyard: -: counted run: overlap: allocation 2 at 0x")
	require.Contains(t, errs.String(), "halyard: -: counted run: lost bytes: allocation 0 of 4096 bytes")
	require.Regexp(t, `checks +2 overlaps, 64 lost bytes, \d problems in all\n`, out.String())

	out.Reset()
	code = oddities(&out, &errs, text).run(t.Context(), []string{"run", "--verify", "--format=json", "--device_allocator=raw+overlap", "-"})
	require.Equal(t, exitFailed, code)
	var j reportJSON
	require.NoError(t, json.Unmarshal(out.Bytes(), &j))
	require.False(t, j.OK)
	require.Equal(t, uint64(2), j.Overlaps)
	require.Equal(t, uint64(64), j.LostBytes)
	require.GreaterOrEqual(t, len(j.Problems), 4)
}

func TestVersionLine(t *testing.T) {
	require.Regexp(t, `^halyard \(unknown\) go1`, version(nil))
	require.Regexp(t, `^halyard v1\.2\.3 0123456789ab \(with changes\) go1`, version(&debug.BuildInfo{
		Main: debug.Module{Version: "v1.2.3"},
		Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "0123456789abcdef"}, {Key: "vcs.modified", Value: "true"},
		},
	}))
}

func TestThousands(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", -1: "-1", -1234567: "-1,234,567", 100000: "100,000"} {
		require.Equal(t, want, thousands(n))
	}
	require.Equal(t, "18,446,744,073,709,551,615", thousands(^uint64(0)))
}

func TestColoursAreForTerminals(t *testing.T) {
	require.Equal(t, "x", painter(false).bad("x"))
	require.Equal(t, "\x1b[31mx\x1b[0m", painter(true).bad("x"))
	var out bytes.Buffer
	require.False(t, isTerminal(&out))
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer f.Close()
	require.False(t, isTerminal(&faultyWriter{w: f}))
}

func TestMeterIsForTerminals(t *testing.T) {
	var out bytes.Buffer
	a := &app{stderr: &out}
	m := a.meter("x")
	m.start = m.start.Add(-2 * meterDelay)
	m.progress(1, 2)
	m.clear()
	require.Empty(t, out.String())

	m.w = &out // as if it were one
	m.progress(1, 2)
	m.clear()
	require.Contains(t, out.String(), "50%")
}
