# make train, make test: everything they need is installed into .venv first.
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/digits.yaml
PYTEST = $(BIN)/python -m pytest

.PHONY: install train test test-all test-gpu lint format clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[test]
	touch $@

install: .venv/installed

train: .venv/installed
	$(BIN)/python train.py --config $(CONFIG)

test: lint
	$(PYTEST) -n 2 -m "not slow and not gpu"

test-all: lint
	$(PYTEST) -n 2 -m "not gpu"

# On a machine with a GPU, in an environment that has the extra cuda12 or cuda13.
test-gpu:
	$(PYTHON) -m pytest -m gpu

lint: .venv/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
