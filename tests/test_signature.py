"""Signatures that are derived from other definitions."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest

from dadplug.support.signature import OptionSet, number, option, takes_keywords_of, whole_number


@dataclass
class Paint:
    colour: str = field(default="red", metadata={"help": "colour of the paint"})
    coats: int = 2
    size: float | None = None


@takes_keywords_of(Paint)
def make_door(name: str, size: float = 2.0, **paint: Any) -> str:
    """Build a door."""
    return f"{name} {size} {sorted(paint.items())}"


@takes_keywords_of(make_door)
def make_house(doors: int = 1, **others: Any) -> None:
    pass


def test_keywords_have_the_types_and_defaults_of_their_definition():
    signature = inspect.signature(make_door)
    assert list(signature.parameters) == ["name", "size", "colour", "coats"]
    assert signature.parameters["coats"].annotation is int
    assert signature.parameters["coats"].default == 2
    assert signature.parameters["coats"].kind is inspect.Parameter.KEYWORD_ONLY
    assert signature.parameters["size"].default == 2.0  # the function's own
    assert signature.return_annotation is str


def test_help_texts_follow_the_docstring():
    assert inspect.getdoc(make_door) == "Build a door.\n\nArgs:\n    colour: colour of the paint."
    assert "    colour: colour of the paint." in make_house.__doc__  # and through further functions


def test_a_function_is_a_definition_too():
    parameters = inspect.signature(make_house).parameters
    assert list(parameters) == ["doors", "name", "size", "colour", "coats"]
    assert parameters["name"].default is inspect.Parameter.empty
    assert parameters["colour"].default == "red"


def test_the_function_itself_gets_what_is_given():
    assert make_door("front", coats=3) == "front 2.0 [('coats', 3)]"
    assert make_door("front", unknown=1) == "front 2.0 [('unknown', 1)]"


@dataclass(frozen=True)
class Walls(OptionSet):
    colour: str = option("red", "colour", choices=("red", "blue"))
    height: float = option(2.5, "height", number("a positive number", lambda value: value > 0))
    doors: int | None = option(None, "doors", whole_number(1, "or None", lambda value: value is None))
    smooth: bool = option(True, "smooth")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"colour": "green"}, "unknown colour 'green'; valid ones are 'red', 'blue'"),
        ({"height": -1}, "height must be a positive number, got -1"),
        ({"height": True}, "height must be a positive number, got True"),
        ({"doors": 0}, "doors must be a whole number of at least 1 or None, got 0"),
        ({"smooth": 1}, "smooth must be True or False, got 1"),
        ({"colours": "red"}, r"unknown option 'colours' \(did you mean 'colour'\?\); valid options are colour, height"),
        ({"zzz": 1}, "unknown option 'zzz'; valid options are"),
    ],
)
def test_a_set_of_options_checks_values_and_names(values, message):
    assert Walls.create(height=1, doors=2).doors == 2
    with pytest.raises(ValueError, match=message):
        Walls.create(**values)
