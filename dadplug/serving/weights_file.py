"""File of a policy's weights."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..logs import get_logger

_log = get_logger("dadplug.serving")
_SECONDS = 5.0  # between two writes after feedback


def write(path: str | Path, state: dict[str, Any]) -> None:
    """Write weights to a file, atomically.

    Args:
        path: the file.
        state: the weights, as plain values.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(state))
    os.replace(partial, path)


class WeightsFile:
    """File that is read at the start, and written after feedback and at the end.

    Args:
        path: the file; None for none.
        load: restores weights.
        state: returns the weights as plain values.

    Raises:
        ValueError: if the file is damaged, or of another policy or other models.
    """

    def __init__(
        self, path: str | Path | None, load: Callable[[dict[str, Any]], object], state: Callable[[], dict[str, Any]]
    ) -> None:
        self._path, self._state, self._written = path, state, -_SECONDS
        if path is None or not Path(path).exists():
            return
        try:
            load(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def write_now_and_then(self) -> None:
        """Write the weights, unless it was done in the last seconds."""
        if time.monotonic() - self._written > _SECONDS:
            self.write()

    def write(self) -> None:
        """Write the weights; an error is reported in the log."""
        if self._path is None:
            return
        self._written = time.monotonic()
        try:
            write(self._path, self._state())
        except OSError as error:
            _log.error("the weights cannot be written to %s: %s", self._path, error)
