from __future__ import annotations

import pytest
import support
import torch


@pytest.fixture(scope="session", autouse=True)
def _end_sites():
    yield
    support.close_all()


@pytest.fixture
def sites():
    """Groups of processes by size: `sites(2).run(function, *args)`."""
    return support.sites


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
