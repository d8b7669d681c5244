"""Examples in the docstrings of the public classes: they run as they are written."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    *(
        f"adapm.{name}"
        for name in (
            "initialisers",
            "manager",
            "model",
            "row_optimizers",
            "sampling",
            "shards",
            "timeline",
        )
    ),
    *("data.base", "data.splits", "models.registry"),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(f"dadplug.{name}")
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
