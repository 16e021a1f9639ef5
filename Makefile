# The two commands of the README, and what CI runs.  Everything is quick the second time.
.PHONY: demo test check bench native clean help

PYTHON ?= python3

help:
	@echo "make demo    install, build libllama, and watch eight answers at once"
	@echo "make test    install, and run the whole test suite"
	@echo "make check   ruff and mypy --strict"
	@echo "make bench   cllm beside the others, an hour; BENCH_ARGS=--quick: 10 minutes"
	@echo "make clean   remove .venv, .venv-peers and build results (cached libraries stay)"

demo:
	@PYTHON=$(PYTHON) tools/setup.sh server
	@.venv/bin/cllm demo

test:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

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
