package trace

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Write writes t as text: its comments, then its events. [Read] returns the
// same trace from it, apart from the name, which is the file's.
//
// A comment with line feeds becomes as many comments, and space at the end of
// one is dropped. The text is not compressed; wrap w for that.
func Write(w io.Writer, t *Trace) error {
	bw := bufio.NewWriterSize(w, 64<<10)
	for _, c := range t.Comments {
		for text := range strings.SplitSeq(c, "\n") {
			if err := writeComment(bw, strings.TrimRight(text, " \t\r")); err != nil {
				return err
			}
		}
	}
	for i := range t.Events {
		e := &t.Events[i]
		b := bw.AvailableBuffer()
		if e.Free {
			b = append(b, "f "...)
			b = strconv.AppendInt(b, int64(e.ID), 10)
		} else {
			b = append(b, "a "...)
			b = strconv.AppendInt(b, int64(e.ID), 10)
			b = append(b, ' ')
			b = strconv.AppendInt(b, e.Bytes, 10)
		}
		if e.Stream != 0 {
			b = append(b, ' ')
			b = strconv.AppendInt(b, int64(e.Stream), 10)
		}
		b = append(b, '\n')
		bw.Write(b) // an error stays with bw until Flush
	}
	if err := bw.Flush(); err != nil {
		return fmt.Errorf("trace: write: %w", err)
	}
	return nil
}

// writeComment writes text so that Read finds exactly it: after a space, or
// without one where only so the line is short enough.
func writeComment(bw *bufio.Writer, text string) error {
	sign := "# "
	switch size := len(text) + len("\n"); {
	case text == "":
		sign = "#"
	case size+len(sign) <= MaxLine:
	case size+len("#") <= MaxLine && text[0] != ' ':
		sign = "#"
	default:
		return fmt.Errorf("trace: write: comment of %d bytes does not fit in a line of %d", len(text), MaxLine)
	}
	bw.WriteString(sign)
	bw.WriteString(text)
	bw.WriteByte('\n')
	return nil
}
