"""Files of a sharded checkpoint: names, the index and its checks, and atomic writes.

All content is checked: names must be file names of this format, sizes in the index must fit the files, and tensors must
have the types and shapes of the index. Reading does not run code (no arbitrary pickles).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "index.json"
VERSION = 1
_PART = ".part"
_NAME = re.compile(r"([0-9a-f]{8})-(?:site-(\d{1,4})-of-(\d{1,4})\.pt|rest\.pt|index\.json)")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_NUMBERS = 2**62
_FIELDS = {"rows": 1, "width": 1, "columns": 1, "place": 0, "steps": 0}  # of a table, with their minimum


def pending_index(stamp: str) -> str:
    """Return the name of the index of a complete save that is not yet the checkpoint of the folder."""
    return f"{stamp}-{INDEX}"


def stamp_of(name: str) -> str:
    """Return the stamp in the name of a file; empty if there is none."""
    found = _NAME.match(name)
    return "" if found is None else found[1]


def is_shard_file(name: str) -> bool:
    """Return whether a name is that of a file of a save, other than the index of the folder."""
    old = re.fullmatch(r"[0-9a-f]{8}\.part", name)  # an index of earlier versions
    return old is not None or _NAME.fullmatch(name.removesuffix(_PART)) is not None or name == INDEX + _PART


# Writing


def write_whole(path: Path, item: Any) -> str:
    """Write an object to a file atomically, also in case of a crash; return the digest."""
    content = io.BytesIO()
    torch.save(item, content)
    _write(path, content.getbuffer())
    return hashlib.sha256(content.getbuffer()).hexdigest()


def write_index(path: Path, index: Mapping[str, Any]) -> None:
    """Write an index atomically."""
    _write(path, json.dumps(index, indent=1).encode())


def _write(path: Path, content: Any) -> None:
    partial = path.with_name(path.name + _PART)
    try:
        with open(partial, "wb") as file:
            file.write(content)
        put_in_place(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def put_in_place(partial: Path, path: Path) -> None:
    """Sync a file to its disk and rename it; an existing file is replaced."""
    _sync(partial, os.O_RDWR)
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to its disk, if the system supports it."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# Reading


def read_index(path: Path) -> dict[str, Any]:
    """Read and check an index.

    Raises:
        ValueError: if it is damaged or of another version.
    """
    return check_index(path.read_bytes(), path)


def check_index(content: bytes, path: Path) -> dict[str, Any]:
    """Parse an index, and check all names and sizes in it.

    Raises:
        ValueError: if it does not have the format of `save_shards`.
    """
    try:
        index: dict[str, Any] = json.loads(content)
        if index["version"] != VERSION:
            raise _Version(
                f"{path.parent} was written by another version of dadplug: format {index['version']}, here {VERSION}"
            )
        _check_files(index)
        for name, table in index["tables"].items():
            _check_table(name, table)
    except _Version as error:
        raise ValueError(f"{error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    return index


class _Version(ValueError):
    """Error for an index of another version."""


def _check_files(index: Mapping[str, Any]) -> None:
    files, rest = index["files"], index["rest"]
    for name, digest in [*files.items(), *rest.items()]:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a shard")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"the digest of {name} is {digest!r}")
    stamps = {stamp_of(name) for name in (*files, *rest)}
    if len(stamps) != 1 or len(rest) != 1 or not files:
        raise ValueError(f"it names {len(files)} shards and {len(rest)} other files with {len(stamps)} stamps")
    (stamp,) = stamps
    shards = [f"{stamp}-site-{site}-of-{len(files)}.pt" for site in range(len(files))]
    if sorted(files) != sorted(shards) or set(rest) != {f"{stamp}-rest.pt"}:
        raise ValueError(f"it names {sorted(files)} and {sorted(rest)}")


def _check_table(name: str, table: Mapping[str, Any]) -> None:
    for field, least in _FIELDS.items():
        value = table[field]
        if type(value) is not int or not least <= value < _MOST_NUMBERS:
            raise ValueError(f"{field} of table {name!r} is {value!r}")
    names, parts = table["names"], table["parts"]
    if not all(isinstance(each, list) and all(isinstance(item, str) for item in each) for each in (names, parts)):
        raise ValueError(f"table {name!r} has the names {names!r} and the parts {parts!r}")
    state = table["columns"] - table["width"]
    if state < 0 or (state % len(parts) if parts else state) or type(table["counts_steps"]) is not bool:
        raise ValueError(
            f"table {name!r} has {table['columns']} columns, {table['width']} of them weights, for the state {parts}"
        )


def check_sizes(index: Mapping[str, Any], folder: Path) -> None:
    """Compare the sizes in an index with those of the files, before memory is allocated.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the files are too small to hold the tables.
    """
    there = 0
    for name in index["files"]:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"shard {name} of checkpoint {folder} is missing")
        there += (folder / name).stat().st_size
    needed = sum(table["rows"] * (table["columns"] * 4 + 8) for table in index["tables"].values())
    if needed > there:
        raise ValueError(f"{folder / INDEX} is damaged: its tables take {needed} bytes, the shards have {there}")


def read_head(folder: Path, stamp: str | None) -> tuple[bytes, bytes]:
    """Read the index of a checkpoint and the file with the state that is not managed.

    Args:
        folder: the folder.
        stamp: stamp of the save; None for the checkpoint of the folder.

    Raises:
        FileNotFoundError: if one is missing.
        ValueError: if one is damaged, or no checkpoint has this stamp.
    """
    path = folder / INDEX
    if stamp is not None and stamp_of(pending_index(stamp)) == stamp and (folder / pending_index(stamp)).is_file():
        path = folder / pending_index(stamp)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {INDEX}: it is no sharded checkpoint, or was never finished")
    content = path.read_bytes()
    index = check_index(content, path)
    ((rest, digest),) = index["rest"].items()
    if stamp is not None and stamp_of(rest) != stamp:
        raise ValueError(
            f"the shards in {folder} are of another save than the checkpoint that refers to them: their stamp is "
            f"{stamp_of(rest)}, it should be {stamp!r}"
        )
    if not (folder / rest).is_file():
        raise FileNotFoundError(f"file {rest} of checkpoint {folder} is missing")
    return content, _content(folder, rest, digest)


def _content(folder: Path, name: str, digest: str) -> bytes:
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"file {name} of checkpoint {folder} is damaged: it is not what was written")
    return content


def parse(content: bytes, what: str) -> Any:
    """Parse the output of `torch.save`, if it consists of tensors and plain values.

    Raises:
        ValueError: if it is damaged or has other objects.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{what} is damaged: {error}") from error


def parse_rest(content: bytes, folder: Path) -> dict[str, Any]:
    """Parse the state that is not managed.

    Raises:
        ValueError: if it is damaged.
    """
    state = parse(content, f"the file with what is not managed in {folder}")
    try:
        fits = isinstance(state["model"], Mapping) and isinstance(state["optimizer"]["state"], Mapping)
    except (TypeError, KeyError, IndexError):
        fits = False
    if not fits:
        raise ValueError(f"the file with what is not managed in {folder} holds no states of a model and an optimizer")
    return dict(state)


def read_shard(folder: Path, name: str, index: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Read a shard, and check it against the index.

    Returns:
        By table, ``"keys"`` of shape (n,) and ``"values"`` of shape (n, columns).

    Raises:
        ValueError: if it is damaged or does not fit.
    """
    shard = parse(_content(folder, name, index["files"][name]), f"file {name} of checkpoint {folder}")
    return _checked_shard(shard, folder, name, index)


def map_shard(folder: Path, name: str, index: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Map a shard into memory instead of reading it, and check it against the index.

    The whole file is read once for its digest, in pieces. Its tensors must not be written to.

    Returns:
        As `read_shard`.

    Raises:
        ValueError: if it is damaged or does not fit.
    """
    path, digest = folder / name, hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != index["files"][name]:
        raise ValueError(f"file {name} of checkpoint {folder} is damaged: it is not what was written")
    try:
        shard = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"file {name} of checkpoint {folder} is damaged: {error}") from error
    return _checked_shard(shard, folder, name, index)


def _checked_shard(shard: Any, folder: Path, name: str, index: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    tables = shard["tables"] if isinstance(shard, dict) else None
    if not isinstance(tables, dict) or set(tables) != set(index["tables"]):
        raise ValueError(f"file {name} of checkpoint {folder} is damaged: its tables are not those of the index")
    for table, part in tables.items():
        _check_part(part, index["tables"][table], f"file {name} of checkpoint {folder} is damaged: table {table!r}")
    return tables


def _check_part(part: Any, table: Mapping[str, Any], what: str) -> None:
    if not isinstance(part, dict) or not all(isinstance(part.get(each), Tensor) for each in ("keys", "values")):
        raise ValueError(f"{what} has no keys and values")
    keys, values = part["keys"], part["values"]
    if keys.dtype != torch.int64 or values.dtype != torch.float32 or keys.dim() != 1:
        raise ValueError(f"{what} has keys of {keys.dtype} and values of {values.dtype}")
    if values.shape != (keys.numel(), table["columns"]):
        raise ValueError(f"{what} has values of shape {tuple(values.shape)} for {keys.numel()} keys")
    if keys.numel() and not 0 <= int(keys.min()) <= int(keys.max()) < table["rows"]:
        raise ValueError(f"{what} has keys from {int(keys.min())} to {int(keys.max())}, of {table['rows']} rows")
