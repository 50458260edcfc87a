# Two commands for a fresh machine: `make demo` and `make test`. Both set up .venv themselves; offline from the second time on.
PYTHON ?= python3
BIN := .venv/bin/python
# A GPU with a toolkit: pycuda. A GPU alone: cuda. Otherwise the processor, through OpenCL.
DEVICE ?= $(shell if nvidia-smi >/dev/null 2>&1; then if command -v nvcc >/dev/null 2>&1; then echo pycuda,cuda; else echo cuda; fi; else echo cpu; fi)

.PHONY: demo test quick check lint types pycuda matrix gpu-check setup clean

demo: .venv/.ready
	@$(BIN) -m ksgen demo

test: .venv/.ready-dev
	-@$(BIN) -m tests.driver
	@$(BIN) -m pytest -n auto

quick: .venv/.ready-dev
	@$(BIN) -m pytest -n auto -m "not slow"

check: lint types test

lint: .venv/.ready-dev
	@$(BIN) -m ruff check .
	@$(BIN) -m ruff format --check .

types: .venv/.ready-dev
	@$(BIN) -m mypy

# For the tests of the CUDA runtimes: a stand-in driver, and PyCUDA from its source, kept in the user's cache. A minute, once.
pycuda: .venv/.ready-dev
	@$(BIN) -m tests.driver

# Every family's defaults compiled for every target: minutes, and no GPU.
matrix: .venv/.ready-dev
	@$(BIN) -m tests.compile_matrix

# What the emulator proves, again on this machine's NVIDIA GPU; benchmarks; compute-sanitizer. Results go to benchmarks/results.
gpu-check: .venv/.ready-dev
	@$(BIN) -m tests.gpu_check

setup: .venv/.ready-dev

.venv/.python:
	@echo "ksgen: making .venv"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.ready: .venv/.python pyproject.toml
	@echo "ksgen: installing ksgen[$(DEVICE)] into .venv"
	@$(BIN) -m pip install --quiet --disable-pip-version-check -e ".[$(DEVICE)]"
	@touch $@

.venv/.ready-dev: .venv/.ready
	@echo "ksgen: installing what the tests need into .venv"
	@$(BIN) -m pip install --quiet --disable-pip-version-check -e ".[$(DEVICE),cuda,tune,dev]"
	@touch $@

clean:
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
