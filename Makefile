# The two commands of the README, and what CI runs.  Everything is quick the second time.
.PHONY: demo test test-exhaustive test-asan test-leaks soak check bench native clean help

PYTHON ?= python3
MINUTES ?= 1

help:
	@echo "make demo    install, build libllama, and watch eight answers at once"
	@echo "make test    install, and run the whole test suite"
	@echo "make test-exhaustive   the full numbers of docs/reliability.md"
	@echo "make test-asan   the suites of bindings and engine with sanitizers in libllama"
	@echo "make test-leaks  a thousand requests under LeakSanitizer: nothing grows"
	@echo "make soak    everything that callers do, for MINUTES=1, with injected faults"
	@echo "make check   ruff and mypy --strict"
	@echo "make bench   cllm beside the others, an hour; BENCH_ARGS=--quick: 10 minutes"
	@echo "make clean   remove .venv, .venv-peers and build results (cached libraries stay)"

demo:
	@PYTHON=$(PYTHON) tools/setup.sh server
	@.venv/bin/cllm demo

test:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

# What the suite leaves out: the full numbers of docs/reliability.md.
test-exhaustive:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m pytest -m exhaustive $(PYTEST_ARGS)

# gcc on Linux.  The first time, building takes a quarter of an hour.
# ASAN_ARGS="tests/bindings --reports DIR": only these tests, and keep the reports.
test-asan:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@PYTHON=$(PYTHON) ./build_llama.sh --sanitize --prefix build/sanitized
	@.venv/bin/python -m tests.reliability.sanitizers $(ASAN_ARGS)

test-leaks:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@PYTHON=$(PYTHON) ./build_llama.sh --sanitize --prefix build/sanitized
	@.venv/bin/python -m tests.reliability.leaks $(LEAKS_ARGS)

# SOAK_ARGS="--seed 3 --save": another mix, and keep the figures.
soak:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m tests.reliability.soak --minutes $(MINUTES) $(SOAK_ARGS)

check:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

# Alone on the machine: a second busy process makes spinning threads many times slower.
bench:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@PYTHON=.venv/bin/python tools/setup_peers.sh
	@.venv/bin/python -m benchmarks.side_by_side $(BENCH_ARGS)

native:
	@PYTHON=$(PYTHON) ./build_llama.sh

clean:
	rm -rf .venv .venv-peers build dist *.egg-info cllm/_native .mypy_cache .ruff_cache .pytest_cache .hypothesis
