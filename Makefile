# make train, make test: everything they need is installed into .venv first.
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/digits.yaml
# A file stays on one worker: its tests share what they compile and the runs they set up.
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

.PHONY: install train test test-slow test-parity test-gpu test-compiled mutants chaos docs lint format clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[digits]
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[test]
	touch $@

.venv/installed-parity: .venv/installed-test
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[parity]
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[docs]
	touch $@

install: .venv/installed

train: .venv/installed
	$(BIN)/python train.py --config $(CONFIG)

test: lint
	$(PYTEST) -n 2 -m "not slow and not gpu and not parity and not compiled"

# What takes long: whole runs, clusters, a wheel in an environment of its own, the site.
test-slow: .venv/installed-test .venv/installed-docs
	$(PYTEST) -n 3 -m "slow and not gpu and not parity" $$(grep -rl --include='test_*.py' slow tests)

# Against diffusers itself, which needs PyTorch; elsewhere golden files stand for it.
test-parity: .venv/installed-parity
	$(PYTEST) -n 2 -m parity tests/parity

# On a machine with a GPU, in an environment that has the extra cuda12 or cuda13.
# Workers share the GPU: most of the time goes into compiling.
test-gpu:
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest --dist loadfile -n 4 -m gpu

# Compiles steps and kernels for a GPU, on a machine without one. In an environment of its own, as
# JAX's CUDA plugin looks for a GPU wherever it is installed; NVIDIA's libraries take 5 GB.
test-compiled: .venv-compiled/installed
	.venv-compiled/bin/python -m pytest -m compiled tests/bench/test_compiled.py

.venv-compiled/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-compiled
	.venv-compiled/bin/python -m pip install --quiet --constraint constraints.txt --editable .[test,cuda12]
	touch $@

# Plants single faults and counts those that tests see: hours, most of them for the coverage of tests.
mutants: .venv/installed-test
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[mutants]
	$(BIN)/python tests/mutants.py

# Interrupts and damages runs; adds to chaos_cpu.json. As root, which can mount small disks.
KILLS ?= 300
SEED ?= 0
chaos: .venv/installed-test
	PYTHONPATH=. $(BIN)/python benchmarks/chaos.py --kills $(KILLS) --seed $(SEED)

# The site and its API reference; every warning is an error.
docs: .venv/installed-docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d build/doctrees docs build/site
	@echo "open build/site/index.html"

lint: .venv/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-compiled .mypy_cache .ruff_cache .pytest_cache .hypothesis
