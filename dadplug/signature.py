"""Signatures derived from dataclasses, so that an option is defined once and every constructor shows it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter
from typing import Any, TypeVar, get_type_hints

_Function = TypeVar("_Function", bound=Callable[..., Any])
_TEXTS: dict[Callable[..., Any], dict[str, str]] = {}  # by decorated function, the help texts of its keywords


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
