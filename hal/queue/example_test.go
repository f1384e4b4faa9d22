package queue_test

import (
	"context"
	"fmt"

	"github.com/halyard-go/halyard/hal/queue"
)

// printer is a device that prints what it is given.
type printer struct{ name string }

func (p printer) Run(op *queue.Op) error {
	fmt.Println(p.name, "runs", op.Kind)
	return nil
}

// Quick operations run on the submitter's goroutine when the queue is idle.
func (printer) Quick(op *queue.Op) bool { return op.Kind != queue.Call }

func newQueue(name string) *queue.Queue {
	return queue.New(queue.Options{Executor: func(q *queue.Queue) queue.Executor {
		return queue.NewWorker(q, printer{name}, false)
	}})
}

// A wait may come before anybody signals: the operation is deferred until then.
func Example() {
	first, second := newQueue("first"), newQueue("second")
	ready, done := queue.NewSemaphore(0), queue.NewSemaphore(0)

	_, issued, _ := second.Submit(&queue.Op{Kind: queue.Fill}, ready.At(1), done.At(1))
	fmt.Println("issued:", issued)
	at, issued, _ := first.Submit(&queue.Op{Kind: queue.Copy}, nil, ready.At(1))
	fmt.Println("issued:", issued)
	fmt.Println(done.Wait(context.Background(), 1))
	fmt.Println("second now comes after first's copy:", queue.Usable(second.ID(), queue.After(at)))
	first.Close()
	second.Close()
	// Output:
	// issued: false
	// first runs copy
	// second runs fill
	// issued: true
	// <nil>
	// second now comes after first's copy: true
}
