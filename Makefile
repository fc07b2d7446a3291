# The two commands of a fresh machine: make demo, make test. Each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where pip finds torch, for example: make demo TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
TORCH_INDEX ?=

# Processes that share the tests, a file at a time. Each test may start processes of its own.
WORKERS ?= 2

.PHONY: demo test test-long test-exhaustive lint bench docs clean

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Drivetrain needs Python 3.11 or newer; set PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH_INDEX) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,dev]"
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,dev,bench]"
	touch $@

demo: $(VENV)/.base
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not long and not exhaustive"

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m long

# The whole of what the other two sample: before a release.
test-exhaustive: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m exhaustive

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run_all.py

docs: $(VENV)/.dev
	$(BIN)/python -m drivetrain.config.docs
	$(BIN)/python -m drivetrain.catalogue.docs
	$(BIN)/python -m drivetrain.engine.ops.attention.docs
	$(BIN)/python -m drivetrain.measure.metrics > docs/metrics.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
