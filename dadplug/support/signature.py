"""Sets of options, each option defined once: its default, help text and valid values; and signatures that show them."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any, TypeVar, get_type_hints

from .logs import get_logger

Check = Callable[[str, Any], None]
"""Function of an option's name and value that raises ValueError if the value is not valid."""

_log = get_logger(__name__)
_warned: set[tuple[str, str]] = set()  # options without effect
_LIKENESS = 0.75  # of a word with the one that is meant
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Options = TypeVar("_Options", bound="OptionSet")
_TEXTS: dict[Callable[..., Any], dict[str, str]] = {}  # by decorated function, the help texts of its keywords


def option(
    default: Any,
    help_text: str,
    check: Check | None = None,
    choices: tuple[str, ...] = (),
    kind: Callable[[str], Any] | None = None,
) -> Any:
    """Define an option of an `OptionSet`.

    Args:
        default: default value.
        help_text: description for command lines and docstrings.
        check: raises ValueError for values that are not valid; not needed beside choices and for booleans.
        choices: valid values, if they are words.
        kind: converts text of a command line, if the default's type does not.
    """
    metadata = {"help": help_text, "check": check, "choices": choices, "kind": kind}
    return dataclasses.field(default=default, metadata=metadata)


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError if a value is not one of the valid ones."""
    if value not in choices:
        plain = str(value).lower().replace("-", "").replace("_", "")
        near = difflib.get_close_matches(plain, choices, 1, _LIKENESS)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown {name} {value!r}; valid ones are {', '.join(map(repr, choices))}{hint}")


def valid(description: str, is_valid: Callable[[Any], bool]) -> Check:
    """Return a check of a value.

    Args:
        description: words for the valid ones.
        is_valid: whether a value is valid.
    """

    def check(name: str, value: Any) -> None:
        if not is_valid(value):
            raise ValueError(f"{name} must be {description}, got {value!r}")

    return check


def whole_number(least: int, otherwise: str = "", is_other: Callable[[Any], bool] = lambda value: False) -> Check:
    """Return a check for whole numbers.

    Args:
        least: the least valid number.
        otherwise: words for what else is valid, such as "or None".
        is_other: whether a value is valid though it is no whole number.
    """
    description = f"a whole number of at least {least}{otherwise and ' ' + otherwise}"
    return valid(
        description,
        lambda value: is_other(value) or (isinstance(value, int) and not isinstance(value, bool) and value >= least),
    )


def number(description: str, is_valid: Callable[[float], bool], optional: bool = False) -> Check:
    """Return a check for numbers.

    Args:
        description: words for the valid ones.
        is_valid: whether a number is valid.
        optional: whether None is valid, too.
    """

    def is_valid_number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and is_valid(value)

    return valid(description, lambda value: (optional and value is None) or is_valid_number(value))


def named_value(text: str) -> tuple[str, Any]:
    """Return name and value of an option that is given as NAME=VALUE; a value that is no Python literal is a word.

    Raises:
        ValueError: if it is none.
    """
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ValueError(f"{text!r} is no option such as share_inputs=False")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


check_seconds = number("a positive number of seconds", lambda seconds: 0 < seconds < math.inf)
"""Raises ValueError, for the name of an option and its value, if the value is no number of seconds to wait."""

check_hub_timeout = number(
    "a positive number of seconds or None", lambda seconds: 0 < seconds < math.inf, optional=True
)
"""The same where None is valid, too."""


def unknown_option(name: str, names: Sequence[str]) -> ValueError:
    """Return the error for an unknown option, with the valid ones, and the one that may be meant.

    Args:
        name: the unknown name.
        names: the valid names.
    """
    near = difflib.get_close_matches(name, names, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return ValueError(f"unknown option {name!r}{hint}; valid options are {', '.join(names)}")


@dataclasses.dataclass(frozen=True)
class OptionSet:
    """Options with names, types, defaults, help texts and checks: a base for frozen dataclasses of `option` fields.

    Raises:
        ValueError: if a value is not valid; the message lists the valid ones.
    """

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.metadata["choices"]:
                check_choice(each.name, value, each.metadata["choices"])
            elif each.metadata["check"] is not None:
                each.metadata["check"](each.name, value)
            elif not isinstance(value, bool):
                raise ValueError(f"{each.name} must be True or False, got {value!r}")

    @classmethod
    def create(cls: type[_Options], **values: Any) -> _Options:
        """Make options from keyword arguments.

        Warns once of options that have no effect.

        Raises:
            ValueError: if a name is unknown, or a value not valid; the message lists the valid ones.
        """
        names = cls.names()
        for name in values:
            if name not in names:
                raise cls.unknown(name)
        created, unused = cls(**values), {}
        given = [each for each in dataclasses.fields(cls) if each.name in values]
        given = [each for each in given if getattr(created, each.name) != each.default]
        if given:
            unused = created.unused()
        for name, needed in ((each.name, unused.get(each.name)) for each in given):
            if needed and (name, needed) not in _warned:
                _warned.add((name, needed))
                _log.warning("the option %s=%r has no effect: %s", name, getattr(created, name), needed)
        return created

    def unused(self) -> dict[str, str]:
        """Return the options that have no effect beside the others, each with what to do."""
        return {}

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options."""
        return [each.name for each in dataclasses.fields(cls)]

    @classmethod
    def unknown(cls, name: str) -> ValueError:
        """Return the error for an unknown option."""
        return unknown_option(name, cls.names())


def takes_keywords_of(*sources: Any) -> Callable[[_Function], _Function]:
    """Decorate a function with ``**keywords`` so that its signature lists the keywords of other definitions.

    The signature is what `help`, documentation tools and LightningCLI read: the keywords get the types and defaults of
    their definition, and the function's docstring describes those fields whose metadata contain a ``help`` text. The
    function itself is not wrapped: it still receives all of them in ``**keywords``, and rejects unknown ones.

    Args:
        sources: dataclasses, whose fields become keywords, and functions, whose parameters do. A name that the function
            or an earlier source has is not taken again.

    Example:
        >>> @takes_keywords_of(Options)
        ... def train(model: nn.Module, mode: str = "rankdad", **options: Any) -> None:
        ...     print(Options.create(mode=mode, **options))
    """

    def decorate(function: _Function) -> _Function:
        types = get_type_hints(function)
        own = [each.replace(annotation=types.get(each.name, each.annotation)) for each in _parameters(function)]
        parameters = {each.name: each for each in own if each.kind is not Parameter.VAR_KEYWORD}
        texts: dict[str, str] = {}
        for source in sources:
            for each, text in _keywords_of(source):
                if each.name not in parameters:
                    parameters[each.name] = each
                    texts[each.name] = text
        _TEXTS[function] = texts
        signature = inspect.Signature(list(parameters.values()), return_annotation=types.get("return"))
        described_function: Any = function
        described_function.__signature__ = signature
        if described := [f"    {name}: {text}." for name, text in texts.items() if text]:
            summary = inspect.getdoc(function) or "Keywords that are options."
            function.__doc__ = "\n".join([summary, "", "Args:", *described])
        return function

    return decorate


def split_keywords(source: type, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keywords into those that are fields of a dataclass, and the others.

    Args:
        source: the dataclass.
        keywords: the keywords, such as those that a function with ``**keywords`` has received.
    """
    names = {each.name for each in dataclasses.fields(source)}
    own = {name: value for name, value in keywords.items() if name in names}
    return own, {name: value for name, value in keywords.items() if name not in names}


def _parameters(function: Callable[..., Any]) -> Iterable[Parameter]:
    return inspect.signature(function).parameters.values()


def _keywords_of(source: Any) -> Iterator[tuple[Parameter, str]]:
    """Yield the keywords of a dataclass or function, with their help texts."""
    if dataclasses.is_dataclass(source):
        types = get_type_hints(source)
        for field in dataclasses.fields(source):
            keyword = Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
            yield keyword, field.metadata.get("help", "")
        return
    for each in _parameters(source):
        if each.name != "self":
            yield each.replace(kind=Parameter.KEYWORD_ONLY), _TEXTS.get(source, {}).get(each.name, "")
