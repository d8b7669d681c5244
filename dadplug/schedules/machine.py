"""Description of the machine and the software on which constants were measured."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..cores import available_cores

_CPU_INFO = Path("/proc/cpuinfo")
_FOLDERS = ("lowrank", "fused", "schedules")  # whose sources the constants belong to


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
            _version("numba"),
            _digest(),
        )

    @property
    def key(self) -> str:
        """Name of the hardware and the number of threads, for a file."""
        text = f"{self.cpu}/{self.cores}/{self.threads}"
        return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{self.threads}-threads"

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Return how a description that was read from a file differs from this machine, in words."""
        own = dataclasses.asdict(self)
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
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _digest() -> str:
    """Return a digest of the sources that the constants belong to; empty where there are none, as in an archive."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for folder in _FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]
