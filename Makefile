# Two commands on a fresh machine do everything, virtual environment included: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One thread each: two OpenMP threads on two busy cores stall one another.
export OMP_NUM_THREADS := 1
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where no bytecode is kept, each process of the tests compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

CHECKED := tests/contracts/test_layering.py tests/contracts/test_bits.py tests/torch/linear/test_linear.py

# Where tests start several ranks (`tests/contracts/test_ranks_marked.py` compares).
RANKS := tests/torch/parallel tests/torch/optim/test_ranks.py tests/torch/test_distributed.py \
	tests/torch/state/history/test_groups.py tests/torch/offload/test_sharded.py \
	tests/torch/inspection/test_ranks.py tests/torch/serving tests/train tests/examples tests/benchmarks/test_benchmarks.py

.PHONY: demo check test slow test-ranks test-lowering test-integrations test-gpu-ready test-gpu test-versions
.PHONY: accept accept-attention accept-blocks bench bench-gpu docs lint format clean

# Kernels that were compiled beforehand, and for which cards: the machine that will have the card needs the Python and
# the triton that filled it (`tests/versions/card.py` names them).
CACHE ?= $(CURDIR)/.gpu-cache
ARCH ?= sm_90

## Train a small language model in bf16, FP8, MXFP8 and NVFP4 side by side, and name the pictures.
demo: $(VENV)/.train
	$(BIN)/quaver compare --recipes bf16,delayed,tensorwise,mxfp8,nvfp4 --seeds 3 --steps 100 --out runs/demo --resume

## What a change most likely breaks, in about a minute: style, types, layering, eager bits and one layer.
check: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" -k "not compiled" $(CHECKED)

## The whole suite but what takes minutes. Tests of the C headers are skipped for each compiler that is missing.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

## What `make test` leaves out. Of it the six seeds of `accept-blocks` take an hour and a half of one core.
slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

## The distributed suite alone: every test that starts several ranks, over gloo on this CPU.
test-ranks: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "ranks and not slow" $(RANKS)

## Compile JAX layers for H200 and B200 without either, and read the programs. Downloads jax's CUDA plugin (480 MB).
test-lowering: $(VENV)/.cuda
	JAX_PLATFORMS=cpu QUAVER_TEST_LOWERING=1 PYTHONPATH=$(VENV)/cuda $(BIN)/python -m pytest -n 0 tests/jax/test_compiled.py

## After `make test`: compile all that a GPU will launch, check the machine code, and pack it so that nothing is left to
## compile. `make test` has counted launches and run the benchmark's cases at toy sizes.
test-gpu-ready: $(VENV)/.dev
	PYTHONPATH=src $(BIN)/python -m tests.versions.card -m benchmarks.gpu --compile $(ARCH) --cache $(CACHE) --check
	$(BIN)/python -m benchmarks.gpu.ahead.cache --pack $(CACHE)

## What other libraries do with converted models: tests that `make test` skips where a library is missing.
test-integrations: $(VENV)/.integrations
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests/integrations \
		tests/train/test_trackers.py tests/examples tests/contracts/test_docs.py \
		-k "integrations or trackers or huggingface or lightning or accelerate or peft or torchtitan or onnx"

## The tests that need a GPU, eight at a time on one card, with the kernels of CACHE (or of CACHE.tar.xz), in the Python
## that has its torch. A kernel that hangs ends its process after 45 seconds, a lost CUDA context ends the run.
test-gpu:
	$(PYTHON) -m benchmarks.gpu.ahead.cache $(CACHE)
	TRITON_CACHE_DIR=$(CACHE) PYTHONPATH=src XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -m gpu -n 8 --dist worksteal --maxfail 40 \
		--continue-on-collection-errors --timeout 45 --timeout-method thread -p tests.gpu_context \
		tests/gpu tests/kernels tests/torch/nn/attention tests/torch/backends/gpu \
		tests/jax/blocks/test_cudnn_attention.py

## The suite under the oldest and newest Python, torch and jax, and pairs of torch and triton: docs/install.md.
test-versions: $(VENV)/.dev
	PYTHONPATH=src $(BIN)/python -m tests.versions.suites
	PYTHONPATH=src $(BIN)/python -m tests.versions

## Train every recipe and a control on three seeds, and check the differences from bf16 (about an hour).
accept: $(VENV)/.dev
	$(BIN)/python -m benchmarks accept

## The same under the recipes that quantize attention too.
accept-attention: $(VENV)/.dev
	$(BIN)/python -m benchmarks accept-attention

## Models with experts and with state spaces on six seeds, beside what chance alone does (under an hour and a half of one core).
accept-blocks: $(VENV)/.dev
	$(BIN)/python -m benchmarks accept-blocks --model mixtral-tiny
	$(BIN)/python -m benchmarks accept-blocks --model mamba2-tiny

## Ratios against nn.Linear and torchao on this CPU.
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks cpu

## Kernels, GEMMs, layers and training on this machine's NVIDIA GPU (8 minutes), in the Python that has its torch.
bench-gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu --cache $(CACHE)

## The site, with the reference, in build/site; broken links are errors, and nothing is fetched while it is built.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

## The wheel and the source distribution in dist/, whose bytes depend on nothing but the files.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m hatchling build --directory $(CURDIR)/dist

## Build both once more from the unpacked source distribution, compare the bytes, and use the wheel in an environment of
## its own.
test-dist: dist
	rm -rf build/dist && mkdir -p build/dist/source
	tar --extract --file dist/*.tar.gz --strip-components 1 --directory build/dist/source --touch
	cd build/dist/source && $(abspath $(BIN))/python -m hatchling build --directory ../again
	cd dist && sha256sum * > ../build/dist/sums && cd ../build/dist/again && sha256sum --check ../sums
	$(PYTHON) -m venv build/dist/installed
	set -- dist/*.whl && build/dist/installed/bin/pip install --quiet --constraint constraints.txt "$$1[train]"
	cd build/dist && installed/bin/quaver doctor && installed/bin/python -m quaver.include

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) runs

$(VENV)/.train: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch
	$(BIN)/pip install --quiet --editable '.[train]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.train

$(VENV)/.integrations: $(VENV)/.dev
	$(BIN)/pip install --quiet --editable '.[dev,integrations]'
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/peers transformer-engine==2.20.2
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

# Beside the environment, not in it: there the plugin would look for a GPU whenever jax is imported.
$(VENV)/.cuda: $(VENV)/.dev
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && $(BIN)/pip install --quiet --no-deps --upgrade \
		--target $(VENV)/cuda jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version
	touch $@
