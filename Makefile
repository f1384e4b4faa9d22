# Halyard. "make" lists what there is.

.PHONY: help build test race invariants mutants soak bench lint ci

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build the command: bin/halyard
	go build -o bin/halyard ./tools/halyard

test: ## run the tests
	go test ./...

race: ## run the tests under the race detector
	go test -race -short ./...

invariants: ## run the tests with every structure checked after every step
	go test -tags invariants -short ./...

mutants: ## plant known mistakes one by one, and want each caught
	go test -tags mutants -timeout 25m -run TestEveryMutantIsCaught -v ./internal/mutant

soak: ## run random histories for ten minutes
	go test -run TestSoak -soak=10m -timeout 30m ./hal/haltest

bench: ## run the benchmarks
	go test -run '^$$' -bench . -benchmem ./...

lint: ## vet and staticcheck
	go vet ./...
	mkdir -p .bin && GOBIN=$(CURDIR)/.bin go install honnef.co/go/tools/cmd/staticcheck@v0.8.2
	.bin/staticcheck ./...

ci: ## everything that must hold before a change lands
	.ci/run
