"""Memory without a name that all processes of one machine read and write."""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

try:
    import fcntl

    _LOCKS = True
except ImportError:  # Windows
    _LOCKS = False

ALIGNMENT = 64  # bytes; a cache line
_EXCLUSIVE = 1  # byte of the lock of exclusive parts; byte 0 is that of `SharedMemory.lock`
_TOKEN = 16  # bytes


class SharedMemory:
    """Mapped file without a name, so that nothing is left of it when its processes are gone, however they end.

    The file is anonymous memory (memfd) where the system has it, which needs no /dev/shm, and a deleted file of the
    temporary folder elsewhere. What is written behind the mapped part makes the file longer.

    Args:
        descriptor: descriptor of the open file, owned by this object.
        path: path of the file as long as it has a name.

    Attributes:
        descriptor: descriptor of the open file.
        path: path of the file as long as it has a name; empty otherwise.
        size: number of bytes that are mapped.
    """

    def __init__(self, descriptor: int, path: str = "") -> None:
        self.descriptor = descriptor
        self.path = path
        self.size = int.from_bytes(os.pread(descriptor, 8, _TOKEN), "little")
        self._mapped = mmap.mmap(descriptor, self.size)

    @classmethod
    def create(cls, size: int, *, named: bool = False) -> SharedMemory:
        """Create memory, filled with zeros but for its head.

        Args:
            size: number of bytes behind the head.
            named: whether the file has a name, by which other processes open it, until `remove_name` is called.

        Raises:
            OSError: if there is not enough memory or space.
        """
        total = ALIGNMENT + size
        path = ""
        if not named and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("dadplug-hogwild", os.MFD_CLOEXEC)
        else:
            descriptor, path = tempfile.mkstemp(prefix="dadplug-hogwild-")
        try:
            if not named and path:
                os.unlink(path)
                path = ""
            if hasattr(os, "posix_fallocate"):  # reserved now: a full file system would kill a process later
                os.posix_fallocate(descriptor, 0, total)
            else:
                os.ftruncate(descriptor, total)
            os.pwrite(descriptor, secrets.token_bytes(_TOKEN) + total.to_bytes(8, "little"), 0)
            return cls(descriptor, path)
        except OSError as error:
            os.close(descriptor)
            if path:
                os.unlink(path)
            raise OSError(error.errno, f"no shared memory of {total:,} bytes: {error.strerror}") from error

    @classmethod
    def open(cls, path: str, token: bytes) -> SharedMemory:
        """Open the memory that another process has created.

        Args:
            path: what `address` has returned there.
            token: the token of that memory.

        Raises:
            OSError: if it cannot be opened, or is another file.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(descriptor, _TOKEN, 0) != token:
            os.close(descriptor)
            raise OSError(f"{path} is not the memory that was shared")
        return cls(descriptor)

    @property
    def token(self) -> bytes:
        """Random bytes that identify the memory."""
        return os.pread(self.descriptor, _TOKEN, 0)

    @property
    def address(self) -> str:
        """Path by which other processes of this user open the memory."""
        return self.path or f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def remove_name(self) -> None:
        """Delete the file's name; the processes that have opened it keep it."""
        if self.path:
            os.unlink(self.path)
            self.path = ""

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return a part of the memory as a tensor with a storage of its own.

        Args:
            offset: first byte, behind the head.
            count: number of elements.
            dtype: type of the elements.
        """
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=ALIGNMENT + offset)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other processes from a context; a process that is killed inside leaves the lock open."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1)

    def begin_exclusive(self) -> None:
        """Wait until no other process is in its exclusive part, and begin this process's; its death ends it, too."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1, _EXCLUSIVE)

    def end_exclusive(self) -> None:
        """End this process's exclusive part; do nothing if it has not begun."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, _EXCLUSIVE)

    def write_behind(self, offset: int, content: bytes) -> None:
        """Write bytes behind the mapped part.

        Args:
            offset: first byte, counted from the end of the mapped part.
            content: the bytes.
        """
        view, place = memoryview(content), self.size + offset
        while view:
            written = os.pwrite(self.descriptor, view, place)
            view, place = view[written:], place + written

    def read_behind(self, offset: int, length: int) -> bytes:
        """Read bytes behind the mapped part; the arguments are as in `write_behind`."""
        parts: list[bytes] = []
        place = self.size + offset
        while length:
            part = os.pread(self.descriptor, length, place)
            if not part:
                raise OSError("the shared memory is shorter than expected")
            parts.append(part)
            length, place = length - len(part), place + len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the descriptor; tensors keep the mapped part."""
        if self.descriptor >= 0:
            self.remove_name()
            os.close(self.descriptor)
            self.descriptor = -1


def aligned(size: int) -> int:
    """Round a number of bytes up to a whole number of cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_system() -> None:
    """Raise NotImplementedError where processes cannot share memory in this way."""
    if not _LOCKS:
        raise NotImplementedError("Hogwild! needs Linux or macOS: this system has no locks on parts of files")
