package vmem_test

import (
	"fmt"
	"log"

	"github.com/halyard-go/halyard/internal/vmem"
)

// A page moves to another address and keeps its bytes.
func ExamplePages() {
	const size = 2 << 20
	r, err := vmem.Reserve(1 << 30)
	if err != nil {
		log.Fatal(err)
	}
	defer r.Release()
	pages, err := vmem.NewPages(64*size, size)
	if err != nil {
		log.Fatal(err)
	}
	defer pages.Close()

	h, err := pages.Create()
	if err != nil {
		log.Fatal(err)
	}
	if err := pages.Map(r, 0, h); err != nil {
		log.Fatal(err)
	}
	b, err := r.Bytes(0, size)
	if err != nil {
		log.Fatal(err)
	}
	copy(b, "ahoy")

	if err := pages.Unmap(r, 0, size); err != nil {
		log.Fatal(err)
	}
	if err := pages.Map(r, 100*size, h); err != nil {
		log.Fatal(err)
	}
	b, err = r.At(uint64(r.Base())+100*size, 4)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", b)
	_, err = r.Bytes(0, 4)
	fmt.Println(err)
	// Output:
	// ahoy
	// vmem: view 4 bytes at offset 0x0: memory is not committed
}
