"""`njit` of numba for kernels that are compiled once on a machine, by the process that needs them first."""

from __future__ import annotations

import functools
import hashlib
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

try:
    import fcntl
except ImportError:  # Windows: processes that start together may compile the same kernel
    fcntl = None  # type: ignore[assignment]

from .logs import get_logger

_log = get_logger(__name__)
_LOCK_SECONDS = 60.0  # in which another process can compile a kernel; then this one compiles it, too
_POLL_SECONDS = 0.02

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function as `numba.njit(cache=True)` does, with three differences.

    Processes that need a kernel at the same time do not all compile it: the first does, the others wait and load it
    from the cache. The first kernel that a process really compiles is announced in the log, since it takes seconds.
    And a cached kernel is compiled again when a kernel or a constant that it uses has changed, in whichever file.

    Args:
        options: as `numba.njit` takes them; `cache` is implied.

    Returns:
        A decorator.
    """
    options.pop("cache", None)

    def decorate(function: Kernel) -> Kernel:
        dispatcher: Any = numba.njit(**options)(function)
        if not isinstance(dispatcher, Dispatcher):  # NUMBA_DISABLE_JIT
            return cast("Kernel", dispatcher)
        try:
            cache = _SharedCache(function)
        except RuntimeError as error:  # no folder that can be written
            _warn_once(str(error))
            return cast("Kernel", dispatcher)
        compile_or_load = dispatcher.compile

        def compile_once(signature: Any) -> Any:
            try:
                return compile_or_load(signature)
            finally:
                cache.release()

        vars(dispatcher).update(_cache=cache, compile=compile_once)
        return cast("Kernel", dispatcher)

    return decorate


class _SharedCache(FunctionCache):
    """Cache of a kernel on disk, with a lock from a failed look-up until the kernel has been compiled."""

    _locked = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None and self._enabled:
            self._lock()
            found = super().load_overload(sig, target_context)  # another process may have been faster
            if found is None:
                _announce(self.cache_path)
        return found

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _fingerprint(self._py_func))

    def _lock(self) -> None:
        deadline = time.monotonic() + _LOCK_SECONDS
        while fcntl is not None and not self._locked:
            try:
                fcntl.lockf(_lock_file(self.cache_path), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
                self._locked = True
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECONDS)
            except OSError:  # a file system without locks
                return

    def release(self) -> None:
        """Release the lock, for other processes to load the kernel from disk or compile it."""
        if self._locked:
            fcntl.lockf(_lock_file(self.cache_path), fcntl.LOCK_UN, 1, self._place)
            self._locked = False

    @functools.cached_property
    def _place(self) -> int:
        """Offset in the lock file of the byte that is locked for this kernel."""
        return int.from_bytes(hashlib.sha256(self._impl.filename_base.encode()).digest()[:4], "little") >> 1


@functools.cache
def _lock_file(folder: str) -> int:
    """Open the lock file of a folder; it stays open, since closing it would release the locks of all kernels."""
    os.makedirs(folder, exist_ok=True)
    return os.open(os.path.join(folder, "dadplug.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _fingerprint(function: Any) -> str:
    """Return a hash of the code of all kernels that a kernel calls, and of the constants that they use."""
    found = hashlib.sha256()
    waiting, seen = [function], set()
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        found.update(each.__code__.co_code + repr([c for c in each.__code__.co_consts if _is_plain(c)]).encode())
        for name in each.__code__.co_names:
            value = each.__globals__.get(name)
            if isinstance(value, Dispatcher):
                waiting.append(value.py_func)
            elif _is_plain(value):
                found.update(f"{name}={value!r}".encode())
    return found.hexdigest()


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, tuple))


@functools.cache
def _announce(folder: str) -> None:
    _log.warning("compiling kernels for this machine, once; they are kept in %s", folder)


@functools.cache
def _warn_once(error: str) -> None:
    warnings.warn(f"compiled kernels cannot be kept: each start compiles them again ({error})", stacklevel=4)
