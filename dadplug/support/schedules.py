"""Constants by which kernels run, such as sizes of blocks: the defaults, or those that were tuned on this machine.

Code reads `current()` when it is set up; `dadplug.tune` measures, and writes the file that `current` reads. To add a
constant, add a field to its group, and read it where it is used.

Files are in the user's cache folder, one for each machine and number of threads. A file is JSON. It is used if it is of
this machine and these versions; any other content leads to the defaults, with a warning. `DADPLUG_TUNING` names another
folder, or is ``0`` for the defaults.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from .files import PRIVATE, write_file
from .signature import OptionSet, option, valid


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_CPU_INFO = Path("/proc/cpuinfo")
_SOURCES = ("lowrank/*.py", "step/fused/*.py", "support/schedules.py")  # that the constants belong to
FOLDER_VARIABLE = "DADPLUG_TUNING"
_FORMAT = 1
_LARGEST = 1 << 20  # bytes of a file
Group = TypeVar("Group", bound="Constants")
_OFF = ("0", "off", "no", "false")


def _constant(default: Any, low: float, high: float) -> Any:
    """Define a number with its default and the range of its valid values; its type is that of the default."""
    wanted = type(default)

    def check(name: str, value: Any) -> None:
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ValueError(f"{name} must be of type {wanted.__name__}, got {value!r}")
        if not low <= value <= high:
            raise ValueError(f"{name} must lie in {low:g} to {high:g}, got {value!r}")

    return option(default, "", check)


@dataclass(frozen=True)
class Constants(OptionSet):
    """Base of a group of constants.

    Raises:
        ValueError: if a value has another type than the default, or is out of its range.
    """

    @classmethod
    def of(cls: type[Group], values: Any) -> Group:
        """Return the constants with some values, by name; the others have their defaults.

        Raises:
            ValueError: if a name is unknown, or a value not valid.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"expected names and values, got {type(values).__name__}")
        return cls.create(**values)

    def values(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self)


@dataclass(frozen=True)
class Decoding(Constants):
    """Constants that may change the last bit of a decoded gradient: all sites take those of site 0.

    Attributes:
        few: rows up to which the own product of few rows is taken in place of BLAS.
        strip: columns that this product computes at a time.
        block: numbers of a sum of products that are computed before the next block of rows.
        align: multiple of which the rows of such a block are.
        tile: numbers of a gradient that are computed at a time in a fused optimizer step.
        narrow: rows of all sites up to which a fused step multiplies them by kernels of its own in place of BLAS.
    """

    few: int = _constant(12, 0, 4096)
    strip: int = _constant(1 << 20, 16, 1 << 30)
    block: int = _constant(1 << 17, 16, 1 << 30)
    align: int = _constant(16, 1, 4096)
    tile: int = _constant(1 << 17, 16, 1 << 30)
    narrow: int = _constant(64, 0, 4096)


@dataclass(frozen=True)
class Encoding(Constants):
    """Constants that each site has for itself, since it sends what it has computed by them.

    Attributes:
        fat: multiplications and additions a microsecond of products of large blocks.
        skinny: the same of products with blocks of few rows.
        eigen: rows^3 a microsecond, of the N x N algebra in double precision.
        start_gram: microseconds of a call of the algorithm ``"gram"`` besides its products.
        start_iteration: the same of ``"iteration"``.
        start_formed: the same of ``"formed"``.
        coarse: of the 31 bits of a number's size, those of the first histogram in the search for the largest numbers.
    """

    fat: float = _constant(45_000.0, 1.0, 1e9)
    skinny: float = _constant(30_000.0, 1.0, 1e9)
    eigen: float = _constant(600.0, 0.01, 1e7)
    start_gram: float = _constant(20.0, 0.0, 1e6)
    start_iteration: float = _constant(40.0, 0.0, 1e6)
    start_formed: float = _constant(40.0, 0.0, 1e6)
    coarse: int = _constant(15, 6, 24)


@dataclass(frozen=True)
class Serving(Constants):
    """Way in which a served model computes.

    Attributes:
        backend: ``"eager"``, ``"compiled"`` by torch.compile, or ``"onnxruntime"``.
        channels_last: whether convolutions have the channels of a pixel side by side.
        fused: whether normalisations are part of the weights of the layers before them.
        shape: shape of one input, such as ``"3,224,224"``.
    """

    backend: str = option("eager", "", choices=("eager", "compiled", "onnxruntime"))
    channels_last: bool = option(False, "")
    fused: bool = option(False, "")
    shape: str = option("", "", valid("of type str", lambda value: isinstance(value, str)))


@dataclass(frozen=True)
class Machine:
    """A machine, as far as times depend on it.

    Attributes:
        cpu: name of the processor.
        cores: number of cores that the process may use.
        threads: number of threads that torch uses.
        python: version of Python.
        torch: version of torch.
        numba: version of numba; empty where it is not installed.
        sources: digest of the sources that the constants belong to.
    """

    cpu: str
    cores: int
    threads: int
    python: str
    torch: str
    numba: str
    sources: str

    @classmethod
    def this(cls, threads: int | None = None) -> Machine:
        """Describe this machine.

        Args:
            threads: number of threads; those that torch uses now if None.
        """
        import torch

        return cls(
            _processor(),
            available_cores(),
            torch.get_num_threads() if threads is None else threads,
            ".".join(map(str, sys.version_info[:2])),
            str(torch.__version__),
            version_of("numba"),
            _digest(),
        )

    @property
    def key(self) -> str:
        """Name of the hardware and the number of threads, for a file."""
        text = f"{self.cpu}/{self.cores}/{self.threads}"
        return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{self.threads}-threads"

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Return how a description that was read from a file differs from this machine, in words."""
        own = asdict(self)
        return [
            f"{name} {other.get(name)!r} instead of {value!r}"
            for name, value in own.items()
            if other.get(name) != value
        ]


@functools.cache
def _processor() -> str:
    """Return the processor's name, with the numbers of its family, model and stepping where Linux has them."""
    found: dict[str, str] = {}
    try:
        with _CPU_INFO.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if not name.strip():
                    break
                found[name.strip()] = value.strip()
    except OSError:
        pass
    parts = [found[name] for name in ("model name", "cpu family", "model", "stepping", "cache size") if name in found]
    return " ".join([*parts, platform.machine()]) if parts else f"{platform.processor()} {platform.machine()}".strip()


@functools.cache
def version_of(package: str) -> str:
    """Return the version of an installed package; an empty text where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _digest() -> str:
    """Return a digest of the sources that the constants belong to; empty where there are none, as in an archive."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for pattern in _SOURCES:
        for path in sorted(root.glob(pattern)):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """Constants of a machine.

    Attributes:
        decoding: constants that all sites take from site 0.
        encoding: constants that each site has for itself.
        served: how served models compute, by `dadplug.serving.loading.key_of`.
        tuned: whether the constants were measured on this machine.
    """

    decoding: Decoding = field(default_factory=Decoding)
    encoding: Encoding = field(default_factory=Encoding)
    served: Mapping[str, Serving] = field(default_factory=dict)
    tuned: bool = False


DEFAULTS = Record()
_current: Record | None = None


def current() -> Record:
    """Return the constants that this process uses; the first call reads the file of this machine, if there is one."""
    global _current
    if _current is None:
        _current = load()
    return _current


def forget() -> None:
    """Read the file again at the next call of `current`."""
    global _current
    _current = None


@contextlib.contextmanager
def replaced(record: Record) -> Iterator[None]:
    """Use other constants inside; a context manager."""
    global _current
    before, _current = _current, record
    try:
        yield
    finally:
        _current = before


def folder() -> Path | None:
    """Return the folder of the files; None if they are switched off."""
    named = os.environ.get(FOLDER_VARIABLE, "")
    if named.lower() in _OFF:
        return None
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "dadplug" / "tuning"


def path_of(machine: Machine) -> Path | None:
    """Return the path of a machine's file; None if files are switched off."""
    place = folder()
    return None if place is None else place / f"{machine.key}.json"


def load(machine: Machine | None = None) -> Record:
    """Read the constants of a machine; the defaults if there is no file, or, with a warning, if it cannot be used.

    Args:
        machine: the machine; this one if None.
    """
    if folder() is None:
        return DEFAULTS
    machine = Machine.this() if machine is None else machine
    path = path_of(machine)
    assert path is not None
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return DEFAULTS
    except OSError as error:
        return _ignore(path, str(error))
    try:
        return _parse(content, machine)
    except (ValueError, TypeError, RecursionError) as error:
        return _ignore(path, str(error) or type(error).__name__)


def _ignore(path: Path, reason: str) -> Record:
    warnings.warn(
        f"the tuned constants in {path} are not used ({reason}): kernels have their defaults; "
        "`python -m dadplug tune` measures again",
        stacklevel=4,
    )
    return DEFAULTS


def _parse(content: bytes, machine: Machine) -> Record:
    """Return the record in a file.

    Raises:
        ValueError: if it is damaged, of another machine or other versions, or has values that are not valid.
    """
    if len(content) > _LARGEST:
        raise ValueError(f"it is larger than {_LARGEST >> 20} MB")
    try:
        found = json.loads(content)
    except ValueError:
        raise ValueError("it is damaged: no JSON") from None
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("machine"), dict):
        raise ValueError(f"it is damaged, or not of format {_FORMAT}")
    if differences := machine.differences(found["machine"]):
        raise ValueError("it was made with " + ", ".join(differences))
    served = found.get("served", {})
    if not isinstance(served, dict):
        raise ValueError("it is damaged: the served models are no names and values")
    return Record(
        Decoding.of(found.get("decoding", {})),
        Encoding.of(found.get("encoding", {})),
        {key: Serving.of(each) for key, each in served.items()},
        tuned=True,
    )


def save(record: Record, machine: Machine, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write the constants of a machine: a reader finds the file before or the file after, whole.

    Args:
        record: the constants.
        machine: the machine.
        rows: what was measured, for people who read the file.

    Returns:
        The path of the file.

    Raises:
        OSError: if it cannot be written.
        ValueError: if files are switched off.
    """
    path = path_of(machine)
    if path is None:
        raise ValueError(f"{FOLDER_VARIABLE} switches tuned constants off: unset it, or name a folder")
    content = {
        "format": _FORMAT,
        "machine": asdict(machine),
        "decoding": record.decoding.values(),
        "encoding": record.encoding.values(),
        "served": {key: each.values() for key, each in record.served.items()},
        "results": rows or [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=2).encode(), PRIVATE)
    return path
