"""One base for every error, and one place where all of them are found."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import dadplug
from dadplug import errors


def error_classes():
    """Yield the public error classes that any module of the package defines."""
    for info in pkgutil.walk_packages(dadplug.__path__[:1], "dadplug."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        for name, found in inspect.getmembers(module, inspect.isclass):
            if issubclass(found, Exception) and found.__module__ == info.name and not name.startswith("_"):
                yield found


def test_every_error_derives_from_one_base_and_is_found_in_one_module():
    found = set(error_classes())
    assert len(found) > 20
    for each in found:
        assert issubclass(each, errors.DadplugError), each
        assert getattr(errors, each.__name__) is each


@pytest.mark.parametrize(
    ("error", "before"),
    [("SiteError", RuntimeError), ("KitError", ValueError), ("InputError", ValueError), ("TryAgainError", OSError)],
)
def test_errors_keep_the_built_in_class_that_programs_catch(error, before):
    with pytest.raises(before, match="reason"):
        raise getattr(errors, error)("reason")


def test_the_base_is_offered_by_the_package():
    assert dadplug.DadplugError is errors.DadplugError
    assert dadplug.errors is errors
