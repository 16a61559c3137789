# make demo       layer mode on a tiny Wan pipeline
# make test       the tests, less the long walks (under 10 minutes)
# make test-all   all tests
# make lint       ruff and mypy
# make bench      the modelled and measured tables
# make notebooks  run the notebooks and store their outputs
# make gpu-check  the main figures again, on this machine's accelerator

# The first Python that is new enough (diffusers needs 3.11); `make PYTHON=/path/to/python` overrides it.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python,\
	$(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

VENV := .venv
BIN := $(VENV)/bin
RUN := OMP_NUM_THREADS=1 $(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Two workers, but tests that measure time run alone and first.
PYTEST := $(RUN) -m pytest

.PHONY: demo test test-all lint bench notebooks gpu-check clean setup

setup: $(VENV)/.ready

# torch goes in first and pinned: a range would resolve to whatever build is newest. Without build isolation, so that
# setuptools is the pinned one too.
$(VENV)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (diffusers requires it); name one with make PYTHON=..."; exit 1; }
	@echo "setting up $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt setuptools wheel torch
	@$(PIP) install -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

demo: setup
	@$(BIN)/python diffusers_omni_offload/demo/__main__.py

# The simulated device is compiled once, before any worker could start to.
simulated-device: setup
	@$(RUN) -m tests.simdevice.build
.PHONY: simulated-device

test: simulated-device
	$(PYTEST) -m "timing and not slow" || test $$? -eq 5
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not timing"

test-all: simulated-device
	$(PYTEST) -m timing || test $$? -eq 5
	$(PYTEST) -n 2 --dist worksteal -m "not timing"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: simulated-device
	$(RUN) -m tests.benchmarks

notebooks: simulated-device
	$(RUN) -m tests.run_notebooks notebooks/*.ipynb

gpu-check: setup
	$(BIN)/python -m tests.benchmarks.gpu_check

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/simdevice/_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
