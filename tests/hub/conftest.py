"""Fixtures of the tests of hub and sites."""

import hub_kits
import pytest
from running_hub import running_hub


@pytest.fixture
def kits(tmp_path):
    """Folder of the kits of a project with the sites a and b."""
    return hub_kits.make(tmp_path / "kits")


@pytest.fixture
def hub(tmp_path):
    """A running hub of the sites a and b."""
    with running_hub(tmp_path / "kits") as hub:
        yield hub


@pytest.fixture
def hub_of_three(tmp_path):
    """A running hub of the sites a, b and c."""
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        yield hub
