# make setup   .venv with the pinned packages; needs only Python 3.11 or newer, no GPU
# make demo    the main job on generated images, or on yours: make demo DATA=DIR SEED=1
#              by another algorithm of recipes/algorithms: make demo ALGORITHM=ppo
#              in another environment: make demo ENV=vqa_retry (geo3k, geo3k_calculator, vqa, caption, geospot)
#              keys of its recipe in recipes/debug as OVERRIDES="algorithm.steps=3"
# make test    the whole suite on CPU
# make style   linter, formatter (check only) and type checker
# make parity  the whole matrix of models, layouts and inputs against transformers: tests/parity/RESULTS.md
# make pushes  every trainer layout, way and mode of a weight sync against the real server
# make bench   measures, printed; nothing passes or fails by them

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := launch/requirements-cpu.txt
# A new lock or new package metadata makes a new stamp name; an unchanged one costs nothing.
STAMP := $(VENV)/installed-$(shell cat $(LOCK) setup.py | cksum | cut -d' ' -f1)
DATA ?=
SEED ?=
FAMILY ?=
ALGORITHM ?=
ENV ?=
OVERRIDES ?=
TESTS ?= tests
CASES ?=

.PHONY: setup demo test parity pushes style bench

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "megavlm needs Python 3.11 or newer; choose one with: make PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(LOCK)
	@# Where the package index serves torch for CUDA only, its libraries come as dependencies.
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' $(LOCK))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/installed-*
	@touch $@

demo: setup
	$(BIN)/megavlm demo $(if $(DATA),--data "$(DATA)") $(if $(SEED),--seed $(SEED)) $(if $(FAMILY),--family $(FAMILY)) $(if $(ALGORITHM)$(ENV),--algorithm $(or $(ENV),$(ALGORITHM))) $(OVERRIDES)

test: setup
	@# Two files at a time: ranks and servers wait for each other, and leave a core idle.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

parity: setup
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.parity.run $(CASES)

pushes: setup
	OMP_NUM_THREADS=1 SYNC_MATRIX=all $(BIN)/python -m pytest tests/sglang/test_push_matrix.py

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/benchmarks -q -s -o python_files="bench_*.py" -o python_functions="bench_*"
