"""Files of tuned constants in the user's cache folder, one for each machine and number of threads.

A file is JSON. It is used if it is of this machine and these versions; any other content leads to the defaults, with a
warning. `DADPLUG_TUNING` names another folder, or is ``0`` for the defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .constants import Decoding, Encoding, Serving
from .machine import Machine

FOLDER_VARIABLE = "DADPLUG_TUNING"
_FORMAT = 1
_LARGEST = 1 << 20  # bytes of a file
_OFF = ("0", "off", "no", "false")


@dataclass(frozen=True)
class Record:
    """Constants of a machine.

    Attributes:
        decoding: constants that all sites take from site 0.
        encoding: constants that each site has for itself.
        served: how served models compute, by `dadplug.serving.schedule.key_of`.
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
        "machine": dataclasses.asdict(machine),
        "decoding": record.decoding.values(),
        "encoding": record.encoding.values(),
        "served": {key: each.values() for key, each in record.served.items()},
        "results": rows or [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path
