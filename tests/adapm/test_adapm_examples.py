"""Examples in the docstrings of the public classes: they run as they are written."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name", ["initialisers", "manager", "model", "row_optimizers", "sampling", "shards", "timeline"]
)
def test_examples_run(name):
    module = importlib.import_module(f"dadplug.adapm.{name}")
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
