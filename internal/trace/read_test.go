package trace

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// compress returns text as gzip.
func compress(t testing.TB, text string) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	_, err := io.WriteString(w, text)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return buf.Bytes()
}

// rewrite returns what Read makes of what Write makes of tr.
func rewrite(t testing.TB, tr *Trace) *Trace {
	t.Helper()
	var buf bytes.Buffer
	require.NoError(t, Write(&buf, tr))
	again, err := Read(tr.Name, &buf)
	require.NoError(t, err)
	return again
}

func TestRead(t *testing.T) {
	text := "# source: here\n#unit: bytes\n#\n" +
		"a 0 100\n" +
		"a 7 50 2\n" +
		"f 0\n" +
		"a -9223372036854775808 0 4095\n" +
		"a 9223372036854775807 60\n" +
		"a 2 5\n" + // equals no dense number, though it's small
		"f 7 1\n" +
		"# tail\n"
	want := &Trace{
		Name:     "dir.x",
		Comments: []string{"source: here", "unit: bytes", "", "tail"},
		Events: []Event{
			{Bytes: 100},
			{Bytes: 50, ID: 1, Stream: 2},
			{ID: 0, Free: true},
			{Bytes: 0, ID: 2, Stream: 4095},
			{Bytes: 60, ID: 3},
			{Bytes: 5, ID: 4},
			{ID: 1, Stream: 1, Free: true},
		},
		Allocs:   5,
		Frees:    2,
		PeakLive: 150,
		Streams:  4096,
	}
	for name, data := range map[string][]byte{
		"text":            []byte(text),
		"no line feed":    []byte(strings.TrimSuffix(text, "\n")),
		"gzip":            compress(t, text),
		"gzip in parts":   append(compress(t, text[:20]), compress(t, text[20:])...),
		"byte order mark": []byte("\ufeff" + text),
		"gzip with mark":  compress(t, "\ufeff"+text),
		"carriage return": []byte(strings.ReplaceAll(text, "\n", "\r\n")),
		"blank lines":     []byte("\n \t\n" + strings.ReplaceAll(text, "\n", "\n\n")),
		"spaces and tabs": []byte(strings.NewReplacer("\na ", "\n \ta\t ", "\nf ", "\n\tf  ", "\n", " \t\n").Replace(text)),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Read("/some/dir.x.trace.gz", bytes.NewReader(data))
			require.NoError(t, err)
			require.Equal(t, want, got)
			require.Equal(t, want, rewrite(t, got))

			got, err = Read("dir.x.gz", iotest.OneByteReader(bytes.NewReader(data)))
			require.NoError(t, err)
			require.Equal(t, want, got)
		})
	}
}

func TestReadErrors(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"verb", "a 1 1\nx 1\n", `t.trace:2: unknown verb "x"`},
		{"verb case", "A 1 1\n", `t.trace:1: unknown verb "A"`},
		{"verb long", strings.Repeat("z", 100), `t.trace:1: unknown verb "` + strings.Repeat("z", 40) + `..."`},
		{"verb binary", "\x00\xff", `t.trace:1: unknown verb "\x00\xff"`},
		{"line counts blanks and comments", "# c\n\n  \r\nq\n", `t.trace:4: unknown verb "q"`},

		{"too few to allocate", "a 1\n", `t.trace:1: want "a ID BYTES [STREAM]", got 2 fields`},
		{"verb alone", "a", `t.trace:1: want "a ID BYTES [STREAM]", got 1 fields`},
		{"too many to allocate", "a 1 2 3 4\n", `t.trace:1: want "a ID BYTES [STREAM]", got 5 fields`},
		{"too few to free", "f\n", `t.trace:1: want "f ID [STREAM]", got 1 fields`},
		{"too many to free", "a 1 1\nf 1 2 3 4 5\n", `t.trace:2: want "f ID [STREAM]", got 6 fields`},

		{"allocated twice", "# c\n\na 7 1\na 8 1\na 7 1\n", `t.trace:5: id 7 used twice (first on line 3): an id names one allocation of the trace`},
		{"allocated twice, first id", "a 0 1\na 0 1\n", `t.trace:2: id 0 used twice (first on line 1): an id names one allocation of the trace`},
		{"allocated again after a free", "a 7 1\nf 7\na 7 1\n", `t.trace:3: id 7 used twice (first on line 1): an id names one allocation of the trace`},
		{"free of unknown", "a 1 1\nf 2\n", `t.trace:2: id 2 freed but not allocated before`},
		{"free before allocation", "a 1 1\nf 0\na 0 1\n", `t.trace:2: id 0 freed but not allocated before`},
		{"freed twice", "a 1 1\nf 1\nf 1\n", `t.trace:3: id 1 freed twice (first on line 2)`},

		{"id not a number", "a x 1\n", `t.trace:1: id "x" is not a number`},
		{"id in hex", "a 0x1 1\n", `t.trace:1: id "0x1" is not a number`},
		{"id with plus", "a +1 1\n", `t.trace:1: id "+1" is not a number`},
		{"id sign only", "f -\n", `t.trace:1: id "-" is not a number`},
		{"id too large", "a 9223372036854775808 1\n", `t.trace:1: id 9223372036854775808 does not fit: the limit is 9223372036854775807`},
		{"id too small", "f -9223372036854775809\n", `t.trace:1: id -9223372036854775809 does not fit: the least is -9223372036854775808`},

		{"size not a number", "a 1 4KiB\n", `t.trace:1: size "4KiB" is not a number`},
		{"size fraction", "a 1 1.5\n", `t.trace:1: size "1.5" is not a number`},
		{"size negative", "a 1 -5\n", `t.trace:1: size -5 is negative`},
		{"size too large", "a 1 9223372036854775808\n", `t.trace:1: size 9223372036854775808 does not fit: the limit is 9223372036854775807`},
		{"size far too large", "a 1 " + strings.Repeat("9", 60), `t.trace:1: size ` + strings.Repeat("9", 40) + `... does not fit: the limit is 9223372036854775807`},
		{"sum too large", "a 1 9223372036854775807\na 2 1\n", `t.trace:2: size 1 does not fit: with 9223372036854775807 bytes live the sum would pass 9223372036854775807`},

		{"stream not a number", "a 1 1 s\n", `t.trace:1: stream "s" is not a number`},
		{"stream negative", "a 1 1 -1\n", `t.trace:1: stream -1 is outside 0 to 4095`},
		{"stream huge", "a 1 1 4096\n", `t.trace:1: stream 4096 is outside 0 to 4095`},
		{"stream beyond 64 bits", "a 1 1\nf 1 18446744073709551616\n", `t.trace:2: stream 18446744073709551616 is outside 0 to 4095`},

		{"line too long", "a 1 1\n" + strings.Repeat(" ", MaxLine) + "\n", `t.trace:2: line longer than 65536 bytes`},
		{"comment too long", "#" + strings.Repeat("x", MaxLine), `t.trace:1: line longer than 65536 bytes`},

		{"empty", "", `t.trace: empty trace: no events`},
		{"mark only", "\ufeff", `t.trace: empty trace: no events`},
		{"comments only", "# a\n\n# b\n", `t.trace: empty trace: no events`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, data := range [][]byte{[]byte(tt.text), compress(t, tt.text)} {
				got, err := Read("t.trace", bytes.NewReader(data))
				require.Nil(t, got)
				require.EqualError(t, err, tt.want)
				_, typed := errors.AsType[*Error](err)
				require.True(t, typed)
				require.Equal(t, strings.Contains(tt.want, "empty trace"), errors.Is(err, ErrEmpty))
			}
		})
	}
}

// An error says where, for programs too.
func TestReadErrorFields(t *testing.T) {
	_, err := Read("dir/t.trace", strings.NewReader("a 1 1\nx\n"))
	e, ok := errors.AsType[*Error](err)
	require.True(t, ok)
	require.Equal(t, Error{File: "dir/t.trace", Line: 2, Reason: `unknown verb "x"`}, *e)
}

// The longest line that is allowed is taken, and its comment can be written.
func TestLongestLine(t *testing.T) {
	for _, sign := range []string{"#", "# ", "#  "} {
		comment := sign + strings.Repeat("x", MaxLine-len(sign)-1)
		tr, err := Read("t", strings.NewReader(comment+"\na 1 1\n"))
		require.NoError(t, err)
		require.Equal(t, tr, rewrite(t, tr))
	}
}

func TestGzipErrors(t *testing.T) {
	var text strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&text, "a %d %d\n", i, i*i%7919)
	}
	whole := compress(t, text.String())

	for _, n := range []int{2, 5, 9, 10, 11, len(whole) / 2, len(whole) - 8, len(whole) - 1} {
		_, err := Read("t.gz", bytes.NewReader(whole[:n]))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, "%d bytes", n)
		require.Regexp(t, `^t\.gz:(\d+:)? truncated gzip: unexpected EOF$`, err.Error())
	}

	flip := func(at int) []byte {
		bad := bytes.Clone(whole)
		bad[at] ^= 0xff
		return bad
	}
	for name, data := range map[string][]byte{
		"method":          flip(2),
		"first block":     flip(10),
		"checksum":        flip(len(whole) - 5),
		"length":          flip(len(whole) - 1),
		"something after": append(bytes.Clone(whole), "more than ten bytes"...),
	} {
		_, err := Read("t.gz", bytes.NewReader(data))
		require.Regexp(t, `^t\.gz:(\d+:)? corrupt gzip: `, err.Error(), name)
	}
}

func TestLimits(t *testing.T) {
	lim := limits{bytes: 100, events: 3, comments: 40}
	text := "# c\na 0 1\na 1 1\nf 1\n"
	_, err := read("t", strings.NewReader(text), lim)
	require.NoError(t, err)

	_, err = read("t", strings.NewReader(text+"a 2 1\n"), lim)
	require.EqualError(t, err, "t:5: more than 3 events")
	_, err = read("t", strings.NewReader(text+"f 0\n"), lim)
	require.EqualError(t, err, "t:5: more than 3 events")
	_, err = read("t", strings.NewReader(text+"#\n#\n"), lim)
	require.EqualError(t, err, "t:6: comments longer than 40 bytes in all")

	fill := strings.Repeat("\n", 100-len(text))
	_, err = read("t", strings.NewReader(text+fill), lim)
	require.NoError(t, err, "exactly the limit")
	_, err = read("t", strings.NewReader(text+fill+"\n"), lim)
	require.ErrorContains(t, err, "text longer than 100 bytes")
}

// A few kilobytes that unpack to far more than allowed are refused while they
// unpack.
func TestBomb(t *testing.T) {
	bomb := compress(t, "a 0 1\n"+strings.Repeat("\n", 8<<20))
	require.Less(t, len(bomb), 16<<10)
	_, err := read("bomb.gz", bytes.NewReader(bomb), limits{bytes: 1 << 20, events: 10, comments: 100})
	require.ErrorContains(t, err, "text longer than 1048576 bytes")
}

func TestReaderFails(t *testing.T) {
	broken := errors.New("cable out")
	zipped := compress(t, "a 0 1\na 1 1\n")
	for name, r := range map[string]io.Reader{
		"at once":       iotest.ErrReader(broken),
		"in text":       io.MultiReader(strings.NewReader("a 0 1\na 1"), iotest.ErrReader(broken)),
		"after 2 bytes": io.MultiReader(strings.NewReader("a "), iotest.ErrReader(broken)),
		"in header":     io.MultiReader(bytes.NewReader(zipped[:4]), iotest.ErrReader(broken)),
		"in gzip":       io.MultiReader(bytes.NewReader(zipped[:len(zipped)-9]), iotest.ErrReader(broken)),
	} {
		_, err := Read("t", r)
		require.ErrorIs(t, err, broken, name)
		require.ErrorContains(t, err, "read: cable out", name)
	}
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "small.trace.gz")
	require.NoError(t, os.WriteFile(path, compress(t, "a 3 4\nf 3\n"), 0o666))
	tr, err := Open(path)
	require.NoError(t, err)
	require.Equal(t, "small", tr.Name)
	require.Equal(t, []Event{{Bytes: 4}, {Free: true}}, tr.Events)

	missing := filepath.Join(dir, "none.trace")
	_, err = Open(missing)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.True(t, strings.HasPrefix(err.Error(), missing+": open: "), err)

	_, err = Open(dir)
	require.Error(t, err)
	require.True(t, strings.HasPrefix(err.Error(), dir+": read: "), err)
}

func TestWriteErrors(t *testing.T) {
	tr, err := Read("t", strings.NewReader("a 1 1\n"))
	require.NoError(t, err)

	broken := errors.New("disk full")
	require.ErrorIs(t, Write(failingWriter{broken}, tr), broken)

	tr.Comments = []string{strings.Repeat("x", MaxLine)}
	require.EqualError(t, Write(io.Discard, tr), "trace: write: comment of 65536 bytes does not fit in a line of 65536")
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

// A comment that isn't one line is written as lines that are.
func TestWriteComments(t *testing.T) {
	tr, err := Read("t", strings.NewReader("a 1 1\n"))
	require.NoError(t, err)
	tr.Comments = []string{"one\na 5 5\r\n", " two \t", ""}
	var buf bytes.Buffer
	require.NoError(t, Write(&buf, tr))
	require.Equal(t, "# one\n# a 5 5\n#\n#  two\n#\na 0 1\n", buf.String())
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tr := draw(rt)
		require.Equal(rt, tr, rewrite(t, tr))
	})
}

// TestFolder reads every trace in the folder that HALYARD_TRACES names.
func TestFolder(t *testing.T) {
	dir := os.Getenv("HALYARD_TRACES")
	if dir == "" {
		t.Skip("HALYARD_TRACES isn't set: set it to a folder of recorded traces to read them all")
	}
	text, err := filepath.Glob(filepath.Join(dir, "*.trace"))
	require.NoError(t, err)
	zipped, err := filepath.Glob(filepath.Join(dir, "*.trace.gz"))
	require.NoError(t, err)
	paths := append(text, zipped...)
	require.NotEmpty(t, paths, "no traces in %s", dir)
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			tr, err := Open(path)
			require.NoError(t, err)
			require.Equal(t, len(tr.Events), tr.Allocs+tr.Frees)
			require.Len(t, tr.Leftover(), tr.Allocs-tr.Frees)
			require.Equal(t, tr, rewrite(t, tr))
			t.Logf("%d events, %d streams, peak %d bytes, %d left over", len(tr.Events), tr.Streams, tr.PeakLive, tr.Allocs-tr.Frees)
		})
	}
}

func FuzzRead(f *testing.F) {
	for _, text := range []string{
		"",
		"# source: x\n#y\n#  z \t\r\n\na 0 100 1\nf 0 2\n",
		"\ufeffa 5 0\r\na -9223372036854775808 7 4095\r\n",
		"a 1 9223372036854775807\na 2 1\n",
		"a 1 1\nf 1\nf 1\n",
		"a 0 1\na 2 1\na 1 1\nf 2\nf 1",
		"x\x00",
	} {
		f.Add([]byte(text))
		f.Add(compress(f, text))
	}
	lim := limits{bytes: 1 << 20, events: 1 << 12, comments: 1 << 14}
	f.Fuzz(func(t *testing.T, data []byte) {
		tr, err := read("t", bytes.NewReader(data), lim)
		if err != nil {
			if _, ok := errors.AsType[*Error](err); !ok || tr != nil {
				t.Fatalf("%v beside error %T %v", tr, err, err)
			}
			return
		}
		var b Builder
		for i, e := range tr.Events { // the promises of Trace
			var err error
			if e.Free {
				err = b.Free(e.ID, e.Stream)
			} else if id, err2 := b.Alloc(e.Bytes, e.Stream); id != e.ID || err2 != nil {
				t.Fatalf("event %d: id %d, want %d: %v", i, e.ID, id, err2)
			}
			if err != nil {
				t.Fatalf("event %d: %v", i, err)
			}
		}
		built, err := b.Trace()
		if err != nil {
			t.Fatal(err)
		}
		built.Name, built.Comments = tr.Name, tr.Comments
		require.Equal(t, built, tr)
		require.Equal(t, tr, rewrite(t, tr))
	})
}

func BenchmarkRead(b *testing.B) {
	const pairs = 150_000
	var direct, renumbered strings.Builder
	for i := range pairs {
		for _, f := range []struct {
			w  *strings.Builder
			id int
		}{{&direct, i}, {&renumbered, 1000 + 3*i}} {
			fmt.Fprintf(f.w, "a %d %d 1\nf %d\n", f.id, i*4096, f.id)
		}
	}
	for _, bm := range []struct {
		name string
		data []byte
	}{
		{"text", []byte(direct.String())},
		{"renumbered", []byte(renumbered.String())},
		{"gzip", compress(b, direct.String())},
	} {
		b.Run(bm.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Read("t", bytes.NewReader(bm.data)); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(2*pairs), "ns/event")
		})
	}
}
