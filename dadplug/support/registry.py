"""Registries: named choices that can be added to; and objects by the name of their file or module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ..errors import LoadError

K = TypeVar("K")
T = TypeVar("T")


class Registry(dict[K, T]):
    """A dictionary that is filled by a decorator, and whose error for a missing key lists the valid ones.

    Args:
        kind: what the entries are, for messages.
        exact: whether names have to be spelled exactly. Otherwise case, ``-`` and ``_`` do not count in look-ups by
            ``registry[name]``.

    Example:
        >>> SHAPES: Registry[str, type] = Registry("shape")
        >>> @SHAPES.register("square", "box")
        ... class Square: ...
        >>> SHAPES["Square"] is SHAPES["box"] is Square
        True
    """

    def __init__(self, kind: str, *, exact: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self._exact = exact
        self._keys: dict[Any, K] = {}  # by alias
        self._listeners: list[Callable[[K], object]] = []
        self._modules: dict[K, str] = {}  # that register an entry when it is first looked up

    @property
    def names(self) -> tuple[K, ...]:
        """The keys of all entries, those of modules that are imported when they are needed last."""
        return (*(key for key in self if key not in self._modules), *self._modules)

    def defer(self, module: str, *keys: K) -> None:
        """Name a module that registers entries, and that is imported when one of them is first looked up.

        Args:
            module: full name of the module.
            keys: the keys of the entries.
        """
        self._modules |= dict.fromkeys(keys, module)

    def register(self, key: K, *aliases: K) -> Callable[[T], T]:
        """Register an entry under a key; a decorator. An entry that has the key is replaced.

        Args:
            key: the key, which iteration yields.
            aliases: further keys for look-ups.
        """

        def decorate(entry: T) -> T:
            self[key] = entry
            for each in (key, *aliases):
                self._keys[self._normalised(each)] = key
            for listener in self._listeners if key not in self._modules else ():
                listener(key)
            return entry

        return decorate

    def on_register(self, listener: Callable[[K], object]) -> None:
        """Call a function with the key of every entry that is registered from now on."""
        self._listeners.append(listener)

    def __missing__(self, key: K) -> T:
        """Look up an alias, another spelling, or an entry of a module that has not been imported.

        Raises:
            ValueError: if there is none; the message lists the keys.
        """
        if key in self._modules:
            importlib.import_module(self._modules[key])
        found = self.get(self._keys.get(self._normalised(key)))  # type: ignore[arg-type]
        if found is None:
            raise ValueError(f"unknown {self.kind} {key!r}; valid ones are {', '.join(map(str, self.names))}")
        return found

    def _normalised(self, key: K) -> Any:
        exact = self._exact or not isinstance(key, str)
        return key if exact else key.lower().replace("-", "").replace("_", "")  # type: ignore[attr-defined]


def import_named(name: str) -> Any:
    """Import the object that FILE.py:NAME or MODULE:NAME names.

    The folder of a file is in the module path afterwards, for the modules beside it and for other processes.

    Raises:
        LoadError: if there is none.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise LoadError(f"{name!r} does not read like FILE.py:NAME or MODULE:NAME")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise LoadError(f"there is no file {place}")
        module = _import_file(Path(place).resolve())
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            hint = f"; for the file, write {place}.py:{attribute}" if Path(f"{place}.py").is_file() else ""
            raise LoadError(f"{name}: {error}{hint}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise LoadError(f"{place} has no {attribute}")
        found = getattr(found, part)
    return found


def _import_file(path: Path) -> ModuleType:
    """Import a file under its own name, once, so that what is pickled is found there again."""
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
