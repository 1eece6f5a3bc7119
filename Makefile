# Two commands set everything up on a fresh machine: `make quickstart` and `make test`.
# VENV=DIR puts the environment elsewhere; it is rebuilt when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV ?= .venv
KEY := $(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-12)
READY := $(VENV)/.ready-$(KEY)
PY := $(VENV)/bin/python
# Two processes on two cores: more threads only make them wait for each other.
TEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q

.PHONY: quickstart test test-again test-fast test-gpu check lint format environment clean
quickstart: $(READY)
	@$(PY) -m launch.quickstart

test: $(READY)
	$(TEST)

test-again: $(READY)
	$(TEST) --last-failed

test-fast: $(READY)
	$(TEST) -m "not gpu and not slow"

test-gpu: $(READY)
	$(PY) -m pytest -q -m gpu

check: lint test

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

environment: $(READY)

# The marker is written last, so a killed install is done again.
$(READY):
	$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit(f"error: Python {v[0]}.{v[1]} is too old; Fenwick needs 3.10 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	DS_BUILD_OPS=0 $(PY) -m pip install -q --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@rm -f $(VENV)/.ready-*
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache fenwick.egg-info
