"""Sharded checkpoints: each site writes the rows that it owns, and any number of sites can load them.

A folder has ``index.json`` with the names and digests of the files, ``<stamp>-rest.pt`` with the state that is not
managed, and a file ``<stamp>-site-i-of-n.safetensors`` for each site, with the tensors ``<table>.keys`` and
``<table>.values``. A save writes new files in addition to the old ones. When all sites have written and synced theirs,
``index.json`` is replaced, and only then the old files are removed. A save that fails or is killed leaves the previous
checkpoint unchanged; the next save removes its files. Sites may share the folder, or have one each on their own disks;
then site 0 has the index. Shards of dadplug 0.3, which `torch.save` has written, are read too.

All content is checked when it is read: names must be file names of this format, sizes in the index must fit the files,
and tensors must have the types and shapes of the index. Reading does not run code (no arbitrary pickles).

``python -m dadplug.adapm.join FOLDER WHOLE.pt`` joins the shards to whole tables.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..errors import DamagedError, SiteError, escaped
from ..exchange.fields import checked, invalid
from ..support.files import load_tensors, replacing, sync_folder
from ..support.refusals import refuse
from .managed_weight import split_state
from .model import AdaModel, parameter_numbers

INDEX = "index.json"
VERSION = 2
_OLD = ".pt"
_ENDINGS = {1: _OLD, VERSION: ".safetensors"}  # of the names of shards, by the version of the index
_PART = ".part"
_NAME = re.compile(r"([0-9a-f]{8})-(?:site-(\d{1,4})-of-(\d{1,4})\.(?:safetensors|pt)|rest\.pt|index\.json)")
_OLD_INDEX = re.compile(r"[0-9a-f]{8}\.part")  # an index of earlier versions
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_NUMBERS = 2**62
_FIELDS = {"rows": 1, "width": 1, "columns": 1, "place": 0, "steps": 0}  # of a table, with their minimum
_PARTS = ("keys", "values")  # of a table in a shard
_CHUNK = 65536  # rows set at a time
_KINDS: dict[str, type[Exception]] = {each.__name__: each for each in (FileNotFoundError, ValueError, DamagedError)}


def save_shards(model: AdaModel, folder: str | Path, optimizer: Optimizer) -> str:
    """Save a managed model and its optimizer into a folder; all sites must call it, between two steps.

    The previous checkpoint in the folder remains until all sites have written their files.

    Args:
        model: the model.
        folder: the folder; a checkpoint in it is replaced.
        optimizer: the optimizer that the model was created with.

    Returns:
        The stamp of this save, for `load_shards`.

    Raises:
        RuntimeError: on all sites, if one cannot write; the message names the site and the cause.
        SiteError: if a site exits or does not answer.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from dadplug.adapm import AdaModel, join_shards, load_shards, save_shards
        >>> model = torch.nn.Embedding(100, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = AdaModel(model, optimizer)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stamp = save_shards(model, folder, optimizer)
        ...     load_shards(model, folder, optimizer, stamp)
        ...     state = join_shards(folder)["model"]
        >>> state["weight"].shape
        torch.Size([100, 8])
        >>> model.manager.close()
    """
    save = ShardSave(model, folder, optimizer)
    stamp = save.write()
    save.commit()
    return stamp


class ShardSave:
    """Save in two phases, so that a file that refers to the shards can be written between them.

    After `write`, the folder has both checkpoints: the previous one, and the new one for loading by its stamp. `commit`
    makes the new one the checkpoint of the folder and removes the previous one. All sites must call all methods.

    Args:
        model: the model.
        folder: the folder.
        optimizer: the optimizer that the model was created with.

    Attributes:
        stamp: stamp of the save, set by `write`.
    """

    def __init__(self, model: AdaModel, folder: str | Path, optimizer: Optimizer) -> None:
        self.model, self.folder, self.optimizer = model, Path(folder), optimizer
        self._rank, self._sites = model.manager.rank, model.manager.world_size
        self.stamp = ""

    def write(self) -> str:
        """Write all files of the new checkpoint, and return its stamp.

        Raises:
            RuntimeError: on all sites, if one cannot write; the new files are removed.
            SiteError: if a site exits or does not answer.
        """
        manager = self.model.manager
        for weight in self.model.managed.values():
            weight.create_rows()
        manager.wait_sync(everywhere=True)
        self.stamp = manager.gather_objects(secrets.token_hex(4), str, "stamp")[0]
        if not is_shard_file(shard_name(self.stamp, 0, self._sites)):  # each site writes a file of that name
            raise invalid("stamp", manager.transport.sites[0], f"{self.stamp!r:.100} is none")
        names = [shard_name(self.stamp, site, self._sites) for site in range(self._sites)]
        tables = {}
        for name, weight in self.model.managed.items():
            keys, values = weight.table.owned()
            tables[name] = {"keys": keys, "values": values}
        complete = manager.gather_objects(self._complete(), list[str] | None, "list of stamps")[0]

        def write() -> str:
            new = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            for each in new:
                sync_folder(each.parent)
            if complete is not None:  # files of failed saves may fill the disk
                self._remove(lambda stamp: stamp not in (*complete, self.stamp))
            return write_shard(self.folder / names[self._rank], tables)

        def finish() -> None:
            if self._rank == 0:
                rest = f"{self.stamp}-rest.pt"
                index["rest"] = {rest: write_whole(self.folder / rest, state)}
                write_index(self.folder / pending_index(self.stamp), index)

        try:
            digests = on_all_sites(self.model, write, f"site {self._rank} cannot write its shard into {self.folder}")
            index: dict[str, Any] = {"version": VERSION, "tables": {}}
            index["files"] = dict(zip(names, digests, strict=True))
            state = _without_tables(self.model, index["tables"], self.optimizer)
            on_all_sites(self.model, finish, f"the index of {self.folder} cannot be written")
        except SiteError:
            raise  # it is not known whether that site had finished
        except Exception:
            self.abandon()
            raise
        return self.stamp

    def commit(self) -> None:
        """Make the new checkpoint that of the folder, and remove all other files of checkpoints.

        Raises:
            RuntimeError: on all sites, if the index cannot be replaced; both checkpoints remain.
            SiteError: if a site exits or does not answer.
        """

        def replace() -> None:
            if self._rank == 0:
                os.replace(self.folder / pending_index(self.stamp), self.folder / INDEX)
                sync_folder(self.folder)

        on_all_sites(self.model, replace, f"the index of {self.folder} cannot be replaced")
        self._remove(lambda stamp: stamp != self.stamp)

    def abandon(self) -> None:
        """Remove the new files; the previous checkpoint remains."""
        self._remove(lambda stamp: stamp == self.stamp)

    def _complete(self) -> list[str] | None:
        """Return the stamps of the complete checkpoints in the folder of site 0; None if the indexes cannot be read."""
        try:
            found = [stamp_of(path.name) for path in self.folder.glob(pending_index("*"))]
            if (self.folder / INDEX).is_file():
                index = check_index((self.folder / INDEX).read_bytes(), self.folder / INDEX)
                found += {stamp_of(name) for name in index["files"]}
        except (OSError, ValueError):
            return None
        return found

    def _remove(self, chosen: Callable[[str], bool]) -> None:
        """Remove files of saves with chosen stamps: site 0 removes all, other sites their shards."""
        with contextlib.suppress(OSError):  # remaining files only take space
            for path in self.folder.iterdir():
                is_own = self._rank == 0 or f"-site-{self._rank}-of-" in path.name
                if is_own and is_shard_file(path.name) and chosen(stamp_of(path.name)):
                    path.unlink(missing_ok=True)


def load_shards(model: AdaModel, folder: str | Path, optimizer: Optimizer, stamp: str | None = None) -> None:
    """Load a folder that `save_shards` has written, on any number of sites; all sites must call it.

    Each file is read by one site that has it.

    Args:
        model: the model.
        folder: the folder; that of site 0 must have the index.
        optimizer: the optimizer that the model was created with.
        stamp: stamp returned by `save_shards`, to load the files of that call only; None for the checkpoint of the
            folder.

    Raises:
        FileNotFoundError: on all sites, if the index is missing, or a shard on all sites.
        ValueError: on all sites, if a file is damaged, or belongs to another model, optimizer or save.
        RuntimeError: on all sites, if a file cannot be read.
    """
    folder = Path(folder)
    manager = model.manager
    index, state = _head_of_first(model, folder, stamp)
    weights = model.managed.items()
    here = {name: [weight.rows, weight.width, list(weight.row_optimizer.state_names)] for name, weight in weights}
    saved = {name: [table["rows"], table["width"], table["parts"]] for name, table in index["tables"].items()}
    if here != saved:
        raise ValueError(
            f"checkpoint {folder} holds tables of another model or optimizer: rows, width and state are {saved} there, "
            f"{here} here"
        )
    found = [name for name in index["files"] if (folder / name).is_file()]
    there = manager.gather_objects(found, list[str], "list of files")
    mine = []
    for number, name in enumerate(index["files"]):
        having = [site for site, files in enumerate(there) if name in files]
        if not having:
            raise FileNotFoundError(f"shard {name} of checkpoint {folder} is missing: no site has it")
        if having[number % len(having)] == manager.rank:
            mine.append(name)

    def read() -> dict[str, Any]:
        return {name: read_shard(folder, name, index) for name in mine}

    shards = on_all_sites(model, read, f"checkpoint {folder} cannot be read", own=True)
    own = {name: sum(shard[name]["keys"].numel() for shard in shards.values()) for name in index["tables"]}
    counts = manager.gather_objects(own, dict[str, int], "list of counts")
    for name, table in index["tables"].items():
        if (rows := sum(count.get(name, 0) for count in counts)) != table["rows"]:
            raise ValueError(f"checkpoint {folder} holds {rows} rows of {name}, of {table['rows']}")
    aliases = {alias for table in index["tables"].values() for alias in table["names"]}
    result = model.module.load_state_dict(state["model"], strict=False)
    if missing := [name for name in result.missing_keys if name not in aliases] + result.unexpected_keys:
        raise ValueError(f"checkpoint {folder} is of another model: it lacks, or has besides, {missing}")
    optimizer.load_state_dict(state["optimizer"])
    manager.wait_sync(everywhere=True)
    for shard in shards.values():
        for name, part in shard.items():
            for keys, values in zip(part["keys"].split(_CHUNK), part["values"].split(_CHUNK), strict=True):
                model.managed[name].table.set(keys, values)
    for name, table in index["tables"].items():
        model.managed[name].steps = table["steps"]
    manager.wait_sync(everywhere=True)


def join_shards(folder: str | Path, stamp: str | None = None) -> dict[str, Any]:
    """Join the shards in a folder to whole states, in one process.

    Args:
        folder: folder with all files of one `save_shards`.
        stamp: as for `load_shards`.

    Returns:
        The states ``"model"`` and ``"optimizer"`` of the plain model and its optimizer.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is damaged or belongs to another save, or rows are missing or occur twice.
    """
    folder = Path(folder)
    index_bytes, rest_bytes = read_head(folder, stamp)
    index, state = check_index(index_bytes, folder / INDEX), parse_rest(rest_bytes, folder)
    check_sizes(index, folder)
    whole = {name: torch.empty(table["rows"], table["columns"]) for name, table in index["tables"].items()}
    seen = {name: torch.zeros(table["rows"], dtype=torch.int64) for name, table in index["tables"].items()}
    for name in index["files"]:
        for table, part in read_shard(folder, name, index).items():
            whole[table][part["keys"]] = part["values"]
            seen[table].index_add_(0, part["keys"], torch.ones_like(part["keys"]))
    for name, count in seen.items():
        if wrong := int((count != 1).sum()):
            raise ValueError(f"checkpoint {folder} lacks rows of {name}, or has them twice: {wrong} of {len(count)}")
    for name, table in index["tables"].items():
        weights, rest = whole[name][:, : table["width"]], whole[name][:, table["width"] :]
        state["model"] |= dict.fromkeys(table["names"], weights.contiguous())
        if table["parts"]:
            steps = table["steps"] if table["counts_steps"] else None
            state["optimizer"]["state"][table["place"]] = split_state(rest, table["parts"], steps)
    return state


def _without_tables(model: AdaModel, tables: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the states without tables, and add the descriptions of the tables to `tables`."""
    state, given = dict(model.module.state_dict()), optimizer.state_dict()
    kept, place_of = dict(given["state"]), parameter_numbers(optimizer)
    named = list(model.module.named_parameters(remove_duplicate=False))
    for name, weight in model.managed.items():
        aliases = [alias for alias, parameter in named if parameter is weight.parameter]
        place = place_of[id(weight.parameter)]
        kept.pop(place, None)
        for alias in aliases:
            state.pop(alias, None)
        tables[name] = {
            "rows": weight.rows,
            "width": weight.width,
            "columns": weight.table.width,
            "names": aliases,
            "place": place,
            "parts": list(weight.row_optimizer.state_names),
            "counts_steps": weight.row_optimizer.counts_steps,
            "steps": weight.steps,
        }
    return {"model": state, "optimizer": given | {"state": kept}}


def _head_of_first(model: AdaModel, folder: Path, stamp: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the index and the state that is not managed, as read by site 0."""
    first = model.manager.rank == 0

    def read() -> tuple[bytes, bytes] | None:
        return read_head(folder, stamp) if first else None

    what = f"checkpoint {folder} cannot be read"
    content, rest = on_all_sites(model, read, what, own=True) or (b"", b"")
    content, rest = (model.manager.transport.broadcast_bytes(each) for each in (content, rest))
    found: tuple[dict[str, Any], dict[str, Any]] = on_all_sites(
        model, lambda: (check_index(content, folder / INDEX), parse_rest(rest, folder)), what, own=True
    )
    return found


def on_all_sites(model: AdaModel, action: Callable[[], Any], what: str, own: bool = False) -> Any:
    """Call a function on each site; an error on one site is raised on all.

    Args:
        model: the model.
        action: function that returns a value that JSON can hold.
        what: description of the failure, for the message.
        own: whether to return the result of this site only, which may then be any object.

    Returns:
        The results by site, or that of this site.

    Raises:
        FileNotFoundError: if a site raises it and `own` is true, with the same message.
        ValueError: likewise.
        RuntimeError: for all other errors; the message names the site and the cause.
        SiteError: if a site exits or does not answer.
    """
    result, error = None, None
    try:
        result = action()
    except SiteError:
        raise
    except Exception as caught:
        error = caught
    own_report = None if error is None else (type(error).__name__, f"{error}", what)
    reports = dict(enumerate(model.manager.gather_objects(own_report)))
    for site, report in checked(reports, tuple[str, str, str] | None, "report", model.manager.transport).items():
        if report is not None:
            kind, text, failed = map(escaped, report)
            if own and kind in _KINDS:
                raise _KINDS[kind](text) from error
            raise RuntimeError(f"{failed}, at site {site}: {kind}: {text}") from error
    return result if own else model.manager.gather_objects(result)


# Names of files


def pending_index(stamp: str) -> str:
    """Return the name of the index of a complete save that is not yet the checkpoint of the folder."""
    return f"{stamp}-{INDEX}"


def shard_name(stamp: str, site: int, sites: int, version: int = VERSION) -> str:
    """Return the name of a site's file."""
    return f"{stamp}-site-{site}-of-{sites}{_ENDINGS[version]}"


def stamp_of(name: str) -> str:
    """Return the stamp in the name of a file; empty if there is none."""
    found = _NAME.match(name)
    return "" if found is None else found[1]


def is_shard_file(name: str) -> bool:
    """Return whether a name is that of a file of a save, other than the index of the folder."""
    found = _OLD_INDEX.fullmatch(name) or _NAME.fullmatch(name.removesuffix(_PART))
    return found is not None or name == INDEX + _PART


# Writing


def write_whole(path: Path, item: Any) -> str:
    """Write an object to a file by `torch.save`, atomically, also in case of a crash; return the digest."""
    content = io.BytesIO()
    torch.save(item, content)
    return _write(path, content.getbuffer())


def write_shard(path: Path, tables: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Write ``"keys"`` and ``"values"`` of tables to a file, atomically, also in case of a crash; return the digest."""
    from safetensors.torch import save

    return _write(path, save({f"{name}.{part}": table[part] for name, table in tables.items() for part in _PARTS}))


def write_index(path: Path, index: Mapping[str, Any]) -> None:
    """Write an index atomically."""
    _write(path, json.dumps(index, indent=1).encode())


def _write(path: Path, content: bytes | memoryview) -> str:
    partial = path.with_name(path.name + _PART)
    with replacing(path, partial):
        partial.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


# Reading


def check_index(content: bytes, path: Path) -> dict[str, Any]:
    """Parse an index, and check all names and sizes in it.

    Raises:
        ValueError: if it does not have the format of `save_shards`.
    """
    try:
        index: dict[str, Any] = json.loads(content)
        version = index["version"]
        if version in _ENDINGS:
            _check_files(index)
            for name, table in index["tables"].items():
                _check_table(name, table)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if version not in _ENDINGS:
        raise ValueError(f"{path.parent} was written by another version of dadplug: format {version}, here {VERSION}")
    return index


def _check_files(index: Mapping[str, Any]) -> None:
    files, rest = index["files"], index["rest"]
    for name, digest in [*files.items(), *rest.items()]:
        refuse(
            (not _NAME.fullmatch(name), f"{name!r} is no name of a shard"),
            (not isinstance(digest, str) or not _DIGEST.fullmatch(digest), f"the digest of {name} is {digest!r}"),
        )
    stamps = {stamp_of(name) for name in (*files, *rest)}
    if len(stamps) != 1 or len(rest) != 1 or not files:
        raise ValueError(f"it names {len(files)} shards and {len(rest)} other files with {len(stamps)} stamps")
    (stamp,) = stamps
    shards = [shard_name(stamp, site, len(files), index["version"]) for site in range(len(files))]
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
    state = (folder / rest).read_bytes()
    _check_digest(hashlib.sha256(state), digest, f"file {rest} of checkpoint {folder}")
    return content, state


def _check_digest(found: Any, digest: str, what: str) -> None:
    if found.hexdigest() != digest:
        raise ValueError(f"{what} is damaged: it is not what was written")


def parse_rest(content: bytes, folder: Path) -> dict[str, Any]:
    """Parse the state that is not managed.

    Raises:
        ValueError: if it is damaged.
    """
    state = load_tensors(content, f"the file with what is not managed in {folder}", intact=True)
    try:
        fits = isinstance(state["model"], Mapping) and isinstance(state["optimizer"]["state"], Mapping)
    except (TypeError, KeyError, IndexError):
        fits = False
    if not fits:
        raise ValueError(f"the file with what is not managed in {folder} holds no states of a model and an optimizer")
    return dict(state)


def read_shard(folder: Path, name: str, index: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Map a shard into memory, and check it against the index.

    The whole file is read once for its digest, in pieces. Its tensors must not be written to.

    Returns:
        By table, ``"keys"`` of shape (n,) and ``"values"`` of shape (n, columns).

    Raises:
        ValueError: if it is damaged or does not fit.
    """
    path, what, digest = folder / name, f"file {name} of checkpoint {folder}", hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    _check_digest(digest, index["files"][name], what)
    if path.suffix == _OLD:
        shard = load_tensors(path, what, intact=True)
        tables = shard.get("tables") if isinstance(shard, dict) else None
    else:
        tables = _tables_of(path, what)
    if not isinstance(tables, dict) or set(tables) != set(index["tables"]):
        raise ValueError(f"{what} is damaged: its tables are not those of the index")
    for table, part in tables.items():
        _check_part(part, index["tables"][table], f"{what} is damaged: table {table!r}")
    return tables


def _tables_of(path: Path, what: str) -> dict[str, dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tables: dict[str, dict[str, Tensor]] = {}
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{what} is damaged: {error}") from error
    for name, tensor in tensors.items():
        table, _, part = name.rpartition(".")
        tables.setdefault(table, {})[part] = tensor
    return tables


def _check_part(part: Any, table: Mapping[str, Any], what: str) -> None:
    if not isinstance(part, dict) or not all(isinstance(part.get(each), Tensor) for each in _PARTS):
        raise ValueError(f"{what} has no keys and values")
    keys, values = part["keys"], part["values"]
    if keys.dtype != torch.int64 or values.dtype != torch.float32 or keys.dim() != 1:
        raise ValueError(f"{what} has keys of {keys.dtype} and values of {values.dtype}")
    if values.shape != (keys.numel(), table["columns"]):
        raise ValueError(f"{what} has values of shape {tuple(values.shape)} for {keys.numel()} keys")
    if keys.numel() and not 0 <= int(keys.min()) <= int(keys.max()) < table["rows"]:
        raise ValueError(f"{what} has keys from {int(keys.min())} to {int(keys.max())}, of {table['rows']} rows")
