"""Files that are complete or as they were, whatever interrupts the writing; and checked reading of tensors."""

from __future__ import annotations

import os
import pickle
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from ..errors import DamagedError

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


def load_tensors(source: Path | bytes, what: str, *, intact: bool = False) -> Any:
    """Load what `torch.save` has written, if it consists of tensors and plain values. No code of the file is run.

    Args:
        source: path or content of the file; a path is mapped into memory if `intact`.
        what: the file, for messages.
        intact: whether the content has been compared with a digest. Otherwise the checksums of the file are compared,
            which torch does not do.

    Raises:
        DamagedError: if it is damaged, or has other objects.
    """
    if not intact:
        check_archive(source, what)
    try:
        import torch

        file: Any = BytesIO(source) if isinstance(source, bytes) else source
        return torch.load(file, map_location="cpu", weights_only=True, mmap=intact and isinstance(source, Path))
    except pickle.UnpicklingError:  # its text recommends to load the file unsafely
        raise DamagedError(
            f"{what} is damaged, or has objects besides tensors and plain values, which can run code and are not loaded"
        ) from None
    except Exception as error:  # of any kind: the file may have any content
        raise DamagedError(f"{what} is no file of torch.save, or damaged: {type(error).__name__}: {error}") from error


def check_archive(source: Path | bytes, what: str) -> None:
    """Compare the checksums in a file of `torch.save` with its content. Files that are no archive have none.

    Raises:
        DamagedError: if they differ, or the content would take more memory than the file; the message names the file.
    """
    file: Any = BytesIO(source) if isinstance(source, bytes) else source
    try:
        if not zipfile.is_zipfile(file):
            return
        whole = len(source) if isinstance(source, bytes) else source.stat().st_size
        with zipfile.ZipFile(file) as archive:
            parts = sum(each.file_size for each in archive.infolist())
            damaged = archive.testzip() if parts <= whole else f"{parts} bytes in a file of {whole}"
    except Exception as error:  # of any kind, as above
        damaged = str(error)
    if damaged is not None:
        raise DamagedError(f"{what} is damaged ({damaged}): use another copy of it")


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
