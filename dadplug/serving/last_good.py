"""Copy of a model's file that was loaded, for a process that has to be started again while the file is damaged."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from ..logs import get_logger
from .reloading import Stamp, stamp_of

_log = get_logger("dadplug.serving")


class LastGood:
    """Copy of the file that a model was loaded from last, in a temporary folder of this user.

    Args:
        path: the file; a folder of shards is not copied.

    Attributes:
        copy: the copy; None while there is none.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._stamp: Stamp = None
        self.copy: Path | None = None

    def stamp(self) -> Stamp:
        """Return what changes when the file does."""
        return stamp_of(self._path)

    def keep(self, loaded: Stamp) -> None:
        """Copy the file, which has been loaded, unless that was done or it has changed meanwhile.

        Args:
            loaded: its stamp before it was loaded.
        """
        if loaded is None or self._path.is_dir() or (self.copy is not None and loaded == self._stamp):
            return
        try:
            folder = tempfile.TemporaryDirectory(prefix="dadplug-serving-", ignore_cleanup_errors=True)
            copy = Path(folder.name, self._path.name)  # loaders go by the ending of the name
            shutil.copyfile(self._path, copy)
        except OSError as error:
            _log.warning("no copy of %s can be kept, for a restart while it is damaged: %s", self._path, error)
            return
        if self.stamp() != loaded:
            folder.cleanup()
            return
        self.close()
        self._folder, self._stamp, self.copy = folder, loaded, copy

    def close(self) -> None:
        """Remove the copy."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = self.copy = self._stamp = None
