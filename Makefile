# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv themselves; from the second time on
# they work offline. `make help` lists all targets: the text behind `##`.
PYTHON ?= python3
BIN := .venv/bin/python
# The extras for this machine, which ksgen/install.py prints: those for its GPU and driver, or OpenCL if it has neither
# a GPU nor a C++ compiler, else none. The script runs at most once.
DEVICE ?= $(eval DEVICE := $$(shell "$$(PYTHON)" -m ksgen.install))$(DEVICE)
# $(call EXTRAS,cpu) is [cpu], and nothing without extras.
EXTRAS = $(addprefix [,$(addsuffix ],$1))
COMMA := ,
# Tests start hundreds of processes. If the environment forbade Python to store bytecode, each would compile ksgen's
# sources again.
export PYTHONDONTWRITEBYTECODE :=
# The extras that were installed, or OpenCL, with which tests compare. BINDINGS adds cuda-bindings if they are missing:
# tests run them over a stand-in driver.
INSTALLED = $(or $(shell cat .venv/.ready 2>/dev/null),$(DEVICE),cpu)
BINDINGS = $(if $(filter cuda cuda12,$(subst $(COMMA), ,$(INSTALLED))),,cuda$(COMMA))
# The cases that `make test` and `make test-torch` run: `RING="--tenth 3"` adds a tenth of the second ring.
RING ?= --ring first
# What `make test-torch` installs if PyTorch is missing.
TORCH ?= torch
# A test may hang in a library, where no signal reaches it. By the thread method, the time limit then ends the worker,
# and the run goes on.
PYTEST = $(BIN) -m pytest -n auto --dist worksteal --timeout-method=thread -p tests.progress \
    -o console_output_style=classic --durations=10
# --no-compile: Python compiles modules at their first import, and most of the packages' 5,200 are never imported.
INSTALL = $(BIN) -m pip install --quiet --disable-pip-version-check --no-compile -e
# $(call install,EXTRAS,FIRST) installs ksgen with these extras, without PyCUDA if that fails, and writes the FIRST of
# them to .venv/.ready. Each call of pip builds ksgen, so a target makes one call.
WITHOUT_PYCUDA = $(subst pycuda$(COMMA),,$1)
define install
$(INSTALL) ".$(EXTRAS)" && echo "$2" >.venv/.ready || { \
    [ "$(WITHOUT_PYCUDA)" != "$1" ] && echo \
        "ksgen: PyCUDA cannot be installed here, as pip says above; installing ksgen[$(WITHOUT_PYCUDA)] without it" && \
    $(INSTALL) ".[$(WITHOUT_PYCUDA)]" && echo "$(call WITHOUT_PYCUDA,$2)" >.venv/.ready; }
endef

.PHONY: demo test test-torch test-all quick check lint types docs pycuda nvrtc matrix gpu-check setup
.PHONY: clean help

demo: .venv/.ready  ## Build, check and time the kernels of specs/vit.yaml on this machine.
	@$(BIN) -m ksgen demo

test: .venv/.ready-dev  ## Run the tests: each promise once (tests/rings.py). No GPU is needed.
	-@$(BIN) -m tests.driver
	@$(PYTEST) $(RING) -m "not libraries"

test-torch: .venv/.ready-torch  ## Install PyTorch and other libraries, and run the tests that need them.
	@$(PYTEST) $(RING) -m libraries

test-all: .venv/.ready-torch  ## Run all tests with all their cases.
	-@$(BIN) -m tests.driver
	@$(PYTEST)

quick: .venv/.ready-dev  ## Run the tests without the slow ones.
	@$(PYTEST) --ring first -m "not slow and not libraries"

check: lint types test  ## Run lint, types and tests.

lint: .venv/.ready-dev  ## Check style and format with ruff.
	@$(BIN) -m ruff check .
	@$(BIN) -m ruff format --check .

types: .venv/.ready-dev  ## Check types with mypy.
	@$(BIN) -m mypy

docs: .venv/.ready-docs  ## Build the site of these pages, with the reference of Python's names, in build/site.
	@NO_MKDOCS_2_WARNING=1 $(BIN) -m mkdocs build --quiet
	@echo "ksgen: the site is in build/site"

pycuda: .venv/.ready-dev  ## Build PyCUDA and the stand-in driver for the CUDA runtimes' tests: a minute, once.
	@$(BIN) -m tests.driver

nvrtc: .venv/.ready-dev  ## Download the oldest supported NVRTC, and the newest of CUDA 12, for the tests: 280 MB, once.
	@for each in cu11==11.8.89 cu12==12.9.86; do [ -d .venv/nvrtc/$${each%%=*} ] || \
	    $(BIN) -m pip install --quiet --disable-pip-version-check --no-deps \
	        --target .venv/nvrtc/$${each%%=*} nvidia-cuda-nvrtc-$$each || exit 1; done

matrix: .venv/.ready-dev  ## Compile every family's defaults for every GPU target: minutes the first time.
	@$(BIN) -m tests.compile_matrix

gpu-check: .venv/.ready-dev  ## On an NVIDIA GPU: passport, tests, benchmarks, compute-sanitizer; a page of results.
	@$(BIN) -c "import torch" 2>/dev/null || $(INSTALL) ".[bench]" --retries 1 || \
	    echo "ksgen: without PyTorch nothing is compared"
	@$(BIN) -m ksgen calibrate --device cuda
	@$(BIN) -m tests.gpu_check

setup: .venv/.ready-dev  ## Make .venv with all that the tests need.

clean:  ## Remove .venv, builds and tool caches. The user's kernel cache stays.
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache

help:  ## List these targets.
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

.venv/.python:
	@echo "ksgen: making .venv"
	@"$(PYTHON)" -m venv .venv
	@touch $@

.venv/.ready: .venv/.python pyproject.toml
	@echo "ksgen: installing ksgen$(call EXTRAS,$(DEVICE)) into .venv"
	@$(call install,$(DEVICE),$(DEVICE))

.venv/.ready-dev: .venv/.python pyproject.toml
	@echo "ksgen: installing ksgen and what its tests need into .venv"
	@$(call install,$(INSTALLED)$(COMMA)$(BINDINGS)tune$(COMMA)dev,$(INSTALLED))
	@touch $@

.venv/.ready-docs: .venv/.python pyproject.toml
	@echo "ksgen: installing what the site needs into .venv"
	@$(INSTALL) ".[docs]"
	@touch $@

.venv/.ready-torch: .venv/.ready-dev
	@echo "ksgen: installing PyTorch and other libraries into .venv"
	@$(BIN) -c "import torch" 2>/dev/null || $(BIN) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(INSTALL) ".[bench,interop]"
	@touch $@
