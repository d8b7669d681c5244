"""Examples in the docstrings of the public classes: they run as they are written."""

from __future__ import annotations

import doctest
import importlib

import pytest

PARTS = ("initialisers", "manager", "model", "row_optimizers", "sampling", "shards", "timeline")


@pytest.mark.parametrize("name", [*(f"adapm.{part}" for part in PARTS), "data", "models"])
def test_examples_run(name):
    results = doctest.testmod(importlib.import_module(f"dadplug.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
