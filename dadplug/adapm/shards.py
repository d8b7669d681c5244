"""Sharded checkpoints: each site writes the rows that it owns, and any number of sites can load them.

A folder has ``index.json`` with the names and digests of the files, ``<stamp>-rest.pt`` with the state that is not
managed, and a file ``<stamp>-site-i-of-n.pt`` for each site. A save writes new files in addition to the old ones.
When all sites have written and synced theirs, ``index.json`` is replaced, and only then the old files are removed. A
save that fails or is killed leaves the previous checkpoint unchanged; the next save removes its files. Sites may share
the folder, or have one each on their own disks; then site 0 has the index.

``python -m dadplug.adapm.join FOLDER WHOLE.pt`` joins the shards to whole tables.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ..errors import SiteError
from .model import AdaModel
from .model_state import parameter_numbers
from .shard_files import (
    INDEX,
    VERSION,
    check_index,
    check_sizes,
    is_shard_file,
    parse_rest,
    pending_index,
    read_head,
    read_index,
    read_shard,
    stamp_of,
    sync_folder,
    write_index,
    write_whole,
)

_CHUNK = 65536  # rows set at a time


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
            for keys in weight.home_keys(self._rank, self._sites):
                weight.table.pull(keys)  # creates the rows that have not been used
        manager.wait_sync(everywhere=True)
        self.stamp = str(manager.gather_objects(secrets.token_hex(4))[0])
        names = [f"{self.stamp}-site-{site}-of-{self._sites}.pt" for site in range(self._sites)]
        tables = {}
        for name, weight in self.model.managed.items():
            keys, values = weight.table.owned()
            tables[name] = {"keys": keys, "values": values}
        complete = manager.gather_objects(self._complete())[0]

        def write() -> str:
            _make_folder(self.folder)
            if complete is not None:
                self._remove([*complete, self.stamp])  # files of failed saves may fill the disk
            return write_whole(self.folder / names[self._rank], {"site": self._rank, "tables": tables})

        with self._cleared():
            what = f"site {self._rank} cannot write its shard into {self.folder}"
            digests = on_all_sites(self.model, write, what)
            index: dict[str, Any] = {"version": VERSION, "tables": {}}
            index["files"] = dict(zip(names, digests, strict=True))
            state = _without_tables(self.model, index["tables"], self.optimizer)

            def finish() -> None:
                if self._rank == 0:
                    rest = f"{self.stamp}-rest.pt"
                    index["rest"] = {rest: write_whole(self.folder / rest, state)}
                    write_index(self.folder / pending_index(self.stamp), index)

            on_all_sites(self.model, finish, f"the index of {self.folder} cannot be written")
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
        self._remove([self.stamp])

    def abandon(self) -> None:
        """Remove the new files; the previous checkpoint remains."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if is_shard_file(path.name) and stamp_of(path.name) == self.stamp and self._is_own(path.name):
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _cleared(self) -> Any:
        """Return a context that removes the new files after an error, unless a site is lost."""
        try:
            yield
        except SiteError:
            raise  # it is not known whether that site had finished
        except Exception:
            self.abandon()
            raise

    def _complete(self) -> list[str] | None:
        """Return the stamps of the complete checkpoints in the folder of site 0; None if the indexes cannot be read."""
        try:
            found = [stamp_of(path.name) for path in self.folder.glob(pending_index("*"))]
            if (self.folder / INDEX).is_file():
                found += {stamp_of(name) for name in read_index(self.folder / INDEX)["files"]}
        except (OSError, ValueError):
            return None
        return found

    def _is_own(self, name: str) -> bool:
        """Return whether this site removes a file: site 0 removes all, other sites their shards."""
        return self._rank == 0 or f"-site-{self._rank}-of-" in name

    def _remove(self, keep: Iterable[str]) -> None:
        """Remove files of checkpoints except those with some stamps, as far as the file system permits."""
        kept = {*keep}
        with contextlib.suppress(OSError):  # remaining files only take space
            for path in self.folder.iterdir():
                if is_shard_file(path.name) and stamp_of(path.name) not in kept and self._is_own(path.name):
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
    _compare(model, index["tables"], folder)
    there = manager.gather_objects([name for name in index["files"] if (folder / name).is_file()])
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
    counts = manager.gather_objects(
        {name: sum(shard[name]["keys"].numel() for shard in shards.values()) for name in index["tables"]}
    )
    for name, table in index["tables"].items():
        if (found := sum(count[name] for count in counts)) != table["rows"]:
            raise ValueError(f"checkpoint {folder} holds {found} rows of {name}, of {table['rows']}")
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
            parts = zip(table["parts"], rest.chunk(len(table["parts"]), 1), strict=True)
            own = {part: value.contiguous() for part, value in parts}
            step = {"step": torch.tensor(float(table["steps"]))} if table["counts_steps"] else {}
            state["optimizer"]["state"][table["place"]] = step | own
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


def _compare(model: AdaModel, tables: Mapping[str, Any], folder: Path) -> None:
    here = {
        name: [weight.rows, weight.width, list(weight.row_optimizer.state_names)]
        for name, weight in model.managed.items()
    }
    saved = {name: [table["rows"], table["width"], table["parts"]] for name, table in tables.items()}
    if here != saved:
        raise ValueError(
            f"checkpoint {folder} holds tables of another model or optimizer: rows, width and state are {saved} there, "
            f"{here} here"
        )


def _head_of_first(model: AdaModel, folder: Path, stamp: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the index and the state that is not managed, as read by site 0."""
    first = model.manager.rank == 0

    def read() -> tuple[bytes, bytes] | None:
        return read_head(folder, stamp) if first else None

    what = f"checkpoint {folder} cannot be read"
    content, rest = on_all_sites(model, read, what, own=True) or (b"", b"")
    content, rest = (model.manager.broadcast_bytes(each) for each in (content, rest))
    found: tuple[dict[str, Any], dict[str, Any]] = on_all_sites(
        model, lambda: (check_index(content, folder / INDEX), parse_rest(rest, folder)), what, own=True
    )
    return found


def _make_folder(folder: Path) -> None:
    made = [folder, *folder.parents]
    new = [each for each in made if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in new:
        sync_folder(each.parent)


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
    reports = model.manager.gather_objects(None if error is None else [type(error).__name__, f"{error}", what])
    for site, report in enumerate(reports):
        if report is not None:
            kind, text, failed = report
            if own and kind in _KINDS:
                raise _KINDS[kind](text) from error
            raise RuntimeError(f"{failed}, at site {site}: {kind}: {text}") from error
    return result if own else model.manager.gather_objects(result)


_KINDS: dict[str, type[Exception]] = {"FileNotFoundError": FileNotFoundError, "ValueError": ValueError}
