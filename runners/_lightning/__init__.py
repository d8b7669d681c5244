"""Registration of the strategies with Lightning's packages, and the classes of the strategies for each package."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..ways import STRATEGIES, WAYS

# Lightning's packages, and the module here with the strategies for each.
PACKAGES = {"pytorch_lightning": "pytorch_lightning", "lightning.pytorch": "lightning"}
# Beside the plain name, which starts a site's processes by running the script again.
_STARTS = {"": "popen", "_spawn": "spawn", "_notebook": "fork"}


def strategy_base(name: str) -> Any:
    """Import the class of a strategy that is the same for both of Lightning's packages."""
    return getattr(importlib.import_module(f".{STRATEGIES[name].module}", __name__), f"{name}Base")


def strategies_over(parent: type, module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module with the strategies for one of Lightning's packages.

    Args:
        parent: the package's ``DDPStrategy``, from which the classes derive.
        module: name of the module.
    """

    @functools.cache
    def derive(name: str) -> Any:
        if name not in STRATEGIES:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        base = strategy_base(name)
        return type(name, (base, parent), {"__doc__": base.__doc__, "__module__": module})

    return derive


def register_strategies() -> None:
    """Register every mode with the imported packages of Lightning, and with installed ones once they are imported.

    As long as an installed package has not been imported, a finder on `sys.meta_path` watches for its import. Lightning
    has no entry points for strategies and resolves names when a Trainer is built, before it calls any other plugin; and
    an import of Lightning here would make ``import dadplug`` slow. The finder removes itself after the import.
    """
    for package in PACKAGES:
        if f"{package}.strategies" in sys.modules:
            _register(package)
        elif importlib.util.find_spec(package.split(".")[0]) and _Watcher(package) not in sys.meta_path:
            sys.meta_path.insert(0, _Watcher(package))


def _register(package: str) -> None:
    from ...step.methods import method_names, on_registration

    registry = sys.modules[f"{package}.strategies"].StrategyRegistry

    def add(name: str, strategy: str, options: Mapping[str, Any], description: str) -> None:
        for suffix, start in _STARTS.items():
            make = functools.partial(_make, package, strategy, start_method=start, **options)
            registry.register(name + suffix, make, description=f"dadplug: {description}", override=True)

    def add_mode(mode: str) -> None:
        if mode != "auto":  # Lightning's own word for a strategy that it chooses
            add(mode, "DADStrategy", {"mode": mode}, f"gradients agreed by {mode}")

    for way in WAYS:
        for name, settings in way.names.items():
            add(name, way.strategy, *settings)
    for mode in method_names():
        add_mode(mode)
    on_registration(add_mode)


def _make(package: str, strategy: str, **options: Any) -> Any:
    module: Any = importlib.import_module(f"..{PACKAGES[package]}", __name__)
    return getattr(module, strategy)(**options)


def packages_in_use() -> list[str]:
    """Return those of Lightning's packages that have been imported; if none has, those that are installed."""
    packages = [package for package in PACKAGES if sys.modules.get(package) is not None]
    return packages or [package for package in PACKAGES if importlib.util.find_spec(package.split(".")[0])]


def needs_lightning(name: str, parent: str) -> ModuleType:
    """Import the module for the package of Lightning that is in use.

    Args:
        name: name of the strategy or callback, for messages.
        parent: name of the package with a module for each of Lightning's packages.

    Raises:
        ImportError: if Lightning is not installed.
        RuntimeError: if both packages are in use, or installed and none in use.
    """
    packages = packages_in_use()
    if not packages:
        raise ImportError(f"{name} needs Lightning, which is not installed: pip install 'dadplug[lightning]'")
    if len(packages) > 1:
        raise RuntimeError(
            f"both pytorch_lightning and lightning are here: say which one is meant, by `from {parent}."
            f"pytorch_lightning import {name}` or `from {parent}.lightning import {name}`"
        )
    return importlib.import_module(f"{parent}.{PACKAGES[packages[0]]}")


@dataclass(frozen=True)
class _Watcher(importlib.abc.MetaPathFinder):
    """Import finder that adds the registration to the module of strategies of one of Lightning's packages.

    Args:
        package: the package. Other finders find its modules.
    """

    package: str

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != f"{self.package}.strategies":
            return None
        others = [finder for finder in sys.meta_path if finder != self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        """Make a module loader register the strategies after it has executed its module."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder != self]
            _register(self.package)

        loader.exec_module = exec_module
