"""`njit` of numba for kernels that are compiled once on a machine, by the process that needs them first."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import stat
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
from numba.core import caching, config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.codegen import get_host_cpu_features
from numba.core.dispatcher import Dispatcher

try:
    import fcntl
except ImportError:  # Windows: processes that start together may compile the same kernel
    fcntl = None  # type: ignore[assignment]

from .logs import get_logger
from .refusals import refuse

_log = get_logger(__name__)
_LOCK_SECONDS = 60.0  # in which another process can compile a kernel; then this one compiles it, too
_POLL_SECONDS = 0.02

_PACKAGE = Path(__file__).resolve().parents[1]
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_InTree: Any = getattr(caching, "InTreeCacheLocator", None) or vars(caching)["_InTreeCacheLocator"]  # before numba 0.62

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function as `numba.njit(cache=True)` does, with four differences.

    Kernels are kept in the user's cache folder, see `cache_folder`, unless NUMBA_CACHE_DIR names another one. Processes
    that need a kernel at the same time do not all compile it: the first does, the others wait and load it from the
    cache. The first kernel that is really compiled is announced in the log of one process of a machine, since it takes
    seconds. And a cached kernel is compiled again when a kernel or a constant that it uses has changed, in whichever
    file.

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


def cache_folder(source: str) -> Path:
    """Return the folder of the kernels in a source file: one for each checkout, target and version of the compiler.

    It is below XDG_CACHE_HOME, or ~/.cache where that is not set.

    Args:
        source: the file.

    Raises:
        RuntimeError: if the user has no home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    path = Path(source).resolve()
    root = _PACKAGE if path.is_relative_to(_PACKAGE) else path.parent
    return base / "dadplug" / f"kernels-{hashlib.sha256(f'{root} {_target()}'.encode()).hexdigest()[:16]}"


@functools.cache
def _target() -> str:
    """Return what compiled code depends on besides its source, the imitated processor of numba's variables included."""
    name = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    features = config.CPU_FEATURES
    if features is None:
        features = get_host_cpu_features()
    return f"{sys.implementation.cache_tag} {numba.__version__} {name} {features}"


def make_private(folder: Path) -> None:
    """Create a folder of `cache_folder` for this user alone: what is loaded from it is run.

    Args:
        folder: the folder.

    Raises:
        RuntimeError: if it cannot be created, or others can write there; the message has the reason.
    """
    base = folder.parents[1]
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(base, (os.geteuid(), 0), stat.S_IWOTH, base.stat())
        for each in (folder.parent, folder):
            each.mkdir(exist_ok=True, mode=0o700)
            _check_owner(each, (os.geteuid(),), _OTHERS_WRITE, each.lstat())
    except OSError as error:
        raise RuntimeError(f"{folder}: {error.strerror or error}") from error


def _check_owner(folder: Path, owners: tuple[int, ...], writers: int, found: os.stat_result) -> None:
    refuse(
        (not stat.S_ISDIR(found.st_mode), f"{folder} is no folder"),
        (found.st_uid not in owners, f"{folder} belongs to another user"),
        (
            found.st_mode & writers and not (found.st_mode & stat.S_ISVTX and 0 in owners),
            f"others can write to {folder}: chmod go-w {folder}",
        ),
        error=RuntimeError,
    )


class _UserLocator(_InTree):
    """Place of kernels in the user's cache folder."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._top = cache_folder(py_file)
        self._cache_path = str(self._top / self.get_suitable_cache_subpath(py_file))

    def ensure_cache_path(self) -> None:
        """Create the folder."""
        if hasattr(os, "geteuid"):
            make_private(self._top)
            Path(self._cache_path).mkdir(exist_ok=True, mode=0o700)
        super().ensure_cache_path()


class _Places(CompileResultCacheImpl):
    """Places of kernels: that of the user's variable, the user's cache folder, and those of code that is in no file."""

    _locator_classes = [
        _UserLocator if each is _InTree else each
        for each in CompileResultCacheImpl._locator_classes
        if "UserWide" not in each.__name__
    ]


class _CheckedFiles(IndexDataCacheFile):
    """Files of a kernel, which begin with their digest: one that is damaged or of another numba counts as missing."""

    def _dump(self, obj: Any) -> bytes:
        content: bytes = super()._dump(obj)
        return _digest(content) + content

    def _read(self, path: str) -> Any:
        whole = Path(path).read_bytes()
        content = whole[len(_digest(b"")) :]
        if whole != _digest(content) + content:
            raise OSError(f"{path} is damaged")  # numba compiles again
        return pickle.loads(content)

    def _load_data(self, name: str) -> Any:
        return self._read(self._data_path(name))

    def _load_index(self) -> Any:
        try:
            stamp, overloads = self._read(self._index_path)
        except (OSError, AttributeError, ImportError):  # the latter: types of arguments that the source had before
            return {}
        return overloads if stamp == self._source_stamp else {}

    def _save_index(self, overloads: Any) -> None:
        with self._open_for_write(self._index_path) as file:
            file.write(self._dump((self._source_stamp, overloads)))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(numba.__version__.encode() + content).digest()


class _SharedCache(FunctionCache):
    """Cache of a kernel on disk, with a lock from a failed look-up until the kernel has been compiled."""

    _impl_class = _Places
    _locked = False

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        impl = self._impl
        self._cache_file = _CheckedFiles(self._cache_path, impl.filename_base, impl.locator.get_source_stamp())

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:  # such as a full disk
            _warn_once(f"{self.cache_path}: {error.strerror}")

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
    """Say that kernels are compiled, in the first process that does it for a folder of kernels."""
    version = getattr(sys.modules.get(_PACKAGE.name), "__version__", "")
    target = hashlib.sha256(_target().encode()).hexdigest()[:16]
    try:
        place = os.path.join(os.path.dirname(folder), f"dadplug-{version}-{target}.announced")
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return
    except OSError:  # nothing can be kept there: each process may say so
        pass
    _log.warning("compiling kernels for this machine, once; they are kept in %s", folder)


@functools.cache
def _warn_once(error: str) -> None:
    warnings.warn(f"compiled kernels cannot be kept: each start compiles them again ({error})", stacklevel=4)
