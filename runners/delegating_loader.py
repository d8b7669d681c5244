"""Base of loaders that trainers take for the loader that they wrap."""

from __future__ import annotations

from typing import Any, ClassVar


class DelegatingLoader:
    """Loader whose attributes are those of the wrapped loader, for reading and for writing, but for those of its own.

    Args:
        loader: the wrapped loader.
    """

    _OWN: ClassVar[tuple[str, ...]] = ("_loader",)
    """Names of its own attributes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._OWN:  # not set yet while a copy is built
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)
