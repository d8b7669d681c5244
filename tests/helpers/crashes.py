"""Plugin of pytest: a crash of one of its processes ends the run with another status than tests that failed."""

import pytest

CRASHED = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Remember that a process of pytest-xdist has crashed."""
    if error:
        node.config.stash[CRASHED] = True


def pytest_sessionfinish(session):
    """Set the status by which `tests/run.py` does not run again what has crashed."""
    if session.config.stash.get(CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
