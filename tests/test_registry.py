"""Registries: look-ups by any spelling, aliases, listeners, and the error that lists what there is."""

from __future__ import annotations

import json

import pytest

from dadplug.errors import LoadError
from dadplug.registry import Registry, import_named


@pytest.fixture
def shapes():
    shapes: Registry[str, int] = Registry("shape")
    shapes.register("Square_one", "box")(1)
    shapes.register("circle")(2)
    return shapes


def test_names_are_found_by_any_spelling_and_listed_once(shapes):
    assert [shapes[name] for name in ("Square_one", "SQUARE-ONE", "squareone", "Box", "circle")] == [1, 1, 1, 1, 2]
    assert list(shapes) == ["Square_one", "circle"]


def test_an_unknown_name_lists_the_valid_ones(shapes):
    with pytest.raises(ValueError, match="unknown shape 'cube'; valid ones are Square_one, circle"):
        shapes["cube"]
    assert shapes.get("cube") is None
    assert list(shapes) == ["Square_one", "circle"]


def test_an_exact_registry_takes_names_as_they_are():
    modes: Registry[str, int] = Registry("mode", exact=True)
    modes.register("dad")(1)
    with pytest.raises(ValueError, match="unknown mode 'DAD'"):
        modes["DAD"]


def test_an_entry_can_be_replaced_and_removed(shapes):
    shapes.register("circle")(3)
    assert shapes["Circle"] == 3
    del shapes["circle"]
    with pytest.raises(ValueError, match=r"valid ones are Square_one$"):
        shapes["circle"]


def test_listeners_hear_of_later_entries(shapes):
    heard = []
    shapes.on_register(heard.append)
    shapes.register("line", "stroke")(4)
    assert heard == ["line"]


def test_keys_need_not_be_names():
    types: Registry[type, str] = Registry("type")
    types.register(int)("whole")
    assert types[int] == "whole"
    with pytest.raises(ValueError, match="unknown type <class 'str'>"):
        types[str]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "'nothing' does not read like FILE.py:NAME or MODULE:NAME"),
        ("none.py:net", r"there is no file none\.py"),
        ("nowhere_to_be_found:net", "nowhere_to_be_found:net: No module named"),
        ("json:JSONDecoder.net", r"json has no JSONDecoder\.net"),
    ],
)
def test_what_cannot_be_imported_is_named(name, message):
    assert import_named("json:JSONDecoder.decode") is json.JSONDecoder.decode
    with pytest.raises(LoadError, match=message):
        import_named(name)
