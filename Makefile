# `make` lists the targets. Everything runs on a Linux machine with Python 3.11 or newer, without a GPU.
.DEFAULT_GOAL := help

PYTHON ?= python3
# Images for containers often set it; then each process would compile all that it imports, for seconds.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
LOCK := launch/requirements-cpu.txt
GPU_LOCK := launch/requirements-gpu-path.txt
# A new lock or new package metadata makes a new stamp name; an unchanged one costs nothing.
STAMP := $(VENV)/installed-$(shell cat $(LOCK) $(GPU_LOCK) setup.py | cksum | cut -d' ' -f1)
DATA ?=
SEED ?=
FAMILY ?=
ALGORITHM ?=
ENV ?=
OVERRIDES ?=
TESTS ?= tests
JOBS ?= 3
CASES ?=

.PHONY: help setup demo test test-slow test-all test-long test-gpu-path test-gpu-image test-adapters parity pushes gpu-a gpu-b gpu-c gpu-d gpu-e style bench bench-trl soak chaos docs

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20
	@echo
	@echo 'make demo takes DATA=DIR (your images), SEED=1, FAMILY=qwen3_vl, ALGORITHM=ppo (recipes/algorithms),'
	@echo '  ENV=vqa_retry (zoom, browser, gateway, geo3k, geo3k_calculator, vqa, caption, geospot, moved) and OVERRIDES="algorithm.steps=3"'
	@echo '  Each ENV, ALGORITHM, FAMILY, SEED and DATA has a folder: runs/demo, runs/demo-zoom, runs/demo-qwen3_vl-seed1, ...'
	@echo 'make test takes TESTS=tests/unit/data and JOBS=8, make parity takes CASES=..., any target PYTHON=python3.12'

# Interpreter, lock files. Where the package index serves torch for CUDA only, its libraries come as
# dependencies.
define install
	@$(1) launch/install.py $(2)
	@$(1) -c 'import torch' 2>/dev/null || \
		$(1) -m pip install --quiet --disable-pip-version-check $$(grep -h '^torch==' $(2) | tail -1)
endef

setup: $(STAMP) ## create .venv with the pinned packages (3 GB)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "megavlm needs Python 3.11 or newer; choose one with: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call install,$(BIN)/python,$(LOCK))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@# Apart, because megatron-core would take it for the whole of Transformer Engine (tests/gpu_path).
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile --upgrade \
		--target $(VENV)/gpu-path $$(grep '^transformer_engine==' $(GPU_LOCK))
	@# Every interpreter of .venv can import the lock's torchvision, which is built for CUDA.
	@echo 'import megavlm.parallel.torchvision_ops as ops; ops.install_hook()' \
		> $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megavlm.pth
	@rm -f $(VENV)/installed-*
	@touch $@

demo: setup ## train a tiny model on generated images, or on yours
	$(BIN)/megavlm demo $(if $(DATA),--data "$(DATA)") $(if $(SEED),--seed $(SEED)) $(if $(FAMILY),--family $(FAMILY)) $(if $(ALGORITHM)$(ENV),--algorithm $(or $(ENV),$(ALGORITHM))) $(OVERRIDES)

# Several tests at a time: ranks and servers wait for each other and leave cores idle. In their
# order: groups that start servers are few tests and long, and would be left for the end.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder

test: setup ## run the tests of every unit, layout and family, and a whole run (10 to 20 minutes)
	$(PYTEST) -m "not slow and not long" $(TESTS)

test-slow: setup ## run the tests that `make test` leaves out
	$(PYTEST) -m "slow and not long" $(TESTS)

test-long: setup ## run what only nights have time for: faults of whole clusters, the GPU stages with tiny models
	$(PYTEST) -m long $(TESTS)

test-all: test test-slow ## run what .ci/run runs on every push (about an hour)

# What the models on a GPU are made of; not what no GPU takes part in.
GPU_PATH_TESTS := $(wildcard tests/gpu_path/*cases.py) tests/parity/test_parity.py tests/parity/test_tree_packs.py \
	tests/distributed tests/unit/checkpointing/test_checkpointing.py tests/unit/checkpointing/test_experts.py
GPU_VENV := .venv-gpu-path

test-gpu-path: ## run models and updates on Transformer Engine's layers and the torch of the Dockerfile's image, on a CPU (6 GB)
	@$(MAKE) --no-print-directory setup VENV=$(GPU_VENV) LOCK="$(LOCK) $(GPU_LOCK)"
	MEGAVLM_GPU_PATH=1 OMP_NUM_THREADS=1 $(GPU_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup $(GPU_PATH_TESTS)

IMAGE_VENV ?= .venv-gpu-image
IMAGE_LOCK := launch/requirements-gpu-image.txt
IMAGE_STAMP := $(IMAGE_VENV)/installed-$(shell cksum < $(IMAGE_LOCK) | cut -d' ' -f1)
# These machines' Python where there is one: pyenv's python3.12 runs only where its version is chosen.
IMAGE_PYTHON = $(or $(shell PYENV_VERSION=3.12 python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null),$(PYTHON))

$(IMAGE_VENV): $(IMAGE_STAMP)

$(IMAGE_STAMP):
	@$(IMAGE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "the numpy of the GPU stages' machines needs Python 3.12 or newer; choose one with: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(IMAGE_VENV)/bin/python || $(IMAGE_PYTHON) -m venv $(IMAGE_VENV)
	$(call install,$(IMAGE_VENV)/bin/python,$(IMAGE_LOCK))
	@rm -f $(IMAGE_VENV)/installed-*
	@touch $@

IMAGE_TESTS := tests/unit/models tests/parity/test_parity.py tests/parity/test_tree_packs.py \
	tests/gpu/test_on_cpu.py::test_stage_a_runs_on_a_cpu

test-gpu-image: $(IMAGE_STAMP) ## run models, parity and stage a on the versions of the GPU stages' machines, on a CPU (6 GB)
	OMP_NUM_THREADS=1 $(IMAGE_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup $(IMAGE_TESTS)

# Packages that need other versions than the lock has, each in a folder before the others.
test-adapters: setup ## run the adapters of verifiers and OpenEnv, and MiniWoB++, with the real packages (0.3 GB)
	@for name in verifiers openenv miniwob; do \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile --upgrade \
			--target $(VENV)/adapters/$$name -r launch/requirements-$$name.txt || exit; \
	done
	PYTHONPATH=$(VENV)/adapters/verifiers $(BIN)/python -m pytest tests/unit/environments/adapters/verifiers_cases.py
	PYTHONPATH=$(VENV)/adapters/openenv $(BIN)/python -m pytest tests/unit/environments/adapters/test_openenv.py
	PYTHONPATH=$(VENV)/adapters/miniwob $(BIN)/python -m pytest tests/unit/tasks/miniwob_cases.py

parity: setup ## compare all models, layouts and inputs with transformers; write tests/parity/RESULTS.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.parity.run $(CASES)

pushes: setup ## run every kind of weight sync against a real SGLang server
	OMP_NUM_THREADS=1 SYNC_MATRIX=all $(BIN)/python -m pytest tests/sglang/test_push_matrix.py

# Transformer Engine's torch extension comes as source. It is compiled for the image's torch with the headers of
# the CUDA wheels, without nvcc: all kernels are in the core's library.
ENGINE := $(shell grep '^transformer_engine_torch==' tests/gpu/requirements/d.txt)
ENGINE_WHEEL := $(IMAGE_VENV)/wheels/$(subst ==,-,$(ENGINE))-cp312-cp312-linux_x86_64.whl

$(ENGINE_WHEEL): $(IMAGE_STAMP)
	@echo "Compiling $(ENGINE), for 20 minutes on two cores"
	@nvidia=$$($(IMAGE_VENV)/bin/python -c 'import nvidia; print(nvidia.__path__[0])'); \
	PATH="$(abspath $(IMAGE_VENV))/bin:$$PATH" CUDA_HOME=$$nvidia/cu13 CPATH=$$nvidia/cudnn/include:$$nvidia/nccl/include \
	NVTE_PYTORCH_FORCE_BUILD=TRUE $(IMAGE_VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation --wheel-dir $(@D) $(ENGINE)

# What a stage of tests/gpu needs travels in one folder to a machine with a GPU and without a network.
KITS := gpu-a gpu-b gpu-c gpu-d gpu-e

gpu-a: ## pack stage a of the GPU tests in gpu/ (also gpu-b to gpu-e); there: bash gpu/run.sh a
gpu-d: $(ENGINE_WHEEL)
$(KITS): gpu-%:
	@rm -rf gpu && mkdir gpu && cp tests/gpu/run.sh gpu/ && git describe --always --dirty > gpu/state
	@$(PYTHON) launch/gpu_kit.py $* gpu --wheels $(IMAGE_VENV)/wheels

style: setup ## run the linter, the formatter (check only) and the type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## run and print the benchmarks; nothing passes or fails by them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/benchmarks -q -s -o python_files="bench_*.py" -o python_functions="bench_*"

TRL_VENV := .venv-trl
TRL_LOCK := launch/requirements-trl.txt
TRL_STAMP := $(TRL_VENV)/installed-$(shell cksum < $(TRL_LOCK) | cut -d' ' -f1)

$(TRL_STAMP):
	@test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	$(call install,$(TRL_VENV)/bin/python,$(TRL_LOCK))
	@rm -f $(TRL_VENV)/installed-*
	@touch $@

bench-trl: setup $(TRL_STAMP) ## compare steps with TRL's, in an environment of its own (1.2 GB); write tests/benchmarks/RESULTS.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.benchmarks.bench_trl $(TRL_VENV)/bin/python $(CASES)
	$(if $(CASES),,OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.benchmarks.bench_trl.curve)

STEPS ?= 2000

soak: setup ## run so many steps (STEPS=2000) of a tiny model, in which nothing may grow; write tests/soak/RESULTS.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.soak.run $(STEPS)

chaos: setup ## make 20 faults in 50 steps of a real run, at random by SEED; every sample is trained on once
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.soak.chaos $(or $(SEED),0)

docs: setup ## build the documentation in build/docs; a broken link fails
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet
	@echo "The documentation is in build/docs/index.html (with search: python3 -m http.server -d build/docs)"
