"""Reload of models whose files have changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..logs import get_logger
from .model import Model

_log = get_logger("dadplug.serving")
_SECONDS = 1.0  # between two looks at the files

Stamp = tuple[int, int, int] | None


class FileWatcher:
    """Thread that looks at the files of models, and loads a model again when its file has changed.

    A file counts as changed once two looks in a row have found it equal, so that one that is being written is left
    alone. A file that cannot be loaded is reported in the log, and the former model goes on.

    Args:
        models: models by name, as for `Predictor`; those without a file are left out.
        reload: loads a model again, called with its name and the model; raises an error if it cannot.
        seconds: time between two looks.
    """

    def __init__(
        self, models: Mapping[str, Any], reload: Callable[[str, Any], object], seconds: float = _SECONDS
    ) -> None:
        self._models = {name: (model, path) for name, model in models.items() if (path := _path_of(model)) is not None}
        self._reload, self._seconds = reload, seconds
        self._loaded = {name: stamp_of(path) for name, (_, path) in self._models.items()}
        self._seen = dict(self._loaded)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dadplug-serving-files", daemon=True)
        if self._models:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=150.0)

    def _watch(self) -> None:
        while not self._end.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """Look at all files once."""
        for name, (model, path) in self._models.items():
            stamp = stamp_of(path)
            settled = stamp == self._seen[name]
            self._seen[name] = stamp
            if stamp is None or not settled or stamp == self._loaded[name]:
                continue
            self._loaded[name] = stamp
            try:
                self._reload(name, model)
            except Exception as error:
                _log.error("model %r cannot be loaded again from %s, its former version goes on: %s", name, path, error)


def stamp_of(path: Path) -> Stamp:
    """Return what changes when a file is replaced or written: time, size and number; None without a file."""
    try:
        found = os.stat(path / "index.json" if path.is_dir() else path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _path_of(model: Any) -> Path | None:
    if isinstance(model, Model):
        return Path(model.path)
    return Path(model) if isinstance(model, str) or hasattr(model, "__fspath__") else None
