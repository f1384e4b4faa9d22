// Command halyard lists devices and allocators, and replays allocation traces and
// model workloads through a stack of allocators to say what it takes of memory,
// of driver calls and of time. "halyard run --help" is the manual.
package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/halyard-go/halyard/hal"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() {
		stop()                      // a second signal ends the process at once
		time.Sleep(2 * time.Second) // so does an end that doesn't come: a read that blocks, a slow device
		os.Exit(exitInterrupted)
	})
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	os.Exit(code)
}

// run is the command with hal's devices and allocators. It returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{drivers: hal.Drivers, allocators: hal.Allocators, stdin: stdin, stdout: stdout, stderr: stderr}
	return a.run(ctx, args)
}
