"""Fixtures of the tests of adaptive training."""

import pytest

from dadplug.adaptive import reset_progress


@pytest.fixture(autouse=True)
def _anew():
    reset_progress()
    yield
    reset_progress()
