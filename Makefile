# `make demo` and `make test` set everything up by themselves, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PACKAGING := setup.cfg setup.py pyproject.toml constraints.txt

.PHONY: demo test lint types docs clean

demo: $(READY)
	$(BIN)/python examples/two_site_mnist.py

test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy reads an installed copy, since it cannot follow the folders that packaging maps into the package.
types: $(VENV)/types

$(VENV)/types: $(READY) $(shell find dadplug hooks runners callbacks -name '*.py')
	rm -rf $(VENV)/installed build/lib
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target $(VENV)/installed .
	rm -rf build/lib build/bdist*
	cd $(VENV)/installed && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../setup.cfg -p dadplug
	touch $@

# Catalyst's metadata is refused by pip 24.1 and newer.
$(READY): $(PACKAGING)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "pip<24.1" "setuptools>=64,<81" wheel
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation \
		--editable ".[adapm,catalyst,lightning,examples,test,docs]"
	touch $@

# The documentation site, in docs/_build/html; -n: every reference has to lead somewhere, -W: warnings are errors.
docs: $(READY)
	$(BIN)/python -m sphinx -n -W --keep-going -q -b html docs docs/_build/html

clean:
	rm -rf $(VENV) build docs/_build dist *.egg-info logs
