"""Files that are complete or as they were, whatever interrupts the writing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PRIVATE = 0o600
PUBLIC = 0o644


@contextmanager
def replacing(path: Path, partial: Path, durable: bool = True) -> Iterator[None]:
    """Replace a file by another one, which the body of the ``with`` statement writes.

    After an error or a crash the file has its old content.

    Args:
        path: path of the file, in a folder that exists.
        partial: path of the file that is written, in the same folder; it is removed after an error.
        durable: wait until the content is on the disk; otherwise a crash of the machine may lose it.

    Raises:
        OSError: if the file cannot be replaced.
    """
    try:
        yield
        if durable:
            _sync(partial, os.O_RDWR)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_file(path: Path, content: bytes, mode: int = PUBLIC, durable: bool = True) -> None:
    """Write a file, or replace it as a whole; see `replacing`.

    Args:
        path: path of the file, in a folder that exists.
        content: bytes to write.
        mode: permissions of the file, whatever the umask.
        durable: wait until the content is on the disk; otherwise a crash of the machine may lose it.

    Raises:
        OSError: if the file cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    with replacing(path, Path(temporary), durable), os.fdopen(descriptor, "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), mode)


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk, if the system supports it."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
