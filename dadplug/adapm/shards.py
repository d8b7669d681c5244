"""Sharded checkpoints: each site writes the rows that it owns, and any number of sites reads them.

A folder holds ``index.json``, which names the files and their digests, ``…-rest.pt`` with what is not managed, and a
file ``…-site-i-of-n.pt`` for each site. The index is replaced last, so that a folder that is written anew holds the one
or the other state whole. Sites may share the folder or have one each, on disks of their own: then site 0 has the index.

``python -m dadplug.adapm.join FOLDER WHOLE.pt`` joins them to whole tables.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from .model import AdaModel, places

_INDEX = "index.json"
_VERSION = 1
_CHUNK = 65536  # rows that are set at a time


def save_shards(model: AdaModel, folder: str | Path, optimizer: Optimizer) -> None:
    """Writes a managed model and its optimizer into a folder; all sites must call it, between two steps.

    Args:
        model: the model.
        folder: where to; an older checkpoint in it is replaced.
        optimizer: the optimizer that the model was made with.

    Raises:
        RuntimeError: on all sites, if one cannot write.
    """
    folder = Path(folder)
    manager = model.manager
    rank, sites = manager.rank, manager.world_size
    for weight in model.managed.values():
        for keys in weight.home_keys(rank, sites):
            weight.table.pull(keys)  # rows that nobody has used yet come to be
    manager.wait_sync(everywhere=True)
    stamp = manager.gather_objects(secrets.token_hex(4))[0]
    tables = {}
    for name, weight in model.managed.items():
        keys, values = weight.table.owned()
        tables[name] = {"keys": keys, "values": values}
    names = [f"{stamp}-site-{site}-of-{sites}.pt" for site in range(sites)]

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        return write_whole(folder / names[rank], {"site": rank, "tables": tables})

    digests = _everywhere(model, write, f"site {rank} cannot write its shard into {folder}")
    manager.barrier()
    rest = f"{stamp}-rest.pt"
    index: dict[str, Any] = {"version": _VERSION, "tables": {}, "files": dict(zip(names, digests, strict=True))}
    state = _without_tables(model, index["tables"], optimizer)

    def finish() -> None:
        if rank == 0:
            index["rest"] = {rest: write_whole(folder / rest, state)}
            partial = folder / f"{stamp}.part"
            partial.write_text(json.dumps(index, indent=1))
            os.replace(partial, folder / _INDEX)
        for old in folder.glob("*-site-*-of-*.pt") if rank == 0 else folder.glob(f"*-site-{rank}-of-*.pt"):
            if old.name not in names:
                old.unlink(missing_ok=True)
        for old in folder.glob("*-rest.pt"):
            if old.name != rest:
                old.unlink(missing_ok=True)

    _everywhere(model, finish, f"the index of {folder} cannot be written")


def load_shards(model: AdaModel, folder: str | Path, optimizer: Optimizer) -> None:
    """Loads a folder that `save_shards` has written, on any number of sites; all sites must call it.

    Each file is read by one site that has it.

    Args:
        model: the model.
        folder: the folder; site 0 must have the index in it.
        optimizer: the optimizer that the model was made with.

    Raises:
        FileNotFoundError: on all sites, if the index, or a file that no site has, is missing.
        ValueError: on all sites, if a file is damaged, or the tables are of another model or optimizer.
    """
    folder = Path(folder)
    manager = model.manager
    index, state = _everywhere(model, lambda: _head(folder) if manager.rank == 0 else (None, None))[0]
    there = manager.gather_objects({name for name in index["files"] if (folder / name).is_file()})
    mine = []
    for number, name in enumerate(index["files"]):
        having = [site for site, files in enumerate(there) if name in files]
        if not having:
            raise FileNotFoundError(f"shard {name} of checkpoint {folder} is missing: no site has it")
        if having[number % len(having)] == manager.rank:
            mine.append(name)
    _compare(model, index["tables"], folder)
    shards = _everywhere(model, lambda: {name: _read(folder, name, index["files"][name]) for name in mine}, own=True)
    counts = manager.gather_objects(
        {name: sum(shard["tables"][name]["keys"].numel() for shard in shards.values()) for name in index["tables"]}
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
        for name, part in shard["tables"].items():
            for keys, values in zip(part["keys"].split(_CHUNK), part["values"].split(_CHUNK), strict=True):
                model.managed[name].table.set(keys, values)
    for name, table in index["tables"].items():
        model.managed[name].steps = table["steps"]
    manager.wait_sync(everywhere=True)


def join_shards(folder: str | Path) -> dict[str, Any]:
    """Joins the shards in a folder to whole states, in one process.

    Args:
        folder: a folder with all files of one `save_shards`.

    Returns:
        ``"model"`` and ``"optimizer"``: states of the plain model and its optimizer.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is damaged, or rows are missing or double.
    """
    folder = Path(folder)
    index, state = _head(folder)
    whole = {name: torch.empty(table["rows"], table["columns"]) for name, table in index["tables"].items()}
    seen = {name: torch.zeros(table["rows"], dtype=torch.int64) for name, table in index["tables"].items()}
    for name, digest in index["files"].items():
        if not (folder / name).is_file():
            raise FileNotFoundError(f"shard {name} of checkpoint {folder} is missing")
        for table, part in _read(folder, name, digest)["tables"].items():
            whole[table][part["keys"]] = part["values"]
            seen[table][part["keys"]] += 1
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
    """Returns the states of what is not managed, and writes down what the tables are."""
    state, given = dict(model.module.state_dict()), optimizer.state_dict()
    kept, place_of = dict(given["state"]), places(optimizer)
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
            "parts": list(weight.rule.names),
            "counts_steps": weight.rule.counts_steps,
            "steps": weight.steps,
        }
    return {"model": state, "optimizer": given | {"state": kept}}


def _compare(model: AdaModel, tables: Mapping[str, Any], folder: Path) -> None:
    here = {name: [weight.rows, weight.width, list(weight.rule.names)] for name, weight in model.managed.items()}
    saved = {name: [table["rows"], table["width"], table["parts"]] for name, table in tables.items()}
    if here != saved:
        raise ValueError(
            f"checkpoint {folder} holds tables of another model or optimizer: rows, width and state are {saved} there, "
            f"{here} here"
        )


def _head(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the index and what is not managed."""
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(f"{folder} holds no {_INDEX}: it is no sharded checkpoint, or was never finished")
    try:
        index = json.loads((folder / _INDEX).read_text())
        ((rest, digest),) = index["rest"].items()
        version = index["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / _INDEX} is damaged: {error}") from error
    if version != _VERSION:
        raise ValueError(f"{folder} was written by another version of dadplug: format {version}, here {_VERSION}")
    if not (folder / rest).is_file():
        raise FileNotFoundError(f"file {rest} of checkpoint {folder} is missing")
    return index, _read(folder, rest, digest)


def write_whole(path: Path, item: Any) -> str:
    """Writes a file that is there whole or not at all; returns its digest."""
    content = io.BytesIO()
    torch.save(item, content)
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(content.getbuffer())
    os.replace(partial, path)
    return hashlib.sha256(content.getbuffer()).hexdigest()


def _read(folder: Path, name: str, digest: str) -> Any:
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"file {name} of checkpoint {folder} is damaged: it is not what was written")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _everywhere(model: AdaModel, action: Callable[[], Any], what: str = "", own: bool = False) -> Any:
    """Does something at each site; an error of one is one of all.

    Returns:
        The results by site, or the own one.
    """
    result, error = None, None
    try:
        result = action()
    except (OSError, ValueError) as caught:
        error = caught
    told = model.manager.gather_objects(None if error is None else (type(error).__name__, f"{error}"))
    for site, said in enumerate(told):
        if said is not None:
            kinds = {"FileNotFoundError": FileNotFoundError, "ValueError": ValueError}
            text = said[1] if said[0] in kinds else f"{what or 'reading failed'}, at site {site}: {said[1]}"
            raise kinds.get(said[0], RuntimeError)(text) from error
    return result if own else model.manager.gather_objects(result)
